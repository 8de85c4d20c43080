"""Finds the part of a response that counts (visible text after the reasoning), its sentences, and a sentence's value. A
value is a formula or number at the beginning of a sentence, or words. It ends before a new clause or words ("12,
because ...", "$12$ apples in the basket"). If the rest has a number, there is no value: "5 apples and 3 pears"."""

import json
import re
from collections.abc import Iterator
from contextlib import suppress

from agentrl.rm_hub.reading import numbers
from agentrl.rm_hub.reading.common import after_reasoning
from agentrl.rm_hub.reading.latex import LONGEST, clean
from agentrl.rm_hub.reading.phrases import any_of, words
from agentrl.rm_hub.reading.words import strip_units, wordy

TAIL = 100_000  # characters at the end of a response that are read

_ESCAPED = {"\x0crac": r"\frac", "\x08inom": r"\binom", "\text{": r"\text{", "\times": r"\times"}
"""The texts that a JSON or Python string makes from LaTeX with single backslashes, and the LaTeX."""
_UNSEEN = re.compile(
    r"""(?sx)
    <!--.*?(?:-->|\Z) | \\begin\{comment\}.*?(?:\\end\{comment\}|\Z) | (?:(?m:^[ \t]*)|(?<=[.!?]\s))%[^\n]*  # comments
    | <(\w{1,20})\b[^<>]{0,200}\b(?:hidden|display:\s?none)[^<>]{0,200}>.*?(?:</\1>|\Z)                       # hidden
    | \\[hv]?phantom\s*\{[^{}]*\}
    | ~~.{1,400}?~~ | <(s|del|strike)>.{0,400}?</\2>                                                          # struck out
    | (?P<quoted>(?m:^[ \t]{0,3}>\s[^\n]*) | (?<![\w"“”])["“](?=\S)[^\s"“”]*\s[^"“”\n]*(?<=\S)["”](?!\w))
    | <<[^<>\n]{1,200}>>                                                               # GSM8K's calculator marks
    | (?P<code>```(?!json|text|latex|tex|markdown|md).*?(?:```|\Z))                    # code, but for a box in it
    | (?P<mark></?(?:b|strong|i|em|u|p)>
        | (?m:(?<!{symbol})(?![✕✖✗✘❌❎❓❔⛔🚫👎]){symbol}++(?=[*_ \t]{0,6}$)))  # the mark alone
    """.replace("{symbol}", r"[\u2500-\u27bf\u2b00-\u2bff\ufe0f\U0001f000-\U0001faff]")
)
_FULL_BOX = re.compile(r"boxed\s*(?:\{\s*[^{}\s]|[^{\s])|\\boxed\s*\{\s*\{")
_ANNOUNCES = re.compile(rf"(?i){any_of('answer', 'option')}[^\w\n]{{0,6}}(?:{any_of('is_')}|[:：])[^\w\n]{{0,8}}$")
_JSON = re.compile(r"(?:```json\s*|\A\s*)(\{[^`]*\})\s*(?:```|\Z)")
_NEXT_TURN = re.compile(r"\n\s{0,4}(?:[*_#]{0,4})(?:Question|Q|(Human|User))\s?\d{0,3}\s?:")
"""The beginning of a next turn that the model made up. A question without an answer before it is the model's own."""
_ANSWERED = re.compile(
    rf"(?im)\\boxed|####|<answer|^[ \t]*A\s?:|{any_of('answer', 'option')}[^.\n:=]{{0,80}}?(?:{any_of('is_')}|[:：=])"
    rf"|{any_of('choose', 'correct')}"
)
_REORDERED = re.compile("[\u202d\u202e]")
_EMPHASIS = re.compile(r"(?<![\w*])(\*\*|__)(?=\S)([^*_\n]{1,200}?)(?<=\S)\1(?!\w)")

_NEAR, _WORD_PART = 300, re.compile(r"\A\w{1,40}")
_SENTENCE_END = re.compile(
    r"(?<![.\s])(?:[.?]+|!(?!\s*[=+*/)\\$-]))(?=[)\]\"'”*_$]{0,4}(?:\s+[^\s\d]|\s*$))|[。！？]|\n|(?<=\d)\.(?=[A-Z])"
)
_SHORTENED = re.compile(r"(?:\b(?:[ap]\.?m|approx|ca|Rs|No|sq|ft|in|cu|vs|Mr|Mrs|Ms|Dr|i\.e|e\.g)|[ap]\.m)$")


def seen(response: str) -> str:
    """Return the visible text after the reasoning; "" if the text has characters that reorder letters."""
    text = _JSON.sub(_json_answer, after_reasoning(response[-TAIL:]))
    for broken, meant in _ESCAPED.items():
        text = text.replace(broken, meant)
    if _REORDERED.search(text):
        return ""
    answered = found.end() if (found := _ANSWERED.search(text)) else len(text)
    begun = found.start() if (found := re.search(r"[^\W\d_]", text)) else 0  # text without letters is an answer
    turns = _NEXT_TURN.finditer(text, len(text) - len(text.lstrip()) + 1)
    end = next((turn.start() for turn in turns if turn[1] or not answered > turn.start() >= begun), None)
    return _EMPHASIS.sub(r"\2", _UNSEEN.sub(_instead, text[:end]))


def _instead(match: re.Match[str]) -> str:
    announced = match["quoted"] and _ANNOUNCES.search(match.string, max(0, match.start() - 60), match.start())
    # Words in quotation marks are the answer if no other text has a box.
    several = (match["quoted"] or "").startswith(('"', "“")) and match.string.count("boxed") > match.group().count(
        "boxed"
    )
    if announced or (_FULL_BOX.search(match["code"] or match["quoted"] or "") and not several):
        return match.group()
    return "" if match["mark"] else " "


def _json_answer(match: re.Match[str]) -> str:
    """Return the answer of a JSON object as an `<answer>` block; the text itself if the object has no answer."""
    if _ANSWERED.search(match.string[: match.start()]) or _ANSWERED.search(match.string, match.end()):
        return match.group()  # the text has an answer of its own
    with suppress(ValueError, RecursionError):
        said = json.loads(match[1], strict=False, parse_int=str, parse_float=str)
        answer = said.get("final_answer", said.get("answer"))
        return f"<answer>{answer}</answer>" if isinstance(answer, str) else match.group()
    return match.group()


def sentence(text: str, start: int) -> tuple[str, int]:
    """Return the rest of the sentence from `start`, without leading marks, and its end before the full stop."""
    start += len(text[start : start + 100]) - len(text[start : start + 100].lstrip(" \t\r\n*_:#`\"'"))
    if display := re.compile(r"\\\[(.{1,400}?)\\\]|\$\$(.{1,400}?)\$\$", re.DOTALL).match(text, start):
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
    """Yield the ends of the sentences of a text; "a.m." and "vs." do not end a sentence."""
    for end in _SENTENCE_END.finditer(text):
        if end.group() != "." or _SHORTENED.search(text, 0, end.start()) is None or not text[end.end() :].strip():
            yield end


def sentence_start(text: str, position: int) -> int:
    """Return the start of the sentence around a position: at most 300 characters before, and not inside a word."""
    window = text[max(0, position - _NEAR) : position]
    if position > _NEAR:
        window = _WORD_PART.sub("", window)
    stops = [end.end() for end in ends(window + "x")]
    return position - len(window) + (stops[-1] if stops else 0)


def following(text: str, position: int) -> str:
    """Return the text after a position: at most 300 characters, and only whole words."""
    window = text[position : position + _NEAR]
    return window if position + _NEAR >= len(text) else _WORD_PART.sub("", window[::-1])[::-1]


_FRAME = re.compile(
    r"(?i)^(?:that\s+)?(?:the\s+(?:total|value|number|amount|answer)\s+(?:of\s+)?)?(?:is\s+)?(?:about|approximately|roughly|around|exactly|precisely|only|just|simply|a\s+total\s+of|equal\s+to"
    r"|option|choice|约|大约|(?:US|AU|CA|HK|C|A)(?=\s*\\?\$)|USD|EUR|GBP|INR|CNY|RMB|Rs\.?)\s*(?=[-+\d$\\(A-Z.€£¥])"
)
_BREAK = re.compile(
    r"(?i)[,;](?=\s+(?!and\b|or\b|und\b|oder\b|y\b|et\b|ou\b)[a-z]{2,}\b(?!\s*=))|\s(?:because|since|as|which|where|when|if|so|given|by|after|for|that|in order|rounded|weil|denn|car|porque|так как)\b"
    r"|\s\((?=[^()]*[a-z]{2}[^()]*\))|\s[-–—]{1,2}\s(?=[a-z]{2})|因为|，(?=[^\d])"
)
_SEGMENT = re.compile(
    r"(?s)\\\((.{1,300}?)\\\)|\$\$(.{1,400}?)\$\$|(?<!\\)\$(?!\s*\d[\d,.]*\s+[a-zA-Z]{2})([^$\n]{1,300}?)(?<!\\)\$(?!\d)"
)
_NUMBER = re.compile(
    r"[-+]?\s?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)(?:\s+\d+/\d+|\s*/\s*\d+(?![\d/]))?(?:\s*(?:%|percent\b|million\b|billion\b|thousand\b|hundred\b|dozen\b))?"
    r"(?!(?:st|nd|rd|th)\b)(?=[\s.,;:!)*]|$)"
)
_LINKS = re.compile(r"\bor\b|\band\b(?!\s+[A-Z][a-z])")  # "in April and May" joins no values
_COPULA = re.compile(r"(?<=[$)}\]\d])\s*(?:です|である|だ|となります|になります|입니다|이다)。?$")
_CHANGES = re.compile(
    r"(?i)[^\w\\]*(?:plus|minus|times|multiplied|divided|squared|cubed|to the power|out of|over(?=\s[\d$\\(])|factorial|halves|thirds|mod(?:ulo)?|choose)\b|^(?:到|至|倍|以|多|余|的(?:平方|立方|倍))"
)
"""Words that make a number part of a larger value: "8 times the number of pupils"."""
_COMPARES = re.compile(r"(?i)\W*(?:more|less|fewer)\b")
_DENSE = re.compile(r"(?<=[\d)}$%])\s*[\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af].*$")
"""Text in a script without spaces directly after a number."""
SAID = re.compile(
    r"(?i)^[a-z][a-z ,'’]{0,80}?\s(?:is|are|was|were|equals|has|have|had|needs?|costs?|makes?|earns?|gets?|pays?|spends?|sells?|eats?|takes?|:)\s(?!not\b|no\b)(?=[-+$\\(]*[\d.(\\])"
)
"""The words of a sentence before its value: "The total is 12 apples", "She has 12 apples"."""
_FUNCTIONS = "than|(?<!total )of|between|by|to|from|and|in|at|on|for|with|as|but|over|under|least|most|half|twice|times|plus|minus|nobody|none|hardly|wrongly|refused|let|again"
STATED = re.compile(
    rf"(?i)^(?!\D*{any_of('no', 'would', 'condition', 'maybe')})(?:[a-z ]{{1,30}},\s)?(?!\D*\b(?:{_FUNCTIONS})\b)[a-z][a-z '’]{{0,80}}?\s"
    rf"(?!the\s)[a-z]{{2,20}}\s(?:a total of\s)?(?=(?:\\?\$\d[\d,.]*|\d[\d,.]*\s(?!(?:{_FUNCTIONS})\b)[a-z]{{3}})\D*$)"
)
"""The words of a sentence before its only number, which has a unit: "She sold 12 apples", but not "See page 12"."""
_DOLLAR = re.compile(r"(?<!\\)\$")
_MAX_WORDS, _MAX_UNITS = 8, 4
_VERBS = words("is_", "no")


def formula(said: str) -> tuple[str, str] | None:
    """Return the number or formula at the beginning of a text, and the rest; None if the text begins with neither."""
    if len(said) > LONGEST:
        return None
    said = _COPULA.sub("", said.strip(" \t*_:\"'`").rstrip(" .*_"))
    said = said[1:] if said.startswith("}") else said  # the end of \text{the answer is } 42
    said = _FRAME.sub("", said)
    if (dense := _DENSE.search(said)) is not None and not re.match(r"\s*[万亿千]", dense.group()):
        if _CHANGES.match(dense.group()):
            return None
        read = formula(said[: dense.start()])
        return (read[0], read[1] + dense.group()) if read is not None else None
    number = _NUMBER.match(said.lstrip("$€£¥\\ "))
    rest = said.lstrip("$€£¥\\ ")[number.end() :] if number is not None else ""
    if _CHANGES.match(rest):
        return None
    for head in dict.fromkeys((before_break(said), said)):
        value, behind = head.strip(" \t*_,;"), said[len(head) :]
        if len(_DOLLAR.findall(behind)) % 2 == 0 and is_value(clean(value)):
            return value, behind
    if (segment := _SEGMENT.match(said)) and not re.search(r"[\d$\\=]", before_break(said[segment.end() :])):
        content = next(part for part in segment.groups() if part is not None)
        return (content, said[segment.end() :]) if is_value(clean(content)) else None
    if number is None or _COMPARES.match(rest) or re.search(r"[\d\\=+*/^]", before_break(rest)):
        return None
    return number.group().strip(), rest


def phrase(said: str) -> tuple[str, str] | None:
    """Return the few words at the beginning of a text ("no solution", a name) and the rest; None if they are many."""
    if len(said) > LONGEST:
        return None
    cut = _BREAK.search(said)
    head = said[: cut.start() if cut else None].strip(" \t*_,;:.\"'")
    return (head, said[cut.start() :] if cut else "") if head and len(head.split()) <= _MAX_WORDS else None


def is_value(text: str) -> bool:
    """Return true if a cleaned text is a number, perhaps with a unit, or mathematics, and not prose."""
    if not text:
        return False
    if (number := numbers.read(text)) is not None:
        return len(number.unit.name.split()) <= _MAX_UNITS and _VERBS.search(number.unit.name) is None
    bare = _LINKS.sub(" ", text)
    bare = strip_units(bare) if re.search(r"[\d\\]|^\W*[a-zA-Z]\b", bare) else bare  # "in total" has no unit
    return not wordy(bare) and re.search(r"[\w∅]", text) is not None


def before_break(rest: str) -> str:
    """Return the part of a sentence before its next clause."""
    cut = _BREAK.search(rest)
    return rest[: cut.start()] if cut else rest
