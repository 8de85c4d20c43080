r"""Answers that are words: names, choices, "no solution", true and false."""

import re

from agentrl.rm_hub.reading.units import find_unit

_CHOICE = re.compile(
    r"(?is)^(?:(?:the\s+)?(?:correct\s+)?(?:answer|option|choice)\s*(?:is)?\s*:?\s*)?[(\[]?\s*([A-Ja-j])\s*(?:[)\].:]\s*.*|)$"
)
_LETTERS = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{3,}|[^\x00-\x7f]{2,}")
_MATH_WORDS = {
    "sin", "cos", "tan", "cot", "sec", "csc", "log", "exp", "sqrt", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "max",
    "min", "mod", "gcd", "lcm", "det", "deg", "pmatrix", "bmatrix", "matrix", "vmatrix", "cases", "array", "begin", "end",
    "frac", "cis", "arg", "ker", "dim",
}  # fmt: skip
_GROUPS = (
    ("no solution", "no solutions", "none", "no real solution", "no real solutions", "there is no solution", "no such number",
     "there are no solutions", "there are no real solutions", "no answer exists", "emptyset", "empty set", "the empty set", "{}",
     "null set", "impossible", "not possible", "no real roots", "no roots", "no such values", "no values", "no integer solutions",
     "kein ergebnis", "keine lösung", "aucune solution", "sin solución", "no hay solución", "нет решений", "无解", "解なし", "解なし"),
    ("does not exist", "dne", "undefined", "the limit does not exist", "limit does not exist", "not defined", "doesnt exist"),
    ("infinity", "infinite", "infty", "+infty", "infinitely many", "infinitely many solutions", "positive infinity",
     "there are infinitely many solutions", "infinite solutions", "infinitely many solution"),
    ("-infty", "negative infinity", "minus infinity"),
    ("true", "yes", "correct", "t", "wahr", "vrai", "verdadero", "да", "верно", "是", "对", "正确"),
    ("false", "no", "incorrect", "f", "falsch", "faux", "falso", "нет", "неверно", "否", "错", "不正确"),
    ("all real numbers", "mathbb{r}", "all reals", "every real number", "(-infty,infty)", "(-infty,+infty)", "all real x", "r",
     "the set of all real numbers", "the real numbers"),
    ("convergent", "converges", "it converges", "the series converges"),
    ("divergent", "diverges", "it diverges", "the series diverges"),
)  # fmt: skip
_MEANING = {word: group[0] for group in _GROUPS for word in group}
_MERIDIEM = re.compile(r"\b([ap])\.?\s?m\b\.?")
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_UNIT_TAIL = re.compile(
    r"(?s)^(.*[\d)}!\]]|.*\\pi|.*[a-z])\s+"
    r"((?:[a-zA-Z]{1,12}\.?|/)(?:\s*(?:\^\s*\{?[23]\}?|/|per\b|[a-zA-Z]{2,12}\b))*)$"
)
_DEGREES = re.compile(r"\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ)\s*$")


def choice(text: str) -> str | None:
    """The letter A to J that the text chooses, upper-case, with whatever decoration; None if it is no choice."""
    match = None if text in {"e", "i"} else _CHOICE.match(text)
    return match[1].upper() if match else None


def wordy(text: str) -> bool:
    """Return true if a cleaned text is words and not mathematics."""
    if text.strip().lower() in _MEANING or r"\emptyset" in text:
        return True
    return any(word.lower() not in _MATH_WORDS for word in _LETTERS.findall(text))


def known_words(text: str) -> bool:
    """Return true if a text is one of the answers that are said in words: "no solution", "does not exist"."""
    return normal_words(text.strip(" .:*_")) in _MEANING.values()


def normal_words(text: str) -> str:
    """Words in one spelling: lower case, no punctuation, no articles."""
    text = _MERIDIEM.sub(r"\1m", text.lower().replace("\\", " ").replace("'", ""))
    meaning = _MEANING.get(re.sub(r"\s+", "", text)) or _MEANING.get(" ".join(text.split()))
    if meaning:
        return meaning
    text = " ".join(re.sub(r"[^\w\s.+/^<>=:%-]", " ", text).split())
    text = " ".join(_ARTICLES.sub(" ", text).split())
    return _MEANING.get(text, text).strip(". ")


def same_words(label: str, answer: str) -> bool:
    """Return true if two texts are the same words."""
    left, right = normal_words(label), normal_words(answer)
    return bool(left) and re.sub(r"[\s-]", "", left) == re.sub(r"[\s-]", "", right)


def strip_units(text: str) -> str:
    """An expression without the unit behind it ("3\\sqrt{2} cm", "60^\\circ")."""
    text = _DEGREES.sub("", text)
    match = _UNIT_TAIL.match(text) if len(text) <= 80 else None
    if match is None or find_unit(match[2]) is None:
        return text
    words = re.findall(r"[a-zA-Z]+", match[2].lower())
    # One letter behind a sum is rather a variable.
    variable = len(words[0]) == 1 and re.search(r"[+=<>-]|\\[a-z]+(?![a-z])\s*\{?[a-z]", match[1])
    return text if variable or not _MATH_WORDS.isdisjoint(words) else match[1].strip()
