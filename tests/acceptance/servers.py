"""Faulty engines among healthy ones, over loopback HTTP, and the expected results through a pool.

1. `Engine` is a healthy engine that takes a few milliseconds for a request. It answers with four ids under its weight
   version, and loads weights from disk. A bad engine is an `Engine` with another `generate`.
2. One member of two, or one of four, is bad. `CALLS` one-turn sessions are played, `AT_ONCE` at a time, after an
   update to version `VERSION`.
3. A token of another version may never be returned without an error.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import orjson
from aiohttp import web

CALLS, AT_ONCE = 120, 8
VERSION, INITIAL = "7", "default"
VOCABULARY = 512
IDS = [5, 6, 7, 8]


class Engine:
    """A healthy engine.

    Attributes:
        version: of its weights.
        served: number of generate requests.
        updates: number of weight updates.
    """

    model = "tiny"

    def __init__(self) -> None:
        self.version, self.served, self.updates, self.url = INITIAL, 0, 0, ""

    def answer(
        self, ids: list[int], finish: str = "length", version: str | None = None, prompt: int = 3
    ) -> dict[str, Any]:
        """Return a well-formed answer with these ids."""
        version = self.version if version is None else version
        meta = {
            "id": "x",
            "finish_reason": {"type": finish, "length": len(ids)},
            "prompt_tokens": prompt,
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "weight_version": version,
            "weight_versions": [{"version": version, "start": 0, "end": len(ids)}],
            "output_token_logprobs": [[-0.5, i, None] for i in ids],
        }
        return {"text": "text", "output_ids": ids, "meta_info": meta}

    async def generate(self, request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(0.002)
        return web.json_response(self.answer(IDS))

    async def route(self, request: web.Request) -> web.StreamResponse:
        """Answer every path of the protocol that a pool requests."""
        text = await request.read()
        body = orjson.loads(text) if text else {}
        match request.path:
            case "/generate":
                self.served += 1
                return await self.generate(request)
            case "/update_weights_from_disk":
                return self.update(body)
            case "/model_info" | "/get_model_info":
                return web.json_response(
                    {"model_path": self.model, "architectures": [self.model], "weight_version": self.version}
                )
            case "/server_info" | "/get_server_info":
                return web.json_response({"context_length": 2048, "version": "0.5.23", "model_path": self.model})
        return web.json_response({"success": True, "message": "ok", "status": "ok", "loads": []})

    def update(self, body: dict[str, Any]) -> web.Response:
        self.version, self.updates = body["weight_version"], self.updates + 1
        return web.json_response({"success": True, "message": "ok", "num_paused_requests": 0})


@asynccontextmanager
async def serving(engine: Engine) -> AsyncIterator[Engine]:
    """Serve the engine at a free port."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", engine.route)
    runner = web.AppRunner(app, shutdown_timeout=0.05)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    engine.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield engine
    finally:
        await runner.cleanup()


@asynccontextmanager
async def fleet(*bad: Engine, members: int) -> AsyncIterator[list[Engine]]:
    """Serve `bad`, first, and healthy engines up to `members`."""
    healthy = [Engine() for _ in range(members - len(bad))]
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(serving(engine)) for engine in (*bad, *healthy)]


class Says(Engine):
    """Answers at once with this status."""

    def __init__(self, status: int, **headers: str) -> None:
        super().__init__()
        self.status, self.headers = status, {name.replace("_", "-"): value for name, value in headers.items()}

    async def generate(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "no"}}, status=self.status, headers=self.headers)


class Answers(Engine):
    """Answers 200 with a body that is no valid answer."""

    def __init__(self, make: Callable[[Engine], dict[str, Any] | bytes]) -> None:
        super().__init__()
        self.make = make

    async def generate(self, request: web.Request) -> web.StreamResponse:
        made = self.make(self)
        return web.Response(
            body=made if isinstance(made, bytes) else orjson.dumps(made), content_type="application/json"
        )


def _fewer_ids(engine: Engine) -> dict[str, Any]:
    return {**engine.answer(IDS), "output_ids": IDS[:-1]}


class HangsAfterHeaders(Engine):
    """Sends 200, a content length, and nothing more; its health probe hangs too."""

    async def generate(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-length": "1000"})
        await response.prepare(request)
        await asyncio.sleep(30)
        return response

    async def route(self, request: web.Request) -> web.StreamResponse:
        if request.path.startswith("/health"):
            return await self.generate(request)
        return await super().route(request)


class NeverAnswers(HangsAfterHeaders):
    """Accepts the connection and the request, and never answers."""

    async def generate(self, request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(30)
        return web.Response()


class DiesMidGeneration(Engine):
    """Dies after its third request: connections break from then on."""

    async def route(self, request: web.Request) -> web.StreamResponse:
        if self.served >= 3:
            assert request.transport is not None
            request.transport.abort()
        return await super().route(request)


class ComesBackWithInitialWeights(Engine):
    """A supervisor restarts it after its third request."""

    async def generate(self, request: web.Request) -> web.StreamResponse:
        if self.served == 3:
            self.version = INITIAL
        return await super().generate(request)


class MissesTheUpdate(Engine):
    """Keeps its old weights after an update."""

    def update(self, body: dict[str, Any]) -> web.Response:
        return web.json_response({"error": {"message": "no such file"}}, status=500)


class OtherModel(Engine):
    model = "another-model"


class NotSGLang(Engine):
    """Some web server that has a page for every path."""

    async def route(self, request: web.Request) -> web.StreamResponse:
        return web.Response(text="<html>It works!</html>", content_type="text/html")


@dataclass(frozen=True)
class Seen:
    """The expected results through a pool.

    Attributes:
        failed: the largest share of calls that may fail, with a typed `EngineFailure`.
        fed: maximum number of requests to the bad member, retries included: it rests.
        deadline: seconds for each call.
        updated: the bad member gets the weights again.
    """

    bad: Callable[[], Engine]
    failed: float = 0.0
    fed: int = CALLS // 4
    deadline: float = 10.0
    updated: bool = False


SERVERS = {
    "500 at once": Seen(lambda: Says(500)),
    "504 at once": Seen(lambda: Says(504)),
    "408 at once": Seen(lambda: Says(408)),
    "503 with Retry-After": Seen(lambda: Says(503, Retry_After="30"), fed=AT_ONCE),
    "503": Seen(lambda: Says(503)),
    "429 with Retry-After": Seen(lambda: Says(429, Retry_After="30"), fed=AT_ONCE),
    "half JSON": Seen(lambda: Answers(lambda e: b'{"text": "ha')),
    "an id too few": Seen(lambda: Answers(_fewer_ids)),
    "an id outside the vocabulary": Seen(lambda: Answers(lambda e: e.answer([VOCABULARY]))),
    "another version than sent": Seen(lambda: Answers(lambda e: e.answer(IDS, version="3"))),
    "aborts with no token for ever": Seen(lambda: Answers(lambda e: e.answer([], "abort"))),
    "hangs after headers": Seen(HangsAfterHeaders, failed=0.1, fed=2 * AT_ONCE, deadline=1.0),
    "never answers": Seen(NeverAnswers, failed=0.1, fed=2 * AT_ONCE, deadline=1.0),
    "dies mid-generation": Seen(DiesMidGeneration),
    "comes back with initial weights": Seen(ComesBackWithInitialWeights, fed=CALLS, updated=True),
}

AT_START = {
    "not SGLang at all": (NotSGLang, ("SGLang",)),
    "another model": (OtherModel, ("another-model",)),
}
"""Members that a run refuses at its start, and the part of the error beside the address."""
