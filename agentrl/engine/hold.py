"""A gate for requests: closed while nothing may be sampled, with clocks that stand still meanwhile."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

import anyio


class Hold:
    """Open at first; whoever owns it closes and opens it, anybody may wait for either."""

    def __init__(self) -> None:
        self.closed = False
        self._seconds = 0.0
        self._changed = anyio.Event()
        self._left: dict[anyio.CancelScope, float] = {}

    @property
    def seconds(self) -> float:
        """How long it was closed so far, in seconds."""
        return self._seconds + (time.monotonic() if self.closed else 0.0)

    async def wait_closed(self) -> None:
        """Return once it is closed; at once if it is."""
        while not self.closed:
            await self._changed.wait()

    async def wait_open(self) -> None:
        """Return once it is open; at once if it is."""
        while self.closed:
            await self._changed.wait()

    def close(self) -> None:
        """Nothing may be sampled from now on, and deadlines stand still."""
        if not self.closed:
            self._turn(True)
            now = anyio.current_time()
            for scope in self._left:
                self._left[scope], scope.deadline = scope.deadline - now, math.inf

    def open(self) -> None:
        """Sampling may go on, and so do deadlines."""
        if self.closed:
            self._turn(False)
            for scope, seconds in self._left.items():
                scope.deadline = anyio.current_time() + seconds

    @contextmanager
    def patience(self, seconds: float) -> Iterator[None]:
        """A deadline of `seconds` that runs only while this is open.

        Raises:
            TimeoutError: it passed.
        """
        with anyio.fail_after(None) as scope:
            self._left[scope] = seconds
            scope.deadline = math.inf if self.closed else anyio.current_time() + seconds
            try:
                yield
            finally:
                del self._left[scope]

    def _turn(self, closed: bool) -> None:
        self._seconds += -time.monotonic() if closed else time.monotonic()
        self.closed, changed, self._changed = closed, self._changed, anyio.Event()
        changed.set()
