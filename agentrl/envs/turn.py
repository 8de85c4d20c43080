"""`Turn` and `Step`: what passes between the agent loop and an environment."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.chat.messages import ToolCall
from agentrl.sample import Message, Sample


@dataclass(frozen=True, slots=True)
class Turn:
    """What the model wrote in one turn.

    Attributes:
        index: number of the model's turn in its trajectory, from 1.
        text: the turn as sampled, with its markup, without the end token.
        content: the text without reasoning and tool calls.
        reasoning: the reasoning part, where the model has one.
        tool_calls: the calls in the order in which they were written.
        broken: one sentence for each call that could not be read.
        ids: the sampled token ids.
        finish_reason: why sampling stopped: `stop`, `length` or `abort`.
        sample: the trajectory so far, this turn included.
    """

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
        info: numbers to sum over the trajectory and report.
    """

    messages: Sequence[Message] = ()
    reward: float | None = None
    done: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)
