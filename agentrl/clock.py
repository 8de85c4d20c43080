"""The time that user code has: deadlines that count only what a call could help, and a watchdog for the event loop.

1. A deadline does not run while the event loop stands still for somebody else, while the call waits for a free place
   (`waiting`), or while generating is held.
2. Code that blocks the event loop meets no point at which it could be cancelled: that it was too long shows when it
   returns. Its deadline, and those around it, do run meanwhile.
3. `Watchdog` asks the loop for a beat, from a thread. While the answer is late it looks at the loop's stack: whose call
   it is and where; so nothing is paid per await. Without a watchdog the loop is taken never to stand still.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import sysconfig
import threading
import time
from asyncio.events import Handle
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any, Final

import anyio
from anyio.lowlevel import RunVar

from agentrl.errors import Place

BEAT: Final = 0.05
"""Seconds between two beats of the loop; shorter halts than this are not noticed."""

_PATHS = sysconfig.get_paths()
_LIBRARIES = ("<frozen", *(_PATHS[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")))
_UNSEEN = "native code that holds the GIL, or a machine that was asleep"
_log = logging.getLogger(__name__)


class Deadline:
    """One call of user code and the time it has; made by `limited`.

    Attributes:
        what: whose code it is.
        place: of which trajectory; by default that of the call around it.
        outer: the call around it.
    """

    def __init__(
        self, what: str, seconds: float, place: Place | None, work_only: bool, held: Callable[[], float]
    ) -> None:
        self.what, self.seconds, self.work_only = what, seconds, work_only
        self.outer = _CALL.get()
        self.place: Place | None = place or (self.outer.place if self.outer else None)
        self._blocked, self._seen, self._where = 0.0, 0.0, ""
        self.scope = anyio.CancelScope()
        self._watchdog, self._held = _WATCHDOG.get(), held
        self._waits, self._waited = 0, 0.0
        self._began = time.monotonic() - self._excused
        self._timer: asyncio.TimerHandle | None = None
        self._arm(seconds)

    @property
    def blocked(self) -> float:
        """Seconds for which the call itself has stopped the loop, as far as the watchdog saw it."""
        now = self._watchdog is not None and self._seen > self._watchdog.heard
        return self._blocked + (time.monotonic() - self._seen if now else 0.0)

    def blocks(self, seconds: float, where: str) -> None:
        """The watchdog has seen that the call, or one inside, stops the loop at `where`, for `seconds` more."""
        self._blocked, self._seen, self._where = self._blocked + seconds, time.monotonic(), where
        if self.outer is not None:
            self.outer.blocks(seconds, where)

    @property
    def overdue(self) -> bool:
        """Whether the call was cut off, or has blocked the loop until it was too late."""
        return self.scope.cancelled_caught or (self.blocked > 0 and self._left < 0)

    @property
    def verdict(self) -> str:
        """What to say of a call that is overdue."""
        text = f"{self.what} took longer than {self.seconds:g} s"
        if not self._where:
            return text
        return f"{text}: it blocked the event loop for {self.blocked:.1f} s at {self._where}; run that in a thread"

    @property
    def _excused(self) -> float:
        """Seconds since ever that are not the call's."""
        lost = self._watchdog.lost if self._watchdog else 0.0
        return lost - self.blocked + self._waited + self._held()

    @property
    def _left(self) -> float:
        return self.seconds - (time.monotonic() - self._began - self._excused)

    def _arm(self, seconds: float) -> None:
        if seconds < math.inf:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._ring)

    def _ring(self) -> None:
        if (left := self._left) > 0:
            self._arm(max(left, BEAT))  # the loop may stand still, or generating be held, for long yet
        else:
            self.scope.cancel()

    def stop(self) -> None:
        """Let no time run until `go` was called as often."""
        if not self._waits:
            self.disarm()
            self._waited -= time.monotonic()
        self._waits += 1

    def go(self) -> None:
        """Let time run again."""
        self._waits -= 1
        if not self._waits:
            self._waited += time.monotonic()
            self._arm(max(self._left, 0.0))

    def disarm(self) -> None:
        """Never ring."""
        if self._timer is not None:
            self._timer.cancel()


_CALL: ContextVar[Deadline | None] = ContextVar("agentrl_call", default=None)


@contextmanager
def limited(
    seconds: float,
    what: str,
    *,
    place: Place | None = None,
    work_only: bool = False,
    held: Callable[[], float] = lambda: 0.0,
) -> Iterator[Deadline]:
    """Cut off the code inside after `seconds` of its own time; what is yielded says afterwards whether it was `overdue`.

    Args:
        what: whose code it is, for the watchdog.
        place: of which trajectory.
        work_only: the time that tools inside wait for a free place does not count.
        held: seconds for which generating was held so far; they do not count.
    """
    deadline = Deadline(what, seconds, place, work_only, held)
    token = _CALL.set(deadline)
    try:
        with deadline.scope:
            yield deadline
    finally:
        deadline.disarm()
        _CALL.reset(token)


def note_turn(turn: int) -> None:
    """The trajectory that is played here has come to the model's turn `turn`, from 1."""
    call = _CALL.get()
    if call is not None and call.place is not None:
        call.place.turn = turn


@asynccontextmanager
async def waiting(place: AbstractAsyncContextManager[Any]) -> AsyncIterator[None]:
    """Enter `place` (a semaphore, a limiter); for a `work_only` deadline around it the wait does not count.

    A tool that is in demand is not a slow environment. Waits side by side stop the deadline together.
    """
    call = _CALL.get()
    while call is not None and not call.work_only:
        call = call.outer
    if call is not None:
        call.stop()
    try:
        await place.__aenter__()
    finally:
        if call is not None:
            call.go()
    try:
        yield
    finally:
        await place.__aexit__(None, None, None)


class Watchdog:
    """Notices when an event loop stands still, and says whose code stops it; made by `watching`.

    Attributes:
        stalls: how often the loop stood still for `patience` or longer, by whose code it was.
        heard: when it answered last.
    """

    def __init__(self, patience: float) -> None:
        self.stalls: Counter[str] = Counter()
        self._patience = patience
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self.heard, self._lost = time.monotonic(), 0.0
        self._ended = threading.Event()

    @classmethod
    @contextmanager
    def watching(cls, patience: float) -> Iterator[Watchdog]:
        """Watch the running event loop.

        Args:
            patience: seconds that it may stand still before a warning names the code.
        """
        watchdog = cls(patience)
        token = _WATCHDOG.set(watchdog)
        threading.Thread(target=watchdog._watch, name="agentrl-watchdog", daemon=True).start()
        try:
            yield watchdog
        finally:
            watchdog._ended.set()
            watchdog.heard = math.inf
            _WATCHDOG.reset(token)

    @property
    def lost(self) -> float:
        """Seconds that the loop has stood still so far, those included that it does now."""
        silent = time.monotonic() - self.heard - BEAT
        return self._lost + (silent if silent > BEAT else 0.0)

    def _watch(self) -> None:
        while not self._ended.wait(BEAT):
            answered, looks = threading.Event(), Counter[str]()
            try:
                self._loop.call_soon_threadsafe(self._beat, answered, looks)
            except RuntimeError:
                return  # the loop was closed
            self._stand_by(answered, looks)

    def _beat(self, answered: threading.Event, looks: Counter[str]) -> None:
        if not self._ended.is_set():
            lost, self._lost = self._lost, self.lost
            self.heard = time.monotonic()
            if self._lost - lost >= self._patience:
                self.stalls[max(looks, key=looks.__getitem__, default=_UNSEEN)] += 1
            if self._lost - lost >= self._patience and not looks:
                _log.warning(f"the event loop has stood still for {self._lost - lost:.1f} s in {_UNSEEN}")
        answered.set()

    def _stand_by(self, answered: threading.Event, looks: Counter[str]) -> None:
        """Look at what the loop is doing until it answers."""
        began = since = time.monotonic()
        warn = self._patience
        while not answered.wait(BEAT) and not self._ended.is_set():
            now = time.monotonic()
            call, where = self._look()
            what = call.what if call else "code outside any trajectory"
            looks[what] += 1
            place = f" ({call.place})" if call and call.place else ""
            if call is not None:
                call.blocks(now - since, where)
            since = now
            if now - began >= warn:
                _log.warning(
                    f"the event loop has stood still for {now - began:.1f} s in {what}{place}, at {where}; all other "
                    "trajectories wait: await what is slow, or run it in a thread (anyio.to_thread.run_sync)"
                )
                warn *= 2

    def _look(self) -> tuple[Deadline | None, str]:
        """Whose code the loop is running, and its innermost line that is not a library's."""
        innermost = own = frame = sys._current_frames().get(self._thread)
        while own and own.f_code.co_filename.startswith(_LIBRARIES):
            own = own.f_back
        while frame and frame.f_code is not Handle._run.__code__:
            frame = frame.f_back
        handle = frame.f_locals.get("self") if frame else None
        return handle._context.get(_CALL) if handle else None, _line(own or innermost)


def _line(frame: FrameType | None) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}" if frame else "an unknown line"


_WATCHDOG: RunVar[Watchdog | None] = RunVar("agentrl_watchdog", default=None)
"""The watchdog of the running event loop."""
