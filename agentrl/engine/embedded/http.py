"""Small HTTP helpers: JSON in, JSON out, errors in SGLang's shapes, and noticing that a client has gone."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import anyio
import orjson
from starlette.requests import Request
from starlette.responses import Response

from agentrl.engine.embedded.errors import RequestError, invalid_body
from agentrl.serving import CLIENT_GONE, read_json

T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]


class Json(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content)


def answers_errors(handler: Handler) -> Handler:
    """Turn a handler's `RequestError` into its HTTP answer."""

    async def wrapped(request: Request) -> Response:
        try:
            return await handler(request)
        except RequestError as error:
            return Json(error.body, status_code=error.status)

    return wrapped


async def json_body(request: Request) -> Any:
    """The decoded body; raises `RequestError` when it is missing, or is not what `read_json` takes."""
    try:
        body = await read_json(request)
    except ValueError as error:
        raise invalid_body("json_invalid", str(error)) from None
    if body is None:
        raise invalid_body("missing", "Field required")
    return body


async def object_body(request: Request) -> dict[str, Any]:
    body = await json_body(request)
    if not isinstance(body, dict):
        raise invalid_body("dict_type", "Input should be a valid dictionary")
    return body


def field(body: dict[str, Any], name: str, kind: type, default: Any = ...) -> Any:
    """One field of a control body: checked type, default for null or missing; `...` means required."""
    value = body.get(name)
    if value is None:
        if default is ...:
            raise invalid_body("missing", "Field required", name)
        return default
    if kind is bool and value in ("yes", "no", "true", "false", 0, 1):
        return value in ("yes", "true", 1, True)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        label = {str: "string", int: "integer", bool: "boolean", list: "list", dict: "dictionary"}[kind]
        raise invalid_body(f"{label}_type", f"Input should be a valid {label}", name)
    return value


async def until_done(request: Request, done: Callable[[], Awaitable[T]]) -> T:
    """What `done()` gives. Raises `RequestError` when the client disconnects before."""
    with anyio.CancelScope() as scope:
        watcher = asyncio.create_task(_watch(request, scope))
        try:
            return await done()
        finally:
            watcher.cancel()
    raise RequestError("the client has gone", {}, CLIENT_GONE)


async def _watch(request: Request, scope: anyio.CancelScope) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue
    scope.cancel()
