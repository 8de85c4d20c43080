"""What a tool-call parser is, and the pieces that every family shares.

1. A parser is a function `(text, tools) -> Parsed`: the text around the calls, the calls, and the broken ones.
2. It never raises on a model's text and never guesses: a call that is not complete and well formed is in `broken`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_DECODER = json.JSONDecoder(strict=False)
"""Not strict: models write raw newlines inside JSON strings, and the meaning is plain."""


@dataclass(slots=True)
class Parsed:
    """A parser's answer: text outside the calls, `(name, arguments)` of each good call, raw text of each broken one."""

    text: str = ""
    calls: list[tuple[str, dict[str, Any] | str]] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)


ToolCallParser = Callable[[str, Sequence[Mapping[str, Any]]], Parsed]


def read_json(text: str, start: int) -> tuple[Any, int] | None:
    """The JSON value that begins at `start` (after whitespace) and the position after it; None if there is none."""
    while start < len(text) and text[start].isspace():
        start += 1
    try:
        return _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None


def read_arguments(value: Any) -> dict[str, Any] | None:
    """A call's arguments as a dict: JSON text is read once more, absent ones are empty; None if they are neither."""
    if value is None:
        return {}
    if isinstance(value, str):
        found = read_json(value, 0)
        if found is None or value[found[1] :].strip():
            return None
        value = found[0]
    return value if isinstance(value, dict) else None
