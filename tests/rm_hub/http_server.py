"""A real HTTP server in a thread, for tests of HTTP clients."""

import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

Endpoint = Callable[[Request], Awaitable[Response]]


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, ready: threading.Event) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready.set()


@contextmanager
def serving(endpoint: Endpoint, path: str = "/", methods: tuple[str, ...] = ("POST",)) -> Iterator[str]:
    """Serve one starlette endpoint; yields its address."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    ready = threading.Event()
    app = Starlette(routes=[Route(path, endpoint, methods=list(methods))])
    server = _Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1), ready)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        assert ready.wait(120), "the test server did not start"
        yield f"http://127.0.0.1:{listener.getsockname()[1]}{path}"
    finally:
        server.should_exit = True
        thread.join(120)
        listener.close()


@contextmanager
def unused_address() -> Iterator[str]:
    """Return an address on which no program listens."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}/"
