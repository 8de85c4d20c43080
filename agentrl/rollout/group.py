"""Playing one group: its trajectories side by side, failures typed and settled by policy, rewards given.

1. Structured: a group's trajectories are tasks of its task group. Leaving it, by success, error or cancellation,
   leaves nothing running.
2. Failures follow the policy table of the settings and are counted by blame and kind.
3. Finished samples that a data source gives (replay from its own buffer) are used as they are, not generated again.
"""

import math
from collections import Counter
from collections.abc import Awaitable, Callable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import NoReturn, TypeVar

import anyio

from agentrl.engine.wire import SamplingParams
from agentrl.errors import AgentRLError, EnvFailure, Failure, TrajectoryTimeout, ungrouped
from agentrl.groups import Group
from agentrl.rm_hub.running.runner import entered as entered_runner
from agentrl.rollout.agent_loop import run_environment
from agentrl.rollout.context import RolloutContext
from agentrl.rollout.failures import guarded, mark_failed, mask_out, trainable
from agentrl.rollout.functions import GenerateFunction, settle
from agentrl.rollout.helpers import Recorder, recording
from agentrl.rollout.rewards import Grader
from agentrl.rollout.settings import FailureAction
from agentrl.sample import Sample, Status

T = TypeVar("T")


class DropGroup(Exception):
    """Internal: the policy says that this failure drops the group."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(slots=True)
class RolloutStats:
    """Counts of one rollout: what was offered, what was kept, and what went wrong."""

    offered: list[Sample] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    last_failure: str = ""
    retries: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def count(self, failure: Failure) -> None:
        """Count a failure by blame and kind."""
        self.failures[f"{failure.blame}/{failure.kind}"] += 1
        self.last_failure = str(failure)


class GroupPlayer:
    """Plays trajectories and groups: generate, failure policy, reward. Used by training and evaluation."""

    def __init__(self, context: RolloutContext, grader: Grader, generate: GenerateFunction | None = None) -> None:
        self.context, self.grader, self.generate = context, grader, generate
        self._limit = anyio.CapacityLimiter(context.settings.rollout_max_concurrency)

    async def group(self, samples: Group, *, evaluation: bool, stats: RolloutStats) -> Group:
        """Play all samples of a group and grade them.

        Returns:
            The finished samples, fan-out flattened, in order.

        Raises:
            DropGroup: a failure's policy drops the group.
            Failure: a failure's policy stops the run.
        """
        with entered_runner(self.grader.runner):
            flat = await self._group(samples, self.context.params(evaluation=evaluation), evaluation, stats)
        stats.offered.extend(flat)
        return flat

    async def _group(self, samples: Group, params: SamplingParams, evaluation: bool, stats: RolloutStats) -> Group:
        finished: list[Group] = [[] for _ in samples]
        whole = self.generate is not None and not self.generate.per_sample
        if whole:
            finished = await self._whole_group(samples, params, evaluation, stats)
        else:

            async def one(at: int, sample: Sample) -> None:
                finished[at] = await self._trajectory(sample, params, evaluation, stats)

            with ungrouped():
                async with anyio.create_task_group() as tasks:
                    for at, sample in enumerate(samples):
                        tasks.start_soon(one, at, sample)
        flat = [member for members in finished for member in members]
        if whole or self.grader.by_group:
            flat = await self._grade_group(flat, stats)
        return flat

    async def _trajectory(
        self, sample: Sample, params: SamplingParams, evaluation: bool, stats: RolloutStats
    ) -> list[Sample]:
        """One trajectory with retries; its failure is settled by the policy."""
        fresh = sample

        async def play(attempt: int) -> list[Sample]:
            nonlocal fresh
            fresh = _fresh(sample, attempt)
            async with self._limit:
                return await self._deadline(self._play(fresh, params, evaluation))

        try:
            return await self._retrying(play, stats)
        except Failure as failure:
            return [self._settle_failure(fresh, failure)]

    async def _retrying(self, play: Callable[[int], Awaitable[T]], stats: RolloutStats) -> T:
        """Call `play` with the number of the attempt, again as long as the policy says so; failures are counted."""
        settings, attempt = self.context.settings, 0
        while True:
            try:
                return await play(attempt)
            except Failure as failure:
                stats.count(failure)
                retry = settings.action(failure.blame) is FailureAction.RETRY
                if not retry or attempt >= settings.rollout_max_retries:
                    raise
                attempt += 1
                stats.retries += 1

    async def _deadline(self, play: Awaitable[list[Sample]]) -> list[Sample]:
        timeout = self.context.settings.trajectory_timeout
        return await guarded(play, what="the trajectory", timeout=timeout, failure=EnvFailure, late=TrajectoryTimeout)

    async def _play(self, sample: Sample, params: SamplingParams, evaluation: bool) -> list[Sample]:
        own = self.grader.overrides_environment
        if sample.finished:
            generated = settle([sample], sample, "the data source")
        elif self.generate is None:
            generated = await run_environment(self.context, sample, params, grade=not own)
        else:
            name = self.generate.name
            recorder = Recorder(self.context, params, sample)
            async with recording(recorder):
                call = self.generate.call_one(self.context.args, sample, params, evaluation)
                try:
                    # Its deadline is the trajectory's.
                    generated = await guarded(call, what=name, timeout=math.inf, failure=EnvFailure)
                except Failure:
                    recorder.rescue(sample)
                    raise
            recorder.fill(generated)
            generated = settle(generated, sample, name)
        if not self.grader.by_group:
            await self.grader.grade(generated)
        return generated

    async def _whole_group(
        self, samples: Group, params: SamplingParams, evaluation: bool, stats: RolloutStats
    ) -> list[Group]:
        """The group form of a custom generate function: one call, one deadline, one failure for all."""
        assert self.generate is not None
        generate, name = self.generate, self.generate.name
        if all(sample.finished for sample in samples):
            return [settle([_fresh(sample, 0)], sample, "the data source") for sample in samples]
        timeout = self.context.settings.trajectory_timeout * len(samples)

        async def play(attempt: int) -> list[Group]:
            fresh = [_fresh(sample, attempt) for sample in samples]
            recorder = Recorder(self.context, params, fresh[0])
            async with self._limit, recording(recorder):
                call = generate.call_group(self.context.args, fresh, evaluation)
                finished = await guarded(call, what=name, timeout=timeout, failure=EnvFailure, late=TrajectoryTimeout)
            recorder.fill([member for members in finished for member in members])
            return [settle(members, sample, name) for members, sample in zip(finished, samples, strict=True)]

        try:
            return await self._retrying(play, stats)
        except Failure as failure:
            self._drop(failure)

    def _drop(self, failure: Failure) -> NoReturn:
        """What follows where a failure cannot be one sample's alone."""
        if self.context.settings.action(failure.blame) is FailureAction.RAISE:
            raise failure
        raise DropGroup(f"{failure.blame}/{failure.kind}") from failure

    def _settle_failure(self, sample: Sample, failure: Failure) -> Sample:
        action = self.context.settings.action(failure.blame)
        if action in (FailureAction.RAISE, FailureAction.DROP_GROUP):
            self._drop(failure)
        mark_failed(sample, failure)
        if action is not FailureAction.SCORE or not trainable(sample):
            return mask_out(sample)
        if sample.reward is None:
            sample.reward = 0.0
        return sample

    async def _grade_group(self, samples: Group, stats: RolloutStats) -> Group:
        try:
            await self.grader.grade(samples)
        except Failure as failure:
            stats.count(failure)
            self._drop(failure)
        return samples


def group_id(group: Group) -> int:
    """The ledger's number of a group."""
    index = group[0].group_index
    if index is None:
        raise AgentRLError("a group's samples have no group_index; take groups from a data source")
    return index


def _fresh(sample: Sample, attempt: int) -> Sample:
    """A pending copy of a leased sample; it shares nothing with the sample or with an earlier attempt.

    A finished sample, which a data source gives to be used once more, stays as it is.
    """
    copy = deepcopy(sample)
    if sample.finished:
        return copy
    if attempt:
        copy.metadata["attempt"] = attempt
    copy.session_id = f"{sample.group_index}-{sample.index}-{attempt}"
    copy.status = Status.PENDING
    return copy
