"""Splitting a turn's reasoning from the rest.

1. Reasoning is what stands between the tags; the opening tag may be in the generation prompt instead (`opened`).
2. A tool call ends reasoning that was never closed: models that forget the tag still call.
3. Reasoning that never ends is all reasoning, and says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """The pair of tags around reasoning; `other`: a pair that older models of the family write."""

    open: str
    close: str
    other: ReasoningTags | None = None

    def of(self, turn: str) -> ReasoningTags:
        """The pair that a turn begins with, this one if with none."""
        return self.other if self.other is not None and turn.startswith(self.other.open) else self


@dataclass(frozen=True, slots=True)
class Split:
    """`reasoning` is None where the turn has none (an empty block is none); `open` if the tag was never closed."""

    reasoning: str | None
    rest: str
    open: bool = False


ReasoningParser = Callable[[str], Split]
"""What splits a turn's text where tags cannot say it."""

THINK = ReasoningTags("<think>", "</think>")
BRACKET_THINK = ReasoningTags("[THINK]", "[/THINK]", other=THINK)
TAGS = (
    BRACKET_THINK,
    ReasoningTags("<seed:think>", "</seed:think>"),
    ReasoningTags("<|channel>thought\n", "<channel|>"),
    ReasoningTags("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    ReasoningTags("<|START_THINKING|>", "<|END_THINKING|>"),
    THINK,
)


def split_reasoning(text: str, tags: ReasoningTags | None, *, opened: bool, begins: Sequence[str]) -> Split:
    """Split `text` at the reasoning's end.

    Args:
        tags: None if the model has no reasoning format.
        opened: the generation prompt ended inside the reasoning.
        begins: the texts that end reasoning without a closing tag.
    """
    if tags is None:
        return Split(None, text)
    body = text.lstrip()
    tags = tags.of(body)
    if body.startswith(tags.open):
        body, opened = body[len(tags.open) :], True
    else:
        body = text
    if not opened:
        return Split(None, text)
    end = body.find(tags.close)
    if end >= 0:
        return Split(body[:end].strip() or None, body[end + len(tags.close) :])
    if calls := [at for begin in begins if (at := body.find(begin)) >= 0]:
        return Split(body[: min(calls)].strip() or None, body[min(calls) :])
    return Split(body.strip() or None, "", open=True)
