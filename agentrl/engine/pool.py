"""`EnginePool`: all engines of a run behind one door: generate on them, control them, give them weights.

1. One call of `generate` returns exactly one answer, or raises `EngineTimeout`, `EngineUnreachable` or
   `EngineRejected`. The deadline covers everything: waiting for a free place, retries and the answer.
2. A session's turns go to one engine as long as it lives (`balance`); at most `sglang_server_concurrency`
   requests are in flight at one engine.
3. Retried are: a refused or lost connection (elsewhere where possible, under a fresh request id, after the old id
   was aborted as far as that can be reached) and the answers 429, 502 and 503 (after a growing wait). An answer
   with tokens in it ends the call, so tokens are never counted twice; every other status raises at once.
4. Cancelling a call, or its deadline, sends `abort_request` for it, so that the engine stops too.
5. A control call goes to every engine at once and returns when all have succeeded, answers in the order of `urls`;
   otherwise it raises the first engine's error, when all have answered.
6. A weight update finds all engines paused with empty caches, and leaves none paused, also where it fails.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Self, TypeVar

import anyio
import orjson

from agentrl.engine.balance import Balance
from agentrl.engine.hold import Hold
from agentrl.engine.member import Member
from agentrl.engine.prompts import PromptEncoder
from agentrl.engine.settings import EngineSettings
from agentrl.engine.transport import ConnectionLost, ConnectionRefused, HttpTransport, Transport, normalise_url
from agentrl.engine.weights import BroadcastUpdate, WeightGroup, WeightUpdate
from agentrl.engine.wire import Asked, Generation, SamplingParams, error_kind, error_message, parse
from agentrl.errors import EngineFailure, EngineRejected, EngineTimeout, EngineUnreachable, SettingsError

T = TypeVar("T")

ROUTING_HEADER: Final = "X-SMG-Routing-Key"
"""Header by which SGLang's routers keep a session on one worker."""

_BUSY = frozenset({429, 502, 503})
_ABORT_TIMEOUT = 2.0
_RESUME_TIMEOUT = 10.0
_MAX_BACKOFF = 10.0


@dataclass(slots=True)
class _Live:
    """A `generate` call under way: where it is and under which request id."""

    member: Member
    rid: str


class EnginePool:
    """A fixed set of engines that serve one model; an async context manager, safe for concurrent calls.

    Args:
        urls: the engines, as `host:port` or `http://host:port`.
        settings: limits and patience.
        vocab_size: how many ids the model's embedding has. Prompts with other ids are refused before they are sent,
            because such an id ends a real SGLang server, and so are answers with other ids. None, where it cannot be
            known, leaves both to the engine.
        transport: how the engines are reached, open as long as the pool; default HTTP connections of its own.

    Attributes:
        version: label of the weights that were last given to all engines; None before the first update.
    """

    def __init__(
        self,
        urls: Sequence[str],
        settings: EngineSettings | None = None,
        *,
        vocab_size: int | None,
        transport: Transport | None = None,
    ) -> None:
        if not urls:
            raise SettingsError("expected at least one engine address, got none; set --rollout-external-engine-addrs")
        self.settings = settings or EngineSettings()
        self.urls = tuple(normalise_url(url) for url in urls)
        self.version: str | None = None
        self._owned = transport is None
        self._transport = transport or HttpTransport(connect_timeout=self.settings.engine_connect_timeout)
        self.members = tuple(Member(url, self._transport, self.settings) for url in self.urls)
        self._by_url = {member.url: member for member in self.members}
        self._balance = Balance(self.urls)
        self._prompts = PromptEncoder(vocab_size)
        self._vocab_size = vocab_size
        self._live: dict[str, _Live] = {}
        self.held = Hold()

    async def __aenter__(self) -> Self:
        if self._owned:
            await self._transport.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._owned:
            await self._transport.__aexit__(*exc)

    # ---- generating ---------------------------------------------------------------------------------------

    async def generate(
        self,
        input_ids: Sequence[int],
        params: SamplingParams,
        *,
        rid: str | None = None,
        session_id: str | None = None,
        deadline: float | None = None,
    ) -> Generation:
        """Sample one continuation of `input_ids`.

        Args:
            input_ids: the whole prompt.
            params: how to sample.
            rid: request id of the first attempt, for `abort`; default a fresh one. SGLang also aborts requests
                whose id merely starts with an aborted one, so ids should not be prefixes of each other.
            session_id: turns of one conversation share it and stay on one engine.
            deadline: seconds for the whole call; default `engine_request_timeout`.

        Raises:
            EngineTimeout: the deadline passed.
            EngineUnreachable: no engine gave an answer within `engine_max_retries` retries.
            EngineRejected: the engine refused the request (`status`), or its answer is malformed or does not fit the
                request; kind `context_overflow` where the prompt or the answer does not fit the context.
        """
        payload = {
            "return_logprob": True,
            "sampling_params": params.to_wire(),
            "input_ids": orjson.Fragment(self._prompts.encode(input_ids, session_id)),
        }
        asked = Asked(len(input_ids), params.max_new_tokens, self._vocab_size)
        seconds = self.settings.engine_request_timeout if deadline is None else deadline
        name = rid or uuid.uuid4().hex
        try:
            with anyio.fail_after(seconds):
                return await self._attempts(name, payload, asked, session_id)
        except TimeoutError:
            raise EngineTimeout(f"no answer to a prompt of {len(input_ids)} tokens within {seconds:g} s") from None

    async def abort(self, rid: str) -> None:
        """End the request that was started as `rid`; its `generate` returns what there is, finish type `abort`.

        An unknown or finished id does nothing.
        """
        live = self._live.get(rid)
        if live is not None:
            await live.member.abort(live.rid)
        else:
            await self._each(lambda member: member.abort(rid))

    async def abort_all(self) -> None:
        """End every request on every engine; each answers with what it has so far."""
        await self._each(Member.abort_all)

    async def hold(self) -> None:
        """Stop generating until `release`."""
        self.held.close()

    async def release(self) -> None:
        """Go on generating."""
        self.held.open()

    # ---- asking -------------------------------------------------------------------------------------------

    async def health(self, timeout: float = 5.0) -> dict[str, bool]:
        """Which engines answer `/health` with 200 within `timeout` seconds, by address."""
        alive = await self._each(lambda member: member.healthy(timeout))
        return dict(zip(self.urls, alive, strict=True))

    async def model_info(self) -> list[dict[str, Any]]:
        """`/model_info` of every engine: model_path, weight_version and more."""
        return await self._each(Member.model_info)

    async def server_info(self) -> list[dict[str, Any]]:
        """`/server_info` of every engine: all server options and the version."""
        return await self._each(Member.server_info)

    # ---- weights ------------------------------------------------------------------------------------------

    async def join_weight_group(self, group: WeightGroup) -> None:
        """Have every engine join; returns when all ranks are there, the trainer's included."""
        ranks = {member: 1 + i * group.ranks_per_engine for i, member in enumerate(self.members)}
        await self._each(lambda member: member.join_group(group, ranks[member]))

    async def leave_weight_group(self, name: str) -> None:
        """Have every engine leave the group."""
        await self._each(lambda member: member.leave_group(name))

    async def receive(self, update: WeightUpdate, version: str) -> None:
        """Give every engine new weights under the label `version`; live requests end with what they have.

        A broadcast has to run beside the trainer's side of it.

        Raises:
            EngineFailure: an engine could not take the weights. All engines sample again, each with what it has.
        """
        async with self._paused():
            if isinstance(update, BroadcastUpdate):
                await self._each(Member.begin_update)
                for bucket in update.buckets:
                    await self._each(partial(Member.receive, tensors=bucket, group=update.group, version=version))
                await self._each(Member.end_update)
            else:
                await self._each(lambda member: member.load_folder(update.folder, version))
            self.version = version

    @asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        try:
            await self._each(lambda member: member.pause("abort"))
            await self._each(Member.flush_cache)
            yield
        except BaseException as error:
            # External engines outlive this process: one that is left paused would answer nobody ever after.
            with anyio.move_on_after(_RESUME_TIMEOUT, shield=True):
                try:
                    await self._each(Member.resume)
                except EngineFailure as failure:
                    error.add_note(f"and it could not be resumed: {failure}")
            raise
        await self._each(Member.resume)

    # ---- attempts -----------------------------------------------------------------------------------------

    async def _attempts(self, name: str, payload: dict[str, Any], asked: Asked, session_id: str | None) -> Generation:
        headers = None if session_id is None else {ROUTING_HEADER: session_id}
        rid = name
        for attempt in range(self.settings.engine_max_retries + 1):
            last = attempt == self.settings.engine_max_retries
            engine = self._balance.choose(session_id, time.monotonic())
            member = self._by_url[engine.url]
            try:
                async with member.places:
                    self._live[name] = _Live(member, rid)
                    status, raw = await _send(member, rid, payload, headers)
            except EngineUnreachable as error:
                self._balance.mark_dead(engine, time.monotonic())
                if last:
                    raise EngineUnreachable(f"{error} (after {attempt + 1} attempts)", kind=error.kind) from error
                rid = uuid.uuid4().hex
                wait = not self._balance.any_usable(time.monotonic())
            else:
                self._balance.mark_alive(engine)
                if status == 200:
                    return _answered(raw, asked, member.url)
                if status not in _BUSY or last:
                    raise _rejected(status, raw, member.url)
                wait = True
            finally:
                self._balance.release(engine)
                self._live.pop(name, None)
            if wait:
                await anyio.sleep(min(self.settings.engine_retry_backoff * 2.0**attempt, _MAX_BACKOFF))
        raise AssertionError("the last attempt returns or raises")

    async def _each(self, work: Callable[[Member], Awaitable[T]]) -> list[T]:
        """`work` for all engines at once; the first failure is raised when all are through."""
        answers: dict[Member, T] = {}
        failures: list[EngineFailure] = []

        async def run(member: Member) -> None:
            try:
                answers[member] = await work(member)
            except EngineFailure as error:
                failures.append(error)

        async with anyio.create_task_group() as group:
            for member in self.members:
                group.start_soon(run, member)
        if failures:
            raise failures[0]
        return [answers[member] for member in self.members]


async def _send(member: Member, rid: str, payload: dict[str, Any], headers: dict[str, str] | None) -> tuple[int, bytes]:
    payload["rid"] = rid
    try:
        return await member.generate(orjson.dumps(payload), headers)
    except ConnectionRefused:
        raise
    except (ConnectionLost, anyio.get_cancelled_exc_class()):
        # The engine may still be sampling for nobody; if it cannot be told it has nothing left to stop.
        with anyio.move_on_after(_ABORT_TIMEOUT, shield=True), suppress(EngineFailure):
            await member.abort(rid)
        raise


def _answered(raw: bytes, asked: Asked, url: str) -> Generation:
    try:
        return parse(raw, asked)
    except EngineRejected as error:
        raise EngineRejected(f"{error} (from {url})", status=error.status, kind=error.kind) from None


def _rejected(status: int, raw: bytes, url: str) -> EngineRejected:
    message = error_message(raw)
    return EngineRejected(f"{url} answered {status}: {message}", status=status, kind=error_kind(status, message))
