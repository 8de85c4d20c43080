"""Constraints `count:*` and `ratio:*`: numbers and shares of words, sentences and marks."""

import re

from agentrl.rm_hub.ifbench.check import Faults, Run, compare, unless
from agentrl.rm_hub.ifbench.passage import AROUND, CLOSERS, LISTS, ResponseText, tokenise

_DIGITS = re.compile(r"\d+")
_JAPANESE = re.compile(r"[\u3040-\u30ff\u4e00-\u9fff]")
_NAMES = re.compile(rf"\b(?:{'|'.join(LISTS['person_names'])})\b")
_STOP_WORDS, _PRONOUNS = frozenset(LISTS["stop_words"]), frozenset(LISTS["pronouns"])
_CONJUNCTIONS = ("and", "but", "for", "nor", "or", "so", "yet")
_OVERLAP_SLACK = 2.0


def punctuation(passage: ResponseText) -> Faults:
    """Check for . , ! ? ; : and an interrobang (?!, !? or ‽), whose own marks do not count as ! and ?."""
    interrobang = next((marks for marks in ("?!", "!?", "‽") if marks in passage.raw), None)
    if interrobang is None:
        return ["no interrobang"]
    rest = passage.raw.replace(interrobang, "", 1)
    return (f"no {mark}" for mark in ".,!?;:" if mark not in rest)


def words_japanese(passage: ResponseText, N: int) -> Faults:
    """Check that each Nth word (split at white space) has a kana or an ideograph. Numbers and marks are exempt."""
    words = (word.strip(AROUND) for word in passage.raw.split()[N - 1 :: N])
    return (repr(word) for word in words if word and not word.isdigit() and not _JAPANESE.search(word))


def keywords_multiple(
    passage: ResponseText, keyword1: str, keyword2: str, keyword3: str, keyword4: str, keyword5: str
) -> Faults:
    """Check that the keywords occur 1, 2, 3, 5 and 7 times, case-insensitive, also inside longer words."""
    for keyword, want in zip((keyword1, keyword2, keyword3, keyword4, keyword5), (1, 2, 3, 5, 7), strict=True):
        if (got := passage.lower.count(keyword.lower())) != want:
            yield f"{keyword!r} {got} times instead of {want}"


def stop_words(passage: ResponseText, percentage: float) -> Faults:
    """Check that at most `percentage` % of the words (as in `count:word_count_range`) are stop words."""
    if not passage.runs:
        return ["no words"]
    got = 100 * sum(word.lower() in _STOP_WORDS for word in passage.runs) / len(passage.runs)
    return unless(got <= percentage, f"{got:.1f}% stop words")


def overlap(passage: ResponseText, reference_text: str, percentage: float) -> Faults:
    """Check that the reference has `percentage` % (±2 points) of the answer's distinct trigrams. Trigrams are of
    characters, as in the benchmark, although its prompt does not say so."""
    trigrams, theirs = ({*zip(raw, raw[1:], raw[2:], strict=False)} for raw in (passage.raw, reference_text))
    if not trigrams:
        return ["fewer than three characters"]
    got = 100 * len(trigrams & theirs) / len(trigrams)
    return unless(percentage - _OVERLAP_SLACK <= got <= percentage + _OVERLAP_SLACK, f"{got:.1f}% overlap")


def _ends(passage: ResponseText, mark: str) -> int:
    """Count the sentences that end in a mark; quotes and brackets may close after it."""
    return sum(sentence.rstrip(CLOSERS).endswith(mark) for sentence in passage.sentences)


def sentence_type(passage: ResponseText) -> Faults:
    """Check that twice as many sentences end in a full stop as in a question mark. Other sentences do not count."""
    told, asked = _ends(passage, "."), _ends(passage, "?")
    return unless(told == 2 * asked, f"{told} declarative and {asked} interrogative sentences")


def sentence_balance(passage: ResponseText) -> Faults:
    """Check that equal numbers of sentences end in a full stop, a question mark and an exclamation mark."""
    ends = {mark: _ends(passage, mark) for mark in ".?!"}
    return unless(len(set(ends.values())) == 1, ", ".join(f"{got} in {mark!r}" for mark, got in ends.items()))


def sentence_words(passage: ResponseText) -> Faults:
    """Check for three sentences of equal length in characters. As in the benchmark, the words are not compared."""
    lengths = [len(sentence) for sentence in passage.sentences]
    return unless(len(lengths) == 3 and len(set(lengths)) == 1, f"sentences of {lengths} characters")


def keyword_position(passage: ResponseText, keyword: str, n: int, m: int) -> Faults:
    """Check that the mth word of the nth sentence is the keyword. Words are tokens with a letter or digit."""
    sentence = "".join(passage.sentences[n - 1 : n])
    words = [token for token in tokenise(sentence) if any(char.isalnum() for char in token)]
    found = "".join(words[m - 1 : m])
    return unless(found.lower() == keyword.lower(), f"{found!r} there")


CHECKS: dict[str, Run] = {
    # Words are runs of letters, digits and underscores: "don't" is two.
    "count:word_count_range": lambda p, min_words, max_words: unless(
        min_words <= len(p.runs) <= max_words, f"{len(p.runs)} words"),
    # Words are split at white space, in lower case, without marks around them (lone marks count as one word).
    "count:unique_word_count": lambda p, N: compare(
        len({word.strip(AROUND) for word in p.lower.split()}), "at least", N, "unique words"),
    # Runs of digits after all marks are removed: 1,000, 3.5 and 2020-2021 are one number each.
    "count:numbers": lambda p, N: compare(len(_DIGITS.findall(p.bare)), "exactly", N, "numbers"),
    # As in the benchmark, "and", "And" and "and," count as three.
    "count:conjunctions": lambda p, small_n: compare(
        len({word for word in p.raw.split() if word.strip(AROUND).lower() in _CONJUNCTIONS}), "at least", small_n,
        "different coordinating conjunctions"),
    # Names from the prompt's list, as whole words, case-sensitive.
    "count:person_names": lambda p, N: compare(
        len(set(_NAMES.findall(p.raw))), "at least", N, "different names of the list"),
    # Tokens that are pronouns, repeated ones too; "she/her" is two.
    "count:pronouns": lambda p, N: compare(
        sum(t in _PRONOUNS for t in ResponseText(p.lower.replace("/", " ")).tokens), "at least", N, "pronouns"),
    "count:punctuation": punctuation,
    "count:words_japanese": words_japanese,
    "count:keywords_multiple": keywords_multiple,
    "ratio:stop_words": stop_words,
    "ratio:overlap": overlap,
    "ratio:sentence_type": sentence_type,
    "ratio:sentence_balance": sentence_balance,
    "ratio:sentence_words": sentence_words,
    "words:keywords_specific_position": keyword_position,
}  # fmt: skip
