"""The rollout loop: many trajectories at once, each with its own deadline, failures typed, groups whole.

1. Structured: every trajectory is a task of the rollout's task group. Leaving the loop, by success, error or
   cancellation, leaves nothing running.
2. A group is kept, or dropped with a reason, as a whole; the store (the ledger) is told before the loop goes on.
   The store writes durably, so it is called in a worker thread.
3. Failures follow the policy table of the settings and are counted by blame and kind.
4. Finished samples that a data source gives (replay from its own buffer) are used as they are, not generated again.
"""

import math
import time
from collections import Counter
from collections.abc import Awaitable, Sequence
from contextlib import AsyncExitStack
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Protocol

import anyio
from anyio import to_thread

from agentrl.engine.wire import SamplingParams
from agentrl.errors import AgentRLError, EnvFailure, Failure, TrajectoryTimeout, ungrouped
from agentrl.rm_hub.running.runner import entered as entered_runner
from agentrl.rollout.admission import GroupScheduler
from agentrl.rollout.agent_loop import run_environment
from agentrl.rollout.context import RolloutContext
from agentrl.rollout.failures import guarded, mark_failed, mask_out, trainable
from agentrl.rollout.filters import GroupFilter, judge
from agentrl.rollout.functions import GenerateFunction, settle
from agentrl.rollout.helpers import Recorder, recording
from agentrl.rollout.rewards import Grader
from agentrl.rollout.settings import FailureAction
from agentrl.sample import Sample, Status

Group = list[Sample]

HOPELESS, HOPELESS_GROUPS = 10, 50
"""A rollout that drops this many times its target in a row, and at least this many groups, is given up."""


class GroupStore(Protocol):
    """Where groups come from and where their fate is recorded, by group id (`Sample.group_index`)."""

    def lease(self, n: int, step: int) -> list[Group]:
        """At most `n` groups of pending samples for rollout `step`; fewer when the data has ended."""
        ...

    def complete(self, group_id: int, samples: Sequence[Sample]) -> None:
        """The group is finished and will be trained on."""
        ...

    def drop(self, group_id: int, reason: str) -> None:
        """The group is finished and will not be trained on."""
        ...

    def release(self, group_id: int, reason: str) -> None:
        """The group was started but is not needed in this rollout; it stays to be generated later."""
        ...


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


@dataclass(slots=True)
class RolloutResult:
    """The kept groups, in the order of their leases, and the counts."""

    groups: list[Group]
    stats: RolloutStats


class TrajectoryRunner:
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
        settings = self.context.settings
        attempt = 0
        while True:
            fresh = _fresh(sample, attempt)
            try:
                async with self._limit:
                    return await self._deadline(self._play(fresh, params, evaluation))
            except Failure as failure:
                stats.count(failure)
                action = settings.action(failure.blame)
                if action is FailureAction.RETRY and attempt < settings.rollout_max_retries:
                    attempt += 1
                    stats.retries += 1
                    continue
                return [await self._settle_failure(fresh, failure, action)]

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
        settings, name = self.context.settings, self.generate.name
        if all(sample.finished for sample in samples):
            return [settle([_fresh(sample, 0)], sample, "the data source") for sample in samples]
        attempt = 0
        while True:
            fresh = [_fresh(sample, attempt) for sample in samples]
            try:
                recorder = Recorder(self.context, params, fresh[0])
                async with self._limit, recording(recorder):
                    call = self.generate.call_group(self.context.args, fresh, evaluation)
                    timeout = settings.trajectory_timeout * len(samples)
                    finished = await guarded(
                        call, what=name, timeout=timeout, failure=EnvFailure, late=TrajectoryTimeout
                    )
                recorder.fill([member for members in finished for member in members])
                return [settle(members, sample, name) for members, sample in zip(finished, samples, strict=True)]
            except Failure as failure:
                stats.count(failure)
                action = settings.action(failure.blame)
                if action is FailureAction.RETRY and attempt < settings.rollout_max_retries:
                    attempt += 1
                    stats.retries += 1
                    continue
                if action is FailureAction.RAISE:
                    raise
                raise DropGroup(f"{failure.blame}/{failure.kind}") from failure

    async def _settle_failure(self, sample: Sample, failure: Failure, action: FailureAction) -> Sample:
        if action is FailureAction.RAISE:
            raise failure
        if action is FailureAction.DROP_GROUP:
            raise DropGroup(f"{failure.blame}/{failure.kind}")
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
            if self.context.settings.action(failure.blame) is FailureAction.RAISE:
                raise
            raise DropGroup(f"{failure.blame}/{failure.kind}") from failure
        return samples


class RolloutLoop:
    """Generates the groups of one rollout from a store."""

    def __init__(self, runner: TrajectoryRunner, store: GroupStore, group_filter: GroupFilter | None = None) -> None:
        self.runner, self.store, self.group_filter = runner, store, group_filter

    async def run(self, rollout_id: int, *, done: Sequence[Group] = ()) -> RolloutResult:
        """Generate until `rollout_batch_size` groups are kept, or the data has ended.

        Args:
            rollout_id: the rollout's number, from 0.
            done: groups of this rollout that were completed before, in an earlier life of the run.
        """
        started = time.monotonic()
        settings = self.runner.context.settings
        target = settings.rollout_batch_size
        scheduler = GroupScheduler(target, max(target, settings.over_sampling_batch_size or target))
        scheduler.kept = len(done)
        stats = RolloutStats()
        kept: list[Group] = list(done)
        send, receive = anyio.create_memory_object_stream[tuple[Group, Group | DropGroup]](float("inf"))
        unfinished: dict[int, Group] = {}

        async def play(leased: Group) -> None:
            try:
                outcome: Group | DropGroup = await self.runner.group(leased, evaluation=False, stats=stats)
            except DropGroup as drop:
                outcome = drop
            send.send_nowait((leased, outcome))

        async with AsyncExitStack() as stack:
            stack.enter_context(ungrouped())
            stack.callback(self._release, unfinished)
            stack.enter_context(send)
            stack.enter_context(receive)
            tasks = await stack.enter_async_context(anyio.create_task_group())
            stack.callback(tasks.cancel_scope.cancel)
            while not scheduler.done:
                leased = await self._lease(scheduler.wanted, rollout_id)
                for group in leased:
                    unfinished[id(group)] = group
                    tasks.start_soon(play, group)
                scheduler.started(len(leased))
                if not scheduler.in_flight:
                    break
                group, outcome = await receive.receive()
                del unfinished[id(group)]
                await self._finish(group, outcome, scheduler, stats, kept)
                if scheduler.dropped_in_row >= max(HOPELESS * target, HOPELESS_GROUPS):
                    raise AgentRLError(_hopeless(stats, scheduler.dropped_in_row))
        kept.sort(key=lambda group: group[0].group_index or 0)
        stats.seconds = time.monotonic() - started
        return RolloutResult(kept, stats)

    async def _lease(self, count: int, rollout_id: int) -> list[Group]:
        return await to_thread.run_sync(self.store.lease, count, rollout_id) if count else []

    async def _finish(
        self,
        leased: Group,
        outcome: "Group | DropGroup",
        scheduler: GroupScheduler,
        stats: RolloutStats,
        kept: list[Group],
    ) -> None:
        reason = outcome.reason if isinstance(outcome, DropGroup) else None
        if not isinstance(outcome, DropGroup):
            if all(not sample.response_length or sample.remove_sample for sample in outcome):
                reason = "nothing_to_train"
            else:
                verdict = judge(self.group_filter, self.runner.context.args, outcome)
                reason = None if verdict.keep else verdict.reason or "filtered"
        if reason is not None or isinstance(outcome, DropGroup):
            scheduler.finished(keep=False)
            stats.dropped[reason or "dropped"] += 1
            await to_thread.run_sync(self.store.drop, group_id(leased), reason or "dropped")
        elif scheduler.finished(keep=True):
            await to_thread.run_sync(self.store.complete, group_id(leased), outcome)
            kept.append(outcome)
        else:
            await to_thread.run_sync(self.store.release, group_id(leased), "more groups than the rollout needs")

    def _release(self, unfinished: dict[int, Group]) -> None:
        for group in unfinished.values():
            self.store.release(group_id(group), "not needed in this rollout")


def _hopeless(stats: RolloutStats, dropped: int) -> str:
    reasons = ", ".join(f"{reason} ({count})" for reason, count in stats.dropped.most_common(5))
    last = f"; the last failure was: {stats.last_failure}" if stats.last_failure else ""
    return (
        f"{dropped} groups in a row were dropped and none was kept, for: {reasons}{last}. "
        "Look at the prompts, the environment and the group filter"
    )


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
