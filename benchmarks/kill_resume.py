"""Kill a run's driver, trainer and engine at random moments, resume, and audit the ledger.

    python -m benchmarks.kill_resume --moments 10

Each kill is `SIGKILL` at a random time of a 12-step run; the resumed run must end at the planned step, and the
ledger must prove that every group was trained exactly once. Prints one line a kill and a summary.
"""

import argparse
import random
import tempfile
import time
from pathlib import Path

from tests.support.audit import audit_ledger
from tests.support.runs import RunKit, still_running

STEPS = 12


def one(kit: RunKit, role: str, moment: int) -> bool:
    rng = random.Random(f"{role}/{moment}")
    arguments = kit.arguments(f"{role}-{moment}", num_rollout=STEPS, save_interval=rng.choice([1, 2, 5]))
    run = kit.start(arguments)
    target = rng.randrange(STEPS)
    run.until(lambda: run.processes() and len(run.metrics()) >= target)
    time.sleep(rng.uniform(0, 1.0))
    at = len(run.metrics())
    processes = run.processes()
    if run.process.poll() is None:
        run.kill(role)
    code = run.wait(180)
    left = still_running(processes)
    again = kit.start(arguments)
    resumed = again.wait(240)
    result = audit_ledger(run.folder / "ledger.sqlite", through_step=STEPS - 1, groups_per_step=4)
    ok = resumed == 0 and result.ok and not left and len(again.metrics()) == STEPS
    print(
        f"{role:8s} killed after step {at:2d} (exit {code:4d}), resumed {'to the end' if resumed == 0 else 'FAILED'}; "
        f"trained {sum(result.trained_by_step.values())} groups, {result.undone} trainings undone by recovery, "
        f"{'sound' if result.ok else result.problems}{f', left running {left}' if left else ''}",
        flush=True,
    )
    return ok


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", type=int, default=10, help="kills a role")
    parser.add_argument("--roles", nargs="+", default=["driver", "trainer", "engine"])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        kit = RunKit.make(Path(folder))
        outcomes = [one(kit, role, moment) for role in options.roles for moment in range(options.moments)]
    print(f"{sum(outcomes)} of {len(outcomes)} kills: resumed to the planned step, every group trained exactly once")
    if not all(outcomes):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
