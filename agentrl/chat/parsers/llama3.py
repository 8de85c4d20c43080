"""Llama 3.1 to 3.3 format: the whole turn is `{"name": ..., "parameters": {...}}`, several separated by `;`.

`<|python_tag|>` may come before the first call. A turn that does not begin with a call is text: JSON in the middle of
an answer, or JSON without a name, is not a call.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.chat.parsers.base import Call, Parsed, read_arguments, read_json

PYTHON_TAG = "<|python_tag|>"
_SEPARATOR = re.compile(r"\s*;?\s*")
_BEGINS_CALL = re.compile(r'\s*\{\s*"name"\s*:')


def parse_llama3(text: str, tools: Sequence[Mapping[str, Any]] = ()) -> Parsed:
    """Split a turn into text, calls and broken calls."""
    before, tag, body = ("", "", text) if text.lstrip().startswith("{") else text.partition(PYTHON_TAG)
    if not tag and before:
        return Parsed(text)
    calls: list[tuple[str, dict[str, Any] | str]] = []
    at = 0
    while (call := _call(body, at)) is not None:
        name, arguments, at = call
        calls.append((name, arguments))
        if separator := _SEPARATOR.match(body, at):
            at = separator.end()
    rest = body[at:]
    if _BEGINS_CALL.match(rest) or (tag and not calls):
        return Parsed(before, calls, [rest if calls else tag + rest])
    return Parsed(before + rest, calls)


def _call(text: str, start: int) -> Call | None:
    found = read_json(text, start)
    if found is None or not isinstance(found[0], dict):
        return None
    body, end = found
    name = body.get("name")
    if not isinstance(name, str) or not name or not ("parameters" in body or "arguments" in body):
        return None
    arguments = read_arguments(body.get("parameters", body.get("arguments")))
    return None if arguments is None else (name, arguments, end)
