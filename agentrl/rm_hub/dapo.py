r"""`dapo`: answers in the form that DAPO asks for, a last line `Answer: ...`; score +1 or -1 (Yu et al. 2025, arXiv:2503.14476).

1. Only the last `WINDOW` characters are read: the form says that the answer comes last.
2. `metadata["dapo_form"]` chooses what counts: "answer" (default) is an `Answer:` in the window; "strict" wants it on the
   very last line; "boxed" reads a box instead. Which of several counts, and what makes one no answer, is `answers`'.
3. The answer is compared as by the `math` grader. `parts` has `score` (+1 or -1) and `acc` (1 or 0).
"""

import re
from collections.abc import Mapping
from typing import Any

from agentrl.rm_hub.grade import Grade
from agentrl.rm_hub.math import asked_for, best, read_labels
from agentrl.rm_hub.reading.answers import NOTHING, read
from agentrl.rm_hub.reading.boxed import boxes
from agentrl.rm_hub.reading.common import one_of
from agentrl.rm_hub.reading.seen import seen

WINDOW = 300
"""Characters at the end of a response that are read. The longest answer of MATH-500 has 159."""

_LINE = re.compile(r"(?i)(?:\banswer|答案)[*_\s]*[:：][*_]*[ \t]*")


def grade_dapo(response: str, label: Any, metadata: Mapping[str, Any]) -> Grade:
    """+1 if the answer is in the asked form and equals an accepted one, else -1."""
    form = one_of(metadata, "dapo_form", ("answer", "strict", "boxed"), "dapo")
    golds = read_labels("dapo", label)
    asked = asked_for(golds)._replace(announced=NOTHING if form == "boxed" else _LINE, called=NOTHING)
    text = seen(response).rstrip()
    since = _box_in(text) if form == "boxed" else _line_in(text, form == "strict")
    if since is None:
        what = "box" if form == "boxed" else "line 'Answer: ...'" + (" at the very end" if form == "strict" else "")
        return _grade(False, None, f"no {what} in the last {WINDOW} characters of the answer")
    found = read(text, asked, since=since)
    if not found.values:
        return _grade(False, None, found.how)
    said = " or ".join(found.values)
    verdict = best(golds, said)
    return _grade(verdict.equal, said, verdict.reason)


def _box_in(text: str) -> int | None:
    """Where reading begins, which is the start, if the last box ends in the window; it may begin before that."""
    found = boxes(text)
    return 0 if found and found[-1].complete and len(text) - found[-1].end <= WINDOW else None


def _line_in(text: str, strict: bool) -> int | None:
    """Where the first `Answer:` of the window begins; for "strict" nothing may stand behind the last one's line."""
    lines = list(_LINE.finditer(text, max(0, len(text) - WINDOW)))
    return None if not lines or (strict and "\n" in text[lines[-1].end() :].strip()) else lines[0].start()


def _grade(right: bool, extracted: str | None, reason: str) -> Grade:
    score = 1.0 if right else -1.0
    return Grade(score, right, extracted, reason, {"score": score, "acc": float(right)})
