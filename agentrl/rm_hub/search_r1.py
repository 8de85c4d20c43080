"""Search-R1's reward (Jin et al. 2025, arXiv:2503.09516; format scores: arXiv:2505.15117).

1. The answer is the last closed `<answer>` block of the model's own text; retrieved text never counts.
2. An answer is right if it equals an accepted one (SQuAD normalisation), or with `sub_em` if it contains one as words.
3. The structure is (think, search, information)*, think, answer. In `metadata["messages"]` each turn but the last has
   tool calls with results and no answer; the last turn has one answer and no call.
4. A right answer scores 1, or 1 - s if the structure is wrong. Otherwise a right structure scores s, or s + r if an
   accepted answer was retrieved. With a wrong structure, a wrong answer scores f and a missing answer 0."""

import re
from collections.abc import Mapping, Sequence
from itertools import chain, pairwise
from typing import Any

from agentrl.rm_hub.grade import Grade, Metadata
from agentrl.rm_hub.reading.common import answer_blocks, clip, flag, golds, last_box, mappings, number
from agentrl.rm_hub.text import contains, exact, normalise
from agentrl.sample import content_text

_RETRIEVED = re.compile(r"<(?:information|tool_response)>(.*?)(</(?:information|tool_response)>|\Z)", re.DOTALL)
_TAG = re.compile(r"(</?(?:think|search|information|answer|tool_call)>)")
_TURN_MARKS = re.compile(r"<\|im_start\|>[a-z]{0,20}|<\|[a-z_]{1,32}\|>|</?s>|<(?:eos|end_of_turn)>")
_MARKUP = re.compile(r"</?[A-Za-z][^<>]{0,60}>")
_SHAPE = re.compile(
    "<think>.?</think>(<search>.?</search><information></information><think>.?</think>)*<answer>.?</answer>"
)
"""Matches a response in which each text is replaced by one character and retrieved text is removed."""
SearchAnswer = tuple[str | None, str, str]  # the answer, the retrieved text, and the first fault of the structure or ""


def grade_search_r1(response: str, label: Any, metadata: Metadata) -> Grade:
    """Grade a search trajectory; `response` includes retrieved text. Parts are em, format and retrieval, each 0 or 1.
    `label` has the accepted answers (`reading.common.golds`), such as Search-R1's `{"target": [...]}`. `metadata` may
    have `structure_format_score` s, `final_format_score` f, `retrieval_score` r (default 0; second paper: 0.2, 0.1, 0),
    `sub_em` (default false) and `messages` (default none; see the module's third point)."""
    accepted = golds(label, "search_r1")
    structure = number(metadata, "structure_format_score", 0.0, "search_r1")
    final = number(metadata, "final_format_score", 0.0, "search_r1")
    retrieval = number(metadata, "retrieval_score", 0.0, "search_r1")
    match = contains if flag(metadata, "sub_em", "search_r1") else exact
    messages = mappings(metadata.get("messages", ()), "messages", "a list of messages", "search_r1")
    native = any(message.get("role") == "tool" or message.get("tool_calls") for message in messages)
    answer, retrieved, fault = _from_messages(messages) if native else _from_text(response)
    readings = () if answer is None else (answer, last_box(answer))
    right = any(match(text, accepted) for text in readings if text is not None)
    found = bool(retrieved) and contains(_MARKUP.sub(" ", retrieved), accepted)
    if right:
        score = 1.0 - structure if fault else 1.0
    elif not fault:
        score = structure + (retrieval if found else 0.0)
    else:
        score = final if answer is not None else 0.0
    parts = {"em": float(right), "format": float(not fault), "retrieval": float(found)}
    verdict = "no closed <answer> block" if answer is None else "right answer" if right else "wrong answer"
    reason = f"{verdict}; {fault or 'structure as expected'}"
    return Grade(score, right, None if answer is None else clip(answer), reason, parts)


def _from_text(response: str) -> SearchAnswer:
    """Read the answer outside the retrieved text, and the structure tag by tag."""
    retrieved = [found[1] for found in _RETRIEVED.finditer(response)]
    blocks = answer_blocks(_RETRIEVED.sub("", response))
    answer = next((content for _, content in reversed(blocks) if normalise(content)), None)
    emptied = _RETRIEVED.sub(lambda found: "<information>" + "</information>" * bool(found[2]), response)
    pieces = [piece for piece in _TAG.split(_TURN_MARKS.sub("", emptied)) if piece.strip()]
    shape = "".join(piece if _TAG.fullmatch(piece) else "." for piece in pieces).replace("tool_call>", "search>")
    expected = "expected think, (search, information, think)*, answer"
    fault = "" if _SHAPE.fullmatch(shape) else f"structure {shape[:200] or 'of nothing'}, {expected}"
    return answer, "\n".join(retrieved), fault


def _from_messages(messages: Sequence[Mapping[str, Any]]) -> SearchAnswer:
    retrieved = [content_text(message.get("content")) for message in messages if message.get("role") == "tool"]
    turns = [index for index, message in enumerate(messages) if message.get("role") == "assistant"]
    calls = [len(messages[index].get("tool_calls") or ()) for index in turns]
    spans = pairwise([*turns, len(messages)])
    results = [sum(message.get("role") == "tool" for message in messages[start:end]) for start, end in spans]
    texts = [answer_blocks(content_text(messages[index].get("content"))) for index in turns]
    answers = [[block for _, block in blocks if normalise(block)] for blocks in texts]
    counts = list(zip(calls, results, map(len, answers), strict=True))
    shaped = counts and all(0 < c <= r and not a for c, r, a in counts[:-1]) and counts[-1][::2] == (0, 1)
    fault = "" if shaped else f"turns with (calls, results, answers): {counts}, expected answers in the last alone"
    found = list(chain.from_iterable(answers))
    return found[-1] if found else None, "\n".join(retrieved), fault
