"""Converts command-line text to the plain value that a field's pydantic type checks.

Scalars stay text, which pydantic converts and checks. Only containers and unions are parsed here:

1. a list is a repeated flag, or one JSON list (in a list of texts, `[/INST]` stays text: it is not JSON);
2. a mapping is `key=value` (repeatable), or one JSON object;
3. `none` is None if the field allows None and is not plain text;
4. one text or several by name is `PATH`, or `NAME=PATH` repeated."""

import json
import re
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.config.fields import FieldRef
from agentrl.errors import SettingsError, raised_as
from agentrl.rowfiles import json_or_text as json_or_text

TRUTH = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
_NAME_AND_PATH = re.compile(r"([\w.-]+)=(.+)")


def read_texts(field: FieldRef, texts: Sequence[str]) -> Any:
    """Return the value of a flag's occurrences. Raises SettingsError: a text does not have the container's form."""
    if field.is_named:
        return _named(field, texts)
    if field.kind is dict:
        return _mapping(field, texts)
    if field.kind is tuple:
        return _sequence(field, texts)
    if field.is_bool:
        return TRUTH.get(texts[-1].lower(), texts[-1])
    return None if field.optional and field.kind is not str and texts[-1].lower() in ("none", "null") else texts[-1]


def _named(field: FieldRef, texts: Sequence[str]) -> str | dict[str, str]:
    pairs = [(found[1], found[2]) for text in texts if (found := _NAME_AND_PATH.fullmatch(text))]
    if len(texts) == 1 and not pairs:
        return texts[0]
    if len({name for name, _ in pairs}) < len(texts):
        raise SettingsError(f"{field.flag}: expected {field.expected()}; got {', '.join(texts)}")
    return dict(pairs)


def _mapping(field: FieldRef, texts: Sequence[str]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if text.lstrip().startswith("{"):
            out.update(_json(field, text))
        elif not equals or not key:
            raise SettingsError(f"{field.flag}: expected {field.expected()}; got {text!r:.200}")
        else:
            out[key.strip()] = json_or_text(value)
    return out


def _sequence(field: FieldRef, texts: Sequence[str]) -> list[Any] | None:
    if field.optional and list(texts) == ["none"]:
        return None
    out: list[Any] = []
    for text in texts:
        read = json_or_text(text) if text.lstrip().startswith("[") else text
        if isinstance(read, list):
            out.extend(read)
        elif read is text and text.lstrip().startswith("[") and str not in typing.get_args(field.members[0]):
            _json(field, text)
        else:
            out.append(read)
    return out


def _json(field: FieldRef, text: str) -> Any:
    what, got = f"{field.flag}: not valid JSON", f"got {text!r:.200}"
    with raised_as(SettingsError, what, ValueError, RecursionError, shown=" ({})", remedy=got):
        return json.loads(text)


_CONDITION = re.compile(r"(!?)(\w+)(!?=|>|)([^|]*)")


def holds(needs: str, values: Mapping[str, Any]) -> bool:
    """Return true if a condition holds: `a|b` or, `!a` not, `a>1` greater, `a=x` equal, `a!=x` not equal."""
    for without, name, sign, wanted in _CONDITION.findall(needs):
        value = values.get(name)
        number = json_or_text(value) if isinstance(value, str) else value
        match sign:
            case ">":
                found = isinstance(number, int | float) and number > float(wanted)
            case "":
                found = bool(number) and number != "None"
            case _:
                found = (str(value) == wanted) == (sign == "=")
        if found != bool(without):
            return True
    return False
