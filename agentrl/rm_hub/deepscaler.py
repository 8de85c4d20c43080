r"""`deepscaler`: a finished reasoning and then a boxed answer, as DeepScaleR's reward asks (Luo et al. 2025).

1. The response must end its reasoning: `</think>`, or `###Response` before the answer. Without one the score is 0.
2. What follows must answer with a `\boxed{}` (`answers`). Boxes inside the reasoning do not count.
3. The box is right if it equals one of the labels, by normalised text or as mathematics (`equality`). Score 1 or 0.
"""

import re
from collections.abc import Mapping
from typing import Any

from agentrl.rm_hub.grade import Grade
from agentrl.rm_hub.math import asked_for, best, read_labels
from agentrl.rm_hub.reading.answers import NOTHING, find_answer
from agentrl.rm_hub.reading.seen import TAIL

_ENDED = re.compile(r"</think>|###\s?Response")


def grade_deepscaler(response: str, label: Any, metadata: Mapping[str, Any]) -> Grade:
    """Right if a box after the reasoning equals an accepted answer."""
    golds = read_labels("deepscaler", label)
    text = response[-TAIL:]
    ends = [match.end() for match in _ENDED.finditer(text)]
    if not ends:
        return Grade(0.0, False, None, "the reasoning does not end: no </think>")
    found = find_answer(text[ends[-1] :], asked_for(golds)._replace(announced=NOTHING, called=NOTHING))
    if found.how != "box":
        return Grade(0.0, False, None, f"no box after the reasoning: {found.how}")
    said = " or ".join(found.values)
    verdict = best(golds, said)
    return Grade(float(verdict.equal), verdict.equal, said, verdict.reason)
