"""Hermes format (Qwen2.5, Qwen3, Hermes): `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number.

The JSON body is read as JSON, so `</tool_call>` inside an argument does not end the call.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.chat.parsers.base import CLOSE, OPEN, Call, Parsed, read_arguments, read_json, split_calls

_OPEN = re.compile(OPEN)
_TAG = re.compile("</?tool_call>")


def parse_hermes(text: str, tools: Sequence[Mapping[str, Any]] = ()) -> Parsed:
    """Split a turn (without its reasoning) into text, calls and broken calls."""
    return split_calls(text, _OPEN, lambda at: _call(text, at), lambda at: _end_of_broken(text, at))


def _call(text: str, start: int) -> Call | None:
    found = read_json(text, start + len(OPEN))
    if found is None or not isinstance(found[0], dict):
        return None
    body, at = found
    while at < len(text) and text[at].isspace():
        at += 1
    arguments = read_arguments(body.get("arguments", body.get("parameters")))
    name = body.get("name")
    if not text.startswith(CLOSE, at) or not isinstance(name, str) or not name or arguments is None:
        return None
    return name, arguments, at + len(CLOSE)


def _end_of_broken(text: str, start: int) -> int:
    """A broken call ends with its closing tag, or before the next opening one, or with the text."""
    tag = _TAG.search(text, start + len(OPEN))
    if tag is None:
        return len(text)
    return tag.end() if tag[0] == CLOSE else tag.start()
