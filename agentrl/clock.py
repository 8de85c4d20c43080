"""Deadlines of user code, and a watchdog for the event loop.

1. A deadline counts only the call's own time. It stops while other code blocks the event loop, while the call waits
   for a semaphore or limiter (`waiting`), and while generation is paused.
2. Code that blocks the event loop cannot be cancelled. Its deadline and the enclosing deadlines keep counting. If they
   have expired, the call is overdue when the code returns.
3. `Watchdog` sends callbacks to the loop from a thread. While a callback is late, the watchdog reads the running task,
   the source line and the cause (`stalls`). An await costs nothing. For a task that user code starts, only the line is
   known. Without a watchdog, the loop counts as never blocked."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import os
import sys
import sysconfig
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Self, get_args

import anyio

from agentrl.errors import TrajectoryPlace
from agentrl.stalls import Cause, ThreadTimes, cause

BEAT = 0.1  # seconds between two heartbeats of the loop; shorter stalls are not noticed
_MAX_LAGS = 36_000  # maximum number of callback lags kept for `Watchdog.take`: one hour

_OURS = f"{Path(__file__).parent}{os.sep}"
_PATHS = ("stdlib", "platstdlib", "purelib", "platlib")
_LIBRARIES = ("<frozen", "<string>", *map(sysconfig.get_path, _PATHS))
_log = logging.getLogger(__name__)

Tell = Callable[[float, str, str], None]
"""A function that the watchdog's thread calls while the event loop is blocked. Arguments: seconds, the blocking code or
`stalls.Cause`, and the source line or a description of the cause."""


def freeze_loaded_objects() -> None:
    """Exclude loaded objects from garbage collection: scanning them takes a tenth of a rollout's CPU time."""
    gc.freeze()
    gc.set_threshold(20_000, 50, 50)


def library(file: str) -> bool:
    """Return true if a source file belongs to Python or an installed package, or is not a file (`<string>`)."""
    return file.startswith(_LIBRARIES)


def _warn(seconds: float, who: str, where: str) -> None:
    said = f"the event loop was blocked for {seconds:.1f} s"
    if who in get_args(Cause):
        _log.warning(f"{said}: {where}; no trajectory is charged for it")
        return
    remedy = "await slow calls, or run them in a thread (anyio.to_thread.run_sync)"
    _log.warning(f"{said} in {who}, at {where}; all other trajectories wait: {remedy}")


class Deadline:
    """A context that cancels the code inside after `seconds` of its own time, and is then `overdue`.

    Args:
        what: name of the code, for messages and the watchdog.
        place: the code's trajectory; by default the enclosing call's.
        work_only: time that tools inside spend in `waiting` does not count.
        held: returns the seconds for which generation was paused so far; they do not count."""

    def __init__(
        self,
        seconds: float,
        what: str,
        *,
        place: TrajectoryPlace | None = None,
        work_only: bool = False,
        held: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.seconds, self.what, self.work_only = seconds, what, work_only
        self.outer = _CALL.get()  # the enclosing call
        self.place: TrajectoryPlace | None = place or (self.outer.place if self.outer else None)
        self.at_end: list[Callable[[], None]] = []  # called when the call ends
        self._watchdog, self._held, self._scope = _WATCHDOGS.get(asyncio.get_running_loop()), held, anyio.CancelScope()
        self._blocked, self._seen, self._where = 0.0, 0.0, ""
        self._waits, self._waited = 0, 0.0
        self._runs, self._raised = False, list[BaseException]()

    def __enter__(self) -> Self:
        self._runs = True
        self._until = time.monotonic() + self.seconds - self._excused
        self._timer = asyncio.get_running_loop().call_later(self.seconds, self._ring)
        self._token = _CALL.set(self)
        if self._watchdog is not None:
            self._task = asyncio.current_task()
            self._before = self._watchdog.calls.get(self._task)
            self._watchdog.calls[self._task] = self
        self._scope.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> bool:
        self._timer.cancel()
        _CALL.reset(self._token)
        if self._watchdog is not None:
            self._watchdog.calls[self._task] = self._before
            if self._before is None:
                del self._watchdog.calls[self._task]
        self._runs = False
        for call in self.at_end:
            call()
        caught = self._scope.__exit__(kind, error, trace)
        if self._raised and (caught or error is None):
            raise BaseExceptionGroup(f"a task of {self.what}", self._raised)
        return caught

    @property
    def outermost(self) -> Deadline:
        """The outermost of the enclosing calls; this call if no call encloses it."""
        return self.outer.outermost if self.outer else self

    def fail(self, error: BaseException) -> bool:
        """End the innermost running call, from this call outwards, with the `error` of a task; false if none runs."""
        if not self._runs:
            return self.outer is not None and self.outer.fail(error)
        self._raised.append(error)
        self._scope.cancel()
        return True

    @property
    def overdue(self) -> bool:
        """True if the call was cancelled, or blocked the loop past its deadline."""
        return self._scope.cancelled_caught or (self._blocked > 0 and self._left < 0)

    @property
    def verdict(self) -> str:
        """Description of a call that is overdue."""
        text = f"{self.what} took longer than {self.seconds:g} s"
        return f"{text}: it blocked the event loop at {self._where}; run that in a thread" if self._where else text

    def blocks(self, seconds: float, where: str) -> None:
        """Record that this call, or a call inside it, blocked the loop at `where` for another `seconds`."""
        self._blocked, self._seen, self._where = self._blocked + seconds, time.monotonic(), where
        if self.outer is not None:
            self.outer.blocks(seconds, where)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the deadline inside the context."""
        if not self._waits:
            self._timer.cancel()
            self._waited -= time.monotonic()
        self._waits += 1
        try:
            yield
        finally:
            self._waits -= 1
            if not self._waits:
                self._waited += time.monotonic()
                self._ring()

    @property
    def _excused(self) -> float:
        """Seconds that do not count for the call. The start is arbitrary: only differences have a meaning."""
        excused = self._waited + self._held() - self._blocked
        if self._watchdog is not None:
            excused += self._watchdog.lost
            if self._seen > self._watchdog.heard:  # the call blocks the loop now
                excused -= time.monotonic() - self._seen
        return excused

    @property
    def _left(self) -> float:
        return self._until + self._excused - time.monotonic()

    def _ring(self) -> None:
        if (left := self._left) <= 0:
            self._scope.cancel()
        else:  # at least a beat later: the loop may stay blocked, or generation paused, for long
            self._timer = asyncio.get_running_loop().call_later(max(left, BEAT), self._ring)


_CALL: ContextVar[Deadline | None] = ContextVar("agentrl_call", default=None)


def current_call() -> Deadline | None:
    """Return the innermost call of user code that this task runs in, or was started in."""
    return _CALL.get()


def note_turn(turn: int) -> None:
    """Record that this task's trajectory has reached the model's turn `turn`, from 1."""
    call = _CALL.get()
    if call is not None and call.place is not None:
        call.place.turn = turn


@asynccontextmanager
async def waiting(place: AbstractAsyncContextManager[Any]) -> AsyncIterator[None]:
    """Enter `place`, a semaphore or limiter. An enclosing `work_only` deadline does not count the wait, because a busy
    tool does not make an environment slow. Concurrent waits are counted once."""
    call = _CALL.get()
    while call is not None and not call.work_only:
        call = call.outer
    async with AsyncExitStack() as stack:
        with call.stopped() if call else nullcontext():
            await stack.enter_async_context(place)
        yield


class Watchdog:
    """Monitor of an event loop. It notices a blocked loop, and names the code that blocks it. Made by `watching`."""

    def __init__(self, patience: float, tell: Tell = _warn) -> None:
        self.stalls: Counter[str] = Counter()  # number of stalls of at least `patience` seconds, by blocking code
        self.heard = time.monotonic()  # time of the last heartbeat
        self.calls: dict[asyncio.Task[Any] | None, Deadline | None] = {}  # innermost call of each task
        self._patience, self._tell, self._lost = patience, tell, 0.0
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._native, self._ended = threading.get_native_id(), threading.Event()
        self._times: ThreadTimes | None = None
        self._lags = deque[float](maxlen=_MAX_LAGS)
        self._since = time.monotonic(), time.thread_time()

    @classmethod
    @contextmanager
    def watching(cls, patience: float, tell: Tell = _warn) -> Iterator[Watchdog]:
        """Watch the running event loop; `tell` is called with code that blocks the loop for `patience` seconds."""
        watchdog = cls(patience, tell)
        before, _WATCHDOGS[watchdog._loop] = _WATCHDOGS.get(watchdog._loop), watchdog
        threading.Thread(target=watchdog._watch, name="agentrl-watchdog", daemon=True).start()
        try:
            yield watchdog
        finally:
            watchdog._ended.set()
            watchdog.heard = math.inf
            _WATCHDOGS[watchdog._loop] = before
            if before is None:
                del _WATCHDOGS[watchdog._loop]

    def take(self) -> dict[str, float]:
        """Return metrics since the last call; run this in the loop's thread. They are the stalls (`stalls/<code>`), the
        share of time that the thread computed, and the 99th percentile of the lag of callbacks in seconds."""
        stalls, self.stalls, lags = self.stalls, Counter(), sorted(self._lags)
        self._lags.clear()
        (since, computed), self._since = self._since, (time.monotonic(), time.thread_time())
        figures = {f"stalls/{what}": float(count) for what, count in stalls.items()}
        figures["loop/busy_share"] = (self._since[1] - computed) / max(self._since[0] - since, 1e-9)
        figures["loop/lag_p99"] = lags[len(lags) * 99 // 100] if lags else 0.0
        return figures

    @property
    def lost(self) -> float:
        """Seconds for which the loop was blocked so far, including the current stall."""
        silent = time.monotonic() - self.heard - BEAT
        return self._lost + (silent if silent > BEAT else 0.0)

    def _watch(self) -> None:
        while not self._ended.wait(BEAT):
            self._times = ThreadTimes.at_once(self._native)
            answered, looks = threading.Event(), Counter[str]()
            try:
                self._loop.call_soon_threadsafe(self._beat, answered, looks, time.monotonic())
            except RuntimeError:
                return  # the loop was closed
            self._stand_by(answered, looks)

    def _beat(self, answered: threading.Event, looks: Counter[str], asked: float) -> None:
        answered.set()
        if not self._ended.is_set():
            before, self._lost = self._lost, self.lost
            self.heard = time.monotonic()
            self._lags.append(self.heard - asked)
            if self._lost - before >= self._patience:
                self.stalls[max(looks, key=looks.__getitem__, default="unseen")] += 1

    def _stand_by(self, answered: threading.Event, looks: Counter[str]) -> None:
        """Sample what the loop runs until it answers. A call is blamed only while its own code blocks the loop."""
        before, warn = self._times, self._patience
        began = since = before.now if before else time.monotonic()
        while not self._ended.is_set():
            over, now = answered.wait(BEAT), time.monotonic()
            if over and now - since < self._patience:
                return
            (call, where), after = self._look(), ThreadTimes.of(self._native)
            kind, why = cause(before, after)
            over = over or answered.is_set()
            if over and not why:
                return  # this thread looked too late: the blocking code is not known any more
            what: str = kind
            if why:
                where = why
            elif where.startswith(_OURS):
                what = "agentrl's own code"
            elif call is None:
                what = "code outside any trajectory"
            else:
                call.blocks(now - since, where)
                what = f"{call.what} ({call.place})" if call.place else call.what
            looks[what.partition(" (")[0]] += 1
            if now - began >= warn:
                self._tell(now - began, what, where)
                warn *= 2
            if over:
                return
            since, before = now, ThreadTimes.at_once(self._native)

    def _look(self) -> tuple[Deadline | None, str]:
        """Return the call whose code the loop is running, and its innermost line outside libraries."""
        if (found := sys._current_frames().get(self._thread)) is None:
            return None, "no Python code"  # between two frames
        frame = found
        while frame.f_back and library(frame.f_code.co_filename):
            frame = frame.f_back
        frame = frame if frame.f_back else found
        where = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        return self.calls.get(asyncio.current_task(self._loop)), where


_WATCHDOGS = dict[asyncio.AbstractEventLoop, Watchdog | None]()  # of event loops that run
