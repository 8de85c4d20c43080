"""Qwen3-Coder, Qwen3.5 and Nemotron 3 format:

    <tool_call><function=name><parameter=key>
    value
    </parameter>...</function></tool_call>

1. The outer tag may be missing. A parameter without its closing tag ends at the line where the next one begins.
2. Values are text; the tool's schema says what they mean (`coerce`). Without a schema a value that reads as JSON is
   JSON.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.chat.parsers.base import Call, Finder, Parsed, behind_close, coerce, parameter_schemas, split_calls

_START = re.compile(r"<tool_call>|<function=")
_HEAD = re.compile(r"(?:<tool_call>\s*)?<function=([^<>\n]+)>")
_KEY = re.compile(r"\s*<parameter=([^<>\n]+)>")
_VALUE_END = re.compile(r"</parameter>\s*(?=<parameter=|</function>)|(?=\n<parameter=|\n</function>)")
"""A closing tag ends a value only where another tag follows: a value may talk about tags."""
_LOOSE_VALUE_END = re.compile(r"</parameter>|(?=<parameter=|</function>|<function=|</?tool_call>)")
_END = re.compile(r"\s*</function>\s*(?:</tool_call>|(?=<tool_call>|<function=|$))")


def parse_qwen_xml(text: str, tools: Sequence[Mapping[str, Any]] = ()) -> Parsed:
    """Split a turn (without its reasoning) into text, calls and broken calls."""
    reader = _Reader(text, parameter_schemas(tools))
    return split_calls(text, _START, reader.call, lambda at: behind_close(text, at))


class _Reader:
    def __init__(self, text: str, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        self._text, self._schemas = text, schemas
        self._value_ends = Finder(_VALUE_END, text)
        self._loose_ends = Finder(_LOOSE_VALUE_END, text)

    def call(self, start: int) -> Call | None:
        """(name, arguments, position behind) of the call at `start`, or None if it is broken."""
        head = _HEAD.match(self._text, start)
        if head is None:
            return None
        name, at = head[1].strip(), head.end()
        known, arguments = self._schemas.get(name, {}), {}
        while key := _KEY.match(self._text, at):
            value_end = self._value_ends.next(key.end()) or self._loose_ends.next(key.end())
            if value_end is None:
                return None
            field, value = key[1].strip(), self._text[key.end() : value_end.start()]
            arguments[field] = coerce(value.removeprefix("\n").removesuffix("\n"), known.get(field))
            at = value_end.end()
        end = _END.match(self._text, at)
        return (name, arguments, end.end()) if end else None
