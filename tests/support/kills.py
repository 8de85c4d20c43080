"""A run whose processes are killed or stopped at a random moment, and the conditions that must hold afterwards.

`kill_and_resume` ends one process for good; the same command starts the run again, which must reach its planned
end. `disturb_an_engine` kills or stops one of two engines, `kill_workers` kills several workers repeatedly: the run
must reach its planned end without a restart.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from tests.support.audit import LedgerAudit, audit_ledger
from tests.support.runs import WAITING, Run, RunKit
from tests.support.versions import log_prob_errors

GROUPS = 4
"""Groups of a batch in a `RunKit` run."""

PATIENCE = 600
"""Maximum seconds from a fault to the end of the run."""

Fault = Literal["kill", "kill the guard", "stop", "stop and continue"]
FAULTS: tuple[Fault, ...] = ("kill", "kill the guard", "stop", "stop and continue")

CHECKED = {
    "save_interval": 1,
    "ledger_retention": "always",
    "lr": 1e-2,  # so that the weights of any two versions differ measurably
}
"""Settings of a run whose tokens' versions can be checked afterwards."""

IMPATIENT = {"engine_probe_interval": 0.5, "engine_hang_timeout": 5}
"""Settings for tiny engines: an engine without an answer for seconds counts as hung."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one disturbed run: a summary line, and what contradicts the contract."""

    seen: str
    problems: Sequence[str]

    @property
    def ok(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        return f"{self.seen}: {'; '.join(self.problems) or 'sound'}"


def kill_and_resume(kit: RunKit, role: str, moment: int, *, steps: int, **form: object) -> Outcome:
    """Send `SIGKILL` to the first process of `role` at random moment number `moment`, then run the same command again.

    Args:
        form: settings of the run by flat name, such as `max_staleness`.
    """
    rng = random.Random(f"{role}/{moment}")
    save_interval = rng.choice([1, 2, 5])
    changes = {**WAITING, "num_rollout": steps, "save_interval": save_interval, **form}
    arguments = kit.arguments(f"{role}-{moment}", **changes)
    run, problems = kit.start(arguments), list[str]()
    at = _random_moment(run, rng, steps)
    alive = run.process.poll() is None and run.kill(role)
    code = _ended(kit, run, problems)
    if code and not alive:
        problems.append(f"it ended by itself: {run.output[-2000:]}")
    again = kit.start(arguments)
    if _ended(kit, again, problems) != 0:
        problems.append(f"the resumed run did not end well: {again.output[-2000:]}")
    result = _audit(run, steps, form, problems)
    seen = f"{role} killed after step {at} (exit {code}, a checkpoint every {save_interval}), {_counts(result)}"
    return Outcome(seen, problems)


def disturb_an_engine(
    kit: RunKit,
    moment: int,
    *,
    steps: int,
    fault: Fault | None = None,
    engines: int = 2,
    pause: float | None = None,
    **form: Any,
) -> Outcome:
    """Kill or stop one of the engines at random moment number `moment`, and check every trained token's version.

    The samples are kept, and a checkpoint is written every step. So the log-probs that engines reported for a version's
    tokens can be compared with those of the version's weights.

    Args:
        fault: the kind; drawn with the moment by default.
        pause: seconds from a stop to its end; drawn with the moment by default.
        form: settings of the run by flat name, such as `max_staleness`.
    """
    rng = random.Random(f"engine/{moment}")
    drawn, victim, seconds = rng.choice(FAULTS), rng.randrange(engines), rng.uniform(0.5, 8)
    fault, pause = fault or drawn, pause or seconds
    changes = {**WAITING, **CHECKED, **IMPATIENT, "num_rollout": steps, "rollout_num_gpus": engines, **form}
    name = f"engines-{engines}-{moment}-{fault}-{form.get('update_weight_mode', '')}".replace(" ", "-")
    run = kit.start(kit.arguments(name, **changes))
    at, problems = _random_moment(run, rng, steps), list[str]()
    if run.process.poll() is None:
        _disturb(run.processes()["engine"][victim], fault, pause)
    if (code := _ended(kit, run, problems)) != 0:
        problems.append(f"it ended with status {code}: {run.output[-2000:]}")
    result = _audit(run, steps, form, problems)
    checked = _check_versions(kit, run, problems) if code == 0 else "no tokens checked"
    seen = f"engine {victim}: {fault}{f' {pause:.1f} s later' if fault == 'stop and continue' else ''} after step {at}"
    return Outcome(f"{seen}, {_counts(result)}, {checked}", problems)


def kill_workers(kit: RunKit, moment: int, *, steps: int, kills: int, workers: int = 2, **form: Any) -> Outcome:
    """Kill random rollout workers of one run, `kills` times, and check every trained token's version. A kill comes at a
    random moment after a step, so that the run makes progress between kills.

    Args:
        form: settings of the run by flat name, such as `max_staleness`.
    """
    rng, problems, done = random.Random(f"workers/{moment}"), list[str](), 0
    changes = {**WAITING, **CHECKED, "num_rollout": steps, "rollout_workers": workers, **form}
    run = kit.start(kit.arguments(f"workers-{workers}-{moment}", **changes))
    while done < kills and run.process.poll() is None:
        rows = len(run.metrics())
        run.until(lambda: run.process.poll() is not None or len(run.metrics()) > rows)  # noqa: B023 - called at once
        time.sleep(rng.uniform(0, 3))  # the random moment is the injected fault
        if found := _workers_in(kit.folder):
            done += _killed(rng.choice(found))
    if (code := _ended(kit, run, problems)) != 0:
        problems.append(f"it ended with status {code}: {run.output[-2000:]}")
    result = _audit(run, steps, form, problems)
    checked = _check_versions(kit, run, problems) if code == 0 else "no tokens checked"
    return Outcome(f"{done} kills of {workers} workers, {_counts(result)}, {checked}", problems)


def _workers_in(folder: Path) -> list[psutil.Process]:
    """Return rollout workers that have entered `folder`, in an order that does not depend on the process ids."""
    found = [p for p in psutil.process_iter(["name"]) if p.info["name"].startswith("ray::WorkerActo")]
    return sorted((p for p in found if _works_in(p, folder)), key=lambda p: p.create_time())


def _killed(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        process.kill()
        return True
    return False


def _check_versions(kit: RunKit, run: Run, problems: list[str]) -> str:
    errors = log_prob_errors(run.folder, kit.folder / "model")
    if errors.wrong:
        problems.append(f"{errors.wrong} tokens are not of their version, off by up to {errors.worst:.2g}")
    return f"{errors.tokens} tokens of {errors.versions} versions checked"


def _random_moment(run: Run, rng: random.Random, steps: int) -> int:
    """Wait for a random moment of the run, or its end. Returns the number of finished steps."""
    target = rng.randrange(steps)
    run.until(lambda: run.process.poll() is not None or (run.processes() and len(run.metrics()) >= target))
    assert run.processes(), f"the run did not even start:\n{run.output}"
    time.sleep(rng.uniform(0, 1.0))  # the random moment is the injected fault
    return len(run.metrics())


def _ended(kit: RunKit, run: Run, problems: list[str]) -> int | None:
    """Return the run's exit status, or None after a timeout. A timeout is a problem, as are processes left running."""
    code = None
    try:
        code = run.process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        problems.append(f"not at its end after {PATIENCE} s: {run.output[-2000:]}")
        run.end()
    if left := _left_in(kit.folder):
        problems.append(f"left running: {', '.join(left)}")
    return code


def _left_in(folder: Path, patience: float = 20) -> list[str]:
    """Return processes that still work in `folder` after `patience` seconds, restarted engines included."""
    found = [process for process in psutil.process_iter() if _works_in(process, folder)]
    _, alive = psutil.wait_procs(found, timeout=patience)
    return [f"{p.pid} {p.name()}" for p in alive if p.status() != psutil.STATUS_ZOMBIE]


def _works_in(process: psutil.Process, folder: Path) -> bool:
    try:
        # Ray's own agents take up to a minute to notice that their node has died.
        return process.cwd() == str(folder.resolve()) and not process.name().endswith("Agent")
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def _disturb(guard: int, fault: Fault, pause: float) -> None:
    """Apply the fault to all processes of the engine whose guard has this process id."""
    if fault == "kill the guard":
        os.kill(guard, signal.SIGKILL)
        return
    if fault == "kill":
        _signal_group(guard, signal.SIGKILL)
        return
    _signal_group(guard, signal.SIGSTOP)
    if fault == "stop and continue":
        time.sleep(pause)
        _signal_group(guard, signal.SIGCONT)


def _signal_group(guard: int, number: signal.Signals) -> None:
    try:
        os.killpg(guard, number)  # every guard leads its own session
    except ProcessLookupError:
        return


def _audit(run: Run, steps: int, form: dict[str, object], problems: list[str]) -> LedgerAudit:
    bound = form.get("max_staleness") or 0
    assert isinstance(bound, int)
    result = audit_ledger(
        run.folder / "ledger.sqlite", through_step=steps - 1, groups_per_step=GROUPS, max_staleness=bound
    )
    problems += result.problems
    if (rows := len([row for row in run.metrics() if "train/loss" in row])) != steps:
        problems.append(f"{rows} steps are in the metrics, expected {steps}")
    return result


def _counts(result: LedgerAudit) -> str:
    dropped = f", dropped {result.dropped_for}" if result.dropped_for else ""
    again = f", {result.too_old} too old" if result.too_old else ""
    return (
        f"trained {sum(result.trained_by_step.values())} groups, {result.undone} trainings undone by recovery"
        f"{again}{dropped}"
    )
