"""Splitting a turn's reasoning from the rest.

1. Reasoning is what stands between the tags; the opening tag may be in the generation prompt instead (`opened`).
2. A tool call ends reasoning that was never closed: models that forget the tag still call.
3. Reasoning that never ends is all reasoning, and says so.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """The pair of tags around reasoning."""

    open: str
    close: str


@dataclass(frozen=True, slots=True)
class Split:
    """`reasoning` is None where the turn has none (an empty block is none); `open` if the tag was never closed."""

    reasoning: str | None
    rest: str
    open: bool = False


THINK = ReasoningTags("<think>", "</think>")
BRACKET_THINK = ReasoningTags("[THINK]", "[/THINK]")


def split_reasoning(text: str, tags: ReasoningTags | None, *, opened: bool, call_marker: str | None) -> Split:
    """Split `text` at the reasoning's end.

    Args:
        tags: None if the model has no reasoning format.
        opened: the generation prompt ended inside the reasoning.
        call_marker: the text that begins a tool call, if the format has one.
    """
    if tags is None:
        return Split(None, text)
    body = text.lstrip()
    if body.startswith(tags.open):
        body, opened = body[len(tags.open) :], True
    else:
        body = text
    if not opened:
        return Split(None, text)
    end = body.find(tags.close)
    if end >= 0:
        return Split(body[:end].strip() or None, body[end + len(tags.close) :])
    if call_marker and (call := body.find(call_marker)) >= 0:
        return Split(body[:call].strip() or None, body[call:])
    return Split(body.strip() or None, "", open=True)
