"""Requests in flight: retried at another engine after a failure, and continued after an interruption.

1. After a lost connection, a malformed answer or status 408, 429 or 5xx the engine rests, and the request goes to
   another engine under a new id. Other statuses raise at once.
2. If every engine fails, a retry waits twice as long as the last one, and at least Retry-After. If no engine is
   reachable, a call waits up to `engine_absence_timeout`.
3. Answers of stale weights are discarded.
4. Requests that `interrupt` ended continue; `abort` returns the tokens so far. If another client aborts a request, the
   request continues if it has tokens, or if the pool follows another one. Otherwise it counts as failed.
5. An answer that is also streamed is not sent to another engine once a part of it was passed on."""

import asyncio
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, TypeVar

import anyio
import orjson

from agentrl.engine.answers import RequestExpectations, error_kind, error_message, parse, unusable
from agentrl.engine.client import EngineClient
from agentrl.engine.images import ImageInputs
from agentrl.engine.pause import PauseGate
from agentrl.engine.registry import EngineRegistry
from agentrl.engine.settings import EngineSettings
from agentrl.engine.transport import Body, Reply, Sink
from agentrl.engine.wire import FinishReason, Generation, SamplingParams, encode, join
from agentrl.errors import EngineFailure, EngineRejected, EngineUnreachable

ROUTING_HEADER: Final = "X-SMG-Routing-Key"  # header by which SGLang's routers keep a session on one worker

MAX_BACKOFF = 10.0
_ABORT_AGAIN, _MAX_ABORTS = 1.0, 3
# Kinds of failures that a retry would repeat.
_FINAL = frozenset({"versions_unknown", "no_sampling_mask", "no_routed_experts", "other_prompt"})
_UNSENT = Reply(0, b"")
_UNFINISHED = re.compile(rb'"finish_reason"\s*:\s*null')
_ABORTED = re.compile(rb'"(?:finish_reason|type)"\s*:\s*"abort"')
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class GenerateCall:
    """One call of `generate` or `relay`."""

    rid: str  # first the caller's name of the call, then the id of its current request
    session_id: str | None
    extra: Mapping[str, Any] | None = None  # more fields of the request; if given, answers keep their raw form
    images: ImageInputs | None = None
    sink: Sink = None  # takes the parts of a stream
    collects: bool = False  # the last event is the answer
    begun: bool = False  # the first part was passed on: the call is not sent again
    member: EngineClient | None = None  # engine of its current request
    aborted: bool = False
    interrupted: bool = False
    versions: set[str | None] = field(default_factory=set)
    waiting: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def part(self, part: Reply) -> None:
        """Pass on a part of a stream."""
        assert self.sink is not None
        self.begun = True
        self.sink(part)


class StreamedAnswer:
    """The events of one request to `/generate`, each with all tokens so far. `passed` takes all events but the last."""

    def __init__(self, passed: Callable[[Reply], None]) -> None:
        self._passed, self._rest, self._last = passed, b"", b""

    def part(self, part: Reply) -> None:
        """Take a part of the stream."""
        *events, self._rest = (self._rest + part.body).split(b"\n\n")
        for event in events:
            if _UNFINISHED.search(data := event.removeprefix(b"data: ")):
                self._passed(part._replace(body=data))
            elif data != b"[DONE]":
                self._last = data

    def whole(self, reply: Reply) -> Reply:
        """Return the last event as the answer to the request. An error event also gives the status."""
        if reply.status != 200:
            return reply
        body = self._last or self._rest
        error = orjson.loads(body).get("error") if body.startswith(b'{"error"') else None
        status = error.get("code") if isinstance(error, dict) else None
        return reply._replace(body=body, status=status if isinstance(status, int) else 400 if error else 200)


class Requests:
    """The calls of a pool that are in flight; `live` maps the names that callers gave to calls."""

    def __init__(
        self, registry: EngineRegistry, pause_gate: PauseGate, settings: EngineSettings, vocab_size: int | None
    ) -> None:
        self.live: dict[str, GenerateCall] = {}
        self._registry, self._pause_gate, self._settings = registry, pause_gate, settings
        self.shared = False  # other pools of the run may abort at the same engines
        self._vocab_size, self._sent, self._idle = vocab_size, 0, anyio.Event()
        self._request_seconds, self._counted, self._since = 0.0, time.monotonic(), time.monotonic()

    async def generate(self, call: GenerateCall, ids: Sequence[int], params: SamplingParams, scored: int) -> Generation:
        """Return the whole answer over all interruptions, with log-probs of the last `scored` ids. Sets no deadline.
        The call's `sink` takes the events until the answer is whole or interrupted."""
        parts, call.collects = list[Generation](), call.sink is not None
        with self._under_way(call):
            while not parts or parts[-1].finish_reason.type == "abort":
                if parts and not call.aborted and (params.json_schema or params.regex):
                    if call.begun:
                        break  # the new answer would not continue the streamed one
                    parts.clear()  # under a grammar an answer starts again from its prompt
                if parts:
                    call.sink, call.collects, call.begun = None, False, False
                sampled = [id_ for part in parts for id_ in part.ids]
                rest = params.after(len(sampled), sum(len(part.routed) for part in parts if part.routed is not None))
                got = await self._part(call, [*ids, *sampled] if sampled else ids, rest, scored)
                aborted = got.finish_reason.type == "abort"
                parts.append(replace(got, finish_reason=_finish(got, rest)) if aborted else got)
        answer = join(parts, len(ids))
        self._registry.counts.update(prompt_tokens=len(ids), cached_tokens=answer.cached_tokens)
        return answer

    async def relay(self, call: GenerateCall, path: str, body: Body) -> Reply:
        """Return any member's answer to POST `path` (GET if there is no body), whole or to a sink. Sets no deadline."""
        with self._under_way(call):
            while True:
                reply = await self._anywhere(call, path, body, partial(self._fine, call))
                if call.aborted or not ((call.interrupted or self.shared) and _ABORTED.search(reply.body)):
                    return reply
        raise EngineRejected(f"{path}: the request was aborted before it was sent", status=400, kind="aborted")

    @contextmanager
    def _under_way(self, call: GenerateCall) -> Iterator[None]:
        """Register a new call. If the call is aborted before it is sent, the context ends at once."""
        if (name := call.rid) in self.live:
            raise EngineRejected(f"a request with the id {name!r:.100} is under way already", status=400, kind="rid")
        self.live[name] = call
        call.rid = secrets.token_hex(16)  # not the name: an engine aborts all ids that begin with an aborted id
        try:
            with call.waiting:
                yield
        finally:
            call.ended.set()
            del self.live[name]

    async def abort(self, name: str) -> None:
        """End a call. `generate` then returns the tokens so far."""
        call = self.live[name]
        call.aborted = True
        for again in range(_MAX_ABORTS):
            if call.member is None:
                call.waiting.cancel()
                return
            with suppress(EngineFailure) if again else nullcontext():
                await call.member.abort(call.rid)
            with anyio.move_on_after(_ABORT_AGAIN):  # then the request may have reached its engine after the abort
                await call.ended.wait()

    def mark_interrupted(self) -> None:
        """Record that aborts from now on are ours: the aborted calls continue."""
        for call in self.live.values():
            call.interrupted = True

    async def interrupt(self) -> None:
        """Abort all requests in flight; return when none is left. The pause gate must be closed."""
        while busy := {call.member for call in self.live.values() if call.member is not None}:
            self.mark_interrupted()
            self._idle = anyio.Event()
            await self._registry.each(EngineClient.abort_all, busy)
            with anyio.move_on_after(1.0):  # the next pass aborts requests that reached their engine after the abort
                if self._sent:
                    await self._idle.wait()

    def updated(self, version: str) -> None:
        """Record that answers in flight may have tokens of this version too."""
        for call in self.live.values():
            call.versions.add(version)

    async def _part(self, call: GenerateCall, ids: Sequence[int], params: SamplingParams, scored: int) -> Generation:
        start, sent, more = len(ids) - scored, ids, dict[str, Any]()
        if call.images is not None:
            sent, more = call.images.fields(ids, reads_spans=self._settings.engine == "embedded")
        payload = {**(call.extra or {}), **more, "return_logprob": True, "sampling_params": params.to_wire()}
        payload["input_ids"] = orjson.Fragment(encode(sent, self._vocab_size))
        if call.collects:
            payload["stream"] = True
        if scored:
            payload["logprob_start_len"] = start - 1
        if params.return_sampling_mask:
            payload["return_sampling_mask"] = True
        if (routed := params.routed_experts_start_len) is not None:
            payload |= {"return_routed_experts": True, "routed_experts_start_len": routed}
        limits, whole = (len(ids), params.max_new_tokens, self._vocab_size), list(ids) if call.images else None
        asked = RequestExpectations(*limits, list(ids[start:]), params.return_sampling_mask, routed, whole)
        return await self._anywhere(call, "/generate", payload, partial(self._read, call, asked))

    async def _anywhere(
        self, call: GenerateCall, path: str, payload: Body, read: Callable[[Reply, EngineClient], T]
    ) -> T:
        """Return the result of `read` on the first good answer of any member."""
        failed, absent, began = 0, 0, anyio.current_time()
        strange: set[EngineClient] = set()
        while True:
            if call.aborted:
                call.waiting.cancel()
            await anyio.lowlevel.checkpoint_if_cancelled()
            if self._pause_gate.closed:
                await self._pause_gate.wait_open()
                began = anyio.current_time()
            if (member := self._registry.choose(call.session_id, anyio.current_time())) is None:
                await self._wait_for_engine(began)
                continue
            reply, trial = _UNSENT, member.weights != "current"
            try:
                reply = await self._exchange(call, member, path, payload)
                if reply.status:
                    got = read(reply, member)
                    self._registry.answered(member)
                    return got
            except EngineFailure as error:
                left = isinstance(error, EngineUnreachable) and member not in self._registry.members
                if left and not call.begun:
                    call.rid = secrets.token_hex(16)
                    continue
                failed += 1
                strange |= {member} if error.kind == "unknown_token" else set()
                if strange.issuperset(self._registry.members):
                    raise  # every engine has such tokens, so `vocab_size` is wrong, not an engine
                # Trials of an unreachable engine do not count. Lost connections do: a request may crash its engine.
                gone = trial or error.kind == "engine_refused"
                gone = gone and not self._registry.any_usable(anyio.current_time())
                absent += gone
                self._blame(member, error, reply.retry_after)
                counted = failed if gone and not self._patient(began) else failed - absent
                if call.begun or counted > self._settings.engine_max_retries:
                    error.args = (f"{error} (after {failed} attempts)",) if failed > 1 else error.args
                    raise
                call.rid = secrets.token_hex(16)
            finally:
                self._registry.release(member)
            if failed and not self._registry.any_usable(anyio.current_time()):
                backoff = min(self._settings.engine_retry_backoff * 2.0 ** min(failed - 1, 30), MAX_BACKOFF)
                await self._registry.wait(max(backoff, reply.retry_after))

    async def _exchange(self, call: GenerateCall, member: EngineClient, path: str, payload: Body) -> Reply:
        """Return the member's answer; `_UNSENT` if generation is paused or the member was lost meanwhile."""
        incarnation = member.incarnation
        headers = None if call.session_id is None else {ROUTING_HEADER: call.session_id}
        async with member.places:
            if self._pause_gate.closed or member.incarnation != incarnation:
                return _UNSENT
            adapter = self._registry.folder and self._registry.folder.adapter
            added = {"rid": call.rid} | ({"lora_path": adapter} if adapter else {})
            body = None if payload is None else orjson.dumps({**payload, **added})
            call.member, call.interrupted, call.versions = member, False, {self._registry.version}
            self._count(1)
            streamed = StreamedAnswer(call.part) if call.collects else None
            sink = streamed.part if streamed else call.part if call.sink else None
            try:
                reply = await member.ask(path, call.rid, body, headers, sink)
                reply = streamed.whole(reply) if streamed else reply
                if adapter and reply.status == 400 and adapter.encode() in reply.body:  # it was started again
                    raise EngineRejected(f"{member.url} lacks the adapter {adapter}", status=400, kind="other_weights")
                return reply
            finally:
                call.member = None
                self._count(-1)
                if not self._sent:
                    self._idle.set()

    def _count(self, change: int) -> None:
        now = time.monotonic()
        self._request_seconds += self._sent * (now - self._counted)
        self._counted, self._sent = now, self._sent + change

    def mean_in_flight(self) -> float:
        """Return the mean number of requests in flight since the last call."""
        self._count(0)
        mean = self._request_seconds / max(self._counted - self._since, 1e-9)
        self._request_seconds, self._since = 0.0, self._counted
        return mean

    def _fine(self, call: GenerateCall, reply: Reply, member: EngineClient) -> Reply:
        if busy_or_broken(reply.status):
            raise _refusal(reply, member)
        call.rid = secrets.token_hex(16)
        return reply

    def _read(self, call: GenerateCall, asked: RequestExpectations, reply: Reply, member: EngineClient) -> Generation:
        if reply.status != 200:
            raise _refusal(reply, member)
        try:
            got = parse(reply.body, asked)
            got = got if call.extra is None else replace(got, raw=(reply.body,))
        except EngineRejected as error:
            raise EngineRejected(f"{error} (from {member.url})", status=error.status, kind=error.kind) from None
        call.rid = secrets.token_hex(16)
        interrupted = got.finish_reason.type == "abort" and not got.ids
        if interrupted and not (call.interrupted or call.aborted or self.shared):
            said = f"{member.url} aborted the request before its first token, and this client did not ask for it"
            raise unusable(f"{said}; check that no other client controls this engine", "aborted")
        if interrupted or None in call.versions:  # before the first update every version is right
            return got
        if strange := ({version for version, _, _ in got.weight_versions} or {got.weight_version}) - call.versions:
            said = f"{member.url} answered with weights of version {sorted(strange)}; expected {self._registry.version}"
            why = "check that it was not restarted and that no other client sends weights"
            raise unusable(f"{said}; {why}", "other_weights")
        mode = self._settings.pause_generation_mode
        if len(call.versions) > 1 and mode != "abort" and "weight_versions" not in got.meta_info:
            said = f"{member.url} does not say which tokens of its answer are of which weights"
            needs = f"--pause-generation-mode {mode} needs SGLang 0.5.23, abort works with every version"
            raise unusable(f"{said}; {needs}", "versions_unknown")
        return got

    def _blame(self, member: EngineClient, error: EngineFailure, retry_after: float) -> None:
        """Record a member's failure; raise at once if the failure is the request's own."""
        self._registry.counts["failed"] += 1
        if isinstance(error, EngineUnreachable):
            self._registry.lost(member)
        elif error.kind == "other_weights":
            self._registry.mark_stale(member)
        elif isinstance(error, EngineRejected) and error.kind not in _FINAL and busy_or_broken(error.status):
            self._registry.failed(member, anyio.current_time(), retry_after)
        else:
            raise error

    def _patient(self, began: float) -> bool:
        """Return true if `engine_absence_timeout` has not passed since `began`, or since the last loss of an engine."""
        return anyio.current_time() - max(began, self._registry.lost_at) < self._settings.engine_absence_timeout

    async def _wait_for_engine(self, began: float) -> None:
        """Wait for a member with current weights. A member may take any time to load a folder, but not fail at it."""
        folder, members = self._registry.folder, self._registry.members
        hopeful = any(member.recovering or not member.unrecovered for member in members)
        if self._patient(began) or (folder is not None and hopeful):
            await self._registry.wait(MAX_BACKOFF)
            return
        if not members:
            raise EngineUnreachable("the pool has no engine; all have left it", kind="no_engine")
        why, or_else = (
            "weights that were broadcast cannot be given again before the next update",
            ", or use --update-weight-mode disk",
        )
        if folder is not None:
            why, or_else = f"none can load them: {members[0].unrecovered}", ""
        said = f"no engine has the weights of version {self._registry.version} any more, and {why}"
        raise EngineUnreachable(f"{said}; start the same command again to resume{or_else}", kind="no_current_weights")


def busy_or_broken(status: int) -> bool:
    """Return true for a status after which the same request may succeed."""
    return status in (408, 429) or status >= 500


def _refusal(reply: Reply, member: EngineClient) -> EngineRejected:
    message = error_message(reply.body, reply.status)
    kind = error_kind(reply.status, message)
    return EngineRejected(f"{member.url} answered {reply.status}: {message}", status=reply.status, kind=kind)


def _finish(got: Generation, params: SamplingParams) -> FinishReason:
    """Return why an aborted part ended. SGLang reports abort even if the last token ended the part anyway."""
    if got.ids and not params.ignore_eos and got.ids[-1] in (params.stop_token_ids or ()):
        return FinishReason("stop", got.ids[-1])
    return FinishReason("length" if got.ids and len(got.ids) == params.max_new_tokens else "abort")
