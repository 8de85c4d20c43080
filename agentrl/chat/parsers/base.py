"""Tool-call parsers, and the pieces that every family shares. A parser is a function `(text, tools) -> Parsed`. It
never raises on a model's text and never guesses: an incomplete call is in `broken`. Its time is proportional to the
text, because parsers run on an event loop."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.rowfiles import json_or_text as json_or_text

MAX_BROKEN = 64  # after this number of broken calls in a turn, the next broken call takes the rest of the text
_DECODER = json.JSONDecoder(strict=False)  # not strict: models write raw newlines inside JSON strings


@dataclass(slots=True)
class Parsed:
    """A parser's result: text outside calls, `(name, arguments)` of each good call, raw text of each broken call."""

    text: str = ""
    calls: list[tuple[str, dict[str, Any] | str]] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)


Calls = tuple[list[tuple[str, dict[str, Any]]], int]  # names with arguments, and the position after them
ToolCallParser = Callable[[str, Sequence[Mapping[str, Any]]], Parsed]


class Splitter:
    """Splitter of turns of one format into text, calls and broken calls, by the marks before and between calls.

    Args, all regular expressions:
        call: begins a call.
        until: ends a broken call; without a match, the call ends with the text.
        begin: opens a section of calls; other text in the section is dropped.
        end: closes the section.
        drop: marks around the answer, which are removed.
        more: begins another call directly after a call."""

    def __init__(
        self, call: str, until: str, *, begin: str = "", end: str = "", drop: str = "", more: str = ""
    ) -> None:
        named = {"call": call, "begin": begin, "end": end, "drop": drop}
        self._any = re.compile("|".join(f"(?P<{name}>{mark})" for name, mark in named.items() if mark))
        self._more = re.compile(f"(?P<call>{more})") if more else None
        self._until = re.compile(until)

    def split(self, text: str, read: Callable[[int], Calls | None]) -> Parsed:
        """Split `text`; `read` returns the calls that begin at a position, or None if they are broken."""
        out, kept, at = Parsed(), list[str](), 0
        section: tuple[int, int] | None = None  # its start, and the number of calls before it
        found = self._any.search(text)
        while found:
            start, good = found.start(), False
            if section is None:
                kept.append(text[at:start])
            at = found.end()
            if found.lastgroup == "call" and (calls := read(start)) is not None:
                good, at = True, calls[1]
                out.calls += calls[0]
            elif found.lastgroup == "call":
                end = self._until.search(text, max(at, start + 1)) if len(out.broken) < MAX_BROKEN else None
                at = end.end() if end else len(text)
                out.broken.append(text[start:at])
            elif found.lastgroup == "begin":
                section = section or (start, len(out.calls) + len(out.broken))
            elif found.lastgroup == "end" and section:
                inside = self._any.sub("", text[section[0] : start])
                if len(out.calls) + len(out.broken) == section[1] and inside.strip():
                    out.broken.append(text[section[0] : at])
                section = None
            found = (self._more.match(text, at) if good and self._more else None) or self._any.search(text, at)
        if section is None:
            kept.append(text[at:])
        elif len(out.calls) + len(out.broken) == section[1]:
            out.broken.append(text[section[0] :])
        out.text = "".join(kept)
        return out


def read_json(text: str, start: int) -> tuple[Any, int] | None:
    """Return the JSON value that begins at `start` (after whitespace) and the position after it, or None."""
    while start < len(text) and text[start].isspace():
        start += 1
    try:
        return _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None


def read_arguments(value: Any) -> dict[str, Any] | None:
    """Return a call's arguments as a dict: text is read as JSON, None becomes {}. None if the result is not a dict."""
    if value is None:
        return {}
    if isinstance(value, str):
        if (found := read_json(value, 0)) is None or value[found[1] :].strip():
            return None
        value = found[0]
    return value if isinstance(value, dict) else None


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """The pair of tags around reasoning; `other`: a pair that older models of the family write."""

    open: str
    close: str
    other: ReasoningTags | None = None

    def of(self, turn: str) -> ReasoningTags:
        """Return the pair with which a turn begins; this pair if the turn begins with none."""
        return self.other if self.other is not None and turn.startswith(self.other.open) else self


@dataclass(frozen=True, slots=True)
class Split:
    """A split turn. `reasoning` is None if it is absent or empty; `open` is true if the tag was never closed."""

    reasoning: str | None
    rest: str
    open: bool = False


ReasoningParser = Callable[[str], Split]  # splits a turn's text, for formats without a pair of tags
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


def split_tags(text: str, tags: ReasoningTags | None, *, opened: bool, begins: Sequence[str]) -> Split:
    """Split `text` at the reasoning's end. `tags`: None if the model has no reasoning format. `opened`: the generation
    prompt ended inside the reasoning. `begins`: the texts that end reasoning without a closing tag."""
    if tags is None:
        return Split(None, text)
    body, begin = text, text.lstrip()
    tags = tags.of(begin)
    if begin.startswith(tags.open):
        body = begin[len(tags.open) :]
    elif not opened:
        return Split(None, text)
    if (end := body.find(tags.close)) >= 0:
        return Split(body[:end].strip() or None, body[end + len(tags.close) :])
    if calls := [at for begin in begins if (at := body.find(begin)) >= 0]:
        return Split(body[: min(calls)].strip() or None, body[min(calls) :])
    return Split(body.strip() or None, "", open=True)
