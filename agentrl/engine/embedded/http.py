"""Small HTTP helpers: JSON in, JSON out, errors in SGLang's shapes, and noticing that a client has gone."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import anyio
import orjson
from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from starlette.requests import Request
from starlette.responses import Response

from agentrl.engine.embedded.errors import RequestError, invalid_body
from agentrl.serving import CLIENT_GONE, read_json

T = TypeVar("T")
Model = TypeVar("Model", bound=BaseModel)
Handler = Callable[[Request], Awaitable[Response]]


class Json(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content)


async def refusal(_: Request, error: Exception) -> Response:
    """What a `RequestError` answers; one of an application's `exception_handlers`."""
    assert isinstance(error, RequestError)
    return Json(error.body, error.status)


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


def fields_of(model: type[Model], body: Mapping[str, Any]) -> Model:
    """The fields of a body that `model` has; null means a field's default. Raises `RequestError` for what does not fit."""
    try:
        return model.model_validate({name: value for name, value in body.items() if value is not None})
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        raise invalid_body(first["type"], first["msg"], *map(str, first["loc"])) from None


def takes_body(handler: Callable[..., Awaitable[Response]]) -> Handler:
    """The endpoint of a `handler(service, **fields)`, whose signature says which fields its JSON body has."""
    _, *fields = inspect.signature(handler).parameters.values()
    defaults = {each.name: ... if each.default is each.empty else each.default for each in fields}
    types: dict[str, Any] = {each.name: (each.annotation, defaults[each.name]) for each in fields}
    model = create_model(handler.__name__, __config__=ConfigDict(protected_namespaces=()), **types)

    async def endpoint(request: Request) -> Response:
        body = fields_of(model, await object_body(request))
        return await handler(request.app.state.service, **dict(body))

    return endpoint


def field(body: Mapping[str, Any], name: str, kind: type, default: Any = ...) -> Any:
    """One field of a body that is read in parts: `default` for null or missing; `...` means required."""
    value = body.get(name)
    if value is None and default is ...:
        raise invalid_body("missing", "Field required", name)
    if value is not None and not isinstance(value, kind):
        raise invalid_body(f"{kind.__name__}_type", f"Input should be a valid {kind.__name__}", name)
    return default if value is None else value


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
