"""A deadline that stands still while work waits for a free place.

1. `work_clock(scope)` makes `scope`'s deadline the one that the code inside works against.
2. `waiting(place)` enters `place` (a semaphore, a limiter) with that deadline stopped: a tool that is in demand is not
   a slow environment. Waits side by side stop it together.
"""

import math
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from contextvars import ContextVar
from typing import Any

import anyio


class _Clock:
    def __init__(self, scope: anyio.CancelScope) -> None:
        self._scope = scope
        self._waits = 0
        self._left = 0.0

    def stop(self) -> None:
        if not self._waits:
            self._left = self._scope.deadline - anyio.current_time()
            self._scope.deadline = math.inf
        self._waits += 1

    def go(self) -> None:
        self._waits -= 1
        if not self._waits:
            self._scope.deadline = anyio.current_time() + self._left


_CLOCK: ContextVar[_Clock | None] = ContextVar("agentrl_work_clock", default=None)


@contextmanager
def work_clock(scope: anyio.CancelScope) -> Iterator[None]:
    """Let `waiting` inside stop the deadline of `scope`."""
    token = _CLOCK.set(_Clock(scope))
    try:
        yield
    finally:
        _CLOCK.reset(token)


@asynccontextmanager
async def waiting(place: AbstractAsyncContextManager[Any]) -> AsyncIterator[None]:
    """Enter `place`; the wait for it does not count as work."""
    clock = _CLOCK.get()
    if clock is not None:
        clock.stop()
    try:
        await place.__aenter__()
    finally:
        if clock is not None:
            clock.go()
    try:
        yield
    finally:
        await place.__aexit__(None, None, None)
