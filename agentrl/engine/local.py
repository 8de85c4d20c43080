"""The built-in engine inside this process: the same application as the server's, in this event loop.

1. The engine computes in its own thread, with the process's number of torch threads. `embedded_threads` is read by the
   code that sets this number, because a trainer may share the threads.
2. If this thread crashes, its requests and all later requests get an error as answer. The process continues."""

import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import anyio.to_thread
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from agentrl.engine.settings import EngineSettings
from agentrl.serving.http import Handler
from agentrl.serving.server import listen, served

_CRASHED = JSONResponse({"error": {"message": "the engine in this process has crashed; the log says why"}}, 503)


@asynccontextmanager
async def in_process(
    settings: EngineSettings, model_path: str | Path, routes: Mapping[str, Handler] | None = None
) -> AsyncIterator[str]:
    """Serve `model_path`; yield the address. `routes`: more POST endpoints. Raises AgentRLError: a bad folder."""
    from agentrl.engine.embedded.server import build
    from agentrl.engine.embedded.service import Options

    options = Options(
        model_path=str(model_path),
        slots=settings.embedded_slots,
        dtype=settings.embedded_dtype,
        context_length=settings.engine_context_length,
        batch_invariant=settings.embedded_deterministic,
        api_key=settings.api_key,
        admin_api_key=settings.admin_api_key,
    )
    crashed = threading.Event()
    app = await anyio.to_thread.run_sync(partial(build, options, on_crash=crashed.set, routes=routes))

    async def answering(scope: Scope, receive: Receive, send: Send) -> None:
        await (_CRASHED if crashed.is_set() and scope["type"] == "http" else app)(scope, receive, send)

    host = "127.0.0.1"
    async with served(answering, listen(host, 0), host) as url:
        yield url
