"""One HTTP exchange with an engine: bytes out, status and bytes in, and nothing but this house's errors.

1. httpx over aiohttp's connection pool: httpx's own pool rescans every connection on each open and close, which
   costs milliseconds a request at a few hundred connections; aiohttp's does not.
2. No time limit here except for opening a connection. Callers bound the whole exchange with a cancel scope.
3. Nothing is retried here. `ConnectionRefused` and `ConnectionLost` tell a caller whether the engine can have
   seen the request.
"""

from __future__ import annotations

import resource
from typing import Self

import aiohttp
import httpx
from httpx_aiohttp import AiohttpTransport

from agentrl.errors import EngineUnreachable

# Shorter than uvicorn's 5 s, so that the client and not the server drops an idle connection: a request sent while
# the server closes would look like a dead engine.
_KEEP_ALIVE = 4.0
_JSON = {"content-type": "application/json"}


class ConnectionRefused(EngineUnreachable):
    """No connection came up: the engine has not seen the request."""


class ConnectionLost(EngineUnreachable):
    """The connection broke before the whole answer was in: the engine may have worked on the request."""


class Transport:
    """An async context manager that holds the connections to all engines."""

    def __init__(self, *, connect_timeout: float) -> None:
        self._connect_timeout = connect_timeout

    async def __aenter__(self) -> Self:
        raise_open_files_limit()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE),
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        self._http = httpx.AsyncClient(
            transport=AiohttpTransport(client=self._session),
            timeout=httpx.Timeout(None, connect=self._connect_timeout),
            trust_env=False,
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._http.aclose()
        await self._session.close()

    async def exchange(
        self, method: str, url: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        """Send one request; returns status and body.

        Raises:
            ConnectionRefused, ConnectionLost: no whole answer came.
        """
        try:
            response = await self._http.request(
                method, url, content=body, headers=_JSON if headers is None else _JSON | headers
            )
        except httpx.ConnectError as error:
            raise ConnectionRefused(f"cannot connect to the engine at {url}: {error}", kind="engine_refused") from error
        except (httpx.TransportError, aiohttp.ClientError) as error:
            raise ConnectionLost(
                f"lost the connection to the engine at {url}: {type(error).__name__} {error}", kind="engine_lost"
            ) from error
        return response.status_code, response.content


def raise_open_files_limit() -> int:
    """Raise this process's limit on open files to the hard limit; returns the limit in force.

    Every request in flight is a socket, and the usual soft limit of 1024 is too small for a rollout.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, 1 << 20) if hard != resource.RLIM_INFINITY else 1 << 20
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return soft
