"""The control endpoints: abort, pause, cache, weights, health and information."""

import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from typing import Any, get_args

import anyio
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from torch import Tensor

from agentrl.engine.embedded.core import MASK_LIMIT, Engine, PauseMode
from agentrl.engine.embedded.errors import invalid_body, refused
from agentrl.engine.embedded.http import Handler, Json, field, object_body
from agentrl.engine.embedded.memory import TAGS
from agentrl.engine.embedded.service import Service
from agentrl.engine.embedded.weights import UpdateRefused, Weights

Body = dict[str, Any]
Update = Callable[[Service, Weights, Body], Awaitable[str]]
PROTOCOL = "0.5.23"
"""The SGLang version whose protocol this server speaks."""
FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. (When there are running or waiting requests, "
    "the operation will not be performed.)\n"
)


def _service(request: Request) -> Service:
    return request.app.state.service


# -- health and information --------------------------------------------------------------------------------------


async def health(request: Request) -> Response:
    """200 while the engine's thread lives, at once, also while paused (or 503 then, if the server was told so)."""
    service = _service(request)
    strict = service.options.health_while_paused == "fail"
    fine = service.worker.alive and not (strict and service.engine.paused)
    return Response(status_code=200 if fine else 503)


async def health_generate(request: Request) -> Response:
    """Like `/health`, after one turn of the engine's loop."""
    with anyio.move_on_after(20):
        await _service(request).worker.call(lambda engine: engine.generated)
        return await health(request)
    return Response(status_code=503)


async def ping(_: Request) -> Response:
    return Response(status_code=200)


async def root(_: Request) -> Response:
    return Json("SGLang is running")


async def model_info(request: Request) -> Response:
    service = _service(request)
    options = service.options
    return Json(
        {
            "model_path": service.model_path,
            "served_model_name": options.served_model_name or options.model_path,
            "tokenizer_path": options.model_path,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": service.version,
            "load_format": "auto",
            "reasoning_parser": _named(options.reasoning_parser),
            "tool_call_parser": _named(options.tool_call_parser),
            "disaggregation_mode": "null",
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": service.config.get("model_type"),
            "architectures": service.config.get("architectures"),
        }
    )


async def server_info(request: Request) -> Response:
    service = _service(request)
    engine = service.engine
    return Json(
        {
            **asdict(service.options),
            "context_length": service.context,
            "slots": len(engine.slots),
            "sampling_mask_max_tokens": MASK_LIMIT,
            "enable_memory_saver": True,
            "tokenizer_path": service.options.model_path,
            "version": PROTOCOL,
            "engine": "agentrl-embedded",
            "status": "ready" if service.worker.alive else "failed",
            "startup_time": service.started,
            "weight_version": service.version,
            "internal_states": [{**_load(service), "generated_tokens": engine.generated, "paused": engine.paused}],
        }
    )


def _named(parser: str) -> str | None:
    return None if parser in ("auto", "none") else parser


def _load(service: Service) -> dict[str, Any]:
    engine = service.engine
    used = sum(job.filled for job in engine.running[:])
    total = len(engine.slots) * service.context
    return {
        "dp_rank": 0,
        "num_running_reqs": len(engine.running),
        "num_waiting_reqs": len(engine.waiting),
        "num_used_tokens": used,
        "num_total_tokens": used,
        "max_total_num_tokens": total,
        "max_running_requests": len(engine.slots),
        "token_usage": used / total,
    }


async def loads(request: Request) -> Response:
    load = {"timestamp": time.time(), **_load(_service(request))}
    stamp = datetime.now(UTC).isoformat()
    return Json({"timestamp": stamp, "version": PROTOCOL, "accelerator": None, "num_accelerators": 1, "loads": [load]})


async def models(request: Request) -> Response:
    service = _service(request)
    name = service.options.served_model_name or service.options.model_path
    card = {"id": name, "object": "model", "created": int(service.started), "owned_by": "sglang", "root": name}
    card |= {"parent": None, "max_model_len": service.context}
    asked = request.path_params.get("model")
    if asked in (None, name):
        return Json(card if asked else {"object": "list", "data": [card]})
    missing = {"message": f"The model '{asked}' does not exist", "type": "invalid_request_error", "param": "model"}
    return Json({"error": {**missing, "code": "model_not_found"}}, status_code=404)


# -- abort, pause, cache -----------------------------------------------------------------------------------------


async def abort_request(request: Request) -> Response:
    body = await object_body(request)
    rid = field(body, "rid", str, "")
    await _service(request).abort(rid, everything=field(body, "abort_all", bool, False))
    return Response(status_code=200)


async def pause_generation(request: Request) -> Response:
    body = await object_body(request)
    mode: PauseMode = body.get("mode") or "abort"
    if mode not in get_args(PauseMode):
        raise invalid_body("literal_error", "Input should be 'abort', 'retract' or 'in_place'", "mode")
    await _service(request).worker.call(lambda engine: engine.pause(mode))
    return Json({"message": "Generation paused successfully.", "status": "ok"})


async def continue_generation(request: Request) -> Response:
    await object_body(request)
    await _service(request).worker.call(Engine.resume)
    return Json({"message": "Generation continued successfully.", "status": "ok"})


async def flush_cache(request: Request) -> Response:
    worker = _service(request).worker
    raw = request.query_params.get("timeout", "0")
    try:
        timeout = float(raw)
    except ValueError:
        raise invalid_body("float_parsing", "Input should be a valid number", "timeout") from None
    flushed = await worker.call(Engine.flush)
    if not flushed and timeout > 0:
        with anyio.move_on_after(timeout):
            flushed = await worker.exclusive(Engine.flush)
    if flushed:
        return PlainTextResponse(FLUSHED)
    return PlainTextResponse("Timed out waiting for idle state." if timeout > 0 else "Flush cache failed.\n", 400)


async def release_memory(request: Request) -> Response:
    return await _occupy(request, request.app.state.memory.release)


async def resume_memory(request: Request) -> Response:
    return await _occupy(request, request.app.state.memory.resume)


async def _occupy(request: Request, move: Callable[[Engine, list[str]], None]) -> Response:
    tags: list[str] = field(await object_body(request), "tags", list, None) or list(TAGS)
    if unknown := [tag for tag in tags if tag not in TAGS]:
        raise invalid_body("literal_error", f"Input should be among {', '.join(TAGS)}; got {unknown[0]!r}", "tags")
    await _service(request).worker.call(lambda engine: move(engine, tags))
    return Json(None)


# -- weights -----------------------------------------------------------------------------------------------------


def _update(update: Update, **more: Any) -> Handler:
    """Answers with the update's message, or with 400 and the reason for which it was refused."""

    async def handler(request: Request) -> Response:
        body = await object_body(request)
        try:
            message = await update(_service(request), request.app.state.weights, body)
        except UpdateRefused as error:
            return Json({"success": False, "message": str(error), **more}, status_code=400)
        return Json({"success": True, "message": message, **more})

    return handler


async def _write(
    service: Service, weights: Weights, named: list[tuple[str, Tensor]], version: str | None, abort: bool, done: str
) -> str:
    if abort:
        await service.abort("", everything=True)
    await service.worker.exclusive(lambda engine: weights.write(engine, named, version))
    return done if version is None else f"{done} Weight version updated to {version}."


@partial(_update, num_paused_requests=0)
async def update_weights_from_disk(service: Service, weights: Weights, body: Body) -> str:
    path: str = field(body, "model_path", str)
    version: str | None = field(body, "weight_version", str, None)
    abort: bool = field(body, "abort_all_requests", bool, False)
    named = await weights.read_folder(path)
    message = await _write(service, weights, named, version, abort, "Succeeded to update model weights.")
    service.model_path = path
    return message


@_update
async def init_weights_update_group(_: Service, weights: Weights, body: Body) -> str:
    host, port = field(body, "master_address", str), field(body, "master_port", int)
    await weights.join(
        address=f"tcp://{host}:{port}",
        rank=field(body, "rank_offset", int),
        world_size=field(body, "world_size", int),
        name=field(body, "group_name", str, "weight_update_group"),
        backend=field(body, "backend", str, "nccl"),
    )
    return "Succeeded to initialize custom process group."


@_update
async def destroy_weights_update_group(_: Service, weights: Weights, body: Body) -> str:
    await weights.destroy(field(body, "group_name", str, "weight_update_group"))
    return "Succeeded to destroy custom process group."


@_update
async def update_weights_from_distributed(service: Service, weights: Weights, body: Body) -> str:
    names: list[str] = field(body, "names", list)
    dtypes: list[str] = field(body, "dtypes", list)
    shapes: list[list[int]] = field(body, "shapes", list)
    group: str = field(body, "group_name", str, "weight_update_group")
    version: str | None = field(body, "weight_version", str, None)
    abort: bool = field(body, "abort_all_requests", bool, False)
    weights.require_session("update_weights_from_distributed")
    if body.get("load_format") is not None:
        raise UpdateRefused("load_format is not supported here: broadcast the tensors one by one.")
    named = await weights.receive(names, dtypes, shapes, group)
    return await _write(service, weights, named, version, abort, "Succeeded to update parameter online.")


@_update
async def update_weights_from_tensor(_: Service, weights: Weights, __: Body) -> str:
    weights.require_session("update_weights_from_tensor")
    raise UpdateRefused(
        "update_weights_from_tensor is not supported by the embedded engine, because its payload is a pickle: use "
        "update_weights_from_distributed or update_weights_from_disk."
    )


@_update
async def load_lora_adapter(service: Service, weights: Weights, body: Body) -> str:
    """One adapter at a time: the one that was there before is put away."""
    name, path = field(body, "lora_name", str), field(body, "lora_path", str)
    shape, layers = await weights.read_adapter(path)
    await service.worker.exclusive(lambda engine: weights.attach(engine, shape.scale, layers))
    service.adapter = name
    return f"LoRA adapter {name!r} was loaded"


@_update
async def unload_lora_adapter(service: Service, weights: Weights, body: Body) -> str:
    name = field(body, "lora_name", str)
    if name == service.adapter:
        await service.worker.exclusive(lambda engine: weights.attach(engine, 1.0, []))
        service.adapter = None
    return f"LoRA adapter {name!r} is not loaded"


@_update
async def begin_weight_update(_: Service, weights: Weights, __: Body) -> str:
    weights.begin()
    return "Success"


@_update
async def end_weight_update(_: Service, weights: Weights, __: Body) -> str:
    weights.end()
    return "Success"


async def update_weight_version(request: Request) -> Response:
    service, body = _service(request), await object_body(request)
    version: str = field(body, "new_version", str)
    if field(body, "abort_all_requests", bool, True):
        await service.abort("", everything=True)
    await service.worker.call(lambda engine: setattr(engine, "version", version))
    message = f"Weight version updated to {version}"
    return Json({"success": True, "message": message, "new_version": version})


async def weights_checker(request: Request) -> Response:
    service, body = _service(request), await object_body(request)
    weights: Weights = request.app.state.weights
    action = field(body, "action", str)
    if action != "checksum":
        raise refused(f"weights_checker: action {action!r} is not supported by the embedded engine, only 'checksum'.")
    try:
        sums = await service.worker.call(weights.checksums)
    except UpdateRefused as error:
        raise refused(str(error)) from error
    return Json({"success": True, "message": "Success.", "ranks": [{"checksums": sums}]})


async def get_weights_by_name(request: Request) -> Response:
    await object_body(request)
    raise refused("Get parameter by name failed")
