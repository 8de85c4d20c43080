"""Reading a judge's verdict out of what it wrote.

1. Asked for is one JSON object with `verdict`, `score` and `reason`. Judges also answer with fences around it, prose
   before it, single quotes, a cut-off end, `Verdict: correct` on a line, or the bare word; all of that is read.
2. What occurs in the graded answer as well is a quotation, not the judge's verdict, unless it is all the judge wrote.
3. Several verdicts must agree, or the last must end the text as a JSON object. Anything else is no verdict (None):
   a guess would be a silent wrong reward.
4. Linear in the length; only the last 20,000 characters are read.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

_MOST = 20_000
_MOST_OBJECTS = 64

_RIGHT = (
    "correct, right, true, yes, pass, passed, passes, accept, accepted, valid, 1, "
    "正确, 对, richtig, korrekt, correcto, correcta"
)
_WRONG = (
    "incorrect, not correct, wrong, false, no, fail, failed, fails, reject, rejected, invalid, not right, 0, "
    "错误, 不正确, 错, falsch, nicht korrekt, incorrecto, incorrecta"
)
_PARTLY = "partial, partially correct, partly correct, partially right, half correct, 部分正确"
_WORDS: Mapping[str, bool | None] = {
    word: verdict for words, verdict in ((_RIGHT, True), (_WRONG, False), (_PARTLY, None)) for word in words.split(", ")
}
_WORD_KEYS = ("verdict", "judgment", "judgement", "decision", "is_correct", "correct", "correctness", "grade", "result")
_SCORE_KEYS = ("score", "rating")
_REASON_KEYS = ("reason", "reasoning", "explanation", "rationale", "justification", "comment")

_WORD = "|".join(sorted(map(re.escape, _WORDS), key=len, reverse=True))
_MARKS = r"[\s*_`\"'\[\](){}<>:=#>~-]{0,12}"
_NAMES = "verdict|judge?ment|decision|conclusion|correctness|is[_ ]correct|grade|result|assessment|evaluation|判断|结论|urteil|veredicto"
_LABELLED = re.compile(
    rf"(?:^|\n|\b(?:final|overall|my)\s|[.!?]\s)[\s*_`#>\"'{{(-]{{0,12}}(?:(?:the|my)\s)?(?:(?:final|overall)\s)?(?:{_NAMES})\b"
    rf"{_MARKS}(?:is\b)?[：]?{_MARKS}({_WORD})(?![\w-]|\s+or\b|\s*/)",
    re.IGNORECASE,
)
_TAGGED = re.compile(
    rf"<(?:verdict|judge?ment|answer|grade)>\s{{0,9}}({_WORD})\s{{0,9}}</|\[\[\s{{0,9}}({_WORD})\s{{0,9}}\]\]|"
    rf"\\boxed\{{(?:\\text\{{)?\s{{0,9}}({_WORD})\s{{0,9}}\}}",
    re.IGNORECASE,
)
_SENTENCE = re.compile(
    r"(?:(?:therefore|thus|so|hence|overall|in conclusion),?\s)?(?:the|this|that)\s(?:given |final |graded |submitted |model's |student's )?"
    rf"(?:answer|response|solution)\sis\s(?:therefore |thus |clearly |indeed )?({_WORD})\s?[.!]?",
    re.IGNORECASE,
)
_OPENING = re.compile(rf"[\s*_`\"'#]{{0,9}}({_WORD})[\s*_`\"']{{0,9}}(?:[.!:;–—\n]|$| - )", re.IGNORECASE)
_FIELD = re.compile(
    r"[\"']?([A-Za-z_]{3,20})[\"']?\s{0,9}[:=]\s{0,9}(\"[^\"\n]{0,2000}\"?|'[^'\n]{0,2000}'?|[^,}\n]{1,40})"
)
_SCORE = re.compile(r"\bscore\b[\s*_`\"':=]{0,12}(\d+(?:\.\d+)?(?:\s?(?:/|out of)\s?\d+|\s?%)?)", re.IGNORECASE)
_FRACTION = re.compile(r"(\d+(?:\.\d+)?)\s?(?:/|out of)\s?(\d+)")


@dataclass(frozen=True, slots=True)
class JudgeVerdict:
    """What a judge decided: right or not, a score in [0, 1], and its reason."""

    correct: bool
    score: float
    reason: str = ""


def parse_verdict(text: str, response: str = "") -> JudgeVerdict | None:
    """The verdict in `text`, what a judge wrote about `response`; None if there is none or it is ambiguous."""
    text = _without_thinking(text).strip()[-_MOST:]
    if not text:
        return None
    if (whole := _whole(text)) is not None:
        return _from_value(whole)
    objects = [(end, value) for end, value in _objects(text) if _has_verdict(value)]
    if objects:
        quoted = [value for _, value in _objects(response[-_MOST:])]
        own = [(end, value) for end, value in objects if value not in quoted]
        return _last_or_agreed(text, own) if own else None
    return _from_text(text, response)


def _without_thinking(text: str) -> str:
    """What follows the judge's reasoning; nothing if the reasoning was cut off."""
    head, closed, tail = text.rpartition("</think>")
    return tail if closed else "" if "<think>" in head + tail else text


def _whole(text: str) -> Any:
    """The value if the text is one JSON value, perhaps in a fence; else None."""
    if fence := re.match(r"(```|~~~)[\w-]{0,12}", text):
        text = text[fence.end() :].removesuffix(fence.group(1))
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    return value if isinstance(value, (dict, bool, str)) else None


def _objects(text: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """The JSON objects in a text, not those inside of others, with the positions of their ends."""
    decoder, at = json.JSONDecoder(), 0
    for _ in range(_MOST_OBJECTS):
        at = text.find("{", at)
        if at < 0:
            return
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            at += 1
            continue
        yield at, value


def _has_verdict(value: Mapping[str, Any]) -> bool:
    inner = value.get("result", value.get("verdict"))
    return any(name in _lower(value) for name in (*_WORD_KEYS, *_SCORE_KEYS)) or isinstance(inner, dict)


def _last_or_agreed(text: str, found: list[tuple[int, dict[str, Any]]]) -> JudgeVerdict | None:
    end, last = found[-1]
    verdict = _from_value(last)
    if not text[end:].strip("`~ \n\t*."):
        return verdict
    others = [_from_value(value) for _, value in found]
    agreed = verdict is not None and all(v is not None and v.correct == verdict.correct for v in others)
    return verdict if agreed else None


def _from_value(value: Any) -> JudgeVerdict | None:
    if isinstance(value, (bool, str)):
        word = _word(value)
        return JudgeVerdict(word, float(word)) if isinstance(word, bool) else None
    if not isinstance(value, dict):
        return None
    fields = _lower(value)
    for name in ("result", "verdict"):
        if isinstance(inner := fields.get(name), dict):
            return _from_value(inner)
    words = [_word(fields[name]) for name in _WORD_KEYS if name in fields]
    scores = [_score(fields[name]) for name in _SCORE_KEYS if name in fields and fields[name] is not None]
    reason = next((fields[name] for name in _REASON_KEYS if isinstance(fields.get(name), str)), "")
    return _settle(words, scores, reason)


def _settle(words: list[Any], scores: list[float | None], reason: str) -> JudgeVerdict | None:
    """One verdict from all that was said, if it holds together. In `words` None is "partly", and `...` unreadable."""
    if ... in words or None in scores or len(set(words)) > 1 or len(set(scores)) > 1:
        return None
    score = scores[0] if scores else None
    if not words:
        return None if score is None else JudgeVerdict(score > 0.5, score, reason)
    word = words[0]
    if score is None:
        score = 0.5 if word is None else float(word)
    if (word is True and score < 0.5) or (word is False and score > 0.5):
        return None
    return JudgeVerdict(word is True, score, reason)


def _word(value: Any) -> Any:
    """True, False, None for partly, or `...` for what is no verdict."""
    if isinstance(value, bool):
        return value
    if isinstance(value, (int, float)):
        return bool(value) if value in (0, 1) else ...
    if not isinstance(value, str) or len(value) > 60:
        return ...
    word = " ".join(re.split(r"[\s_-]+", value.lower().strip(" \t\n.!*`\"'[]()<>✅❌")))
    return _WORDS.get(word, ...)


def _score(value: Any) -> float | None:
    """A score in [0, 1]: a number, a fraction or a percentage; None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        text = value.strip()
        if found := _FRACTION.fullmatch(text):
            whole = float(found[2])
            value = float(found[1]) / whole if whole else math.nan
        elif re.fullmatch(r"\d{1,9}(?:\.\d{1,9})?\s?%", text):
            value = float(text.rstrip("% ")) / 100
        elif re.fullmatch(r"\d{1,9}(?:\.\d{1,9})?|\.\d{1,9}", text):
            value = float(text)
    if not isinstance(value, (int, float)):
        return None
    return float(value) if 0 <= value <= 1 else None


def _from_text(text: str, response: str) -> JudgeVerdict | None:
    """A verdict that is no JSON: fields with other quotes or cut off, a labelled line, the bare word, a sentence."""
    if "{" in text and (verdict := _from_fields(text, response)) is not None:
        return verdict
    if isinstance(bare := _word(text), bool):
        return JudgeVerdict(bare, float(bare))
    found = [m for m in _LABELLED.finditer(text)] + [m for m in _TAGGED.finditer(text)]
    own = [m for m in found if m.group().strip() not in response or m.group().strip() == text]
    words = [_word(next(g for g in m.groups() if g)) for m in own]
    words = words or _bare(text)
    if not words:
        return None
    scores = [_score(m.group(1)) for m in _SCORE.finditer(text) if m.group().strip() not in response]
    return _settle(words, scores, text[:500])


def _from_fields(text: str, response: str) -> JudgeVerdict | None:
    """An object with single quotes, bare words or a missing end. Its values are read up to the first that repeats."""
    start = text.rfind("{")
    if text[start:].strip() in response:
        return None
    fields: dict[str, Any] = {}
    for match in _FIELD.finditer(text, start):
        name, raw = match.group(1).lower(), match.group(2).strip()
        if raw[0] in "\"'" and (len(raw) < 2 or raw[-1] != raw[0]) and name not in _REASON_KEYS:
            return None
        fields.setdefault(name, raw.strip("\"'"))
    return _from_value(fields) if _has_verdict(fields) else None


def _bare(text: str) -> list[Any]:
    """Verdicts without a label: alone on the last line, as the first word of the first, or in a closing sentence."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    words = [word for word in (_word(lines[-1]),) if word is not ...]
    if (opening := _OPENING.match(text)) and len(opening.group(1)) > 1:
        words.append(_word(opening.group(1)))
    last = re.split(r"(?<=[.!?])\s", lines[-1])[-1]
    if sentence := _SENTENCE.fullmatch(last.strip(" *_`")):
        words.append(_word(sentence.group(1)))
    return words


def _lower(value: Mapping[str, Any]) -> dict[str, Any]:
    return {str(name).strip().lower().replace(" ", "_"): item for name, item in value.items()}
