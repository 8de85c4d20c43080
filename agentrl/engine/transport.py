"""One HTTP exchange with an engine: bytes out, status and bytes in, and nothing but this house's errors.

No time limit here except for opening a connection: callers bound the whole exchange with a cancel scope, and the engine
sees a cancelled exchange as a client that has gone. Nothing is retried here.
"""

import asyncio
import resource
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, NamedTuple, Protocol, Self
from urllib.parse import urlsplit

import aiohttp
import anyio
from yarl import URL

from agentrl.engine.settings import EngineSettings
from agentrl.errors import EngineUnreachable

Message = MutableMapping[str, Any]
AsgiApp = Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]

# Shorter than uvicorn's 5 s, so that the client and not the server drops an idle connection: a request sent while
# the server closes would look like a dead engine.
_KEEP_ALIVE = 4.0


class ConnectionRefused(EngineUnreachable):
    """No connection came up: the engine has not seen the request."""


class ConnectionLost(EngineUnreachable):
    """The connection broke before the whole answer was in: the engine may have worked on the request."""


class Reply(NamedTuple):
    """An answer: its status, its body, and the seconds in which it says that one may come again (Retry-After)."""

    status: int
    body: bytes
    retry_after: float = 0.0


class Transport(Protocol):
    """An async context manager that holds the connections to all engines."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *exc: object) -> None: ...

    async def exchange(
        self, method: str, url: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Reply:
        """Send one request.

        Raises:
            ConnectionRefused, ConnectionLost: no whole answer came.
        """


class HttpTransport(Transport):
    """Engines in other processes, over connections that are kept open.

    aiohttp, because it takes a third of the CPU time of httpx a request, and milliseconds less where there are hundreds.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self._connect_timeout, self._key = settings.engine_connect_timeout, settings.api_key
        self._urls: dict[str, URL] = {}

    async def __aenter__(self) -> Self:
        raise_open_files_limit()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_timeout),
            headers={"content-type": "application/json"}
            | ({"authorization": f"Bearer {self._key}"} if self._key else {}),
            skip_auto_headers=("User-Agent",),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._session.close()

    async def exchange(
        self, method: str, url: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Reply:
        target = self._urls.get(url)
        if target is None:
            target = self._urls[url] = URL(url)
        try:
            async with self._session.request(
                method, target, data=body, headers=headers, allow_redirects=False
            ) as response:
                wait = response.headers.get("Retry-After", "")  # a date is taken as no number
                return Reply(response.status, await response.read(), float(wait) if wait.isdecimal() else 0.0)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, ValueError) as error:  # one of the URL's
            raise ConnectionRefused(f"cannot connect to the engine at {url}: {error}", kind="engine_refused") from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise ConnectionLost(
                f"lost the connection to the engine at {url}: {type(error).__name__} {error}", kind="engine_lost"
            ) from error


class AsgiTransport(Transport):
    """One engine in this process: an ASGI application in this event loop, which lives as long as this context.

    Every address leads to it. As behind a server, an application is not cancelled with the exchange that called it:
    it is told `http.disconnect`. What it raises reaches the caller as `ConnectionLost`.
    """

    def __init__(self, app: AsgiApp) -> None:
        self._app = app
        self._broken: str | None = None
        # Tasks and no task group: a test's fixture leaves the context in another task than it entered it in.
        self._calls: set[asyncio.Task[None]] = set()
        self._started, self._ending = asyncio.Event(), asyncio.Event()

    async def __aenter__(self) -> Self:
        self._life = asyncio.create_task(self._live())
        self._life.add_done_callback(lambda _: self._started.set())
        await self._started.wait()
        if self._life.done():
            self._life.result()
        return self

    async def __aexit__(self, *exc: object) -> None:
        with anyio.CancelScope(shield=True):
            self.break_off("the engine in this process was stopped")
            self._ending.set()
            await asyncio.wait({self._life, *self._calls})
        self._life.result()

    def break_off(self, reason: str) -> None:
        """The application will not answer any more: exchanges under way are lost, later ones refused."""
        self._broken = self._broken or reason
        for call in self._calls:
            call.cancel()

    async def exchange(
        self, method: str, url: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> Reply:
        if self._broken is not None:
            raise ConnectionRefused(self._broken, kind="engine_gone")  # and it will not come back
        call = _Call(body or b"")
        scope = _http_scope(method, url, len(body or b""), headers or {})
        task = asyncio.ensure_future(self._app(scope, call.receive, call.send))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        try:
            await asyncio.wait({task})
        finally:
            call.gone.set()
        failure = None if task.cancelled() else task.exception()
        if task.cancelled() or failure is not None:
            reason = self._broken or f"the engine in this process failed: {failure!r}"
            raise ConnectionLost(reason, kind="engine_lost") from failure
        return Reply(call.status, b"".join(call.chunks))

    async def _live(self) -> None:
        """The application's life, from its start to its end."""
        events = iter(("startup", "shutdown"))

        async def receive() -> Message:
            event = next(events)
            if event == "shutdown":
                await self._ending.wait()
            return {"type": f"lifespan.{event}"}

        async def send(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                self._started.set()

        await self._app({"type": "lifespan", "asgi": {"version": "3.0"}}, receive, send)


class _Call:
    """One exchange, as the application sees it."""

    def __init__(self, body: bytes) -> None:
        self.body: bytes | None = body
        self.status = 0
        self.chunks: list[bytes] = []
        self.gone = asyncio.Event()

    async def receive(self) -> Message:
        if self.body is not None:
            message, self.body = {"type": "http.request", "body": self.body, "more_body": False}, None
            return message
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.chunks.append(message.get("body", b""))


def _http_scope(method: str, url: str, size: int, headers: Mapping[str, str]) -> Message:
    parts = urlsplit(url)
    sent = {"host": parts.netloc, "content-type": "application/json", "content-length": str(size), **headers}
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": parts.scheme,
        "path": parts.path,
        "raw_path": parts.path.encode(),
        "query_string": parts.query.encode(),
        "root_path": "",
        "headers": [(name.lower().encode(), value.encode()) for name, value in sent.items()],
        "client": None,
        "server": None,
    }


def normalise_url(address: str) -> str:
    """`host:port` or a URL as a URL without a trailing slash."""
    url = address.strip().rstrip("/")
    return url if "://" in url else f"http://{url}"


def raise_open_files_limit() -> None:
    """Raise this process's limit on open files to the hard limit.

    Every request in flight is a socket, and the usual soft limit of 1024 is too small for a rollout.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, 1 << 20) if hard != resource.RLIM_INFINITY else 1 << 20
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
