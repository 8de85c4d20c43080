"""HTTP service of an ASGI application without passwords: the checks, limits and shutdown of all our servers.

1. A page in a browser cannot use the server. An `Origin` that is neither this machine nor the request's `Host` gets
   403. A `Host` with an unknown domain gets 421, because any DNS entry may point here. WebSockets are checked, too. A
   body that is not declared as JSON is refused.
2. The constants below limit the memory, work and time of a request. Too large a request gets 413, too slow a request
   408, and JSON that nests too deeply 400. Each answer names its limit.
3. SIGTERM and SIGINT end the process within `GRACE` seconds, even if its threads are busy."""

import asyncio
import gc
import math
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from functools import partial
from types import FrameType
from typing import Any, TypeVar

import anyio
import orjson
import uvicorn
from anyio import to_thread
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketClose
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from agentrl.errors import SettingsError

MAX_HEAD = 1 << 16  # bytes of a request's first line and headers
MAX_BODY = 16 << 20  # bytes of a request's body: two million token ids
MAX_DEPTH, MAX_MARKS = 64, 1 << 18
"""Maximum levels of JSON, and maximum number of the characters [, { and : in a body, also inside strings. These
characters, not numbers, make decoding slow, and nothing else runs while a body is decoded."""
LARGE = 1 << 15  # bodies of at least this many bytes are processed in a thread, one at a time
_QUICK = 1 << 17  # bytes of a body that is decoded in about a millisecond
READ_TIMEOUT = 30  # seconds for a head (since the connection or the last answer), and again for its body
GRACE = 4
CLIENT_GONE = 499  # no client reads this status; it is what proxies log for a client that closed the connection

# A `Host` that no public DNS has: an address, or a name without a domain.
_HERE = re.compile(r"([\w-]+|[\d.]+|\[[\da-f:.]+\])(:\d+)?")
_NEAR = re.compile(r"https?://(localhost|127(\.\d+){3}|\[::1\])(:\d+)?")
_CLOSE, _BACKLOG = {"connection": "close"}, 4096
_NESTED = frozenset((dict, list))
T = TypeVar("T")


class Guarded:
    """`app` behind checks of `Host` and `Origin`; `host` is the name or address that the server listens on."""

    def __init__(self, app: ASGIApp, host: str) -> None:
        self._app, self._names = app, {host.lower(), socket.gethostname().lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one ASGI connection."""
        refused = None if scope["type"] == "lifespan" else self._refused(Headers(scope=scope))
        if refused and scope["type"] == "websocket":
            await WebSocketClose(reason="refused")(scope, receive, send)
        else:
            await (refused or self._app)(scope, receive, send)

    def _refused(self, headers: Headers) -> Response | None:
        host, origin = headers.get("host", "localhost").lower(), headers.get("origin")
        if not _HERE.fullmatch(host) and host.partition(":")[0] not in self._names:
            said = f"this server is not known as {host!r:.100}; ask it by IP address, or start it with --host NAME"
            return JSONResponse({"error": {"message": said}}, 421, _CLOSE)
        own = origin is not None and origin.partition("://")[2] == host
        if not (own or _NEAR.fullmatch(origin)) if origin else headers.get("sec-fetch-site") == "cross-site":
            said = f"pages of {origin or 'another site'} may not use this server, only programs may"
            return JSONResponse({"error": {"message": said}}, 403, _CLOSE)
        return None


async def read_json(request: Request) -> Any:
    """Return the decoded body; None if it is empty. Raises ValueError: the body is not declared as JSON, is no JSON, or
    nests too deeply. HTTPException: the body is too large or too slow, or the client has disconnected."""
    raw = await _body(request)
    declared = request.headers.get("content-type", "nothing")
    if raw and declared.partition(";")[0].strip().lower() != "application/json":
        raise ValueError(f"expected a body sent as content-type application/json, got {declared:.100}")
    if not raw:
        return None
    return _decode(raw) if len(raw) < _QUICK else await aside(request, _decode, raw)


async def _body(request: Request) -> bytes:
    """Read the body. A body over the limit is read on, up to twice the limit, so that its client reads the answer."""
    chunks, size = [], 0
    try:
        async with asyncio.timeout(READ_TIMEOUT):
            async for chunk in request.stream():
                size += len(chunk)
                if size <= MAX_BODY:
                    chunks.append(chunk)
                elif size > 2 * MAX_BODY:
                    break
    except TimeoutError:
        raise HTTPException(408, f"the body did not arrive within {READ_TIMEOUT} s; send it faster", _CLOSE) from None
    except ClientDisconnect:
        raise HTTPException(CLIENT_GONE, "the client has gone") from None
    if size > MAX_BODY:
        raise HTTPException(413, f"a body may have {MAX_BODY} bytes; send its prompts in several requests", _CLOSE)
    return b"".join(chunks)


def _decode(raw: bytes) -> Any:
    if len(raw) > MAX_MARKS and (marks := sum(map(raw.count, (b"[", b"{", b":")))) > MAX_MARKS:
        raise ValueError(f"a body may have {MAX_MARKS} of the characters [ {{ and :, got {marks}; send several bodies")
    found, depth, half = orjson.loads(raw), 0, MAX_DEPTH // 2
    many = any(len(raw.rsplit(bracket, half)) > half for bracket in (b"{", b"["))
    level = [found] if many and type(found) in _NESTED else []
    while level:
        if (depth := depth + 1) > MAX_DEPTH:
            raise ValueError(f"JSON may nest {MAX_DEPTH} levels deep; send a flatter body")
        level = [v for each in level for v in (each.values() if type(each) is dict else each) if type(v) in _NESTED]
    return found


async def aside(request: Request, work: Callable[..., T], *args: Any, size: int | None = None) -> T:
    """Return `work(*args)`, run in a thread, one call at a time, if `size` (default: bytes of the body) is large."""
    if (int(request.headers.get("content-length", LARGE)) if size is None else size) < LARGE:
        return work(*args)
    if not hasattr(request.app.state, "lane"):
        request.app.state.lane = anyio.CapacityLimiter(1)
    return await to_thread.run_sync(partial(work, *args), limiter=request.app.state.lane)


class _Protocol(HttpToolsProtocol):
    """uvicorn's protocol with a size limit for heads. Only a complete head ends the timeout of a request."""

    _head = -math.inf

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(READ_TIMEOUT, self.timeout_keep_alive_handler)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head = 0

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._head = -math.inf

    def data_received(self, data: bytes) -> None:
        known, waiting, self.timeout_keep_alive_task = self.cycle, self.timeout_keep_alive_task, None
        super().data_received(data)
        self._head += len(data)
        if self.transport.get_protocol() is not self:  # it is a WebSocket now, without a timeout
            if waiting is not None:
                waiting.cancel()
        elif self.cycle is known:
            self.timeout_keep_alive_task = waiting
        elif waiting is not None:
            waiting.cancel()
        if self._head > MAX_HEAD:
            self.transport.close()


class _Server(uvicorn.Server):
    """uvicorn with a forced end, `GRACE` seconds after the first signal."""

    on_signal: Callable[[], None]

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.should_exit:
            # The kernel's alarm needs neither the event loop nor the interpreter's lock.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(GRACE)
            self.on_signal()
        super().handle_exit(sig, frame)


def listen(host: str, port: int) -> socket.socket:
    """Bind the address for `serve`, before anything is loaded; port 0 means a free port. Raises SettingsError: the port
    is taken, or the address is not this machine's."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # connections inherit it; asyncio would not set it
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        said = f"cannot listen on {host}:{port}: {error.strerror}; choose another --port or --host"
        raise SettingsError(said) from error
    return listener


def serve(
    app: ASGIApp, listener: socket.socket, host: str, *, ready: str, on_signal: Callable[[], None] = lambda: None
) -> None:
    """Serve `app` behind `Guarded` until a signal comes. `ready`: line for stdout when the server listens, with {url}.
    `on_signal`: called at once when the signal comes, so that requests in flight can still be answered."""
    server = _Server(_config(app, host, log_level="warning"))
    server.on_signal = on_signal
    # A busy thread must let the event loop run soon, and garbage collection must skip objects that exist already.
    sys.setswitchinterval(0.0005)
    gc.freeze()
    sys.stdout.write(ready.format(url=_opened(listener)) + "\n")
    sys.stdout.flush()
    server.run([listener])


@asynccontextmanager
async def served(app: ASGIApp, listener: socket.socket, host: str) -> AsyncIterator[str]:
    """Serve `app` behind `Guarded` in this event loop until the context ends; yield its URL. Leaves signals alone."""
    url = _opened(listener)
    async with _running(_Beside(_config(app, host, log_config=None)), [listener]):
        yield url


@asynccontextmanager
async def served_at(app: ASGIApp, path: str, host: str) -> AsyncIterator[None]:
    """Serve `app` behind `Guarded` at a Unix socket until the context ends."""
    server = _Beside(_config(app, host, uds=path, log_config=None))
    async with _running(server):
        with anyio.fail_after(GRACE):
            await server.begun.wait()
        yield


@asynccontextmanager
async def _running(server: uvicorn.Server, sockets: list[socket.socket] | None = None) -> AsyncIterator[None]:
    task = asyncio.create_task(server.serve(sockets))
    try:
        yield
    finally:
        server.should_exit = True
        with anyio.CancelScope(shield=True):
            await task


class _Beside(uvicorn.Server):
    """uvicorn in an event loop that it does not own."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.begun = anyio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.begun.set()

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()


def _config(app: ASGIApp, host: str, **logging: Any) -> uvicorn.Config:
    config = uvicorn.Config(Guarded(app, host), http=_Protocol, access_log=False, backlog=_BACKLOG, **logging)
    config.timeout_keep_alive, config.timeout_graceful_shutdown = READ_TIMEOUT, 1
    return config


def _opened(listener: socket.socket) -> str:
    listener.listen(_BACKLOG)
    address, port = listener.getsockname()[:2]
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"
