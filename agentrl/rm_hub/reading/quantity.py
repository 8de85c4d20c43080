"""Quantities in running text: numbers as people and models write them, as exact fractions.

1. `find_quantities` reads thousands separators (1,000; 1 000; 1'000; 1.000.000), decimal commas, fractions and mixed
   numbers, signs, currency, percent, powers of ten, "3 million", times of day, LaTeX and digits of all scripts.
2. A quantity may have several readings (25 % is 25 and 0.25); it equals a number if one of them does.
3. Numbers inside words (CO2, m2), exponents of units (cm^2) and numbers of more than 300 digits are none.
"""

import re
from fractions import Fraction
from typing import NamedTuple

from agentrl.rm_hub.reading.common import compose
from agentrl.rm_hub.reading.number_words import SCALES

Values = tuple[Fraction, ...]

_FRACTION = re.compile(
    r"\\{1,2}[dtc]?frac\s*\{\s*(-?[\d.,]{1,40})\s*\}\s*\{\s*([\d.,]{1,40})\s*\}|\\{1,2}[dtc]?frac\s?(\d)\s?(\d)"
)
_VULGAR = re.compile(r"(?<=\d)(?=[¼-¾⅐-⅞])")
_GROUPED = re.compile(r"(?<=\d)(?:[\u00a0\u2007\u2009\u202f'’_]|\\[,!]|\{,\}|\\,)(?=\d{3}(?!\d))")
_SPACED = re.compile(r"(?<![\d.,])(\d{1,3}(?: \d{3})+)(?![\d])")
_SPACED_MONEY = re.compile(r"(?<=[$€£])\d{1,3}(?: \d{3})+(?!\d)")
_POWER_OF_TEN = re.compile(r"\s?(?:×|x|\*|\\times|\\cdot)\s?10\s?(?:\^|\*\*)\s?\{?\s?([-+−]?\d{1,2})\s?\}?")
_EXPONENT = re.compile(r"(?<=[A-Za-z}°)])\s?\^\s?(?:\{\s?-?\d{1,3}\s?\}|-?\d{1,3})")
_COMMANDS = (
    (re.compile(r"\\(?=[$%&#_])"), ""),
    (re.compile(r"\\{1,2}(?:times|cdot)\b|(?<=\d)\s?\*\s?(?=[\d$(])"), "×"),
    (re.compile(r"\\{1,2}div\b"), "÷"),
    (re.compile(r"\\{1,2}(?:approx|simeq|thickapprox)\b"), "≈"),
    (re.compile(r"\\{1,2}(?:Rightarrow|rightarrow|to|implies)\b"), "→"),
    (re.compile(r"\^\s?\{?\s?\\circ\s?\}?"), "°"),
    (re.compile(r"\\{1,2}(?:[A-Za-z]{1,30}|[()\[\],;:! ])"), " "),
    (re.compile(r"\*{1,3}|`|__|[{}]|~"), " "),
)
_TOKEN = re.compile(r"(?<![\d.,])(?:\d+(?:[.,]\d+)*|\.\d+)")
_SUFFIX = re.compile(
    r"(?i)(?P<power>e[+-]?\d{1,2}(?![\w.]))"
    r"|:(?P<minutes>[0-5]\d)(?!\d)"
    r"|\s?[/⁄]\s?(?P<below>\d{1,12})(?![\d/]|[.,]\d)"
    r"|\s(?P<above>\d{1,6})[/⁄](?P<under>[1-9]\d{0,5})(?![\d/])"
    r"|\s?(?P<percent>%|percent\b|per cent\b)"
    r"|(?P<k>k)(?![a-z])"
    r"|(?=\s?(?P<cents>¢|cents?\b))"
    r"|\s?\^\s{0,2}(?P<raised>\d{1,2})(?!\d)"
    r"|\s(?P<scale>hundred|thousand|million|billion|trillion|dozen)s?\b"
)
_RATIO = re.compile(r":(?![0-5]\d(?!\d))\d")
_MONEY = "$€£¥₹₽₩₦"
_MONEY_WORDS = re.compile(r"(?i)(?:^|[^A-Za-z])(?:rs\.?|usd|us|eur|gbp|php|rm|inr|aud|cad|nt|hk|a|c)$")
_NEGATIVE_WORD = re.compile(r"(?i)(?:^|[^\d\s)])\s*\b(?:negative|minus)\s*$")
_MAX_DIGITS = 300

_THOUSANDS = re.compile(r"[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?")
_LAKHS = re.compile(r"[1-9]\d?(?:,\d{2})+,\d{3}(?:\.\d+)?")
_EUROPEAN = re.compile(r"[1-9]\d{0,2}(?:\.\d{3}){2,}(?:,\d+)?|[1-9]\d{0,2}(?:\.\d{3})+,\d+")
_PLAIN = re.compile(r"\d*[.,]?\d+")
_DOTTED_THOUSANDS = re.compile(r"[1-9]\d{0,2}\.\d{3}")


class Quantity(NamedTuple):
    """A number in a text: where it stands (sign and currency not counted), and its readings."""

    start: int
    end: int
    values: Values


def flatten(text: str) -> str:
    """The text with LaTeX and markup reduced to plain characters; positions change."""
    text = _GROUPED.sub(",", _VULGAR.sub(" ", text))
    text = _SPACED_MONEY.sub(lambda match: match[0].replace(" ", ""), text)
    text = compose(text).replace("\u2044", "/").replace("−", "-")
    text = _FRACTION.sub(lambda match: f" {match[1] or match[3]}/{match[2] or match[4]} ", text)
    text = _POWER_OF_TEN.sub(lambda match: "e" + match[1].replace("−", "-"), text)
    text = _EXPONENT.sub("", text)
    for pattern, plain in _COMMANDS:
        text = pattern.sub(plain, text)
    return text


def join_spaced_groups(text: str) -> str:
    """`1 000 000` as one number; only for a text that is known to be one answer."""
    return _SPACED.sub(lambda match: match[1].replace(" ", ""), text)


def find_quantities(text: str, *, dotted_thousands: bool = False) -> list[Quantity]:
    """The quantities of a flattened text in order.

    Args:
        text: what `flatten` gave.
        dotted_thousands: `1.000` may also be a thousand, as in most of Europe.
    """
    found: list[Quantity] = []
    position = 0
    while match := _TOKEN.search(text, position):
        position = match.end()
        value = _token_value(match.group())
        if value is None or _is_part_of_word(text, match.start()) or _RATIO.match(text, match.end()):
            continue
        values: Values = (value,)
        if dotted_thousands and _DOTTED_THOUSANDS.fullmatch(match.group()):
            values = (value, value * 1000)
        if suffix := _SUFFIX.match(text, match.end()):
            changed = _with_suffix(value, values, suffix)
            if changed is None and suffix["minutes"]:
                continue
            if changed is not None:
                values, position = changed, suffix.end()
                again = _SUFFIX.match(text, position)
                if again and (again["percent"] or again["scale"]):
                    values, position = _with_suffix(values[0], values, again) or values, again.end()
        sign = -1 if _is_negative(text, match.start()) else 1
        found.append(Quantity(match.start(), position, tuple(sign * item for item in values)))
    return found


def _token_value(token: str) -> Fraction | None:
    if len(token) > _MAX_DIGITS:
        return None
    if _THOUSANDS.fullmatch(token) or _LAKHS.fullmatch(token):
        return Fraction(token.replace(",", ""))
    if _EUROPEAN.fullmatch(token):
        return Fraction(token.replace(".", "").replace(",", "."))
    return Fraction(token.replace(",", ".")) if _PLAIN.fullmatch(token) else None


def _with_suffix(value: Fraction, values: Values, suffix: re.Match[str]) -> Values | None:
    """The readings of a number with what follows it; None if that does not belong to it."""
    if suffix["power"]:
        return (value * Fraction(10) ** int(suffix["power"][1:]),)
    if suffix["minutes"]:
        return (value + Fraction(int(suffix["minutes"]), 60),) if value.denominator == 1 and value < 25 else None
    if suffix["below"]:
        return (value / int(suffix["below"]),) if int(suffix["below"]) else None
    if suffix["above"]:
        whole = value.denominator == 1 and int(suffix["above"]) < int(suffix["under"])
        return (value + Fraction(int(suffix["above"]), int(suffix["under"])),) if whole else None
    if suffix["percent"] or suffix["cents"]:
        return (value, value / 100)
    if suffix["k"]:
        return (value * 1000,)
    if suffix["raised"]:
        return (value ** int(suffix["raised"]),) if value < 10**6 else None
    scale = suffix["scale"].lower()
    return (value * 12, value) if scale == "dozen" else tuple(item * SCALES[scale] for item in values)


def _is_part_of_word(text: str, start: int) -> bool:
    before = text[max(0, start - 8) : start]
    if not before or not (before[-1].isalpha() or before[-1] in "^_"):
        return before[-1:] == ":" and before[-2:-1].isdigit()
    # Scripts that do not put spaces between words may have a letter before any number.
    return before[-1] < "\u2e80" and not _MONEY_WORDS.search(before)


def _is_negative(text: str, start: int) -> bool:
    before = text[max(0, start - 40) : start].rstrip(_MONEY + " ")
    gap = start > len(before) and text[start - 1 : start].isspace()
    if not before.endswith(("-", "–")):
        return bool(_NEGATIVE_WORD.search(before))
    ahead = before[:-1].rstrip()
    if gap and text[max(0, start - 1)] == " " and text[max(0, start - 2) : start - 1] not in tuple(_MONEY):
        return ahead.endswith("=")
    if ahead != before[:-1] or not ahead:
        return not ahead or not (ahead[-1].isdigit() or ahead[-1] in ")%")
    return not (ahead[-1].isalnum() or ahead[-1] in ")%-–")
