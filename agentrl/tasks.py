"""Calls that run at the same time in one task group, and calls after a failure. A failure is raised as itself, not in
an exception group."""

from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import anyio

from agentrl.errors import ungrouped

T = TypeVar("T")


async def together(*calls: Callable[[], Awaitable[T]]) -> list[T]:
    """Return what several calls return, in order. The first failure cancels the others."""
    found: dict[int, T] = {}

    async def one(at: int, call: Callable[[], Awaitable[T]]) -> None:
        found[at] = await call()

    with ungrouped():
        async with anyio.create_task_group() as tasks:
            for at, call in enumerate(calls):
                tasks.start_soon(one, at, call)
    return [found[at] for at in range(len(calls))]


@asynccontextmanager
async def alongside(work: Callable[[], Coroutine[Any, Any, Any]]) -> AsyncIterator[None]:
    """Run `work` during the block. Its failure cancels the block; the end of the block cancels it."""
    with ungrouped():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(work)
            yield
            tasks.cancel_scope.cancel()


@asynccontextmanager
async def undone_by(clean_up: Callable[[], Awaitable[object]]) -> AsyncIterator[None]:
    """Call `clean_up` if the block fails or is cancelled. No cancellation interrupts `clean_up`."""
    try:
        yield
    except BaseException:
        with anyio.CancelScope(shield=True):
            await clean_up()
        raise
