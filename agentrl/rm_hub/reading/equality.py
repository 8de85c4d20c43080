r"""Compares an answer with a label: numbers exactly, words as words, structures part by part, the rest by algebra.

1. The cheap paths come first: equal spelling, equal numbers, equal words. Grade-school answers never load sympy.
2. Order matters in tuples and intervals, not in sets and lists; brackets matter if the label is an interval.
3. An answer that names several different values is not equal to a label with one value."""

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple

from agentrl.rm_hub.reading import numbers, symbolic
from agentrl.rm_hub.reading.latex import clean, squeeze
from agentrl.rm_hub.reading.shapes import AnswerShape, Kind, interval, is_name, is_symbol, shape, without_frame
from agentrl.rm_hub.reading.words import choice, same_words, strip_units, wordy

_BASED = re.compile(r"^\(?([0-9A-Fa-f]+)\)?\s*_\s*\{?\s*\(?(\w+)\)?\s*\}?$")
_COMMA_DECIMAL = re.compile(r"[+-]?\d+,\d+")
_CHAIN_END = re.compile(r",(?!\d{3}(?!\d))|;|and|or")
_CLOCK = re.compile(r"(?i)\d\s*[ap]\.?\s?m\b")
_ANGLE = re.compile(r"(\d+(?:\.\d+)?)\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ)")
_TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")
_OPERATOR = re.compile(r"[-+*/^!]|\\(?:times|cdot|div|binom|[dt]binom)(?![a-zA-Z])")
_SERIES = re.compile(r"\\(?:sum|prod|int|lim)(?![a-zA-Z])")
_PLAIN = re.compile(r"[-\d. ]+")
_MAX_ALGEBRA = 40
_EMPTY = r"\emptyset"
_SPANS = {"brackets", "union"}


class Equality(NamedTuple):
    equal: bool
    reason: str


Budget = Iterator[int]  # yields once for each comparison by algebra that one grade may still make


def compare(label: str, answer: str) -> Equality:
    """Compare two answers as written (LaTeX, text, or both)."""
    gold, got = clean(label), clean(answer)
    if not got:
        return Equality(False, "the answer is empty")
    if squeeze(gold) == squeeze(got):
        return Equality(True, "the same text")
    if (alike := without_frame(gold, got)) is None:
        return Equality(False, "another modulus")
    gold, got = alike
    if squeeze(gold) == squeeze(got):
        return Equality(bool(got.strip()), "the same text")
    chains = ([n for part in chain.split("=") if (n := numbers.read(part))] for chain in _CHAIN_END.split(got))
    if any(not numbers.same(*two) for chain in chains for two in pairwise(chain)):  # such as x = 5 = 6
        return Equality(False, "the answer says that different numbers are equal")
    number = numbers.read(gold)
    if number is None and _COMMA_DECIMAL.fullmatch(gold) and "," not in got and numbers.read(got) is not None:
        number = numbers.read(gold, comma_is_point=True)
    if number is not None:
        # 3,14 is read as a decimal only if the label is a number and not a list.
        if (found := numbers.read(got)) is None and re.fullmatch(r"[+-]?[\d. ]+,\d+\D*", got):
            found = numbers.read(got, comma_is_point=True)
        if found is not None:
            return _verdict(numbers.same(number, found), "equal numbers", "different numbers")
    return _shapes(shape(gold), shape(got), iter(range(_MAX_ALGEBRA)))


def _verdict(equal: bool, same: str, other: str) -> Equality:
    return Equality(equal, same if equal else other)


def _words(gold: str, got: str, otherwise: str = "different words") -> Equality:
    return _verdict(same_words(gold, got), "the same words", otherwise)


def _shapes(gold: AnswerShape, got: AnswerShape, budget: Budget) -> Equality:
    named = _names(gold, got)
    if named == "equation" and got.name:  # the answer must be an equation with the same solutions
        left, right = (f"{part.name} = {part.text}" if part.name else part.text for part in (gold, got))
        return _algebra(left, right, budget)
    if named is not None:
        return Equality(False, named)
    if got.kind in _SPANS and gold.kind not in _SPANS:
        gold = _spans(gold)
    elif gold.kind in _SPANS and got.kind not in _SPANS:
        got = _spans(got)
    if gold.kind == got.kind == "one":
        return _one(gold.text, got.text, budget)
    return _BY_KIND[gold.kind](gold, got, budget)


def _spans(said: AnswerShape) -> AnswerShape:
    """Replace inequalities by the intervals that they describe."""
    if said.kind == "one":
        return shape(interval(said.text) or said.text)
    items = tuple(_spans(item) for item in said.items)
    if said.kind == "list" and r"\cup" not in said.text and all(item.kind == "brackets" for item in items):
        return AnswerShape("union", said.text, items)
    return said


def _names(gold: AnswerShape, got: AnswerShape) -> str | None:
    """Return why the names forbid a comparison of the values ("equation": both are equations), else None."""
    if gold.kind == "one" and "=" in gold.text and not gold.name and got.name:
        return "equation"
    if gold.name and (not is_name(gold.name) or (_PLAIN.fullmatch(gold.name) and re.search("[a-z]", gold.text))):
        return "equation"
    if is_symbol(gold.name) and is_symbol(got.name):
        first, second = squeeze(gold.name), squeeze(got.name)
        functions = "(" in first or "(" in second
        bare = {re.sub(r"_(?:\{\d+\}|\d)$", "", name) for name in (first, second)}
        if first != second and not functions and not (len(bare) == 1 and bare & {first, second}):
            return f"the answer is about {got.name}, the label about {gold.name}"
    return "equation" if got.name and not is_name(got.name) and gold.name else None


def _single(gold: AnswerShape, got: AnswerShape, budget: Budget) -> Equality:
    """Compare a label of one value with another shape. Each of several values must equal the label (1/2 or 0.5)."""
    if got.kind in {"list", "set"} and got.items:
        other = _ratio(gold.text) is not None if got.kind == "list" else same_words(_EMPTY, gold.text)
        same = not other and all(_shapes(gold, item, budget).equal for item in got.items)
        return _verdict(same, "every value given equals the label", "the answer gives several values")
    if got.kind == "set" or wordy(gold.text) or choice(gold.text):
        return _words(gold.text, got.text)
    return _algebra(gold.text, got.text, budget)


def _collection(gold: AnswerShape, got: AnswerShape, budget: Budget) -> Equality:
    if got.kind == "brackets" and gold.kind == "list" and len(gold.items) == len(got.items):
        # (1, 2) for "1, 2": the values must have the order of the label.
        return _in_order(gold, got, budget)
    if (got.kind == "one" and wordy(got.text)) or not gold.items:
        return _words(gold.text, got.text, "the answer is not a list")
    items = got.items if got.kind in {"list", "set"} else (got,)
    names = [squeeze(item.name) for item in gold.items]
    if all(map(is_name, names)) and all(names) and len(set(names)) == len(names):
        # x = 3, y = 4: match by name if the answer names the values, else in order.
        by_name = {squeeze(item.name): item for item in items}
        if set(by_name) == set(names) and len(items) == len(names):
            items = tuple(by_name[name] for name in names)
        return _in_order(gold, got._replace(items=items), budget)
    return _matching(_distinct(gold.items), _distinct(items), budget)


def _distinct(items: tuple[AnswerShape, ...]) -> tuple[AnswerShape, ...]:
    return tuple({squeeze(item.text): item for item in reversed(items)}.values())[::-1]


def _matching(gold: tuple[AnswerShape, ...], got: tuple[AnswerShape, ...], budget: Budget) -> Equality:
    if len(gold) != len(got):
        return Equality(False, f"{len(got)} values for {len(gold)}")
    left = list(got)
    for item in gold:
        match = next((other for other in left if _shapes(item, other, budget).equal), None)
        if match is None:
            return Equality(False, f"{item.text!r} of the label is not in the answer")
        left.remove(match)
    return Equality(True, "the same values")


def _in_order(gold: AnswerShape, got: AnswerShape, budget: Budget) -> Equality:
    if len(gold.items) != len(got.items):
        return Equality(False, f"{len(got.items)} parts for {len(gold.items)}")
    for left, right in zip(gold.items, got.items, strict=True):
        if not _shapes(left, right, budget).equal:
            return Equality(False, f"{left.text!r} is not {right.text!r}")
    return Equality(True, "equal part by part")


def _brackets(gold: AnswerShape, got: AnswerShape, budget: Budget) -> Equality:
    pointed = gold.fence in {"()", r"\langle\rangle"}
    if got.kind == "one":
        return _words(gold.text, got.text, "the answer is not a tuple or an interval")
    if got.kind == "brackets" and gold.fence != got.fence:
        return Equality(False, f"brackets {got.fence} for {gold.fence}")
    if got.kind == "brackets" or (pointed and got.kind == "matrix" and got.columns in {1, len(got.items)}):
        return _in_order(gold, got, budget)
    names = [item.name for item in got.items]
    if pointed and got.kind == "list" and names == sorted(names):  # y = 2, x = 1 is not (2, 1)
        return _in_order(gold, got, budget)
    return Equality(False, "the answer is not a tuple or an interval")


def _union(gold: AnswerShape, got: AnswerShape, budget: Budget) -> Equality:
    return _matching(gold.items, got.items, budget) if got.kind == "union" else _algebra(gold.text, got.text, budget)


def _matrices(gold: AnswerShape, got: AnswerShape, budget: Budget) -> Equality:
    if got.kind == "one" and r"\begin" in got.text:
        return _algebra(gold.text, got.text, budget)
    rows, columns, fence = len(gold.items) // gold.columns, got.columns, got.fence
    if got.kind == "brackets" and 1 in {gold.columns, rows}:
        columns, fence = gold.columns, gold.fence
    if columns != gold.columns or fence != gold.fence:
        return Equality(False, "the answer is not a matrix of that shape")
    return _in_order(gold, got, budget)


_BY_KIND: Mapping[Kind, Callable[[AnswerShape, AnswerShape, Budget], Equality]] = {
    "one": _single, "list": _collection, "set": _collection,
    "brackets": _brackets, "union": _union, "matrix": _matrices,
}  # fmt: skip


def _one(gold: str, got: str, budget: Budget) -> Equality:
    if squeeze(gold) == squeeze(got):
        return Equality(True, "the same text")
    if letter := choice(gold):
        return _verdict(choice(got) == letter, "the same choice", "another choice")
    number, found = numbers.read(gold), numbers.read(got)
    if number is not None and found is not None:
        return _verdict(numbers.same(number, found), "equal numbers", "different numbers")
    if (special := _bases(gold, got) or _ratios(gold, got, number, found)) is not None:
        return special
    gold, got = _radians(gold, got), _radians(got, gold)
    bare = (strip_units(gold), strip_units(got))
    if _CLOCK.search(gold) or wordy(bare[0]) or wordy(bare[1]):
        return _words(gold, got)
    gold, got = bare
    # Operators that are left to compute: two in 2 + 3 * 4, none in \frac{\sqrt{3}}{2}.
    flat = re.sub(r"\\[dt]?frac(?![a-zA-Z])|\\(?:left|right)(?![a-zA-Z])", " ", got).lstrip("-+ ")
    to_do = len(_OPERATOR.findall(flat)) > 1 or _SERIES.search(got)
    if number is not None and number.decimals is None and to_do:
        return Equality(False, "arithmetic that is left to do, where the label is a number")
    verdict = _algebra(gold, got, budget)
    return verdict if verdict.equal else _rounded(gold, got, number, found) or verdict


def _ratios(gold: str, got: str, number: numbers.Number | None, found: numbers.Number | None) -> Equality | None:
    """Compare ratios: 3:4 equals 3/4, 3:1 equals 3. None if neither text is a ratio, or the other is no number."""
    ratio, other = _ratio(gold), _ratio(got)
    if ratio and other:
        return _verdict(ratio == other, "equal ratios", "different ratios")
    if ratio and found is not None:
        same = len(ratio) == 2 and ratio[1] != 0 and found.value * ratio[1] == ratio[0]
        return _verdict(same, "equal ratios", "different ratios")
    if other and number is not None and (number.decimals is not None or number.value.denominator == 1):
        return _verdict(
            other[1:] == (1,) and other[0] == number.value,
            "the ratio to one",
            "the answer is a ratio, the label a number",
        )
    return None


def _radians(text: str, other: str) -> str:
    r"""Convert degrees to multiples of \pi, if the text has a trigonometric function or only `other` has \pi."""
    if _TRIGONOMETRY.search(text) or (r"\pi" in other and r"\pi" not in text):
        return _ANGLE.sub(r"\\frac{\1 \\pi}{180}", text)
    return text


def _rounded(gold: str, got: str, number: numbers.Number | None, found: numbers.Number | None) -> Equality | None:
    r"""Accept an exact answer for a rounded label (3.14, \pi), or an answer with six or more decimals; else None."""
    if number is not None and (number.decimals or 0) >= 2 and abs(number.value) * 10 ** (number.decimals or 0) >= 1000:
        exact, rounded, reason = got, number, "equal to the label's decimals"
    elif found is not None and found.decimals is not None and found.decimals >= 6:
        exact, rounded, reason = gold, found, f"equal to {found.decimals} decimals"
    else:
        return None
    equal = symbolic.refusal(exact) is None and symbolic.rounds_to(exact, rounded.value, rounded.decimals or 0)
    return Equality(True, reason) if equal else None


def _bases(gold: str, got: str) -> Equality | None:
    """Compare digits and bases (101_2). If only one text has a base, the other is taken to have the same base."""
    left, right = _BASED.match(gold), _BASED.match(got)
    if left is None and right is None:
        return None
    digits = {(left[1] if left else gold).lower(), (right[1] if right else got).lower()}
    same = len(digits) == 1 and not (left and right and left[2] != right[2])
    return _verdict(same, "the same digits and base", "different digits or base")


def _ratio(text: str) -> tuple[int, ...] | None:
    """Read 3:4 as (3, 4); None for other texts."""
    is_ratio = re.fullmatch(r"\d{1,9}(?:\s*:\s*\d{1,9}){1,4}", text)
    return tuple(int(part) for part in text.split(":")) if is_ratio else None


def _algebra(gold: str, got: str, budget: Budget) -> Equality:
    for what, text in (("answer", got), ("label", gold)):
        if reason := symbolic.refusal(text):
            return Equality(False, f"the {what} is not computed: {reason}")
    if next(budget, None) is None:
        return Equality(False, "too many parts to compare")
    left, right = interval(gold), interval(got)
    if left is not None and right is not None:
        return _shapes(shape(left), shape(right), budget)
    return Equality(*symbolic.equal(gold, got))
