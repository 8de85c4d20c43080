r"""`dapo`: answers in the form that DAPO asks for, a last line `Answer: ...`; score +1 or -1 (Yu et al. 2025, arXiv:2503.14476).

1. Only the last `WINDOW` characters are read: the form says that the answer comes last.
2. `metadata["dapo_form"]` chooses what counts: "answer" (default) is the last `Answer:` in the window; "strict" wants it on
   the very last line; "boxed" reads the last box instead.
3. The answer is compared as by the `math` grader. `parts` has `score` (+1 or -1) and `acc` (1 or 0).
"""

import re
from collections.abc import Mapping
from typing import Any

from agentrl.errors import GraderFailure
from agentrl.rm_hub.grade import Grade
from agentrl.rm_hub.math import best, read_labels
from agentrl.rm_hub.reading import prose
from agentrl.rm_hub.reading.answers import boxed_answer, boxes, visible
from agentrl.rm_hub.reading.latex import clean
from agentrl.rm_hub.reading.words import wordy

WINDOW = 300
"""Characters at the end of a response that are read. The longest answer of MATH-500 has 159."""

_FORMS = ("answer", "strict", "boxed")
_FORMULA = re.compile(r"\$([^$]+)(?<!\\)\$\.?|\\\(((?:(?!\\\)).)+)\\\)\.?")
_LINE = re.compile(r"(?i)\banswer[*_\s]*:[*_]*\s*([^\n]+)")


def grade_dapo(response: str, label: Any, metadata: Mapping[str, Any]) -> Grade:
    """+1 if the answer is in the asked form and equals an accepted one, else -1.

    Raises:
        GraderFailure: the label is no answer, or `metadata["dapo_form"]` is none of "answer", "strict" and "boxed".
    """
    form = metadata.get("dapo_form", "answer")
    if form not in _FORMS:
        raise GraderFailure(
            f"dapo: metadata dapo_form must be one of {', '.join(_FORMS)}, got {form!r}", kind="grader_bad_metadata"
        )
    golds = read_labels("dapo", label)
    text, finished = visible(response)
    if not finished:
        return _grade(False, None, "the response is reasoning without an answer after it")
    answer, reason = _boxed(text) if form == "boxed" else _line(text.rstrip(), form == "strict", golds)
    if answer is None:
        return _grade(False, None, reason)
    verdict = best(golds, answer)
    return _grade(verdict.equal, answer, verdict.reason)


def _grade(right: bool, extracted: str | None, reason: str) -> Grade:
    score = 1.0 if right else -1.0
    return Grade(score, right, extracted, reason, {"score": score, "acc": float(right)})


def _boxed(text: str) -> tuple[str | None, str]:
    # A box may begin before the window; that it ends in it is enough.
    found = boxed_answer(text.rstrip())
    last = boxes(text)[-1:]
    if found is None or not last or len(text.rstrip()) - last[0][1] > WINDOW:
        return None, f"no box in the last {WINDOW} characters"
    return found.text, ""


def _line(text: str, strict: bool, golds: list[str]) -> tuple[str | None, str]:
    lines = list(_LINE.finditer(text, max(0, len(text) - WINDOW)))
    if not lines:
        return None, f"no line 'Answer: ...' in the last {WINDOW} characters"
    if strict and text[lines[-1].end() :].strip():
        return None, "the line 'Answer: ...' is not the last one"
    said = lines[-1].group(1).strip().strip("*_").strip()
    if (found := boxed_answer(said)) is not None:
        return found.text, ""
    if (formula := _FORMULA.fullmatch(said)) is not None:
        return formula.group(1) or formula.group(2), ""
    words = all(wordy(clean(gold)) for gold in golds)
    value = prose.find(f"Answer: {said}", words, lines=True)
    return (value, "") if value else (None, "nothing after 'Answer:'")
