"""The built-in engine inside this process: the same application as the server's, without sockets.

1. It computes in a thread of its own with as many torch threads as the process has set (`embedded_threads` is read by
   whoever sets them, because a trainer may share them).
2. If that thread crashes, this and every later request fails as it does when a server dies; the process goes on.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import anyio.to_thread

from agentrl.engine.settings import EngineSettings
from agentrl.engine.transport import AsgiTransport

URL = "http://in-process"


@asynccontextmanager
async def in_process(settings: EngineSettings, model_path: str | Path) -> AsyncIterator[tuple[AsgiTransport, str]]:
    """Serve `model_path` for the length of the context; gives `transport` and address for an `EnginePool`.

    Raises:
        AgentRLError: the folder cannot be served.
    """
    from agentrl.engine.embedded.server import build
    from agentrl.engine.embedded.service import Options

    options = Options(
        model_path=str(model_path),
        slots=settings.embedded_slots,
        dtype=settings.embedded_dtype,
        context_length=settings.engine_context_length,
        exact=settings.embedded_deterministic,
    )
    loop = asyncio.get_running_loop()

    def crashed() -> None:
        loop.call_soon_threadsafe(transport.break_off, "the engine in this process has crashed; the log says why")

    transport = AsgiTransport(await anyio.to_thread.run_sync(partial(build, options, on_crash=crashed)))
    async with transport:
        yield transport, URL
