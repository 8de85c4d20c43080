"""retrain's rewards: functions by name, of single turns and of whole episodes, with weights and one scale.

    @reward                                                     @reward("brevity")
    def polite(prompt, completion, config_params, step_info)    def brevity(raw_rollout, infos)

A function gets those of its arguments that it takes, plain or async: of a turn `prompt` (text), `completion`,
`step_info` and `config_params`, of an episode `raw_rollout` and `infos`; both the entries of `params` by name."""

import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TypeVar, cast, overload

from pydantic import BaseModel, ConfigDict, Field

from agentrl.compat.calls import taken_by
from agentrl.compat.retrain.formats import KEPT, DataFormatBridge, RawRolloutData
from agentrl.config.problems import did_you_mean
from agentrl.errors import GraderFailure, SettingsError
from agentrl.plugins import load_object
from agentrl.rm_hub.combine import CreditStrategy, StepRewards, result_of
from agentrl.rm_hub.running.runner import each
from agentrl.rollout.failures import describe
from agentrl.sample import Sample, Status

ENVIRONMENT = "environment"  # the name of the rewards that the environment's steps gave
_SPREAD: Mapping[str, CreditStrategy] = {"last_step": "last", "all_steps_average": "average", "all_steps_equal": "all"}
F = TypeVar("F", bound=Callable[..., Any])
_REGISTRY: dict[str, Callable[..., Any]] = {}
_STRICT = ConfigDict(extra="forbid", strict=True)


class RewardFunctionConfig(BaseModel):
    """One entry of `reward_setup`: its key is a registered name, or `path/file.py:function`."""

    model_config = _STRICT
    weight: float = Field(1.0, allow_inf_nan=False)
    params: dict[str, Any] = Field(default_factory=dict)
    distribution_strategy: Literal["last_step", "all_steps_average", "all_steps_equal"] | None = None


class RewardSetupConfig(BaseModel):
    """The section `reward_setup`; `scale` (ours) makes the functions' scales alike within a group, before the weights."""

    model_config = _STRICT
    step_reward_configs: dict[str, RewardFunctionConfig] = Field(default_factory=dict)
    rollout_reward_configs: dict[str, RewardFunctionConfig] = Field(default_factory=dict)
    scale: bool = False

    @property
    def names(self) -> set[str]:
        return {*self.step_reward_configs, *self.rollout_reward_configs}


@overload
def reward(name: F) -> F: ...
@overload
def reward(name: str | None = None) -> Callable[[F], F]: ...
def reward(name: Any = None) -> Any:
    """Register a reward function under its own name, or the one that is given."""

    def register(function: F) -> F:
        _REGISTRY[name if isinstance(name, str) else function.__name__] = function
        return function

    return register(name) if callable(name) else register


def find(name: str) -> Callable[..., Any]:
    """The function that a name or path means. Raises SettingsError: it is not registered."""
    if ":" in name:
        return cast(Callable[..., Any], load_object(name, what="reward_setup"))
    known = {**getattr(sys.modules.get("retrain.reward.reward"), "REWARD_REGISTRY", {}), **_REGISTRY}
    if name not in known:
        near = did_you_mean(name, known) or f"; known are {', '.join(sorted(known))}, or give path/file.py:function"
        raise SettingsError(f"reward_setup names {name!r}, which is not registered{near}")
    return cast(Callable[..., Any], known[name])


class RewardCalculator:
    """The rewards of episodes by `reward_setup`'s two tables. Raises SettingsError: a function is not known."""

    def __init__(self, step_reward_configs: Any = None, rollout_reward_configs: Any = None, scale: bool = False):
        steps, rollouts = step_reward_configs or {}, rollout_reward_configs or {}
        self.setup = RewardSetupConfig(step_reward_configs=steps, rollout_reward_configs=rollouts, scale=scale)
        self._functions = {name: find(name) for name in self.setup.names}

    async def process_step_rewards(self, rollout: RawRolloutData) -> list[dict[str, float]]:
        """Of each turn the rewards by name, without weights; the environment's own is `ENVIRONMENT`."""
        history, found = rollout["full_conversation_history"], []
        turns = [at for at, message in enumerate(history) if message["role"] == "assistant"]
        for number, at in enumerate(turns):
            said = {
                "prompt": "\n".join(f"{message['role']}: {message['content']}" for message in history[:at]),
                "completion": rollout["executed_llm_actions"][number]["raw_llm_output"],
                "step_info": rollout["step_info_dicts_per_turn"][number],
            }
            own = {ENVIRONMENT: rollout["intrinsic_rewards_per_turn"][number]}
            found.append(own | {n: await self._one(n, c, said) for n, c in self.setup.step_reward_configs.items()})
        return found

    async def process_rollout_rewards(self, rollout: RawRolloutData) -> dict[str, float]:
        """The rewards of the whole episode by name, without weights."""
        said = {"raw_rollout": rollout, "infos": rollout["step_info_dicts_per_turn"]}
        return {n: await self._one(n, c, said) for n, c in self.setup.rollout_reward_configs.items()}

    def combine_rewards(self, steps: Sequence[Mapping[str, float]], rollout: Mapping[str, float]) -> float:
        """The episode's one number: the weighted sum of all."""
        whole = [self.setup.rollout_reward_configs[name].weight * value for name, value in rollout.items()]
        return math.fsum([*self.credit(steps, {}), *whole])

    def credit(self, steps: Sequence[Mapping[str, float]], rollout: Mapping[str, float]) -> list[float]:
        """The credit of each turn: its own rewards, and the episode's as their `distribution_strategy` says."""
        own = {ENVIRONMENT: RewardFunctionConfig(), **self.setup.step_reward_configs}
        credit = [math.fsum(own[name].weight * value for name, value in step.items()) for step in steps]
        for name, value in rollout.items():
            config = self.setup.rollout_reward_configs[name]
            spread = StepRewards(_SPREAD[config.distribution_strategy or "last_step"])
            credit = spread.credit(credit, config.weight * value, len(credit))
        return credit

    async def _one(self, name: str, config: RewardFunctionConfig, said: Mapping[str, Any]) -> float:
        try:
            value = await call(self._functions[name], {**config.params, **said, "config_params": config.params})
        except Exception as error:
            raise GraderFailure(describe(f"reward {name}", error), kind="grader_raised") from error
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            said_by = f"reward {name} must return a finite number"
            raise GraderFailure(f"{said_by}, got {value!r:.80}", kind="grader_bad_reward")
        return float(value)


class RewardBridge(RewardCalculator):
    """The calculator as a reward function of a run: `(args, sample)`, and `(args, samples)` of a group."""

    async def reward(self, args: Any, sample: Sample) -> float:
        """The sample's reward. Its parts are in `metadata["rewards"]`, each turn's share in `metadata["step_credit"]`."""
        told = DataFormatBridge().sample_to_rollout(sample)
        for info in told["step_info_dicts_per_turn"][-1:]:
            info["truncated"] = info.get("truncated") or sample.status is Status.TRUNCATED
            info.setdefault("terminated", sample.status is Status.COMPLETED and not info["truncated"])
        steps, rollout = await self.process_step_rewards(told), await self.process_rollout_rewards(told)
        sample.metadata["step_credit"] = self.credit(steps, rollout)
        sums = {f"step/{name}": math.fsum(step[name] for step in steps) for name in (steps[0] if steps else ())}
        score, whole = self.combine_rewards(steps, rollout), {f"rollout/{n}": value for n, value in rollout.items()}
        sample.metadata["rewards"] = {"score": score, **sums, **whole}
        return score

    async def rewards(self, args: Any, samples: Sequence[Sample], chunk: int = 64) -> list[float]:
        """The rewards of a group, at most `chunk` of them worked out at once. With `scale` each function's values have
        mean 0 and deviation 1 within the group before they are weighed, so that none counts for more because its
        numbers are larger; not where the samples are played to evaluate."""
        scores = [0.0] * len(samples)

        async def one(at: int, sample: Sample) -> None:
            scores[at] = await self.reward(args, sample)

        await each(samples, one, chunk)
        if not self.setup.scale or any(sample.metadata.get(KEPT, {}).get("evaluation") for sample in samples):
            return scores
        scores = [0.0] * len(samples)
        configs = {f"step/{name}": config.weight for name, config in self.setup.step_reward_configs.items()}
        configs |= {f"rollout/{name}": config.weight for name, config in self.setup.rollout_reward_configs.items()}
        for name, weight in {f"step/{ENVIRONMENT}": 1.0, **configs}.items():
            values = [sample.metadata["rewards"].get(name, 0.0) for sample in samples]
            middle, spread = statistics.fmean(values), statistics.pstdev(values)
            if spread > 1e-9:
                scores = [score + weight * (v - middle) / spread for score, v in zip(scores, values, strict=True)]
        for sample in samples:
            del sample.metadata["step_credit"]  # it would be in other units
        return scores


async def call(function: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    """Call with those of `given` that it takes by name; a plain function runs in a thread."""
    return await result_of(partial(function, **taken_by(function, given)))


@reward
def task_completion(step_info: Mapping[str, Any], success_bonus: float = 1.0, failure_penalty: float = 0.0) -> float:
    """`success_bonus` in the turn that completed the task, `failure_penalty` where the episode was cut off, else 0. A
    turn's info says it: `success` if there, else `terminated` and `truncated`."""
    if not (step_info.get("terminated") or step_info.get("truncated") or "success" in step_info):
        return 0.0
    return success_bonus if step_info.get("success", step_info.get("terminated")) else failure_penalty


async def reward_of(args: Any, sample: Sample) -> float:
    """The reward function of a run with a `reward_setup`."""
    return await RewardBridge(**args.reward_setup).reward(args, sample)


async def rewards_of(args: Any, samples: Sequence[Sample]) -> list[float]:
    """The same with `--group-rm`, where scales are made alike."""
    return await RewardBridge(**args.reward_setup).rewards(args, samples)
