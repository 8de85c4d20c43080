"""Running a blocking function beside the event loop, in a way that a function that never returns can do no harm.

Pool threads (anyio's and asyncio's) are joined at interpreter exit, so one hung tool would keep a finished run's
process alive for ever. These threads are daemons: they are left behind, here and at exit.
"""

import contextvars
import threading
from collections.abc import Callable
from typing import Any

import anyio
import anyio.from_thread
import anyio.lowlevel


async def run_in_daemon_thread(function: Callable[[], Any]) -> Any:
    """Call `function` in a thread of its own and return what it returns or raise what it raises.

    On cancellation the thread goes on unheard. Context variables are those of the caller.
    """
    token = anyio.lowlevel.current_token()
    context = contextvars.copy_context()
    finished = anyio.Event()
    results: list[Any] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(context.run(function))
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's task
            errors.append(error)
        try:
            anyio.from_thread.run_sync(finished.set, token=token)
        except anyio.RunFinishedError:
            return  # the loop ended while this thread was left behind: nobody is waiting

    threading.Thread(target=work, name="agentrl-tool", daemon=True).start()
    await finished.wait()
    if errors:
        raise errors[0]
    return results[0]
