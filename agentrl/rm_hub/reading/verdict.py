"""Reads a judge's verdict from the judge's text.

1. The judge should write one JSON object. Fences, prose around it, single quotes, a truncated end, `Verdict: correct`
   on a line or the bare word are accepted too. Several verdicts must agree, or the last must be JSON at the text's end.
2. A verdict that also occurs in the graded answer is a quotation, unless it is all that the judge wrote. Anything else
   is no verdict (None): a guess could be a wrong reward that nothing reports."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentrl.chat.parsers.base import read_json
from agentrl.rm_hub.grade import Grade
from agentrl.rm_hub.reading.common import after_reasoning

_MAX, _MAX_OBJECTS = 20_000, 64  # maximum characters and JSON objects that are read

_SCORES = {
    1.0: "correct, right, true, yes, pass, passed, passes, accept, accepted, valid, 1, "
    "正确, 对, richtig, korrekt, correcto, correcta",
    0.0: "incorrect, not correct, wrong, false, no, fail, failed, fails, reject, rejected, invalid, not right, 0, "
    "错误, 不正确, 错, falsch, nicht korrekt, incorrecto, incorrecta",
    0.5: "partial, partially correct, partly correct, partially right, half correct, 部分正确",
}
_WORDS: Mapping[str, float] = {word: score for score, words in _SCORES.items() for word in words.split(", ")}
_WORD_KEYS = ("verdict", "judgment", "judgement", "decision", "is_correct", "correct", "correctness", "grade", "result")
_SCORE_KEYS = ("score", "rating")
_KEYS = {*_WORD_KEYS, *_SCORE_KEYS}
_REASON_KEYS = ("reason", "reasoning", "explanation", "rationale", "justification", "comment")

_WORD = "|".join(sorted(map(re.escape, _WORDS), key=len, reverse=True))
_MARKS = r"[\s*_`\"'\[\](){}<>:=#>~-]{0,12}"
_NAMES = "verdict|judge?ment|decision|conclusion|correctness|is[_ ]correct|grade|result|assessment|evaluation|判断|结论|urteil|veredicto"
_LABELLED = re.compile(
    rf"(?:^|[\n{{]|,\s?(?=[\"'])|\b(?:final|overall|my)\s|[.!?]\s)[\s*_`#>\"'(-]{{0,12}}(?:(?:the|my)\s)?(?:(?:final|overall)\s)?"
    rf"(?:{_NAMES})\b{_MARKS}(?:is\b)?[：]?{_MARKS}({_WORD})(?![\w-]|\s+or\b|\s*/)",
    re.IGNORECASE,
)
_TAGGED = re.compile(
    rf"<(?:verdict|judge?ment|answer|grade)>\s{{0,9}}({_WORD})\s{{0,9}}</|\[\[\s{{0,9}}({_WORD})\s{{0,9}}\]\]|"
    rf"\\boxed\{{(?:\\text\{{)?\s{{0,9}}({_WORD})\s{{0,9}}\}}",
    re.IGNORECASE,
)
_OPENING = re.compile(rf"[\s*_`\"'#]{{0,9}}({_WORD})[\s*_`\"']{{0,9}}(?:[.!:;–—\n]|$| - )", re.IGNORECASE)
_NUMBER = r"(\d{0,9}\.?\d{1,9})\s?(?:(%)|(?:/|out of)\s?(\d{1,9}))?"
_SCORED = re.compile(rf"\bscore\b[\s*_`\"':=]{{0,12}}{_NUMBER}", re.IGNORECASE)


def parse_verdict(text: str, response: str = "") -> Grade | None:
    """Return the verdict in a judge's `text` about `response`; None if it is missing or ambiguous."""
    if not (text := after_reasoning(text)[-_MAX:]):
        return None
    if (whole := _whole(text)) is not None:
        return _from_value(whole)
    found = [(end, value) for end, value in objects(text) if not _lower(value).keys().isdisjoint(_KEYS)]
    if not found:
        return _from_text(text, response)
    quoted = [value for _, value in objects(response[-_MAX:])]
    if not (own := [(end, _from_value(value)) for end, value in found if value not in quoted]):
        return None
    end, last = own[-1]
    agreed = all(said is not None and last is not None and said.correct == last.correct for _, said in own)
    return last if agreed or not text[end:].strip("`~ \n\t*.") else None


def _whole(text: str) -> Any:
    """Return the value of a text that is one JSON value, perhaps in a fence; else None."""
    if fence := re.match(r"(```|~~~)[\w-]{0,12}", text):
        text = text[fence.end() :].removesuffix(fence.group(1))
    match read_json(text, 0):
        case ([dict() | bool() | str() as value] | (dict() | bool() | str() as value), end) if not text[end:].strip():
            return value
    return None


def objects(text: str, opening: re.Pattern[str] = re.compile(r"\{")) -> Iterator[tuple[int, Any]]:
    """Yield (end, value) of each outermost JSON value in a text that begins with `opening`."""
    at = 0
    for _ in range(_MAX_OBJECTS):
        if (begin := opening.search(text, at)) is None:
            return
        value, at = read_json(text, begin.start()) or (None, begin.start() + 1)
        if value is not None:
            yield at, value


def _from_value(value: Any) -> Grade | None:
    if isinstance(value, (bool, str)):
        return _settle([_word(value)], [], "")
    fields = _lower(value)
    for name in ("result", "verdict"):
        if isinstance(inner := fields.get(name), dict):
            return _from_value(inner)
    words = [_word(fields[name]) for name in _WORD_KEYS if name in fields]
    scores = [_score(fields[name]) for name in _SCORE_KEYS if name in fields and fields[name] is not None]
    reason = next((fields[name] for name in _REASON_KEYS if isinstance(fields.get(name), str)), "")
    return _settle(words, scores, reason)


def _settle(words: Sequence[float | None], scores: Sequence[float | None], reason: str) -> Grade | None:
    """Combine words and scores into one verdict; None if they disagree or one of them could not be read."""
    match [*{*words}], [*{*scores}]:
        case [float(word)], [float(score)] if abs(word - score) <= 0.5:
            return Grade(score, word > 0.5, reason=reason)
        case ([float(score)], []) | ([], [float(score)]):
            return Grade(score, score > 0.5, reason=reason)
    return None


def _word(value: Any) -> float | None:
    """Return the score of a word: 1, 0, or 0.5 for partly; None if the word is not a verdict."""
    if value in (0, 1):
        return float(value)
    if not isinstance(value, str) or len(value) > 60:
        return None
    return _WORDS.get(" ".join(re.split(r"[\s_-]+", value.lower().strip(" \t\n.!*`\"'[]()<>✅❌"))))


def _score(value: Any) -> float | None:
    """Read a score in [0, 1]: a number, a fraction or a percentage; None for anything else."""
    if isinstance(value, str):
        if (found := re.fullmatch(_NUMBER, value.strip())) is None:
            return None
        value = float(found[1]) / (100 if found[2] else float(found[3] or 1) or math.nan)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if 0 <= value <= 1 else None


def _from_text(text: str, response: str) -> Grade | None:
    """Read a verdict that is not JSON: after a label (malformed objects too), in a tag, or as the bare word."""
    if (bare := _word(text)) is not None:
        return _settle([bare], [], "")
    found = [match for form in (_LABELLED, _TAGGED) for match in form.finditer(text)]
    own = [match for match in found if (said := match.group().strip()) not in response or said == text]
    words = [_word(next(filter(None, match.groups()))) for match in own]
    if not words:  # no label or tag: the whole last line, or the first word of the text
        opening = _OPENING.match(text)
        first = opening[1] if opening and len(opening[1]) > 1 else ""
        words = [word for said in (text.splitlines()[-1], first) if (word := _word(said)) is not None]
    scored = [match for match in _SCORED.finditer(text) if match.group() not in response]
    scores = [_score(text[match.start(1) : match.end()]) for match in scored]
    return _settle(words, scores, text[:500]) if words else None


def _lower(value: Mapping[str, Any]) -> dict[str, Any]:
    return {str(name).strip().lower().replace(" ", "_"): item for name, item in value.items()}
