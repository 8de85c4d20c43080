"""`PauseGate`: the pause of generation, ways to wait for its end, and deadlines that do not run during it."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

import anyio


class PauseGate:
    """The gate of generation, open at first: `close` pauses generation, `open` resumes it."""

    def __init__(self) -> None:
        self.closed = False  # generation is paused
        self._seconds = 0.0
        self._opened, self._between = anyio.Event(), anyio.Event()
        self._opened.set()
        self._left: dict[anyio.CancelScope, float] = {}

    def close(self, *, between_rollouts: bool = False) -> None:
        """Pause generation, for a weight update or until the next rollout. Closing twice is harmless."""
        if between_rollouts:
            self._between.set()
        if not self.closed:
            self.closed, self._opened = True, anyio.Event()
            self._seconds -= time.monotonic()
            for scope in self._left:
                self._left[scope], scope.deadline = scope.deadline - anyio.current_time(), math.inf

    def open(self) -> None:
        """Resume generation. Opening twice is harmless."""
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
        """Total time, in seconds, that generation was paused so far."""
        return self._seconds + (time.monotonic() if self.closed else 0.0)

    async def wait_between_rollouts(self) -> None:
        """Wait for a pause that lasts until the next rollout."""
        await self._between.wait()

    async def wait_open(self) -> None:
        """Wait until generation may continue."""
        await self._opened.wait()

    @contextmanager
    def patience(self, seconds: float) -> Iterator[None]:
        """Set a deadline of `seconds` that runs only while generation is not paused. Raises TimeoutError: it passed."""
        with anyio.CancelScope() as scope:
            self._left[scope] = seconds
            scope.deadline = math.inf if self.closed else anyio.current_time() + seconds
            try:
                yield
            finally:
                del self._left[scope]
        if scope.cancelled_caught:
            raise TimeoutError


class FixedModel:
    """A model with weights that the run does not change. Its requests wait while `pause_gate` is closed."""

    pause_gate: PauseGate

    async def pause(self) -> None:
        """Send no requests until `resume`. Requests in flight finish."""
        self.pause_gate.close(between_rollouts=True)

    async def resume(self) -> None:
        """Send requests again."""
        self.pause_gate.open()

    def updated(self, version: int) -> None:
        """Do nothing: no request gets tokens of a new version."""
