"""Requests in flight: retried at another engine after a failure, and continued after an interruption.

1. A lost connection, a malformed answer and the statuses 408, 429 and 5xx rest the engine and retry elsewhere under a
   new id. Other statuses raise at once.
2. If every engine fails, a retry waits Retry-After or twice as long each time. If none is reachable, it waits up to
   `engine_absence_timeout`.
3. An answer by stale weights is not returned.
4. Requests that `interrupt` ended continue; `abort` returns the tokens so far. An abort by others is continued or a
   failure.
"""

import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, TypeVar

import anyio
import orjson

from agentrl.engine.answers import RequestExpectations, error_kind, error_message, parse
from agentrl.engine.client import EngineClient
from agentrl.engine.pause import PauseGate
from agentrl.engine.registry import EngineRegistry
from agentrl.engine.settings import EngineSettings
from agentrl.engine.transport import Reply
from agentrl.engine.wire import FinishReason, Generation, SamplingParams, encode, join
from agentrl.errors import EngineFailure, EngineRejected, EngineUnreachable

ROUTING_HEADER: Final = "X-SMG-Routing-Key"
"""Header by which SGLang's routers keep a session on one worker."""

_MAX_BACKOFF = 10.0
_UNSENT = Reply(0, b"")
_ABORTED = re.compile(rb'"(?:finish_reason|type)"\s*:\s*"abort"')
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class GenerateCall:
    """One `generate` under way; `member` and `rid` say where its present request is, if one is sent. `extra` are fields
    of the request beside ours; where there are any the answers are kept as they came."""

    rid: str
    session_id: str | None
    extra: Mapping[str, Any] | None = None
    member: EngineClient | None = None
    aborted: bool = False
    interrupted: bool = False
    versions: set[str | None] = field(default_factory=set)
    waiting: anyio.CancelScope = field(default_factory=anyio.CancelScope)


class Requests:
    """All calls of a pool; `live` has them by the name that their callers know them by."""

    def __init__(
        self, registry: EngineRegistry, pause_gate: PauseGate, settings: EngineSettings, vocab_size: int | None
    ) -> None:
        self.live: dict[str, GenerateCall] = {}
        self._registry, self._pause_gate, self._settings = registry, pause_gate, settings
        self._vocab_size, self._sent, self._idle = vocab_size, 0, anyio.Event()

    async def generate(
        self,
        name: str,
        ids: Sequence[int],
        params: SamplingParams,
        session: str | None,
        scored: int = 0,
        extra: Mapping[str, Any] | None = None,
    ) -> Generation:
        """The whole answer, however often it was interrupted, with log-probs of the last `scored` ids; no deadline here."""
        parts: list[Generation] = []
        with self._under_way(name, session, extra) as call:
            while not parts or parts[-1].finish_reason.type == "abort":
                if not call.aborted and (params.json_schema or params.regex):
                    parts.clear()  # a grammar begins where the answer does
                sampled = [id_ for part in parts for id_ in part.ids]
                rest = _routed_on(params.after(len(sampled)), parts)
                got = await self._part(call, [*ids, *sampled] if sampled else ids, rest, scored)
                parts.append(replace(got, finish_reason=_finish(got, rest)))
        answer = join(parts, len(ids))
        self._registry.counts.update(prompt_tokens=len(ids), cached_tokens=answer.cached_tokens)
        return answer

    async def relay(self, name: str, path: str, body: Mapping[str, Any] | None, session: str | None) -> Reply:
        """Return some member's answer to POST `path` (GET if there is no body), whole; no deadline here."""
        with self._under_way(name, session) as call:
            while True:
                reply = await self._anywhere(call, path, body, partial(self._fine, call))
                if call.aborted or not (call.interrupted and _ABORTED.search(reply.body)):
                    return reply
        raise EngineRejected(f"{path}: the request was aborted before it was sent", status=400, kind="aborted")

    @contextmanager
    def _under_way(
        self, name: str, session: str | None, extra: Mapping[str, Any] | None = None
    ) -> Iterator[GenerateCall]:
        """A new call; where it is aborted before it is sent, the context ends at once."""
        if name in self.live:
            raise EngineRejected(f"a request with the id {name!r:.100} is under way already", status=400, kind="rid")
        call = self.live[name] = GenerateCall(name, session, extra)
        try:
            with call.waiting:
                yield call
        finally:
            del self.live[name]

    async def abort(self, name: str) -> None:
        """End a call; it returns what there is."""
        call = self.live[name]
        call.aborted = True
        if call.member is None:
            call.waiting.cancel()
        else:
            await call.member.abort(call.rid)

    def mark_interrupted(self) -> None:
        """Whatever is aborted from now on was aborted by us, and goes on."""
        for call in self.live.values():
            call.interrupted = True

    async def interrupt(self) -> None:
        """Have every request under way end; returns when none is. The hold has to be closed."""
        while busy := {call.member for call in self.live.values() if call.member is not None}:
            self.mark_interrupted()
            self._idle = anyio.Event()
            await self._registry.each(EngineClient.abort_all, busy)
            with anyio.move_on_after(1.0):  # a request that was still travelling is told again
                if self._sent:
                    await self._idle.wait()

    def updated(self, version: str) -> None:
        """Answers under way may have tokens of this version too."""
        for call in self.live.values():
            call.versions.add(version)

    async def _part(self, call: GenerateCall, ids: Sequence[int], params: SamplingParams, scored: int) -> Generation:
        start = len(ids) - scored
        payload = {
            **(call.extra or {}),
            "return_logprob": True,
            "sampling_params": params.to_wire(),
            "input_ids": orjson.Fragment(encode(ids, self._vocab_size)),
        }
        if scored:
            payload["logprob_start_len"] = start - 1
        if params.return_sampling_mask:
            payload["return_sampling_mask"] = True
        if (routed := params.routed_experts_start_len) is not None:
            payload |= {"return_routed_experts": True, "routed_experts_start_len": routed}
        limits = (len(ids), params.max_new_tokens, self._vocab_size)
        asked = RequestExpectations(*limits, ids[start:], params.return_sampling_mask, routed)
        return await self._anywhere(call, "/generate", payload, partial(self._read, call, asked))

    async def _anywhere(
        self, call: GenerateCall, path: str, payload: Mapping[str, Any] | None, read: Callable[[Reply, EngineClient], T]
    ) -> T:
        """Return the result of `read` on the first good answer of any member."""
        failed, absent, began = 0, 0, anyio.current_time()
        while True:
            if call.aborted:
                call.waiting.cancel()
            await anyio.lowlevel.checkpoint_if_cancelled()
            if self._pause_gate.closed:
                await self._pause_gate.wait_open()
                began = anyio.current_time()
            member = self._registry.choose(call.session_id, anyio.current_time())
            if member is None:
                await self._somebody(began)
                continue
            reply = _UNSENT
            try:
                reply = await self._exchange(call, member, path, payload)
                if reply.status:
                    got = read(reply, member)
                    self._registry.answered(member)
                    return got
            except EngineFailure as error:
                failed += 1
                gone = error.kind == "engine_refused" and not self._registry.any_usable(anyio.current_time())
                absent += gone
                self._blame(member, error, reply.retry_after)
                counted = failed if gone and not self._patient(began) else failed - absent
                if counted > self._settings.engine_max_retries:
                    error.args = (f"{error} (after {failed} attempts)",) if failed > 1 else error.args
                    raise
                call.rid = uuid.uuid4().hex
            finally:
                self._registry.release(member)
            if failed and not self._registry.any_usable(anyio.current_time()):
                backoff = min(self._settings.engine_retry_backoff * 2.0 ** min(failed - 1, 30), _MAX_BACKOFF)
                await self._registry.wait(max(backoff, reply.retry_after))

    async def _exchange(
        self, call: GenerateCall, member: EngineClient, path: str, payload: Mapping[str, Any] | None
    ) -> Reply:
        """The member's answer; `_UNSENT` where nothing may be sent now, or the member has gone."""
        incarnation, headers = (
            member.incarnation,
            None if call.session_id is None else {ROUTING_HEADER: call.session_id},
        )
        async with member.places:
            if self._pause_gate.closed or member.incarnation != incarnation:
                return _UNSENT
            adapter = self._registry.folder and self._registry.folder.adapter
            added = {"rid": call.rid} | ({"lora_path": adapter} if adapter else {})
            body = None if payload is None else orjson.dumps({**payload, **added})
            call.member, call.interrupted, call.versions = member, False, {self._registry.version}
            self._sent += 1
            try:
                return await member.ask(path, call.rid, body, headers)
            finally:
                call.member = None
                self._sent -= 1
                if not self._sent:
                    self._idle.set()

    def _fine(self, call: GenerateCall, reply: Reply, member: EngineClient) -> Reply:
        if reply.status in (408, 429) or reply.status >= 500:
            raise _refusal(reply, member)
        call.rid = uuid.uuid4().hex
        return reply

    def _read(self, call: GenerateCall, asked: RequestExpectations, reply: Reply, member: EngineClient) -> Generation:
        if reply.status != 200:
            raise _refusal(reply, member)
        try:
            got = parse(reply.body, asked)
            got = got if call.extra is None else replace(got, raw=(reply.body,))
        except EngineRejected as error:
            raise EngineRejected(f"{error} (from {member.url})", status=error.status, kind=error.kind) from None
        call.rid = uuid.uuid4().hex
        if got.finish_reason.type == "abort" and not (got.ids or call.interrupted or call.aborted):
            said = f"{member.url} aborted the request before its first token, and this client did not ask for it"
            raise EngineRejected(f"{said}; check that no other client controls this engine", status=200, kind="aborted")
        if None in call.versions:  # no weights were sent yet: those that it has are right
            return got
        if strange := {version for version, _, _ in got.weight_versions} - call.versions:
            said = f"{member.url} answered with weights of version {sorted(strange)}; expected {self._registry.version}"
            raise EngineRejected(
                f"{said}; check that it was not restarted and that no other client sends weights",
                status=200,
                kind="other_weights",
            )
        mode = self._settings.pause_generation_mode
        if len(call.versions) > 1 and mode != "abort" and "weight_versions" not in got.meta_info:
            raise EngineRejected(
                f"{member.url} does not say which tokens of its answer are of which weights; "
                f"--pause-generation-mode {mode} needs SGLang 0.5.23, abort works with every version",
                status=200,
                kind="versions_unknown",
            )
        return got

    def _blame(self, member: EngineClient, error: EngineFailure, retry_after: float) -> None:
        """Record a member's failure; raise at once if the failure is the request's own."""
        self._registry.counts["failed"] += 1
        if isinstance(error, EngineUnreachable):
            self._registry.lost(member)
        elif error.kind == "other_weights":
            self._registry.has_stale_weights(member)
        elif isinstance(error, EngineRejected) and (
            error.kind in ("malformed_answer", "aborted") or error.status in (408, 429) or error.status >= 500
        ):
            self._registry.failed(member, anyio.current_time(), retry_after)
        else:
            raise error

    def _patient(self, began: float) -> bool:
        """Return true if a part begun then still waits while no engine is reachable: since the last one was lost."""
        return anyio.current_time() - max(began, self._registry.lost_at) < self._settings.engine_absence_timeout

    async def _somebody(self, began: float) -> None:
        """Wait for a member with current weights."""
        if self._registry.members and self._registry.folder is None and not self._patient(began):
            raise EngineUnreachable(
                f"no engine has the weights of version {self._registry.version} any more, and weights that were broadcast "
                "cannot be given again before the next update; start the same command again to resume, or use "
                "--update-weight-mode disk",
                kind="no_current_weights",
            )
        await self._registry.wait(_MAX_BACKOFF)


def _routed_on(params: SamplingParams, parts: Sequence[Generation]) -> SamplingParams:
    """Return the parameters of the next part: experts only of the tokens for which the parts so far have none."""
    known = sum(len(part.routed) for part in parts if part.routed is not None)
    start = params.routed_experts_start_len
    return replace(params, routed_experts_start_len=start + known) if start is not None and known else params


def _refusal(reply: Reply, member: EngineClient) -> EngineRejected:
    message = error_message(reply.body, reply.status)
    kind = error_kind(reply.status, message)
    return EngineRejected(f"{member.url} answered {reply.status}: {message}", status=reply.status, kind=kind)


def _finish(got: Generation, params: SamplingParams) -> FinishReason:
    """Why a part ended: SGLang says abort also where its last token would have ended it anyway."""
    if got.finish_reason.type != "abort":
        return got.finish_reason
    if got.ids and not params.ignore_eos and got.ids[-1] in (params.stop_token_ids or ()):
        return FinishReason("stop", got.ids[-1])
    return FinishReason("length" if len(got.ids) == params.max_new_tokens else "abort")
