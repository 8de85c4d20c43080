"""One HTTP exchange with an engine: bytes out, status and bytes in, and nothing but this house's errors.

1. aiohttp, directly: it costs a third of the CPU time a request of httpx over the same connections, and httpx's own
   pool, which rescans every connection on each open and close, costs milliseconds at a few hundred of them.
2. No time limit here except for opening a connection. Callers bound the whole exchange with a cancel scope.
3. Nothing is retried here. `ConnectionRefused` and `ConnectionLost` tell a caller whether the engine can have
   seen the request.
"""

from __future__ import annotations

import resource
from collections.abc import Mapping
from typing import Self

import aiohttp
from yarl import URL

from agentrl.errors import EngineUnreachable

# Shorter than uvicorn's 5 s, so that the client and not the server drops an idle connection: a request sent while
# the server closes would look like a dead engine.
_KEEP_ALIVE = 4.0


class ConnectionRefused(EngineUnreachable):
    """No connection came up: the engine has not seen the request."""


class ConnectionLost(EngineUnreachable):
    """The connection broke before the whole answer was in: the engine may have worked on the request."""


class Transport:
    """An async context manager that holds the connections to all engines."""

    def __init__(self, *, connect_timeout: float) -> None:
        self._connect_timeout = connect_timeout
        self._urls: dict[str, URL] = {}

    async def __aenter__(self) -> Self:
        raise_open_files_limit()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_timeout),
            headers={"content-type": "application/json"},
            skip_auto_headers=("User-Agent",),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._session.close()

    async def exchange(
        self, method: str, url: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, bytes]:
        """Send one request; returns status and body.

        Raises:
            ConnectionRefused, ConnectionLost: no whole answer came.
        """
        target = self._urls.get(url)
        if target is None:
            target = self._urls[url] = URL(url)
        try:
            async with self._session.request(
                method, target, data=body, headers=headers, allow_redirects=False
            ) as response:
                return response.status, await response.read()
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, aiohttp.InvalidURL) as error:
            raise ConnectionRefused(f"cannot connect to the engine at {url}: {error}", kind="engine_refused") from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise ConnectionLost(
                f"lost the connection to the engine at {url}: {type(error).__name__} {error}", kind="engine_lost"
            ) from error


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
