"""Tests of deadlines in which waiting takes no time and a busy machine changes nothing.

The event loop's clock stands still while anything can run, and jumps to the next timer when nothing can. So code that runs
costs no time however slow the machine is, and `sleep(60)` ends at once, after everything that comes before it.
For code on the event loop alone: what happens in threads, processes or sockets has no place in that order.
"""

from __future__ import annotations

import asyncio
import functools
import selectors
import time
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

import pytest

P = ParamSpec("P")


class _Jumping(selectors.DefaultSelector):
    """A selector that never waits for a timer; `now` is the time by the timers that have come due."""

    now = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            return super().select(None)
        ready = super().select(0)
        if not ready and timeout > 0:
            self.now += timeout
        return ready


def virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run an async test on a loop of its own whose time is virtual, `time.monotonic` included."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        selector = _Jumping()

        def make() -> asyncio.AbstractEventLoop:
            loop = asyncio.SelectorEventLoop(selector)
            loop.time = lambda: selector.now  # type: ignore[method-assign]
            return loop

        with asyncio.Runner(loop_factory=make) as runner, pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "monotonic", lambda: selector.now)
            patch.setattr(time, "perf_counter", lambda: selector.now)
            runner.run(test(*args, **kwargs))

    return run
