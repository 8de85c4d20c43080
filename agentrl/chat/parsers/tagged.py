"""Calls as a tag with a name and a tag for each argument. Arguments' values are text that is not escaped.

1. A captured `type` decides how a value is read ("string" and "true": as text, others: as JSON), else the schema does.
2. A closing tag ends a value only if another tag follows, because a value may mention tags. A value with an
   opening tag, or with a closing tag before a tag or a line's end, has lost its own end: the call is broken."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentrl.chat.parsers.base import Calls, Parsed, Splitter, ToolCallParser, json_or_text
from agentrl.chat.parsers.marked import read_python


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
    """Return the parser of a format.

    Args:
        head: pattern of a call's opening, captures `name`.
        key: pattern of an argument's opening, captures `key`, and `type` if the tag has it.
        value_end, close: patterns that end a value, and the call.
        call: pattern that a call may begin with; `head` if None.
        tail: pattern of what must follow `close`.
        unclosed: pattern of the end of a value whose closing tag is missing.
        lost: pattern that no value may contain, because it begins another argument; `key` if None.
        until: pattern that ends a broken call; `close` if None.
        decode: decodes names and keys.
        marks: other patterns of `Splitter`."""
    splitter = Splitter(call or head.replace("?P<name>", ""), until or close, **marks)
    swallowed = re.compile(rf"{lost or key}|(?:{value_end})(?=\n|\s*(?:<|\Z))")
    ends = re.compile(rf"(?:{value_end})(?=\s*(?:{key}|{close}))" + (f"|(?P<unclosed>{unclosed})" if unclosed else ""))
    begins = re.compile(call or head)
    heads, keys, closes = re.compile(head), re.compile(rf"\s*{key}"), re.compile(rf"\s*(?:{close}){tail}")

    def parse(text: str, tools: Sequence[Mapping[str, Any]] = ()) -> Parsed:
        functions = [tool.get("function", tool) for tool in tools]
        schemas = {f["name"]: _of(f, "parameters", dict) for f in functions if "name" in f}
        next_end = _searcher(ends, text)

        def calls(start: int) -> Calls | None:
            if (opened := heads.match(text, start)) is None:
                return None
            name, at, arguments = decode(opened["name"]).strip(), opened.end(), dict[str, Any]()
            while found := keys.match(text, at):
                ended = next_end(found.end())
                field, value = decode(found["key"]).strip(), text[found.end() : ended.start()] if ended else ""
                if ended is None or field in arguments or swallowed.search(value):
                    return None
                if ended.groupdict().get("unclosed") is not None and begins.search(value):
                    return None  # the tag after it belongs to a value that mentions calls
                kind = found.groupdict().get("type")
                try:
                    said = json.loads(value) if kind not in (None, "string", "true") else value
                except (ValueError, RecursionError):
                    return None
                arguments[field] = said if kind else _coerce(value, field, schemas.get(name, {}))
                at = ended.end()
            closed = closes.match(text, at)
            return ([(name, arguments)], closed.end()) if closed and name else None

        return splitter.split(text, calls)

    return parse


def _searcher(pattern: re.Pattern[str], text: str) -> Callable[[int], re.Match[str] | None]:
    """Return a search of the text from a position. It caches a miss."""
    nothing_from = len(text) + 1

    def search(at: int) -> re.Match[str] | None:
        nonlocal nothing_from
        found = pattern.search(text, at) if at < nothing_from else None
        if found is None:
            nothing_from = min(at, nothing_from)
        return found

    return search


def _coerce(value: str, field: str, parameters: Mapping[str, Any]) -> Any:
    """Convert a value written as text by the tool's JSON schema; keep the text if it fits no other allowed type."""
    schema = _of(parameters, "properties", dict).get(field)
    if not (types := _types(schema, parameters)):
        return json_or_text(value) if schema is None else value
    if (text := value.strip()) in ("null", "None") and ("null" in types or "string" not in types):
        return None
    if "boolean" in types and text.lower() in ("true", "false"):
        return text.lower() == "true"
    found = json_or_text(value)
    if found == value and (python := read_python(text, 0)) and python[1] == len(text):
        found = python[0]  # templates write a dict as Python does
    kinds: dict[str, Any] = {"integer": int, "number": int | float, "object": dict, "array": list}
    fits = any(isinstance(found, kinds[name]) for name in types if name in kinds)
    return found if fits and not isinstance(found, bool) else value


def _of(schema: Mapping[str, Any], key: str, kind: type) -> Any:  # empty if the part is missing or malformed
    return found if isinstance(found := schema.get(key), kind) else kind()


def _types(schema: Any, root: Mapping[str, Any], seen: frozenset[str] = frozenset()) -> list[str]:
    """Return the JSON types that a schema allows. `root` has its definitions; `seen`: names of definitions in use."""
    if not isinstance(schema, Mapping):
        return []
    if "$ref" in schema:
        name = str(schema["$ref"]).rpartition("/")[2]
        defined = {**_of(root, "definitions", dict), **_of(root, "$defs", dict)}
        return [] if name in seen else _types(defined.get(name), root, seen | {name})
    if (kind := schema.get("type")) is None:
        options = [option for key in ("anyOf", "oneOf", "allOf") for option in _of(schema, key, list)]
        values = _of(schema, "enum", list) or ([schema["const"]] if "const" in schema else [])
        given = [_JSON_TYPES.get(type(value), "") for value in values]
        return [*(name for option in options for name in _types(option, root, seen)), *given]
    return [str(name) for name in kind] if isinstance(kind, list) else [str(kind)]


_JSON_TYPES: Mapping[type, str] = {type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string"}
_JSON_TYPES = {**_JSON_TYPES, list: "array", dict: "object"}
