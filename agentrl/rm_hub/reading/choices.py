"""Reads the choices of a multiple-choice question, and a choice at the beginning of a text.

1. `Choices` has the valid letters, and the choices' texts if the data gives them.
2. `read_choice` reads "(B)", "**B**", "option b.", "\\text{B}", "C) 42 nm", "42 nm". "A photon" is not answer A."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from agentrl.rm_hub.reading.common import bad_label, bad_metadata, compose
from agentrl.rm_hub.reading.phrases import any_of

MANY = "\0"  # the value for an answer that names more than one choice

_ALL = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_MARKS = r"[\s#*_`\"'“”‘’$({\[<>\\:：]*"
_NAME = rf"(?i:(?:the|la|die|il)\s+)?(?i:{any_of('option', 'answer')}|(?:letter|lettre|letra|Buchstabe|选项|項)\b)?"
_LETTER = re.compile(rf"{_MARKS}(?P<name>{_NAME}){_MARKS}(?P<letter>[A-Za-z])(?![-–/.]?[A-Za-z0-9]|\^|['’][A-Za-z])")
_ENDS = re.compile(
    r"[)\]}*_`\"'”’$]*(?:[.,:;!?。，；、)\]}]|$|\n|\s[-–—(]|[^\x00-\x7f]|\s+(?i:because|since|as|for|given|based|which|due|that|with|and|or|but|so|not|rather|from|by|"
    r"considering|where|while|is|according|if|among|on|in|only)\b)"
)
_ANOTHER = re.compile(
    rf"[\s*_`\"'”’)\]}}.:$]{{0,6}}(?:\([^()\n]{{0,80}}\))?\s?(?:{any_of('maybe')}|,|/|&|\+|\band\b|\bund\b|\bet\b|\by\b|\bи\b|、|和|与|及)"
    rf"[\s,]*(?:and\s|or\s|maybe\s|perhaps\s)*{_NAME}{_MARKS}(?P<letter>[A-J])(?![A-Za-z0-9'’]|[)\]*.]{{0,4}} (?:is|are|was|would|could|can|fails|does|has)\b)"
)
_TWO_IN_ONE = re.compile(rf"{_MARKS}[A-J]{{2,6}}(?![A-Za-z])")
_WORDS_IN_MATH = re.compile(r"\\{1,2}(?:text|mathrm|mathbf|textbf|mathsf|boxed|bf|rm)\s?\{([^{}]{0,200})\}")
_LABELLED = re.compile(r"^\s*[(\[]?([A-Za-z])[)\].:]\s+")
_WRAPPERS = re.compile(r"\\{1,2}(?:text|mathrm|mathbf|textbf|mathsf)\b|[$*_`{}\\]|[\"'“”‘’]")
_MAX_SEGMENT = 1000


class Choices(NamedTuple):
    """The valid letters, and the normalised text of each letter if known."""

    letters: str
    texts: Mapping[str, str]

    @property
    def words(self) -> Mapping[str, str]:
        """The texts that name a choice. A text that is itself a valid letter does not: a letter names its own choice."""
        return {letter: text for letter, text in self.texts.items() if text and text.upper() not in set(self.letters)}

    def by_text(self, segment: str) -> str | None:
        bare = plain(segment[:_MAX_SEGMENT])
        same = [letter for letter, text in self.words.items() if text == bare]
        return same[0] if len(same) == 1 else None

    def begins(self, segment: str) -> tuple[str, str] | None:
        """Return the choice whose text begins the segment (MANY if another choice's text follows), and the rest."""
        bare = plain(segment[:_MAX_SEGMENT])
        texts = self.words
        if not (beginning := [letter for letter, text in texts.items() if _stands_at(bare, text, 0)]):
            return None
        best = max(beginning, key=lambda letter: len(texts[letter]))
        rest = bare[len(texts[best]) :]
        others = [text for text in texts.values() if text != texts[best]]
        return (MANY if any(_stands_at(rest, text, rest.find(text)) for text in others) else best), rest


def plain(text: str) -> str:
    """Normalise a choice's text: no mark-up, single spaces, lower case, no punctuation at the ends."""
    return " ".join(_WRAPPERS.sub("", compose(text)).split()).strip(" .;,:!()[]").lower()


def _stands_at(text: str, part: str, at: int) -> bool:
    if at < 0 or not text.startswith(part, at):
        return False
    before, after = text[max(0, at - 1) : at], text[at + len(part) : at + len(part) + 2]
    joined = bool(after) and (after[0].isalnum() or (after[0] in ".,/^" and after[1:].isdigit()) or after[0] == "^")
    return not joined and not (before and (before.isalnum() or before in ".,-/^−"))


def read_choice(said: str, choices: Choices) -> tuple[str, str] | None:
    """Return the choice at the beginning of a text (or MANY) and the rest of the text; None if there is no choice."""
    text = _WORDS_IN_MATH.sub(r"\1", said[:_MAX_SEGMENT]).strip()
    line = text.partition("\n")[0].lstrip(" *_`\"'“$:")
    if not choices.letters:
        bare = plain(re.split(r"[.;!?](?:\s|$)|</", line)[0])
        return (bare, "") if bare else None
    if (whole := choices.by_text(line)) is not None:
        return whole, ""
    if not _LABELLED.match(line) and (begun := choices.begins(line)) is not None:
        return begun
    if (match := _LETTER.match(text)) is None:
        return (MANY, "") if _TWO_IN_ONE.fullmatch(text.rstrip(".*$)")) else None
    letter, rest = match["letter"].upper(), text[match.end() :]
    if letter not in choices.letters:
        return None
    if (another := _ANOTHER.match(rest)) and another["letter"] != letter and another["letter"] in choices.letters:
        return MANY, ""
    follows = choices.texts.get(letter, "")
    ends = _ENDS.match(rest) is not None or (follows and plain(rest).startswith(follows))
    if not ends or (match["letter"].islower() and not match["name"] and rest.strip(" .)]}*_$\"'")):
        return None
    return letter, "" if plain(rest) in ("", follows) else rest


def read_choices(label: Any, metadata: Mapping[str, Any]) -> tuple[Choices, str]:
    """Return a question's choices and the right one: a letter, or a normalised text if the choices are unknown."""
    texts = _choice_texts(metadata.get("choices"))
    letters = _valid_letters(metadata.get("valid_letters"), texts)
    if isinstance(label, bool) or not isinstance(label, (str, int)) or (isinstance(label, str) and not label.strip()):
        raise bad_label("gpqa", "a letter, a choice's text or a choice's index", label)
    if isinstance(label, int):
        known = letters or _ALL[:4]
        if not 0 <= label < len(known):
            raise bad_label("gpqa", f"an index from 0 to {len(known) - 1}", label)
        return Choices(known, texts), known[label]
    named = re.fullmatch(r"[\s(\[*]*(?:option |choice )?([A-Za-z])[\s)\].:*]*", label, re.IGNORECASE)
    by_text = [name for name, text in texts.items() if text == plain(label)]
    if named is not None and named[1].upper() in (letters or _ALL):
        wanted = named[1].upper()
    elif len(by_text) == 1:
        wanted = by_text[0]
    elif (marked := _LABELLED.match(label)) and texts.get(marked[1].upper()) == plain(label[marked.end() :]):
        wanted = marked[1].upper()
    elif texts or letters:
        raise bad_label("gpqa", "one of the valid letters or the text of one of metadata choices", label)
    else:
        return Choices("", {}), plain(label)
    letters = letters or (_ALL[:4] if wanted in "ABCD" else _ALL[:10])
    if wanted not in letters:
        raise bad_label("gpqa", f"one of the valid letters {letters}", label)
    return Choices(letters, texts), wanted


def _choice_texts(value: Any) -> dict[str, str]:
    if value is None:
        return {}
    value = value.tolist() if hasattr(value, "tolist") else value
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
