"""Functions that the graders of short answers share: they read a response and a label in linear time.

1. Reasoning between tags is not part of the answer. Reasoning that never ends leaves no answer.
2. A label has one or more accepted answers. A label without any is an error in the data, never a zero."""

import json
import math
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from agentrl.errors import GraderFailure

_THOUGHT = r"(?:\w{1,20}[:_])?(?:think|thinking|thought|thoughts|reasoning|reason|scratchpad|analysis|reflection)(?:_\w{1,20})?"
_OPENED = rf"<\|?(?!/|end_){_THOUGHT}(?:\s+\w+=[^<>]{{0,60}})?\s?\|?>|◁think▷|<\|channel\|?>(?!\s*final)"
_CLOSED = rf"<\|?(?:/|end_){_THOUGHT}\s?\|?>|◁/think▷|###\s?Response"
"""Marks of reasoning besides those of the chat parsers."""
_FINAL_CHANNEL = "<|channel|>final<|message|>"
_TURN = re.compile(r"<\|im_start\|>assistant|<\|start_header_id\|>assistant<\|end_header_id\|>|<start_of_turn>model")
_TURN_END = re.compile(
    r"<\|(?:im_end|endoftext|eot_id|eom_id|end_of_text|im_start)\|>|</s>\s*(?:\Z|(?=\n))|<eos>|<end_of_turn>|<｜end▁of▁sentence｜>"
)
_CONTROL = re.compile(r"<\|[a-z_]{1,32}\|>|^<s>|</s>$|<(?:eos|pad|end_of_turn)>|<｜(?:begin|end)▁of▁sentence｜>")
_ANSWER_TAG = re.compile(r"(?i)<(/?)answer>")
_LABEL_FIELDS = ("target", "ground_truth", "golden_answers", "answers", "answer", "text", "label")
_MAX_NFKC = 10_000
"""Maximum characters for NFKC, which can take quadratic time on combining marks. Short answers are never so long."""
_FOREIGN_DIGIT = re.compile(r"(?![0-9])\d")


def without_control(text: str) -> str:
    """Remove control tokens of chat templates, and white space around the text."""
    return _CONTROL.sub("", text).strip()


def after_reasoning(response: str, *, control: bool = False) -> str:
    """Return the text after the reasoning, or the text before it if nothing follows. Control tokens stay only with
    `control`. Reasoning that is opened and not closed leaves no answer."""
    response = response.rpartition(_FINAL_CHANNEL)[2]
    response = response[max((turn.end() for turn in _TURN.finditer(response)), default=0) :].lstrip()
    ended = _TURN_END.search(response, 1)
    response = response[: ended.start() if ended else None]
    opened, closed = _reasoning()
    end = max((mark.end() for mark in closed.finditer(response)), default=0)
    first = opened.search(response)
    if opened.search(response[end:]) is not None:
        return ""
    rest = response[end:] if without_control(response[end:]) or first is None else response[: first.start()]
    return rest if control else without_control(rest)


@lru_cache(1)
def _reasoning() -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return patterns of the marks that open and close reasoning, in formats of the chat parsers and others."""
    from agentrl.chat.parsers.base import TAGS

    marks = {_OPENED: [tags.open for tags in TAGS], _CLOSED: [tags.close for tags in TAGS]}
    opened, closed = ("|".join([own, *(re.escape(tag.strip()) for tag in tags)]) for own, tags in marks.items())
    return re.compile(f"(?i){opened}"), re.compile(f"(?i){closed}")


def answer_blocks(text: str) -> list[tuple[int, str]]:
    """Return position and content of each closed `<answer>...</answer>`. A second opening tag restarts the block."""
    tags = pairwise(_ANSWER_TAG.finditer(text))
    return [(a.end(), text[a.end() : b.start()].strip()) for a, b in tags if not a.group(1) and b.group(1)]


def unwrapped(response: str) -> str:
    """Return the text after the reasoning, or its content if the whole text is one `<answer>` block."""
    answer = after_reasoning(response)
    wrapped = answer.lower().startswith("<answer>") and answer.lower().endswith("</answer>")
    blocks = answer_blocks(answer) if wrapped else []
    return blocks[0][1] if len(blocks) == 1 else answer


def compose(text: str) -> str:
    """Apply NFKC (full-width letters, ligatures, no-break spaces), and write all digits in ASCII."""
    plain = unicodedata.normalize("NFKC", text) if len(text) <= _MAX_NFKC else text
    return _FOREIGN_DIGIT.sub(lambda digit: str(int(digit[0])), plain)


def clip(text: str, most: int = 500) -> str:
    """Truncate a text to `most` characters for a report."""
    return text if len(text) <= most else text[: most - 1] + "…"


def golds(label: Any, grader: str) -> list[str]:
    """Return the accepted answers of a label: at least one, none empty. A label is a text, a number, a list of them, a
    JSON list as text, an array, or a mapping with one of the fields target (Search-R1), ground_truth, golden_answers,
    answers, answer, text (SQuAD), label. A bool accepts "yes" and "true", or "no" and "false". Raises GraderFailure:
    the label has no usable answer."""
    if not (found := [text for text in _texts(label, label, grader, depth=0) if text.strip()]):
        raise bad_label(grader, "at least one accepted answer that is not empty", label)
    return found


def bad_label(grader: str, expected: str, label: Any) -> GraderFailure:
    wrong = f"{grader}: the label must be {expected}, got {type(label).__name__} {repr(label)[:200]}"
    remedy = "check the label, or which field of the data it is read from"
    return GraderFailure(f"{wrong}; {remedy}", kind="grader_bad_label")


def bad_metadata(grader: str, field: str, expected: str, value: Any) -> GraderFailure:
    wrong = f"{grader}: metadata {field} must be {expected}, got {type(value).__name__} {repr(value)[:200]}"
    return GraderFailure(wrong, kind="grader_bad_metadata")


def flag(metadata: Mapping[str, Any], field: str, grader: str) -> bool:
    """Return a bool of the metadata; false if it is missing."""
    if not isinstance(value := metadata.get(field, False), bool):
        raise bad_metadata(grader, field, "true or false", value)
    return value


def one_of(metadata: Mapping[str, Any], field: str, known: Sequence[str], grader: str) -> str:
    """Return a field of the metadata that must be a known text; the first known text if it is missing or null."""
    value = known[0] if metadata.get(field) is None else metadata[field]
    if value not in known:
        raise bad_metadata(grader, field, f"one of {', '.join(known)}", value)
    return str(value)


def number(metadata: Mapping[str, Any], field: str, default: float, grader: str) -> float:
    if (value := finite(given := metadata.get(field, default))) is None:
        raise bad_metadata(grader, field, "a finite number", given)
    return value


def finite(value: Any) -> float | None:
    """Return a finite number as a float; None for any other value, bools included."""
    plain = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if plain and -1e300 < value < 1e300 else None


def mappings(value: Any, field: str, expected: str, grader: str) -> Sequence[Mapping[str, Any]]:
    """Return the value of a metadata field that must be a list of mappings."""
    if isinstance(value, Sequence) and not isinstance(value, str) and all(isinstance(one, Mapping) for one in value):
        return value
    raise bad_metadata(grader, field, expected, value)


def _texts(part: Any, label: Any, grader: str, depth: int) -> Iterator[str]:
    inner: Any = None
    match part:
        case bool():
            yield from ("yes", "true") if part else ("no", "false")
        case int() if part.bit_length() < 4_000:
            yield str(part)
        case float() if math.isfinite(part):
            yield str(part)
        case str() if depth >= 3 or not (inner := _json_list(part)):
            yield part
        case str() | list() | tuple() | set() | frozenset() if depth < 3:
            for one in inner or part:
                yield from _texts(one, label, grader, depth + 1)
        case Mapping() if depth < 3 and (inner := [part[name] for name in _LABEL_FIELDS if name in part]):
            yield from _texts(inner[0], label, grader, depth + 1)
        case _ if depth < 3 and hasattr(part, "tolist"):
            yield from _texts(part.tolist(), label, grader, depth + 1)
        case _:
            raise bad_label(grader, "a text, a number, a list of them, or a mapping with the field target", label)


def _json_list(text: str) -> list[str]:
    """Return the texts of a JSON list of texts, or an empty list for any other text."""
    body = text.strip()
    with suppress(ValueError, RecursionError):
        said = json.loads(body) if body.startswith('["') and body.endswith('"]') else [None]
        if all(isinstance(item, str) for item in said):
            return list(said)
    return []


_TOKEN = re.compile(r"(?s)(?:\\{1,4}|\x08)(?:boxed|fbox|oxed)(?![A-Za-z])\s*(\{)?|\\.|[{}]")
"""`\x08oxed` is what a JSON or Python string makes of `\boxed` with a single backslash."""
_BARE = re.compile(r"(?:[-+.−]?\d|[\\($]|[A-Za-z](?![A-Za-z]))[^\s$]{0,60}")
_FORGOTTEN = re.compile(r"([^\n$]{1,200}?)(?:\$|\\\]|\\\)|\n)")
_DOUBLED = re.compile(r"\\\\(?!\\)")
_NESTED = re.compile(r"(?s)\\(?:boxed|fbox)\s*\{(.*)\}")


class Box(NamedTuple):
    """The position and the content of a box; `complete` is false if the end of the text truncates the box."""

    start: int
    end: int
    text: str
    complete: bool = True


def boxes(text: str) -> list[Box]:
    """Return the boxes with content, in order. If the text ends inside a box, that truncated box is the last."""
    spans: list[tuple[int, int, int, int]] = []  # start and end of the box and of its content
    opened: list[tuple[int, int] | None] = []
    for token in _TOKEN.finditer(text):
        if token.group() == "{":
            opened.append(None)
        elif token.group() == "}":
            if opened and (box := opened.pop()) is not None:
                while spans and spans[-1][0] >= box[0]:
                    spans.pop()
                spans.append((box[0], token.end(), box[1], token.start()))
        elif token.group(1):
            opened.append((token.start(), token.end()))
        elif "box" in token.group() and (word := _BARE.match(text, token.end())):
            spans.append((token.start(), word.end(), *word.span()))
    found = [Box(start, end, text[a:b].strip()) for start, end, a, b in spans if text[a:b].strip()]
    if not (unclosed := [box for box in opened if box is not None]):
        return found
    start, inside = unclosed[-1]
    ended = _FORGOTTEN.match(text, inside)
    if ended is None or not (content := ended.group(1).strip().rstrip(".")):
        return [*found, Box(start, len(text), text[inside:].strip(), complete=False)]
    content += "}" * (content.count("{") - content.count("}"))
    others = [box for box in found if box.end <= start or box.start >= ended.end()]
    return sorted([*others, Box(start, ended.end(), content)])


def last_box(text: str) -> str | None:
    r"""Return the content of the last complete `\boxed{...}` or `\fbox{...}`; None if there is none."""
    if (last := next((box for box in reversed(boxes(text)) if box.complete), None)) is None:
        return None
    content = last.text
    while (nested := _NESTED.fullmatch(content)) is not None:
        content = nested.group(1).strip()
    return content.replace("\\\\", "\\") if _DOUBLED.match(text, last.start) else content
