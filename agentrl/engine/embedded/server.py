"""The HTTP application: routes, start, shutdown. `build` loads the model and returns a Starlette application whose
engine thread is not started. `serve` runs it until SIGTERM or SIGINT and prints `ready on http://HOST:PORT`. On a
signal, each request in flight is aborted and returns its tokens."""

import contextlib
import secrets
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from agentrl.engine.embedded import control
from agentrl.engine.embedded.generate import detokenize, generate, tokenize
from agentrl.engine.embedded.service import EngineService, Options
from agentrl.serving import server as serving
from agentrl.serving.http import Handler, RequestError, refusal, refuse_pages, takes_body

GET: dict[str, Handler] = {
    "/": control.root,
    "/ping": control.ping,
    "/health_generate": control.health_generate,
    "/v1/loads": control.loads,
    **dict.fromkeys(("/health", "/ready"), control.health),
    **dict.fromkeys(("/model_info", "/get_model_info"), control.model_info),
    **dict.fromkeys(("/server_info", "/get_server_info"), control.server_info),
    **dict.fromkeys(("/v1/models", "/v1/models/{model:path}"), control.models),
}
POST: dict[str, Handler] = {"/generate": generate}
POST |= {"/v1/tokenize": takes_body(tokenize), "/v1/detokenize": takes_body(detokenize)}
CONTROL = (  # POST endpoints, each under its own name
    control.abort_request, control.pause_generation, control.continue_generation,
    control.update_weights_from_disk, control.update_weights_from_tensor, control.update_weights_from_distributed,
    control.init_weights_update_group, control.destroy_weights_update_group,
    control.load_lora_adapter, control.unload_lora_adapter, control.begin_weight_update, control.end_weight_update,
    control.update_weight_version, control.weights_checker, control.get_weights_by_name,
    control.release_memory_occupation, control.resume_memory_occupation,
)  # fmt: skip
_FREE = (control.health, control.health_generate)  # routes of probes, which need no key


def build(options: Options, *, on_crash: Callable[[], None], routes: Mapping[str, Handler] | None = None) -> Starlette:
    """Return the application of a new `EngineService`; `routes` are more POST endpoints."""
    service = EngineService(options, on_crash=on_crash)
    handlers: dict[Any, Any] = {HTTPException: _no_route, RequestError: refusal}
    app = Starlette(routes=routes_of(options, routes or {}), lifespan=_lifespan, exception_handlers=handlers)
    app.state.service = service
    return app


def _behind_key(options: Options, handler: Handler, *, admin: bool = False) -> Handler:
    """Return `handler` behind the key, as in SGLang. If no key is set, browsers may not call control routes."""
    key = (options.admin_api_key if admin else None) or options.api_key
    if handler in _FREE or (key is None and not admin):
        return handler

    async def checked(request: Request) -> Response:
        if key is None:
            refuse_pages(request)
        elif not secrets.compare_digest(request.headers.get("authorization", "").encode(), f"Bearer {key}".encode()):
            return JSONResponse({"error": "Unauthorized"}, 401)
        return await handler(request)

    return checked


def routes_of(options: Options, more: Mapping[str, Handler]) -> list[Route]:
    """Return all routes, behind their keys."""
    guarded = partial(_behind_key, options)
    found = [Route(path, guarded(handler), methods=["GET"]) for path, handler in GET.items()]
    found += [Route(path, guarded(handler), methods=["POST"]) for path, handler in {**POST, **more}.items()]
    found += [Route(f"/{each.__name__}", guarded(takes_body(each), admin=True), methods=["POST"]) for each in CONTROL]
    return [*found, Route("/flush_cache", guarded(control.flush_cache, admin=True), methods=["GET", "POST"])]


@contextlib.asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncIterator[None]:
    app.state.service.worker.start()
    yield
    app.state.service.worker.stop()


async def _no_route(_: Request, error: HTTPException) -> Response:
    return JSONResponse({"detail": error.detail}, error.status_code, error.headers)


def serve(options: Options, routes: Mapping[str, Handler] | None = None) -> None:
    """Load the model and serve until a signal comes; `routes` as in `build`."""
    import torch

    if options.threads:
        torch.set_num_threads(options.threads)
    listener = serving.listen(options.host, options.port)
    app = build(options, on_crash=lambda: signal.raise_signal(signal.SIGTERM), routes=routes)
    stop = partial(app.state.service.worker.post, lambda engine: engine.abort(lambda _: True))
    serving.serve(app, listener, options.host, ready="ready on {url}", on_signal=stop)
