"""Does a text start with a verb?

The benchmark asks a statistical part-of-speech tagger, whose weights are a download. Here closed lists decide: forms of
the verbs of `words.toml` (regular forms are derived) are verbs; a word that is as often a noun ("Design", "Water") is one if what
follows is an object, an adverb or a preposition, as after an imperative. Modals ("can", "will") are no verbs, as in
the benchmark. Expect other verdicts than the tagger's on rare verbs, and on ambiguous words.
"""

import re
import tomllib
from functools import cache
from importlib import resources

from agentrl.rm_hub.ifbench.passage import ResponseText, tokenise

_ENOUGH = 1_000
"""Characters that the first two words are looked for in."""

LISTS: dict[str, tuple[str, ...]] = {
    name: tuple(words.split())
    for name, words in tomllib.loads((resources.files(__package__) / "words.toml").read_text(encoding="utf-8")).items()
}

_AUXILIARIES = frozenset(LISTS["auxiliaries"])
_CLITICS = ("'s", "'re", "'m", "n't", "’")

_ALSO_NOUNS = frozenset(LISTS["also_nouns"])
_ING = re.compile(r"[a-z]*[aeiouy][a-z]*ing")
"""The -ing form of any verb: what stands before the ending has a vowel, as "king" and "thing" have not."""


@cache
def _forms() -> dict[str, str]:
    """Every form of the verbs, but those in -ing, to its base; irregular ones to themselves."""
    bases = (*LISTS["verbs"], *LISTS["also_nouns"])
    forms = {form: base for base in bases for form in _inflected(base)}
    return forms | {form: form for form in (*LISTS["irregular_verbs"], *bases)}


def _inflected(base: str) -> list[str]:
    if base.endswith("e"):
        return [base + "s", base + "d"]
    if base.endswith("y") and base[-2] not in "aeiou":
        return [base[:-1] + "ies", base[:-1] + "ied"]
    third = base + ("es" if base.endswith(("s", "sh", "ch", "x", "z", "o")) else "s")
    return [third, base + "ed", base + base[-1] + "ed"]


def starts_with_verb(passage: ResponseText) -> bool:
    """Return true if the first word is a verb; marks before it, as of bold text, are no words, so that it is not."""
    sentences = ResponseText(passage.raw.lstrip()[:_ENOUGH]).sentences
    first, following, *_ = (*tokenise(sentences[0].lower()), "", "")
    base = _forms().get(first)
    if first in _AUXILIARIES:
        return True
    if _ING.fullmatch(first) and first not in LISTS["no_verbs"]:
        return following not in _CLITICS
    if base in _ALSO_NOUNS and not (first != base and first.endswith("ed")):
        return following in LISTS["after_a_verb"] or following.endswith("ly")
    return base is not None and following not in _CLITICS
