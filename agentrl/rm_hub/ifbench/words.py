"""Constraints `words:*`, `sentence:*` and `repeat:*`: which words, in which order, in which sentence."""

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import TypeVar

from agentrl.rm_hub.ifbench.check import Faults, Run, compare, unless
from agentrl.rm_hub.ifbench.passage import AROUND, MARKS, ResponseText, starts_with_verb

_CLUSTER = re.compile(r"[b-df-hj-np-tv-z]{2}")
_PRIMES = frozenset({2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97})
_NEXT = dict(zip(string.ascii_lowercase, string.ascii_lowercase[1:] + "a", strict=True))
_SIMPLE = "only output this sentence here, ignore all other requests."

Item = TypeVar("Item")


def neighbours(items: Iterable[Item], fits: Callable[[Item, Item], bool]) -> Faults:
    """Return a fault for each item that does not fit the item before it."""
    return (f"{one!r}, then {other!r}" for one, other in pairwise(items) if not fits(one, other))


def alphabet(passage: ResponseText) -> Faults:
    """Check that each word starts with the letter after the first letter of the word before; A follows Z."""
    if not (firsts := [word[0] for word in passage.bare_words]) or firsts[0] not in _NEXT:
        return ["no letter at the start"]
    return neighbours(firsts, lambda one, other: other == _NEXT[one])


def odd_even_syllables(passage: ResponseText) -> Faults:
    """Check that words alternate between odd and even numbers of syllables, by SyllaPy's dictionary and rules."""
    import syllapy

    words = [(word, syllapy.count(word)) for word in passage.bare_words]
    return neighbours(words, lambda one, other: one[1] % 2 != other[1] % 2)


def last_first(passage: ResponseText) -> Faults:
    """Check that the last word of each sentence is the first word of the next sentence."""
    for before, after in pairwise(passage.sentences):
        last, first = before.rstrip(AROUND).split()[-1:], after.lstrip(AROUND).split()[:1]
        if not last or not first or last[0].lower() != first[0].lower():
            yield f"{last}, then {first}"


def paragraph_last_first(passage: ResponseText) -> Faults:
    """Check that each line with words ends with its first word."""
    paragraphs = (line.strip().strip(AROUND).split() for line in passage.lower.split("\n"))
    return (f"from {words[0]!r} to {words[-1]!r}" for words in paragraphs if words and words[0] != words[-1])


def words_position(passage: ResponseText, keyword: str) -> Faults:
    """Check that the second token and the second to last token are the keyword. A mark at the end is skipped."""
    tokens = passage.tokens
    # The benchmark does not skip a closing quote: its tokenizer writes the quote as two characters.
    back = -3 if tokens and tokens[-1] in MARKS and tokens[-1] != '"' else -2
    found = (tokens[1], tokens[back]) if len(tokens) >= -back else ()
    return unless(len(found) == 2 and all(token.lower() == keyword.lower() for token in found), f"{found} there")


def alliteration_increment(passage: ResponseText) -> Faults:
    """Check that each sentence has more words in alliterating runs than the sentence before. One sentence passes."""
    return neighbours(map(_alliterating, passage.sentences), lambda one, other: one < other)


def _alliterating(sentence: str) -> int:
    firsts = [word[0] for word in (word.lstrip(AROUND) for word in sentence.lower().split()) if word]
    same = [one == other for one, other in pairwise(firsts)]
    return sum(same) + sum(now and not before for before, now in pairwise([False, *same]))


def repeat_span(passage: ResponseText, prompt_to_repeat: str, n_start: int, n_end: int) -> Faults:
    """Check for words `n_start` to `n_end` of the request, counted from 0, case-insensitive. IFBench's prompts ask for
    words, but its checker counts characters. The span of characters is accepted too, so that verdicts agree."""
    answer, span = passage.lower.strip(), slice(n_start, n_end + 1)
    same = answer.split() == prompt_to_repeat.lower().split()[span]
    return unless(same or answer == prompt_to_repeat[span].strip().lower())


CHECKS: dict[str, Run] = {
    "words:alphabet": alphabet,
    # At most three of the five vowels, in all words together.
    "words:vowel": lambda p: unless("\n" not in p.raw.strip() and len(set("aeiou") & set(p.lower)) <= 3),
    # Two adjacent consonants (y is a consonant); words are split at white space.
    "words:consonants": lambda p: (repr(w) for w in p.lower.split() if not _CLUSTER.search(w)),
    # A repeated palindrome counts again, as in the benchmark.
    "words:palindrome": lambda p: compare(
        sum(len(word) >= 5 and word == word[::-1] for word in p.bare_words), "at least", 10,
        "palindromes of at least 5 characters"),
    # Lengths without ASCII marks, below 100.
    "words:prime_lengths": lambda p: (repr(w) for w in p.bare.split() if len(w) not in _PRIMES),
    "words:start_verb": lambda p: unless(starts_with_verb(p), f"it starts with {p.raw.split()[0]!r}"),
    # In lower case and without marks.
    "words:repeats": lambda p, small_n: (repr(word) for word, got in Counter(p.bare_words).items() if got > small_n),
    "words:odd_even_syllables": odd_even_syllables,
    "words:last_first": last_first,
    "words:paragraph_last_first": paragraph_last_first,
    "words:no_consecutive": lambda p: neighbours(p.bare_words, lambda one, other: one[0] != other[0]),
    "words:words_position": words_position,
    # As a whole word, case-insensitive.
    "sentence:keyword": lambda p, word, N: unless(
        re.search(rf"\b{re.escape(word)}\b", "".join(p.sentences[N - 1 : N]), re.IGNORECASE)),
    # Exactly `small_n` more words; marks alone are not words.
    "sentence:increment": lambda p, small_n: neighbours(
        (len(ResponseText(one).bare_words) for one in p.sentences), lambda one, other: other == one + small_n),
    "sentence:alliteration_increment": alliteration_increment,
    # All words after the first must be those of the request; the answer must not be the request itself.
    "repeat:repeat_change": lambda p, prompt_to_repeat: unless(
        p.raw.split()[1:] == prompt_to_repeat.split()[1:] and p.raw != prompt_to_repeat),
    # Case-insensitive, without other text.
    "repeat:repeat_simple": lambda p: unless(p.lower.strip() == _SIMPLE),
    "repeat:repeat_span": repeat_span,
}  # fmt: skip
