"""The control endpoints: abort, pause, cache, weights, health and information. A handler that takes an `EngineService`
has the fields of its JSON body in its signature, see `http.takes_body`."""

import time
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from typing import Any

import anyio
from anyio import to_thread
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from agentrl.engine.embedded.core import MASK_LIMIT, Engine, PauseMode
from agentrl.engine.embedded.service import EngineService
from agentrl.engine.embedded.weights import TAGS, Named, Tag
from agentrl.serving.http import Json, RequestError, invalid_body, refused, update_refused

PROTOCOL = "0.5.23"  # the SGLang version whose protocol this server speaks
FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. (When there are running or waiting requests, "
    "the operation will not be performed.)\n"
)


def _service(request: Request) -> EngineService:
    return request.app.state.service


async def health(request: Request) -> Response:
    """Answer 200 if the engine's thread runs, even if generation is paused; else 503."""
    return Response(status_code=200 if _service(request).worker.alive else 503)


async def health_generate(request: Request) -> Response:
    """Answer like `/health`, after one iteration of the engine's loop."""
    with anyio.move_on_after(20):
        await _service(request).worker.call(lambda engine: engine.generated)
        return await health(request)
    return Response(status_code=503)


async def ping(_: Request) -> Response:
    return Response()


async def root(_: Request) -> Response:
    return Json("SGLang is running")


async def model_info(request: Request) -> Response:
    service = _service(request)
    options = service.options
    parsers = {"reasoning_parser": options.reasoning_parser, "tool_call_parser": options.tool_call_parser}
    return Json(
        {
            "model_path": service.model_path,
            "served_model_name": options.served_model_name or options.model_path,
            "tokenizer_path": options.model_path,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": service.engine.version,
            "load_format": "auto",
            **{name: None if parser in ("auto", "none") else parser for name, parser in parsers.items()},
            "disaggregation_mode": "null",
            "has_image_understanding": service.reader is not None,
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
            **{name: value for name, value in asdict(service.options).items() if not name.endswith("api_key")},
            "context_length": service.context,
            "slots": len(engine.slots),
            "sampling_mask_max_tokens": MASK_LIMIT,
            "enable_memory_saver": True,
            "enable_weights_cpu_backup": True,
            "tokenizer_path": service.options.model_path,
            "version": PROTOCOL,
            "engine": "agentrl-embedded",
            "status": "ready" if service.worker.alive else "failed",
            "startup_time": service.started,
            "weight_version": service.engine.version,
            "internal_states": [{**_load(service), "generated_tokens": engine.generated, "paused": engine.paused}],
        }
    )


def _load(service: EngineService) -> dict[str, Any]:
    engine = service.engine
    used, total = sum(job.filled for job in engine.running[:]), len(engine.slots) * service.context
    requests = {"num_running_reqs": len(engine.running), "num_waiting_reqs": len(engine.waiting)}
    tokens = {"num_used_tokens": used, "num_total_tokens": used, "max_total_num_tokens": total}
    most = {"max_running_requests": len(engine.slots), "token_usage": used / total}
    return {"dp_rank": 0, **requests, **tokens, **most}


async def loads(request: Request) -> Response:
    load = {"timestamp": time.time(), **_load(_service(request))}
    stamp = datetime.now(UTC).isoformat()
    return Json({"timestamp": stamp, "version": PROTOCOL, "accelerator": None, "num_accelerators": 1, "loads": [load]})


async def models(request: Request) -> Response:
    service = _service(request)
    name = service.options.served_model_name or service.options.model_path
    card = {"id": name, "object": "model", "created": int(service.started), "owned_by": "sglang", "root": name}
    card |= {"parent": None, "max_model_len": service.context}
    if (asked := request.path_params.get("model")) in (None, name):
        return Json(card if asked else {"object": "list", "data": [card]})
    missing = {"message": f"The model '{asked}' does not exist", "type": "invalid_request_error", "param": "model"}
    return Json({"error": {**missing, "code": "model_not_found"}}, status_code=404)


async def abort_request(service: EngineService, rid: str = "", abort_all: bool = False) -> Response:
    await service.abort(rid, everything=abort_all)
    return Response()


async def pause_generation(service: EngineService, mode: PauseMode = "abort") -> Response:
    await service.worker.call(lambda engine: engine.pause(mode))
    return Json({"message": "Generation paused successfully.", "status": "ok"})


async def continue_generation(service: EngineService) -> Response:
    await service.worker.call(Engine.resume)
    return Json({"message": "Generation continued successfully.", "status": "ok"})


async def flush_cache(request: Request) -> Response:
    worker = _service(request).worker
    try:
        timeout = float(request.query_params.get("timeout", "0"))
    except ValueError:
        raise invalid_body("float_parsing", "Input should be a valid number", "timeout") from None
    if not (flushed := await worker.call(Engine.flush)) and timeout > 0:
        with anyio.move_on_after(timeout):
            flushed = await worker.exclusive(Engine.flush)
    if flushed:
        return PlainTextResponse(FLUSHED)
    return PlainTextResponse("Timed out waiting for idle state." if timeout > 0 else "Flush cache failed.\n", 400)


async def release_memory_occupation(service: EngineService, tags: list[Tag] | None = None) -> Response:
    await service.worker.call(lambda engine: service.weights.release(engine, tags or TAGS))
    return Json(None)


async def resume_memory_occupation(service: EngineService, tags: list[Tag] | None = None) -> Response:
    await service.worker.call(lambda engine: service.weights.resume(engine, tags or TAGS))
    return Json(None)


def _done(message: str, **more: Any) -> Response:
    return Json({"success": True, "message": message, **more})


async def _write(service: EngineService, named: Named, version: str | None, abort: bool, done: str) -> str:
    if abort:
        await service.abort("", everything=True)
    await service.worker.exclusive(lambda engine: service.weights.write(engine, named, version))
    return done if version is None else f"{done} Weight version updated to {version}."


async def update_weights_from_disk(
    service: EngineService, model_path: str, weight_version: str | None = None, abort_all_requests: bool = False
) -> Response:
    done = "Succeeded to update model weights."
    try:
        named = await to_thread.run_sync(service.weights.read_folder, model_path)
        message = await _write(service, named, weight_version, abort_all_requests, done)
    except RequestError as error:
        error.body["num_paused_requests"] = 0
        raise
    service.model_path = model_path
    return _done(message, num_paused_requests=0)


async def init_weights_update_group(
    service: EngineService,
    *,
    master_address: str,
    master_port: int,
    rank_offset: int,
    world_size: int,
    group_name: str = "weight_update_group",
    backend: str = "nccl",
) -> Response:
    address = f"tcp://{master_address}:{master_port}"
    join = service.weights.join
    await join(address=address, rank=rank_offset, world_size=world_size, name=group_name, backend=backend)
    return _done("Succeeded to initialize custom process group.")


async def destroy_weights_update_group(service: EngineService, group_name: str = "weight_update_group") -> Response:
    await service.weights.destroy(group_name)
    return _done("Succeeded to destroy custom process group.")


async def update_weights_from_distributed(
    service: EngineService,
    *,
    names: list[str],
    dtypes: list[str],
    shapes: list[list[int]],
    group_name: str = "weight_update_group",
    weight_version: str | None = None,
    abort_all_requests: bool = False,
    load_format: str | None = None,
) -> Response:
    service.weights.require_session("update_weights_from_distributed")
    if load_format not in (None, "flattened_bucket"):
        raise update_refused(f"load_format must be null or flattened_bucket, got {load_format!r}.")
    receive = partial(service.weights.receive, names, dtypes, shapes, group_name, flat=load_format is not None)
    named = await to_thread.run_sync(receive)
    done = "Succeeded to update parameter online."
    return _done(await _write(service, named, weight_version, abort_all_requests, done))


async def update_weights_from_tensor(service: EngineService) -> Response:
    service.weights.require_session("update_weights_from_tensor")
    said = "update_weights_from_tensor is not supported by the embedded engine, because its payload is a pickle"
    raise update_refused(f"{said}: use update_weights_from_distributed or update_weights_from_disk.")


async def load_lora_adapter(service: EngineService, lora_name: str, lora_path: str) -> Response:
    """Load an adapter in place of the former adapter: the model has at most one adapter at a time."""
    shape, layers = await to_thread.run_sync(service.weights.read_adapter, lora_path)
    await service.worker.exclusive(lambda engine: service.weights.attach(engine, shape.scale, layers))
    service.adapter = lora_name
    return _done(f"LoRA adapter {lora_name!r} was loaded")


async def unload_lora_adapter(service: EngineService, lora_name: str) -> Response:
    if lora_name == service.adapter:
        await service.worker.exclusive(lambda engine: service.weights.attach(engine, 1.0, []))
        service.adapter = None
    return _done(f"LoRA adapter {lora_name!r} is not loaded")


async def begin_weight_update(service: EngineService) -> Response:
    service.weights.begin()
    return _done("Success")


async def end_weight_update(service: EngineService) -> Response:
    service.weights.end()
    return _done("Success")


async def update_weight_version(service: EngineService, new_version: str, abort_all_requests: bool = True) -> Response:
    if abort_all_requests:
        await service.abort("", everything=True)
    await service.worker.call(lambda engine: setattr(engine, "version", new_version))
    return _done(f"Weight version updated to {new_version}", new_version=new_version)


async def weights_checker(service: EngineService, action: str) -> Response:
    if action != "checksum":
        raise refused(f"weights_checker: action {action!r} is not supported by the embedded engine, only 'checksum'.")
    return _done("Success.", ranks=[{"checksums": await service.worker.call(service.weights.checksums)}])


async def get_weights_by_name(_: EngineService) -> Response:
    raise refused("Get parameter by name failed")
