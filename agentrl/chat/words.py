"""Ids of text in common scripts, word by word: the tokenizer's own ids, in a fraction of its time.

1. A byte-level BPE tokenizer cuts text by regular expressions into words. The ids of a word depend on nothing else, so
   they are looked up. New words go to the tokenizer's model.
2. Python's `re` gets the tokenizer's expressions. They mean the same for the characters in `_COMMON`: their Unicode
   categories have not changed since 2012, and normalization (NFC) keeps any text of them. Other text goes to the tokenizer.
3. Only tokenizers of this form are accepted. A text with all common characters is compared before the first use."""

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import orjson

_COMMON = (
    r"\0-\u017e\u0180-\u024f\u0391-\u03a1\u03a3-\u03c9\u0400-\u045f"
    r"\u2010-\u2027\u2030-\u205e\u20ac\u2190-\u22ff\u2500-\u25ff"
)
"""Latin without the long s (an s for `(?i:`), Greek, Cyrillic, punctuation, the euro, arrows, mathematics, boxes."""
_CHARACTERS = "".join(re.findall(f"[{_COMMON}]", "".join(map(chr, range(0x2600)))))
_UNCOMMON = re.compile(f"[^{_COMMON}]")
_SPACES = r"\t-\r \x85\xa0"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # of ByteLevel(use_regex=True)
_PARTS = re.compile(
    r"\\p\{(?P<category>[A-Z][a-z]?)\}|(?P<space>\\[sS])|\\[rntfv]|\\[^\w\s]|\[\^?|(?P<odd>\((?!\?)|\}\+|[$^])|&&?|[^\\]",
    re.DOTALL,
)
_KEPT, _LONGEST = 32_768, 48  # the number of words whose ids are kept, and the most characters of such a word
_QUICK = 1 << 16  # characters that take some five milliseconds; the tokenizer lets other threads run meanwhile


class WordEncoder:
    """Encodes text as a `tokenizers.Tokenizer` does, control strings included; thread-safe."""

    def __init__(self, backend: Any, splits: Sequence[re.Pattern[str]], added: Mapping[str, int]) -> None:
        self._backend, self._splits, self._added, self._known = backend, splits, added, _Words(backend.model)
        longest_first = sorted(map(re.escape, added), key=len, reverse=True)
        self._control = re.compile(f"({'|'.join(longest_first) or '(?!)'})")

    @classmethod
    def of(cls, backend: Any) -> "WordEncoder | None":
        """Return the encoder of a `tokenizers.Tokenizer`; None if the tokenizer has another form."""
        splits, added = _splits(backend), backend.get_added_tokens_decoder()
        odd = any(token.lstrip or token.rstrip or token.single_word for token in added.values())
        if splits is None or odd or len({token.normalized for token in added.values()}) > 1:
            return None
        encoder = cls(backend, splits, {token.content: number for number, token in added.items()})
        probe = "".join(f"{c} {c}a{c}{c}1'{c}\n{c}.  {c}" for c in _CHARACTERS)
        return encoder if encoder.encode(probe) == encoder._by_tokenizer(probe) else None

    def encode(self, text: str) -> list[int]:
        """Return the ids of trusted text: control strings become control tokens."""
        ids = list[int]()
        for at, part in enumerate(self._control.split(text)):
            if at % 2:
                ids.append(self._added[part])
            elif len(part) <= _QUICK and (part.isascii() or not _UNCOMMON.search(part)):
                ids += self._by_word(part)
            else:
                ids += self._by_tokenizer(part)
        return ids

    def _by_word(self, text: str) -> Iterable[int]:
        words: Iterable[str] = (text,)
        for split in self._splits:
            words = filter(None, chain.from_iterable(map(split.split, words)))
        return chain.from_iterable(map(self._known.__getitem__, words))

    def _by_tokenizer(self, text: str) -> list[int]:
        return list(self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)


class _Words(dict[str, Sequence[int]]):
    """The ids of words, by the model of a tokenizer."""

    def __init__(self, model: Any) -> None:
        from tokenizers.pre_tokenizers import ByteLevel

        super().__init__()
        self._model, self._bytes = model, ByteLevel(add_prefix_space=False, use_regex=False)

    def __missing__(self, word: str) -> Sequence[int]:
        ids = [token.id for token in self._model.tokenize(self._bytes.pre_tokenize_str(word)[0][0])]
        if len(word) <= _LONGEST:
            if len(self) >= _KEPT:
                self.clear()
            self[word] = ids
        return ids


def _splits(backend: Any) -> list[re.Pattern[str]] | None:
    """Return Python's forms of the expressions that cut text into words; None if the tokenizer does more or less."""
    from tokenizers.models import BPE

    normalizer = backend.normalizer and orjson.loads(backend.normalizer.__getstate__())
    first = backend.pre_tokenizer and orjson.loads(backend.pre_tokenizer.__getstate__())
    if not isinstance(backend.model, BPE) or backend.model.dropout or normalizer not in (None, {"type": "NFC"}):
        return None
    *steps, last = first["pretokenizers"] if first and first["type"] == "Sequence" else [first]
    if not last or last["type"] != "ByteLevel" or last["add_prefix_space"]:
        return None
    expressions = [*map(_expression, steps), *[_GPT2] * last["use_regex"]]
    found = [split for split in map(_translated, expressions) if split]
    return found if found and len(found) == len(expressions) else None


def _expression(step: Mapping[str, Any]) -> str:
    """Return the expression whose matches a step makes words; "(", which is none, if the step does something else."""
    usual = step["type"] == "Split" and (step["behavior"], step["invert"]) == ("Isolated", False)
    return str(step["pattern"].get("Regex", "(")) if usual else "("


def _translated(expression: str) -> re.Pattern[str] | None:
    """Return an expression for `re.split` that finds the same words of common characters; None if it has other parts."""
    found, inside, at = "(", False, 0
    while at < len(expression):
        part = _PARTS.match(expression, at)
        if part is None or (part[0] in ("[", "&&", r"\S") if inside else part["odd"]):
            return None
        if part[0] in ("[", "[^", "]"):
            inside = part[0] != "]"
        if not (members := _members(part["category"]) if part["category"] else part["space"] and _SPACES):
            found += "" if part["category"] else part[0]
        elif inside:
            found += members
        else:
            found += f"[^{members}]" if part[0] == r"\S" else f"[{members}]"
        at = part.end()
    try:
        return re.compile(f"{found})")
    except re.error:
        return None


def _members(category: str) -> str:
    """Return the common characters of a Unicode category, for a set of characters in an expression."""
    return "".join(f"\\u{ord(c):04x}" for c in _CHARACTERS if unicodedata.category(c).startswith(category))
