"""Servers with deliberate faults.

They simulate failures that a healthy engine cannot produce. The behaviour of a healthy engine is
tested with the built-in server and with real SGLang.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import orjson
from aiohttp import web

from agentrl.engine.settings import EngineSettings
from agentrl.engine.wire import SamplingParams

FAST = EngineSettings(engine_retry_backoff=0.0, engine_max_retries=2, engine_absence_timeout=0.0)
PARAMS = SamplingParams(temperature=1.0, max_new_tokens=4)


async def until(condition: Callable[[], bool]) -> None:
    """Wait until the condition holds."""
    with anyio.fail_after(120):
        while not condition():
            await anyio.lowlevel.checkpoint()


def sent(server: "FaultyServer", number: int) -> bool:
    """Return true if at least `number` requests have arrived."""
    return len(server.generates) >= number


def answer(ids: list[int], **meta: Any) -> dict[str, Any]:
    """Make a well-formed answer of `/generate`."""
    return {
        "text": "text",
        "output_ids": ids,
        "meta_info": {
            "id": "x",
            "finish_reason": {"type": "length", "length": len(ids)},
            "prompt_tokens": 3,
            "weight_version": "1",
            "cached_tokens": 0,
            "output_token_logprobs": [[-0.5, i, None] for i in ids],
            **meta,
        },
    }


Reply = Callable[["FaultyServer", dict[str, Any], web.Request], Awaitable[web.StreamResponse]]


@dataclass
class FaultyServer:
    """Replies to each `/generate`, and each request below /v1, by the next entry of `script` (then the last)."""

    script: list[Reply]
    url: str = ""
    generates: list[dict[str, Any]] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    arrived: anyio.Event = field(default_factory=anyio.Event)
    aborted: anyio.Event = field(default_factory=anyio.Event)
    version: str = "1"
    deaf: bool = False
    paused: bool = False
    hangs: bool = False
    tries: int = 0
    info: dict[str, Any] = field(default_factory=dict)
    loaded: list[str] = field(default_factory=list)
    load_gate: anyio.Event | None = None
    load_status: int = 200
    probes: int = 0
    adapters: list[str] = field(default_factory=list)
    loses_answer: bool = False  # to the next load of an adapter

    async def healthy(self, request: web.Request) -> web.Response:
        if self.deaf or self.paused:
            await anyio.sleep_forever()
        return web.Response()

    async def health_generate(self, request: web.Request) -> web.Response:
        self.tries += 1
        if self.deaf or self.paused or self.hangs:
            await anyio.sleep_forever()
        return web.Response()

    async def model_info(self, request: web.Request) -> web.Response:
        self.probes += 1
        if self.deaf:
            await anyio.sleep_forever()
        return web.json_response({"weight_version": self.version, **self.info})

    async def control(self, request: web.Request) -> web.Response:
        self.paths.append(f"{request.method} {request.path_qs}")
        self.paused = self.paused and request.path != "/continue_generation"
        return web.Response()

    async def load(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        self.paths.append(f"{request.method} {request.path_qs}")
        self.loaded.append(body["model_path"])
        if self.load_gate is not None:
            await self.load_gate.wait()
        if self.load_status == 200:
            self.version = body["weight_version"]
        return web.Response(status=self.load_status)

    async def load_adapter(self, request: web.Request) -> web.Response:
        if (name := orjson.loads(await request.read())["lora_name"]) in self.adapters:
            return web.Response(status=400, text="already loaded")
        self.adapters.append(name)
        if self.loses_answer:
            self.loses_answer = False
            assert request.transport is not None
            request.transport.abort()
        return web.Response()

    async def unload_adapter(self, request: web.Request) -> web.Response:
        if (name := orjson.loads(await request.read())["lora_name"]) not in self.adapters:
            return web.Response(status=400, text="not loaded")
        self.adapters.remove(name)
        return web.Response()

    async def label(self, request: web.Request) -> web.Response:
        self.version = orjson.loads(await request.read())["new_version"]
        return web.Response()

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read() or b"{}")
        reply = self.script[min(len(self.generates), len(self.script) - 1)]
        self.generates.append(body)
        self.headers.append(dict(request.headers))
        self.paths.append(f"{request.method} {request.path_qs}")
        self.arrived.set()
        return await reply(self, body, request)

    async def abort(self, request: web.Request) -> web.Response:
        self.aborts.append(orjson.loads(await request.read())["rid"])
        self.aborted.set()
        return web.Response()


@asynccontextmanager
async def serving(*script: Reply) -> AsyncIterator[FaultyServer]:
    """Run a faulty server on a free port."""
    server = FaultyServer(list(script))
    app = web.Application()
    app.router.add_post("/generate", server.generate)
    app.router.add_route("*", "/v1/{path:.*}", server.generate)
    app.router.add_get("/", server.generate)
    app.router.add_post("/abort_request", server.abort)
    app.router.add_get("/health", server.healthy)
    app.router.add_get("/health_generate", server.health_generate)
    app.router.add_get("/model_info", server.model_info)
    app.router.add_get("/server_info", server.model_info)
    app.router.add_post("/pause_generation", server.control)
    app.router.add_post("/flush_cache", server.control)
    app.router.add_post("/update_weights_from_disk", server.load)
    app.router.add_post("/load_lora_adapter", server.load_adapter)
    app.router.add_post("/unload_lora_adapter", server.unload_adapter)
    app.router.add_post("/update_weight_version", server.label)
    for path in ("/continue_generation", "/release_memory_occupation", "/resume_memory_occupation"):
        app.router.add_post(path, server.control)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        await runner.cleanup()


def ok(ids: list[int], **meta: Any) -> Reply:
    """Make a good answer."""

    async def reply(server: FaultyServer, body: dict[str, Any], request: web.Request) -> web.Response:
        prompt = len(body["input_ids"])
        return web.json_response(answer(ids, prompt_tokens=prompt, weight_version=server.version, **meta))

    return reply


def status(code: int, body: bytes = b'{"error":{"message":"no"}}') -> Reply:
    """Make an answer with this status and body."""

    async def reply(server: FaultyServer, _: dict[str, Any], request: web.Request) -> web.Response:
        return web.Response(status=code, body=body, content_type="application/json")

    return reply


async def reset(server: FaultyServer, body: dict[str, Any], request: web.Request) -> web.StreamResponse:
    """Make half an answer, then the connection breaks."""
    response = web.StreamResponse(headers={"content-length": "1000"})
    await response.prepare(request)
    await response.write(b'{"text": "half')
    assert request.transport is not None
    request.transport.abort()
    return response


async def silence(server: FaultyServer, body: dict[str, Any], request: web.Request) -> web.StreamResponse:
    """Send no answer until the request is aborted."""
    await server.aborted.wait()
    finish = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
    return web.json_response(
        answer([], finish_reason=finish, prompt_tokens=len(body["input_ids"]), weight_version=server.version)
    )


async def hanging(server: FaultyServer, body: dict[str, Any], request: web.Request) -> web.StreamResponse:
    """Send no answer while the server hangs, even after an abort."""
    if server.hangs:
        await anyio.sleep_forever()
    return await ok([5])(server, body, request)


async def late(server: FaultyServer, body: dict[str, Any], request: web.Request) -> web.StreamResponse:
    """Make a good answer once a request was aborted."""
    await server.aborted.wait()
    return await ok([5])(server, body, request)


def retry_after(seconds: int) -> Reply:
    """Answer that the server is busy, for this many seconds."""

    async def reply(server: FaultyServer, _: dict[str, Any], request: web.Request) -> web.Response:
        return web.Response(status=429, headers={"Retry-After": str(seconds)})

    return reply
