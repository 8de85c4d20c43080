"""gpt-oss's harmony format: a turn consists of messages, each with a channel and maybe a recipient.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant to=functions.name<|channel|>commentary json<|message|>{...}

1. `analysis` is reasoning, `final` and `commentary` are text, and a message to `functions.name` is a call whose body is
   JSON. A message to another recipient, such as a hosted model's built-in tool, is dropped.
2. An end mark closes a body only before another message or at the end of the text."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from agentrl.chat.parsers.base import MAX_BROKEN, Parsed, Split, read_arguments, read_json

_RECIPIENT = r"(?:[ \t]*to=([^\s<]+))?"
_HEADER = re.compile(
    rf"(?:<\|start\|>assistant)?{_RECIPIENT}<\|channel\|>(analysis|commentary|final){_RECIPIENT}"
    r"[ \t]*(?:<\|constrain\|>)?[ \t]*\w*[ \t]*<\|message\|>"
)
_BEGINS = re.compile(r"<\|start\|>|<\|channel\|>|[ \t]*to=")
_CLOSED = r"<\|(?:end|call|return)\|>(?=\s*<\|start\|>|\s*\Z)"
_END = re.compile(_CLOSED)
_END_OF_TEXT = re.compile(rf"{_CLOSED}|(?=<\|start\|>assistant{_RECIPIENT}<\|channel\|>)")
_STRAY = re.compile(r"<\|(?:end|call|return)\|>\s*")


class _Message(NamedTuple):
    raw: str
    channel: str | None  # None: text outside of messages, or a message whose header is broken
    recipient: str | None
    body: str
    closed: bool


def _messages(text: str) -> Iterator[_Message]:
    at = unreadable = 0
    while at < len(text):
        if (header := _HEADER.match(text, at)) is None:
            start = text.find("<|start|>", at + 1)
            channel = text.find("<|channel|>", at) if not _BEGINS.match(text, at) else -1
            found = min((place for place in (start, channel) if place >= 0), default=len(text))
            yield _Message(text[at:found], None, None, text[at:found], True)
            at = found
            continue
        body, end = header.end(), None
        if recipient := header[1] or header[3]:
            value = read_json(text, body)
            unreadable += value is None
            end = _END.search(text, value[1] if value else body) if unreadable < MAX_BROKEN else None
        else:
            end = _END_OF_TEXT.search(text, body)
        body_end, message_end = (end.start(), end.end()) if end else (len(text), len(text))
        yield _Message(text[at:message_end], header[2], recipient, text[body:body_end], end is not None)
        at = message_end


def split_channels(text: str) -> Split:
    """Split a turn into its analysis and the rest."""
    reasoning, rest, is_open = list[str](), list[str](), False
    for message in _messages(text):
        is_analysis = message.channel == "analysis" and message.recipient is None
        (reasoning if is_analysis else rest).append(message.body.strip() if is_analysis else message.raw)
        is_open = is_analysis and not message.closed
    return Split("\n".join(filter(None, reasoning)) or None, "".join(rest), is_open)


def parse_harmony(text: str, tools: Sequence[Mapping[str, Any]] = ()) -> Parsed:
    """Return text and calls of a turn from which `split_channels` removed the analysis."""
    out, texts = Parsed(), list[str]()
    for message in _messages(text):
        if message.recipient is not None:
            if not message.recipient.startswith("functions."):
                continue
            value = read_json(message.body, 0)
            arguments = read_arguments(value[0]) if value and not message.body[value[1] :].strip() else None
            if arguments is None:
                out.broken.append(message.raw)
            else:
                out.calls.append((message.recipient.removeprefix("functions."), arguments))
        elif message.channel is None and _BEGINS.match(message.body):
            out.broken.append(message.raw)
        else:
            texts.append(_STRAY.sub("", message.body).strip() if message.channel is None else message.body.strip())
    out.text = "\n".join(filter(None, texts))
    if len(out.broken) > MAX_BROKEN:
        out.broken[MAX_BROKEN - 1 :] = ["".join(out.broken[MAX_BROKEN - 1 :])]
    return out
