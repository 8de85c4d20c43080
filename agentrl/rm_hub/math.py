r"""`math`: the final answer of a worked solution against a label, by equality of mathematics and not of text.

1. The answer is what the response commits to at its end (`answers.find_answer`): the last box, tag or announced value.
2. Equal numbers, expressions, sets, tuples, intervals, matrices and equations are right however they are written
   (`equality.compare`); the last resort is math-verify. Score 1 or 0.
3. A label may be a number, text, LaTeX, a boxed or `####` solution, or a list of accepted answers.
4. Pure and without a deadline of its own: a pool that can kill its workers gives it one.
"""

import math
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from agentrl.errors import GraderFailure
from agentrl.rm_hub.grade import Grade
from agentrl.rm_hub.gsm8k import final_number
from agentrl.rm_hub.reading import prose
from agentrl.rm_hub.reading.answers import Found, boxed_answer, boxes, find_answer, visible
from agentrl.rm_hub.reading.claims import Claim
from agentrl.rm_hub.reading.equality import Equality, compare
from agentrl.rm_hub.reading.latex import LONGEST, clean
from agentrl.rm_hub.reading.shapes import shape
from agentrl.rm_hub.reading.words import wordy

_PLAIN = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")
_SYMBOLS = re.compile(
    r"\\(?!(?:times|cdot|div|text|quad|qquad|approx|mathbf|textbf|begin|end|therefore|left|right)(?![a-zA-Z]))[a-zA-Z]"
    r"|[π√^]|\d!|\d\s?(?!x\s?[$\d])[a-zA-Z](?![a-zA-Z])|(?<![a-zA-Z'’])[b-hj-wyz](?![a-zA-Z'’])\s?[-+*/(]|[\[\](]\s?-?\d+,|-\s?\(\s?\d|\d\)\s?[\^!]"
)
_END = 200
"""Characters at the end of a text that must be plain prose for a number to be read from it."""
_HASHES = re.compile(r"####\s*(.+?)\s*$")


def grade_math(response: str, label: Any, metadata: Mapping[str, Any]) -> Grade:
    """Right if the response's final answer equals one of the accepted ones.

    Raises:
        GraderFailure: the label is empty or of a type that is no answer.
    """
    golds = read_labels("math", label)
    words = all(wordy(clean(gold)) for gold in golds)
    found = find_answer(response, words) or (None if words else _in_words(response))
    if found is None:
        return Grade(0.0, False, None, "no final answer found")
    said = found.text.strip()
    loose = re.search(r"(?<![\\a-zA-Z])[a-zA-Z]{2}|\d\s?%$", clean(said)) or re.search("[→⟹⇒]|[^\x00-\u024f]", said)
    in_prose = found.how in {"last line", "sentence"} and (
        _PLAIN.fullmatch(said) is not None or (found.how == "last line" and loose is not None)
    )
    if in_prose and " or " not in found.text and (spoken := _number_in_prose(response, golds)) is not None:
        found = Found(spoken, "conclusion")
    verdict = best(golds, found.text)
    if not verdict.equal and found.how == "box" and any(shape(clean(gold)).kind in {"list", "set"} for gold in golds):
        # One part of the answer a box, for labels with several parts.
        joined = " or ".join(dict.fromkeys(text for _, _, text in boxes(visible(response)[0])[-20:]))
        if (together := best(golds, joined)).equal:
            return Grade(1.0, True, joined, f"boxes together: {together.reason}")
    return Grade(float(verdict.equal), verdict.equal, found.text, f"{found.how}: {verdict.reason}")


def best(golds: list[str], answer: str) -> Equality:
    """The verdict of the first label that the answer equals, else that of the last label."""
    if len(answer) > LONGEST:
        return Equality(False, f"an answer of more than {LONGEST} characters")
    verdict = Equality(False, "no label")
    for gold in golds:
        verdict = compare(gold, answer)
        if verdict.equal:
            return verdict
    text = clean(answer)
    if wordy(text) and not any(wordy(clean(gold)) for gold in golds):
        # "The total is 12 apples" inside a box.
        value = prose.find(text, words=False, lines=True)
        if value is not None and clean(value) != text:
            return best(golds, value)
    return verdict


def _in_words(response: str) -> Found | None:
    """An answer without any mathematics, for labels that can be said in words ("all real numbers")."""
    found = find_answer(response, words=True)
    return found if found is not None and len(found.text.split()) <= 6 and wordy(clean(found.text)) else None


def _number_in_prose(response: str, golds: list[str]) -> str | None:
    """The number that prose without boxes and tags comes to, for labels that are numbers; None if it has none."""
    if not all(_PLAIN.fullmatch(clean(gold)) for gold in golds):
        return None
    text, _ = visible(response)
    claim = None if _SYMBOLS.search(text.rstrip()[-_END:]) else final_number(text)
    return str(claim.values[0]) if isinstance(claim, Claim) else None


def read_labels(grader: str, label: Any) -> list[str]:
    """The accepted answers as text.

    Raises:
        GraderFailure: the label is empty or of a type that is no answer.
    """
    golds = [_label(grader, one) for one in (label if isinstance(label, (list, tuple)) else [label])]
    if not golds:
        raise GraderFailure(f"{grader}: the list of accepted answers is empty", kind="grader_bad_label")
    return golds


def _label(grader: str, label: Any) -> str:
    if isinstance(label, (int, Fraction)):
        return str(label)
    if isinstance(label, float) and math.isfinite(label):
        return str(int(label)) if label.is_integer() and abs(label) < 1e15 else repr(label)
    if not isinstance(label, str):
        raise GraderFailure(
            f"{grader}: a label must be text, a finite number or a list of those, got {type(label).__name__} "
            f"{str(label)[:40]!r}",
            kind="grader_bad_label",
        )
    text = label.strip()
    if (solution := _HASHES.search(text)) is not None:
        text = solution.group(1)
    elif (boxed := boxed_answer(text)) is not None:
        text = boxed.text
    if not clean(text):
        raise GraderFailure(f"{grader}: the label {label[:40]!r} has no answer in it", kind="grader_bad_label")
    return text
