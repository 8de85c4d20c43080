"""Kill or stop a built-in engine at random moments of a run. The run must end as planned with every token right.

    python -m benchmarks.engine_faults --moments 20 --max-staleness 1
    python -m benchmarks.engine_faults --moments 20 --engines 1 --fault kill "kill the guard"
    python -m benchmarks.engine_faults --moments 20 --engines 1 --fault "stop and continue" --pause 60

At a random time of a 12-step run one engine is killed, stopped (`SIGSTOP`), or stopped and continued (`SIGCONT`).
`SIGKILL` goes to all its processes, or to its parent process alone. The run must reach the planned step without a
restart. The ledger must prove that no group was lost and each was trained once. Each trained token's log-prob must be
that of the weight version that the engine named, computed again from its checkpoint. Prints a line a moment and a
summary. A moment takes about a minute.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from tests.support.kills import FAULTS, disturb_an_engine
from tests.support.runs import RunKit

STEPS = 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="number of the first moment")
    parser.add_argument("--max-staleness", type=int, default=1)
    parser.add_argument("--partial-rollout", action="store_true")
    parser.add_argument("--update-weight-mode", choices=["broadcast", "disk"], default="broadcast")
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--fault", choices=FAULTS, nargs="+", default=FAULTS, help="in turn; default: all")
    parser.add_argument("--pause", type=float, help="seconds from a stop to its end; default: drawn from 0.5 to 8")
    options = parser.parse_args()
    form: dict[str, Any] = {
        name: getattr(options, name) for name in ("max_staleness", "partial_rollout", "update_weight_mode")
    }
    form |= {"engines": options.engines, "pause": options.pause}
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        kit = RunKit.make(Path(folder))
        for moment in range(options.first, options.first + options.moments):
            fault = options.fault[moment % len(options.fault)]
            outcomes.append(disturb_an_engine(kit, moment, steps=STEPS, fault=fault, **form))
            print(outcomes[-1], flush=True)
    sound = sum(outcome.ok for outcome in outcomes)
    print(f"{sound} of {len(outcomes)} moments: ended as planned, no group lost, no token of a wrong version trained")
    if sound < len(outcomes):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
