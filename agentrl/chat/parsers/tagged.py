"""Calls as a tag with a name and a tag for each argument, whose value is text that is not escaped.

1. What a value means says its own type (`type` captured: "string" and "true" are text, others JSON), else the tool's
   schema (`coerce`).
2. A closing tag ends a value only where another tag follows: a value may talk about tags. One that holds a closing tag
   at the end of a line or before a tag, or an opening one, has lost its own end or swallowed what follows: broken.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.chat.parsers.base import Calls, Marks, Parsed, Splitter, ToolCallParser
from agentrl.chat.parsers.values import coerce, parameter_schemas

_Search = Callable[[int], re.Match[str] | None]


def tagged(
    head: str,
    key: str,
    value_end: str,
    close: str,
    *,
    call: str | None = None,
    tail: str = "",
    unclosed: str | None = None,
    lost: str | None = None,
    until: str | None = None,
    decode: Callable[[str], str] = str,
    **marks: str,
) -> ToolCallParser:
    """The parser of a format.

    Args:
        head: pattern of a call's opening, captures `name`.
        key: pattern of an argument's opening, captures `key` and, where it says it, `type`.
        value_end: pattern that ends a value.
        close: pattern that ends the call.
        call: pattern that a call may begin with; `head` if None.
        tail: pattern of what must follow `close`.
        unclosed: pattern of the end of a value whose closing tag is missing.
        lost: pattern that no value holds, for it would be another argument's; `key` if None.
        until: pattern that ends a broken call; `close` if None.
        decode: what names and keys mean.
        marks: further fields of `Marks`.
    """
    splitter = Splitter(Marks(call or head.replace("?P<name>", ""), until or close, **marks))
    ends = rf"(?:{value_end})(?=\s*(?:{key}|{close}))" + (f"|{unclosed}" if unclosed else "")
    swallowed = rf"{lost or key}|(?:{value_end})(?=\n|\s*(?:<|\Z))"
    patterns = head, rf"\s*{key}", swallowed, ends, rf"\s*(?:{close}){tail}"
    reader = _Reader(decode, *map(re.compile, patterns))

    def parse(text: str, tools: Sequence[Mapping[str, Any]] = ()) -> Parsed:
        schemas, ends = parameter_schemas(tools), _searcher(reader.value_end, text)
        return splitter.split(text, lambda start: reader.call(text, start, schemas, ends))

    return parse


def _searcher(pattern: re.Pattern[str], text: str) -> _Search:
    """Searches the text from a position; that nothing is found is found out once."""
    nothing_from = len(text) + 1

    def search(at: int) -> re.Match[str] | None:
        nonlocal nothing_from
        found = pattern.search(text, at) if at < nothing_from else None
        if found is None:
            nothing_from = min(at, nothing_from)
        return found

    return search


@dataclass(frozen=True, slots=True)
class _Reader:
    decode: Callable[[str], str]
    head: re.Pattern[str]
    next_key: re.Pattern[str]
    swallowed: re.Pattern[str]
    value_end: re.Pattern[str]
    close: re.Pattern[str]

    def call(self, text: str, start: int, schemas: Mapping[str, Mapping[str, Any]], ends: _Search) -> Calls | None:
        head = self.head.match(text, start)
        if head is None:
            return None
        name, at, arguments = self.decode(head["name"]).strip(), head.end(), dict[str, Any]()
        while key := self.next_key.match(text, at):
            ended = ends(key.end())
            field, value = self.decode(key["key"]).strip(), text[key.end() : ended.start()] if ended else ""
            if ended is None or field in arguments or self.swallowed.search(value):
                return None
            try:
                arguments[field] = _meaning(value, key.groupdict().get("type"), schemas.get(name, {}).get(field))
            except (ValueError, RecursionError):
                return None
            at = ended.end()
        close = self.close.match(text, at)
        return ([(name, arguments)], close.end()) if close and name else None


def _meaning(value: str, kind: str | None, schema: Any) -> Any:
    if kind is None:
        return coerce(value, schema)
    return value if kind in ("string", "true") else json.loads(value)
