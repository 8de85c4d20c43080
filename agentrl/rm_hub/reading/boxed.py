r"""Finding `\boxed{...}` in a text, in time linear in its length.

1. Of the complete boxes the one that begins last counts, so of nested boxes the inner one; empty boxes ("put it in
   \boxed{}") do not count.
2. A box that is never closed, as in an answer that was cut off, is no box; boxes inside it still are.
3. Braces nest; `\{` and `\}` are not braces. `\boxed 7` without braces takes the word that follows if it looks like an
   answer and not like prose.
4. Doubled backslashes (`\\boxed{\\frac{1}{2}}`, LaTeX inside JSON) are read as single ones.
"""

import re

_TOKEN = re.compile(
    r"(?s)(?P<box>(?:\\{1,4}b|\x08)oxed(?![A-Za-z])\s*\{?|\\{1,4}fbox(?![A-Za-z])\s*\{?)|\\.|(?P<open>\{)|(?P<close>\})"
)
"""`\x08oxed` is what a JSON or Python string makes of `\boxed` with a single backslash."""

_BARE = re.compile(r"[^\s{}]*(?:\{[^{}\s]*\}[^\s{}]*){0,4}")
_BARE_ANSWER = re.compile(r"[-+.−]?\d|[\\($]|[A-Za-z]$")
_MAX_BARE = 200


def last_box(text: str) -> str | None:
    r"""The content of the last complete `\boxed{...}` or `\fbox{...}`; None if there is none."""
    box = find_last_box(text)
    return box[1] if box else None


def find_last_box(text: str) -> tuple[int, str] | None:
    """Where the content of the last complete box begins, and the content."""
    opened: list[tuple[int, bool] | None] = []
    best: tuple[int, str] | None = None
    for token in _TOKEN.finditer(text):
        if token["box"]:
            doubled = token["box"].startswith("\\\\") and not token["box"].startswith("\\\\\\b")
            if token["box"].endswith("{"):
                opened.append((token.end(), doubled))
            elif (word := _bare_word(text, token.end())) and (best is None or token.end() > best[0]):
                best = token.end(), word
        elif token["open"]:
            opened.append(None)
        elif token["close"] and opened:
            box = opened.pop()
            if box is None or (best is not None and box[0] <= best[0]):
                continue
            # Only the best box is copied, and boxes that close later begin earlier: no text is copied twice.
            if content := text[box[0] : token.start()].strip():
                best = box[0], content.replace("\\\\", "\\") if box[1] else content
    return best


def _bare_word(text: str, start: int) -> str | None:
    match = _BARE.match(text[start : start + _MAX_BARE])
    word = match.group().rstrip("$.,;:*") if match else ""
    if word.startswith("\\{") and word.endswith("\\}"):
        word = word[2:-2]
    return word if _BARE_ANSWER.match(word) else None
