"""Bash cut into commands, words and what is to be expanded in them; as much of it as launch scripts use."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from agentrl.errors import SettingsError

_ENDS = " \t\n;&|()<>"
_OPERATOR = re.compile(r"&&|\|\||;;|[;&|\n]")
_REDIRECTS = re.compile(r"&>>?|>>?&?|>\||<<<|<<-?|<&?")
_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=")


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a word: text, or the inside of `${name}`, `$((sum))`, `$(run)`."""

    kind: str
    text: str
    quoted: bool


@dataclass(slots=True)
class Word:
    """A word as it is written; the elements, where it is an array."""

    parts: list[Part]
    where: str = ""
    array: list["Word"] | None = None

    def plain(self) -> str:
        """What it begins with that needs no expansion."""
        first = self.parts[0] if self.parts else None
        return first.text if first and first.kind == "text" and not first.quoted else ""


@dataclass(slots=True)
class Command:
    """The words of a simple command, and the operator behind it."""

    where: str
    words: list[Word] = field(default_factory=list)
    ends: str = "\n"

    def keyword(self) -> str:
        """The first word, if it is plain text alone."""
        return self.words[0].plain() if self.words and len(self.words[0].parts) == 1 else ""


def commands(text: str, name: str) -> Iterator[Command]:
    """The commands of a script.

    Args:
        name: what the text is called in messages.

    Raises:
        SettingsError: a quote or bracket is never closed.
    """
    at, command = 0, Command("")
    after: list[str] = []
    tested = False
    while at < len(text):
        if found := _OPERATOR.match(text, at):
            if not tested or found[0] == "\n":
                command.ends, at, tested = found[0], found.end(), False
                if command.words:
                    yield command
                command = Command("")
                while after and found[0] == "\n":
                    end = re.compile(rf"^\t*{re.escape(after.pop(0))}$", re.MULTILINE).search(text, at)
                    at = end.end() if end else len(text)
            else:
                command.words.append(Word([Part("text", found[0], quoted=False)]))
                at = found.end()
        elif text[at] in " \t" or text.startswith("\\\n", at):
            at += 1 if text[at] in " \t" else 2
        elif text[at] == "#":
            at = (text.find("\n", at) + len(text) + 1) % (len(text) + 1) if "\n" in text[at:] else len(text)
        elif not tested and (found := _REDIRECTS.match(text, at)):
            at = re.compile(r"[ \t]*").match(text, found.end()).end()  # type: ignore[union-attr]
            word, at = _word(text, at, name)
            if found[0].startswith("<<") and found[0] != "<<<":
                after.append("".join(part.text for part in word.parts))
            if command.words and command.words[-1].plain().isdigit() and text[found.start() - 1].isdigit():
                command.words.pop()
        elif text[at] in "()":
            at += 1
        else:
            command.where = command.where or _line(text, at, name)
            word, at = _word(text, at, name)
            if text.startswith("(", at) and _ARRAY.fullmatch(word.plain()):
                word.array, at = _elements(text, at + 1, name)
            command.words.append(word)
            tested = (tested or word.plain() == "[[") and word.plain() != "]]"
    if command.words:
        yield command


def parts(text: str) -> list[Part]:
    """The pieces of a text that is expanded as one word, as in `${X:-text}`."""
    out: list[Part] = []
    at = 0
    while at < len(text):
        if text[at] in _ENDS:
            out.append(Part("text", text[at], quoted=True))
            at += 1
        else:
            word, at = _word(text, at, text)
            out += word.parts
    return out


def _line(text: str, at: int, name: str) -> str:
    return f"{name} line {text.count(chr(10), 0, at) + 1}" if "line" not in name else name


def _elements(text: str, at: int, name: str) -> tuple[list[Word], int]:
    out: list[Word] = []
    opened = at
    while at < len(text) and text[at] != ")":
        if text[at].isspace():
            at += 1
        elif text.startswith("\\\n", at):
            at += 2
        elif text[at] == "#":
            at = text.find("\n", at) if "\n" in text[at:] else len(text)
        elif text[at] in _ENDS:
            at += 1
        else:
            word, at = _word(text, at, name)
            out.append(word)
    if at >= len(text):
        raise SettingsError(f"{_line(text, opened, name)}: the array is never closed")
    return out, at + 1


def _word(text: str, at: int, name: str, *, quoted: bool = False) -> tuple[Word, int]:
    out: list[Part] = []
    word = Word(out, _line(text, at, name))
    while at < len(text) and (text[at] != '"' if quoted else text[at] not in _ENDS):
        char = text[at]
        if char == "\\":
            kept = "\\" if quoted and text[at + 1 : at + 2] not in ("$", "`", '"', "\\", "\n") else ""
            _add(out, kept + text[at + 1 : at + 2].replace("\n", ""), quoted=True)
            at += 2
        elif char == "'" and not quoted:
            end = _find(text, "'", at, name)
            _add(out, text[at + 1 : end], quoted=True)
            at = end + 1
        elif char == '"':
            inner, at = _word(text, at + 1, name, quoted=True)
            if at >= len(text):
                raise SettingsError(f"{word.where}: a double quote is never closed")
            out += inner.parts or [Part("text", "", quoted=True)]
            at += 1
        elif char in "$`":
            part, at = _expansion(text, at, name, quoted)
            out.append(part)
        else:
            _add(out, char, quoted=quoted)
            at += 1
    return word, at


def _add(out: list[Part], text: str, *, quoted: bool) -> None:
    if out and out[-1].kind == "text" and out[-1].quoted == quoted:
        text = out.pop().text + text
    out.append(Part("text", text, quoted))


def _expansion(text: str, at: int, name: str, quoted: bool) -> tuple[Part, int]:
    if text[at] == "`":
        end = _find(text, "`", at, name)
        return Part("run", text[at + 1 : end], quoted), end + 1
    for opening, closing, kind in (("$((", "))", "sum"), ("$(", ")", "run"), ("${", "}", "name")):
        if text.startswith(opening, at):
            end = _closing(text, at + len(opening), closing, name)
            return Part(kind, text[at + len(opening) : end], quoted), end + len(closing)
    if found := re.compile(r"[A-Za-z_]\w*|[0-9@#?]").match(text, at + 1):
        return Part("name", found[0], quoted), found.end()
    return Part("text", "$", quoted), at + 1


def _closing(text: str, at: int, closing: str, name: str) -> int:
    """Where the bracket closes, past brackets and quotes in between."""
    start, depth = at, 0
    opening = "{" if closing == "}" else "("
    while at < len(text):
        if text[at] == "\\":
            at += 1
        elif text[at] == "'" and closing != "))":
            at = _find(text, "'", at, name)
        elif text[at] == '"':
            _, at = _word(text, at + 1, name, quoted=True)
        elif not depth and text.startswith(closing, at):
            return at
        elif text[at] == opening:
            depth += 1
        elif text[at] == closing[0]:
            depth -= 1
        at += 1
    raise SettingsError(f"{_line(text, start, name)}: a bracket is never closed by {closing}")


def _find(text: str, quote: str, at: int, name: str) -> int:
    end = text.find(quote, at + 1)
    if end < 0:
        raise SettingsError(f"{_line(text, at, name)}: the quote {quote} is never closed")
    return end
