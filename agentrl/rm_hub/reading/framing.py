r"""What may be left unsaid around an answer: `f(x) =`, `k \in Z` behind, a modulus, "The vertex is" before a point.

1. `without_frame(gold, got)` gives both texts without what only one of them says, and with the same names for
   parameters (`k\pi, k \in Z` and `n\pi, n \in Z`) and for the variables of functions (`f(x) = x`, `f(t) = t`).
2. What the two say differently (`k \in Z` and `k \in N`, two moduli) is a difference.
"""

import re

from agentrl.rm_hub.reading.shapes import is_symbol, shape

_MODULUS = re.compile(r"\s*(?:\\pmod|\(?\s*\\?\bb?mod\b)\s*\{?\s*(\d+)\s*\}?\s*\)?$")
_ALL = r"(?:(?:where|for|with|if|when)\s+)?(?:(?:all|any|every|some|each)\s+|\\forall\s*)?"
_FOR_ALL = re.compile(
    rf"\s*[,;:(]?\s*{_ALL}(?<![a-zA-Z\\])(?P<name>[a-z])(?:\s*,\s*(?!(?P=name))[a-z])?\s*\\in\s*(?:\\mathbb\s*\{{?\s*(?P<set>[ZNRQ])\s*\}}?|(?P<plain>[ZNRQ]))(?:\^\S|_\S+)?\s*\)?$"
)
_FOR_WORDS = re.compile(
    r"\s*[,;(]?\s*(?:(?:where|for|with)\s+)?(?:(?:all|any|every|some|each)\s+)(?:(?:real|integer|positive|natural)s?\s+){0,2}(?:numbers?\s+|values?\s+of\s+)?(?P<name>[a-z])\)?$"
)
_INTEGER = re.compile(
    r"\s*[,;(]?\s*(?:where|for|with)\s+(?:(?:any|every|some|all|each|an)\s+)?(?:integers?\s+(?P<name>[a-z])|(?P<before>[a-z])\s+(?:is\s+)?(?:an\s+|any\s+)?integer)\s*\)?$"
)
_UNEQUAL = re.compile(
    r"\s*[,;(]?\s*(?:(?:where|for|with|if|provided)\s+)?(?<![a-zA-Z\\])(?P<name>[a-z])\s*\\ne\s*[^a-z=]{1,40}$"
)
_FUNCTION = re.compile(r"^[a-zA-Z]\s*(?:\(\s*[a-z]\s*\))?\s*=\s*(?=\\begin\s*\{cases\})")
_OF = re.compile(r"^([a-zA-Z])\s*\(\s*([a-z])\s*\)\s*=(?!=)")
_POINT = re.compile(
    r"^(?:[A-Z]'?|(?:[A-Za-z]+\s+){1,8}(?:is|at|are|be)\s*(?:at\s+|the\s+point\s+|[A-Z]\s*=?\s*)?:?)\s*(?=[(\[].*[)\]]$)"
)
_SENTENCE = re.compile(
    r"(?i)^[^=<>\d]{1,80}?\b(?:is|are)\s+(?!not\b|no\b|never\b|neither\b|nor\b)(?:an?\s+|the\s+)?(?=[a-zA-Z])"
)


def without_frame(gold: str, got: str) -> tuple[str, str] | None:
    """Both without what may be left unsaid; None if they say different things there."""
    gold, got = _FUNCTION.sub("", gold), _FUNCTION.sub("", got)
    gold, got = _quantified(*_same_variable(gold, got))
    if gold.startswith(("(", "[")) and shape(gold).kind == "brackets":
        got = _POINT.sub("", got)
    first, second = _MODULUS.search(gold), _MODULUS.search(got)
    if first is None and second is None:
        return gold, got
    if first is not None and second is not None and first.group(1) != second.group(1):
        return None
    gold, got = gold[: first.start() if first else None], got[: second.start() if second else None]
    if r"\equiv" in got or r"\equiv" not in gold:
        gold, got = gold.rpartition(r"\equiv")[2].strip(), got.rpartition(r"\equiv")[2].strip()
    return gold, got


def complement(sentence: str) -> str:
    """What a sentence in words says its subject is: "ellipse" of "The graph is an ellipse"; else the sentence."""
    said = _SENTENCE.match(sentence)
    return sentence[said.end() :] if said is not None else sentence


def _same_variable(gold: str, got: str) -> tuple[str, str]:
    """f(t) = t as f(x) = x where the label has x."""
    first, second = _OF.match(gold), _OF.match(got)
    if first is None or second is None or first.group(1) != second.group(1):
        return gold, got
    names = {first.group(2): second.group(2), second.group(2): first.group(2)}
    either = re.compile(rf"(?<![a-zA-Z\\])[{''.join(names)}](?![a-zA-Z])")
    return gold, either.sub(lambda letter: names[letter.group()], got)


def _quantified(gold: str, got: str) -> tuple[str, str]:
    first, second = _parameter(gold), _parameter(got)
    if second is None:
        if first is None or r"\in" in got or not all(_letter(first[1]).search(text) for text in (first[0], got)):
            return gold, got
        return first[0], got
    rest, name, of = second
    if first is not None:
        if first[2] != of or (_letter(first[1]).search(rest) is not None and first[1] != name):
            return gold, got
        return first[0], _letter(name).sub(first[1], rest)
    if r"\in" in gold or r"\ne" in gold or not rest:
        return gold, got
    return gold, rest


def _parameter(text: str) -> tuple[str, str, str] | None:
    """(the text before, the name, the set) of `..., k \\in Z`, "... for all x", `..., x \\ne 2`; None without such an end."""
    for pattern in (_FOR_ALL, _INTEGER, _FOR_WORDS, _UNEQUAL):
        found = pattern.search(text)
        if found is None:
            continue
        parts = found.groupdict()
        rest, name = text[: found.start()].strip(" ,;"), parts.get("name") or parts.get("before") or ""
        if not rest or re.search(r"(?:<|>|\\le|\\ge|\\ne)(?![a-zA-Z])", rest):
            return None
        if pattern in (_UNEQUAL, _INTEGER) and _letter(name).search(rest.rpartition("=")[2]) is None:
            return None
        if pattern is _UNEQUAL and is_symbol(rest):
            return None
        of = "Z" if pattern is _INTEGER else parts.get("set") or parts.get("plain") or ""
        return rest, name, of
    return None


def _letter(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![a-zA-Z\\]){name}(?![a-zA-Z])")
