r"""Finding `\boxed{...}` in a text, in time linear in its length."""

import re

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(\{)?")
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)


def last_box(text: str) -> str | None:
    r"""The content of the last complete `\boxed{...}` or `\fbox{...}`; None if there is none.

    Braces inside nest; `\{` and `\}` are not braces. `\boxed 7` (no brace) gives the word that follows. A box that is
    not closed, as in an answer that was cut off, is none.
    """
    found: str | None = None
    position = 0
    while match := _BOX.search(text, position):
        if match.group(1) is None:
            word = re.match(r"\S+", text[match.end() : match.end() + 200])
            found = word.group().rstrip("$.") if word else found
            position = match.end()
            continue
        end = _closing(text, match.end())
        if end is None:
            return found
        found = text[match.end() : end].strip()
        position = end + 1
    return found


def _closing(text: str, start: int) -> int | None:
    """The index of the brace that closes the one before `start`."""
    depth = 1
    for match in _BRACES.finditer(text, start):
        brace = match.group()
        depth += (brace == "{") - (brace == "}")
        if depth == 0:
            return match.start()
    return None
