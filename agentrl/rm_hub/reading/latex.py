r"""Normalises the spelling of mathematics in LaTeX, plain text, Unicode or a mixture.

1. `clean(text)` changes only the spelling: `\dfrac12` and `½` become `\frac{1}{2}`. It also normalises `−`, `×`,
   full-width digits, `\left(`, `\text{cm}` and dollar signs. It never evaluates anything.
2. Every step is linear in the text's length, or works on a text already truncated to `LONGEST` characters."""

import re
import tomllib
import unicodedata
from functools import lru_cache
from importlib import resources

LONGEST = 2000  # maximum characters of an answer; a longer text is not a final answer

_SPELLINGS = tomllib.loads((resources.files(__package__) / "latex.toml").read_text(encoding="utf-8"))
_UNICODE = str.maketrans(
    {character: latex for each, latex in _SPELLINGS["characters"].items() for character in each}
    | {chr(ord("①") + n): f"({n + 1}) " for n in range(20)}
    | {c: r"\frac{{{}}}{{{}}}".format(*unicodedata.normalize("NFKC", c).split("⁄")) for c in "¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"}
)
_CONTROL = dict.fromkeys(code for code in (*range(32), 127) if chr(code) not in "\n\t")
_NUMERAL = re.compile(r"[-+]?\d(?:[\d.,]*\d)?[.,]?")
_RAISED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿ", "0123456789+-()n")
_RAISED_RUN = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿ]+")
_LOWERED = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_LOWERED_RUN = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")

GROUP = r"\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}"
"""Regular expression for a braced group, with up to two nested levels; its capture group is the content."""
_WRAPPER = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|normal|up)?|math(?:rm|bf|it|sf|tt|normal)|mbox|hbox|operatorname\*?|boldsymbol|bm|emph"
    r"|underline|boxed|fbox|ensuremath)\s*" + GROUP
)
_SIZES = re.compile(
    r"\\(?:left|right|[bB]ig{1,2}[lrm]?|displaystyle|textstyle|scriptstyle|limits|nolimits|rm|bf|it|nobreak|phantom\{\})(?![a-zA-Z])\s*\.?(?=\s*\D|$)"
)
_GROUPING = re.compile(r"(?<=\d)(?:\{,\}|,?\\[,!;: ]|\\ |,\\!)\s*(?=\d{3}(?!\d))")
_SPACES = re.compile(r"(?<!\\)\\[,;:!> ]|\\(?:q?quad|thinspace|enspace|hspace\{[^{}]*\}|space|newline)(?![a-zA-Z])|~")
_DELIMITERS = re.compile(r"\\[()\[\]]|\\?\$")
_OUTER_DELIMITERS = re.compile(r"\\?\$|^\s*\\[(\[]|(?<!\\)\\[)\]](?=\s*[.,;:]?\s*$)")
_SYNONYMS = [(re.compile(pattern), spelling) for pattern, spelling in _SPELLINGS["synonyms"]]
_FRAC = re.compile(r"\\frac\s*(?:\{([^{}]*)\}|(\d))\s*(?:\{([^{}]*)\}|(\d))")
_ROOT = re.compile(r"\\sqrt\s*(\[[^\[\]]*\])?\s*(\d+|[a-zA-Z])")
_ROOT_PAREN = re.compile(r"\\sqrt\s*\(([^()]*)\)")
_POWER_PAREN = re.compile(r"\^\s*\(([^()]*)\)")
_ESCAPED_TWICE = re.compile(r"\\\\(?=[a-zA-Z({\[$%,!])")
_QUOTES = " \t\n\"'`*_"


def clean(text: str) -> str:
    """Normalise the spelling of the first `LONGEST` characters of a text."""
    return _clean(text[:LONGEST])


@lru_cache(64)  # one grading cleans the same few texts repeatedly
def _clean(text: str) -> str:
    if _NUMERAL.fullmatch(text):
        return text.rstrip(".,")
    if text.isascii():
        return _latex(text.translate(_CONTROL))
    text = "".join(c for c in text if c in "\n\t" or not unicodedata.category(c).startswith("C"))
    text = _RAISED_RUN.sub(lambda run: "^{" + run.group().translate(_RAISED) + "}", text)
    text = _LOWERED_RUN.sub(lambda run: "_{" + run.group().translate(_LOWERED) + "}", text)
    return _latex(unicodedata.normalize("NFKC", text.translate(_UNICODE)).translate(_UNICODE))


def squeeze(text: str) -> str:
    """Remove white space and redundant braces from a cleaned text, to compare spellings."""
    text = re.sub(r"(?<=\d)\s+(?=\d)", "_", text)
    text = re.sub(r"\s+", "", text).replace(r"\cdot", "*").replace(r"\times", "*").replace(r"\ast", "*")
    return re.sub(r"(?<=[_^])\{(\w)\}", r"\1", text).rstrip(".")


def _latex(text: str) -> str:
    if r"\\begin{" in text:
        text = text.replace(r"\\", "\\")
    matrix = r"\begin{" in text
    # Outside matrices, a doubled backslash before a letter comes from escaping twice.
    text = text if matrix else _ESCAPED_TWICE.sub(r"\\", text)
    text = _GROUPING.sub(",", text)
    text = _SIZES.sub(" ", text)
    for _ in range(8):
        if (unwrapped := _WRAPPER.sub(r" \1 ", text)) == text:
            break
        text = unwrapped
    # In a matrix, \\[ is not a delimiter.
    text = (_OUTER_DELIMITERS if matrix else _DELIMITERS).sub(" ", text)
    text = _SPACES.sub(" ", text)
    for pattern, spelling in _SYNONYMS:
        text = pattern.sub(spelling, text)
    text = text.replace("**", "^")
    for _ in range(4):
        text = _ROOT_PAREN.sub(r"\\sqrt{\1}", text)
        text = _POWER_PAREN.sub(r"^{\1}", text)
    text = _ROOT.sub(lambda root: rf"\sqrt{root.group(1) or ''}{{{root.group(2)}}}", text)
    text = _FRAC.sub(_fraction, text)
    text = " ".join(text.split())
    # Remove surrounding quotation marks, markdown marks and punctuation.
    before = None
    while text != before:
        before = text
        text = text.strip(_QUOTES)
        text = text.rstrip(".,;:!?").lstrip(",;:") if not text.endswith(("...", "!")) else text.lstrip(",;:")
        if text.endswith("\\") and not text.endswith("\\\\"):
            text = text[:-1]
    return text


def _fraction(match: re.Match[str]) -> str:
    above, below = match[1] or match[2] or "", match[3] or match[4] or ""
    return rf"\frac{{{above.strip()}}}{{{below.strip()}}}"
