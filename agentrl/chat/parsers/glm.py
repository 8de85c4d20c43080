"""GLM 4.5 to 4.7 format: `<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value>...</tool_call>`.

Values are text; the tool's schema says what they mean (`coerce`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.chat.parsers.base import OPEN, Call, Parsed, behind_close, coerce, parameter_schemas, split_calls

_OPEN = re.compile(OPEN)
_NAME = re.compile(r"<tool_call>\s*([^<\s]+)")
_KEY = re.compile(r"\s*<arg_key>([^<]*)</arg_key>\s*<arg_value>")
_VALUE_END = re.compile(r"</arg_value>(?=\s*(?:<arg_key>|</tool_call>))")
"""A closing tag ends a value only where another tag follows: a value may talk about tags."""
_END = re.compile(r"\s*</tool_call>")


def parse_glm(text: str, tools: Sequence[Mapping[str, Any]] = ()) -> Parsed:
    """Split a turn (without its reasoning) into text, calls and broken calls."""
    schemas = parameter_schemas(tools)
    return split_calls(text, _OPEN, lambda at: _call(text, at, schemas), lambda at: behind_close(text, at))


def _call(text: str, start: int, schemas: Mapping[str, Mapping[str, Any]]) -> Call | None:
    name = _NAME.match(text, start)
    if name is None:
        return None
    known, arguments, at = schemas.get(name[1], {}), {}, name.end()
    while key := _KEY.match(text, at):
        value_end = _VALUE_END.search(text, key.end())
        if value_end is None:
            return None
        field = key[1].strip()
        arguments[field] = coerce(text[key.end() : value_end.start()], known.get(field))
        at = value_end.end()
    end = _END.match(text, at)
    return (name[1], arguments, end.end()) if end else None
