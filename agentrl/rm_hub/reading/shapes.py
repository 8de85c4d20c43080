r"""Reads the outer form of an answer (single value, list, set, tuple, interval, union or matrix) and its name.

1. `shape(text)` reads only brackets, separators and equals signs at the top level of a cleaned text.
2. `\pm` becomes two items. `a = b = c` has the name `a` and the value `c`. A matrix keeps its rows.
3. `without_frame` drops optional text around an answer: `k \in Z` after it, a modulus. If two texts have different
   ones (`k \in Z` and `k \in N`, two moduli), the answers differ."""

import re
from itertools import accumulate
from typing import Literal, NamedTuple

Kind = Literal["one", "list", "set", "brackets", "union", "matrix"]

_OPEN = {r"\{": r"\}", r"\langle": r"\rangle", "(": ")", "[": "]", "{": "}", "<": ">"}
_CLOSE = set(_OPEN.values())
_AND = {",", ";", "and", "or", "oder", "ou", "или", "и", "或", "和"}
_TOKEN = re.compile(r"(?i)\\[a-zA-Z]+|\\.|[()\[\]{}]|,|;|=|\band\b|\bor\b|\boder\b|\bou\b|\bили\b|\bи\b|或|和")
_MATRIX = re.compile(r"(?s)^\\begin\{([bpBvV]?matrix|smallmatrix|array)\}(?:\{[^{}]*\})?(.*)\\end\{\1\}$")
_RELATION = re.compile(r"\\(?:le|ge|ne|equiv|sim|leq|geq)(?![a-zA-Z])|[<>]")
_NAME = re.compile(r"^[^0-9+*/^=<>|\\]{1,40}$|^\|[A-Z]{2}\|$")
_SYMBOL = re.compile(r"^\\?[A-Za-z]+'*(?:\s*_\s*(?:\{[^{}]*\}|\w))?(?:\s*\([^()]*\))?'*$")
_OUTWARD = re.compile(r"^([\](\[])([^\[\](){}]{1,60}[,;][^\[\](){}]{1,60})([\])\[])$")
_ROW_END = re.compile(r"\\\\|\\(?=\s*-?\d)")
"""Also matches `\\6` for `\\\\ 6`, a row end whose second backslash was lost in JSON."""
_CHAIN = re.compile(r"(\\le(?![a-zA-Z])|\\ge(?![a-zA-Z])|<|>)")
_GROWING, _FALLING = {"<", r"\le"}, {">", r"\ge"}
MAX_ITEMS = 40


class AnswerShape(NamedTuple):
    """The structure of an answer."""

    kind: Kind  # "brackets" is a tuple, an interval or a vector, told apart by `fence`
    text: str  # cleaned, without its name
    items: tuple["AnswerShape", ...] = ()  # the parts; empty for "one"
    fence: str = ""  # the brackets of "brackets" ("(]") and the environment of a matrix
    name: str = ""  # the name to which the answer gives a value ("x", "f(x)"), or ""
    columns: int = 0  # number of columns of a matrix; its items are in row-major order


def shape(text: str, depth: int = 0) -> AnswerShape:
    text = _OUTWARD.sub(_inward, text.strip())
    if depth > 4:
        return AnswerShape("one", text)
    if (matrix := _matrix(text)) is not None:
        return matrix
    # x = 3, y = 4: separators split before equals signs. (x, y) = (3, 4): commas in brackets do not split.
    parts = _split(text, {";"})
    if len(parts) < 2 or not all("," in part for part in parts):
        parts = _split(text, _AND)
    if 1 < len(parts) <= MAX_ITEMS and (items := _items(parts, depth)):
        return AnswerShape("list", text, items)
    name, value = _named(text)
    if name:
        return shape(value, depth + 1)._replace(name=name)
    if len(parts := _split(text, {r"\cup"})) > 1:
        return AnswerShape("union", text, tuple(shape(part, depth + 1) for part in parts))
    if (fenced := _fenced(text)) is not None:
        opening, inside, closing = fenced
        parts = [part for part in _split(inside, {",", ";"}) if part.strip()]
        items = _items(parts, depth) or tuple(shape(part, depth + 1) for part in parts)
        if opening == r"\{" or (opening == "{" and len(items) > 1):  # in plain text, braces mean a set
            return AnswerShape("set", text, items)
        if opening in ("(", "{") and len(items) == 1:
            return items[0]
        if 2 <= len(parts) <= MAX_ITEMS:
            return AnswerShape("brackets", text, tuple(shape(part, depth + 1) for part in parts), opening + closing)
    if text.count(r"\pm") == 1 and r"\mp" not in text:
        both = (text.replace(r"\pm", sign).strip().lstrip("+").strip() for sign in "+-")
        return AnswerShape("list", text, tuple(AnswerShape("one", one) for one in both))
    return AnswerShape("one", text)


def _inward(interval: re.Match[str]) -> str:
    """Rewrite an interval in French notation: `]1, 2]` becomes `(1, 2]`."""
    opening, inside, closing = interval.groups()
    return f"{'(' if opening == ']' else opening}{inside}{')' if closing == '[' else closing}"


def _items(parts: list[str], depth: int) -> tuple[AnswerShape, ...]:
    """Return the items of a list without empty parts; a \\pm gives two items. Fewer than two items give ()."""
    shapes = [shape(part, depth + 1) for part in parts if part.strip()]
    flat = [one for item in shapes for one in (item.items if item.kind == "list" and r"\pm" in item.text else (item,))]
    return tuple(flat) if len(flat) > 1 else ()


def _matrix(text: str) -> AnswerShape | None:
    if (match := _MATRIX.match(text)) is None or r"\begin" in match.group(2):
        return None
    rows = [row.split("&") for row in _ROW_END.split(match.group(2)) if row.strip()]
    if not rows or len({len(row) for row in rows}) != 1 or len(rows) * len(rows[0]) > 100:
        return None
    fence = "det" if match.group(1) in {"vmatrix", "Vmatrix"} else ""
    cells = tuple(AnswerShape("one", cell.strip()) for row in rows for cell in row)
    return AnswerShape("matrix", text, cells, fence, columns=len(rows[0]))


def _named(text: str) -> tuple[str, str]:
    r"""Return (name, value) of `x = 5`, `x \in A`, `A = B = 5`, `2 + 3 = 5`; ("", text) if there is no such split."""
    parts = [] if _RELATION.search(text) else _split(text, {"=", r"\in", r"\approx"})
    if len(parts) < 2 or not parts[-1].strip():
        return "", text
    first, last = parts[0].strip(), parts[-1].strip()
    # The exact value comes first, unless the first part is only a name.
    exact = _split(text, {r"\approx"})[0].strip()
    if r"\approx" in text and re.search(r"\d", exact) and not is_symbol(exact):
        name, value = _named(exact)
        return name or "value", value
    if len(parts) == 2 and re.fullmatch(r"-?[\d./]+", first) and re.fullmatch(r"[a-zA-Z]", last):
        return last, first
    return first or "value", last


def is_symbol(name: str) -> bool:
    """Return true if a name is a variable or a function of variables, and not words or an expression."""
    return _SYMBOL.match(name.strip()) is not None


def is_name(name: str) -> bool:
    """Return true if the left side of an equals sign only names the value."""
    name = name.strip()
    bare = re.sub(r"_\s*(?:\{[^{}]*\}|\w)", "", name)
    return not name.startswith("-") and (
        _NAME.match(name) is not None
        or re.fullmatch(r"[^\d+*^=<>-]{1,60}", bare) is not None
        or is_symbol(name)
        or not re.search(r"[a-zA-Z]", re.sub(r"\\[a-zA-Z]+", "", name))
        or re.match(r"^\\?[({\[].*[)}\]]$", name) is not None
    )


def _fenced(text: str) -> tuple[str, str, str] | None:
    """Return (opening, inside, closing) if one pair of brackets encloses the whole text, else None."""
    opening = next((opening for opening in _OPEN if text.startswith(opening)), None)
    closing = next((closing for closing in _OPEN.values() if text.endswith(closing)), None)
    if opening is None or closing is None or not (closing == _OPEN[opening] or {opening, closing} <= set("()[]")):
        return None
    inside = text[len(opening) : len(text) - len(closing)]
    tokens = (token.group() for token in _TOKEN.finditer(inside))
    depths = list(accumulate(((token in _OPEN) - (token in _CLOSE) for token in tokens), initial=0))
    return (opening, inside, closing) if min(depths) == depths[-1] == 0 else None


def _split(text: str, separators: set[str]) -> list[str]:
    """Split the text at the separators outside all brackets."""
    parts: list[str] = []
    depth = start = 0
    for match in _TOKEN.finditer(text):
        token = match.group().lower() if match.group().isalpha() else match.group()
        if token in _OPEN:
            depth += 1
        elif token in _CLOSE:
            depth -= 1
        elif depth == 0 and token in separators and not _inside_number(text, match.start(), token):
            parts.append(text[start : match.start()])
            start = match.end()
    return [*parts, text[start:]] if depth == 0 else [text]


def _inside_number(text: str, at: int, token: str) -> bool:
    """Return true if a comma groups digits (1,234, not 1, 234 or 0,234), or an `=` belongs to `<=`, `>=` or `!=`."""
    if token == "=":
        return at > 0 and text[at - 1] in "<>!"
    return (
        token == ","
        and re.match(r",\d{3}(?!\d)", text[at : at + 5]) is not None
        and re.search(r"(?<![\d.])[1-9]\d{0,2}(?:,\d{3})*$", text[max(0, at - 24) : at]) is not None
    )


def interval(text: str) -> str | None:
    r"""Return the interval of one inequality or chain in one variable: 1 < x \le 2, x > 3; None for other texts."""
    parts = [part.strip() for part in _CHAIN.split(text)]
    if len(parts) == 3:
        # x < 3 becomes a chain from minus infinity; 3 < x becomes a chain to infinity.
        growing = parts[1] in _GROWING
        if is_symbol(parts[0]) and parts[2]:
            parts = [r"-\infty" if growing else r"\infty", "<" if growing else ">", *parts]
        elif is_symbol(parts[2]) and parts[0]:
            parts = [*parts, "<" if growing else ">", r"\infty" if growing else r"-\infty"]
    if len(parts) != 5 or not is_symbol(parts[2]):
        return None
    low, first, _, second, high = parts
    if {first, second} <= _FALLING:
        low, first, second, high = high, second, first, low
    elif not {first, second} <= _GROWING:
        return None
    return f"{'(' if first in '<>' else '['}{low},{high}{')' if second in '<>' else ']'}"


_MODULUS = re.compile(r"\s*(?:\\pmod|\(?\s*\\?\bb?mod\b)\s*\{?\s*(\d+)\s*\}?\s*\)?$")
_FOR = r"\s*[,;:(]?\s*(?:(?:where|for|with|if|when|provided)\s+)?"
_LETTER = r"(?<![a-zA-Z\\])(?P<name>[a-z])"
_IN_A_SET = re.compile(
    rf"{_FOR}(?:(?:all|any|every|some|each|an)\s+|\\forall\s*)?{_LETTER}(?:\s*,\s*(?!(?P=name))[a-z])?\s*\\in\s*"
    r"(?:\\mathbb\s*\{?\s*(?P<set>[ZNRQ])\s*\}?|(?P<plain>[ZNRQ]))(?:\^\S|_\S+)?\s*\)?$"
)
_OF = re.compile(r"^([a-zA-Z])\s*\(\s*([a-z])\s*\)\s*=(?!=)")


def without_frame(gold: str, got: str) -> tuple[str, str] | None:
    """Return both without optional text that only one has around the answer, and with the same names of parameters and
    function variables (`f(x) = x`, `f(t) = t`). Return None if their moduli differ."""
    first, second = _OF.match(gold), _OF.match(got)
    if first and second and first[1] == second[1]:
        here, there = first[2], second[2]
        swapped = str.maketrans(here + there, there + here)
        got = _letter(f"[{here}{there}]").sub(lambda letter: letter.group().translate(swapped), got)
    gold, got = _quantified(gold, got)
    if (moduli := [_MODULUS.search(text) for text in (gold, got)]) == [None, None]:
        return gold, got
    if len({found[1] for found in moduli if found is not None}) > 1:
        return None
    gold, got = (_MODULUS.sub("", text) for text in (gold, got))
    if r"\equiv" in got or r"\equiv" not in gold:
        gold, got = (text.rpartition(r"\equiv")[2].strip() for text in (gold, got))
    return gold, got


def _quantified(gold: str, got: str) -> tuple[str, str]:
    first, second = _parameter(gold), _parameter(got)
    if first is None:
        unsaid = second is not None and r"\in" not in gold and r"\ne" not in gold
        return gold, second[0] if second is not None and unsaid else got
    if second is None:
        unsaid = r"\in" not in got and all(_letter(first[1]).search(text) for text in (first[0], got))
        return first[0] if unsaid else gold, got
    rest, name, of = second
    if first[2] != of or (first[1] != name and _letter(first[1]).search(rest) is not None):
        return gold, got
    return first[0], _letter(name).sub(first[1], rest)


def _parameter(text: str) -> tuple[str, str, str] | None:
    """Return (text before, name, set) of `..., k \\in Z`; None if the text has no such end."""
    found = _IN_A_SET.search(text)
    rest = text[: found.start()].strip(" ,;") if found else ""
    if found is None or not rest or re.search(r"(?:<|>|\\le|\\ge|\\ne)(?![a-zA-Z])", rest):
        return None
    return rest, found["name"], found["set"] or found["plain"]


def _letter(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![a-zA-Z\\]){name}(?![a-zA-Z])")
