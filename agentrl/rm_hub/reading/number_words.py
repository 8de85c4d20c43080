"""English number words: "one hundred and twenty-three", "zero", "half a dozen"."""

import re

WORDS = {
    "zero": 0, "one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9,
    "ten": 10, "eleven": 11, "twelve": 12, "thirteen": 13, "fourteen": 14, "fifteen": 15, "sixteen": 16, "seventeen": 17,
    "eighteen": 18, "nineteen": 19, "twenty": 20, "thirty": 30, "forty": 40, "fifty": 50, "sixty": 60, "seventy": 70,
    "eighty": 80, "ninety": 90,
}  # fmt: skip
"""What is added up."""
SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
"""What is multiplied by."""
_GROUPS = ("thousand", "million", "billion")
_WORD = re.compile(r"[^\W\d_]+")
_MAX_TEXT = 400


def parse_number_words(text: str) -> int | None:
    """The first number that is written in words; None if there is none, or there are several."""
    values = {_value(run) for run in _runs(_WORD.findall(text[:_MAX_TEXT].lower()))}
    return values.pop() if len(values) == 1 else None


def _runs(words: list[str]) -> list[list[str]]:
    """The stretches of number words; "and" and "a" belong to one only inside it."""
    runs: list[list[str]] = []
    current: list[str] = []
    for word in [*words, ""]:
        if word in WORDS or (current and word in (*_GROUPS, "hundred", "and")):
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
        if word == "hundred":
            group *= 100
        elif word in _GROUPS:
            total, group = total + group * SCALES[word], 0
        else:
            group += WORDS.get(word, 0)
    return total + group
