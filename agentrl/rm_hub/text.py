"""Short-answer graders with SQuAD's metrics (Rajpurkar et al. 2016, arXiv:1606.05250, v1.1), `gpqa`, `random`.

1. `exact_match` and `f1` grade the whole text after the reasoning, or its content if it is one `<answer>` block.
2. Normalisation is SQuAD's, but also removes punctuation of other scripts, LaTeX fonts and `~`. It keeps decimal
   points, a number's minus sign, and a text that would become empty.
3. The best of several accepted answers counts."""

import json
import re
import string
import unicodedata
from collections import Counter
from functools import lru_cache
from random import Random
from typing import Any

from agentrl.rm_hub.grade import Grade, Metadata
from agentrl.rm_hub.reading.answers import CHOICE_ANNOUNCED, CHOICE_CALLED, AnswerPattern, find_answer, is_lenient
from agentrl.rm_hub.reading.choices import MANY, read_choice, read_choices
from agentrl.rm_hub.reading.common import bad_metadata, clip, compose, flag, golds, number, unwrapped

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_MARK = re.compile(r"(?<![\d.])\d+\.\d+(?!\.?\d)|(?P<minus>(?<!\S)[-−–]+(?=[$€£]?\.?\d))|[^\w\s]|_")
"""A decimal number, a minus sign before a number, or one character that may be punctuation."""
_FONT = re.compile(r"\\(?:text(?:bf|it|rm)?|math(?:bf|it|rm))\s*(?=\{)")
_TIE = re.compile(r"(?<=\S)~(?=\S)")
_VERDICTS = ("yes", "no", "noanswer")


def normalise(text: str) -> str:
    """Normalise a text: lower case, no punctuation or articles, single spaces; see the module's second point."""
    text = _TIE.sub(" ", _FONT.sub("", compose(text))).lower()
    bare = _MARK.sub(lambda mark: "-" if mark["minus"] else _unpunctuated(mark[0]), text)
    return " ".join(_ARTICLES.sub(" ", bare).split()) or " ".join(bare.split()) or " ".join(text.split())


@lru_cache(1024)
def _unpunctuated(mark: str) -> str:
    """Return "" for punctuation and invisible characters of every script, else the mark."""
    kind = unicodedata.category(mark) if len(mark) == 1 else "N"
    return "" if kind[0] == "P" or kind == "Cf" or mark in string.punctuation or mark == "\u2044" else mark


def exact(answer: str, accepted: list[str]) -> bool:
    """Return true if the normalised answer is one of the normalised accepted answers."""
    got = normalise(answer)
    return any(got == normalise(gold) for gold in accepted)


def contains(text: str, accepted: list[str]) -> bool:
    """Return true if the normalised text contains a normalised accepted answer as whole words."""
    padded = f" {normalise(text)} "
    return any(f" {normalise(gold)} " in padded for gold in accepted)


def grade_exact_match(response: str, label: Any, metadata: Metadata) -> Grade:
    """Grade `exact_match`: 1 if the normalised answer equals a normalised label (`reading.common.golds`), else 0."""
    accepted = golds(label, "exact_match")
    if not (answer := unwrapped(response)):
        return Grade(0.0, False, None, "the answer is empty")
    right = exact(answer, accepted)
    return Grade(float(right), right, clip(answer), "equal" if right else "equals none of the accepted answers")


def grade_f1(response: str, label: Any, metadata: Metadata) -> Grade:
    """Grade `f1`: the maximum token F1 over the labels (`reading.common.golds`), in [0, 1]. In `metadata`,
    `f1_threshold` (default 1) is the minimum score of a correct answer. `f1_yes_no` (default false) is HotpotQA's rule
    (Yang et al. 2018, arXiv:1809.09600) that "yes", "no" and "noanswer" match only themselves."""
    accepted = golds(label, "f1")
    threshold, verdicts = number(metadata, "f1_threshold", 1.0, "f1"), flag(metadata, "f1_yes_no", "f1")
    if not (answer := unwrapped(response)):
        return Grade(0.0, False, None, "the answer is empty")
    got = normalise(answer)
    scores = [_f1(got, normalise(gold), verdicts) for gold in accepted]
    best = max(range(len(scores)), key=scores.__getitem__)
    score = scores[best]
    return Grade(score, score >= threshold, clip(answer), f"token F1 {score:.3f} with {clip(accepted[best])!r}")


def _f1(got: str, want: str, verdicts: bool) -> float:
    if verdicts and got != want and (got in _VERDICTS or want in _VERDICTS):
        return 0.0
    got_tokens, want_tokens = got.split(), want.split()
    common = sum((Counter(got_tokens) & Counter(want_tokens)).values())
    total = len(got_tokens) + len(want_tokens)
    return 2 * common / total if total else 0.0


def grade_gpqa(response: str, label: Any, metadata: Metadata) -> Grade:
    """Grade `gpqa`: 1 if the response's choice is the label's, else 0."""
    choices, wanted = read_choices(label, metadata)
    asked = AnswerPattern(lambda said: read_choice(compose(said), choices), CHOICE_ANNOUNCED, CHOICE_CALLED)
    found = find_answer(response, asked, is_lenient(metadata, "gpqa"))
    if not (read := {choice[0] for value in found.values if (choice := asked.value(value)) is not None}):
        return Grade(0.0, False, None, f"no choice found: {found.how}")
    got = read.pop()
    if got == MANY or read:
        return Grade(0.0, False, None, "several choices are named")
    right = got == wanted
    reason = "the right choice" if right else f"not the right choice {clip(wanted)}"
    return Grade(float(right), right, clip(got), reason)


def grade_random(response: str, label: Any, metadata: Metadata) -> Grade:
    """Grade `random`: 1 with probability `metadata["random_rate"]` (default 0.5), else 0. The draw depends on response,
    label and `metadata["seed"]` (default 0), an integer or a text."""
    seed = metadata.get("seed", 0)
    if isinstance(seed, bool) or not isinstance(seed, (int, str)):
        raise bad_metadata("random", "seed", "an integer or a text", seed)
    rate = number(metadata, "random_rate", 0.5, "random")
    if not 0 <= rate <= 1:
        raise bad_metadata("random", "random_rate", "a probability", rate)
    lucky = Random(json.dumps([repr(seed), response, repr(label)]).encode()).random() >= 1 - rate
    return Grade(float(lucky), lucky, None, "drawn at random; the answer was not read")
