"""The gateway's two applications: `/s/TOKEN` for agents, and `/sessions`, with a key, for the owner of sessions.

1. By default both listen on loopback. Both refuse what `agentrl.serving` refuses. No log has a session's token.
2. A refusal is an HTTP status, or an event if the stream has begun. Keep-alives are sent while the model works.
3. The client's disconnect ends its request."""

import asyncio
import hmac
import math
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from socket import socket
from typing import Any

import orjson
from anyio import CancelScope
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from agentrl.chat import Chat
from agentrl.engine.wire import SamplingParams
from agentrl.errors import EngineUnreachable
from agentrl.gateway.contracts import AgentRequest, Refusal
from agentrl.gateway.live import LiveTurn
from agentrl.gateway.roles import Roles
from agentrl.gateway.sessions import Limits, Session, TurnSampler, read_limits, read_sampling
from agentrl.gateway.wires import WIRES, Wire
from agentrl.sample import Sample
from agentrl.serving.http import Json, RequestError, until_done
from agentrl.serving.server import aside, listen, read_json, served, served_at

KEEP_ALIVE = 5
"""Seconds between keep-alives of a stream that waits for the model."""
MAX_SESSIONS = 100_000
_MAX_FOLDER_LENGTH = 70
"""Maximum length of the path of a folder for sockets. Linux allows 107 bytes for the whole path of a socket."""
_FINAL = {"x-should-retry": "false"}
"""Tells OpenAI's and Anthropic's clients that the same request will be refused again."""


class Gateway:
    """Sessions of agents in front of engines.

    Args:
        chat: the model's tokenizer, template and parsers.
        engine: the object that samples, for example an engine pool.
        context_length: maximum number of tokens of a trajectory.
        model: the name in the list of models.
        owner_key: the key that `owner_app` asks for; "" refuses all its requests.
        streams: true: a stream has text as the model generates it, and ends with an error if the engine fails meanwhile.
            False: a stream has whole turns.

    Attributes:
        agent_app, owner_app: the ASGI applications.
        roles: the rules that map messages to roles that the template shows.
        base, socket: the agents' address and Unix socket, known once `serving` runs."""

    def __init__(
        self,
        chat: Chat,
        engine: TurnSampler,
        *,
        context_length: int,
        model: str = "policy",
        owner_key: str = "",
        streams: bool = False,
    ) -> None:
        self.chat, self.engine, self.context_length, self.model = chat, engine, context_length, model
        self.roles, self.base, self.socket = Roles.probe(chat), "", Path()
        self.owner_key, self._sessions, self._ended = owner_key, dict[str, Session](), False
        self._streams = streams
        handlers = dict.fromkeys((HTTPException, RequestError), _failed)
        agents = Route("/s/{token}{rest:path}", self._agent, methods=["GET", "HEAD", "POST"])
        self.agent_app = Starlette(routes=[agents], exception_handlers=handlers)
        self.owner_app = Starlette(
            routes=[
                Route("/sessions", self._owner(self._open), methods=["POST"]),
                Route("/sessions", self._owner(self._list), methods=["GET"]),
                Route("/sessions/{token}", self._owner(self._show), methods=["GET"]),
                Route("/sessions/{token}", self._owner(self._close), methods=["DELETE"]),
            ],
            exception_handlers=handlers,
        )

    @asynccontextmanager
    async def serving(self, host: str = "127.0.0.1", listener: socket | None = None) -> AsyncIterator[str]:
        """Serve agents in this event loop until the block ends, at the yielded address and at a Unix socket. Sessions that
        are open at the end fail."""
        async with AsyncExitStack() as stack:
            parent = tempfile.gettempdir()
            parent = parent if len(parent) <= _MAX_FOLDER_LENGTH else "/tmp"
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="agentrl-gateway-", dir=parent))
            self.base = await stack.enter_async_context(served(self.agent_app, listener or listen(host, 0), host))
            self.socket = Path(folder, "socket")
            await stack.enter_async_context(served_at(self.agent_app, str(self.socket), host))
            self._ended = False
            stack.callback(self._end)
            yield self.base

    def _end(self) -> None:
        self._ended = True
        for session in self._sessions.values():
            session.fail(_closed())

    def open(self, origin: Sample, sampling: SamplingParams, limits: Limits | None = None) -> Session:
        """Open a session whose Samples are copies of `origin`. Raises Refusal: there are too many sessions. Raises
        EngineUnreachable: the gateway was closed."""
        if self._ended:
            raise _closed()
        if oldest := next(iter(self._sessions.values()), None):  # the session that was checked longest ago
            del self._sessions[oldest.token]
            if not oldest.abandoned:
                self._sessions[oldest.token] = oldest
        if len(self._sessions) >= MAX_SESSIONS:
            raise Refusal(f"the gateway has {MAX_SESSIONS} sessions; close some", "limit", "sessions")
        stop_ids = tuple(dict.fromkeys((*self.chat.stop_token_ids, *(sampling.stop_token_ids or ()))))
        engine_sampling = replace(sampling, stop_token_ids=stop_ids, skip_special_tokens=False, no_stop_trim=True)
        length, limits = self.context_length, limits or Limits()
        session = Session(self.chat, self.engine, self.roles, origin, engine_sampling, length, limits)
        self._sessions[session.token] = session
        return session

    def close(self, token: str, rewards: Mapping[int, float] | float | None = None) -> list[Sample]:
        """Close a session and return its Samples; see `Session.close`. Raises KeyError: the session is not known."""
        return self._sessions.pop(token).close(rewards)

    def url(self, session: Session) -> str:
        return f"{self.base}/s/{session.token}"

    async def _agent(self, request: Request) -> Response:
        session = self._sessions.get(request.path_params["token"])
        path = "/" + request.path_params["rest"].strip("/").removeprefix("v1").strip("/")
        counting = path == "/messages/count_tokens"
        wire = WIRES.get("/messages" if counting else path)
        if session is None or (wire is None and request.method == "POST"):
            return _error(404, "there is no such session" if session is None else f"the gateway has no path {path:.80}")
        if request.method != "POST":
            return self._read_only(path)
        assert wire is not None
        try:
            return await self._answer(request, session, wire, counting)
        except Refusal as refusal:
            session.refused(refusal)
            final = refusal.kind == "limit" and refusal.reason != "parallel"
            return Json(wire.error(refusal), wire.status(refusal), _FINAL if final else None)

    def _read_only(self, path: str) -> Response:
        def entry(name: str) -> dict[str, Any]:
            return {"id": name, "object": "model", "type": "model", "created": 0, "owned_by": "agentrl"}

        if path == "/":
            return Response()
        if path == "/models":
            return Json({"object": "list", "data": [entry(self.model)], "models": [], "has_more": False})
        if path.startswith("/models/"):
            return Json(entry(path.removeprefix("/models/")))
        return _error(404, f"the gateway has no path {path:.80}")

    async def _answer(self, request: Request, session: Session, wire: Wire, counting: bool) -> Response:
        body = await _object(request)
        asked, run = wire.read(body, request.headers, None if counting else session.memo), partial(aside, request)
        size = int(request.headers.get("content-length") or len(orjson.dumps(body)))
        if counting:
            return Json({"input_tokens": await until_done(request, partial(session.measure, asked, size, run))})
        if not asked.stream:
            node, turn = await until_done(request, partial(session.turn, asked, size, run))
            node.delivered = True
            return Json(wire.answer(asked, turn))
        live = LiveTurn(self.chat.turn_parser if self._streams else None, asked.stop)
        task = asyncio.create_task(session.turn(asked, size, run, live))
        await _first(task, live.placed)
        if task.done():
            task.result()
        return StreamingResponse(_stream(session, wire, asked, live, task), media_type="text/event-stream")

    def _owner(self, handler: Any) -> Any:
        async def wrapped(request: Request) -> Response:
            given = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
            if not self.owner_key or not hmac.compare_digest(given, self.owner_key.encode()):
                return _error(401, "send the owner's key: Authorization: Bearer KEY")
            try:
                return Json(*await handler(request))
            except Refusal as refusal:
                return _error(refusal.status, str(refusal))

        return wrapped

    async def _open(self, request: Request) -> tuple[Any, int]:
        kinds = {"group_index": int, "index": int, "sampling": dict, "limits": dict, "metadata": dict}
        body = await _fields(request, kinds)
        index, metadata = body.get("index"), body.get("metadata", {})
        origin = Sample(group_index=body.get("group_index"), index=index, rollout_id=index, metadata=metadata)
        sampling = read_sampling(body.get("sampling", {}), self.chat.vocab_size)
        session = self.open(origin, sampling, read_limits(body.get("limits", {})))
        url, name = self.url(session), request.url.hostname or ""
        for anywhere in ("//0.0.0.0:", "//[::]:"):  # agents reach this machine under the name that the owner uses
            url = url.replace(anywhere, f"//[{name}]:" if ":" in name else f"//{name}:", 1)
        return {"id": session.token, "base_url": url}, 201

    async def _list(self, _: Request) -> tuple[Any, int]:
        return {"sessions": [{"requests": s.counts["requests"], "open": True} for s in self._sessions.values()]}, 200

    async def _show(self, request: Request) -> tuple[Any, int]:
        session = self._known(request)
        return {**session.tree.shown(), "counts": session.figures()}, 200

    async def _close(self, request: Request) -> tuple[Any, int]:
        body = await _fields(request, {"reward": float, "rewards": dict})
        if len(body) > 1:
            raise Refusal("reward, rewards: give one of the two")
        session = self._known(request)
        if isinstance(rewards := body.get("rewards", body.get("reward")), dict):
            if unknown := sorted(rewards.keys() - {str(root.number) for root in session.tree.roots()}):
                raise Refusal(f"rewards.{unknown[0]:.80}: there is no such root")
            rewards = {int(root): _number(f"rewards.{root}", value) for root, value in rewards.items()}
        samples = self.close(session.token, rewards)
        return {"samples": [sample.to_dict() for sample in samples], "counts": session.figures()}, 200

    def _known(self, request: Request) -> Session:
        if (session := self._sessions.get(request.path_params["token"])) is None:
            raise Refusal("there is no such session", "not_found")
        return session


async def _object(request: Request, empty: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the body, a JSON object; `empty` if there is no body."""
    try:
        body = await read_json(request)
    except ValueError as error:
        raise Refusal(str(error)) from None
    body = empty if body is None else body
    if not isinstance(body, dict):
        raise Refusal("the body must be a JSON object")
    return body


async def _fields(request: Request, kinds: Mapping[str, type]) -> dict[str, Any]:
    """Return the fields of an owner's request. Raises Refusal: a field is unknown or has a wrong type."""
    body = await _object(request, empty={})
    for name, value in body.items():
        if name not in kinds:
            raise Refusal(f"{name}: there is no such field; the fields are {', '.join(kinds)}")
        if kinds[name] is float:
            _number(name, value)
        elif not isinstance(value, kinds[name]) or isinstance(value, bool):
            raise Refusal(f"{name}: expected a value of type {kinds[name].__name__}")
    return body


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise Refusal(f"{name}: expected a finite number")
    return float(value)


async def _first(task: asyncio.Task[Any], placed: asyncio.Event) -> None:
    """Wait until the request has its node in the tree, or has failed."""
    waiting = asyncio.create_task(placed.wait())
    try:
        await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
    except BaseException:
        task.cancel()
        raise
    finally:
        waiting.cancel()


async def _stream(
    session: Session, wire: Wire, asked: AgentRequest, live: LiveTurn, task: asyncio.Task[Any]
) -> AsyncIterator[bytes]:
    task.add_done_callback(live.wake)
    try:
        for event in wire.events(asked, live):
            if event:
                yield event
            elif task.done() and not live.whole:
                break
            elif await live.quiet(KEEP_ALIVE):
                yield wire.keep_alive(asked, live)
        node, _ = await task
        node.delivered = True
    except Refusal as refusal:
        session.refused(refusal)
        yield wire.error_event(refusal, asked, live)
    finally:
        task.cancel()
        with CancelScope(shield=True), suppress(asyncio.CancelledError, Refusal):  # the task aborts its request
            await task


def _closed() -> EngineUnreachable:
    return EngineUnreachable("the gateway is closed", kind="gateway_closed")


def _error(status: int, message: str) -> Response:
    return Json({"error": {"message": message, "type": "invalid_request_error", "code": None}}, status)


async def _failed(_: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        return _error(error.status_code, error.detail)
    assert isinstance(error, RequestError)
    return Response(status_code=error.status)
