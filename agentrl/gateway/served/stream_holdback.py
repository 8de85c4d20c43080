"""The part of an unfinished turn's text that can be sent: no tag, call or stop string that may follow changes it."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentrl.chat.parsers import TurnParser

_TAG_BEGUN = re.compile(r"(?:<\|(?:open|close)\|>[^<>]{0,99})?<[^<>]{0,99}\Z|<\|(?:open|close)\|>[^<>]{0,99}\Z")


def stable_prefix(parser: "TurnParser", text: str) -> tuple[str, str]:
    """Return the beginnings of reasoning and content that every turn shares that begins with `text`."""
    tags, family = parser.tags, parser.family
    marks = family.begins
    if tags is None and parser.reasoning is not None:  # a function's, which takes any text
        turn = parser.parse(_TAG_BEGUN.sub("", text)) if any(mark in text for mark in family.answers) else None
        return (turn.reasoning or "", turn.content) if turn else ("", "")
    reasoning = ""
    if tags is not None:
        body, opened = text.lstrip(), parser.opens_reasoning
        if any(pair.open.startswith(body) for pair in (tags, tags.other) if pair):
            return "", ""
        tags = tags.of(body)
        if body.startswith(tags.open):
            text, opened = body[len(tags.open) :], True
        if opened:
            thought, closed, text = text.partition(tags.close)
            if not closed:
                ends = [tags.close, *marks, *family.answers]
                return hold_back(_before(thought, ends), ends).strip(), ""
            reasoning = thought.strip()
    if family.name == "none":
        return reasoning, text.strip()
    sure = _TAG_BEGUN.sub("", hold_back(_before(text, marks), marks)) if marks else ""
    found = family.parse(sure, ())
    return reasoning, (sure.partition("<")[0] if found.calls or found.broken else found.text).strip()


def _before(text: str, marks: Sequence[str]) -> str:
    return text[: min((at for mark in marks if (at := text.find(mark)) >= 0), default=len(text))]


def hold_back(text: str, marks: Sequence[str]) -> str:
    """`text` without an end with which one of `marks` may begin."""
    ends = (k for mark in marks for k in range(len(mark) - 1, 0, -1) if text.endswith(mark[:k]))
    return text[: len(text) - max(ends, default=0)]
