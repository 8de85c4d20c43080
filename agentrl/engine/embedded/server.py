"""The HTTP application and its life: routes, start, clean end.

1. `build` loads the model and gives a Starlette application with its engine thread not yet started; it changes nothing
   of the process that it runs in. `serve` makes a process of its own of it, until SIGTERM or SIGINT.
2. On a signal every live request ends at once with an abort that keeps what it has; then `agentrl.serving` ends the process.
3. When it listens it writes one line to stdout: `ready on http://HOST:PORT`.
4. Nothing is served from a thread pool but weight reading; no handler runs a forward pass.
"""

import contextlib
import signal
from collections.abc import AsyncIterator, Callable
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from agentrl import serving
from agentrl.engine.embedded import control
from agentrl.engine.embedded.core import Engine
from agentrl.engine.embedded.generate import generate
from agentrl.engine.embedded.http import Handler, answers_errors
from agentrl.engine.embedded.memory import Memory
from agentrl.engine.embedded.model import Vocabulary, context_length, load_model, named, read_config, slots_that_fit
from agentrl.engine.embedded.openai import Chats, chat_completions, completions
from agentrl.engine.embedded.service import Options, Service
from agentrl.engine.embedded.tokens import detokenize, tokenize
from agentrl.engine.embedded.weights import Weights
from agentrl.engine.embedded.worker import Worker

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
}
POST: dict[str, Handler] = {
    "/generate": generate,
    "/v1/chat/completions": chat_completions,
    "/v1/completions": completions,
    "/v1/tokenize": tokenize,
    "/v1/detokenize": detokenize,
    "/abort_request": control.abort_request,
    "/pause_generation": control.pause_generation,
    "/continue_generation": control.continue_generation,
    "/update_weights_from_disk": control.update_weights_from_disk,
    "/update_weights_from_tensor": control.update_weights_from_tensor,
    "/update_weights_from_distributed": control.update_weights_from_distributed,
    "/init_weights_update_group": control.init_weights_update_group,
    "/destroy_weights_update_group": control.destroy_weights_update_group,
    "/load_lora_adapter": control.load_lora_adapter,
    "/unload_lora_adapter": control.unload_lora_adapter,
    "/begin_weight_update": control.begin_weight_update,
    "/end_weight_update": control.end_weight_update,
    "/update_weight_version": control.update_weight_version,
    "/weights_checker": control.weights_checker,
    "/get_weights_by_name": control.get_weights_by_name,
    "/release_memory_occupation": control.release_memory,
    "/resume_memory_occupation": control.resume_memory,
}


def build(options: Options, *, on_crash: Callable[[], None]) -> Starlette:
    """Load everything the server needs; `on_crash` is called in the engine's thread when that has failed for good.

    Raises:
        AgentRLError: the folder cannot be served.
    """
    config = read_config(options.model_path)
    context = context_length(config, options.context_length)
    dtype = options.dtype
    if dtype == "auto":
        dtype = "bfloat16" if options.device.startswith("cuda") else "float32"
    model = load_model(
        options.model_path, dtype=dtype, device=options.device, trust_remote_code=options.trust_remote_code
    )
    slots = options.slots or slots_that_fit(model, context)
    with named(f"{slots} sequences of {context} tokens do not fit; give smaller --slots or --context-length"):
        engine = Engine(model, slots=slots, context_length=context, chunk=options.chunk, exact=options.exact)
    worker = Worker(engine, on_crash=on_crash)
    vocab = Vocabulary(options.model_path, config)
    service = Service(options, worker, engine, vocab, config, context, options.model_path)
    routes = [Route(path, answers_errors(handler), methods=["GET"]) for path, handler in GET.items()]
    routes += [Route(path, answers_errors(handler), methods=["POST"]) for path, handler in POST.items()]
    routes.append(Route("/flush_cache", answers_errors(control.flush_cache), methods=["GET", "POST"]))
    app = Starlette(routes=routes, lifespan=_lifespan, exception_handlers={HTTPException: _no_route})
    app.state.service = service
    app.state.chats = Chats(service)
    app.state.weights, app.state.memory = Weights(model), Memory()
    return app


@contextlib.asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncIterator[None]:
    worker: Worker = app.state.service.worker
    worker.start()
    yield
    worker.stop()


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
    worker: Worker = app.state.service.worker
    stop = partial(worker.post, lambda engine: engine.abort(lambda _: True))
    serving.serve(app, listener, options.host, ready="ready on {url}", on_signal=stop)
