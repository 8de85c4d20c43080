"""`EnginePool`: all engines of a run behind one door: generate on them, control them, give them weights.

1. One call of `generate` returns exactly one answer, or raises `EngineTimeout`, `EngineUnreachable` or
   `EngineRejected`. The deadline covers waiting for a free place, retries and the answer; it stands still while
   generating is held.
2. A session's turns go to one engine as long as that one is well (`balance`); at most `sglang_server_concurrency`
   requests are in flight at one engine. What fails at one engine is tried at another (`requests`).
3. Neither a weight update nor `hold` ends a call: it goes on afterwards, with the tokens that it has.
4. Cancelling a call, or its deadline, sends `abort_request` for it, so that the engine stops too.
5. Engines may come and go (`join`, `leave`, `roster`); inside its context the pool probes them, and gives an engine
   that comes back the current weights before it gets work (`upkeep`).
6. What is asked of all engines goes to every one at once and returns when all have succeeded, answers in the order of
   `urls`; otherwise it raises the first engine's error, when all have answered.
7. A weight update finds engines paused with empty caches, and leaves none paused, also where it fails. It succeeds if
   one engine took it; the others get no work until they have the weights too.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import orjson

from agentrl.engine.background import beside
from agentrl.engine.hold import Hold
from agentrl.engine.member import Member
from agentrl.engine.requests import Requests
from agentrl.engine.roster import Roster
from agentrl.engine.settings import EngineSettings
from agentrl.engine.transport import HttpTransport, Reply, Transport
from agentrl.engine.upkeep import Upkeep
from agentrl.engine.weights import WeightGroup, WeightUpdate
from agentrl.engine.wire import Generation, SamplingParams
from agentrl.errors import EngineRejected, EngineTimeout, SettingsError


class EnginePool:
    """The engines that serve one model; an async context manager, safe for concurrent calls.

    Args:
        urls: the engines, as `host:port` or `http://host:port`.
        settings: limits and patience.
        vocab_size: how many ids the model's embedding has. Prompts with other ids are refused before they are sent,
            because such an id ends a real SGLang server, and so are answers with other ids. None, where it cannot be
            known, leaves both to the engine.
        transport: how the engines are reached, open as long as the pool; default HTTP connections of its own.

    Attributes:
        held: whether generating is held, by `hold` or while an update runs.
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
        self.held = Hold()
        self._owned = transport is None
        self._transport = transport or HttpTransport(self.settings)
        self._roster = Roster(self._transport, self.settings)
        for url in urls:
            self._roster.join(url)
        self._requests = Requests(self._roster, self.held, self.settings, vocab_size)
        self._upkeep = Upkeep(self._roster, self._requests, self.held, self.settings)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            if self._owned:
                await stack.enter_async_context(self._transport)
            await stack.enter_async_context(beside(self._upkeep.watch()))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    # ---- members ------------------------------------------------------------------------------------------

    @property
    def members(self) -> tuple[Member, ...]:
        """The engines."""
        return self._roster.members

    @property
    def urls(self) -> tuple[str, ...]:
        """The engines' addresses."""
        return tuple(member.url for member in self.members)

    @property
    def version(self) -> str | None:
        """Label of the weights that were last given to the engines; None before the first update."""
        return self._roster.version

    async def join(self, url: str) -> None:
        """Take a new engine in; it gets requests once it answers and has the current weights.

        Raises:
            EngineFailure: it does not serve what the others serve (see `check`), or refuses the weights.
        """
        member = self._roster.join(url)
        try:
            await self.check()
            await self._upkeep.look(member)
        except BaseException:
            self._roster.leave(url)
            raise

    def leave(self, url: str) -> None:
        """Forget an engine; its requests go elsewhere.

        Raises:
            SettingsError: the pool does not have it.
        """
        self._roster.leave(url)

    async def check(self) -> None:
        """Make sure that every engine is an SGLang server, and serves the same kind of model as the first.

        Raises:
            EngineUnreachable, EngineTimeout: one does not answer.
            EngineRejected: kind `not_sglang`, or `other_model`: another architecture or size of the vocabulary.
        """
        kinds = [
            {name: info.get(name) for name in ("model_type", "architectures")} | vocabulary(info)
            for info in await self.model_info()
        ]
        for url, kind in zip(self.urls, kinds, strict=True):
            if differs := sorted(name for name in kind.keys() & kinds[0].keys() if kind[name] != kinds[0][name]):
                raise EngineRejected(
                    f"{url} serves another model than {self.urls[0]}: {differs[0]} is {kind[differs[0]]!r}, expected "
                    f"{kinds[0][differs[0]]!r}; all engines of a pool must serve the model of this run",
                    kind="other_model",
                )

    # ---- generating ---------------------------------------------------------------------------------------

    async def generate(
        self,
        input_ids: Sequence[int],
        params: SamplingParams,
        *,
        rid: str | None = None,
        session_id: str | None = None,
        deadline: float | None = None,
        scored: int = 0,
        extra: Mapping[str, Any] | None = None,
    ) -> Generation:
        """Sample one continuation of `input_ids`.

        Args:
            input_ids: the whole prompt.
            params: how to sample.
            rid: request id of the first attempt, for `abort`; default a fresh one. SGLang also aborts requests
                whose id merely starts with an aborted one, so ids should not be prefixes of each other.
            session_id: turns of one conversation share it and stay on one engine.
            deadline: seconds for the whole call; default `engine_request_timeout`.
            scored: of so many of the last `input_ids` the log-probs are asked for as well.
            extra: more fields of SGLang's request; the answers are then kept as they came (`Generation.raw`).

        Raises:
            EngineTimeout: the deadline passed.
            EngineUnreachable: no engine gave an answer within `engine_max_retries` retries.
            EngineRejected: the engine refused the request (`status`), or its answer is malformed or does not fit the
                request; kind `context_overflow` where the prompt or the answer does not fit the context.
        """
        name = rid or uuid.uuid4().hex
        with self._within(deadline, f"a prompt of {len(input_ids)} tokens"):
            return await self._requests.generate(name, input_ids, params, session_id, scored, extra)

    async def relay(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        rid: str | None = None,
        session_id: str | None = None,
        deadline: float | None = None,
    ) -> Reply:
        """What an engine answers to POST `path` (GET without a body), whichever status it is, but for those that the pool
        asks another engine after (408, 429, 5xx). The answer has to be whole: no stream.

        What an update interrupts is asked again from its start; all else is as with `generate`.
        """
        with self._within(deadline, path):
            return await self._requests.relay(rid or uuid.uuid4().hex, path, body, session_id)

    @contextmanager
    def _within(self, deadline: float | None, what: str) -> Iterator[None]:
        seconds = self.settings.engine_request_timeout if deadline is None else deadline
        try:
            with self.held.patience(seconds):
                yield
        except TimeoutError:
            raise EngineTimeout(f"no answer to {what} within {seconds:g} s") from None

    async def log_probs(self, ids: Sequence[int], count: int, *, session_id: str | None = None) -> list[float]:
        """Natural-log probabilities of the last `count` of `ids`, each behind all ids before it. Nothing is sampled.

        They are of the model's own distribution, at temperature 1: SGLang scales none that it has not sampled.

        Raises:
            EngineTimeout, EngineUnreachable, EngineRejected: as `generate`.
        """
        if not 0 < count < len(ids):
            raise ValueError(f"log-probs of {count} of {len(ids)} tokens: expected at least one, and one before them")
        params = SamplingParams(temperature=1.0, max_new_tokens=0)
        return (await self.generate(ids, params, session_id=session_id, scored=count)).prompt_log_probs

    async def abort(self, rid: str) -> None:
        """End the request that was started as `rid`; its `generate` returns what there is, finish type `abort`.

        An unknown or finished id does nothing.
        """
        if rid in self._requests.live:
            await self._requests.abort(rid)
        else:
            await self._roster.all(lambda member: member.abort(rid), self.members)

    def figures(self) -> dict[str, float]:
        """How the engines did since the last call: how many are `ready`, how often one was `lost`, how many attempts at a
        request `failed`, and the `prefix_cache_hit_rate`, the share of the prompts' tokens that lay in a cache."""
        counts, self._roster.counts = self._roster.counts, Counter()
        ready = sum(member.state.weights == "current" for member in self.members)
        rate = counts["cached_tokens"] / max(counts["prompt_tokens"], 1)
        shown = {"ready": ready, "lost": counts["lost"], "failed": counts["failed"], "prefix_cache_hit_rate": rate}
        return {f"engines/{name}": float(value) for name, value in shown.items()}

    async def hold(self) -> None:
        """Generate nothing until `release`; calls under way keep their tokens and go on then.

        Returns when nothing is generated any more.
        """
        self.held.close(between_rollouts=True)
        await self._requests.interrupt()

    async def release(self) -> None:
        """Go on generating."""
        if self._upkeep.generates:
            self.held.open()

    async def occupy(self, memory: frozenset[str]) -> None:
        """Have the engines keep or take this part of their memory (`weights`, `kv_cache`) and give back the rest.

        Without both nothing is generated: calls under way keep their tokens, and go on when both are there again. Weights
        that were given back are as before in the built-in engine, and any in SGLang, which needs an update then.

        Raises:
            EngineFailure: none answers, or one cannot: kind `no_memory_saver`.
        """
        await self._upkeep.occupy(memory)

    # ---- asking -------------------------------------------------------------------------------------------

    async def model_info(self) -> list[dict[str, Any]]:
        """`/model_info` of every engine: model_path, weight_version and more."""
        return await self._roster.all(Member.model_info, self.members)

    async def server_info(self) -> list[dict[str, Any]]:
        """`/server_info` of every engine: all server options and the version."""
        return await self._roster.all(Member.server_info, self.members)

    async def encode(self, text: str) -> list[list[int]]:
        """`text` as the ids of every engine's own tokenizer, special tokens around it included."""
        return await self._roster.all(lambda member: member.encode(text), self.members)

    # ---- weights ------------------------------------------------------------------------------------------

    async def epoch(self) -> tuple[str, ...]:
        """Names of the engines that would take an update now, new ones for those that were away: see `WeightGroup`.

        Raises:
            EngineUnreachable: no engine answers.
        """
        return await self._upkeep.epoch()

    async def join_weight_group(self, group: WeightGroup) -> None:
        """Have its members join; returns when all ranks are there, the trainer's included."""
        await self._upkeep.join_group(group)

    async def leave_weight_group(self, name: str) -> None:
        """Have the engines that are still there leave the group."""
        await self._upkeep.leave_group(name)

    async def receive(self, update: WeightUpdate, version: str) -> None:
        """Give the engines new weights under the label `version`, and generate again, also if it was held before.

        A broadcast has to run beside the trainer's side of it.

        Raises:
            EngineFailure: no engine took the weights, or one of the group did not: kind `weight_group_broken` if it was
                away since it joined. All engines sample again, each with what it has.
        """
        await self._upkeep.receive(update, version)


def vocabulary(info: dict[str, Any]) -> dict[str, Any]:
    """How many ids the served model has, where its folder can be read from here."""
    config = Path(str(info.get("model_path"))) / "config.json"
    size = orjson.loads(config.read_bytes()).get("vocab_size") if config.is_file() else None
    return {} if size is None else {"vocab_size": size}
