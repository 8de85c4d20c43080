"""Small HTTP helpers of our servers: JSON in, JSON out, errors in the shapes that SGLang uses.

1. `{"error": {"message"}}`: the request was understood and refused.
2. `{"error": "text"}`: the sampling parameters could not be decoded.
3. `{"object": "error", "message", "type", "param", "code"}`: the JSON body did not fit the endpoint.
4. `{"success": false, "message"}`: the weights could not be updated and are unchanged."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import anyio
import orjson
from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from agentrl.errors import AgentRLError
from agentrl.serving.server import CLIENT_GONE, read_json

T = TypeVar("T")
Model = TypeVar("Model", bound=BaseModel)
Handler = Callable[[Request], Awaitable[Response]]


class RequestError(AgentRLError):
    """Refusal of a request: the client gets `status` and `body`; `str(error)` is the message alone."""

    def __init__(self, message: str, body: dict[str, Any], status: int = 400) -> None:
        super().__init__(message)
        self.body, self.status = body, status


def refused(message: str) -> RequestError:
    """Return the error for a request that was understood but cannot be served."""
    return RequestError(message, {"error": {"message": message}})


def undecodable(message: str) -> RequestError:
    """Return the error for sampling parameters with wrong types or unknown names."""
    return RequestError(message, {"error": message})


def update_refused(message: str) -> RequestError:
    """Return the error for a weight update that cannot be done."""
    return RequestError(message, {"success": False, "message": message})


def openai_error(message: str, *, status: int = 400, kind: str = "Bad Request") -> RequestError:
    """Return an error in the form of the OpenAI endpoints, which body validation uses everywhere."""
    body = {"object": "error", "message": message, "type": kind, "param": None, "code": status}
    return RequestError(message, body, status)


def invalid_body(kind: str, message: str, *loc: str) -> RequestError:
    """Return the error for a body that does not fit the endpoint; `loc` is the path of the field."""
    detail = {"type": kind, "loc": ("body", *loc), "msg": message}
    return openai_error(f"1 validation error:\n  {detail}")


def refuse_pages(request: Request) -> None:
    """Raise RequestError (403) if a browser sent the request: no web page may control a server."""
    if {"origin", "sec-fetch-site"} & set(request.headers):
        said = "web pages may not control this server, only programs may"
        raise RequestError(said, {"error": {"message": said}}, 403)


class Json(JSONResponse):
    def render(self, content: Any) -> bytes:
        try:
            return orjson.dumps(content)
        except TypeError:  # a whole number of more than 64 bits
            return super().render(content)


async def refusal(_: Request, error: Exception) -> Response:
    """Return the answer to a `RequestError`; an entry of an application's `exception_handlers`."""
    assert isinstance(error, RequestError)
    return Json(error.body, error.status)


async def json_body(request: Request) -> Any:
    """Return the decoded body. Raises RequestError: the body is missing, or `read_json` refuses it."""
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
    """Return the body's fields that `model` has; null means the default. Raises RequestError: a field does not fit."""
    try:
        return model.model_validate({name: value for name, value in body.items() if value is not None})
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        raise invalid_body(first["type"], first["msg"], *map(str, first["loc"])) from None


def takes_body(handler: Callable[..., Awaitable[Response]]) -> Handler:
    """Return the endpoint of a `handler(service, **fields)`; its signature defines the fields of the JSON body."""
    _, *fields = inspect.signature(handler).parameters.values()
    defaults = {each.name: ... if each.default is each.empty else each.default for each in fields}
    types: dict[str, Any] = {each.name: (each.annotation, defaults[each.name]) for each in fields}
    model = create_model(handler.__name__, __config__=ConfigDict(protected_namespaces=()), **types)

    async def endpoint(request: Request) -> Response:
        body = fields_of(model, await object_body(request))
        return await handler(request.app.state.service, **dict(body))

    return endpoint


def field(body: Mapping[str, Any], name: str, kind: type, default: Any = ...) -> Any:
    """Return one field of a body; `default` if the field is null or missing. Default `...` means required."""
    value = body.get(name)
    if value is None and default is ...:
        raise invalid_body("missing", "Field required", name)
    if value is not None and not isinstance(value, kind):
        raise invalid_body(f"{kind.__name__}_type", f"Input should be a valid {kind.__name__}", name)
    return default if value is None else value


async def until_done(request: Request, done: Callable[[], Awaitable[T]]) -> T:
    """Return the result of `done()`. Raises `RequestError` if the client disconnects before."""
    with anyio.CancelScope() as scope:

        async def watch() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                continue
            scope.cancel()

        watcher = asyncio.create_task(watch())
        try:
            return await done()
        finally:
            watcher.cancel()
    raise RequestError("the client has gone", {}, CLIENT_GONE)
