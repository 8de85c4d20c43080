"""One HTTP exchange with an engine: bytes out, status and bytes in. Failures raise errors of `agentrl.errors`. Nothing
is retried. Only opening a connection has a time limit here: callers bound the whole exchange with a cancel scope. The
engine sees a cancelled exchange as a closed connection."""

import asyncio
import logging
import math
import resource
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from email.utils import parsedate_to_datetime
from functools import lru_cache, partial
from typing import Any, NamedTuple, Self

import aiohttp
from yarl import URL

from agentrl.engine.settings import EngineSettings
from agentrl.errors import EngineUnreachable, raised_as

# Shorter than uvicorn's 5 s, so that the client and not the server drops an idle connection. If a request were sent
# while the server closes the connection, the engine would look lost.
_KEEP_ALIVE = 4.0
_UNCONNECTED = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, ValueError)  # ValueError: bad URL
_log = logging.getLogger(__name__)


class ConnectionRefused(EngineUnreachable):
    """Error: no connection was opened, so the engine has not seen the request."""


class ConnectionLost(EngineUnreachable):
    """Error: the connection broke before the whole answer arrived. The engine may have worked on the request."""


class Reply(NamedTuple):
    """An answer of an engine."""

    status: int
    body: bytes
    retry_after: float = 0.0  # seconds until the engine accepts a retry (its Retry-After header)
    content_type: str = "application/json"


Headers = Mapping[str, str] | None
Body = Mapping[str, Any] | None
Sink = Callable[[Reply], None] | None  # receives an answer of status 200 in parts; `exchange` returns an empty body


class HttpTransport:
    """The connections to all engines, kept open; an async context manager. aiohttp needs a third of httpx's CPU time
    per request, and saves milliseconds per request if hundreds are in flight."""

    control_headers: Mapping[str, str] = {}  # headers of control routes

    def __init__(self, settings: EngineSettings) -> None:
        self._connect_timeout = settings.engine_connect_timeout
        self._headers = _bearer(settings.api_key)
        self.control_headers = _bearer(settings.admin_api_key or settings.api_key)
        self._url = lru_cache(1024)(URL)

    async def __aenter__(self) -> Self:
        raise_open_files_limit()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_timeout),
            headers={"content-type": "application/json", "accept-encoding": "identity", **self._headers},
            skip_auto_headers=("User-Agent",),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._session.close()

    async def exchange(
        self, method: str, url: str, body: bytes | None = None, headers: Headers = None, sink: Sink = None
    ) -> Reply:
        """Send one request. Raises ConnectionRefused, ConnectionLost: no whole answer came. Raises errors of `sink`."""
        request = self._session.request
        try:
            refused = partial(ConnectionRefused, kind="engine_refused")
            with raised_as(refused, f"cannot connect to the engine at {url}", *_UNCONNECTED):
                asked = await request(method, self._url(url), data=body, headers=headers, allow_redirects=False)
            async with asked as response:
                wait = _seconds(after) if (after := response.headers.get("Retry-After")) else 0.0
                kind = response.headers.get("Content-Type", "application/json")
                reply = Reply(response.status, b"", wait, kind)
                if sink is None or reply.status != 200:
                    return reply._replace(body=await response.read())
                async for part in response.content.iter_any():
                    sink(reply._replace(body=part))
                return reply
        except (aiohttp.ClientError, ConnectionError) as error:
            said = f"lost the connection to the engine at {url}: {type(error).__name__} {error}"
            raise ConnectionLost(said, kind="engine_lost") from error


def _bearer(key: str | None) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


def _seconds(retry_after: str) -> float:
    """Return the seconds of a Retry-After header, a number or a date; 0 if the header is neither."""
    with suppress(ValueError):
        return max(0.0, seconds) if math.isfinite(seconds := float(retry_after)) else 0.0
    with suppress(ValueError, TypeError):
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
    return 0.0


def normalise_url(address: str) -> str:
    """Return `host:port` or a URL as a URL without a trailing slash."""
    url = address.strip().rstrip("/")
    return url if "://" in url else f"http://{url}"


def raise_open_files_limit() -> None:
    """Raise this process's limit on open files to the hard limit. Every request in flight is a socket, and the usual
    soft limit of 1024 is too small for a rollout."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, 1 << 20) if hard != resource.RLIM_INFINITY else 1 << 20
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@asynccontextmanager
async def beside(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run `work` until the context ends. An error of `work` is logged at once and raised at the end. `work` runs in a
    task, not in a task group, because a test's fixture may enter and leave the context in different tasks."""
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
        _log.error("the health checks of the engines have stopped", exc_info=error)
