"""The built-in engine inside this process: the same application as the server's, in this event loop.

1. It computes in a thread of its own with as many torch threads as the process has set (`embedded_threads` is read by
   whoever sets them, because a trainer may share them).
2. If that thread crashes, this and every later request fails as it does when a server dies; the process goes on.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import anyio.to_thread

from agentrl.engine.settings import EngineSettings
from agentrl.engine.transport import ConnectionLost, ConnectionRefused, HttpTransport, Reply
from agentrl.serving import listen, served


class OwnTransport(HttpTransport):
    """Connections to the engine of this process at `url`, which lasts until it has crashed."""

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        self.url, self._crashed = "", False

    async def crashed(self) -> None:
        """The engine will not answer any more: exchanges under way are lost, later ones refused."""
        self._crashed = True
        await self._session.close()

    async def exchange(
        self, method: str, url: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Reply:
        if not self._crashed:
            try:
                return await super().exchange(method, url, body, headers)
            except ConnectionLost:
                if not self._crashed:
                    raise
        raise ConnectionRefused("the engine in this process has crashed; the log says why", kind="engine_gone")


@asynccontextmanager
async def in_process(settings: EngineSettings, model_path: str | Path) -> AsyncIterator[tuple[OwnTransport, str]]:
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
    loop, host = asyncio.get_running_loop(), "127.0.0.1"

    def crashed() -> None:
        asyncio.run_coroutine_threadsafe(transport.crashed(), loop)

    app = await anyio.to_thread.run_sync(partial(build, options, on_crash=crashed))
    async with served(app, listen(host, 0), host) as url, OwnTransport(settings) as transport:
        transport.url = url
        yield transport, url
