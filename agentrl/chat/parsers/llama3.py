"""Llama 3.1 to 3.3 format: the whole turn is `{"name": ..., "parameters": {...}}`, several separated by `;`.

`<|python_tag|>` may come before the first call. A turn that does not begin with a call is text: JSON quoted in the
middle of an answer is not a call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.chat.parsers.base import Parsed, read_arguments, read_json

PYTHON_TAG = "<|python_tag|>"


def parse_llama3(text: str, tools: Sequence[Mapping[str, Any]] = ()) -> Parsed:
    """Split a turn into text, calls and broken calls."""
    before, tag, body = text.partition(PYTHON_TAG)
    if not tag:
        before, body = "", text
    if not body.lstrip().startswith("{"):
        return Parsed(before, [], [tag + body]) if tag else Parsed(text)
    calls: list[tuple[str, dict[str, Any] | str]] = []
    at = 0
    while (call := _call(body, at)) is not None:
        calls.append((call[0], call[1]))
        at = _skip_separator(body, call[2])
    rest = body[at:]
    if calls and not rest.strip():
        return Parsed(before, calls)
    if rest.lstrip().startswith("{"):
        return Parsed(before, calls, [rest])
    return Parsed(before + rest, calls)


def _call(text: str, start: int) -> tuple[str, dict[str, Any], int] | None:
    found = read_json(text, start)
    if found is None or not isinstance(found[0], dict):
        return None
    body, end = found
    name = body.get("name")
    if not isinstance(name, str) or not name or not ("parameters" in body or "arguments" in body):
        return None
    arguments = read_arguments(body.get("parameters", body.get("arguments")))
    return None if arguments is None else (name, arguments, end)


def _skip_separator(text: str, at: int) -> int:
    rest = text[at:].lstrip()
    if rest.startswith(";"):
        rest = rest[1:].lstrip()
    return len(text) - len(rest)
