"""One address over all engines of a pool, for programs that speak HTTP: SGLang's `/generate`, and what else an engine answers.

1. A request goes to the engine that holds its conversation (`memory`, or the header `X-SMG-Routing-Key`), to another one
   where that fails, and on behind a weight update, all as the pool does it.
2. `/generate` with one prompt goes on with its tokens after an update; what cannot (lists, `n`, images, whatever a pool does
   not know) is asked again from its start.
3. Texts get the ids that earlier answers had (`memory`), and `/retrieve_from_text` gives them back for training.
4. A stream is sent when its answer is whole: until then another engine may have to give it.
5. Pauses and weights are the run's and cannot be asked for here.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING, Any, Final, TypeVar

import anyio
import orjson
from anyio import to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agentrl.engine.embedded.errors import openai_error, refused
from agentrl.engine.embedded.http import Handler, Json, answers_errors, json_body, until_done
from agentrl.engine.member import Member
from agentrl.engine.memory import Encode, Followed, Memory
from agentrl.engine.pool import EnginePool
from agentrl.engine.requests import ROUTING_HEADER
from agentrl.engine.wire import Generation, SamplingParams
from agentrl.errors import EngineFailure, EngineRejected, EngineTimeout, SettingsError
from agentrl.plugins import load_object
from agentrl.serving import aside, listen, read_json, served

if TYPE_CHECKING:
    from tokenizers import Tokenizer

RELAYED: Final = {
    "GET": "/model_info /get_model_info /server_info /get_server_info /v1/models /v1/loads /get_load",
    "POST": "/v1/chat/completions /v1/completions /v1/tokenize /v1/detokenize /tokenize /detokenize /encode /classify "
    "/v1/embeddings /v1/score /v1/rerank /v1/messages",
}
"""What goes to an engine as it is."""
_PASSED: Final = """
    return_logprob logprob_start_len top_logprobs_num token_ids_logprob return_text_in_logprobs return_prompt_token_ids
    return_hidden_states return_routed_experts priority lora_path
"""
PASSED: Final = frozenset(_PASSED.split())
"""Fields of `/generate` that may go along where the pool asks."""
OWN: Final = frozenset({"text", "input_ids", "sampling_params", "rid", "stream", "return_sampling_mask"})
SAMPLING: Final = frozenset(field.name for field in fields(SamplingParams)) - {"return_sampling_mask"}
Body = dict[str, Any]
T = TypeVar("T")


class Router:
    """The application over `pool`; `folder` has the tokenizer, by default the engines' own.

    Attributes:
        pool: the engines.
        app: the ASGI application.
    """

    def __init__(self, pool: EnginePool, folder: str | Path | None = None) -> None:
        self.pool = pool
        self._folder, self._loading = folder, anyio.Lock()
        self._texts: tuple[Tokenizer, Memory] | None = None
        self._followed = Followed()
        self._live: set[str] = set()
        own: dict[tuple[str, str], Handler] = {
            ("POST", "/generate"): self.generate,
            ("POST", "/abort_request"): self.abort,
            ("POST", "/retrieve_from_text"): self.retrieve,
            ("GET", "/health"): self.health,
            ("GET", "/workers"): self.workers,
            ("GET", "/list_workers"): self.workers,
            ("POST", "/add_worker"): self.add_worker,
            ("POST", "/remove_worker"): self.remove_worker,
        }
        relayed = {(method, path): self.relay for method, paths in RELAYED.items() for path in paths.split()}
        self.app = Starlette(
            routes=[
                Route(path, _answers(work), methods=[method]) for (method, path), work in {**relayed, **own}.items()
            ],
            middleware=[
                Middleware(load_object(path, what="--router-middleware-paths"), router=self)
                for path in pool.settings.router_middleware_paths
            ],
            exception_handlers={HTTPException: _refused},
        )

    # ---- generating ---------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> Response:
        """POST /generate."""
        body = await json_body(request)
        if not _plain(body):
            return await self._relay(request, body)
        sampling = {name: value for name, value in (body.get("sampling_params") or {}).items() if value is not None}
        sampling.pop("n", None)
        params = SamplingParams(**sampling, return_sampling_mask=bool(body.get("return_sampling_mask")))
        extra = {name: body[name] for name in PASSED & body.keys()}
        wanted, text, ids = request.headers.get(ROUTING_HEADER), body.get("text"), body.get("input_ids")
        if text is None:
            session = wanted or self._followed.session(ids)
            got = await self._sampled(request, body, ids, params, session, extra)
            if not wanted:
                self._followed.answered([*ids, *got.ids], session)
        else:
            memory, encode = await self._memory(request)
            prompt, session = await memory.prompt(text, encode)
            session = wanted or session
            got = await self._sampled(request, body, prompt.all_ids(), params, session, extra)
            memory.answered(text, prompt, got, session)
        raw = got.raw[0] if len(got.raw) == 1 else orjson.dumps(_joined(got))
        return _events([raw]) if body.get("stream") else Response(raw, media_type="application/json")

    async def _sampled(
        self, request: Request, body: Body, ids: Sequence[int], params: SamplingParams, session: str, extra: Body
    ) -> Generation:
        with self._named(body) as rid:
            ask = partial(self.pool.generate, ids, params, rid=rid, session_id=session, extra=extra)
            return await _while_there(request, ask)

    async def relay(self, request: Request) -> Response:
        """A path of `RELAYED`."""
        return await self._relay(request, None if request.method == "GET" else await json_body(request))

    async def _relay(self, request: Request, body: Any) -> Response:
        if not isinstance(body, dict | None):
            raise refused(f"{request.url.path} takes a JSON object.")
        asked = None if body is None else {name: value for name, value in body.items() if name != "stream"}
        with self._named(body or {}) as rid:
            session = request.headers.get(ROUTING_HEADER)
            reply = await _while_there(
                request, partial(self.pool.relay, request.url.path, asked, rid=rid, session_id=session)
            )
        if reply.status == 200 and body and body.get("stream"):
            return _events(_chunks(request.url.path, orjson.loads(reply.body), body))
        return Response(reply.body, reply.status, media_type="application/json")

    @contextmanager
    def _named(self, body: Body) -> Iterator[str]:
        """The name of a request while it lasts."""
        rid = body.get("rid") or uuid.uuid4().hex
        if not isinstance(rid, str) or rid in self._live:
            raise refused(f"rid must be a text that no other request has now, got {rid!r:.100}")
        self._live.add(rid)
        try:
            yield rid
        finally:
            self._live.discard(rid)

    async def abort(self, request: Request) -> Response:
        """POST /abort_request: requests of this router whose rid begins with `rid`, where there is that one; or `abort_all`."""
        body = await _object(request)
        rid, everything = body.get("rid"), bool(body.get("abort_all"))
        for name in [name for name in self._live if everything or (rid in self._live and name.startswith(str(rid)))]:
            await self.pool.abort(name)
        return Response()

    # ---- texts --------------------------------------------------------------------------------------------

    async def retrieve(self, request: Request) -> Response:
        """POST /retrieve_from_text."""
        text = (await _object(request)).get("text")
        if not isinstance(text, str):
            raise refused(f"text must be a text, got {text!r:.100}")
        memory, encode = await self._memory(request)
        return Json(await memory.retrieve(text, encode))

    async def _memory(self, request: Request) -> tuple[Memory, Encode]:
        """What is known of texts, and how this request encodes one."""
        async with self._loading:
            if self._texts is None:
                tokenizer = await to_thread.run_sync(_load_tokenizer, await self._tokenizer_folder())
                self._texts = tokenizer, Memory(lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False)))
        return self._texts[1], partial(aside, request, partial(_encode, self._texts[0]))

    async def _tokenizer_folder(self) -> Path:
        if self._folder is None:
            info = (await self.pool.model_info())[0]
            self._folder = info.get("tokenizer_path") or info.get("model_path")
        folder = Path(str(self._folder))
        if not (folder / "tokenizer.json").is_file():
            raise refused(
                f"texts need the model's tokenizer here, and there is no {folder}/tokenizer.json; send input_ids"
            )
        return folder

    # ---- engines ------------------------------------------------------------------------------------------

    async def health(self, _: Request) -> Response:
        """GET /health: 200 while an engine may be asked."""
        return Response(status_code=200 if any(_well(member) for member in self.pool.members) else 503)

    async def workers(self, _: Request) -> Response:
        """GET /workers and /list_workers."""
        workers = [
            {"id": m.url, "url": m.url, "worker_type": "regular", "is_healthy": _well(m), "load": m.state.in_flight}
            for m in self.pool.members
        ]
        return Json({"urls": list(self.pool.urls), "workers": workers})

    async def add_worker(self, request: Request) -> Response:
        """POST /add_worker: an engine that serves the same kind of model."""
        await self.pool.join(await _url(request))
        return await self.workers(request)

    async def remove_worker(self, request: Request) -> Response:
        """POST /remove_worker; its requests go elsewhere."""
        self.pool.leave(await _url(request))
        return await self.workers(request)


@asynccontextmanager
async def router(
    pool: EnginePool, folder: str | Path | None = None, *, host: str = "127.0.0.1", listener: socket | None = None
) -> AsyncIterator[str]:
    """Serve `pool` over HTTP in this event loop for the length of the context; gives the URL.

    Args:
        pool: open.
        folder: a model folder with the tokenizer of the engines' model; by default the one that they name.
        listener: a taken port of `host`; by default a free one is taken.

    Raises:
        PluginError: a middleware cannot be loaded.
    """
    app = Router(pool, folder).app
    async with served(app, listener or listen(host, 0), host) as url:
        yield url


def _well(member: Member) -> bool:
    return member.state.weights == "current" and not member.state.failures


def _load_tokenizer(folder: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _encode(tokenizer: Tokenizer, text: str, whole: bool) -> list[int]:
    # A batch of one: that lets other threads run meanwhile.
    return list(tokenizer.encode_batch_fast([text], add_special_tokens=whole)[0].ids)


def _plain(body: Any) -> bool:
    """Whether it is one prompt, and asks for nothing that cannot go on after an update."""
    if not isinstance(body, dict) or not {name for name in body if body[name] is not None} <= OWN | PASSED:
        return False
    text, ids, sampling = body.get("text"), body.get("input_ids"), body.get("sampling_params") or {}
    one = isinstance(text, str) and ids is None
    one = one or (text is None and isinstance(ids, list) and set(map(type, ids)) == {int})
    known = isinstance(sampling, dict) and {name for name in sampling if sampling[name] is not None} <= {*SAMPLING, "n"}
    return one and known and sampling.get("n") in (None, 1)


def _joined(got: Generation) -> Body:
    """The parts of an interrupted answer as one: lists a token follow each other, what is said of the prompt is the first's."""
    parts: list[Body] = [orjson.loads(raw) for raw in got.raw]
    metas = [part["meta_info"] for part in parts]
    lists = {
        name: [entry for meta in metas for entry in meta.get(name) or ()]
        for name, value in metas[0].items()
        if name.startswith("output_") and isinstance(value, list)
    }
    first = {name: value for name, value in metas[0].items() if name.startswith(("input_", "prompt_", "cached_"))}
    spans = [{"version": version, "start": start, "end": end} for version, start, end in got.weight_versions]
    finish = metas[-1]["finish_reason"] | {"type": got.finish_reason.type}
    meta = {**metas[-1], **got.meta_info, **lists, **first, "weight_versions": spans, "finish_reason": finish}
    return {**parts[-1], "text": got.text, "output_ids": got.ids, "meta_info": meta}


def _chunks(path: str, answer: Body, body: Body) -> list[bytes]:
    """A whole answer as the chunks of a stream: its messages as what they add."""
    if not path.endswith("completions"):
        return [orjson.dumps(answer)]
    chat, chunks, head = path.startswith("/v1/chat"), [], {**answer}
    usage, choices = head.pop("usage", None), head.pop("choices")
    head["object"] = "chat.completion.chunk" if chat else answer["object"]
    for choice in choices:
        shown = {name: value for name, value in choice.items() if name != "message"}
        chunks.append({**head, "choices": [{**shown, "delta": choice["message"]} if chat else choice]})
    if (body.get("stream_options") or {}).get("include_usage"):
        chunks.append({**head, "choices": [], "usage": usage})
    return [orjson.dumps(chunk) for chunk in chunks]


def _events(chunks: Sequence[bytes]) -> Response:
    sent = b"".join(b"data: " + chunk + b"\n\n" for chunk in (*chunks, b"[DONE]"))
    return Response(sent, media_type="text/event-stream")


async def _while_there(request: Request, work: Callable[[], Awaitable[T]]) -> T:
    """`work()`, cancelled when the client has gone."""
    found: list[T] = []
    failed: list[EngineFailure] = []

    async def done() -> None:
        try:
            found.append(await work())
        except EngineFailure as error:  # not to be wrapped by a task group
            failed.append(error)

    await until_done(request, done)
    if failed:
        raise failed[0]
    return found[0]


def _answers(handler: Handler) -> Handler:
    """A handler whose failures are answers in SGLang's form."""

    async def wrapped(request: Request) -> Response:
        try:
            return await handler(request)
        except EngineTimeout as error:
            raise openai_error(str(error), status=504) from error
        except EngineRejected as error:
            own = error.kind in ("bad_prompt", "aborted", "other_model", "not_sglang")
            raise openai_error(
                str(error), status=error.status if 400 <= error.status < 500 else 400 if own else 502
            ) from error
        except EngineFailure as error:
            raise openai_error(str(error), status=503) from error
        except SettingsError as error:
            raise openai_error(str(error)) from error

    return answers_errors(wrapped)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    said = error.detail
    if error.status_code in (404, 405):
        said = f"the router has no {request.method} {request.url.path}; ask an engine itself, see /list_workers"
    return Json({"detail": said}, error.status_code, error.headers)


async def _object(request: Request) -> Body:
    body = await read_json(request)
    if not isinstance(body, dict | None):
        raise refused("expected a JSON object")
    return body or {}


async def _url(request: Request) -> str:
    body = {**await _object(request), **request.query_params}
    url = body.get("url", body.get("worker_url"))
    if not isinstance(url, str) or not url:
        raise refused('expected the engine\'s address, as ?url=... or {"url": ...}')
    return url
