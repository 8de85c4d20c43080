"""The HTTP application: routes, start, clean end. `build` loads the model and returns a Starlette application whose
engine thread is not started. `serve` runs it until SIGTERM or SIGINT and prints `ready on http://HOST:PORT`. On a
signal each live request ends with an abort that keeps its tokens."""

import contextlib
import signal
from collections.abc import AsyncIterator, Callable
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from agentrl.engine.embedded import control
from agentrl.engine.embedded.generate import detokenize, generate, tokenize
from agentrl.engine.embedded.openai import chat_completions, completions
from agentrl.engine.embedded.service import EngineService, Options
from agentrl.serving import server as serving
from agentrl.serving.http import Handler, RequestError, refusal, takes_body

GET: dict[str, Handler] = {
    "/": control.root,
    "/health": control.health,
    "/health_generate": control.health_generate,
    "/ready": control.health,
    "/ping": control.ping,
    "/model_info": control.model_info,
    "/get_model_info": control.model_info,
    "/server_info": control.server_info,
    "/get_server_info": control.server_info,
    "/v1/loads": control.loads,
    "/v1/models": control.models,
    "/v1/models/{model:path}": control.models,
    "/flush_cache": control.flush_cache,
}
POST: dict[str, Handler] = {
    "/generate": generate,
    "/v1/chat/completions": chat_completions,
    "/v1/completions": completions,
    "/v1/tokenize": takes_body(tokenize),
    "/v1/detokenize": takes_body(detokenize),
    "/flush_cache": control.flush_cache,
}
CONTROL = (
    control.abort_request,
    control.pause_generation,
    control.continue_generation,
    control.update_weights_from_disk,
    control.update_weights_from_tensor,
    control.update_weights_from_distributed,
    control.init_weights_update_group,
    control.destroy_weights_update_group,
    control.load_lora_adapter,
    control.unload_lora_adapter,
    control.begin_weight_update,
    control.end_weight_update,
    control.update_weight_version,
    control.weights_checker,
    control.get_weights_by_name,
    control.release_memory_occupation,
    control.resume_memory_occupation,
)
"""By POST, each under its own name."""


def build(options: Options, *, on_crash: Callable[[], None]) -> Starlette:
    """The application of a new `EngineService`, which see."""
    service = EngineService(options, on_crash=on_crash)
    routes = [Route(path, handler, methods=["GET"]) for path, handler in GET.items()]
    routes += [Route(path, handler, methods=["POST"]) for path, handler in POST.items()]
    routes += [Route(f"/{handler.__name__}", takes_body(handler), methods=["POST"]) for handler in CONTROL]
    app = Starlette(
        routes=routes, lifespan=_lifespan, exception_handlers={HTTPException: _no_route, RequestError: refusal}
    )
    app.state.service = service
    return app


@contextlib.asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncIterator[None]:
    service: EngineService = app.state.service
    service.worker.start()
    yield
    service.worker.stop()


async def _no_route(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"detail": error.detail}, error.status_code, error.headers)


def serve(options: Options) -> None:
    """Load the model and serve until a signal comes."""
    import torch

    if options.threads:
        torch.set_num_threads(options.threads)
    listener = serving.listen(options.host, options.port)
    app = build(options, on_crash=lambda: signal.raise_signal(signal.SIGTERM))
    service: EngineService = app.state.service
    stop = partial(service.worker.post, lambda engine: engine.abort(lambda _: True))
    serving.serve(app, listener, options.host, ready="ready on {url}", on_signal=stop)
