"""Work that goes on beside the body of a context."""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any

_log = logging.getLogger(__name__)


@asynccontextmanager
async def beside(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run `work` for the length of the context; what it raised before is logged then, and raised at the end.

    A task and no task group: a test's fixture leaves the context in another task than it entered it in.
    """
    task = asyncio.create_task(work)
    task.add_done_callback(_report)
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()):
        _log.error("nobody looks after the engines any more", exc_info=error)
