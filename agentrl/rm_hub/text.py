"""Short-answer graders with SQuAD's normalisation (Rajpurkar et al. 2016, arXiv:1606.05250)."""

import re
import string
from collections import Counter
from collections.abc import Mapping
from typing import Any

from agentrl.rm_hub.grade import Grade

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """Lower-case, without punctuation and articles, white space collapsed."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def grade_exact_match(response: str, label: Any, metadata: Mapping[str, Any]) -> Grade:
    """Right if the normalised answer equals one of the normalised labels."""
    got = normalise(response)
    right = any(got == normalise(gold) for gold in _golds(label))
    return Grade(float(right), right, response.strip(), "equal" if right else "equals none of the labels")


def grade_f1(response: str, label: Any, metadata: Mapping[str, Any]) -> Grade:
    """Score is the best token F1 over the labels, in [0, 1]; right at 1."""
    tokens = normalise(response).split()
    score = max((_f1(tokens, normalise(gold).split()) for gold in _golds(label)), default=0.0)
    return Grade(score, score == 1.0, response.strip(), f"best token F1 {score:.3f}")


def _f1(got: list[str], want: list[str]) -> float:
    if not got or not want:
        return float(got == want)
    common = sum((Counter(got) & Counter(want)).values())
    return 2 * common / (len(got) + len(want))


def _golds(label: Any) -> list[str]:
    return [str(gold) for gold in label] if isinstance(label, (list, tuple)) else [str(label)]
