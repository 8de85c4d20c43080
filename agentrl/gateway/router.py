"""One HTTP address over all engines of a pool: `/generate`, and the other paths that an engine serves.

1. A request goes to the engine of its conversation, which the header `X-SMG-Routing-Key` or `memory` identifies.
2. `/generate` with one prompt continues from its tokens after a weight update. Its stream then ends with one event that
   has all tokens.
3. Every other request gets an engine's own answer, streams included. A stream that has begun is not retried.
4. Only the run controls pauses, caches, weights and memory: such requests are refused."""

import asyncio
import hmac
import re
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from socket import socket
from typing import Any, Final
from urllib.parse import quote

import anyio
import orjson
from anyio import to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from agentrl.engine.client import EngineClient
from agentrl.engine.pool import EnginePool
from agentrl.engine.requests import ROUTING_HEADER
from agentrl.engine.transport import Reply, Sink
from agentrl.engine.wire import REQUEST_LEVEL_FIELDS, Generation, SamplingParams
from agentrl.errors import EngineFailure, EngineRejected, EngineTimeout, EngineUnreachable, SettingsError
from agentrl.gateway.contracts import Body
from agentrl.gateway.prefix_cache import PrefixCache
from agentrl.plugins import load_object
from agentrl.serving.http import (
    Json,
    RequestError,
    field,
    object_body,
    openai_error,
    refusal,
    refuse_pages,
    refused,
    until_done,
)
from agentrl.serving.server import aside, listen, served

_CONTROL: Final = re.compile("/(?!v1/models/).*(abort|pause|continue|flush|cache|weight|memory|lora|state|slow_down)")
"""Paths that control an engine. The name of a model in `/v1/models/` may have these words."""
_CHATS: Final = ("/v1/chat/completions", "/v1/messages", "/v1/responses")
_STREAMING: Final = ("/api/chat", "/api/generate")
"""Ollama's paths, which stream unless the request says otherwise."""
_OWN: Final = "text input_ids sampling_params rid stream return_sampling_mask"
_PASSED: Final = """
    return_logprob logprob_start_len top_logprobs_num token_ids_logprob return_text_in_logprobs return_prompt_token_ids
    return_hidden_states return_routed_experts priority lora_path
"""
"""Fields of `/generate` that the pool adds to its request."""
_MAX_UNREAD: Final = 64 << 20
"""Maximum number of bytes of a stream that its client has not read."""
_KNOWN: Final = {each.name for each in fields(SamplingParams)} - set(REQUEST_LEVEL_FIELDS)


@asynccontextmanager
async def router(
    pool: EnginePool, folder: str | Path | None = None, *, host: str = "127.0.0.1", listener: socket | None = None
) -> AsyncIterator[str]:
    """Serve `pool` in this event loop until the context ends. Yields the URL.

    Args:
        folder: a folder with the tokenizer for texts; default: the engines' own folder, if this machine can read it.
        listener: a listening socket of `host`; default: a socket on a free port.

    Raises PluginError: a middleware cannot be loaded."""
    async with served(EngineRouter(pool, folder).app, listener or listen(host, 0), host) as url:
        yield url


class EngineRouter:
    """The ASGI application `app` over `pool`. Middleware receives this object as `router`."""

    def __init__(self, pool: EnginePool, folder: str | Path | None = None) -> None:
        self.pool, self.memory = pool, PrefixCache()
        self._folder, self._loading = folder, anyio.Lock(fast_acquire=True)
        failures = {HTTPException: _no_route, RequestError: refusal, EngineFailure: _failed, SettingsError: _failed}
        posts = {"generate": self._generate, "abort_request": self._abort, "retrieve_from_text": self._retrieve}
        posts |= {"add_worker": self._workers, "remove_worker": self._workers}
        gets = {"health": self._health, "list_workers": self._workers}
        own = ((method, *each) for method, ends in (("POST", posts), ("GET", gets)) for each in ends.items())
        routes = [Route(f"/{name}", end, methods=[method]) for method, name, end in own]
        routes.append(Route("/{path:path}", self._relay, methods=["GET", "POST"]))
        loaded = (load_object(path, what="--router-middleware-paths") for path in pool.settings.router_middleware_paths)
        middleware = [Middleware(each, router=self) for each in loaded]
        self.app = Starlette(routes=routes, middleware=middleware, exception_handlers=failures)

    async def _generate(self, request: Request) -> Response:
        if not _plain(body := await object_body(request)):
            return await self._relay(request, body)
        sampling = {name: value for name, value in (body.get("sampling_params") or {}).items() if name in _KNOWN}
        params = SamplingParams(**sampling, return_sampling_mask=bool(body.get("return_sampling_mask")))
        extra = {name: body[name] for name in _PASSED.split() if name in body}
        ask = partial(self.pool.generate, params=params, rid=_rid(body), extra=extra)
        session, text = request.headers.get(ROUTING_HEADER), body.get("text")
        if text is not None:
            await self._load_tokenizer()
            piece, own = await self.memory.text(text, partial(aside, request))
            ask, note = partial(ask, piece.all_ids()), partial(self.memory.answered, text, piece, session=own)
        else:
            ids: list[int] = body["input_ids"]
            own = session or self.memory.listed(ids)
            ask, note = partial(ask, ids), partial(self._listed, ids, "" if session else own)
        answer = partial(_answer, partial(ask, session_id=session or own), note)
        if body.get("stream"):
            return await _streamed(request, partial(_events, answer), newest=True)
        return Response(await until_done(request, answer), media_type="application/json")

    def _listed(self, ids: list[int], session: str, got: Generation) -> None:
        if session:
            self.memory.listed([*ids, *got.ids], session)

    async def _relay(self, request: Request, body: Body | None = None) -> Response:
        path = request.scope["path"]
        if ".." in path or _CONTROL.match(path):
            raise HTTPException(404)
        if body is None:
            given = request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers
            body = await object_body(request) if given else {}
        session, said = request.headers.get(ROUTING_HEADER), body.get("messages", body.get("input"))
        if not session and path in _CHATS and isinstance(said, list):
            session = self.memory.listed(said)
        target = f"{quote(path)}?{request.scope['query_string'].decode('latin-1')}".rstrip("?")
        sent = body if request.method == "POST" else None
        relay = partial(self.pool.relay, target, sent, rid=_rid(body), session_id=session)
        if body.get("stream", path in _STREAMING and request.method == "POST"):
            return await _streamed(request, relay)
        reply = await until_done(request, relay)
        told = path.rstrip("/").endswith("server_info") and reply.status == 200
        content = orjson.dumps(_without_keys(orjson.loads(reply.body))) if told else reply.body
        return Response(content, reply.status, {"content-type": reply.content_type})

    async def _abort(self, request: Request) -> Response:
        await self.pool.abort(field(await object_body(request), "rid", str))
        return Response()

    async def _retrieve(self, request: Request) -> Response:
        text = field(await object_body(request), "text", str)
        await self._load_tokenizer()
        pieces = (await self.memory.text(text, partial(aside, request)))[0].chain()
        tokens = [id_ for piece in pieces for id_ in piece.ids]
        mask = [int(piece.log_probs is not None) for piece in pieces for _ in piece.ids]
        log_probs = [log_prob for piece in pieces for log_prob in piece.log_probs or [0.0] * len(piece.ids)]
        found = {"tokens": tokens, "response": text, "loss_mask": mask, "rollout_logp": log_probs}
        return Json({**found, "token_length": len(tokens), "loss_mask_length": len(mask)})

    async def _load_tokenizer(self) -> None:
        async with self._loading:
            if self.memory.tokenizer is None:
                info = {} if self._folder else (await self.pool.model_info())[0]
                file = Path(self._folder or info.get("tokenizer_path") or str(info.get("model_path")), "tokenizer.json")
                self.memory.tokenizer = await to_thread.run_sync(_tokenizer, file)

    async def _health(self, _: Request) -> Response:
        return Response(status_code=200 if any(_well(member) for member in self.pool.members) else 503)

    async def _workers(self, request: Request) -> Response:
        if request.method == "POST":
            refuse_pages(request)
            given, key = request.headers.get("authorization", ""), self.pool.settings.api_key
            if key and not hmac.compare_digest(given.encode(), f"Bearer {key}".encode()):
                raise HTTPException(401, "send the engines' key: Authorization: Bearer KEY")
            url = request.query_params.get("url") or field(await object_body(request), "url", str)
            await self.pool.join(url) if request.url.path == "/add_worker" else self.pool.leave(url)
        workers = [{"url": m.url, "is_healthy": _well(m), "load": m.in_flight} for m in self.pool.members]
        return Json({"urls": self.pool.urls, "workers": workers})


def _without_keys(info: Any) -> Any:
    """Return an engine's description of itself without its keys, which SGLang also tells."""
    if isinstance(info, dict):
        return {name: _without_keys(value) for name, value in info.items() if not name.endswith("api_key")}
    return [_without_keys(value) for value in info] if isinstance(info, list) else info


def _well(member: EngineClient) -> bool:
    return member.weights == "current" and not member.failures


def _tokenizer(file: Path) -> Any:
    from tokenizers import Tokenizer

    if not file.is_file():
        raise refused(f"texts need the model's tokenizer here, but there is no {file}; send input_ids")
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _plain(body: Body) -> bool:
    """Return true if `body` has one prompt, and only fields with which it can continue after a weight update."""
    if not _given(body) <= {*_OWN.split(), *_PASSED.split()}:
        return False
    text, ids, sampling = body.get("text"), body.get("input_ids"), body.get("sampling_params") or {}
    if ids is None:
        one = isinstance(text, str)
    else:
        one = text is None and isinstance(ids, list) and bool(ids) and type(ids[0]) is int
    if not (one and isinstance(sampling, dict) and _given(sampling) <= _KNOWN | {"n"}):
        return False
    return sampling.get("n") in (None, 1) and sampling.get("max_new_tokens", 1) is not None  # null: all of the context


def _rid(body: Body) -> str | None:
    """Return the client's id of its request; None if it gave none, or a list for a batch."""
    rid = body.get("rid")
    return rid if isinstance(rid, str) and rid else None


def _given(body: Body) -> set[str]:
    return {name for name, value in body.items() if value is not None}


def _joined(got: Generation) -> Body:
    """Return one answer for a request that was interrupted, or aborted before it was sent. Per-token lists are
    concatenated; fields about the prompt are the first part's."""
    parts: list[Body] = [orjson.loads(raw) for raw in got.raw] or [{"meta_info": {"finish_reason": {}}}]
    metas: list[Body] = [part["meta_info"] for part in parts]
    found = [(name, value) for meta in metas for name, value in meta.items()]
    lists = {name for name, value in found if name.startswith("output_") and isinstance(value, list)}
    meta = {
        **metas[-1],
        **got.meta_info,
        **{name: value for name, value in metas[0].items() if name.startswith(("input_", "prompt_", "cached_"))},
        **{name: [entry for meta in metas for entry in meta.get(name) or ()] for name in lists},
        "prompt_tokens": got.prompt_tokens,
        "finish_reason": {**metas[-1]["finish_reason"], "type": got.finish_reason.type},
        "weight_versions": [{"version": v, "start": start, "end": end} for v, start, end in got.weight_versions],
    }
    return {**parts[-1], "text": got.text, "output_ids": got.ids, "meta_info": meta}


async def _answer(ask: Callable[..., Awaitable[Generation]], note: Callable[..., None], sink: Sink = None) -> bytes:
    """Return the body of an answer to `/generate`; `note` stores the answer."""
    got = await ask(sink=sink)
    note(got=got)
    whole = len(got.raw) == 1 and (got.finish_reason.type == "abort" or b'"abort"' not in got.raw[0])
    return got.raw[0] if whole else orjson.dumps(_joined(got))


async def _events(answer: Callable[..., Awaitable[bytes]], sink: Callable[[Reply], None]) -> Reply:
    """Return the last part of the stream of an answer to `/generate`; `sink` receives the events before it."""

    def event(data: bytes, end: bytes = b"") -> Reply:
        return Reply(200, b"data: %b\n\n%b" % (data, end), content_type="text/event-stream")

    return event(await answer(lambda part: sink(event(part.body))), b"data: [DONE]\n\n")


async def _streamed(request: Request, relay: Callable[..., Awaitable[Reply]], newest: bool = False) -> Response:
    """Stream the parts that `relay` passes to its `sink`, and its result. `newest`: each part includes all earlier
    parts, so a slow client gets only the newest."""
    parts = _parts(relay, newest)
    first = await until_done(request, partial(anext, parts))
    return StreamingResponse(_bodies(first, parts), first.status, {"content-type": first.content_type})


async def _parts(relay: Callable[..., Awaitable[Reply]], newest: bool) -> AsyncGenerator[Reply]:
    """Yield the parts of an answer as they arrive, and its end. The engine is read even while the client does not read:
    a weight update waits for engines, not for clients. A client that leaves too much unread gets an error."""
    unread, more, size = deque[Reply](maxlen=1 if newest else None), asyncio.Event(), 0

    def sink(part: Reply) -> None:
        nonlocal size
        size += len(part.body)
        if size > _MAX_UNREAD and not newest:
            raise EngineRejected(f"the client left more than {_MAX_UNREAD >> 20} MiB of the stream unread")
        unread.append(part)
        more.set()

    task = asyncio.ensure_future(relay(sink=sink))
    task.add_done_callback(lambda _: more.set())
    try:
        while unread or not task.done():
            await more.wait()
            more.clear()
            while unread:
                part = unread.popleft()
                size -= len(part.body)
                yield part
        yield await task
    finally:
        task.cancel()


async def _bodies(first: Reply, parts: AsyncGenerator[Reply]) -> AsyncIterator[bytes]:
    """Yield the bytes of a stream, from `first` on. A failure is a last event that clients of all three APIs raise."""
    yield first.body
    try:
        async for part in parts:
            yield part.body
    except EngineFailure as error:
        said = {"type": "error", "error": {"type": "api_error", "message": str(error)}}
        yield b"\n\nevent: error\ndata: %b\n\n" % orjson.dumps(said)


async def _failed(request: Request, error: Exception) -> Response:
    status = 504 if isinstance(error, EngineTimeout) else 503 if isinstance(error, EngineUnreachable) else 400
    if isinstance(error, EngineRejected) and error.status and error.kind != "aborted":
        status = error.status if 400 <= error.status < 500 else 502
    return await refusal(request, openai_error(str(error), status=status))


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    said = f"{request.method} {request.url.path:.99} is not passed on: the run controls the engines (see /list_workers)"
    return Json({"detail": said if error.status_code in (404, 405) else error.detail}, error.status_code, error.headers)
