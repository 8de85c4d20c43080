"""Kill random rollout workers of running runs: each run must end as planned with nothing lost or trained twice.

    python -m benchmarks.worker_kills --runs 8 --kills 25

A run has `--workers` workers in separate processes. `SIGKILL` ends a random one at a random time after a step, until
`--kills` are done or the run ends. The run must reach the planned step without a restart. The ledger must prove that
each group was trained once. Each trained token's log-prob must be that of the version that the engine named.
"""

import argparse
import tempfile
from pathlib import Path

from tests.support.kills import kill_workers
from tests.support.runs import RunKit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=8)
    parser.add_argument("--first", type=int, default=0, help="number of the first run")
    parser.add_argument("--kills", type=int, default=25, help="in a run")
    parser.add_argument("--steps", type=int, default=40, help="of a run")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--max-staleness", type=int, default=1)
    options = parser.parse_args()
    outcomes = []
    form = {"workers": options.workers, "max_staleness": options.max_staleness, "partial_rollout": True}
    with tempfile.TemporaryDirectory() as folder:
        kit = RunKit.make(Path(folder))
        for moment in range(options.first, options.first + options.runs):
            outcomes.append(kill_workers(kit, moment, steps=options.steps, kills=options.kills, **form))
            print(outcomes[-1], flush=True)
    sound = sum(outcome.ok for outcome in outcomes)
    print(f"{sound} of {len(outcomes)} runs: ended as planned, no group lost, no token of a wrong version trained")
    if sound < len(outcomes):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
