"""The choices of a multiple-choice question, and reading one of them at a place in a text.

1. `Choices` knows the valid letters and, where the data gives them, the texts.
2. `read_letter` reads what stands at a position: "(B)", "**B**", "option b.", "\\text{B}", "C) 42 nm", "42 nm".
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.rm_hub.reading.common import bad_label, bad_metadata, compose

MANY = "several"
"""Stands for an answer that names more than one choice."""

_ALL = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_DECORATION = r"(?:[\s#*_`\"'“”‘’$({\[<>:：]|\\[(\[]|\\{1,2}(?:text|mathrm|mathbf|textbf|mathsf|boxed|bf|rm)\b\s?|option\b|choice\b|answer\b|letter\b|statement\b|(?-i:(?:la |a |die |il |o )?(?:lettre|letra|lettera|opción|opzione|alternativa|Buchstabe)|la|a|die|il)(?=\s[\s(*]{0,3}(?-i:[A-J])\b)|opción\b|选项|選項|the\b)*"
_LETTER = re.compile(
    rf"(?i)(?P<before>{_DECORATION})(?P<letter>[A-Za-z])(?![A-Za-z0-9^]|['’][A-Za-z]|[-–][A-Za-z0-9]|/[a-zA-Z]{{2}}|\.[A-Za-z0-9])"
)
_ANOTHER = re.compile(
    r"[\s*_`\"'”’)\]}.:]{0,6}(?:\([^()\n]{0,80}\))?\s?(?:,?\s(?:or|and|oder|und|ou|et|y|o|или|и)\s|或|和|与|及|[/&+]|,\s?(?:and |or )?)[\s*_`\"'“$(\[{]{0,6}"
    r"(?:option |choice |answer )?[(\[*]{0,4}(?P<letter>[A-J])(?![A-Za-z0-9'’]|[)\]*.]{0,4} (?:is|are|was|would|could|can|fails|does|has)\b)(?=[)\]}*\"'”.,;:!$<]|\s|$)"
)
_TWO_IN_ONE = re.compile(r"[A-J]{2,4}(?![A-Za-z])")
_CLOSES = re.compile(r"[\s*_`\"'”’)\]}>$.,;:!。．、）】|]*(?:$|\n|</)")
_CONNECTS = re.compile(
    r"(?i)\s{0,2}[)\]}*\"'”’$.,;:!?。．、，）】<\\_`|&/+(–—\-]|\s+[-–—(\[]|\n|$|[^\x00-\x7f]|\s+(?:because|since|as|for|given|based|which|due|that|with|and|or|but|so|not|rather|from|by|"
    r"considering|where|while|is|if|according|after|among|on|follows|over|instead|in|corresponds|was|here|only|then)\b"
)
_GIVES_REASON = re.compile(r"(?i)\s?[,—–-]\s?(?:because|since|as|due to|given)\b")
_WORDS_IN_MATH = re.compile(r"\\{1,2}(?:text|mathrm|mathbf|textbf|mathsf)\s?\{([^{}]{0,200})\}")
_NOT = re.compile(
    r"(?i)\s*(?:definitely |clearly |certainly |probably |simply |just )?(?:not|neither|n't|no longer|never)\b"
)
_BUT = re.compile(r"(?i)[^.\n]{0,80}?\bbut(?: rather| instead)?\b\s*")
_LABELLED = re.compile(r"^\s*[(\[]?([A-Za-z])[)\].:]\s+")
_WRAPPERS = re.compile(r"\\{1,2}(?:text|mathrm|mathbf|textbf|mathsf)\b|[$*_`{}\\]|[\"'“”‘’]")
_MAX_SEGMENT = 1000


@dataclass(frozen=True, slots=True)
class Choices:
    """The valid letters, and the normalised text of each where known."""

    letters: str
    texts: Mapping[str, str]

    def knows(self, letter: str) -> bool:
        """Whether this is one of the choices (any text is, where the label is a text and the choices are unknown)."""
        return letter in self.letters or not self.letters

    def by_text(self, segment: str) -> str | None:
        """The choice whose text is the segment."""
        bare = plain(segment[:_MAX_SEGMENT])
        if not self.letters:
            return bare or None
        same = [letter for letter, text in self.texts.items() if text == bare]
        return same[0] if len(same) == 1 else None

    def begins(self, segment: str) -> str | None:
        """The choice with whose text the segment begins; MANY if another one follows after "or"."""
        bare = plain(segment[:_MAX_SEGMENT])
        beginning = [letter for letter, text in self.texts.items() if text and _stands_at(bare, text, 0)]
        if not beginning:
            return None
        best = max(beginning, key=lambda letter: len(self.texts[letter]))
        rest = bare[len(self.texts[best]) :]
        if re.match(r"\s?,?\s?(?:or|and)\s", rest) and self.within(rest) is not None:
            return MANY
        return best

    def within(self, sentence: str) -> str | None:
        """The only choice whose text stands in the sentence; a text inside a longer one that stands there is none."""
        bare = plain(sentence[-_MAX_SEGMENT:])
        covered: list[tuple[int, int]] = []
        found: set[str] = set()
        for letter, text in sorted(self.texts.items(), key=lambda item: -len(item[1])):
            at = bare.find(text) if text else -1
            while at >= 0:
                inside = any(start <= at and at + len(text) <= end for start, end in covered)
                if not inside and _stands_at(bare, text, at):
                    covered.append((at, at + len(text)))
                    found.add(letter)
                at = bare.find(text, at + 1)
        return None if not found else found.pop() if len(found) == 1 else MANY


def plain(text: str) -> str:
    """A choice's text for comparing: no mark-up, one space, small letters, no full stop at the end."""
    return " ".join(_WRAPPERS.sub("", compose(text)).split()).strip(" .;,:!()[]").lower()


def _stands_at(text: str, part: str, at: int) -> bool:
    if not text.startswith(part, at):
        return False
    before, after = text[max(0, at - 1) : at], text[at + len(part) : at + len(part) + 2]
    joined = bool(after) and (after[0].isalnum() or (after[0] in ".,/^" and after[1:].isdigit()) or after[0] == "^")
    return not joined and not (before and (before.isalnum() or before in ".,-/^−"))


def read_letter(text: str, position: int, choices: Choices, *, alone: bool = False) -> str | None:
    """The choice that stands at `position`; None if there is none, MANY if there are several.

    Args:
        text: the answer.
        position: where a choice is expected.
        choices: the valid ones.
        alone: nothing announces an answer here, so a bare letter needs the end of the text or a bracket behind it.
    """
    segment = _WORDS_IN_MATH.sub(r"\1", text[position : position + _MAX_SEGMENT])
    if _NOT.match(segment) and not choices.begins(segment.lstrip(" *_`\"'“$:>")):
        but = _BUT.match(segment)
        if but is None:
            return None
        segment = segment[but.end() :]
    line = next((line for line in segment.splitlines() if re.search(r"\w", line)), "")
    if not choices.letters:
        return plain(re.split(r"[.;!?](?:\s|$)|</|\n", line)[0]) or None
    head = re.split(r"</|\\\]", line)[0].lstrip(" *_`\"'“$:")
    if not alone and (letter := choices.by_text(head) or (None if _LABELLED.match(head) else choices.begins(head))):
        return letter
    match = _LETTER.match(segment)
    if match is None:
        doubled = re.match(_DECORATION, segment)
        found = _TWO_IN_ONE.match(segment, doubled.end()) if doubled and not alone else None
        return MANY if found and _CLOSES.match(segment, found.end()) else None
    return _accept(segment, match, choices, alone)


def _accept(segment: str, match: re.Match[str], choices: Choices, alone: bool) -> str | None:
    letter, behind, before = match["letter"], match.end(), match["before"].rstrip()
    opened = before[-1:] in tuple("([{*\"'“‘`")
    named = opened or re.search(r"(?:option|choice|answer|letter)\s*\S{0,4}$", before, re.IGNORECASE)
    closes = bool(_CLOSES.match(segment, behind))
    rest = segment[behind : behind + 3]
    another = _ANOTHER.match(segment, behind)
    if another and another["letter"] != letter.upper() and choices.knows(another["letter"]):
        return MANY
    ends = closes or rest[:1] in tuple(")]}*") or (rest[:1] in tuple(".,:") and (named or not alone))
    if letter.islower() and not ends:
        return None
    if alone:
        marked = rest[:1] in tuple(")]") or (rest[:1] == "." and rest[1:2].isspace())
        marked = marked or (opened and rest[:1] in tuple("*}\"'`"))
        colon = (rest[:1] == ":" and letter not in "Aa") or bool(_GIVES_REASON.match(segment, behind))
        colon = colon or (letter in "BCDEFGHJ" and rest[:1] == " " and rest[1:2] in tuple("-–—") and rest[2:3] == " ")
        return letter.upper() if closes or marked or colon or (named and _CONNECTS.match(segment, behind)) else None
    text_follows = choices.texts.get(letter.upper(), "")
    if text_follows and _stands_at(plain(segment[behind:]), text_follows, 0):
        return letter.upper()
    if opened or _CONNECTS.match(segment, behind):
        return letter.upper()
    goes_on = choices.texts or re.match(r"\s+[a-z]", segment[behind:])
    return letter if letter in "BCDEFGHJ" and not goes_on else None


def read_choices(label: Any, metadata: Mapping[str, Any]) -> tuple[Choices, str]:
    """The choices of a question, and which one is right (a letter, or a normalised text where choices are unknown)."""
    texts = _choice_texts(metadata.get("choices"))
    letters = _valid_letters(metadata.get("valid_letters"), texts)
    if isinstance(label, bool) or not isinstance(label, (str, int)) or (isinstance(label, str) and not label.strip()):
        raise bad_label("gpqa", "a letter, a choice's text or a choice's index", label)
    if isinstance(label, int):
        known = letters or _ALL[:4]
        if not 0 <= label < len(known):
            raise bad_label("gpqa", f"an index from 0 to {len(known) - 1}", label)
        return Choices(known, texts), known[label]
    letter = re.fullmatch(r"[\s(\[*]*(?:option |choice )?([A-Za-z])[\s)\].:*]*", label, re.IGNORECASE)
    by_text = [name for name, text in texts.items() if text == plain(label)]
    if len(by_text) == 1:
        return Choices(letters, texts), by_text[0]
    labelled = _LABELLED.match(label)
    if letter is None and labelled and texts.get(labelled[1].upper()) == plain(label[labelled.end() :]):
        letter = labelled
    if letter is not None:
        wanted = letter[1].upper()
        letters = letters or (_ALL[:4] if wanted in "ABCD" else _ALL[:10] if wanted in _ALL[:10] else "")
        if wanted not in letters:
            raise bad_label("gpqa", f"one of the valid letters {letters or 'A to J'}", label)
        return Choices(letters, texts), wanted
    if texts or letters:
        raise bad_label("gpqa", "one of the valid letters or the text of one of metadata choices", label)
    return Choices("", {}), plain(label)


def _choice_texts(value: Any) -> dict[str, str]:
    if value is None:
        return {}
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping) and all(isinstance(key, str) and len(key.strip()) == 1 for key in value):
        return {key.strip().upper(): plain(str(text)) for key, text in value.items()}
    if isinstance(value, str) or not isinstance(value, Sequence) or not 1 < len(value) <= len(_ALL):
        raise bad_metadata("gpqa", "choices", "a list of 2 to 26 texts, or a mapping from letters to texts", value)
    texts = [str(text) for text in value]
    prefixes = [_LABELLED.match(text) for text in texts]
    if all(match and match[1].upper() == letter for match, letter in zip(prefixes, _ALL, strict=False)):
        texts = [_LABELLED.sub("", text, count=1) for text in texts]
    return dict(zip(_ALL, map(plain, texts), strict=False))


def _valid_letters(value: Any, texts: Mapping[str, str]) -> str:
    if value is None:
        return "".join(texts)
    if isinstance(value, str) and (span := re.fullmatch(r"\s*([A-Z])\s*-\s*([A-Z])\s*", value)):
        return _ALL[_ALL.index(span[1]) : _ALL.index(span[2]) + 1]
    letters = [str(letter).strip().upper() for letter in value] if isinstance(value, (str, list, tuple, set)) else []
    letters = [letter for letter in letters if letter not in ("", ",")]
    if not letters or not all(len(letter) == 1 and letter in _ALL for letter in letters):
        raise bad_metadata("gpqa", "valid_letters", "letters, as ['A', 'B', 'C', 'D'] or 'ABCD'", value)
    return "".join(letters)
