"""Short-answer graders with SQuAD's normalisation (Rajpurkar et al. 2016, arXiv:1606.05250)."""

import re
import string
from collections import Counter
from typing import Any

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """Lower-case, without punctuation and articles, white space collapsed."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(response: str, label: Any) -> float:
    """1.0 if the normalised answer equals one of the normalised labels, else 0.0."""
    got = normalise(response)
    return float(any(got == normalise(gold) for gold in _golds(label)))


def f1(response: str, label: Any) -> float:
    """The best token F1 over the labels, in [0, 1]."""
    return max((_f1(normalise(response).split(), normalise(gold).split()) for gold in _golds(label)), default=0.0)


def _f1(got: list[str], want: list[str]) -> float:
    if not got or not want:
        return float(got == want)
    common = sum((Counter(got) & Counter(want)).values())
    return 2 * common / (len(got) + len(want))


def _golds(label: Any) -> list[str]:
    return [str(gold) for gold in label] if isinstance(label, (list, tuple)) else [str(label)]
