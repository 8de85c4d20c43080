"""`math`: compares the final answer of a worked solution with a label, by mathematical equality. `answers.find_answer`
finds the answer; `metadata["reader"]` is "strict" (default) or "lenient". `equality.compare` compares numbers,
expressions, sets, tuples, intervals, matrices and equations, with math-verify as the last resort. A label is a number,
text, LaTeX, a boxed or `####` solution, or a list. `gsm8k`, `deepscaler` and `dapo` share this."""

import math
import re
from fractions import Fraction
from itertools import product
from typing import Any

from agentrl.rm_hub.grade import Grade, Metadata
from agentrl.rm_hub.reading import numbers, sentences
from agentrl.rm_hub.reading.answers import NOTHING, AnswerPattern, find_answer, is_lenient, read
from agentrl.rm_hub.reading.common import bad_label, boxes, one_of
from agentrl.rm_hub.reading.common import golds as texts_of
from agentrl.rm_hub.reading.equality import Equality, compare
from agentrl.rm_hub.reading.latex import LONGEST, clean
from agentrl.rm_hub.reading.shapes import shape
from agentrl.rm_hub.reading.words import wordy

WINDOW = 300  # characters at the end of a response that `dapo` reads. The longest answer of MATH-500 has 159

_MAX_PARTS = 20
_LINE = re.compile(r"(?i)(?:\banswer|答案)[*_\s]*[:：][*_]*[ \t]*")
_ENDED = re.compile(r"</think>|###\s?Response")
_LETTERED = re.compile(r"[{\s]*(?i:option |choice |answer )?(?:\(\s*[A-J]\s*\)|[A-J]\s*[.:)]\s)[}\s]*(?=\S)")
"""A choice's letter before its value in a cleaned text, as in AMC's answers: `\\textbf{(C)}\\ 42`."""
_HASHES = re.compile(r"####\s*(.+?)\s*$")


def grade_math(response: str, label: Any, metadata: Metadata) -> Grade:
    """Grade `math`: 1 if the response's final answer equals an accepted answer, else 0."""
    return grade_labels(response, read_labels("math", label), is_lenient(metadata, "math"))


def grade_gsm8k(response: str, label: Any, metadata: Metadata) -> Grade:
    """Grade `gsm8k`: 1 if the response's final number equals the label's, else 0 (Cobbe et al. 2021, arXiv:2110.14168).
    18, 18.00, $18, 18 dollars and "eighteen" are equal; 17.99 is different. A label with two or more decimals accepts a
    longer number that rounds to it. A label is a number, GSM8K's solution text with `#### 18`, or a list."""
    wanted = [gold.rpartition("####")[2].strip() for gold in texts_of(label, "gsm8k")]
    if not all(numbers.read(clean(gold)) is not None for gold in wanted):
        raise bad_label("gsm8k", "one number, or a solution that ends with '#### number'", label)
    return grade_labels(response, wanted, is_lenient(metadata, "gsm8k"))


def grade_deepscaler(response: str, label: Any, metadata: Metadata) -> Grade:
    """Grade `deepscaler`: 1 if a box after the reasoning equals an accepted one, else 0 (DeepScaleR: Luo et al. 2025).
    The reasoning must end with `</think>` or `###Response`; boxes inside the reasoning do not count."""
    golds = read_labels("deepscaler", label)
    text = response[-sentences.TAIL :]
    if not (ends := [match.end() for match in _ENDED.finditer(text)]):
        return Grade(0.0, False, None, "the reasoning does not end: no </think>")
    found = find_answer(text[ends[-1] :], asked_for(golds)._replace(announced=NOTHING, called=NOTHING))
    if found.how != "box":
        return Grade(0.0, False, None, f"no box after the reasoning: {found.how}")
    said = " or ".join(found.values)
    verdict = best(golds, said)
    return Grade(float(verdict.equal), verdict.equal, said, verdict.reason)


def grade_dapo(response: str, label: Any, metadata: Metadata) -> Grade:
    """Grade `dapo`: +1 for an accepted answer in the required form, else -1 (Yu et al. 2025, arXiv:2503.14476). Only
    the last `WINDOW` characters count. `metadata["dapo_form"]` is the required form: "answer" (default) is an `Answer:`
    in the window. "strict" is one on the last line. "boxed" is a last box that ends in the window. `answers` chooses
    among several candidates and can reject all. `parts` has `score` (+1 or -1) and `acc` (1 or 0)."""
    form = one_of(metadata, "dapo_form", ("answer", "strict", "boxed"), "dapo")
    golds = read_labels("dapo", label)
    asked = asked_for(golds)._replace(announced=NOTHING if form == "boxed" else _LINE, called=NOTHING)
    text = sentences.seen(response).rstrip()
    if form == "boxed":
        marked = boxes(text)
        fits = bool(marked) and marked[-1].complete and len(text) - marked[-1].end <= WINDOW
        since = 0  # the box may begin before the window
    else:
        lines = list(_LINE.finditer(text, max(0, len(text) - WINDOW)))
        fits = bool(lines) and not (form == "strict" and "\n" in text[lines[-1].end() :].strip())
        since = lines[0].start() if lines else 0
    if not fits:
        what = "box" if form == "boxed" else "line 'Answer: ...'" + (" at the very end" if form == "strict" else "")
        return _dapo(False, None, f"no {what} in the last {WINDOW} characters of the answer")
    if not (found := read(text, asked, since=since)).values:
        return _dapo(False, None, found.how)
    said = " or ".join(found.values)
    verdict = best(golds, said)
    return _dapo(verdict.equal, said, verdict.reason)


def _dapo(right: bool, extracted: str | None, reason: str) -> Grade:
    score = 1.0 if right else -1.0
    return Grade(score, right, extracted, reason, {"score": score, "acc": float(right)})


def grade_labels(response: str, golds: list[str], lenient: bool) -> Grade:
    """Grade the response: 1 if its final answer equals one of the accepted answers `golds`, else 0."""
    if not (found := find_answer(response, asked_for(golds), lenient)).values:
        return Grade(0.0, False, None, found.how)
    text = " or ".join(found.values)
    verdict = best(golds, text)
    if not verdict.equal and found.how == "box" and any(shape(clean(gold)).kind in {"list", "set"} for gold in golds):
        # For a label with several parts, the response may put each part into its own box.
        text = " or ".join(dict.fromkeys(box.text for box in boxes(sentences.seen(response))[-_MAX_PARTS:]))
        verdict = best(golds, text)
    return Grade(float(verdict.equal), verdict.equal, text, f"{found.how}: {verdict.reason}")


def asked_for(golds: list[str]) -> AnswerPattern:
    """Return the pattern for words if all labels are words, else the pattern for formulas."""
    return AnswerPattern(sentences.phrase if all(wordy(clean(gold)) for gold in golds) else sentences.formula)


def best(golds: list[str], answer: str) -> Equality:
    """Return the verdict for the first label that equals the answer, else for the last label."""
    if len(answer) > LONGEST:
        return Equality(False, f"an answer of more than {LONGEST} characters")
    said = clean(answer)
    if (prose := sentences.SAID.match(said)) is not None and sentences.is_value(said[prose.end() :]):
        answer = said[prose.end() :]
    answers = [answer, said[letter.end() :]] if (letter := _LETTERED.match(said)) else [answer]
    verdict = Equality(False, "no label")
    for gold, said in product(golds, answers):
        if (verdict := compare(gold, said)).equal:
            return verdict
    return verdict


def read_labels(grader: str, label: Any) -> list[str]:
    """Return the accepted answers as text. Raises GraderFailure: the label is empty or has an unsupported type."""
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
    elif "box" in text and (boxed := find_answer(text, AnswerPattern(sentences.formula))).how == "box":
        text = " or ".join(boxed.values)
    if not clean(text):
        raise bad_label(grader, "text with an answer in it", label)
    return text
