"""One address over all engines of a pool, for programs that speak HTTP: `/generate`, and what else an engine answers.

1. A request goes to the engine that holds its conversation (by the header `X-SMG-Routing-Key`, or by `memory`).
2. `/generate` with one prompt goes on with its tokens after an update; everything else is asked again from its start.
3. A stream is sent when its answer is whole: until then another engine may have to give it.
4. Pauses and weights are the run's: they cannot be asked for here.
"""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from socket import socket
from typing import Any, Final

import anyio
import orjson
from anyio import to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentrl.engine.client import EngineClient
from agentrl.engine.pool import EnginePool
from agentrl.engine.prefix_cache import PrefixCache
from agentrl.engine.requests import ROUTING_HEADER
from agentrl.engine.wire import REQUEST_LEVEL_FIELDS, Generation, SamplingParams
from agentrl.errors import EngineFailure, EngineRejected, EngineTimeout, EngineUnreachable, SettingsError
from agentrl.plugins import load_object
from agentrl.serving.http import (
    Handler,
    Json,
    RequestError,
    field,
    object_body,
    openai_error,
    refusal,
    refused,
    until_done,
)
from agentrl.serving.server import aside, listen, served

_RELAYED: Final = """
    GET /model_info  GET /get_model_info  GET /server_info  GET /get_server_info  GET /v1/models  GET /v1/loads
    POST /v1/chat/completions  POST /v1/completions  POST /v1/messages  POST /v1/embeddings  POST /v1/score
    POST /v1/tokenize  POST /v1/detokenize  POST /tokenize  POST /detokenize  POST /encode  POST /classify
"""
_OWN: Final = "text input_ids sampling_params rid stream return_sampling_mask"
_PASSED: Final = """
    return_logprob logprob_start_len top_logprobs_num token_ids_logprob return_text_in_logprobs return_prompt_token_ids
    return_hidden_states return_routed_experts priority lora_path
"""
"""Fields of `/generate` that go along where the pool asks."""
_SAMPLING: Final = {each.name for each in fields(SamplingParams)} - set(REQUEST_LEVEL_FIELDS) | {"n"}
Body = dict[str, Any]


@asynccontextmanager
async def router(
    pool: EnginePool, folder: str | Path | None = None, *, host: str = "127.0.0.1", listener: socket | None = None
) -> AsyncIterator[str]:
    """Serve `pool` in this event loop for the length of the context; gives the URL.

    Args:
        folder: a model folder with the tokenizer for texts; by default the engines' own, where it can be read here.
        listener: a port of `host` that was taken; by default a free one is.

    Raises:
        PluginError: a middleware cannot be loaded.
    """
    async with served(EngineRouter(pool, folder).app, listener or listen(host, 0), host) as url:
        yield url


class EngineRouter:
    """The ASGI application `app` over `pool`. Middleware is given it as `router`."""

    def __init__(self, pool: EnginePool, folder: str | Path | None = None) -> None:
        self.pool, self.memory = pool, PrefixCache()
        self._folder, self._loading = folder, anyio.Lock()
        table = _RELAYED.split()
        handlers: dict[tuple[str, str], Handler] = {
            ("POST", "/generate"): self._generate,
            ("POST", "/abort_request"): self._abort,
            ("POST", "/retrieve_from_text"): self._retrieve,
            ("GET", "/health"): self._health,
            ("GET", "/list_workers"): self._workers,
            ("POST", "/add_worker"): self._workers,
            ("POST", "/remove_worker"): self._workers,
            **dict.fromkeys(zip(table[::2], table[1::2], strict=True), self._relay),
        }
        self.app = Starlette(
            routes=[Route(path, _answers(work), methods=[method]) for (method, path), work in handlers.items()],
            middleware=[
                Middleware(load_object(path, what="--router-middleware-paths"), router=self)
                for path in pool.settings.router_middleware_paths
            ],
            exception_handlers={HTTPException: _no_route, RequestError: refusal},
        )

    async def _generate(self, request: Request) -> Response:
        body = await object_body(request)
        if not _plain(body):
            return await self._relay(request, body)
        sampling = {name: value for name, value in (body.get("sampling_params") or {}).items() if name != "n"}
        params = SamplingParams(**sampling, return_sampling_mask=bool(body.get("return_sampling_mask")))
        extra = {name: body[name] for name in _PASSED.split() if name in body}
        ask = partial(self.pool.generate, params=params, rid=_rid(body), extra=extra)
        session, text = request.headers.get(ROUTING_HEADER), body.get("text")
        if text is not None:
            await self._load_tokenizer()
            piece, own = await self.memory.text(text, partial(aside, request))
            got = await until_done(request, partial(ask, piece.all_ids(), session_id=session or own))
            self.memory.answered(text, piece, got, own)
        else:
            ids: list[int] = body["input_ids"]
            own = session or self.memory.listed(ids)
            got = await until_done(request, partial(ask, ids, session_id=own))
            if not session:
                self.memory.listed([*ids, *got.ids], own)
        raw = got.raw[0] if len(got.raw) == 1 else orjson.dumps(_joined(got))
        return _events([raw]) if body.get("stream") else Response(raw, media_type="application/json")

    async def _relay(self, request: Request, body: Body | None = None) -> Response:
        path, session = request.url.path.replace("/get_", "/"), request.headers.get(ROUTING_HEADER)
        if body is None:
            body = {} if request.method == "GET" else await object_body(request)
        if not session and isinstance(messages := body.get("messages"), list):
            session = self.memory.listed(messages)
        asked = {name: value for name, value in body.items() if name not in ("stream", "stream_options")}
        sent = None if request.method == "GET" else asked
        reply = await until_done(request, partial(self.pool.relay, path, sent, rid=_rid(body), session_id=session))
        if reply.status == 200 and body.get("stream"):
            return _events(map(orjson.dumps, _chunks(orjson.loads(reply.body), body)))
        return Response(reply.body, reply.status, media_type="application/json")

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
        if self.memory.tokenizer is not None:
            return
        async with self._loading:
            if self.memory.tokenizer is None:
                info = {} if self._folder else (await self.pool.model_info())[0]
                file = Path(self._folder or info.get("tokenizer_path") or str(info.get("model_path")), "tokenizer.json")
                self.memory.tokenizer = await to_thread.run_sync(_tokenizer, file)

    async def _health(self, _: Request) -> Response:
        return Response(status_code=200 if any(_well(member) for member in self.pool.members) else 503)

    async def _workers(self, request: Request) -> Response:
        if request.method == "POST":
            url = request.query_params.get("url") or field(await object_body(request), "url", str)
            await self.pool.join(url) if request.url.path == "/add_worker" else self.pool.leave(url)
        workers = [{"url": m.url, "is_healthy": _well(m), "load": m.in_flight} for m in self.pool.members]
        return Json({"urls": self.pool.urls, "workers": workers})


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
    """Return true if it is one prompt, and asks for nothing that cannot go on after an update."""
    if not _given(body) <= {*_OWN.split(), *_PASSED.split()}:
        return False
    text, ids, sampling = body.get("text"), body.get("input_ids"), body.get("sampling_params") or {}
    if ids is None:
        one = isinstance(text, str)
    else:
        one = text is None and isinstance(ids, list) and bool(ids) and type(ids[0]) is int
    return one and isinstance(sampling, dict) and _given(sampling) <= _SAMPLING and sampling.get("n") in (None, 1)


def _rid(body: Body) -> str | None:
    """Return the client's name of its request; the engine names a batch's."""
    rid = body.get("rid")
    return rid if isinstance(rid, str) and rid else None


def _given(body: Body) -> set[str]:
    return {name for name, value in body.items() if value is not None}


def _joined(got: Generation) -> Body:
    """An interrupted answer, or one aborted before it was sent: lists a token follow each other, and what is said of the
    prompt is the first part's."""
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


def _chunks(answer: Any, body: Body) -> list[Body]:
    """A whole answer as the chunks of a stream; a chat's message is one delta."""
    if "choices" not in answer:
        return answer if isinstance(answer, list) else [answer]
    head = {**answer, "object": answer["object"].replace("chat.completion", "chat.completion.chunk")}
    usage, choices = head.pop("usage", None), head.pop("choices")
    deltas = [{"delta" if name == "message" else name: value for name, value in c.items()} for c in choices]
    chunks = [{**head, "choices": [delta]} for delta in deltas]
    return [*chunks, {**head, "choices": [], "usage": usage}] if body.get("stream_options") else chunks


def _events(chunks: Iterable[bytes]) -> Response:
    sent = b"".join(b"data: " + chunk + b"\n\n" for chunk in (*chunks, b"[DONE]"))
    return Response(sent, media_type="text/event-stream")


def _answers(handler: Handler) -> Handler:
    """A handler whose failures are answers in SGLang's form."""

    async def wrapped(request: Request) -> Response:
        try:
            return await handler(request)
        except (EngineFailure, SettingsError) as error:
            status = 504 if isinstance(error, EngineTimeout) else 503 if isinstance(error, EngineUnreachable) else 400
            if isinstance(error, EngineRejected) and error.status and error.kind != "aborted":
                status = error.status if 400 <= error.status < 500 else 502
            raise openai_error(str(error), status=status) from error

    return wrapped


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    said = f"the router has no {request.method} {request.url.path}; an engine itself may have, see /list_workers"
    return Json({"detail": said if error.status_code in (404, 405) else error.detail}, error.status_code, error.headers)
