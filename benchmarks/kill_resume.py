"""Kill a run's processes at random moments, resume, and audit the ledger.

    python -m benchmarks.kill_resume --moments 10
    python -m benchmarks.kill_resume --moments 10 --roles driver trainer rollout_worker --max-staleness 2 --partial-rollout

Each kill is `SIGKILL` at a random time of a 12-step run. The resumed run must end at the planned step. The
ledger must prove that every group was trained exactly once, and at most `--max-staleness` rollouts after its
own rollout. Trajectories have three turns and heavy-tailed waits, so that some are always in flight.
Prints one line for each kill and a summary. A kill takes about a minute.
"""

import argparse
import tempfile
from pathlib import Path

from tests.support.kills import kill_and_resume
from tests.support.runs import RunKit

STEPS = 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", type=int, default=10, help="kills a role")
    parser.add_argument("--first", type=int, default=0, help="number of the first moment")
    parser.add_argument("--roles", nargs="+", default=["driver", "trainer", "rollout_worker", "engine"])
    parser.add_argument("--max-staleness", type=int, default=0)
    parser.add_argument("--partial-rollout", action="store_true")
    parser.add_argument("--async-save", action="store_true")
    options = parser.parse_args()
    form = {name: getattr(options, name) for name in ("max_staleness", "partial_rollout", "async_save")}
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        kit = RunKit.make(Path(folder))
        for role in options.roles:
            for moment in range(options.first, options.first + options.moments):
                outcomes.append(kill_and_resume(kit, role, moment, steps=STEPS, **form))
                print(outcomes[-1], flush=True)
    sound = sum(outcome.ok for outcome in outcomes)
    print(f"{sound} of {len(outcomes)} kills: resumed to the planned step, every group trained exactly once")
    if sound < len(outcomes):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
