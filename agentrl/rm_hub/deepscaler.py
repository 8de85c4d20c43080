r"""`deepscaler`: a finished reasoning and then a boxed answer, as DeepScaleR's reward asks (Luo et al. 2025).

1. The response must end its reasoning: `</think>`, or `###Response` before the answer. Without one the score is 0.
2. What follows must hold a `\boxed{}`; the last one counts. Boxes inside the reasoning do not.
3. The box is right if it equals one of the labels, by normalised text or as mathematics (`equality`). Score 1 or 0.
"""

import re
from collections.abc import Mapping
from typing import Any

from agentrl.rm_hub.grade import Grade
from agentrl.rm_hub.math import best, read_labels
from agentrl.rm_hub.reading.answers import TAIL, boxed_answer

_ENDED = re.compile(r"</think>|###\s?Response")


def grade_deepscaler(response: str, label: Any, metadata: Mapping[str, Any]) -> Grade:
    """Right if a box after the reasoning equals an accepted answer.

    Raises:
        GraderFailure: the label is empty or of a type that is no answer.
    """
    golds = read_labels("deepscaler", label)
    text = response[-TAIL:]
    ends = [match.end() for match in _ENDED.finditer(text)]
    if not ends:
        return Grade(0.0, False, None, "the reasoning does not end: no </think>")
    found = boxed_answer(text[ends[-1] :])
    if found is None:
        return Grade(0.0, False, None, "no box after the reasoning")
    verdict = best(golds, found.text)
    return Grade(float(verdict.equal), verdict.equal, found.text, verdict.reason)
