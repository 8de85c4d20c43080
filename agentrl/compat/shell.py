"""Splitting of Bash into commands and words, for the syntax that launch scripts use. Nothing is expanded."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from agentrl.errors import SettingsError

_ENDS = " \t\n;&|()<>"
_OPERATOR = re.compile(r"&&|\|\||;;|[;&|\n]")
_DEFINES = re.compile(r"\(\s*\)\s*")
_REDIRECTS = re.compile(r"\d?(&>>?|>>?&?|<<<|<<-?|<&?)[ \t]*")
_PLAIN = re.compile(r"[\w./,:=@%+-]+")
_BRACKETS = (("$((", "))"), ("$(", ")"), ("${", "}"), ('"', '"'), ("'", "'"), ("`", "`"), ("(", ")"))


class Word(NamedTuple):
    """A word as written (an array's assignment with its brackets), and its file and line."""

    raw: str
    where: str


def commands(text: str, name: str) -> Iterator[tuple[list[Word], str]]:
    """Yield the words of each simple command, and the operator or bracket after it. A function's definition has a word
    `()`. `name`: the text's name in messages: a file, or a file and its first line (`run.sh line 3`). Raises
    SettingsError: a quote or bracket is not closed."""
    file, _, first = name.rpartition(" line ") if " line " in name else (name, "", "1")
    at, words, after = 0, list[Word](), list[str]()
    while at < len(text):
        where = f"{file} line {int(first) + text.count(chr(10), 0, at)}"
        tests = bool(words) and any(word.raw == "[[" for word in words) and words[-1].raw != "]]"
        if text[at] in " \t" or (tests and text[at] in "()") or text.startswith("\\\n", at):
            at += 1 + (text[at] == "\\")
        elif words and (found := _DEFINES.match(text, at)):
            words.append(Word("()", where))
            at = found.end()
        elif text[at] in "()" and not text.startswith("((", at):
            yield words, text[at]
            words, at = [], at + 1
        elif text[at] == "#":
            at = len(text) if (end := text.find("\n", at)) < 0 else end
        elif not tests and (found := _REDIRECTS.match(text, at)):
            at = _word_end(text, found.end(), where)
            if found[1] in ("<<", "<<-"):
                after.append(re.sub(r"['\"\\]", "", text[found.end() : at]))
        elif found := _OPERATOR.match(text, at):
            at = found.end()
            if tests and found[0] != "\n":
                words.append(Word(found[0], where))
                continue
            if words:
                yield words, found[0]
            words = []
            while after and found[0] == "\n":
                end_of = re.compile(rf"^\t*{re.escape(after.pop(0))}$", re.MULTILINE).search(text, at)
                at = end_of.end() if end_of else len(text)
        else:
            end = ends_at(text, at, where) if text[at] == "(" else _word_end(text, at, where)
            if text.startswith("(", end) and re.fullmatch(r"[A-Za-z_]\w*\+?=", text[at:end]):
                end = ends_at(text, end, where)
            words.append(Word(text[at:end] or text[at], where))
            at = end + (end == at)
    if words:
        yield words, "\n"


def _word_end(text: str, at: int, where: str) -> int:
    while at < len(text) and text[at] not in _ENDS:
        at = ends_at(text, at, where)
    return at


def ends_at(text: str, at: int, where: str, *, quoted: bool = False) -> int:
    """Return the end of the quote, bracket, escape or character that begins at `at`. `quoted`: `at` is inside double
    quotes, where single quotes and brackets are plain. Raises SettingsError: the quote or bracket is not closed."""
    if plain := _PLAIN.match(text, at):
        return plain.end()
    if text[at] == "\\":
        return min(at + 2, len(text))
    opening, closing = next((pair for pair in _BRACKETS if text.startswith(pair[0], at)), ("", ""))
    if not opening or (quoted and opening in "'("):
        return at + 1
    here = at + len(opening)
    while not text.startswith(closing, here):
        if here >= len(text):
            raise SettingsError(f"{where}: {opening} is never closed")
        if opening in "'`":
            here += 1
        elif opening == "(" and text[here] == "#" and text[here - 1].isspace():
            here = len(text) if (end := text.find("\n", here)) < 0 else end
        else:
            here = ends_at(text, here, where, quoted=opening == '"')
    return here + len(closing)
