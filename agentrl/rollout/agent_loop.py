"""The default generate function: one `Environment` and one token-exact conversation per trajectory.

1. Ids go in and ids come out; what the model sampled is never decoded and encoded again.
2. Each turn: engine -> `Conversation.append_model_turn` -> `Environment.step` -> `Conversation.append_messages`.
3. A trajectory ends when the environment ends it, or when turns, context or a turn's token limit are used up.
4. With a hosted model the conversation consists of messages, and the sample has no ids (see `hosted`)."""

import math
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

from agentrl.chat import AppendResult, Conversation, ParsedTurn
from agentrl.clock import note_turn
from agentrl.data.settings import DataSettings
from agentrl.engine.images import ImageInputs
from agentrl.engine.wire import Generation, SamplingParams
from agentrl.envs import AgentEnvironment, Environment, Step, Turn
from agentrl.errors import (
    ContextOverflow,
    EngineFailure,
    EngineRejected,
    EnvFailure,
    GraderFailure,
    MediaError,
    SampleError,
    raised_as,
)
from agentrl.plugins import defined_at
from agentrl.rollout.agents import leader, play_agent, share_reward
from agentrl.rollout.context import RolloutContext
from agentrl.rollout.environment import LiveEnvironment, closing
from agentrl.rollout.failures import guarded
from agentrl.rollout.hosted import HostedConversation
from agentrl.rollout.rewards import check_reward
from agentrl.sample import Sample


async def run_environment(
    context: RolloutContext,
    sample: Sample,
    params: SamplingParams,
    *,
    grade: bool = True,
    parts: list[Sample] | None = None,
) -> list[Sample]:
    """Play one trajectory of the context's environment into `sample`. Returns the sample, or several with one
    `rollout_id` if the template rewrite policy or `Step.restart` splits it. `parts` gets each as soon as it begins,
    also if the trajectory fails later. Raises Failure: the trajectory failed; the type defines the blame. Restarted:
    generation was paused, and `when_interrupted` asks for a restart."""
    if context.environments is None:
        raise EnvFailure("no environment is set; pass --env or --custom-generate-function-path")
    if context.hosted:
        sample.metadata["hosted"] = context.hosted.name
    live, parts = LiveEnvironment(context, context.environments.of(sample)), [] if parts is None else parts
    async with closing(lambda: live.env, sample):
        if not isinstance(env := live.env, AgentEnvironment):
            return await _Trajectory(context, live, params, parts).run(sample, grade=grade)
        env.socket = context.gateway.socket if context.gateway else None
        playing = play_agent(context, sample, params, env.act, parts)
        samples = await guarded(playing, what=f"{type(env).__name__}.act", failure=EnvFailure)
        for member in samples:
            member.reward = None  # what `act` returned is no reward
        if grade:
            await _grade(context, env, first := leader(samples))
            for sibling in samples:  # all samples of a session share the reward of the main conversation
                sibling.reward = first.reward
        return samples


class _Trajectory:
    """One trajectory in flight: an environment and the conversation that it has with the model."""

    def __init__(
        self, context: RolloutContext, live: LiveEnvironment, params: SamplingParams, parts: list[Sample]
    ) -> None:
        self.context, self.live, self.params, self.parts = context, live, params, parts

    async def run(self, sample: Sample, *, grade: bool) -> list[Sample]:
        talk = await self._begin(sample)
        limit = self.context.settings.max_turns or (await self.live.ready(sample)).max_turns
        for index in range(1, limit + 1):
            started = time.monotonic()
            if isinstance(talk, HostedConversation):
                turn = talk.turn(self.context, self.params)
            else:
                turn = sample_turn(self.context, talk, self.params, sample.session_id)
            generation, parsed = await self.live.generating(turn)
            _note(talk.sample, "generate_seconds", index, round(time.monotonic() - started, 4))
            _note(talk.sample, "step_rewards", index, None)
            if (finish := generation.finish_reason.type) == "length":
                talk.sample.stop("length" if talk.room > 0 else "context")
                break
            said = (parsed.content, parsed.reasoning, parsed.tool_calls, parsed.broken)
            step = await self._step(Turn(index, generation.text, *said, tuple(generation.ids), finish, talk.sample))
            _note(talk.sample, "step_rewards", index, step.reward)
            if step.done or index == limit:
                with images_refused():
                    talk.remember(step.messages)
                talk.sample.stop((step.stop_reason or "done") if step.done else "max_turns")
                break
            with images_refused():
                appended = talk.append_messages(step.messages) if step.restart is None else talk.restart(step.restart)
            if appended is AppendResult.OUT_OF_CONTEXT:
                talk.sample.stop("context")
                break
            if appended is AppendResult.SPLIT:
                self.parts[:] = [*talk.earlier, talk.sample]
        talk.sample.metadata["messages"] = talk.messages
        if grade:
            await self._grade(talk)
        return [*talk.earlier, talk.sample]

    async def _begin(self, sample: Sample) -> Conversation | HostedConversation:
        context = self.context
        messages = await self.live.reset(sample)
        tools = (await self.live.ready(sample)).toolbox.schemas or sample.metadata.get("tools")
        with images_refused():
            if context.hosted:
                limits = DataSettings.of_args(context.args).image_limits
                return HostedConversation(context.hosted, sample, messages, tools, limits)
            return Conversation(
                context.chat,
                sample,
                messages,
                tools,
                context_length=context.context_length,
                prompt_limit=context.settings.rollout_max_prompt_len,
            )

    async def _step(self, turn: Turn) -> Step:
        started = time.monotonic()
        try:
            step = await self.live.step(turn)
        finally:  # the time of a step that hangs or fails counts too
            taken = time.monotonic() - started
            turn.sample.non_generation_time += taken
            _note(turn.sample, "step_seconds", turn.index, round(taken, 4))
        count(turn.sample, step.info)
        return step

    async def _grade(self, talk: Conversation | HostedConversation) -> None:
        if talk.sample.reward is None:
            await _grade(self.context, await self.live.ready(talk.sample), talk.sample)
        for part in talk.earlier:
            part.reward = None  # one that the environment set meanwhile
        share_reward([*talk.earlier, talk.sample])


def images_refused() -> AbstractContextManager[None]:
    """Turn the refusal of an image into a failure of the environment."""
    return raised_as(partial(EnvFailure, kind="env_image"), "an image of the environment is refused", MediaError)


async def _grade(context: RolloutContext, env: Environment, sample: Sample) -> None:
    """Set the environment's reward. Built-in graders have own deadlines, without the queue. Raises GraderFailure."""
    built_in = type(env).reward is Environment.reward
    timeout, flag = math.inf if built_in else context.settings.reward_timeout, "--reward-timeout"
    what = f"{type(env).__name__}.reward"
    sample.reward = await guarded(env.reward(sample), what=what, timeout=timeout, failure=GraderFailure, flag=flag)
    check_reward(sample, f"{what} ({defined_at(type(env).reward)})")


async def sample_turn(
    context: RolloutContext, talk: Conversation, params: SamplingParams, session_id: str | None
) -> tuple[Generation, ParsedTurn]:
    """Have the engine write the conversation's next turn. Raises ContextOverflow: prompt or answer are too long for the
    engine. EngineFailure: the engine gave no answer or an inconsistent one, or aborted the request."""
    note_turn(talk.turns + 1)
    params = context.turn_params(params, talk.sample, talk.turns + 1, talk.room)
    try:
        images = ImageInputs.of(talk.sample.images, talk.sample.image_spans)
        generation = await context.client.generate(talk.sample.tokens, params, session_id=session_id, images=images)
    except EngineRejected as error:
        if error.kind != "context_overflow":
            raise
        raise ContextOverflow(str(error), kind="engine_context_overflow") from error
    if generation.parts > 1:
        text = context.chat.decode(generation.ids, params.skip_special_tokens is not False)
        generation = replace(generation, text=text)
    for tally in context.tallies:
        tally.sampled(len(generation.ids))
    contradiction = partial(EngineFailure, kind="malformed_answer")
    with raised_as(contradiction, "the engine's answer contradicts itself", SampleError):
        parsed = talk.append_model_turn(
            generation.ids,
            generation.log_probs,
            generation.weight_versions,
            text=generation.text,
            kept=generation.kept,
            routed=generation.routed,
        )
    talk.sample.spec_info.add(generation.meta_info)
    if generation.finish_reason.type == "abort":
        talk.sample.stop("aborted")
        raise EngineFailure("the engine aborted the request", kind="engine_aborted")
    return generation, parsed


def count(sample: Sample, info: Mapping[str, object]) -> None:
    """Add a step's numeric info to the sample's counters."""
    counters = sample.metadata.setdefault("counters", {})
    for name, value in info.items():
        if isinstance(value, (int, float)):
            counters[name] = counters.get(name, 0) + value


def _note(sample: Sample, name: str, turn: int, value: float | None) -> None:
    """Store a turn's value in a list with one entry per turn of the trajectory, siblings included; None: no value."""
    values = sample.metadata.setdefault(name, [])
    values.extend([None] * (turn - len(values)))
    values[turn - 1] = value
