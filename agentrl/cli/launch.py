"""Which way a run goes: on Ray, or in this process."""

from contextlib import AbstractAsyncContextManager
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentrl.config import RunSettings
    from agentrl.run.parts import Announcer, Found, Parts, Start
    from agentrl.runfolder import RunFolder


def train(settings: "RunSettings") -> int:
    """Train as `--backend` says; returns the exit code.

    Raises:
        ModuleNotFoundError: Ray is asked for and not installed.
    """
    from agentrl.run.driver import train as drive

    start: Start = _local if settings.cluster.backend == "local" else _ray
    if start is _ray and find_spec("ray") is None:
        raise ModuleNotFoundError("No module named 'ray'", name="ray")
    return drive(settings, start)


# Both are slow to import, and what the driver looks at first needs neither.


def _ray(
    settings: "RunSettings", folder: "RunFolder", resume: "Found | None", progress: "Announcer"
) -> "AbstractAsyncContextManager[Parts]":
    from agentrl.cluster.placement import start

    return start(settings, folder, resume, progress)


def _local(
    settings: "RunSettings", folder: "RunFolder", resume: "Found | None", progress: "Announcer"
) -> "AbstractAsyncContextManager[Parts]":
    from agentrl.run.local import start

    return start(settings, folder, resume, progress)
