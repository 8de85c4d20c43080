r"""Finding the final answer in what a model wrote.

1. Reasoning does not count: only what follows the last `</think>` (or its like) does, unless nothing follows.
2. Marked answers come first: the last `\boxed{}`, `<answer>` or `####`, wherever they stand. Boxes that follow one another
   closely, or that are called guesses, are one answer with several values.
3. Then sentences that say so ("The answer is ...", in several languages), then the last line that has a value.
4. What the text itself takes back ("Wait, no, it is 14") does not count.

Everything is linear in the length of the response; only its last `TAIL` characters are read.
"""

import re
from typing import NamedTuple

from agentrl.rm_hub.reading import numbers, phrases, prose
from agentrl.rm_hub.reading.latex import LONGEST, clean
from agentrl.rm_hub.reading.words import wordy

TAIL = 100_000
"""Characters at the end of a response that are searched."""

_THOUGHT = re.compile(
    r"(?i)</(?:think|thinking|thought|thoughts|reasoning|reason|scratchpad)>|\[/THINK\]|◁/think▷|<\|end_of_thought\|>"
    r"|<\|channel\|>final<\|message\|>|###\s?Response"
)
_SPECIAL = re.compile(r"<\|[^<>|]{1,40}\|>|</s>|<eos>|<end_of_turn>|<pad>|\[EOS\]|<｜[^<>｜]{1,40}｜>")
_ESCAPED = {"\x08oxed": r"\boxed", "\x0crac": r"\frac", "\x08inom": r"\binom", "\text{": r"\text{", "\times": r"\times"}
_BRACES = re.compile(r"(?s)\\{1,2}(?:boxed|fbox)\s*(\{)?|\\.|[{}]")
_TAG = re.compile(r"(?i)<(/?)(answer|final_answer|final|solution)>")
_HASHES = re.compile(r"(?m)^[ \t>*]*####[ \t]*(?!#)(.*)$")
_MOST_TITLES = 50
_JOIN = re.compile(
    r"\b(?:and|or|und|oder|et|ou|y|o)\b|[\s,;&$.:|*\-]|\\(?:text|quad|qquad|mathrm|textbf|or|and)(?![a-zA-Z])|[{}()\[\]\\]|[a-zA-Z](?:_\w)?\s*="
)
_GUESS = re.compile(
    r"(?i)guess|possib|maybe|perhaps|option|candidate|alternativ|might|could|either|attempt|another|\btry\b"
)
_FINAL = re.compile(r"(?i)final|answer|therefore|thus|hence|\bso\b|wait|actually|correct|step|then|result")
_OR = re.compile(
    r"(?i)^\s*[$.\\)\]]{0,4}\s*(?:\\text\{)?\s*\(?(?:or|oder|ou|или|或|或者)\b\s*(?:maybe|possibly|perhaps|even)?\s*\}?\s*"
)


class Found(NamedTuple):
    """An answer and where it stood.

    Attributes:
        text: the answer as written; several values are joined by "or".
        how: "box", "tag", "hashes", "sentence" or "last line".
    """

    text: str
    how: str


class _Mark(NamedTuple):
    start: int
    end: int
    text: str
    how: str


def visible(response: str) -> tuple[str, bool]:
    """(what counts of a response, whether it is an answer and not reasoning that was never ended)."""
    text = response[-TAIL:]
    for broken, meant in _ESCAPED.items():
        text = text.replace(broken, meant)
    ends = [match.end() for match in _THOUGHT.finditer(text)]
    if ends:
        after = _SPECIAL.sub(" ", text[ends[-1] :])
        if after.strip():
            return after, True
        return _SPECIAL.sub(" ", text[: ends[-1]]), False
    opened = re.search(r"<(?:think|thinking|thought|reasoning)>", text, re.IGNORECASE)
    return _SPECIAL.sub(" ", text), opened is None


def find_answer(response: str, words: bool = False) -> Found | None:
    """The final answer of a response; None if it gives none.

    Args:
        response: what the model wrote.
        words: the expected answer is words ("no solution", a name), not mathematics.
    """
    text, finished = visible(response)
    text, marks = _marked(text)
    if marks:
        mark = marks[-1]
        if mark.how == "box":
            return _boxed(text, [other for other in marks if other.how == "box"], words)
        inner = prose.find(mark.text, words, lines=True)
        return Found(inner if inner is not None else mark.text[:LONGEST], mark.how)
    if not finished and _THOUGHT.search(text) is None:
        return None
    if (found := prose.find(text, words, lines=False)) is not None:
        return Found(found, "sentence")
    found = prose.find(text, words, lines=True) if finished else None
    return Found(found, "last line") if found is not None else None


def boxed_answer(response: str) -> Found | None:
    """What the last box says, with the boxes that belong to it; None if there is none."""
    text, marks = _marked(response[-TAIL:])
    found = [mark for mark in marks if mark.how == "box"]
    return _boxed(text, found, words=False) if found else None


def boxes(text: str) -> list[tuple[int, int, str]]:
    r"""(start, end, content) of every complete `\boxed{}` that is not inside another one."""
    return [(mark.start, mark.end, mark.text) for mark in _boxes(text)[0]]


def _marked(text: str) -> tuple[str, list[_Mark]]:
    """The text without an unfinished box at its end, and the marked answers in order."""
    found, cut = _boxes(text)
    if cut is not None:
        text = text[:cut]
    marks = [*found]
    opened: re.Match[str] | None = None
    for tag in _TAG.finditer(text):
        if not tag.group(1):
            opened = tag
        elif opened is not None:
            marks.append(_Mark(opened.end(), tag.start(), text[opened.end() : tag.start()].strip(), "tag"))
            opened = None
    if opened is not None:
        marks.append(_Mark(opened.end(), len(text), text[opened.end() :].strip(), "tag"))
    end = len(text.rstrip())
    for line in list(_HASHES.finditer(text))[-_MOST_TITLES:]:
        if line.end() >= end or not _is_title(line.group(1)):
            marks.append(_Mark(line.start(), line.end(), line.group(1).strip(), "hashes"))
    spans = [(mark.start, mark.end) for mark in found]
    marks = [
        mark
        for mark in marks
        if mark.text.strip()
        and (mark.how == "box" or not any(mark.start <= start and end <= mark.end for start, end in spans[-50:]))
    ]
    return text, sorted(marks, key=lambda mark: mark.end)


def _is_title(line: str) -> bool:
    """Whether `#### ...` with text after it is a title ("#### Step 2: Solve", "#### Final Answer") and no answer."""
    title = clean(line)
    return wordy(title) and numbers.read(title) is None


def _boxes(text: str) -> tuple[list[_Mark], int | None]:
    """The complete boxes, outermost only, and where an unfinished one at the end begins."""
    found: list[_Mark] = []
    stack: list[tuple[int, int] | None] = []
    for match in _BRACES.finditer(text):
        token = match.group()
        if token == "{":
            stack.append(None)
        elif token == "}":
            opened = stack.pop() if stack else None
            if opened is not None:
                while found and found[-1].start >= opened[0]:
                    found.pop()
                found.append(_Mark(opened[0], match.end(), text[opened[1] : match.start()].strip(), "box"))
        elif "box" in token:
            if match.group(1):
                stack.append((match.start(), match.end()))
            else:
                word = re.match(r"[^\s$]{1,60}", text[match.end() : match.end() + 60])
                if word:
                    found.append(_Mark(match.start(), match.end() + word.end(), word.group().rstrip(".,"), "box"))
    unclosed = [opened for opened in stack if opened is not None]
    if not unclosed:
        return found, None
    start, inside = unclosed[-1]
    # A brace that was forgotten, not an answer that was cut off: the line or the formula ends, and the text may go on.
    ended = re.match(r"([^\n$]{1,200}?)(?:\$|\\\]|\\\)|\n)", text[inside : inside + 220])
    if ended is not None and ended.group(1).strip() and "\\boxed" not in ended.group(1):
        content = ended.group(1).strip().rstrip(".")
        content += "}" * (content.count("{") - content.count("}"))
        found = [mark for mark in found if mark.start < start or mark.start > inside + ended.end()]
        found.append(_Mark(start, inside + ended.end(), content, "box"))
        return sorted(found, key=lambda mark: mark.end), None
    return [mark for mark in found if mark.end <= start], start


def _boxed(text: str, found: list[_Mark], words: bool) -> Found:
    """The last box, with those that belong to it."""
    last = found[-1]
    rest = text[last.end : last.end + 2000]
    if (corrected := prose.correction(rest, words)) is not None:
        return Found(corrected, "sentence")
    values = [last.text]
    for earlier, later in zip(reversed(found[:-1]), reversed(found), strict=False):
        if not _together(text[earlier.end : later.start]) or len(values) > 50:
            break
        values.insert(0, earlier.text)
    hedged = _OR.match(rest) or phrases.HEDGED.search(rest[:120])
    if hedged is not None and (other := prose.leading_value(rest[hedged.end() :])):
        values.append(other)
    distinct = list(dict.fromkeys(" ".join(value.split()) for value in values))
    return Found(" or ".join(distinct), "box")


def _together(gap: str) -> bool:
    """Whether two boxes with this text between them are one answer, or guesses, and not a step and its result."""
    if len(gap) > 120:
        return False
    if _GUESS.search(gap):
        return True
    return not _FINAL.search(gap) and len(_JOIN.sub("", gap)) <= 4 and gap.count("\n\n") == 0
