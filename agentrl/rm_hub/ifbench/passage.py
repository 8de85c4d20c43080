"""`ResponseText`: an answer with its words and sentences, each found once and only when asked for.

The units are those that IFBench and IFEval count in, so that verdicts agree with theirs:

1. Sentences are Punkt's (Kiss and Strunk 2006, doi:10.1162/coli.2006.32.4.485), with its English model. It knows "Mr."
   and "p.m.", but takes the end of "e.g." for a sentence's.
2. Tokens are the Penn Treebank's, found sentence by sentence: a mark is a token, a contraction is two ("do", "n't"), a
   full stop is one only where it ends the sentence.
3. `bare` words are what white space separates once every ASCII mark is taken out ("it's" is "its").

All of it takes time linear in the length of the text.
"""

import re
import string
from functools import cached_property

MARKS = string.punctuation
"""The ASCII marks; the only ones that the checks of IFBench know as punctuation."""

AROUND = MARKS + " "
"""What is stripped from around a word."""

CLOSERS = "])}>\"'»”’ "
"""What may stand between the mark that ends a sentence and the next sentence."""

_NO_MARKS = str.maketrans("", "", MARKS)
_WORD = re.compile(r"\w+")
_TWO_MARKS = re.compile(r"[?!]{2}\Z")


class ResponseText:
    """A text to check.

    Args:
        raw: the text as it was written.
    """

    def __init__(self, raw: str) -> None:
        self.raw = raw

    @cached_property
    def lower(self) -> str:
        """The text in lower case."""
        return self.raw.lower()

    @cached_property
    def sentences(self) -> list[str]:
        """The sentences, without white space around them."""
        return split_sentences(self.raw)

    @cached_property
    def tokens(self) -> list[str]:
        """The tokens of all sentences."""
        return [token for sentence in self.sentences for token in tokenise(sentence)]

    @cached_property
    def runs(self) -> list[str]:
        """The runs of letters, digits and underscores; what "number of words" counts."""
        return _WORD.findall(self.raw)

    @cached_property
    def bare(self) -> str:
        """The text without ASCII marks."""
        return self.raw.translate(_NO_MARKS)

    @cached_property
    def bare_words(self) -> list[str]:
        """The words of `bare`, in lower case."""
        return self.bare.lower().split()


def split_sentences(raw: str) -> list[str]:
    """The sentences of a text, found by Punkt's English model. Of two marks that end the whole text ("!!", "?!") the
    last is a sentence of its own, as it is for the benchmark's tokenizer."""
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
_FUSED = {
    **dict.fromkeys(("cannot", "gimme", "gonna", "gotta", "lemme", "wanna"), 3),
    **dict.fromkeys(("'tis", "'twas"), 2),
}


def tokenise(sentence: str) -> list[str]:
    """The Penn Treebank tokens of one sentence; quotation marks stay as they are written."""
    body = sentence.rstrip(CLOSERS + "\t\r\n")
    tail = sentence[len(body) :]
    # Only the full stop that ends the sentence is a token of its own.
    stop = body.endswith(".") and not body.endswith("..") and len(body) > 1
    if stop:
        body = body[:-1]
    tokens = [part for piece in _PIECE.findall(body) for part in _clitics(piece)]
    if stop:
        tokens.append(".")
    tokens.extend(_PIECE.findall(tail))
    return tokens


def _clitics(piece: str) -> list[str]:
    """A piece with its contraction taken apart: "don't" is "do", "n't"; "cannot" is "can", "not"."""
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
