"""Exchanges JSON with a grading server; all failures are typed. Connecting is retried, and so is a busy server
(`_BUSY`) while the deadline allows. The wait for one of the `concurrency` places does not count against the deadline.
Kinds of failures begin with `kind`: `_unreachable`, `_timeout`, `_http_STATUS`, `_bad_answer`. Proxies of the
environment are not used."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import anyio

from agentrl.errors import GraderFailure, SettingsError, raised_as

_CONNECT_RETRIES, _CONNECT_TIMEOUT, _MAX_ANSWER = 2, 5.0, 8 << 20  # tries, seconds, bytes
_BUSY, _WAITS = (429, 502, 503, 504), (0.5, 1.0, 2.0, 4.0)  # statuses, seconds before the next try
_bad_metadata = partial(GraderFailure, kind="grader_bad_metadata")


@dataclass
class JsonService:
    """An async context manager with the connections to one server. `what` names the server, `flag` its setting, and
    `kind` begins all kinds of failures. `timeout` is in seconds. Raises SettingsError: `url` is not an address."""

    url: str
    what: str
    flag: str
    kind: str
    timeout: float
    concurrency: int

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise SettingsError(f"{self.flag} {self.url!r}: expected an address that begins with http:// or https://")

    async def __aenter__(self) -> Self:
        import httpx

        self._places = anyio.CapacityLimiter(self.concurrency)
        # As many connections as places: httpx's own queue would count against the deadline.
        limits = httpx.Limits(max_connections=self.concurrency, max_keepalive_connections=self.concurrency)
        with raised_as(SettingsError, f"{self.flag} {self.url!r}: not an address", httpx.InvalidURL):
            transport = httpx.AsyncHTTPTransport(retries=_CONNECT_RETRIES, limits=limits)
            self._client = httpx.AsyncClient(transport=transport, timeout=httpx.Timeout(None, connect=_CONNECT_TIMEOUT))
            httpx.URL(self.url)
        return self

    async def __aexit__(self, *exc: object) -> None:
        with anyio.CancelScope(shield=True), anyio.move_on_after(5.0):
            await self._client.aclose()

    async def post(self, payload: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Any:
        """Post the payload; return the reply's JSON. Raises GraderFailure: see the module. HttpStatus: not 2xx."""
        import httpx

        what = f"{self.what} takes JSON, and label or metadata are not"
        with raised_as(_bad_metadata, what, TypeError, ValueError, RecursionError):
            # ASCII with escapes: lone surrogates in model text have no UTF-8 form.
            body = json.dumps(payload, allow_nan=False).encode("ascii")
        try:
            async with self._places:
                with anyio.fail_after(self.timeout):
                    status, answer = await self._persist(body, {"content-type": "application/json", **(headers or {})})
        except TimeoutError as error:
            raise self._failure("timeout", f"did not answer within {self.timeout:g} s") from error
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            said = f"cannot be reached: {str(error) or 'no answer'}; is it running, and {self.flag} right?"
            raise self._failure("unreachable", said) from error
        except (httpx.TransportError, httpx.InvalidURL, httpx.DecodingError) as error:
            raise self._failure("unreachable", f"broke the connection: {type(error).__name__} {error}") from error
        said = answer[:200].decode(errors="replace")
        if not 200 <= status < 300:
            message = f"{self.what} at {self.url} answered HTTP {status}: {said!r}"
            raise HttpStatus(message, kind=f"{self.kind}_http_{status}")
        try:
            return json.loads(answer)
        except (ValueError, RecursionError) as error:
            raise self.bad_answer("JSON", said) from error

    def bad_answer(self, expected: str, got: Any) -> GraderFailure:
        return self._failure("bad_answer", f"answered {got!r:.200}; expected {expected}")

    async def _persist(self, body: bytes, headers: Mapping[str, str]) -> tuple[int, bytes]:
        """Repeat the request while the server is busy, after `_WAITS` or a longer time that the server asks for."""
        for wait in (*_WAITS, math.inf):
            status, answer, asked = await self._exchange(body, headers)
            again = anyio.current_time() + (wait := max(wait, asked))
            if status not in _BUSY or again >= anyio.current_effective_deadline():
                break
            await anyio.sleep(wait)
        return status, answer

    async def _exchange(self, body: bytes, headers: Mapping[str, str]) -> tuple[int, bytes, int]:
        """Return status, body and the seconds of `Retry-After` (0 if it has none) of the reply to one request."""
        async with self._client.stream("POST", self.url, content=body, headers=headers) as reply:
            answer = bytearray()
            async for chunk in reply.aiter_bytes():
                answer += chunk
                if len(answer) > _MAX_ANSWER:
                    raise self.bad_answer(f"at most {_MAX_ANSWER >> 20} MiB", bytes(answer[:50]))
            asked = reply.headers.get("retry-after", "")
            return reply.status_code, bytes(answer), int(asked) if re.fullmatch("[0-9]{1,6}", asked) else 0

    def _failure(self, slug: str, message: str) -> GraderFailure:
        return GraderFailure(f"{self.what} at {self.url} {message}", kind=f"{self.kind}_{slug}")


class HttpStatus(GraderFailure):
    """The server answered with an error status."""

    @property
    def status(self) -> int:
        """The status, which is the end of `kind`."""
        return int(self.kind.rpartition("_")[2])
