"""Runs blocking functions beside the event loop, so that a function that never returns does no harm.

1. Pool threads (anyio's and asyncio's) are joined at interpreter exit, so one hung tool would keep a finished process
   from exiting. The threads here are daemons, which are never joined.
2. An event loop has `PLACES` places for sync tools alone, so that no other work waits for them. A call keeps its place
   until its thread ends, even if the call is cancelled. At its deadline, cancelled or not, a running call loses its
   place, and counts as hung until its thread ends. With `MAX_HUNG` hung calls, every other call fails at once."""

import asyncio
import contextvars
import inspect
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Self, TypeVar

import anyio
import anyio.from_thread
from anyio.lowlevel import RunVar, current_token

from agentrl.tools.arguments import OutcomeKind, ToolError

T = TypeVar("T")
PLACES: Final = 40
MAX_HUNG: Final = 64


async def run_in_daemon_thread(function: Callable[[], T], ended: Callable[[], None] = lambda: None) -> T:
    """Call `function` in a new thread, and return its result or raise its error. On cancellation the thread continues,
    and its result is dropped. Context variables are those of the caller. `ended`: called in the event
    loop when the function has ended, also after a cancellation."""
    token, context, finished = current_token(), contextvars.copy_context(), anyio.Event()
    results, errors = list[T](), list[BaseException]()

    def end() -> None:
        finished.set()
        ended()

    def work() -> None:
        try:
            results.append(context.run(function))
        except StopIteration as error:  # a coroutine cannot raise it
            errors.append(RuntimeError("StopIteration, for example of next()").with_traceback(error.__traceback__))
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's task
            errors.append(error)
        with suppress(anyio.RunFinishedError):  # the event loop has ended, and with it the caller
            anyio.from_thread.run_sync(end, token=token)

    try:
        threading.Thread(target=work, name="agentrl-tool", daemon=True).start()
    except RuntimeError:  # the system has no more threads
        ended()
        raise
    await finished.wait()
    if errors:
        raise errors[0]
    return results[0]


async def result_of(call: partial[Any]) -> Any:
    """Return the result of a call; a plain function runs in a thread."""
    if inspect.iscoroutinefunction(call.func):
        return await call()
    result = await run_in_daemon_thread(call)
    return await result if inspect.isawaitable(result) else result


@dataclass
class ToolThreads:
    """The threads of an event loop's sync tools. `places`: for calls in time. `hung`: overdue calls, by tool."""

    places: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(PLACES))
    hung: Counter[str] = field(default_factory=Counter)

    @classmethod
    def current(cls) -> "ToolThreads":
        if (threads := _THREADS.get()) is None:
            _THREADS.set(threads := cls())
        return threads


_THREADS: RunVar[ToolThreads | None] = RunVar("agentrl_tool_threads", default=None)


class ToolThread:
    """A place for one call of the sync tool `name` that may take `seconds`; enter it, then `run`."""

    def __init__(self, name: str, seconds: float) -> None:
        self._name, self._seconds, self._threads = name, seconds, ToolThreads.current()
        self._running = self._placed = False

    async def __aenter__(self) -> Self:
        await self._threads.places.acquire_on_behalf_of(self)
        self._placed, hung = True, +self._threads.hung
        if hung.total() >= MAX_HUNG:
            self._give_back()
            names = ", ".join(f"`{name}` ({count})" for name, count in hung.most_common(5))
            text = f"`{self._name}` was not run: {hung.total()} calls of tools never returned: {names}"
            raise ToolError(text, kind=OutcomeKind.HUNG)
        self._until = asyncio.get_running_loop().time() + self._seconds
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._running:  # the caller was cancelled or is past its deadline
            asyncio.get_running_loop().call_at(self._until, self._outlived)
        else:
            self._give_back()

    async def run(self, function: Callable[[], T]) -> T:
        self._running = True
        return await run_in_daemon_thread(function, self._ended)

    def _outlived(self) -> None:
        if self._running:
            self._threads.hung[self._name] += 1
            self._give_back()

    def _ended(self) -> None:
        self._running = False
        if self._placed:
            self._give_back()
        else:
            self._threads.hung[self._name] -= 1

    def _give_back(self) -> None:
        if self._placed:
            self._placed = False
            self._threads.places.release_on_behalf_of(self)
