"""Generation of one group: concurrent trajectories, the failure policy, and rewards.

1. A group's trajectories are tasks of one task group. No task runs longer than the group.
2. Failures follow the policy table of the settings and are counted by blame and kind.
3. Finished samples from a data source (replayed from its buffer) are used unchanged, not generated again."""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import NoReturn, TypeVar

import anyio

from agentrl.engine.hosted import KIND as HOSTED_KIND
from agentrl.engine.hosted import NO_TOKENS
from agentrl.engine.wire import SamplingParams
from agentrl.errors import EnvFailure, Failure, GraderFailure, SampleError, TrajectoryPlace, TrajectoryTimeout
from agentrl.groups import Group
from agentrl.rm_hub.running.runner import entered as entered_runner
from agentrl.rollout.agent_loop import run_environment
from agentrl.rollout.agents import leader, play_agent, share_reward
from agentrl.rollout.context import RolloutContext
from agentrl.rollout.environment import Restarted
from agentrl.rollout.failures import DropGroup, guarded, mark_failed, mask_out, trainable
from agentrl.rollout.functions import GenerateFunction, normalize_outputs
from agentrl.rollout.helpers import Recorder, recording
from agentrl.rollout.rewards import Grader
from agentrl.rollout.settings import FailureAction, RolloutSettings
from agentrl.rollout.startup_check import StartupCheck
from agentrl.rollout.stats import RolloutStats, Tally, describe
from agentrl.sample import RECORDED, Sample, Status
from agentrl.tasks import together

T = TypeVar("T")
GIVEN = {"group_index", "index", "prompt", "label", "images", "multimodal_inputs", "train_metadata"}
GIVEN |= {"generate_function_path", "custom_rm_path"}  # fields that a data source sets, besides `metadata`


class GroupPlayer:
    """Plays trajectories and groups: generate, failure policy, reward. Used by training and evaluation."""

    def __init__(
        self,
        context: RolloutContext,
        grader: Grader,
        generate: GenerateFunction | None = None,
        beside: "GroupPlayer | None" = None,
    ) -> None:
        self.context, self.grader, self.generate = context, grader, generate
        self.startup_check = StartupCheck()
        # Players of one process share the limit of concurrent trajectories and the event loop.
        limit = beside.limit if beside else anyio.CapacityLimiter(context.settings.rollout_max_concurrency)
        self.limit: anyio.CapacityLimiter = limit
        # Each iteration of the event loop starts one group and one trajectory, so that rendering delays no request.
        self.next_group: anyio.Lock = beside.next_group if beside else anyio.Lock()
        self.next_trajectory: anyio.Lock = beside.next_trajectory if beside else anyio.Lock()

    async def group(self, samples: Group, *, evaluation: bool, tally: Tally | None = None) -> Group:
        """Play all samples of a group and grade them. `tally`: sums up the group's counts. Returns the finished
        samples, fan-out flattened, in order. Raises DropGroup: the policy of a failure drops the group. Failure: the
        policy of a failure stops the run. AgentRLError: all first groups failed for the same reason."""
        settings, tally = self.context.settings, tally or Tally()
        async with self.next_group:
            pass
        # For evaluations, `evaluate` makes the startup check.
        watching = nullcontext() if evaluation else self.startup_check.playing(tally)
        with watching, entered_runner(self.grader.runner):
            flat = await _Play(self, self.context.params(evaluation=evaluation), evaluation, tally).group(samples)
        key = (settings.eval_reward_key if evaluation else None) or settings.reward_key
        tally.add(offered=tuple(describe(flat, key)))
        return flat


@dataclass(frozen=True, slots=True)
class _Play:
    """One group in flight."""

    player: GroupPlayer
    params: SamplingParams
    evaluation: bool
    tally: Tally

    async def group(self, samples: Group) -> Group:
        generate, grader = self.player.generate, self.player.grader
        if whole := generate is not None and not generate.per_sample:
            finished = await self._whole_group(samples)
        else:
            finished = await together(*(partial(self._trajectory, sample) for sample in samples))
        flat = [member for members in finished for member in members]
        if whole or grader.by_group:
            pairs = zip(samples, finished, strict=True)
            seen = [_seen(members, generate or sample.generate_function_path) for sample, members in pairs]
            await self._grade_group([member for members in seen for member in members])
            for members in finished:
                share_reward(members)
        return flat

    @property
    def _settings(self) -> RolloutSettings:
        return self.player.context.settings

    async def _trajectory(self, sample: Sample) -> list[Sample]:
        """Play one trajectory, with retries; apply the failure policy."""
        parts = [sample]

        async def play(attempt: int, context: RolloutContext) -> list[Sample]:
            parts[:] = [fresh := _fresh(sample, attempt)]
            async with self.player.limit:
                async with self.player.next_trajectory:
                    pass
                place = TrajectoryPlace(fresh.group_index, fresh.index)
                return await self._deadline(self._play(parts, context), place, "the trajectory")

        try:
            played = await self._retrying(play)
        except Failure as failure:
            played = self._apply_failure_policy(parts, failure)
        self.tally.end()
        return played

    async def _retrying(self, play: Callable[[int, RolloutContext], Awaitable[T]]) -> T:
        """Call `play` with the number of the attempt. Count failures; repeat the call if the policy retries."""
        settings, attempt = self._settings, 0
        while True:
            own, tally = Tally(), self.tally
            context = replace(self.player.context, tallies=(own, tally), evaluating=self.evaluation)
            try:
                return await play(attempt, context)
            except Restarted:  # repeat the attempt when generation resumes
                tally.stats = tally.stats.lose("restarted", own.stats.tokens.generated)
                await context.client.pause_gate.wait_open()
            except Failure as failure:
                tally.stats += RolloutStats.of(failure)
                retry = settings.action(failure.blame) is FailureAction.RETRY
                if not retry or attempt >= settings.rollout_max_retries:
                    raise
                attempt += 1
                tally.stats = (tally.stats + RolloutStats(retries=1)).lose("retried", own.stats.tokens.generated)

    async def _deadline(self, play: Awaitable[T], place: TrajectoryPlace, what: str, trajectories: int = 1) -> T:
        timeout, held = self._settings.trajectory_timeout * trajectories, self.player.context.client.pause_gate
        late, seconds, flag = TrajectoryTimeout, lambda: held.seconds, "--trajectory-timeout"
        return await guarded(
            play, what=what, timeout=timeout, failure=EnvFailure, late=late, place=place, held=seconds, flag=flag
        )

    async def _play(self, parts: list[Sample], context: RolloutContext) -> list[Sample]:
        (sample,), generate, grader = parts, self.player.generate, self.player.grader
        if sample.generate_function_path is not None:
            generate = GenerateFunction.of_sample(sample.generate_function_path)
        if generate is not None and context.hosted:
            raise EnvFailure(f"{generate.name} asks for token ids: {NO_TOKENS}", kind=HOSTED_KIND)
        if sample.finished:
            generated = normalize_outputs([sample], sample, "the data source")
        elif generate is None:
            own = grader.function is None and sample.custom_rm_path is None
            generated = await run_environment(context, sample, self.params, grade=own, parts=parts)
        elif generate.agent:
            extra = {"evaluation": self.evaluation} if generate.takes_evaluation else {}
            played = play_agent(context, sample, self.params, partial(generate.function, **extra), parts)
            generated = await guarded(played, what=generate.name, failure=EnvFailure)
        else:
            recorder = Recorder(context, self.params, sample)
            async with recording(recorder):
                call = generate.call_one(context.args, sample, self.params, self.evaluation)
                try:
                    # No timeout here: the trajectory's deadline applies.
                    generated = await guarded(call, what=generate.name, failure=EnvFailure)
                except Failure:
                    recorder.rescue(sample)
                    raise
            recorder.fill(generated)
            generated = normalize_outputs(generated, sample, generate.name)
        parts[:] = generated = await context.hooks.generated(context.args, generated, self.evaluation)
        if not grader.by_group:
            await grader.grade(_seen(generated, generate), generate)
            share_reward(generated)
            self._check_entry(generated)
            self.tally.add(graded=1)
        return generated

    async def _whole_group(self, samples: Group) -> list[Group]:
        """Call the group form of a custom generate function, with one deadline; a failure is of all samples."""
        assert self.player.generate is not None
        generate, name = self.player.generate, self.player.generate.name
        if all(sample.finished for sample in samples):
            return [normalize_outputs([_fresh(sample, 0)], sample, "the data source") for sample in samples]

        async def generated(fresh: Group, context: RolloutContext) -> list[Group]:
            recorder = Recorder(context, self.params, fresh[0])
            async with recording(recorder):
                finished = await generate.call_group(context.args, fresh, self.evaluation)
            recorder.fill([member for members in finished for member in members])
            finished = [await context.hooks.generated(context.args, one, self.evaluation) for one in finished]
            return [normalize_outputs(members, sample, name) for members, sample in zip(finished, samples, strict=True)]

        async def play(attempt: int, context: RolloutContext) -> list[Group]:
            fresh = [_fresh(sample, attempt) for sample in samples]
            async with self.player.limit:
                place = TrajectoryPlace(fresh[0].group_index)
                return await self._deadline(generated(fresh, context), place, name, len(fresh))

        try:
            return await self._retrying(play)
        except Failure as failure:
            self._drop(failure)

    def _drop(self, failure: Failure) -> NoReturn:
        """Raise the failure if its action is `raise`; otherwise raise DropGroup."""
        if self._settings.action(failure.blame) is FailureAction.RAISE:
            raise failure
        raise DropGroup(f"{failure.blame}/{failure.kind}") from failure

    def _apply_failure_policy(self, parts: list[Sample], failure: Failure) -> list[Sample]:
        """Apply the policy to a failed trajectory, whose last part failed."""
        action = self._settings.action(failure.blame)
        if action in (FailureAction.RAISE, FailureAction.DROP_GROUP):
            self._drop(failure)
        mark_failed(failed := leader(parts), failure)
        for part in parts:
            if part.reward is None:
                part.metadata["failure"] = failed.metadata["failure"]
            if action is not FailureAction.SCORE or not trainable(part):
                mask_out(part)
            elif part.reward is None:
                part.reward = 0.0
        return parts

    async def _grade_group(self, samples: Group) -> None:
        try:
            grading = self.player.grader.grade(samples, self.player.generate)
            place = TrajectoryPlace(samples[0].group_index)
            await guarded(grading, what="grading", failure=GraderFailure, place=place)
            self._check_entry(samples)
        except Failure as failure:
            self.tally.stats += RolloutStats.of(failure)
            self._drop(failure)
        self.tally.add(graded=sum(sample.status is not Status.FAILED for sample in samples))

    def _check_entry(self, samples: Sequence[Sample]) -> None:
        """Check the trained entry of dict rewards; remove invalid rewards. Raises GraderFailure: an entry is invalid."""
        key = (self._settings.eval_reward_key if self.evaluation else None) or self._settings.reward_key
        for sample in samples:
            try:
                if key and isinstance(sample.reward, dict):
                    sample.get_reward_value(key)
            except SampleError as error:
                for member in samples:
                    member.reward = None
                said = f"the reward of sample index={sample.index} cannot be used: {error}"
                raise GraderFailure(said, kind="grader_bad_reward") from error


def _seen(members: list[Sample], generate: GenerateFunction | str | None) -> list[Sample]:
    """Return the samples to grade: all from a generate function, otherwise only the leader."""
    first = leader(members)
    return [first] if generate is None or "gateway" in first.metadata else members


def _fresh(sample: Sample, attempt: int) -> Sample:
    """Return an independent copy of a leased sample. The copy is pending, or stays finished if the data source gave a
    finished sample."""
    copy = deepcopy(sample)
    if sample.finished:
        return copy
    if sample.status is Status.FAILED:  # a data source gives it again: clear the results of its old trajectory
        metadata = {name: value for name, value in copy.metadata.items() if name not in RECORDED}
        blank = Sample(metadata=metadata)
        for name in {own.name for own in fields(Sample)} - GIVEN:
            setattr(copy, name, getattr(blank, name))
    if attempt:
        copy.metadata["attempt"] = attempt
    copy.session_id = f"{sample.group_index}-{sample.index}-{attempt}"
    copy.status = Status.PENDING
    return copy
