"""Tests of deadlines in which waiting takes no time and a busy machine has no effect.

The event loop's clock does not advance while any task can run, and jumps to the next timer if none can. So running code
costs no time on any machine, and `sleep(60)` ends at once, after everything that is scheduled before it.
This is only for code on the event loop: events in threads, processes or sockets have no place in that order.
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
    """A selector that never waits for a timer; `now` is the time of the last timer that came due."""

    now = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            return super().select(None)
        ready = super().select(0)
        if not ready and timeout > 0:
            self.now += timeout
        return ready


def virtual_time(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run an async test on a separate loop with virtual time, `time.monotonic` included."""

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
