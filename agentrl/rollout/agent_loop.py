"""The default generate: one `Environment` and one token-exact conversation a trajectory.

1. Ids go in and ids come out; what the model sampled is never decoded and encoded again.
2. Each turn: engine -> `append_model` -> parser -> `Environment.step` -> `append_observation`.
3. It ends when the environment says so, when the turns or the context are used up, or when the model ran into its
   token limit. `close` is always called, also when the trajectory is cancelled.
"""

import copy
import math
import time
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace as dataclass_replace
from typing import Any, TypeVar

import anyio

from agentrl.chat import ChatSession, Delta, ParsedTurn
from agentrl.chat.messages import whole_text
from agentrl.engine.wire import Generation, SamplingParams
from agentrl.envs import Environment, Step, Turn
from agentrl.errors import ContextOverflow, EngineFailure, EngineRejected, EnvFailure, GraderFailure
from agentrl.rollout.context import Generator, RolloutContext
from agentrl.rollout.failures import describe, guarded
from agentrl.sample import Message, Origin, Sample, SpecInfo, Status

T = TypeVar("T")

CLOSE_TIMEOUT = 10.0
"""Seconds that an environment's `close` may take once its trajectory is over or cancelled."""


async def run_environment(
    context: RolloutContext, sample: Sample, params: SamplingParams, *, grade: bool = True
) -> list[Sample]:
    """Play one trajectory of the context's environment into `sample`.

    Returns:
        The sample; more than one where the history policy splits it (they share `rollout_id`).

    Raises:
        Failure: typed by who is to blame.
    """
    if context.environment is None:
        raise EnvFailure("no environment is set; pass --env or --custom-generate-function-path")
    env = make_environment(context.environment, context.args)
    async with closing(env, sample):
        return await _Trajectory(context, env, sample, params).run(grade=grade)


def make_environment(kind: type[Environment], args: Any) -> Environment:
    """A fresh instance for one trajectory.

    Raises:
        EnvFailure: the class's own code raised.
    """
    try:
        return kind.create(args)
    except Exception as raised:
        raise EnvFailure(describe(f"making a {kind.__name__}", raised), kind="env_raised") from raised


@asynccontextmanager
async def closing(env: Environment | None, sample: Sample) -> AsyncIterator[None]:
    """Close `env` at the end, however it comes.

    Raises:
        EnvFailure: the end was a good one, and closing failed.
    """
    try:
        yield
    except BaseException:
        # What ended the trajectory goes on; a close that fails as well is noted on the sample.
        try:
            await _close(env)
        except EnvFailure as failure:
            sample.metadata["close_failure"] = str(failure)
        raise
    await _close(env)


async def _close(env: Environment | None) -> None:
    """Call `close`, also on the way out of a cancelled trajectory.

    Raises:
        EnvFailure: it raised or took too long.
    """
    if env is None:
        return
    with anyio.CancelScope(shield=True):
        await guarded(env.close(), what=f"{_name(env)}.close", timeout=CLOSE_TIMEOUT, failure=EnvFailure)


def _name(env: Environment) -> str:
    return type(env).__name__


class _Trajectory:
    """One trajectory in flight: the sample that grows, and the earlier ones it was split from."""

    def __init__(self, context: RolloutContext, env: Environment, sample: Sample, params: SamplingParams) -> None:
        self.context, self.env, self.params = context, env, params
        self.sample = sample
        self.earlier: list[Sample] = []
        self.messages: list[Message] = []

    async def run(self, *, grade: bool) -> list[Sample]:
        session = await self._start()
        limit = self.context.settings.max_turns or self.env.max_turns
        for index in range(1, limit + 1):
            generation = await self._generate(index)
            parsed = session.sampled(generation.ids)
            self.messages.append(parsed.to_message())
            if generation.finish_reason.type == "length":
                self.sample.status = Status.TRUNCATED
                break
            step = await self._step(_turn(index, generation, parsed, self.sample))
            self.messages.extend(whole_text(step.messages))
            if step.done:
                self.sample.status = Status.COMPLETED
                break
            if index == limit or not self._extend(session.extend(step.messages), step.messages, index):
                self.sample.status = Status.TRUNCATED
                break
        self.sample.metadata["messages"] = self.messages
        if grade:
            await self._grade()
        return [*self.earlier, self.sample]

    async def _start(self) -> ChatSession:
        settings = self.context.settings
        messages = await self._env("reset", self.env.reset(self.sample))
        self._check_messages("reset", messages)
        self.messages = [whole_text(dict(m)) for m in messages]
        tools = self.env.toolbox.schemas or self.sample.metadata.get("tools")
        session = self.context.chat.session(messages, tools)
        prompt = session.prompt_ids
        most = min(settings.rollout_max_prompt_len or self.context.context_length, self.context.context_length - 2)
        if len(prompt) > most:
            raise ContextOverflow(
                f"the prompt has {len(prompt)} tokens, at most {most} fit; "
                "shorten the data, or raise --rollout-max-prompt-len or --rollout-max-context-len",
                kind="prompt_too_long",
            )
        self.sample.set_prompt_tokens(prompt)
        return session

    def _check_messages(self, method: str, messages: object) -> None:
        if not isinstance(messages, (list, tuple)) or not all(isinstance(m, dict) and "role" in m for m in messages):
            raise EnvFailure(
                f"{_name(self.env)}.{method} must return a list of messages ({{'role': ..., 'content': ...}}), "
                f"got {messages!r:.200}",
                kind="env_bad_result",
            )

    async def _generate(self, index: int) -> Generation:
        sample, context = self.sample, self.context
        budget = context.context_length - len(sample.tokens) - 1
        params = context.turn_params(self.params, sample, index, budget)
        return await sample_turn(context.client, sample, params, index, sample.session_id)

    async def _step(self, turn: Turn) -> Step:
        started = time.monotonic()
        try:
            step = await self._env("step", self.env.step(turn))
        finally:  # a step that hangs or fails takes its time too
            self.sample.non_generation_time += time.monotonic() - started
        if not isinstance(step, Step):
            raise EnvFailure(f"{_name(self.env)}.step must return a Step, got {step!r:.200}", kind="env_bad_result")
        self._check_messages("step", step.messages)
        if not isinstance(step.info, Mapping):
            raise EnvFailure(
                f"{_name(self.env)}.step: Step.info must be a mapping of numbers, got {step.info!r:.200}",
                kind="env_bad_result",
            )
        if step.reward is not None:
            self.sample.metadata.setdefault("step_rewards", []).append(step.reward)
        count(self.sample, step.info)
        if not step.done and not step.messages:
            raise EnvFailure(
                f"{_name(self.env)}.step returned no messages and done=False: the model would be asked again with "
                "nothing new to answer; return messages or done=True",
                kind="env_bad_result",
            )
        return step

    def _extend(self, delta: Delta, messages: Sequence[Message], turn: int) -> bool:
        """Show the model what came; False if it no longer fits into the context."""
        if delta.restart is not None:
            return self._split(delta.restart)
        room = self.context.context_length - len(self.sample.tokens) - len(delta.close) - len(delta.env)
        if room < 2:
            return False
        decode = self.context.chat.decode
        self.sample.append_observation(delta.close, text=decode(delta.close), turn=turn, origin=Origin.CLOSE)
        self.sample.append_observation(delta.env, text=decode(delta.env), turn=turn)
        return True

    def _split(self, prompt: list[int]) -> bool:
        """The template rewrites history: close this sample and go on in a sibling with the new prompt, if it fits."""
        if self.context.context_length - len(prompt) < 2:
            return False
        done = self.sample
        done.status = Status.COMPLETED
        done.rollout_id = done.index if done.rollout_id is None else done.rollout_id
        self.earlier.append(done)
        # Counters stay with the sample in which they were counted.
        rest = {k: copy.deepcopy(v) for k, v in done.metadata.items() if k not in ("counters", "step_rewards")}
        self.sample = dataclass_replace(
            done, metadata=rest, status=Status.PENDING, spec_info=SpecInfo(), non_generation_time=0.0
        )
        self.sample.set_prompt_tokens(prompt)
        return True

    async def _grade(self) -> None:
        if self.sample.reward is None:
            # The built-in graders have deadlines of their own, which do not count the wait for a free process.
            built_in = type(self.env).reward is Environment.reward
            timeout = math.inf if built_in else self.context.settings.reward_timeout
            what = f"{_name(self.env)}.reward"
            reward = await guarded(self.env.reward(self.sample), what=what, timeout=timeout, failure=GraderFailure)
            self.sample.reward = reward
        for sibling in self.earlier:
            sibling.reward = self.sample.reward

    async def _env(self, method: str, call: Awaitable[T]) -> T:
        timeout = self.context.settings.env_timeout
        return await guarded(
            call, what=f"{_name(self.env)}.{method}", timeout=timeout, failure=EnvFailure, work_only=True
        )


async def sample_turn(
    client: Generator, sample: Sample, params: SamplingParams, turn: int, session_id: str | None
) -> Generation:
    """Have the engine continue `sample`, and append what it wrote.

    Raises:
        ContextOverflow: prompt or answer are too long for the engine.
        EngineFailure: no answer, or one that was aborted.
    """
    try:
        generation = await client.generate(sample.tokens, params, session_id=session_id)
    except EngineRejected as error:
        if error.kind != "context_overflow":
            raise
        raise ContextOverflow(str(error), kind="engine_context_overflow") from error
    _record(sample, generation, turn)
    if generation.finish_reason.type == "abort":
        sample.status = Status.ABORTED
        raise EngineFailure("the engine aborted the request", kind="engine_aborted")
    return generation


def _record(sample: Sample, generation: Generation, turn: int) -> None:
    """Append what the engine returned to the sample, with every weight version that wrote a part of it."""
    sample.append_model(generation.ids, generation.log_probs, text=generation.text, turn=turn)
    for version, _, _ in generation.weight_versions or ((generation.weight_version, 0, 0),):
        if version not in sample.weight_versions:
            sample.weight_versions.append(version)
    sample.spec_info.add(generation.meta_info)


def _turn(index: int, generation: Generation, parsed: ParsedTurn, sample: Sample) -> Turn:
    return Turn(
        index=index,
        text=generation.text,
        content=parsed.content,
        reasoning=parsed.reasoning,
        tool_calls=parsed.tool_calls,
        broken=parsed.broken,
        ids=tuple(generation.ids),
        finish_reason=generation.finish_reason.type,
        sample=sample,
    )


def count(sample: Sample, info: Mapping[str, object]) -> None:
    """Add a step's numeric info to the sample's counters."""
    counters = sample.metadata.setdefault("counters", {})
    for name, value in info.items():
        if isinstance(value, (int, float)):
            counters[name] = counters.get(name, 0) + value
