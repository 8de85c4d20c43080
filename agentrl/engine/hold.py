"""`Hold`: whether generating is held, for those who have to wait for either."""

import time

import anyio


class Hold:
    """Open at first; `close` holds generating, `open` lets it go on.

    Attributes:
        closed: generating is held.
    """

    def __init__(self) -> None:
        self.closed = False
        self._seconds = 0.0
        self._opened, self._closed = anyio.Event(), anyio.Event()
        self._opened.set()

    def close(self) -> None:
        """Hold generating; closing twice is harmless."""
        if not self.closed:
            self.closed, self._opened = True, anyio.Event()
            self._seconds -= time.monotonic()
            self._closed.set()

    def open(self) -> None:
        """Let generating go on; opening twice is harmless."""
        if self.closed:
            self.closed, self._closed = False, anyio.Event()
            self._seconds += time.monotonic()
            self._opened.set()

    @property
    def seconds(self) -> float:
        """How long generating was held so far, in seconds."""
        return self._seconds + (time.monotonic() if self.closed else 0.0)

    async def wait_closed(self) -> None:
        """Return when generating is held."""
        await self._closed.wait()

    async def wait_open(self) -> None:
        """Return when generating may go on."""
        await self._opened.wait()
