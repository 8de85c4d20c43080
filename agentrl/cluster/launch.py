"""Which way a run goes: on Ray, or in this process."""

from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentrl.config import RunSettings
    from agentrl.run.protocols import Components, Found, Progress
    from agentrl.runfolder import RunFolder


def train(settings: "RunSettings") -> int:
    """Train as `--backend` says; returns the exit code. Raises ModuleNotFoundError: Ray is asked for and not
    installed."""
    from agentrl.run.driver import train as drive

    return drive(settings, _start)


def _start(
    settings: "RunSettings", folder: "RunFolder", resume: "Found | None", progress: "Progress"
) -> "AbstractAsyncContextManager[Components]":
    # Both are slow to import, and what the driver looks at first needs neither.
    if settings.cluster.backend == "local":
        from agentrl.run.local import start
    else:
        from agentrl.cluster.placement import start
    return start(settings, folder, resume, progress)
