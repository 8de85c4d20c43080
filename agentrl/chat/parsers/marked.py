"""Calls as one value behind a mark: JSON, or a notation that is translated to JSON.

1. The mark's pattern may capture the tool's `name`; then the value is its arguments. Else the value is a call
   `{"name": ..., "arguments": {...}}` or a list of calls, of which all are well formed or none is read.
2. The value is read as a whole, so a closing mark inside an argument does not end the call.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentrl.chat.parsers.base import Calls, Parsed, Splitter, ToolCallParser, read_arguments, read_json

_NAMES = ("name", "tool_name")
_ARGUMENTS = ("arguments", "parameters")
_BESIDES = {*_NAMES, "type", "id", "tool_call_id"}
"""What a call without arguments may have besides."""


def marked(
    call: str,
    head: str = "",
    close: str = "",
    *,
    optional: bool = False,
    read: Callable[[str, int], tuple[Any, int] | None] = read_json,
    raw: bool = False,
    **marks: str,
) -> ToolCallParser:
    """The parser of a format.

    Args:
        call: pattern that begins a call.
        head: pattern of what stands between that and the value; may capture `name`.
        close: pattern of what ends a call; empty where nothing does.
        optional: models may leave `close` out.
        read: the value that begins at a position of the text, and where it ends.
        raw: strings are not escaped, so a broken call may hold what reads like another one.
        marks: further ones of `Splitter`.
    """
    ends = [close, *([] if raw else [f"(?={mark})" for mark in (call, marks.get("end")) if mark])]
    splitter = Splitter(call, "|".join(filter(None, ends)), **marks)
    opening = re.compile(f"(?:{call}|{marks['more']}){head}" if "more" in marks else f"(?:{call}){head}")
    closing = re.compile(rf"(?:\s*(?:{close}))?" if optional else rf"\s*(?:{close})" if close else "")

    def parse(text: str, tools: Sequence[Mapping[str, Any]] = ()) -> Parsed:
        def calls(start: int) -> Calls | None:
            opened = opening.match(text, start)
            found = read(text, opened.end()) if opened else None
            closed = closing.match(text, found[1]) if found else None
            if opened is None or found is None or closed is None:
                return None
            named = calls_of(opened.groupdict().get("name"), found[0])
            return (named, closed.end()) if named else None

        return splitter.split(text, calls)

    return parse


def calls_of(name: str | None, value: Any) -> list[tuple[str, dict[str, Any]]] | None:
    """The calls that a value makes: arguments of the tool `name`, or calls that name their tools; None if broken."""
    if name is not None:
        arguments = read_arguments(value)
        return None if arguments is None else [(name, arguments)]
    calls = []
    for item in value if isinstance(value, list) else [value]:
        body = item.get("function", item) if isinstance(item, dict) else None
        if not isinstance(body, dict):
            return None
        named = next((body[key] for key in _NAMES if key in body), None)
        given = next((key for key in _ARGUMENTS if key in body), None)
        arguments = read_arguments(body[given]) if given else None if set(body) - _BESIDES else {}
        if not isinstance(named, str) or not named or arguments is None:
            return None
        calls.append((named, arguments))
    return calls
