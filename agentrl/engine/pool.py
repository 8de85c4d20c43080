"""`EnginePool`: all engines of a run behind one interface: generate, control, update weights.

1. One call of `generate` returns exactly one answer, or raises. Its deadline covers queueing, retries and the answer,
   and does not run while generation is paused. A cancelled call sends `abort_request`.
2. The pool probes its engines and updates engines that recover (`health`). A request that fails at one engine is
   retried at another (`requests`, `load_balancer`).
3. A call to all engines returns all answers in the order of `urls`, or raises the first error."""

import logging
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import orjson

from agentrl.engine.client import EngineClient
from agentrl.engine.health import HealthMonitor
from agentrl.engine.images import ImageInputs
from agentrl.engine.registry import EngineRegistry
from agentrl.engine.requests import GenerateCall
from agentrl.engine.settings import EngineSettings
from agentrl.engine.transport import HttpTransport, Reply, Sink, beside
from agentrl.engine.wire import Generation, SamplingParams
from agentrl.errors import EngineRejected, EngineTimeout, SettingsError

_log = logging.getLogger(__name__)


class EnginePool(HealthMonitor):
    """The engines that serve one model; an async context manager, safe for concurrent calls.

    Args:
        urls: the engines, as `host:port` or `http://host:port`.
        vocab_size: number of ids in the model's embedding. Prompts and answers with other ids are refused: such an id
            in a prompt would crash an SGLang server. None if unknown: ids are not checked.
        transport: HTTP connections that the caller opens and closes; by default the pool opens its own.
        temperatures: the run's temperatures. The pool warns once if a request samples otherwise; empty: no warning.
        follows: another process updates and repairs the engines; it calls `hold` and `release`."""

    def __init__(
        self,
        urls: Sequence[str],
        settings: EngineSettings | None = None,
        *,
        vocab_size: int | None,
        transport: HttpTransport | None = None,
        temperatures: Sequence[float] = (),
        follows: bool = False,
    ) -> None:
        if not urls:
            raise SettingsError("expected at least one engine address, got none; set --rollout-external-engine-addrs")
        self._owned, settings = transport is None, settings or EngineSettings()
        self._transport = transport or HttpTransport(settings)
        super().__init__(EngineRegistry(self._transport, settings), settings, vocab_size, follows)
        for url in urls:
            self._registry.join(url)
        self._stack, self.temperatures, self._told = AsyncExitStack(), temperatures, False

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            if self._owned:
                await stack.enter_async_context(self._transport)
            await stack.enter_async_context(beside(self._watch()))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    @property
    def members(self) -> tuple[EngineClient, ...]:
        """The engines."""
        return self._registry.members

    @property
    def urls(self) -> tuple[str, ...]:
        """The engines' addresses."""
        return tuple(member.url for member in self.members)

    @property
    def version(self) -> str | None:
        """Label of the weights that were last given to the engines; None before the first update."""
        return self._registry.version

    async def join(self, url: str) -> None:
        """Add an engine. The engine gets requests once it answers and has the current weights. Raises EngineFailure:
        the engine does not answer, serves another model than the others (see `check`), or refuses the weights."""
        member = self._registry.join(url)
        member.weights = "unknown"
        self._looking.add(member)  # the health monitor skips the engine until it is checked
        try:
            infos, failures = await self._registry.each(EngineClient.model_info, self.members)
            if member in failures:
                raise failures[member]
            _check_alike({one.url: infos[one] for one in self.members if one in infos})
            await self._look(member)
        except BaseException:
            self._registry.leave(url)
            raise
        finally:
            self._looking.discard(member)

    def leave(self, url: str) -> None:
        """Remove an engine; its requests go to other engines. Raises SettingsError: the pool has no such engine."""
        self._registry.leave(url)

    async def check(self) -> None:
        """Check that every engine is an SGLang server and serves the same kind of model as the first. Resume
        external engines. A pool that follows another calls `check_present`. Raises EngineUnreachable, EngineTimeout: no
        answer. EngineRejected: no SGLang server (kind `not_sglang`), or another architecture or vocabulary size (`other_model`)."""
        if self.follows:
            await self.check_present()
        else:
            _check_alike(dict(zip(self.urls, await self.model_info(), strict=True)))
            if self.settings.engine == "external":  # a killed run may have left them paused
                await self._registry.each(EngineClient.resume, self.members)

    async def check_sees_images(self) -> None:
        """Check that no model lacks vision. Raises EngineRejected, kind `blind`: a model does; else as `model_info`."""
        for url, info in zip(self.urls, await self.model_info(), strict=True):
            if info.get("has_image_understanding") is False:
                said = f"{url} serves a model without vision, but prompts have images; serve it with its vision tower"
                raise EngineRejected(said, kind="blind")

    async def check_present(self) -> dict[str, Any]:
        """Wait until an engine answers, check all engines that answer, and return the first one's `/model_info`. The
        other engines get no requests until a probe finds them. Raises EngineUnreachable: no engine answered for
        `engine_absence_timeout`. EngineRejected: as `check`."""
        found = await self._registry.some(EngineClient.model_info, await self._answering())
        _check_alike({member.url: info for member, info in found.items()})
        return next(iter(found.values()))

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
        sink: Sink = None,
        images: ImageInputs | None = None,
    ) -> Generation:
        """Sample one continuation of `input_ids`.

        Args:
            rid: a name for `abort`. Engines see other ids.
            session_id: turns of one conversation share it and stay on one engine.
            deadline: seconds for the whole call; default `engine_request_timeout`.
            scored: number of last `input_ids` whose log-probs are returned as well.
            extra: more fields for SGLang's request; `Generation.raw` then has the raw answers.
            sink: receives the engine's events except the last, as JSON with all tokens so far, until a weight
                update. After the first event a failed request is not sent again.

        Raises EngineTimeout: the deadline passed. EngineUnreachable: no engine gave an answer within
        `engine_max_retries` retries. EngineRejected: the engine refused the request (`status`), or its answer is
        malformed or does not fit the request; kind `context_overflow` if the prompt or the answer exceeds the context,
        `other_prompt` if the engine read the images differently."""
        sampled = self.temperatures and params.max_new_tokens != 0
        if sampled and (otherwise := params.sampled_otherwise(self.temperatures)):
            self._registry.counts["sampled_otherwise"] += 1
            if not self._told:
                self._told = True
                said = f"a request samples with {otherwise}, unlike the run (temperature {self.temperatures[0]:g})"
                why = "training computes other log-probs for its tokens; give these tokens loss mask 0"
                _log.warning(f"{said}: {why}")
        call = GenerateCall(rid or secrets.token_hex(16), session_id, extra, images, sink)
        with self._within(deadline, f"a prompt of {len(input_ids)} tokens"):
            return await self._requests.generate(call, input_ids, params, scored)

    async def relay(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        rid: str | None = None,
        session_id: str | None = None,
        sink: Sink = None,
    ) -> Reply:
        """Return an engine's answer to POST `path`, or to GET if there is no body. After status 408, 429 or 5xx the
        pool asks another engine; other statuses are returned. A request that an update interrupts starts again. `sink`
        receives an answer of status 200 in parts. After the first part, the request is not sent again: an update or a
        failure ends the answer. All else is as with `generate`."""
        with self._within(None, path):
            return await self._requests.relay(
                GenerateCall(rid or secrets.token_hex(16), session_id, sink=sink), path, body
            )

    @contextmanager
    def _within(self, deadline: float | None, what: str) -> Iterator[None]:
        seconds = self.settings.engine_request_timeout if deadline is None else deadline
        try:
            with self.pause_gate.patience(seconds):
                yield
        except TimeoutError:
            raise EngineTimeout(f"no answer to {what} within {seconds:g} s") from None

    async def log_probs(
        self, ids: Sequence[int], count: int, *, session_id: str | None = None, images: ImageInputs | None = None
    ) -> list[float]:
        """Return natural log-probs of the last `count` of `ids`, each given all ids before it. The temperature is 1:
        SGLang scales only sampled tokens. Raises EngineTimeout, EngineUnreachable, EngineRejected: as `generate`."""
        if not 0 < count < len(ids):
            said = f"log-probs of the last {count} of {len(ids)} tokens"
            raise ValueError(f"{said}: expected at least 1, and another token before")
        params = SamplingParams(temperature=1.0, max_new_tokens=0)
        return (await self.generate(ids, params, session_id=session_id, scored=count, images=images)).prompt_log_probs

    async def abort(self, rid: str) -> None:
        """End request `rid`: `generate` returns the tokens so far, finish type `abort`. An unknown id does nothing."""
        if rid in self._requests.live:
            await self._requests.abort(rid)

    def figures(self) -> dict[str, float]:
        """Return metrics since the last call. Numbers: engines `ready`, mean requests `in_flight`, times an engine was
        `lost`, `failed` attempts, and requests `sampled_otherwise`. `prefix_cache_hit_rate`: share of cached tokens."""
        counts, self._registry.counts = self._registry.counts, Counter()
        return {
            "engines/ready": float(sum(member.weights == "current" for member in self.members)),
            "engines/in_flight": self._requests.mean_in_flight(),
            **{f"engines/{name}": float(counts[name]) for name in ("lost", "failed", "sampled_otherwise")},
            "engines/prefix_cache_hit_rate": counts["cached_tokens"] / max(counts["prompt_tokens"], 1),
        }

    async def pause(self) -> None:
        """Pause generation until `resume` or the next update. Calls in flight keep their tokens and then continue.
        Returns when all engines are idle."""
        self.pause_gate.close(between_rollouts=True)
        await self._requests.interrupt()

    async def resume(self) -> None:
        """Resume generation, unless an update or freed memory prevents it."""
        if self.generates:
            self.pause_gate.open()

    def updated(self, version: int) -> None:
        """Accept tokens of this weight version in answers to requests in flight; `receive` does so by itself."""
        self._requests.updated(str(version))

    async def model_info(self) -> list[dict[str, Any]]:
        """Return `/model_info` of every engine: model_path, weight_version and more."""
        return await self._registry.all(EngineClient.model_info, self.members)

    async def server_info(self) -> dict[str, dict[str, Any]]:
        """Return by address `/server_info` (options, version) of all that answer. Raises EngineFailure: no answer."""
        found = await self._registry.some(EngineClient.server_info, self.members)
        return {member.url: info for member, info in found.items()}

    async def encode(self, text: str) -> dict[str, list[int]]:
        """Return by address each tokenizer's ids of `text`, with special tokens. Raises EngineFailure: no answer."""
        found = await self._registry.some(lambda member: member.encode(text), self.members)
        return {member.url: ids for member, ids in found.items()}


def _check_alike(infos: Mapping[str, dict[str, Any]]) -> None:
    kinds = {
        url: {name: info.get(name) for name in ("model_type", "architectures")} | vocabulary(info)
        for url, info in infos.items()
    }
    first, expected = next(iter(kinds.items()))
    for url, kind in kinds.items():
        if differs := sorted(name for name in kind.keys() & expected.keys() if kind[name] != expected[name]):
            wrong = f"{differs[0]} is {kind[differs[0]]!r}, expected {expected[differs[0]]!r}"
            said = f"{url} serves another model than {first}: {wrong}; all engines of a pool must serve the model of this run"
            raise EngineRejected(said, kind="other_model")


def vocabulary(info: dict[str, Any]) -> dict[str, Any]:
    """Return the served model's `vocab_size`; an empty dict if its `config.json` cannot be read from here."""
    config = Path(str(info.get("model_path"))) / "config.json"
    size = orjson.loads(config.read_bytes()).get("vocab_size") if config.is_file() else None
    return {} if size is None else {"vocab_size": size}
