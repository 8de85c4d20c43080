"""A turn while the model writes it, for the streams of the wire formats.

A generator makes a stream's events from the pieces of the turn's texts. It yields b"" while the model is still writing;
the server then waits for more text."""

import asyncio
import re
import time
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Literal

import orjson

from agentrl.chat.parsers import TurnParser
from agentrl.engine.transport import Reply, Sink
from agentrl.gateway.contracts import AgentTurn

TextName = Literal["reasoning", "content"]
TEXTS: tuple[TextName, ...] = ("reasoning", "content")
_TAG_BEGUN = re.compile(r"(?:<\|(?:open|close)\|>[^<>]{0,99})?<[^<>]{0,99}\Z|<\|(?:open|close)\|>[^<>]{0,99}\Z")
_PIECE = 200
_SECONDS = 0.05
"""Minimum seconds between two parses of the engine's text. Each parse reads the whole text."""


class LiveTurn:
    """One turn in progress.

    Args:
        parser: the parser of the model's turns; None if the texts come with the whole turn.
        stops: stop strings of the request; the content ends before them.

    Attributes:
        placed: set once the request has a node.
        turn: the turn so far: first its id and number of prompt tokens, at the end the whole turn.
        whole: true once `turn` is complete.
        numbers: counter of the stream's events, for wire formats that number events."""

    turn: AgentTurn

    def __init__(self, parser: TurnParser | None = None, stops: Sequence[str] = ()) -> None:
        self._parser, self._stops, self.placed, self._more = parser, stops, asyncio.Event(), asyncio.Event()
        self._pieces: dict[str, list[str]] = {name: [] for name in TEXTS}
        self.whole, self.numbers, self._looked = False, count(), 0.0

    @property
    def begun(self) -> bool:
        """True if a text has begun, or the turn is whole."""
        return self.whole or any(self._pieces.values())

    @property
    def sink(self) -> Sink:
        """The receiver of the engine's events; each event has the whole text so far. None without a parser."""
        return self._grow if self._parser else None

    def begin(self, turn: AgentTurn, parser: TurnParser | None = None) -> None:
        """Take the turn before its first token. `parser`: the parser after the turn's prompt."""
        self.turn, self._parser = turn, self._parser and (parser or self._parser)
        self.placed.set()

    def _grow(self, reply: Reply) -> None:
        assert self._parser is not None
        if (now := time.monotonic()) - self._looked >= _SECONDS:
            self._looked = now
            reasoning, content = stable_prefix(self._parser, orjson.loads(reply.body)["text"])
            self._add((reasoning, hold_back(_before(content, self._stops), self._stops).rstrip()))

    def finish(self, turn: AgentTurn) -> None:
        """Take the whole turn."""
        self.turn, self.whole = turn, True
        self._add((turn.parsed.reasoning or "", turn.parsed.content))
        self.wake()

    def pieces(self, name: TextName) -> Iterator[str]:
        """Yield the pieces of a text, and "" while the model is still writing the text."""
        at, found = 0, self._pieces[name]
        while True:
            while at < len(found):  # more may come while the client reads
                yield found[at]
                at += 1
            if self.whole or (name == "reasoning" and self._pieces["content"]):
                return
            yield ""

    def text(self, name: TextName) -> str:
        """Return the known part of a text."""
        return "".join(self._pieces[name])

    def wake(self, *_: object) -> None:
        """End a `quiet` in progress, because text was added or the turn ended."""
        self._more.set()

    async def quiet(self, seconds: float) -> bool:
        """Wait for `wake`; return true if it does not come within `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await self._more.wait()
        except TimeoutError:
            return True
        self._more.clear()
        return False

    def _add(self, texts: tuple[str, str]) -> None:
        for name, text in zip(TEXTS, texts, strict=True):
            if text.startswith(sent := self.text(name)) and text != sent:
                self._pieces[name] += cut(text[len(sent) :])
                self.wake()


def cut(text: str) -> Iterator[str]:
    """Cut a text into the pieces of a stream."""
    return (text[start : start + _PIECE] for start in range(0, len(text), _PIECE))


def stable_prefix(parser: TurnParser, text: str) -> tuple[str, str]:
    """Return the beginnings of reasoning and content that are the same in all turns that begin with `text`."""
    tags, family = parser.tags, parser.family
    marks = family.begins
    if tags is None and parser.reasoning is not None:  # a function parses reasoning, without tags
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
    """Return `text` without an end that may be the beginning of one of `marks`."""
    ends = (k for mark in marks for k in range(len(mark) - 1, 0, -1) if text.endswith(mark[:k]))
    return text[: len(text) - max(ends, default=0)]
