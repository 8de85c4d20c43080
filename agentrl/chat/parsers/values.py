"""What the values of arguments mean that a model wrote as plain text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.chat.parsers.base import json_or_text
from agentrl.chat.parsers.notation import read_python


def parameter_schemas(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The schema of each parameter, by tool and parameter name."""
    functions = [tool.get("function", tool) for tool in tools]
    return {f["name"]: (f.get("parameters") or {}).get("properties") or {} for f in functions if "name" in f}


def coerce(value: str, schema: Any) -> Any:
    """What a value written as text means under a JSON schema; the text itself where it fits no other allowed type."""
    types = _types(schema)
    if not types:
        return json_or_text(value) if schema is None else value
    text = value.strip()
    if text in ("null", "None") and ("null" in types or "string" not in types):
        return None
    if "boolean" in types and text.lower() in ("true", "false"):
        return text.lower() == "true"
    found = json_or_text(value)
    if found == value and (python := read_python(text, 0)) and python[1] == len(text):
        found = python[0]  # templates write a dict as Python does
    kinds: dict[str, Any] = {"integer": int, "number": int | float, "object": dict, "array": list}
    fits = any(isinstance(found, kinds[name]) for name in types if name in kinds)
    return found if fits and not isinstance(found, bool) else value


def _types(schema: Any) -> list[str]:
    if not isinstance(schema, Mapping):
        return []
    kind = schema.get("type")
    if kind is None:
        options = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
        return [name for option in options for name in _types(option)]
    return [str(name) for name in kind] if isinstance(kind, list) else [str(kind)]
