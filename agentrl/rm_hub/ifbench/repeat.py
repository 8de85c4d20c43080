"""Constraints `repeat:*`: the request, or a part of it, comes back instead of an answer."""

from agentrl.rm_hub.ifbench.check import Finding, Text, Whole, constraint
from agentrl.rm_hub.ifbench.passage import Passage

_SIMPLE = "only output this sentence here, ignore all other requests."


@constraint("repeat:repeat_change", "the request with another first word")
def repeat_change(passage: Passage, prompt_to_repeat: Text) -> Finding:
    """All words after the first are the request's; the answer is not the request itself."""
    if passage.raw == prompt_to_repeat:
        return "the request without a change"
    same = passage.raw.split()[1:] == prompt_to_repeat.split()[1:]
    return None if same else "other words than the request's after the first"


@constraint("repeat:repeat_simple", "the sentence that asks to output only this sentence")
def repeat_simple(passage: Passage) -> Finding:
    """The sentence that asks for it, in any case, and nothing else."""
    return None if passage.raw.strip().lower() == _SIMPLE else "another text"


@constraint("repeat:repeat_span", "words {n_start} to {n_end} of the request")
def repeat_span(passage: Passage, prompt_to_repeat: Text, n_start: Whole, n_end: Whole) -> Finding:
    """The words `n_start` to `n_end` of the request, counted from 0, in any case.

    The prompts of IFBench ask for words, its checker takes the same numbers for characters: that span is accepted too,
    so that no answer is refused here which passes there.
    """
    answer = passage.raw.strip().lower()
    words = prompt_to_repeat.lower().split()[n_start : n_end + 1]
    characters = prompt_to_repeat[n_start : n_end + 1].strip().lower()
    return None if answer.split() == words or answer == characters else "another span"
