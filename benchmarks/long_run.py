"""Memory of a run's processes over 400 rollouts of a tiny model.

    python -m benchmarks.long_run [--rollouts 400] [--max-staleness 2]

Prints the resident memory in MiB of driver, rollout worker, trainer and engine (all its processes) at each quarter of
the run, and the growth from the first to the last. It takes five to ten minutes.
"""

import argparse
import tempfile
from functools import partial
from pathlib import Path

import psutil

from tests.support.audit import audit_ledger
from tests.support.runs import Run, RunKit

ROLES = ("driver", "rollout_worker", "trainer", "engine")


def resident(pids: list[int]) -> float:
    """Return the MiB of these processes and of the children of parent watchdogs (engines run under one)."""
    found = [psutil.Process(pid) for pid in pids]
    guarded = [
        child
        for process in found
        if "parent_watchdog.py" in " ".join(process.cmdline())
        for child in process.children()
    ]
    return float(sum(process.memory_info().rss for process in found + guarded)) / 2**20


def reached(run: Run, rollouts: int) -> bool:
    return len(run.metrics()) >= rollouts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=400)
    parser.add_argument("--max-staleness", type=int, default=2)
    parser.add_argument("--partial-rollout", action="store_true")
    options = parser.parse_args()
    form = {"max_staleness": options.max_staleness, "partial_rollout": options.partial_rollout}
    with tempfile.TemporaryDirectory() as folder:
        # Each rollout has other prompts. Two epochs: more prompts than the first needs.
        kit = RunKit.make(Path(folder), prompts=2 * options.rollouts)
        run = kit.start(kit.arguments(num_rollout=options.rollouts, save_interval=50, keep_checkpoints=1, **form))
        print(f"{'rollouts':>8}" + "".join(f"{role:>16}" for role in ROLES), flush=True)
        rows = []
        for quarter in range(1, 5):
            # The last reading is shortly before the end, while all processes still run.
            wanted = quarter * options.rollouts // 4 - (2 if quarter == 4 else 0)
            run.until(partial(reached, run, wanted), timeout=1800)
            rows.append([resident(run.processes()[role]) for role in ROLES])
            print(f"{len(run.metrics()):>8}" + "".join(f"{mib:>16.0f}" for mib in rows[-1]), flush=True)
        growth = [last / first - 1 for first, last in zip(rows[0], rows[-1], strict=True)]
        print(f"{'growth':>8}" + "".join(f"{more:>16.1%}" for more in growth))
        code = run.wait()
        audit = audit_ledger(
            run.folder / "ledger.sqlite",
            through_step=options.rollouts - 1,
            groups_per_step=4,
            max_staleness=options.max_staleness,
        )
        print(f"exit {code}; ledger {'sound' if audit.ok else audit.problems}")
        if code or not audit.ok:
            raise SystemExit(1)


if __name__ == "__main__":
    main()
