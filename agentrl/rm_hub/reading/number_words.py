"""English number words: "one hundred and twenty-three", "zero", "half a dozen"."""

import re

_UNITS = {
    word: value
    for value, word in enumerate(
        [
            "zero",
            "one",
            "two",
            "three",
            "four",
            "five",
            "six",
            "seven",
            "eight",
            "nine",
            "ten",
            "eleven",
            "twelve",
            "thirteen",
            "fourteen",
            "fifteen",
            "sixteen",
            "seventeen",
            "eighteen",
            "nineteen",
        ]
    )
}
_TENS = {
    word: 10 * value
    for value, word in enumerate(
        ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"], start=2
    )
}
_SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9}
_WORD = re.compile(r"[^\W\d_]+")
_MAX_TEXT = 400


def parse_number_words(text: str) -> int | None:
    """The first number that is written in words; None if there is none, or there are several."""
    words = _WORD.findall(text[:_MAX_TEXT].lower())
    runs = _runs(words)
    values = {_value(run) for run in runs}
    return values.pop() if len(values) == 1 else None


def _runs(words: list[str]) -> list[list[str]]:
    """The stretches of number words; "and" and "a" belong to one only inside it."""
    runs: list[list[str]] = []
    current: list[str] = []
    for word in [*words, ""]:
        if word in _UNITS or word in _TENS or (current and (word in _SCALES or word in ("hundred", "and"))):
            current.append(word)
            continue
        while current and current[-1] == "and":
            current.pop()
        if current:
            runs.append(current)
        current = []
    return runs


def _value(words: list[str]) -> int:
    total, group = 0, 0
    for word in words:
        if word in _UNITS or word in _TENS:
            group += _UNITS.get(word, 0) + _TENS.get(word, 0)
        elif word == "hundred":
            group *= 100
        elif word in _SCALES:
            total, group = total + group * _SCALES[word], 0
    return total + group
