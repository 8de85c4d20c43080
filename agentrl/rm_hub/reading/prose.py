"""Answers in running text: sentences that announce one, values in sentences, and corrections of what was said before."""

import re

from agentrl.rm_hub.reading import numbers, phrases
from agentrl.rm_hub.reading.latex import clean
from agentrl.rm_hub.reading.shapes import is_symbol, shape
from agentrl.rm_hub.reading.words import choice, wordy

_SEARCHED = 20_000


def find(text: str, words: bool, lines: bool) -> str | None:
    """The answer that running text gives; None if it gives none.

    Args:
        text: no boxes or tags in it.
        words: words are looked for, not values.
        lines: without a sentence that announces an answer, take the last line with a value.
    """
    text = phrases.HTML.sub("", text)
    text = phrases.BOLD.sub(r"\2", phrases.BLANK.sub(" ", text[-_SEARCHED:]))
    if (announced := _announced(text)) is not None:
        found, end, others = announced
        value = found if words else _value(found)
        if value is not None:
            if others:
                return value + " or " + " or ".join(others)
            return correction(found + text[end:], words) or value
        later = _last_value(text[end - len(found) :]) if found and not words and len(text) - end < 4000 else None
        if later is not None:
            return later
    if not lines:
        return None
    if words:
        return _last_words(text)
    first = phrases.EXPLAINED.match(text)
    if first is not None and numbers.read(clean(first.group(1))) is not None:
        return first.group(1)
    return _last_value(text)


def correction(rest: str, words: bool = False) -> str | None:
    """The new answer if the text after an answer takes that back; None if it stands."""
    taken_back = phrases.CORRECTED.search(rest)
    if taken_back is None:
        return None
    rest = phrases.BOLD.sub(r"\2", rest[taken_back.start() :])
    if (announced := _announced(rest)) is not None:
        return announced[0] if words else _value(announced[0])
    if phrases.CONFIRMED.search(rest):
        return None
    if re.match(r"correction\W{1,4}\$?-?\d", rest, re.IGNORECASE):
        return leading_value(rest.partition(":")[2])
    for match in reversed(list(phrases.INSTEAD.finditer(rest))):
        if phrases.NEGATED.match(rest[match.end() :]):
            continue
        if value := leading_value(_sentence(rest[match.end() :])[0]):
            return value
    if (at_once := phrases.RETRACTED.match(rest)) is not None:
        return leading_value(rest[at_once.end() :])
    computed = phrases.MISTAKEN.search(rest[:200]) and re.search(r"=\s*\$?\d|correction: ", rest, re.IGNORECASE)
    return _last_value(rest) if computed else None


def leading_value(text: str) -> str | None:
    """The value that a text begins with; None if it begins with none."""
    text = clean(_sentence(text)[0])
    if (match := phrases.NUMBER.match(text)) is not None:
        return match.group().strip()
    return text if text and not wordy(text) else None


def _announced(text: str) -> tuple[str, int, list[str]] | None:
    """(what the last sentence that announces an answer says, where it ends, values of numbered answers before it)."""
    found = phrases.ANNOUNCED.finditer(text)
    matches = [m for m in found if not phrases.WORKED_ON.search(text, max(m.start() - 40, 0), m.start())]
    headings = list(phrases.HEADING.finditer(text))
    if headings and (not matches or headings[-1].end() > matches[-1].end()):
        matches.append(headings[-1])
    numbered = [match for match in matches if match.re is phrases.ANNOUNCED and match.group("number")]
    for match in reversed(matches):
        said, length = _sentence(text[match.end() :])
        end = match.end() + length
        cue = phrases.CORRECTED.search(text, match.end(), end)
        if cue is not None and re.search(r"\w", text[match.end() : cue.start()]):
            said, end = text[match.end() : cue.start()], cue.start()
        if phrases.NEGATED.match(said):
            but = phrases.BUT.search(said)
            if but is None:
                continue
            said = said[but.end() :]
        said = phrases.COPULA.sub("", said.strip(" \t*_:\"'"))
        if said.startswith("}"):  # \text{the answer is } 42
            said = said[1:].strip(" $")
        if said.count("}") > said.count("{"):
            said = said.rstrip(' "}')
        hedge = phrases.HEDGED.search(said) or phrases.HEDGED.match(text[end : end + 80])
        said = phrases.OR_SO.sub("", phrases.ASIDE.sub("", phrases.BREAK.sub("", said).strip()))
        if hedge is not None and (other := leading_value(hedge.string[hedge.end() :])):
            said = f"{phrases.BREAK.sub('', said)} or {other}"
        if not said.strip(" .,:;*_$"):
            continue
        if len(numbered) > 1 and match is numbered[-1]:
            others = [phrases.BREAK.sub("", _sentence(text[other.end() :])[0].strip(" *_:")) for other in numbered[:-1]]
            return said, end, others
        return said, end, []
    return None


def _sentence(text: str) -> tuple[str, int]:
    """The first sentence of a text, without a blank line before it, and its length with what was skipped."""
    skipped = len(text) - len(text.lstrip(" \t\r\n*_:>#`"))
    text = text[skipped:]
    display = re.match(r"\\\[(.{1,400}?)\\\]|\$\$(.{1,400}?)\$\$", text, re.DOTALL)
    if display is not None:
        return (display.group(1) or display.group(2)).strip(), skipped + display.end()
    limit = text[:600]
    if r"\begin{" in limit and (last := limit.rfind(r"\end{")) >= 0:
        # The rows of a matrix may be lines.
        tail = re.match(r"\S*(?:\s?\$|\s?\\[)\]])?", limit[last:])
        length = last + (tail.end() if tail else 0)
        return limit[:length], skipped + length
    end = phrases.END.search(limit)
    while end is not None and _abbreviated(limit, end):
        end = phrases.END.search(limit, end.end())
    if end is None:
        return limit, skipped + len(limit)
    return limit[: end.start()], skipped + end.end()


def _abbreviated(text: str, end: re.Match[str]) -> bool:
    before = text[max(0, end.start() - 6) : end.start()]
    shortened = re.search(r"(?:\b(?:[ap]\.?m|approx|ca|Rs|No|sq|ft|in|cu|vs|Mr|Mrs|Ms|Dr)|[ap]\.m)$", before)
    return end.group() == "." and shortened is not None and bool(text[end.end() :].strip())


def _value(said: str) -> str | None:
    """The value in what a sentence says, as mathematics; None if there is none."""
    said = phrases.FRAME.sub("", said.strip())
    cleaned = clean(said)
    if not cleaned:
        return None
    if (ends := re.match(r"between (.{1,40}) and (.{1,40})$", cleaned)) is not None:
        return f"{ends.group(1)} or {ends.group(2)}"
    if numbers.read(cleaned) is not None or not wordy(cleaned) or choice(cleaned):
        return said
    parts = shape(cleaned)
    items = () if parts.kind == "matrix" else parts.items
    if (items and not any(_prosy(item.text) for item in items)) or (parts.name and not _prosy(parts.text)):
        return said
    if (point := phrases.POINT.match(cleaned)) is not None and shape(point.group(1)).kind == "brackets":
        return point.group(1)
    if not re.search(r"\d", cleaned) and len(cleaned.split()) <= 5:
        return said
    return _in_sentence(said)


def _prosy(text: str) -> bool:
    return wordy(text) and numbers.read(text) is None


def _in_sentence(sentence: str) -> str | None:
    """The value that a whole sentence comes to: after its last equals sign or verb, else its only or last number."""
    segments = [match for match in phrases.SEGMENT.finditer(sentence) if _mathematics(match)]
    if len(segments) > 1 and (joined := _joined(sentence, segments[-2:])) is not None:
        return joined
    if segments:
        later = clean(sentence[segments[-1].end() :])
        told = [match for match in phrases.NUMBER.finditer(later) if phrases.VERB.search(later[: match.start()][-60:])]
        return told[-1].group().strip() if told else _content(segments[-1])
    text = _breakdown(clean(sentence))
    if (several := phrases.SEVERAL.search(text)) is not None:
        return several.group()
    if (listed := phrases.PLURAL.search(text)) is not None:
        return listed.group(1)
    found = list(phrases.NUMBER.finditer(text))
    if not found:
        return text if numbers.read(text) is not None else None
    main = [match for match in found if not phrases.BESIDE.search(text[max(0, match.start() - 40) : match.start()])]
    found = main or found
    after = [match for match in found if phrases.VERB.search(text[max(0, match.start() - 60) : match.start()])]
    best = after[-1] if after else found[-1]
    for span in phrases.FORMULA.finditer(text):
        if span.start() <= best.start() < span.end() and re.search(r"\\[a-zA-Z]|\^", span.group()):
            return span.group().rpartition("=")[2].strip(" ,(")
    index = found.index(best)
    if index + 1 < len(found):
        following = found[index + 1]
        if phrases.OTHER.fullmatch(text[best.end() : following.start()].strip()):
            return f"{best.group().strip()} or {following.group().strip()}"
    return best.group().strip()


def _breakdown(text: str) -> str:
    """A sentence without the parts that its result is made of ("3 bolts: 2 blue and 1 white")."""
    head, colon, tail = text.partition(": ")
    if not colon or "=" in tail or re.search(r"total|so |answer|result", tail, re.IGNORECASE):
        return text
    told = [match for match in phrases.NUMBER.finditer(head) if phrases.VERB.search(head[: match.start()][-60:])]
    return head if told else text


def _joined(sentence: str, pair: list[re.Match[str]]) -> str | None:
    """Two values that stand side by side ("$2$ and $3$"); None if they are about different things."""
    first, second = (shape(clean(_content(segment))) for segment in pair)
    between = sentence[pair[0].end() : pair[1].start()]
    if first.name != second.name or not re.fullmatch(r"\s*,?\s*(?:and|or)\s*", between):
        return None
    return f"{_content(pair[0])} or {_content(pair[1])}"


def _content(segment: re.Match[str]) -> str:
    return str(next(part for part in segment.groups() if part is not None))


def _mathematics(segment: re.Match[str]) -> bool:
    """Whether what stands between delimiters could be an answer: not words, a lone variable, or text between two prices."""
    text = clean(_content(segment))
    if not text or wordy(text) or is_symbol(text):
        return False
    return not re.search(r"^[\^_]|[-+*/=<]$|\\(?:times|cdot)$", text)


def _last_value(text: str) -> str | None:
    """The value of the last line that has one."""
    lines = [line for line in text.splitlines() if line.strip(" \t*_#>-|`")]
    for line in reversed(lines[-6:]):
        stripped = phrases.STEP.sub("", phrases.QUESTION.sub("", line.strip(" \t*_#>`")).strip(" \t*_"))
        if not stripped or re.match(r"^(?:let me know|hope|feel free|note|check)", stripped, re.IGNORECASE):
            continue
        cleaned = clean(stripped)
        if not re.search(r"[\d\\]", cleaned) and not (len(lines) == 1 and len(cleaned.split()) <= 3):
            if numbers.read(cleaned) is not None:
                return stripped
            continue
        if (value := _line(stripped)) is not None:
            return value
    return None


def _line(line: str) -> str | None:
    """The value of one line: the whole of it, or that of its last sentence that has one."""
    line = phrases.CONCLUDED.sub("", line) if re.search(r"[\d\\]", phrases.CONCLUDED.sub("", line)) else line
    cleaned = clean(line)
    whole = len(cleaned) <= 200 and (numbers.read(cleaned) is not None or not wordy(phrases.LINKS.sub(" ", cleaned)))
    if whole and not phrases.SAID.match(cleaned):
        return line
    sentences: list[str] = []
    rest = line
    while rest.strip() and len(sentences) < 200:
        said, length = _sentence(rest)
        sentences.append(said)
        rest = rest[max(length, 1) :]
    for said in reversed(sentences):
        if re.search(r"[\d\\]", said) and not (phrases.DENIED.search(said) and len(phrases.NUMBER.findall(said)) < 2):
            head = phrases.CLAUSE.sub("", said)
            value = _in_sentence(head if re.search(r"\d", head) else said)
            if value is not None:
                return value
    return None


def _last_words(text: str) -> str | None:
    """The words that the last line comes to."""
    lines = [line.strip(" \t*_#>`.") for line in text.splitlines() if line.strip(" \t*_#>`.")]
    if not lines:
        return None
    last = re.split(r"(?<=[.!?])\s+(?=[A-Z])", lines[-1])[-1].strip(" .")
    match = re.search(r"\b(?:is|are|was|were|be|has|:)\s+(?!.*\b(?:is|are|was|were|be)\b)(.{1,80})$", last)
    if match is not None and len(match.group(1).split()) <= 4:
        return match.group(1).strip()
    if len(last.split()) <= 4:
        return last
    return match.group(1).strip() if match else last[:200]
