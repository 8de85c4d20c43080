"""retrain's rewards: functions by name, of single turns and of whole episodes, with weights and one scale.

    @reward                                                     @reward("brevity")
    def polite(prompt, completion, config_params, step_info)    def brevity(raw_rollout, infos)

A function, plain or async, gets the arguments that it takes. A turn has `prompt` (text), `completion` and `step_info`;
an episode has `raw_rollout` and `infos`; both have `config_params` and the entries of `params` by name."""

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
    """The section `reward_setup`; `scale` (ours) normalizes a function's values within a group, before weights."""

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
    """Register a reward function under its own name, or under `name`."""

    def register(function: F) -> F:
        _REGISTRY[name if isinstance(name, str) else function.__name__] = function
        return function

    return register(name) if callable(name) else register


def find(name: str) -> Callable[..., Any]:
    """Return the function of a name or path. Raises SettingsError: the name is not registered."""
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
        """Return the rewards of each turn by name, without weights. The environment's own is `ENVIRONMENT`."""
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
        """Return the rewards of the whole episode by name, without weights."""
        said = {"raw_rollout": rollout, "infos": rollout["step_info_dicts_per_turn"]}
        return {n: await self._one(n, c, said) for n, c in self.setup.rollout_reward_configs.items()}

    def combine_rewards(self, steps: Sequence[Mapping[str, float]], rollout: Mapping[str, float]) -> float:
        """Return the episode's reward: the weighted sum of all rewards."""
        whole = [self.setup.rollout_reward_configs[name].weight * value for name, value in rollout.items()]
        return math.fsum([*self.credit(steps, {}), *whole])

    def credit(self, steps: Sequence[Mapping[str, float]], rollout: Mapping[str, float]) -> list[float]:
        """Return each turn's credit: its own rewards, and its part of the episode's by `distribution_strategy`."""
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
        if not isinstance(value, int | float) or not math.isfinite(value):
            said_by = f"reward {name} must return a finite number"
            raise GraderFailure(f"{said_by}, got {value!r:.80}", kind="grader_bad_reward")
        return float(value)


class RewardBridge(RewardCalculator):
    """The calculator as a reward function of a run: `(args, sample)`, and `(args, samples)` of a group."""

    async def reward(self, args: Any, sample: Sample) -> float:
        """Return the sample's reward. `metadata` gets its parts (`rewards`) and each turn's share (`step_credit`)."""
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
        """Return the rewards of a group, of which at most `chunk` are computed at once. With `scale`, each function's
        values first get mean 0 and standard deviation 1 within the group, so that larger numbers do not count for more.
        Samples of evaluations are not scaled."""
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
            del sample.metadata["step_credit"]  # its units differ from the scaled rewards
        return scores


async def call(function: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    """Call `function` with the values of `given` that it takes by name. A plain function runs in a thread."""
    return await result_of(partial(function, **taken_by(function, given)))


@reward
def task_completion(step_info: Mapping[str, Any], success_bonus: float = 1.0, failure_penalty: float = 0.0) -> float:
    """Return `success_bonus` for a turn that completed the task, `failure_penalty` for a turn that failed or was cut
    off, else 0. The turn's info decides: `success` if present, else `terminated` and `truncated`."""
    if not (step_info.get("terminated") or step_info.get("truncated") or "success" in step_info):
        return 0.0
    return success_bonus if step_info.get("success", step_info.get("terminated")) else failure_penalty


async def reward_of(args: Any, sample: Sample) -> float:
    """Return the reward of a sample, in a run with a `reward_setup`."""
    return await RewardBridge(**args.reward_setup).reward(args, sample)


async def rewards_of(args: Any, samples: Sequence[Sample]) -> list[float]:
    """Return the rewards of a group, in a run with `--group-rm`; `scale` is applied."""
    return await RewardBridge(**args.reward_setup).rewards(args, samples)
