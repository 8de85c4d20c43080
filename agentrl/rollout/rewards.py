"""The reward stage: choice of the grader, its deadline, and checks of rewards. Built-in graders have their own deadline
(`grader_timeout` per answer). It does not count the wait for a free process, which is long if a whole rollout ends at
once. `reward_timeout` is for user code; for a plain function, it starts when the function has a thread."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import anyio

from agentrl.errors import GraderFailure
from agentrl.rm_hub import GraderRunner, batched_async_rm
from agentrl.rollout.failures import guarded
from agentrl.rollout.functions import GenerateFunction, RewardFunction, whose
from agentrl.rollout.settings import RolloutSettings
from agentrl.sample import Sample

UNGRADED = f"{__name__}:reward_by_row"
_NO_RETURN = "; every way through it ends in a return with the reward"
_THREADS = 32  # maximum of plain reward functions that run at once


@dataclass(frozen=True, slots=True)
class Grader:
    """Grader of samples without a reward: the custom reward function, or else the built-in `rm_type`."""

    settings: RolloutSettings
    args: Any
    function: RewardFunction | None = None  # a custom reward function; it takes the place of `Environment.reward`
    runner: GraderRunner | None = None  # for built-in graders and `async_rm`; by default the event loop's own
    _threads: anyio.Semaphore = field(default_factory=lambda: anyio.Semaphore(_THREADS), repr=False, compare=False)

    @property
    def by_group(self) -> bool:
        """True if the group must be complete before it can be graded."""
        return self.function is not None and self.function.group

    async def grade(self, samples: Sequence[Sample], giver: GenerateFunction | None = None) -> None:
        """Set the reward of every sample that lacks one, and check all rewards. `giver`: may have set rewards already.
        Raises GraderFailure: the function raised, timed out, or returned something that is not a finite number."""
        pending = [sample for sample in samples if sample.reward is None]
        for path in dict.fromkeys(sample.custom_rm_path for sample in pending):
            function = self.function if path is None else RewardFunction.load(path, group=False)
            own = [sample for sample in pending if sample.custom_rm_path == path]
            rewards = await (self._built_in(own) if function is None else self._own(function, own))
            for sample, reward in zip(own, rewards, strict=True):
                sample.reward = reward
                check_reward(sample, whose(function))
        for sample in samples:
            check_reward(sample, whose(giver))

    async def _own(self, function: RewardFunction, samples: Sequence[Sample]) -> list[Any]:
        # Hundreds of plain functions at once would share the processor and all miss their deadlines.
        async with self._threads if function.plain else nullcontext():
            call, timeout, flag = function(self.args, samples), self.settings.reward_timeout, "--reward-timeout"
            return await guarded(call, what=function.name, timeout=timeout, failure=GraderFailure, flag=flag)

    async def _built_in(self, samples: Sequence[Sample]) -> list[Any]:
        if self.settings.rm_type is None and not all(sample.metadata.get("rm_type") for sample in samples):
            raise GraderFailure(
                "the sample has no reward and nothing grades it; return one from the environment or generate "
                "function, or set --rm-type or --custom-rm-path",
                kind="grader_missing",
            )
        grading, what = batched_async_rm(self.args, samples), f"--rm-type {self.settings.rm_type}"
        return list(await guarded(grading, what=what, failure=GraderFailure))


async def reward_by_row(args: Any, sample: Sample) -> Any:
    """Return the reward in a run that needs no rewards: from the grader that the sample's row names, or else 0."""
    return (await batched_async_rm(args, [sample]))[0] if sample.metadata.get("rm_type") else 0.0


def check_reward(sample: Sample, giver: str) -> None:
    """Check that the reward is a finite number, or a dict whose numbers are finite; remove an invalid reward. Raises
    GraderFailure: the reward is invalid. `giver`: name of its source for the message, or ""."""
    values = sample.reward.values() if isinstance(sample.reward, dict) else [sample.reward]
    numbers = [v for v in values if isinstance(v, (int, float))]
    plain = not isinstance(sample.reward, dict)
    if (plain and not numbers) or not all(map(math.isfinite, numbers)):
        given, sample.reward = sample.reward, None
        raise GraderFailure(
            f"{giver and f'{giver}: '}the reward of sample index={sample.index} must be a finite number or a dict of them, "
            f"got {given!r:.80}{_NO_RETURN if given is None else ''}",
            kind="grader_bad_reward",
        )
    if plain:
        sample.reward = float(numbers[0])
