"""Constraints `count:*` and `ratio:*`: how many of something, or what share."""

import re
from functools import cache

from agentrl.rm_hub.ifbench.check import Counted, Finding, Share, Text, Trimmed, Whole, at_least, constraint
from agentrl.rm_hub.ifbench.lists import CONJUNCTIONS, PERSON_NAMES, PRONOUNS, STOP_WORDS
from agentrl.rm_hub.ifbench.passage import AROUND, Passage, tokenise

_DIGITS = re.compile(r"\d+")
_JAPANESE = re.compile(r"[\u3040-\u30ff\u4e00-\u9fff]")
_OVERLAP_SLACK = 2.0


@constraint("count:word_count_range", "between {min_words} and {max_words} words")
def word_count_range(passage: Passage, min_words: Whole, max_words: Whole) -> Finding:
    """Words are runs of letters, digits and underscores: "don't" is two."""
    got = len(passage.runs)
    return None if min_words <= got <= max_words else f"{got} words"


@constraint("count:unique_word_count", "at least {N} unique words")
def unique_word_count(passage: Passage, N: Whole) -> Finding:
    """Words are what white space separates, in lower case, without marks around them (a lone mark counts as one)."""
    return at_least(len({word.strip(AROUND) for word in passage.lower.split()}), N, "unique words")


@constraint("count:numbers", "exactly {N} numbers")
def numbers(passage: Passage, N: Whole) -> Finding:
    """Runs of digits once every mark is taken out: 1,000 and 3.5 are one number each, and so is 2020-2021."""
    got = len(_DIGITS.findall(passage.bare))
    return None if got == N else f"{got} numbers"


@constraint("count:conjunctions", "at least {small_n} different coordinating conjunctions")
def conjunctions(passage: Passage, small_n: Whole) -> Finding:
    """Different coordinating conjunctions; as in the benchmark, "and", "And" and "and," are three different ones."""
    found = {word for word in passage.raw.split() if word.strip(AROUND).lower() in CONJUNCTIONS}
    return at_least(len(found), small_n, "different coordinating conjunctions")


@cache
def _names() -> re.Pattern[str]:
    return re.compile(rf"\b(?:{'|'.join(PERSON_NAMES)})\b")


@constraint("count:person_names", "at least {N} different names of the list")
def person_names(passage: Passage, N: Whole) -> Finding:
    """Different names of the prompt's list, as whole words with their capital."""
    return at_least(len(set(_names().findall(passage.raw))), N, "names of the list")


@constraint("count:pronouns", "at least {N} pronouns")
def pronouns(passage: Passage, N: Whole) -> Finding:
    """Pronouns among the tokens, each as often as it comes; "she/her" is two."""
    parts = Passage(passage.lower.replace("/", " "))
    return at_least(sum(token in PRONOUNS for token in parts.tokens), N, "pronouns")


@constraint("count:punctuation", "every standard punctuation mark and an interrobang")
def punctuation(passage: Passage) -> Finding:
    """Each of . , ! ? ; : and an interrobang (?!, !? or the single sign), whose two marks count for nothing else."""
    raw = passage.raw
    if not any(mark in raw for mark in ("?!", "!?", "‽")):
        return "no interrobang"
    rest = raw.replace("?!", "", 1)
    if rest == raw:
        rest = raw.replace("!?", "", 1)
    missing = [mark for mark in ".,!?;:" if mark not in rest]
    return f"no {' '.join(missing)}" if missing else None


@constraint("count:words_japanese", "every {N}th word in Japanese")
def words_japanese(passage: Passage, N: Counted) -> Finding:
    """Each Nth word, as white space separates them, has a kana or an ideograph; numbers and marks are let off."""
    for position, word in enumerate(passage.raw.split()[N - 1 :: N], start=1):
        bare = word.strip(AROUND)
        if bare and not bare.isdigit() and not _JAPANESE.search(bare):
            return f"word {position * N} is {bare[:40]!r}"
    return None


@constraint(
    "count:keywords_multiple",
    "{keyword1} once, {keyword2} twice, {keyword3} three, {keyword4} five and {keyword5} seven times",
)
def keywords_multiple(
    passage: Passage, keyword1: Trimmed, keyword2: Trimmed, keyword3: Trimmed, keyword4: Trimmed, keyword5: Trimmed
) -> Finding:
    """The five keywords come 1, 2, 3, 5 and 7 times, in any case and also inside longer words."""
    for keyword, want in zip((keyword1, keyword2, keyword3, keyword4, keyword5), (1, 2, 3, 5, 7), strict=True):
        got = passage.lower.count(keyword.lower())
        if got != want:
            return f"{keyword!r} {got} times instead of {want}"
    return None


@constraint("ratio:stop_words", "at most {percentage}% stop words")
def stop_words(passage: Passage, percentage: Share) -> Finding:
    """The share of stop words among the words of `word_count_range`, at most `percentage`."""
    if not passage.runs:
        return "no words"
    got = 100 * sum(word.lower() in STOP_WORDS for word in passage.runs) / len(passage.runs)
    return None if got <= percentage else f"{got:.1f}% stop words"


@constraint("ratio:overlap", "a trigram overlap of {percentage}% (±2%) with the reference text")
def overlap(passage: Passage, reference_text: Text, percentage: Share) -> Finding:
    """Of the answer's different trigrams, the share that the reference has too; within 2 points of `percentage`.

    Trigrams are of characters, as in the benchmark, though its prompt does not say so.
    """
    trigrams = _trigrams(passage.raw)
    if not trigrams:
        return "fewer than three characters"
    got = 100 * len(trigrams & _trigrams(reference_text)) / len(trigrams)
    return None if percentage - _OVERLAP_SLACK <= got <= percentage + _OVERLAP_SLACK else f"{got:.1f}% overlap"


def _trigrams(raw: str) -> set[str]:
    return {raw[start : start + 3] for start in range(len(raw) - 2)}


@constraint("ratio:sentence_type", "two declarative sentences to one interrogative")
def sentence_type(passage: Passage) -> Finding:
    """Twice as many sentences end in a full stop as in a question mark; others are not counted."""
    ends = _ends(passage)
    return None if ends["."] == 2 * ends["?"] else f"{ends['.']} declarative and {ends['?']} interrogative sentences"


@constraint("ratio:sentence_balance", "as many declarative as interrogative and exclamatory sentences")
def sentence_balance(passage: Passage) -> Finding:
    """As many sentences end in a full stop as in a question mark and in an exclamation mark."""
    ends = _ends(passage)
    return None if len(set(ends.values())) == 1 else ", ".join(f"{count} in {mark!r}" for mark, count in ends.items())


def _ends(passage: Passage) -> dict[str, int]:
    return {mark: sum(sentence.endswith(mark) for sentence in passage.sentences) for mark in ".?!"}


@constraint("ratio:sentence_words", "three sentences of the same number of characters")
def sentence_words(passage: Passage) -> Finding:
    """Three sentences of the same length in characters. That their words differ is asked for, but not checked, as in
    the benchmark."""
    lengths = [len(sentence) for sentence in passage.sentences]
    if len(lengths) != 3:
        return f"{len(lengths)} sentences"
    return None if len(set(lengths)) == 1 else f"sentences of {lengths[0]}, {lengths[1]} and {lengths[2]} characters"


@constraint("words:keywords_specific_position", "{keyword} as word {m} of sentence {n}")
def keyword_position(passage: Passage, keyword: Trimmed, n: Counted, m: Counted) -> Finding:
    """The mth word of the nth sentence is the keyword; words are tokens with a letter or digit in them."""
    if len(passage.sentences) < n:
        return f"only {len(passage.sentences)} sentences"
    words = [token for token in tokenise(passage.sentences[n - 1]) if any(char.isalnum() for char in token)]
    if len(words) < m:
        return f"only {len(words)} words in sentence {n}"
    return None if words[m - 1].lower() == keyword.lower() else f"{words[m - 1][:40]!r} there"
