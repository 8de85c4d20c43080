r"""`math`: the final answer of a worked solution against a label, by equality of mathematics and not of text.

1. The answer is what `answers.find_answer` finds; `metadata["reader"]` is "strict" (default) or "lenient".
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

from agentrl.rm_hub.grade import Grade
from agentrl.rm_hub.reading import values
from agentrl.rm_hub.reading.answers import Asked, find_answer, is_lenient
from agentrl.rm_hub.reading.boxed import boxes
from agentrl.rm_hub.reading.common import bad_label
from agentrl.rm_hub.reading.equality import Equality, compare
from agentrl.rm_hub.reading.latex import LONGEST, clean
from agentrl.rm_hub.reading.seen import seen
from agentrl.rm_hub.reading.shapes import shape
from agentrl.rm_hub.reading.words import wordy

_MOST_PARTS = 20
_HASHES = re.compile(r"####\s*(.+?)\s*$")


def grade_math(response: str, label: Any, metadata: Mapping[str, Any]) -> Grade:
    """Right if the response's final answer equals one of the accepted ones."""
    return grade_labels(response, read_labels("math", label), is_lenient(metadata, "math"))


def grade_labels(response: str, golds: list[str], lenient: bool) -> Grade:
    """Right if the response's final answer equals one of the labels that were read."""
    found = find_answer(response, asked_for(golds), lenient)
    if not found.values:
        return Grade(0.0, False, None, found.how)
    text = " or ".join(found.values)
    verdict = best(golds, text)
    if not verdict.equal and found.how == "box" and any(shape(clean(gold)).kind in {"list", "set"} for gold in golds):
        # One part of the answer a box, for labels with several parts.
        text = " or ".join(dict.fromkeys(box.text for box in boxes(seen(response))[-_MOST_PARTS:]))
        verdict = best(golds, text)
    return Grade(float(verdict.equal), verdict.equal, text, f"{found.how}: {verdict.reason}")


def asked_for(golds: list[str]) -> Asked:
    """Words if all labels are words, else formulas."""
    return Asked(values.phrase if all(wordy(clean(gold)) for gold in golds) else values.formula)


def best(golds: list[str], answer: str) -> Equality:
    """The verdict of the first label that the answer equals, else that of the last label."""
    if len(answer) > LONGEST:
        return Equality(False, f"an answer of more than {LONGEST} characters")
    said = clean(answer)
    if (prose := values.SAID.match(said)) is not None and values.is_value(said[prose.end() :]):
        answer = said[prose.end() :]
    verdict = Equality(False, "no label")
    for gold in golds:
        verdict = compare(gold, answer)
        if verdict.equal:
            return verdict
    return verdict


def read_labels(grader: str, label: Any) -> list[str]:
    """The accepted answers as text.

    Raises:
        GraderFailure: the label is empty or of a type that is no answer.
    """
    golds = [_label(grader, one) for one in (label if isinstance(label, (list, tuple)) else [label])]
    if not golds:
        raise bad_label(grader, "at least one accepted answer", label)
    return golds


def _label(grader: str, label: Any) -> str:
    if isinstance(label, (int, Fraction)):
        return str(label)
    if isinstance(label, float) and math.isfinite(label):
        return str(int(label)) if label.is_integer() and abs(label) < 1e15 else repr(label)
    if not isinstance(label, str):
        raise bad_label(grader, "text, a finite number or a list of those", label)
    text = label.strip()
    if (solution := _HASHES.search(text)) is not None:
        text = solution.group(1)
    elif "box" in text and (boxed := find_answer(text, Asked(values.formula))).how == "box":
        text = " or ".join(boxed.values)
    if not clean(text):
        raise bad_label(grader, "text with an answer in it", label)
    return text
