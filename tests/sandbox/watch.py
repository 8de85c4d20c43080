"""Helpers that open a sandbox for one test, and watch the processes that it starts."""

from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from agentrl.sandbox import Sandbox

BACKENDS = ["bubblewrap", "landlock", pytest.param("unsafe_subprocess", marks=pytest.mark.slow)]


def open_box(backend: str, **options: object) -> Sandbox:
    return Sandbox(backend, **{"preload": (), "warm": 1, **options})  # type: ignore[arg-type]


async def enter(box: Sandbox) -> None:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        await box.__aenter__()


def named(name: str) -> str:
    """Return a program that never ends, with a name that the host can find."""
    return f"import ctypes, time\nctypes.CDLL(None).prctl(15, {name.encode()!r}, 0, 0, 0)\ntime.sleep(1000)"


def processes_called(name: str) -> int:
    count = 0
    for path in Path("/proc").glob("[0-9]*/comm"):
        try:
            count += path.read_text().strip() == name
        except OSError:
            continue
    return count


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a state that only the kernel knows."""
    with anyio.fail_after(120):
        while not condition():  # noqa: ASYNC110 - there is no event for it
            await anyio.sleep(0.01)
