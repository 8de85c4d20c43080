"""Compares two expressions by computer algebra: math-verify on latex2sympy's trees. `refusal` checks each text before.
It limits length, depth, exponents, towers and factorials. It refuses sums, integrals and limits. math-verify's signal
timeouts and its extraction are not used. No text goes through sympify or parse_expr."""

import logging
import math
import re
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from typing import Any

_LONGEST, _DEEPEST, _MAX_DIGITS = 400, 12, 40
_HIGHEST_POWER, _MAX_TERMS, _MAX_FACTORIAL = 40, 2000, 60
_REFUSED = {
    re.compile(rf"\d{{{_MAX_DIGITS + 1}}}"): f"a number of more than {_MAX_DIGITS} digits",
    re.compile(r"(?<![_^\d])\d+\s+\d"): "two numbers side by side",
    re.compile(
        r"\\(?:int|iint|oint|sum|prod|lim|limsup|liminf|frac\s*\{\s*d\s*\}|partial|nabla|bigcup|bigcap|coprod|gcd|lcm|Gamma)(?![a-zA-Z])"
    ): "an operation without a bound",
    re.compile(r"[)}]\s*\^\s*(?:\{\s*\d+\s*\}|\d)\s*\}?\)\s*\}?\^"): "a power of a power of a power",
}
_EXPONENT = re.compile(r"\^\s*(\{|\\?\w+|[-+]?\d+)")
_SMALL_FACTORIAL = re.compile(r"(?<![\w.^])[({\s]*(\d{1,2}|[a-zA-Z])[)}\s]*!(?!\s*[!^])")
_BINOMIAL = re.compile(r"\\[dt]?binom")
_COMPUTED = re.compile(r"\\[dt]?binom\s*(?:\{[^{}]*\}\s*)?\{[^{}]*[\^!\\*{]")
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\{[a-zA-Z]*\}")
_WORDS = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{4,}|[^\x00-\x7f]|__|@|\\(?:input|write|def|catcode|require|href|include)")


def refusal(text: str) -> str | None:
    """Return the reason why a text must not reach the parser, or None."""
    if len(text) > _LONGEST:
        return f"longer than {_LONGEST} characters"
    depths = list(accumulate(((c in "{([") - (c in "})]") for c in text), initial=0))
    if max(depths) > _DEEPEST:
        return f"nested deeper than {_DEEPEST}"
    if depths[-1] != 0:
        return "unbalanced brackets"
    if reason := next((reason for pattern, reason in _REFUSED.items() if pattern.search(text)), None):
        return reason
    if _WORDS.search(_ENVIRONMENT.sub("", text)):
        return "words"
    return _powers(text) or _factorials(text)


def _powers(text: str) -> str | None:
    budget = 0
    generators = len(set(re.findall(r"(?<![\\a-zA-Z])[a-zA-Z]|\\sqrt\s*\S{1,4}", text)))
    for match in _EXPONENT.finditer(text):
        exponent = _group(text, match.end() - 1) if match.group(1) == "{" else match.group(1)
        if "^" in exponent or re.match(r"\s*\^", text[match.end() :]):
            more = exponent + text[match.end() : match.end() + 12]
            if exponent.count("^") > 1 or re.search(r"\d{2}|[2-9]\s*\^", more):
                return "a tower of powers"
        base_is_number = re.search(r"[\d.]\s*\)?\s*$", text[: match.start()]) is not None
        for digits in re.findall(r"\d+", exponent):
            if int(digits) > (2100 if base_is_number else _HIGHEST_POWER) and "/" not in exponent:
                return f"an exponent above {_HIGHEST_POWER}"
            if not base_is_number and math.comb(int(digits) + generators, generators) > _MAX_TERMS:
                return f"a power of more than {_MAX_TERMS} terms"
            budget += int(digits)
        if "!" in exponent:
            return "a factorial in an exponent"
    return "exponents too large together" if budget > 4400 else None


def _factorials(text: str) -> str | None:
    if "!" in _SMALL_FACTORIAL.sub("", text):
        return "a factorial of something that is not a small number"
    if any(int(small) > _MAX_FACTORIAL for small in _SMALL_FACTORIAL.findall(text) if small.isdigit()):
        return f"a factorial above {_MAX_FACTORIAL}"
    if _BINOMIAL.search(text) is None:
        return None
    if _COMPUTED.search(text):
        return "a binomial coefficient of something that is not small"
    return "a binomial coefficient above 200" if any(int(n) > 200 for n in re.findall(r"\d+", text)) else None


def _group(text: str, start: int) -> str:
    depths = accumulate((c == "{") - (c == "}") for c in text[start:])
    end = next((start + at for at, depth in enumerate(depths) if depth == 0), len(text))
    return text[start + 1 : end]


def equal(label: str, answer: str) -> tuple[bool, str]:
    """Compare two expressions that passed `refusal`. Return true if math-verify finds them equal, and a reason."""
    gold, got = parse(label), parse(answer)
    if not gold or not got:
        return False, f"the {'answer' if gold else 'label'} is not an expression that could be parsed"
    try:
        same = _math_verify()[0].verify(list(gold), list(got), timeout_seconds=None, raise_on_error=True)
    except Exception as error:  # noqa: BLE001  (sympy raises any type; such a pair counts as different)
        return False, f"could not be compared ({type(error).__name__})"
    return bool(same), "equal by algebra" if same else "different by algebra"


def rounds_to(answer: str, value: Fraction, decimals: int) -> bool:
    """Return true if an exact expression without variables, rounded to `decimals` places, is `value`."""
    if not (trees := parse(answer)) or getattr(trees[0], "free_symbols", True):
        return False
    try:
        number = complex(trees[0].evalf(30))
    except (TypeError, ValueError, AttributeError, ArithmeticError):
        return False
    return bool(abs(number.imag) < 1e-12 and abs(number.real - float(value)) * 10**decimals <= 0.5 + 1e-9)


@lru_cache(maxsize=256)
def parse(text: str) -> tuple[Any, ...]:
    """Return latex2sympy's trees of one LaTeX expression; an empty tuple if it is not an expression."""
    # math-verify takes variables as complex if an i is separate. The i itself stays a variable: i^2 is not -1.
    text = re.sub(r"(?<=[\d+*/({-])i(?![a-zA-Z])", " i ", text)
    text = re.sub(r"\^\s*(?:\{\s*0?\.5\s*\}|0?\.5(?!\d))", r"^{\\frac{1}{2}}", text)
    math_verify, extraction = _math_verify()
    options = {"extraction_config": [extraction], "fallback_mode": "no_fallback", "parsing_timeout": None}
    return tuple(math_verify.parse(f"$${text}$$", **options))


@lru_cache(maxsize=1)
def _math_verify() -> tuple[Any, Any]:
    """Return math-verify and its extraction config without units: with units, `a + 2ab` is read as a + 2."""
    import math_verify
    from latex2sympy2_extended.math_normalization import NormalizationConfig  # type: ignore[import-untyped]

    # math-verify warns that its timeouts are off. They are off on purpose.
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)
    plain = NormalizationConfig(units=False, malformed_operators=True, nits=True, boxed="none")
    return math_verify, math_verify.LatexExtractionConfig(boxed_match_priority=-1, normalization_config=plain)
