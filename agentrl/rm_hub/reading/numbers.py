r"""Reads numbers as people and models write them, exactly and without a computer-algebra system.

1. `read(text)` reads a cleaned text (`latex.clean`) that is one number, perhaps with a unit. Other texts give None.
2. `same(label, answer)` is true for equal values, an answer that rounds to a rounded LABEL, and an answer that rounds
   an exact label at many decimals."""

import re
from fractions import Fraction
from typing import NamedTuple

from agentrl.rm_hub.reading.words import NO_UNIT, Unit, find_unit

_PLAIN = (
    r"(?:[1-9]\d{0,2}(?:,\d{3})+(?!\d)|\d{1,2}(?:,\d{2})+,\d{3}(?!\d)|\d{1,3}(?:[ ]\d{3})+(?!\d)|\d{1,3}(?:'\d{3})+(?!\d)"
    r"|\d{1,3}(?:_\d{3})+(?!\d)|\d+)(?:\.\d+|\.(?!\d))?|\.\d+"
)
_SIGNED = rf"[+-]?\s*(?:{_PLAIN})"
_FORMS = re.compile(
    rf"""\s*(?P<sign>[+-]?)\s*(?:
      (?P<repeat>\d*\.\d*)\\(?:overline|bar|dot)\s*\{{?(?P<period>\d+)\}}?
    | (?:(?P<whole>\d+)(?:\s*(?:and|\+|&)\s*|\s*))?\\frac\{{\s*(?P<above>{_SIGNED})\s*\}}\{{\s*(?P<below>{_SIGNED})\s*\}}
    | (?P<whole2>\d+)(?:\s+and\s+|\s+|-)(?P<above2>\d+)\s*/\s*(?P<below2>\d+)
    | \(?(?P<above3>{_PLAIN})\)?\s*/\s*\(?(?P<below3>[+-]?(?:{_PLAIN}))\)?
    | (?P<mantissa>{_PLAIN})(?:\s*(?:\\times|\\cdot|\*|x|X)\s*10\s*\^\s*\{{?\s*|[eE])(?P<tens>[+-]?\d{{1,3}})(?![\d.])\s*\}}?
    | (?P<base>\d{{1,6}})\s*\^\s*(?:\{{\s*(?P<power>-?\d{{1,4}})\s*\}}|(?P<digit>\d))(?!\d)
    | (?P<plain>{_PLAIN})(?:\s*\\ldots)?
    )""",
    re.VERBOSE,
)
_COMMA = re.compile(r"^([+-]?)\s*(\d{1,3}(?:[. ]\d{3})+|\d+),(\d+)(?!\d)")
_SMALL = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_WORDS = {word: n for n, word in enumerate(_SMALL.split())} | {word: n * 10 for n, word in enumerate(_TENS.split(), 2)}
_SCALES = {
    "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12, "k": 1000,
    "千": 10**3, "万": 10**4, "亿": 10**8,
}  # fmt: skip
_SCALE = re.compile(r"(?i)\s*(hundred|thousand|million|billion|trillion|dozen|k(?![a-z]))\b|\s*([千万亿])")
_PERCENT = re.compile(r"(?i)\s*(?:%|percent(?:age)?(?:\s+points?)?\b|per cent\b|pct\b)")
_MAX_BITS = 4000
_EXACT_PLACES = 6  # minimum decimals of an answer that may round an exact label which is a fraction


class Number(NamedTuple):
    """A number as written: its value, digits after the point (None for exact forms), percent sign, scale word and unit."""

    value: Fraction
    decimals: int | None = None
    percent: bool = False
    scale: int = 1
    unit: Unit = NO_UNIT


def read(text: str, comma_is_point: bool = False) -> Number | None:
    """Read a cleaned text that is one number, else return None. `comma_is_point` reads `1.234,5` as 1234.5."""
    text = text.strip()
    if len(text) > 300:
        return None
    if comma_is_point:
        text = _COMMA.sub(lambda match: f"{match[1]}{re.sub('[. ]', '', match[2])}.{match[3]}", text)
    if (match := _FORMS.match(text)) is None:
        return _spelled(text)
    part = match.groupdict()
    decimals: int | None = None
    if part["period"]:
        whole, _, places = part["repeat"].partition(".")
        again = Fraction(int(part["period"]), 10 ** len(part["period"]) - 1)
        value = int(whole or "0") + (int(places or "0") + again) / 10 ** len(places)
    elif over := part["above"] or part["above2"] or part["above3"]:
        whole = part["whole"] or part["whole2"]
        above, below = _plain(over)[0], _plain(part["below"] or part["below2"] or part["below3"])[0]
        if below == 0 or (whole and (above < 0 or below < 0)):
            return None
        value = Fraction(whole or 0) + above / below
    elif part["mantissa"]:
        tens = int(part["tens"])
        mantissa, digits = _plain(part["mantissa"])
        value = mantissa * Fraction(10) ** tens
        decimals = max(digits - tens, 0) if digits else None
    elif part["base"]:
        base, power = int(part["base"]), int(part["power"] or part["digit"])
        if base.bit_length() * abs(power) > _MAX_BITS or (base == 0 and power < 0):
            return None
        value = Fraction(base) ** power
    else:
        value, digits = _plain(part["plain"])
        decimals = digits or None
    return _finish(-value if part["sign"] == "-" else value, decimals, text[match.end() :])


def same(label: Number, answer: Number) -> bool:
    """Return true if `answer` is the number that `label` means. Not symmetric if one of them is rounded."""
    first, second = label.unit, answer.unit
    if first.kind and second.kind and first.name != second.name:
        if first.kind != second.kind or first.kind in {"square", "cubic"}:
            return False
        return label.value * label.scale * first.factor == answer.value * answer.scale * second.factor
    if not first.name and label.decimals and second.name == "cent":
        return label.value in (answer.value / 100, answer.value)
    if label.percent != answer.percent:
        if first.kind or second.kind:
            return False
        signed, bare = (label, answer) if label.percent else (answer, label)
        usual = label.percent or label.value.denominator != 1 or abs(label.value) <= 2
        if usual and signed.value / 100 == bare.value:
            return True
        if answer.percent and 0 < abs(label.value) < 1:
            return False
    if label.scale != answer.scale:
        return label.value * label.scale == answer.value * answer.scale
    if label.value == answer.value:
        return True
    # Accept a rounded number that a reader takes for the same answer.
    off = abs(answer.value - label.value)
    if label.decimals is not None and label.decimals >= 2:
        # A label such as 3.75 is probably exact; a label such as 2.33 is probably rounded.
        exact = int(abs(label.value) * 10**label.decimals) % 5 == 0
        if answer.decimals is not None and answer.decimals < label.decimals + (4 if exact else 1):
            return False
        return off <= Fraction(1, 2 * 10**label.decimals)
    enough = _EXACT_PLACES if label.value.denominator != 1 else 9
    if answer.decimals is None or answer.decimals < enough:
        return False
    return off < Fraction(6, 10 ** (answer.decimals + 1)) + Fraction(1, 10**12)


def _plain(text: str) -> tuple[Fraction, int]:
    """Return the value and the number of decimals of a plain number, with or without separators."""
    text = re.sub(r"[\s,'_]", "", text).removesuffix(".")
    return Fraction(text if text[-1:].isdigit() else text + "0"), len(text.partition(".")[2])


def _finish(value: Fraction, decimals: int | None, rest: str) -> Number | None:
    scale = 1
    if (word := _SCALE.match(rest)) is not None:
        scale, rest = _SCALES[(word.group(1) or word.group(2)).lower()], rest[word.end() :]
    percent = _PERCENT.match(rest)
    unit = find_unit(rest[percent.end() :] if percent else rest)
    return None if unit is None else Number(value, decimals, percent is not None, scale, unit)


_PARTS = {
    "half": 2, "halve": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6, "eighth": 8, "tenth": 10,
}  # fmt: skip


def _spelled(text: str) -> Number | None:
    """Read a number in English words at the start ("twenty-one apples", "three quarters")."""
    if not (tokens := re.findall(r"[a-z]+", text.lower()[:80])) or re.search(r"\d", text):
        return None
    negative = tokens[0] in {"minus", "negative"}
    tokens = tokens[negative:]
    total = current = used = 0
    for used, token in enumerate([*tokens, ""]):
        if token in _WORDS:
            current += _WORDS[token]
        elif token == "hundred" and current:
            current *= 100
        elif token in {"thousand", "million"} and current:
            total, current = total + current * _SCALES[token], 0
        elif not (token == "and" and used and tokens[used - 1] in ("hundred", "thousand")):
            break
    if used == 0:
        return None
    value = Fraction(total + current)
    if (rest := tokens[used:]) and (part := rest[0].removesuffix("s")) in _PARTS:
        value, rest = value / _PARTS[part], rest[1:]
    if rest[:1] == ["and"] or any(word in _WORDS for word in rest):
        return None
    return _finish(-value if negative else value, None, (" " + " ".join(rest)) if rest else "")
