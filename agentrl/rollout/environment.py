"""The environment of one trajectory: deadlines and checks of its calls, and its state during a pause between rollouts.
`set_up` opens what all trajectories of a process share.

1. Every instance is closed, also if the trajectory is cancelled.
2. Results of calls are checked. Every error in an environment becomes an `EnvFailure` that names the environment.
3. Between two rollouts (`--partial-rollout`) generation is paused. `generating` then follows `when_interrupted` of the
   class. `keep`: keep the instance. `replay`: close it, and replay the turns on a new instance when it is needed again.
   `restart`: raise `Restarted`. A pause for a weight update changes nothing."""

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Any, TypeVar

import anyio

from agentrl.envs import Environment, EnvSpec, Step, Turn
from agentrl.errors import AgentRLError, EnvFailure
from agentrl.plugins import must_propagate
from agentrl.rollout.context import RolloutContext
from agentrl.rollout.failures import bad_result, between, describe, guarded
from agentrl.sample import Message, Sample
from agentrl.tasks import alongside

T = TypeVar("T")
CLOSE_TIMEOUT = 10.0  # seconds that an environment's `close` may take once its trajectory is over or cancelled


class Restarted(AgentRLError):
    """Internal: generation was paused, and `when_interrupted` asks for a restart of the trajectory."""


def make_environment(entry: EnvSpec, context: RolloutContext) -> Environment:
    """Return a new instance for one trajectory. Raises EnvFailure: the class raised an error."""
    try:
        made = entry.make(evaluating=context.evaluating)
        made.engine_group = context.engine_group
        return made
    except BaseException as raised:
        if must_propagate(raised):
            raise
        raise EnvFailure(describe(f"making a {entry.kind.__name__}", raised), kind="env_raised") from raised


@asynccontextmanager
async def closing(live: Callable[[], Environment | None], sample: Sample) -> AsyncIterator[None]:
    """Close the current instance after the block, also if the block fails. Raises EnvFailure: only closing failed."""
    try:
        yield
    except BaseException:
        # The block's error is raised; a failure to close is only recorded on the sample.
        try:
            await _close(live())
        except EnvFailure as failure:
            sample.metadata["close_failure"] = str(failure)
        raise
    await _close(live())


async def _close(env: Environment | None) -> None:
    """Call `close`, also if the trajectory is cancelled."""
    if env is None:
        return
    with anyio.CancelScope(shield=True):
        await guarded(env.close(), what=f"{type(env).__name__}.close", timeout=CLOSE_TIMEOUT, failure=EnvFailure)


class LiveEnvironment:
    """The environment of one trajectory. `env`: the instance; None after it was closed for a pause."""

    def __init__(self, context: RolloutContext, entry: EnvSpec) -> None:
        self.env: Environment | None = make_environment(entry, context)
        kind = entry.kind
        self._context, self._entry, self._kind, self._name = context, entry, kind, kind.__name__
        self._replays = kind.when_interrupted == "replay"
        self._metadata: dict[str, Any] = {}
        self._begun: Sequence[Message] = ()
        self._answers: list[tuple[Turn, Sequence[Message]]] = []

    async def generating(self, call: Awaitable[T]) -> T:
        """Await a model call, during which generation may be paused until the next rollout. Raises Restarted: there
        was such a pause, and `when_interrupted` asks for a restart."""
        if self._kind.when_interrupted == "keep":
            return await call
        async with alongside(self._put_away):
            return await call

    async def _put_away(self) -> None:
        await self._context.client.pause_gate.wait_between_rollouts()
        if self._kind.when_interrupted == "restart":
            raise Restarted(f"{self._name} begins again after a hold")
        env, self.env = self.env, None
        await _close(env)

    async def reset(self, sample: Sample) -> Sequence[Message]:
        """Return the messages that start the conversation."""
        self._metadata = deepcopy(sample.metadata) if self._replays else {}
        messages = await self._reset(await self.ready(sample), sample)
        self._begun = deepcopy(messages) if self._replays else ()
        return messages

    async def step(self, turn: Turn) -> Step:
        """Answer the model's turn."""
        step = await self._step(await self.ready(turn.sample), turn)
        if self._replays:
            self._answers.append((turn, deepcopy(step.shown)))
        return step

    async def ready(self, sample: Sample) -> Environment:
        """Return the instance. If it was closed for a pause, make a new one and replay the turns; the replay is not
        counted. Raises EnvFailure: the replay fails, or answers differently (kind `replay_differs`)."""
        if self.env is None:
            self.env = make_environment(self._entry, self._context)
            before, sample.metadata = sample.metadata, deepcopy(self._metadata)
            try:
                await self._replay(self.env, sample)
            finally:  # keep what the new instance wrote, restore the rest
                sample.metadata.update({k: v for k, v in before.items() if k not in sample.metadata})
        return self.env

    async def _replay(self, env: Environment, sample: Sample) -> None:
        self._compare("reset", self._begun, await self._reset(env, sample))
        for turn, before in self._answers:
            step = await self._step(env, replace(turn, sample=sample))
            self._compare(f"step of turn {turn.index}", before, step.shown)

    def _compare(self, what: str, before: Sequence[Message], now: Sequence[Message]) -> None:
        for at, (old, new) in enumerate(zip_longest(before, now)):
            if old != new:
                raise EnvFailure(
                    f"{self._name}.{what} gave a different answer in the replay: message {at} was {old!r:.200}, now it "
                    f"is {new!r:.200}; what cannot be replayed says when_interrupted = 'keep' or 'restart'",
                    kind="replay_differs",
                )

    async def _reset(self, env: Environment, sample: Sample) -> Sequence[Message]:
        messages = await self._guarded("reset", env.reset(sample))
        self._check_messages("reset", messages)
        return messages

    async def _step(self, env: Environment, turn: Turn) -> Step:
        had = len(turn.sample.tokens), turn.sample.response_length
        step = await self._guarded("step", env.step(turn))
        if (has := (len(turn.sample.tokens), turn.sample.response_length)) != had:
            raise EnvFailure(
                f"{self._name}.step changed the sample: it had {had[0]} tokens, {had[1]} of them response, and has "
                f"{has[0]} and {has[1]} now; what the model is to be shown goes into Step.messages",
                kind="env_changed_sample",
            )
        if not isinstance(step, Step):
            raise bad_result(
                f"{self._name}.step must return a Step, got {type(step).__name__} {step!r:.200}; to go on as by default: "
                "return await super().step(turn)"
            )
        self._check_messages("step", step.shown)
        if step.restart is not None and (step.done or step.messages or not step.restart):
            raise bad_result(
                f"{self._name}.step: Step.restart is the new beginning of a conversation that goes on: give it at least one "
                "message, and neither done=True nor other messages"
            )
        if not isinstance(step.info, Mapping):
            raise bad_result(f"{self._name}.step: Step.info must be a mapping of numbers, got {step.info!r:.200}")
        if not isinstance(step.stop_reason, str):
            raise bad_result(f"{self._name}.step: Step.stop_reason must be a word, got {step.stop_reason!r:.200}")
        reward: object = 0.0 if step.reward is None else step.reward
        if isinstance(reward, bool) or not isinstance(reward, (int, float)) or not math.isfinite(reward):
            raise bad_result(f"{self._name}.step: Step.reward must be a finite number or None, got {reward!r:.200}")
        if not step.done and not step.shown:
            raise bad_result(
                f"{self._name}.step returned no messages and done=False: the model would be asked again with "
                "nothing new to answer; return messages or done=True"
            )
        return step

    def _check_messages(self, method: str, messages: object) -> None:
        if not isinstance(messages, (list, tuple)) or not all(isinstance(m, dict) and "role" in m for m in messages):
            own = "; to keep the prompt as it is: return await super().reset(sample)"
            hint = own if messages is None and method == "reset" else ""
            raise bad_result(
                f"{self._name}.{method} must return a list of messages ({{'role': ..., 'content': ...}}), "
                f"got {messages!r:.200}{hint}"
            )

    async def _guarded(self, method: str, call: Awaitable[T]) -> T:
        timeout, what = self._context.settings.env_timeout, f"{self._name}.{method}"
        return await guarded(call, what=what, timeout=timeout, failure=EnvFailure, work_only=True, flag="--env-timeout")


@asynccontextmanager
async def set_up(entries: Iterable[EnvSpec], timeout: float) -> AsyncIterator[None]:
    """Open tool sources and call `setup`, once per class; undo both at the end. `timeout`: seconds for each call."""
    classes = {entry.kind: entry for entry in entries}
    sources = {id(source): (source, kind) for kind in classes for source in kind.tool_sources()}
    async with AsyncExitStack() as stack:
        for source, kind in sources.values():
            stack.push_async_callback(source.close)
            await _hook(source.open, f"{kind.__name__}.tools", timeout)
        for entry in classes.values():
            kind, name = entry.kind, entry.kind.__name__
            first = _hook(kind.setup, f"{name}.setup", timeout, entry.args)
            await stack.enter_async_context(between(first, partial(_hook, kind.teardown, f"{name}.teardown", timeout)))
        yield


async def _hook(hook: Callable[..., Awaitable[None]], what: str, timeout: float, *args: Any) -> None:
    await guarded(hook(*args), what=what, timeout=timeout, failure=EnvFailure)
