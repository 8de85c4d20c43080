"""`PauseGate`: the pause of generation, ways to wait for its end, and deadlines that do not run during it."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

import anyio


class PauseGate:
    """Open at first; `close` holds generating, `open` lets it go on."""

    def __init__(self) -> None:
        self.closed = False  # generating is held
        self._seconds = 0.0
        self._opened, self._between = anyio.Event(), anyio.Event()
        self._opened.set()
        self._left: dict[anyio.CancelScope, float] = {}

    def close(self, *, between_rollouts: bool = False) -> None:
        """Pause generating, for a weight update or until the next rollout; closing twice is harmless."""
        if between_rollouts:
            self._between.set()
        if not self.closed:
            self.closed, self._opened = True, anyio.Event()
            self._seconds -= time.monotonic()
            for scope in self._left:
                self._left[scope], scope.deadline = scope.deadline - anyio.current_time(), math.inf

    def open(self) -> None:
        """Let generating go on; opening twice is harmless."""
        if self.closed:
            self.closed = False
            if self._between.is_set():
                self._between = anyio.Event()
            self._seconds += time.monotonic()
            self._opened.set()
            for scope, seconds in self._left.items():
                scope.deadline = anyio.current_time() + seconds

    @property
    def seconds(self) -> float:
        """Return how long generation was paused so far, in seconds."""
        return self._seconds + (time.monotonic() if self.closed else 0.0)

    async def wait_between_rollouts(self) -> None:
        """Return when generating is held until the next rollout."""
        await self._between.wait()

    async def wait_open(self) -> None:
        """Return when generating may go on."""
        await self._opened.wait()

    @contextmanager
    def patience(self, seconds: float) -> Iterator[None]:
        """A deadline of `seconds` that runs only while generating is not held. Raises TimeoutError: it passed."""
        with anyio.fail_after(None) as scope:
            self._left[scope] = seconds
            scope.deadline = math.inf if self.closed else anyio.current_time() + seconds
            try:
                yield
            finally:
                del self._left[scope]
