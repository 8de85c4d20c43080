"""The resources that all trajectories of a process share. `RolloutContext` is built once per process.
`helpers.current()` returns it in a generate function, even a custom one."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from agentrl.engine.hosted import HostedModel
from agentrl.engine.images import ImageInputs
from agentrl.engine.pause import PauseGate
from agentrl.engine.wire import SamplingParams
from agentrl.errors import SettingsError
from agentrl.gateway.sessions import TurnSampler
from agentrl.rollout.hooks import RolloutHooks
from agentrl.rollout.settings import RolloutSettings
from agentrl.rollout.stats import Tally
from agentrl.sample import Message, Sample

N = TypeVar("N", int, float)

if TYPE_CHECKING:
    from agentrl.chat import Chat
    from agentrl.envs import Environments
    from agentrl.gateway.server import Gateway


class Generator(TurnSampler, Protocol):
    """The part of the engine pool that generation needs."""

    pause_gate: PauseGate  # closed during a pause between two rollouts or for a weight update

    async def pause(self) -> None:
        """Pause generation until `resume`. Requests in flight keep their tokens and continue then."""

    async def resume(self) -> None:
        """Continue generation."""

    def updated(self, version: int) -> None:
        """Accept tokens of this weight version in answers to requests in flight."""


class Scorer(Protocol):
    """The part of the engine pool that a teacher needs."""

    async def log_probs(
        self, ids: Sequence[int], count: int, *, session_id: str | None = None, images: ImageInputs | None = None
    ) -> list[float]:
        """Return the log-probs of the last `count` of `ids`, each given all ids before it."""


@dataclass(frozen=True, slots=True)
class EngineGroup:
    """Engines that user code chooses by name, for example an opponent's."""

    chat: "Chat"
    client: Generator
    params: SamplingParams

    async def reply(
        self, messages: Sequence[Message], *, max_tokens: int | None = None, temperature: float | None = None
    ) -> str:
        """Return the text of the next assistant turn. By default sampling is as in training. Raises EngineFailure."""
        asked: dict[str, Any] = {"max_new_tokens": max_tokens, "temperature": temperature}
        params = replace(self.params, **{name: value for name, value in asked.items() if value is not None})
        found = await self.client.generate(self.chat.render_ids(messages), params)
        return self.chat.decode(found.ids, skip_special_tokens=True)


@dataclass(frozen=True, slots=True)
class RolloutContext:
    """Everything that generation needs; immutable and shared by all trajectories of a process."""

    settings: RolloutSettings
    args: Any  # the run's settings as users see them, read-only and flat, under slime's names
    chat: "Chat"
    client: Generator
    context_length: int  # maximum tokens of a whole trajectory, prompt included
    environments: "Environments | None" = None
    teacher: Scorer | None = None  # gives log-probs for the groups that are kept for training
    gateway: "Gateway | None" = None  # serves agent programs; None without them
    evaluating: bool = False  # true if the trajectories are evaluated, not trained
    tallies: tuple[Tally, ...] = ()  # counts of the tokens that engines sample: of this attempt, and of its group
    hooks: RolloutHooks = field(default_factory=RolloutHooks)  # called around rollouts
    engine_groups: Mapping[str, EngineGroup] = field(default_factory=dict)  # engines of `--engine-groups`, by name

    def engine_group(self, name: str) -> EngineGroup:
        """Return the engine group of this name. Raises SettingsError: there is no such group."""
        if name not in self.engine_groups:
            known = ", ".join(self.engine_groups) or "none"
            raise SettingsError(f"no engine group {name!r}; --engine-groups names {known}")
        return self.engine_groups[name]

    @property
    def hosted(self) -> HostedModel | None:
        """The hosted model that generates; None if engines of the run generate."""
        return self.client if isinstance(self.client, HostedModel) else None

    def params(self, *, evaluation: bool = False) -> SamplingParams:
        """Return the sampling parameters of training or evaluation, without a turn's seed and budget."""
        s = self.settings

        def pick(own: N | None, training: N) -> N:
            return own if evaluation and own is not None else training

        return SamplingParams(
            temperature=pick(s.eval_temperature, s.rollout_temperature),
            top_p=pick(s.eval_top_p, s.rollout_top_p),
            top_k=pick(s.eval_top_k, s.rollout_top_k),
            max_new_tokens=pick(s.eval_max_response_len, s.rollout_max_response_len),
            min_new_tokens=s.eval_min_new_tokens if evaluation else None,
            stop=s.rollout_stop or None,
            stop_token_ids=(*self.chat.stop_token_ids, *s.rollout_stop_token_ids),
            skip_special_tokens=s.rollout_skip_special_tokens,
            no_stop_trim=True,
            return_sampling_mask=s.replays_truncation and not evaluation,
            routed_experts_start_len=0 if s.use_rollout_routing_replay and not evaluation else None,
        )

    def turn_params(self, params: SamplingParams, sample: Sample, turn: int, budget: int) -> SamplingParams:
        """Return `params` for one turn: with at most `budget` new tokens, and with the turn's seed."""
        seed = turn_seed(self.settings.rollout_seed, sample, turn) if self.settings.rollout_deterministic else None
        most = budget if params.max_new_tokens is None else min(params.max_new_tokens, budget)
        start, rows = params.routed_experts_start_len, sample.rollout_routed_experts
        if start is not None and rows is not None:
            start = len(rows)  # request routing only for the new tokens
        return replace(params, max_new_tokens=most, sampling_seed=seed, routed_experts_start_len=start)


def turn_seed(seed: int, sample: Sample, turn: int) -> int:
    """Return a 31-bit seed that is a pure function of the run's seed, the sample, its attempt and the turn."""
    key = f"{seed}/{sample.group_index}/{sample.index}/{sample.metadata.get('attempt', 0)}/{turn}"
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest(), "little") >> 1
