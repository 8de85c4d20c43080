r"""Reads units and other words after a number, and answers in words (names, choices, "no solution", true and false)."""

import re
import tomllib
from fractions import Fraction
from importlib import resources
from typing import NamedTuple


class Unit(NamedTuple):
    """The word after a number. `name` is "" if there is none; `kind` is "" if the unit is unknown."""

    name: str
    kind: str = ""
    factor: Fraction = Fraction(1)


NO_UNIT = Unit("")
_WORDS = tomllib.loads((resources.files(__package__) / "words.toml").read_text(encoding="utf-8"))
_KNOWN = {
    spelled: Unit(names.split()[0], kind, Fraction(factor))
    for kind, units in _WORDS["units"].items()
    for names, factor in units.items()
    for name in names.split()
    for spelled in (name, name + "s")
}
_SHORT, _NOT_UNITS, _MATH_WORDS = (set(_WORDS[of].split()) for of in ("short_units", "not_units", "mathematics"))
_DEGREES = re.compile(r"\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ)\s*([CFK])?(?![a-zA-Z])")
_AREAS = {"square": re.compile(r"\bsq(?:uare)?\b|\^\s*\{?\s*2"), "cubic": re.compile(r"\bcu(?:bic)?\b|\^\s*\{?\s*3")}
_POWER = re.compile(r"\^\s*\{?\s*-?[1-4]\s*\}?")
_WORD = re.compile(r"[^\W\d_]+(?:[-'’.][^\W\d_]+)*\.?")
_RATE = re.compile(r"([a-zA-Z]+)\.?\s*(?:/|\bper\b|\ba\b|\ban\b)\s*([a-zA-Z]+)\.?$")
_SPEEDS = {"mph": "mi/h", "kph": "km/h", "kmh": "km/h", "kmph": "km/h", "mps": "m/s"}
_FRAME = re.compile(r"[\s./()\-,'\"*\\:]*")


def find_unit(rest: str) -> Unit | None:
    """Read `rest`, the text after a number, as a unit; None if it has an operator, a variable or a digit."""
    rest = rest.strip()
    if re.match(r"\*\s*[a-zA-Z]|\\(?:cdot|times)", rest):
        return None  # a product
    if not rest or rest in {"\\", ".", "%"}:
        return NO_UNIT
    if (rate := _rate(rest)) is not None:
        return rate
    if len(rest) > 120:
        return None
    if (degrees := _DEGREES.match(rest)) is not None and not (rest := rest[degrees.end() :].strip()):
        return Unit(f"degree {degrees[1]}") if degrees[1] else Unit("degree", "angle")
    spaced = _POWER.sub(" ", rest)
    words = [word.lower().rstrip(".") for word in _WORD.findall(spaced)]
    is_word = (w not in _NOT_UNITS and (len(w) >= 3 or w in _SHORT or not w.isascii()) for w in words)
    if not all(is_word) or not words or _FRAME.sub("", _WORD.sub("", spaced)) or (rest[0] == "/" and len(words) > 3):
        return None
    area = next((name for name, mark in _AREAS.items() if mark.search(rest)), "")
    measured = [word for word in words if word not in {"square", "sq", "cubic", "cu"}]
    first = _KNOWN.get(measured[0]) if measured and "/" not in rest else None
    if first is None or len(measured) > 1:
        return NO_UNIT if words[0] in _KNOWN else Unit(" ".join(words))
    return Unit(f"{area} {first.name}", area) if area else first


def _rate(text: str) -> Unit | None:
    """Return a rate such as kilometres per hour, if both units are known."""
    found = _RATE.match(_SPEEDS.get(text.lower().rstrip("."), text))
    above, below = (_KNOWN.get(part.lower()) for part in found.groups()) if found else (None, None)
    if above is None or below is None:
        return None
    return Unit(f"{above.name}/{below.name}", f"{above.kind}/{below.kind}", above.factor / below.factor)


_CHOICE = re.compile(
    r"(?is)^(?:(?:the\s+)?(?:correct\s+)?(?:answer|option|choice)\s*(?:is)?\s*:?\s*)?[(\[]?\s*([A-Ja-j])\s*(?:[)\].:]\s*.*|)$"
)
_LETTERS = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{3,}|[^\x00-\x7f]{2,}")
_MEANING: dict[str, str] = {word: group[0] for group in _WORDS["meanings"] for word in group}
_MERIDIEM = re.compile(r"\b([ap])\.?\s?m\b\.?")
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_UNIT_TAIL = re.compile(
    r"(?s)^(.*[\d)}!\]]|.*\\pi|.*[a-z])\s+"
    r"((?:[a-zA-Z]{1,12}\.?|/)(?:\s*(?:\^\s*\{?[23]\}?|/|per\b|[a-zA-Z]{2,12}\b))*)$"
)
_DEGREES_BEHIND = re.compile(r"\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ)\s*$")


def choice(text: str) -> str | None:
    """Return the letter A to J that the text chooses, in upper case; None if the text is not a choice."""
    match = None if text in {"e", "i"} else _CHOICE.match(text)
    return match[1].upper() if match else None


def wordy(text: str) -> bool:
    """Return true if a cleaned text is words and not mathematics."""
    if text.strip().lower() in _MEANING or r"\emptyset" in text:
        return True
    return any(word.lower() not in _MATH_WORDS for word in _LETTERS.findall(text))


def known_words(text: str) -> bool:
    """Return true if a text is a known answer in words: "no solution", "does not exist"."""
    return normal_words(text.strip(" .:*_")) in _MEANING.values()


def normal_words(text: str) -> str:
    """Normalise words: lower case, no punctuation, no articles, one spelling of known answers."""
    text = _MERIDIEM.sub(r"\1m", text.lower().replace("\\", " ").replace("'", ""))
    if meaning := _MEANING.get(re.sub(r"\s+", "", text)) or _MEANING.get(" ".join(text.split())):
        return meaning
    text = " ".join(re.sub(r"[^\w\s.+/^<>=:%-]", " ", text).split())
    text = " ".join(_ARTICLES.sub(" ", text).split())
    return _MEANING.get(text, text).strip(". ")


def same_words(label: str, answer: str) -> bool:
    left, right = normal_words(label), normal_words(answer)
    return bool(left) and re.sub(r"[\s-]", "", left) == re.sub(r"[\s-]", "", right)


def strip_units(text: str) -> str:
    """Remove the unit after an expression ("3\\sqrt{2} cm", "60^\\circ")."""
    text = _DEGREES_BEHIND.sub("", text)
    match = _UNIT_TAIL.match(text) if len(text) <= 80 else None
    if match is None or find_unit(match[2]) is None:
        return text
    words = re.findall(r"[a-zA-Z]+", match[2].lower())
    # One letter after a sum is probably a variable.
    variable = len(words[0]) == 1 and re.search(r"[+=<>-]|\\[a-z]+(?![a-z])\s*\{?[a-z]", match[1])
    return text if variable or not _MATH_WORDS.isdisjoint(words) else match[1].strip()
