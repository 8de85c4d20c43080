"""What counts of a response: what follows its reasoning, without what a reader does not see; and its sentences. Full
stops in it are also decimal points, and its formulas have lines."""

import re
from collections.abc import Iterator

from agentrl.rm_hub.reading.common import after_reasoning

TAIL = 100_000
"""Characters at the end of a response that are read."""

_ESCAPED = {"\x0crac": r"\frac", "\x08inom": r"\binom", "\text{": r"\text{", "\times": r"\times"}
"""What a JSON or Python string makes of LaTeX with single backslashes."""
_UNSEEN = re.compile(
    r"""(?sx)
    <!--.*?(?:-->|\Z) | \\begin\{comment\}.*?(?:\\end\{comment\}|\Z) | (?<=[^\d\s}]\s)%[^\n]*                # comments
    | <(\w{1,20})\b[^<>]{0,200}\b(?:hidden|display:\s?none)[^<>]{0,200}>.*?(?:</\1>|\Z)                       # hidden
    | \\[hv]?phantom\s*\{[^{}]*\}
    | ~~.{1,400}?~~ | <(s|del|strike)>.{0,400}?</\2>                                                          # struck out
    | (?m:^[ \t]{0,3}>\s[^\n]*) | ["“][^\s"“”]*\s[^"“”\n]*["”]                                                # quoted
    | <<[^<>\n]{1,200}>>                                                               # GSM8K's calculator marks
    | (?P<code>```(?!json|text|latex|tex|markdown|md).*?(?:```|\Z))                    # code, but for a box in it
    | (?P<mark></?(?:b|strong|i|em|u|p)>)                                              # the mark alone
    """
)
_NEXT_TURN = re.compile(r"\n\s{0,4}(?:[*_#]{0,4})(?:Question|Q|Human|User)\s?\d{0,3}\s?:")
"""A model that goes on with a conversation of its own."""
_REORDERED = re.compile("[\u202d\u202e]")
_EMPHASIS = re.compile(r"(?<![\w*])(\*\*|__)(?=\S)([^*_\n]{1,200}?)(?<=\S)\1(?!\w)")

_NEAR, _WORD_PART = 300, re.compile(r"\A\w{1,40}")
_SENTENCE_END = re.compile(
    r"(?<![.\s])(?:[.?]+|!(?!\s*[=+*/)\\$-]))(?=[)\]\"'”*_$]{0,4}(?:\s+[^\s\d]|\s*$))|[。！？]|\n|(?<=\d)\.(?=[A-Z])"
)
_SHORTENED = re.compile(r"(?:\b(?:[ap]\.?m|approx|ca|Rs|No|sq|ft|in|cu|vs|Mr|Mrs|Ms|Dr|i\.e|e\.g)|[ap]\.m)$")


def seen(response: str) -> str:
    """The part of a response that a reader takes for its answer; nothing if its letters are reordered."""
    text = after_reasoning(response[-TAIL:])
    for broken, meant in _ESCAPED.items():
        text = text.replace(broken, meant)
    if _REORDERED.search(text):
        return ""
    following = _NEXT_TURN.search(text, len(text) - len(text.lstrip()) + 1)
    return _EMPHASIS.sub(r"\2", _UNSEEN.sub(_instead, text[: following.start() if following else None]))


def _instead(match: re.Match[str]) -> str:
    if match["code"] and "boxed" in match["code"]:
        return match.group()
    return "" if match["mark"] else " "


def sentence(text: str, start: int) -> tuple[str, int]:
    """The sentence that goes on at `start`, without marks before it, and where it ends, its stop not counted."""
    skipped = len(text[start : start + 100]) - len(text[start : start + 100].lstrip(" \t\r\n*_:#`\"'"))
    start += skipped
    display = re.compile(r"\\\[(.{1,400}?)\\\]|\$\$(.{1,400}?)\$\$", re.DOTALL).match(text, start)
    if display is not None:
        return (display.group(1) or display.group(2)).strip(), display.end()
    limit = text[start : start + 600]
    if r"\begin{" in limit and (last := limit.rfind(r"\end{")) >= 0:  # the rows of a matrix may be lines
        tail = re.match(r"\S*(?:\s?\$|\s?\\[)\]])?", limit[last:])
        length = last + (tail.end() if tail else 0)
        return limit[:length], start + length
    stop = next(ends(limit), None)
    said = limit if stop is None else limit[: stop.start()]
    return said, start + len(said)


def ends(text: str) -> Iterator[re.Match[str]]:
    """The stops of the sentences of a text; "a.m." and "vs." end none."""
    for end in _SENTENCE_END.finditer(text):
        if end.group() != "." or _SHORTENED.search(text, 0, end.start()) is None or not text[end.end() :].strip():
            yield end


def sentence_start(text: str, position: int) -> int:
    """Where the sentence begins that a position of a text is in, at most 300 characters before it and not in a word."""
    window = text[max(0, position - _NEAR) : position]
    if position > _NEAR:
        window = _WORD_PART.sub("", window)
    stops = [end.end() for end in ends(window + "x")]
    return position - len(window) + (stops[-1] if stops else 0)


def following(text: str, position: int) -> str:
    """What follows a position of a text, at most 300 characters and no part of a word."""
    window = text[position : position + _NEAR]
    return window if position + _NEAR >= len(text) else _WORD_PART.sub("", window[::-1])[::-1]
