"""Entry points of a run, on Ray or in this process."""

from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentrl.config import RunSettings
    from agentrl.run.protocols import Components, Found, Progress
    from agentrl.run.rollouts import OpenWorkers
    from agentrl.runfolder import RunFolder


def train(settings: "RunSettings") -> int:
    """Train as `--backend` says; returns the exit code. Raises ModuleNotFoundError: Ray is not installed."""
    from agentrl.run.driver import train as drive

    return drive(settings, _start)


def workers_of(settings: "RunSettings") -> "OpenWorkers | None":
    """Return the function that starts the run's rollout workers; None if the coordinator's process generates."""
    if settings.cluster.rollout_workers == 1:
        return None
    from agentrl.cluster.workers import open_workers

    return open_workers


def _start(
    settings: "RunSettings", folder: "RunFolder", resume: "Found | None", progress: "Progress"
) -> "AbstractAsyncContextManager[Components]":
    # Both imports are slow, and the driver's first checks need neither.
    if settings.cluster.backend == "local":
        from agentrl.run.local import start
    else:
        from agentrl.cluster.placement import start
    return start(settings, folder, resume, progress)
