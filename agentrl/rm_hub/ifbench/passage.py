"""`ResponseText`: an answer with its words and sentences, computed on first use; and the test for a verb at its start.

The units are those of IFBench and IFEval, so that verdicts agree:

1. Sentences are Punkt's (Kiss and Strunk 2006, doi:10.1162/coli.2006.32.4.485), with its English model. It knows "Mr."
   and "p.m.", but ends a sentence after "e.g.".
2. Tokens are the Penn Treebank's, found sentence by sentence: a mark is a token, a contraction is two ("do", "n't"). A
   full stop is a token only at the end of the sentence.
3. `bare` words are split at white space after all ASCII marks are removed ("it's" is "its").

The benchmark uses a statistical tagger to find a first verb. Here the lists of `words.toml` decide. A word that is
often a noun ("Design") is a verb before an object, adverb or preposition. Rare verbs may get other verdicts."""

import re
import string
import tomllib
from functools import cache, cached_property
from importlib import resources

MARKS = string.punctuation  # the ASCII marks, the only punctuation that the checks of IFBench know

AROUND = MARKS + " "  # the characters that are stripped from around a word

CLOSERS = "])}>\"'»”’ "  # the characters that may stand between the mark that ends a sentence and the next sentence

_NO_MARKS = str.maketrans("", "", MARKS)
_WORD = re.compile(r"\w+")
_TWO_MARKS = re.compile(r"[?!]{2}\Z")


class ResponseText:
    """A text to check. `raw`: the text as it was written."""

    def __init__(self, raw: str) -> None:
        self.raw = raw

    @cached_property
    def lower(self) -> str:
        return self.raw.lower()

    @cached_property
    def sentences(self) -> list[str]:
        """The sentences, without white space around them."""
        return split_sentences(self.raw)

    @cached_property
    def tokens(self) -> list[str]:
        return [token for sentence in self.sentences for token in tokenise(sentence)]

    @cached_property
    def runs(self) -> list[str]:
        """The runs of letters, digits and underscores, which "number of words" counts."""
        return _WORD.findall(self.raw)

    @cached_property
    def bare(self) -> str:
        return self.raw.translate(_NO_MARKS)

    @cached_property
    def bare_words(self) -> list[str]:
        return self.bare.lower().split()


def split_sentences(raw: str) -> list[str]:
    """Split a text into sentences with Punkt's English model. If the text ends with two marks ("!!", "?!"), the last
    mark is a sentence of its own, as in the benchmark's tokenizer."""
    import punkt

    sentences = list(punkt.sent_tokenize(raw))
    if sentences and _TWO_MARKS.search(sentences[-1], max(0, len(sentences[-1]) - 2)):
        sentences[-1:] = [sentences[-1][:-1], sentences[-1][-1]]
    return sentences


_PIECE = re.compile(
    r"""
    \.\.+ | -- | `+ | ''
    | [:,](?!\d)                        # not within 3:15 or 1,000
    | [;@\#$%&?!*\[\](){}<>«»“”‘’„"‒–—―]
    | (?: (?!\.\.|--|''|[:,](?!\d)) [^\s;@\#$%&?!*\[\](){}<>«»“”‘’„"‒–—―`] )+
    """,
    re.VERBOSE,
)
_CLITIC = re.compile(r"(?i)(?:n't|'(?:s|m|d|ll|re|ve))\Z")
_CLITIC_START = re.compile(r"(?i)'(?:re|ve|ll|m|t|s|d|n)\b")
_FUSED = {**dict.fromkeys(("cannot", "gimme", "gonna", "gotta", "lemme", "wanna"), 3), "'tis": 2, "'twas": 2}


def tokenise(sentence: str) -> list[str]:
    """Return the Penn Treebank tokens of one sentence. Quotation marks are unchanged."""
    body = sentence.rstrip(CLOSERS + "\t\r\n")
    tail = sentence[len(body) :]
    # Only the full stop that ends the sentence is a token of its own.
    stop = body.endswith(".") and not body.endswith("..") and len(body) > 1
    pieces = _PIECE.findall(body[:-1] if stop else body)
    return [*(part for piece in pieces for part in _clitics(piece)), *(["."] if stop else []), *_PIECE.findall(tail)]


def _clitics(piece: str) -> list[str]:
    """Split the contraction of a piece: "don't" is "do", "n't"; "cannot" is "can", "not"."""
    if fused := _FUSED.get(piece.lower()):
        return [piece[:fused], piece[fused:]]
    if "'" not in piece or len(piece) == 1:
        return [piece]
    if piece[0] == "'" and not _CLITIC_START.match(piece):
        return ["'", *_clitics(piece[1:])]
    if piece.endswith("'"):
        return [*_clitics(piece[:-1]), "'"]
    clitic = _CLITIC.search(piece, max(0, len(piece) - 3))
    if clitic and clitic.start() > 0 and piece[clitic.start() - 1] != "'":
        return [piece[: clitic.start()], clitic.group()]
    return [piece]


_ENOUGH = 1_000  # characters in which the first two words are searched

LISTS: dict[str, tuple[str, ...]] = {
    name: tuple(words.split())
    for name, words in tomllib.loads((resources.files(__package__) / "words.toml").read_text(encoding="utf-8")).items()
}

_AUXILIARIES = frozenset(LISTS["auxiliaries"])
_CLITICS = ("'s", "'re", "'m", "n't", "’")

_ALSO_NOUNS = frozenset(LISTS["also_nouns"])
_ING = re.compile(r"[a-z]*[aeiouy][a-z]*ing")
"""The -ing form of any verb: the part before the ending has a vowel, unlike in "king" and "thing"."""


@cache
def _forms() -> dict[str, str]:
    """Map each form of the verbs, except -ing forms, to its base. Irregular forms and bases map to themselves."""
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
    """Return true if the first token is a verb. A mark before the first word, as in bold text, is the first token."""
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
