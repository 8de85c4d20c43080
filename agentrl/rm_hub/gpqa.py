"""Multiple choice, by letter or by the text of the choice (GPQA: Rein et al. 2023, arXiv:2311.12022).

1. The answer is what `answers.find_answer` finds, with `metadata["reader"]`: a box, an `<answer>` tag, "the answer is (B)",
   "option B is correct", "I choose B", or a response that is nothing but a choice.
2. "A or B", "A and C" and two letters in a box are no answer; "not A but B" is B; "A is wrong" claims nothing.
3. The label is a letter, a choice's text, or a choice's index from 0 (an integer). `choices` (a list, or a mapping from
   letters) and `valid_letters` are read from the metadata; without them the letters are A to D, or up to J if the
   label is one of those.
"""

from collections.abc import Mapping
from typing import Any

from agentrl.rm_hub.grade import Grade
from agentrl.rm_hub.reading.answers import CHOICE_ANNOUNCED, CHOICE_CALLED, Asked, find_answer, is_lenient
from agentrl.rm_hub.reading.choices import MANY, read_choice, read_choices
from agentrl.rm_hub.reading.common import clip, compose


def grade_gpqa(response: str, label: Any, metadata: Mapping[str, Any]) -> Grade:
    """1 if the choice that the response gives is the label's, else 0."""
    choices, wanted = read_choices(label, metadata)
    asked = Asked(lambda said: read_choice(compose(said), choices), CHOICE_ANNOUNCED, CHOICE_CALLED)
    found = find_answer(response, asked, is_lenient(metadata, "gpqa"))
    read = {choice[0] for value in found.values if (choice := asked.value(value)) is not None}
    if not read:
        return Grade(0.0, False, None, f"no choice found: {found.how}")
    got = read.pop()
    if got == MANY or read:
        return Grade(0.0, False, None, "several choices are named")
    right = got == wanted
    reason = "the right choice" if right else f"not the right choice {clip(wanted)}"
    return Grade(float(right), right, clip(got), reason)
