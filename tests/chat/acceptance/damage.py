"""Truncated or damaged outputs, the same in each run, and the calls that may still be read from them."""

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.chat.acceptance.table import Format, Output

TAG = re.compile(r"<[^<>\n]{1,60}>|\[/?[A-Z_]{4,}\]")
STRUCTURE = "[](){},:="
ROLES = (
    "<|im_end|>", "<|im_start|>user\n", "<|eot_id|>", "</s>", "[/INST]", "<｜end▁of▁sentence｜>", "<｜User｜>", "<turn|>",
    "<|end|><|start|>user<|message|>", "<|call|>", "<|user|>", "\x00", "\ufffd",
)  # fmt: skip
KINDS = ("cut", "beheaded", "doubled", "dropped", "nested", "unstructured", "roles", "repeated")


@dataclass(frozen=True)
class Damaged:
    """A damaged output: `stray` is the text that was inserted or removed, "" for a cut."""

    kind: str
    output: Output
    text: str
    stray: str


def damaged(row: Format, outputs: list[Output], count: int = 200) -> Iterator[Damaged]:
    """Yield `count` damaged texts of a format's outputs with calls. The format's name seeds the generator."""
    rng = random.Random(row.parser)
    originals = [output for output in outputs if output.calls and output.complete]
    for number in range(count):
        output = originals[number % len(originals)]
        kind = KINDS[(number // len(originals) + number % len(originals)) % len(KINDS)]
        if kind in ("beheaded", "dropped", "nested") and TAG.search(json.dumps(output.calls, ensure_ascii=False)):
            kind = "cut"  # an argument quotes a call, and the rest may be that call
        text, stray = damage(row, kind, output.text, rng)
        yield Damaged(kind, output, text, stray)


def damage(row: Format, kind: str, text: str, rng: random.Random) -> tuple[str, str]:
    """Return the damaged text, and the text that was inserted or removed."""
    tags = list(TAG.finditer(text))
    places = _structure(row, text)
    if kind == "unstructured" and places:
        at = rng.choice(places)
        return text[:at] + text[at + 1 :], ""
    if kind == "roles":
        at, role = rng.randrange(len(text) + 1), rng.choice(ROLES)
        return text[:at] + role + text[at:], role
    if kind == "beheaded":
        return text[rng.randrange(1, len(text)) :], ""
    if kind in ("cut", "unstructured") or not tags:
        return text[: rng.randrange(1, len(text))], ""
    tag = rng.choice(tags)
    before, mark, after = text[: tag.start()], tag[0], text[tag.end() :]
    if kind == "dropped":
        return before + after, mark
    if kind == "nested":
        return before + mark + text + after, text
    return before + mark * (2 if kind == "doubled" else 200) + after, mark


def _structure(row: Format, text: str) -> list[int]:
    """Return the places where JSON or Python has a structural character outside its strings, or a quote. Without it the
    call is broken. Places are left out if two words or numbers would meet there."""
    if not row.quotes:
        return []
    start, quote, escaped, places = max(text.find(row.begins), 0), "", False, []
    for at, char in enumerate(text[start:], start):
        if escaped or (quote and char == "\\"):
            escaped = not escaped
        elif char == quote or (not quote and char in row.quotes):
            quote = "" if quote else char
            places.append(at)
        elif not quote and char in STRUCTURE and not re.fullmatch(r"\w\w", text[at - 1 : at] + text[at + 1 : at + 2]):
            places.append(at)
    return places


def invented(found: Damaged, calls: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return the calls that were read but are not in the original.

    1. Inserted text may be in a call's text, and types do not count: `3<|im_end|>` is no integer any more.
    2. A control token may fall into a tag, which turns the tag into text.
    """
    known = [_bare(call, found) for call in found.output.calls or []]
    return [call for call in calls if _bare(call, found) not in known]


def _bare(value: Any, found: Damaged) -> Any:
    """Return the value without the inserted or removed text, its scalars as text."""
    if isinstance(value, dict):
        return {_bare(key, found): _bare(inner, found) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_bare(inner, found) for inner in value]
    text = value if isinstance(value, str) else json.dumps(value)
    text = text.replace(found.stray, "") if found.stray else text
    text = (TAG.sub("", text) if found.kind == "roles" else text).strip()
    try:
        inner = json.loads(text)
    except ValueError:
        return {"True": "true", "False": "false", "None": "null"}.get(text, text)
    return _bare(inner, found) if isinstance(inner, dict | list) else text
