"""Constraints `words:*` and `sentence:*`: which words, in which order, in which sentence."""

import re
import string
from collections import Counter
from itertools import pairwise

from agentrl.rm_hub.ifbench.check import Counted, Finding, Text, Trimmed, Whole, constraint
from agentrl.rm_hub.ifbench.passage import AROUND, MARKS, Passage
from agentrl.rm_hub.ifbench.verbs import starts_with_verb

_VOWELS = frozenset("aeiou")
_CLUSTER = re.compile(r"[b-df-hj-np-tv-z]{2}")
_PRIMES = frozenset({2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97})
_ALPHABET = string.ascii_lowercase


@constraint("words:alphabet", "each word starts with the next letter of the alphabet")
def alphabet(passage: Passage) -> Finding:
    """Each word's first letter is the next one after that of the word before, Z before A."""
    words = passage.bare_words
    if not words or words[0][0] not in _ALPHABET:
        return "no letter at the start"
    first = _ALPHABET.index(words[0][0])
    for position, word in enumerate(words):
        want = _ALPHABET[(first + position) % 26]
        if word[0] != want:
            return f"{word[:40]!r} where a word with {want!r} is due"
    return None


@constraint("words:vowel", "one paragraph with only three types of vowels")
def vowel(passage: Passage) -> Finding:
    """One paragraph with at most three of the five vowels, in all its words together."""
    if "\n" in passage.raw.strip():
        return "several lines"
    used = sorted(_VOWELS & set(passage.lower))
    return None if len(used) <= 3 else f"the vowels {' '.join(used)}"


@constraint("words:consonants", "a consonant cluster in each word")
def consonants(passage: Passage) -> Finding:
    """Each word, as white space separates them, has two consonants side by side; y is one."""
    for word in passage.lower.split():
        if not _CLUSTER.search(word):
            return f"no cluster in {word[:40]!r}"
    return None


@constraint("words:palindrome", "at least 10 palindromes of at least 5 characters")
def palindrome(passage: Passage) -> Finding:
    """Ten palindromes of five letters or more; the same one may come again, as in the benchmark."""
    got = sum(len(word) >= 5 and word == word[::-1] for word in passage.bare_words)
    return None if got >= 10 else f"{got} palindromes"


@constraint("words:prime_lengths", "only words whose length is a prime number")
def prime_lengths(passage: Passage) -> Finding:
    """Each word's length, without ASCII marks, is a prime below 100."""
    for word in passage.bare.split():
        if len(word) not in _PRIMES:
            return f"{word[:40]!r} has {len(word)} characters"
    return None


@constraint("words:start_verb", "a verb as the first word")
def start_verb(passage: Passage) -> Finding:
    """The first word is a verb; see `verbs` for how that is told."""
    return None if starts_with_verb(passage) else f"it starts with {passage.raw.split()[0][:40]!r}"


@constraint("words:repeats", "no word more than {small_n} times")
def repeats(passage: Passage, small_n: Whole) -> Finding:
    """No word, in lower case and without marks, comes more than `small_n` times."""
    most = Counter(passage.bare_words).most_common(1)
    return f"{most[0][0][:40]!r} {most[0][1]} times" if most and most[0][1] > small_n else None


@constraint("words:odd_even_syllables", "words with odd and even numbers of syllables in turn")
def odd_even_syllables(passage: Passage) -> Finding:
    """Words alternate between odd and even numbers of syllables, by SyllaPy's dictionary and rules."""
    import syllapy

    words = passage.bare_words
    parity = [syllapy.count(word) % 2 for word in words]
    for position, (one, other) in enumerate(pairwise(parity)):
        if one == other:
            return f"{words[position][:40]!r} and {words[position + 1][:40]!r} are both {('even', 'odd')[one]}"
    return None


@constraint("words:last_first", "the last word of each sentence as the first of the next")
def last_first(passage: Passage) -> Finding:
    """The last word of each sentence is the first of the next."""
    for before, after in pairwise(passage.sentences):
        last, first = before.rstrip(AROUND).split(), after.lstrip(AROUND).split()
        if not last or not first:
            return "a sentence without words"
        if last[-1].lower() != first[0].lower():
            return f"{last[-1][:40]!r}, then {first[0][:40]!r}"
    return None


@constraint("words:paragraph_last_first", "each paragraph ends with the word it starts with")
def paragraph_last_first(passage: Passage) -> Finding:
    """Each line that has words ends with the word it starts with."""
    for line in passage.raw.split("\n"):
        words = line.strip().lower().strip(AROUND).split()
        if words and words[0] != words[-1]:
            return f"a paragraph from {words[0][:40]!r} to {words[-1][:40]!r}"
    return None


@constraint("words:no_consecutive", "no two consecutive words with the same first letter")
def no_consecutive(passage: Passage) -> Finding:
    """No word starts with the first letter of the word before it."""
    for before, after in pairwise(passage.bare_words):
        if before[0] == after[0]:
            return f"{before[:40]!r} and {after[:40]!r}"
    return None


@constraint("words:words_position", "{keyword} as the second word and the second to last")
def words_position(passage: Passage, keyword: Trimmed) -> Finding:
    """The second token and the second to last are the keyword; a mark that ends the answer is left out."""
    tokens = passage.tokens
    # A closing quote is no mark in the benchmark's eyes: its tokenizer writes it as two signs.
    back = -3 if tokens and tokens[-1] in MARKS and tokens[-1] != '"' else -2
    if len(tokens) < -back:
        return "too few words"
    second, second_last = tokens[1].lower(), tokens[back].lower()
    return None if second == second_last == keyword.lower() else f"{second[:40]!r} and {second_last[:40]!r}"


@constraint("sentence:keyword", "{word} in sentence {N}")
def keyword_in_sentence(passage: Passage, word: Text, N: Counted) -> Finding:
    """The Nth sentence has the keyword as a whole word, in any case."""
    if len(passage.sentences) < N:
        return f"only {len(passage.sentences)} sentences"
    found = re.search(rf"\b{re.escape(word)}\b", passage.sentences[N - 1], re.IGNORECASE)
    return None if found else f"sentence {N} without it"


@constraint("sentence:increment", "each sentence {small_n} words longer than the one before")
def sentence_increment(passage: Passage, small_n: Whole) -> Finding:
    """Each sentence has exactly `small_n` words more than the one before; marks alone are no words."""
    for before, after in pairwise([len(Passage(sentence).bare_words) for sentence in passage.sentences]):
        if after != before + small_n:
            return f"{before} words, then {after}"
    return None


@constraint(
    "sentence:alliteration_increment", "more consecutive alliterative words in each sentence than in the one before"
)
def alliteration_increment(passage: Passage) -> Finding:
    """Each sentence has more words in alliterating runs than the one before.

    As in the benchmark, a sentence's runs add up, and a single sentence is enough.
    """
    for before, after in pairwise([_alliterating(sentence) for sentence in passage.sentences]):
        if after <= before:
            return f"{before} alliterating words, then {after}"
    return None


def _alliterating(sentence: str) -> int:
    firsts = [word[0] for word in (word.lstrip(AROUND) for word in sentence.lower().split()) if word]
    total, running = 0, False
    for one, other in pairwise(firsts):
        total += 0 if one != other else 1 if running else 2
        running = one == other
    return total
