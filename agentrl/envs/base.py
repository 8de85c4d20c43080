"""`Environment`: the base class that users subclass."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, ClassVar, Literal, Self

from agentrl.chat.messages import ToolCall
from agentrl.errors import EnvFailure, PluginError, SettingsError
from agentrl.sample import Message, Sample, Status
from agentrl.tasks import together
from agentrl.tools import Tool, Toolbox, ToolOutcome, ToolSource, as_tool


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the model.

    Attributes:
        index: number of the model's turn in its trajectory, from 1.
        text: the turn as sampled, with its markup, without the end token.
        content: the text without reasoning and tool calls.
        reasoning: the reasoning part, where the model has one.
        tool_calls: the calls in the order in which they were written.
        broken: the text of each call that could not be read.
        ids: the sampled token ids.
        finish_reason: why sampling stopped: `stop`, `length` or `abort`.
        sample: the trajectory so far, this turn included."""

    index: int
    text: str
    content: str
    reasoning: str | None = None
    tool_calls: Sequence[ToolCall] = ()
    broken: Sequence[str] = ()
    ids: Sequence[int] = ()
    finish_reason: str = "stop"
    sample: Sample = field(default_factory=Sample)


@dataclass(frozen=True, slots=True)
class Step:
    """The environment's answer to a turn.

    Attributes:
        messages: what the model is shown next; may be empty only if `done`.
        reward: what this turn earned, a finite number, or None. The trajectory's reward is the sum, unless the environment
            has a `reward` method of its own or the run a reward function: then that is, and these say which turns
            earned it.
        done: whether the trajectory ends here.
        restart: messages with which the conversation begins anew, in place of `messages`: a summary of it, say, when it
            gets long. What was played so far trains as a sample of its own, with the same reward.
        info: numbers to sum over the trajectory and report.
        stop_reason: the environment's word for why the trajectory ends, `Sample.stop_reason`; "done" if it has none."""

    messages: Sequence[Message] = ()
    reward: float | None = None
    done: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)
    stop_reason: str = ""
    restart: Sequence[Message] | None = None

    @property
    def shown(self) -> Sequence[Message]:
        """The messages that the model is shown, of either kind."""
        return self.messages if self.restart is None else self.restart

    def finish(self, reward: float | None = None, stop_reason: str = "") -> Self:
        """Return this step as the last of its trajectory; `reward`, if given, replaces the step's own."""
        return replace(self, done=True, reward=self.reward if reward is None else reward, stop_reason=stop_reason)


def _no_engines(name: str) -> Any:
    """Refuse: the environment is not played by a run."""
    raise EnvFailure(f"engine_group({name!r}): no run with --engine-groups plays this environment")


WhenInterrupted = Literal["keep", "replay", "restart"]


class Environment:
    """A task that a model works on over one or more turns.

    A complete environment:

        class SearchEnv(Environment):
            tools = [search]
            max_turns = 4

    Attributes:
        tools: functions with type hints, `Tool` objects, or sources of tools such as `MCPTools`. Methods decorated
            with `@tool` are added by themselves.
        max_turns: how many turns the model gets at most.
        when_interrupted: fate of an instance when generating pauses between two rollouts (`--partial-rollout`). "keep"
            keeps it. "replay" closes it, and makes a fresh one when its trajectory goes on: `reset` and `step` are called
            again with the turns so far (`turn.sample` is the whole sample), and the trajectory fails if messages differ.
            "restart" begins the trajectory again, for instances that can neither wait nor be replayed.
        args: the run's settings as a flat read-only view, or None outside a run; `args.env_args` are the arguments that
            instances of this class are made with (`--env-args`: the keyword parameters of its `__init__`).
        evaluating: whether this trajectory is played to evaluate, and not to be trained on.
        engine_group: `await self.engine_group("opponent").reply(messages)` asks other engines of the run (`--engine-groups`)
            for the text of a turn."""

    tools: ClassVar[Sequence[Callable[..., Any] | Tool | ToolSource]] = ()
    max_turns: ClassVar[int] = 8
    when_interrupted: ClassVar[WhenInterrupted] = "keep"
    args: Any = None
    evaluating: bool = False
    engine_group: Callable[[str], Any] = staticmethod(_no_engines)

    @classmethod
    def create(cls, args: Any = None, *, evaluating: bool = False, **arguments: Any) -> Self:
        """A fresh instance for one trajectory, made with `arguments`."""
        instance = cls.__new__(cls, **arguments)
        instance.args, instance.evaluating = args, evaluating  # `__init__` may read them
        type(instance).__init__(instance, **arguments)
        instance.args, instance.evaluating = args, evaluating  # and must not change them
        return instance

    @classmethod
    async def setup(cls, args: Any) -> None:
        """Open what all instances in this process share. Called once before the first instance."""

    @classmethod
    async def teardown(cls) -> None:
        """Close what `setup` opened. Called once after the last instance."""

    @classmethod
    def tool_sources(cls) -> list[ToolSource]:
        """The entries of `tools` that must be opened before their tools are known."""
        return [entry for entry in cls.tools if isinstance(entry, ToolSource)]

    @classmethod
    def declared_tools(cls, *, with_sources: bool = True) -> list[Tool]:
        """The tools of the class: those in `tools`, then its `@tool` methods in the order of definition. `with_sources`:
        include those of the tool sources, which must be open then. Raises PluginError: an entry of `tools` cannot be a
        tool, or a source is not open."""
        found: list[Tool] = []
        for entry in cls.tools:
            if not isinstance(entry, ToolSource):
                found.append(as_tool(entry))
            elif with_sources:
                found += entry.tools
        forms = (Tool, staticmethod)
        own = [name for base in reversed(cls.__mro__) for name, value in vars(base).items() if isinstance(value, forms)]
        methods = [value for name in dict.fromkeys(own) if isinstance(value := getattr(cls, name), Tool)]
        return found + [method for method in methods if method not in found]

    @cached_property
    def toolbox(self) -> Toolbox:
        """The instance's tools, methods bound to it; `toolbox.schemas` is what the chat template shows the model. Raises
        PluginError: as `declared_tools`, or `tools` is set on the instance."""
        if "tools" in vars(self):
            raise PluginError(f"{type(self).__name__}: set `tools` on the class, not an instance, or use @tool methods")
        return Toolbox(entry.bind(self) for entry in self.declared_tools())

    async def reset(self, sample: Sample) -> list[Message]:
        """The messages that start the conversation. Default: the sample's prompt, plain text as a user message."""
        return [{"role": "user", "content": sample.prompt}] if isinstance(sample.prompt, str) else list(sample.prompt)

    async def step(self, turn: Turn) -> Step:
        """Answer the model's turn. Default: run its tool calls; a turn without any ends it, and without tools every turn."""
        if not self.toolbox or not (turn.tool_calls or turn.broken):
            return Step(done=True)
        return await self.run_tools(turn)

    async def run_tools(self, turn: Turn) -> Step:
        """Run the turn's tool calls side by side. Returns a `Step` with one `tool` message a call, in the order of the
        calls, and after them a `user` message for calls that could not be read. `info` counts `tool_calls`, `tool_<kind>`
        by outcome, `tool_broken`, and sums `tool_seconds`. Raises ToolFailure: a tool failed, and its `on_failure` is
        "fail"."""
        calls = [partial(self.toolbox.run, call.name, call.arguments, state=self) for call in turn.tool_calls]
        # The usual turn has one call: a task of its own would cost as much as the call.
        done = [await calls[0]()] if len(calls) == 1 else await together(*calls)
        messages: list[Message] = [
            {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": outcome.content}
            for call, outcome in zip(turn.tool_calls, done, strict=True)
        ]
        if turn.broken:
            problems = "\n".join(f"Error: the tool call could not be read: {problem}" for problem in turn.broken)
            messages.append({"role": "user", "content": problems})
        return Step(messages, info=outcome_counts(done, len(turn.broken)))

    async def reward(self, sample: Sample) -> float | dict[str, Any]:
        """The reward of a finished trajectory.

        Default: what the grader says that the run's or the sample's `rm_type` names, if one does, plus the rewards of
        the steps (`Step.reward`); of a dict reward they are added to the entry that trains. Without a grader, a
        trajectory that a limit cut off before any step gave a reward has 0. A method of your own, or
        `--custom-rm-path`, decides alone: rewards of steps then say only which turns earned it. Raises SettingsError:
        there is no grader, and no step gave a reward. Raises GraderFailure: it cannot be graded."""
        from agentrl.rm_hub import async_rm, rm_type_of

        steps = [reward for reward in sample.metadata.get("step_rewards", ()) if reward is not None]
        if rm_type_of(self.args, sample) is None:
            if not steps and (sample.status is not Status.TRUNCATED or type(self).step is Environment.step):
                name = type(self).__name__
                without = f"{name}.step never returned Step(reward=...), {name} has no reward method"
                raise SettingsError(f"no reward: {without}, and neither --rm-type nor --custom-rm-path is set")
            return math.fsum(steps)
        if not isinstance(graded := await async_rm(self.args, sample), dict):
            return graded + math.fsum(steps)
        key = getattr(self.args, "reward_key", None) or "score"
        return {**graded, key: graded[key] + math.fsum(steps)}

    async def close(self) -> None:
        """Free what this instance holds. Always called, also when the trajectory is cancelled or fails."""


def outcome_counts(outcomes: Sequence[ToolOutcome], broken: int = 0) -> dict[str, float]:
    """Return what `run_tools` puts into `Step.info`: counts of `outcomes` and of `broken`, the unreadable calls."""
    kinds = Counter(f"tool_{outcome.kind}" for outcome in outcomes)
    seconds = sum(outcome.seconds for outcome in outcomes)
    unread = {"tool_broken": broken} if broken else {}
    return {"tool_calls": len(outcomes) + broken, **unread, **kinds, "tool_seconds": seconds}
