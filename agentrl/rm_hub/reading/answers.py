r"""The final answer of a response: one list of candidates, one rule of choice, for every grader of answers.

1. Candidates are boxes, `<answer>` tags, `#### 42`, what is announced ("The answer is 42.") or called it ("42 is the
   answer"); where none stands the whole response, or leniently the end of its last line. Reasoning is no answer.
2. The last candidate counts that is not denied ("the answer is not 5"), asked, supposed, a part of a formula, or said
   by another person. Candidates that follow it with nothing said between are one answer with several values.
3. There is no answer if that one is hedged ("5, or maybe 6"), is taken back without another one, is a box that was cut
   off, or is the last of several guesses (what is announced changed `MOST_CLAIMS` times).
4. What is a value depends on what is asked for (`Value`): a number or formula, words, or a choice."""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from agentrl.rm_hub.reading.common import Box, answer_blocks, boxes, one_of
from agentrl.rm_hub.reading.latex import clean, squeeze
from agentrl.rm_hub.reading.phrases import any_of, words
from agentrl.rm_hub.reading.sentences import SAID, before_break, ends, following, seen, sentence, sentence_start
from agentrl.rm_hub.reading.words import known_words

Kind = Literal["box", "tag", "hashes", "announced", "called", "whole", "last line"]
Standing = Literal["claimed", "conditional", "aside", "denied", "open"]
Value = Callable[[str], "tuple[str, str] | None"]
"""The value that is asked for: a text to (the value that it begins with, what follows it in the sentence), or None."""

NOTHING = re.compile(r"(?!)")
MOST_CLAIMS = 3  # different values, one after the other, that are announced by a response that only guesses

_SEARCHED, _MOST, _LAST_LINE = 20_000, 300, 400
"""Characters in which phrases are searched, candidates of a kind that are judged, characters of a last line: the last ones."""
_HASHES = re.compile(r"(?m)^[ \t>*]*####[ \t]*(?!#)(.*)$")

_GAP = r"[*_`\s\"'“”)\]】]{0,6}"
_FILLER = rf"(?:,?\s*{any_of('filler')},?){{0,4}}"
_LINK = rf"(?:{any_of('is_')}|\b(?:is|are|was)n['’]t\b|=>|-{{1,2}}>|[:：=→—–】])"
_OF = r"(?:\s+(?:to|for|of|in|auf|à|a|zu|на)\s+[^.\n:=?]{1,80}?)?(?:\s*\([^()\n]{1,60}\))?"
_LINKED = rf"{_OF}{_GAP}{_FILLER}{_GAP}(?:{_LINK}{_GAP}{_FILLER}{_GAP}){{1,4}}"
_HEADING = r"(?m:^[# \t>*_]{0,8}(?:the\s+)?(?:final\s+)?answer[*_`\s:]{0,8}$)"
_CLAUSE = re.compile(r"(?i)[,;—]|\b(?:so|but|hence|thus|therefore|then|which means|and)\b|所以|因此|，")
_NO, _WOULD, _CONDITION, _OTHERS = words("no"), words("would"), words("condition"), words("others")
_BEGUN = re.compile(r"(?:\d|\^|[=($][-−]|\\(?:frac|sqrt|cancel)\s*\{|\\(?:cdot|times|not)\s*)$")
_GOES_ON = re.compile(r"\d|\^(?!\s*\{?\s*\\circ)|\s*\\(?:cdot|times)\b")
"""The text before and behind a box that is a part of a formula."""
_ASKED = re.compile(r"[?？吗][\s$)]*$")
_MAYBE, _BACK, _PAUSE, _SURE = words("maybe"), words("back"), words("pause"), words("sure")
_INSTEAD, _IT_IS = words("maybe", "pause"), re.compile(rf"(?i)(?:(?:it|this|that) )?{any_of('is_')} ")
_DIGIT, _DEPENDS = re.compile(r"\d"), re.compile(r"(?i)\s*(?:only\s+)?(?:if|when|unless|for|to|with)\b")
_ANOTHER_ANSWER = re.compile(
    r"(?i)\b(?:this|that|an|another|each|every|any|intermediate|partial|previous|first|second[ -]best|least likely|worst|wrong|incorrect|initial|its|year['’]s)[ \t]+$"
)
_PARTIAL = re.compile(r"(?i)\b(?:part|step|subproblem|sub-question|question \d)\b")
_DENIED = re.compile(rf"(?:{any_of('no')}|\\neq?|≠)(?:\s+(?:be|equal(?: to)?|the answer))?[\s:$*(]*$", re.IGNORECASE)
_FINALLY = re.compile(r"(?i)\b(?:final(?:ly)?|therefore|thus|hence|so)\b|最终|因此|所以")
_GUESS = re.compile(r"(?i)\b(?:guess|try|attempt|option|candidate|choice|method|reading|equivalently|either)\b")
_BUT = re.compile(r"(?i)\b(?:but(?: rather)?|rather|instead|sondern|mais|sino)\b|而是")
_JOINED = re.compile(
    rf"(?i){any_of('answer', 'is_', 'maybe')}|\b(?:and|und|et|y|the|a|try|guess|option|candidate|another|either|attempt)\b"
    r"|[\s,;&$.:|*\-!?<>/]|\\(?:text|quad|qquad|mathrm|textbf|or|and)(?![a-zA-Z])|[{}()\[\]\\]|[a-zA-Z](?:_\w)?\s*="
)


class AnswerPattern(NamedTuple):
    """The kind of answer that a response is asked for: what can be one, what announces one (a match ends where the value
    begins), and what calls one the answer (the group `value` is the value)."""

    value: Value
    announced: re.Pattern[str] = re.compile(rf"(?i){any_of('answer')}{_LINKED}|(?m:^A:)|{_HEADING}")
    called: re.Pattern[str] = re.compile(
        r"(?i)(?<!\S)(?P<value>[-+$\\(*]{0,5}\d\S{0,40}(?:\s[a-z%]{1,12})?)\s(?:is|are)\s(?:the|my|our)\s"
        r"(?:final |correct |right ){0,3}answers?\b(?! (?:to|for) (?!(?:the|this|our) (?:question|problem)))"
    )


CHOICE_ANNOUNCED = re.compile(
    rf"(?i){any_of('answer', 'option')}{_LINKED}|{any_of('choose')}{_GAP}(?:[:：]{_GAP})?|{_HEADING}"
)
CHOICE_CALLED = re.compile(
    rf"(?i:{any_of('option', 'answer')}\s{{0,2}})?[(\[*]{{0,4}}(?<![\w'’-])(?P<value>[A-J])[)\]*.:]{{0,4}}"
    rf"(?:\s\([^()\n]{{1,80}}\))?\s?(?i:{any_of('correct')})"
)


class Candidate(NamedTuple):
    """A place where a response may give its answer. `standing` is "conditional" if it depends on something; "aside" if it
    is asked, supposed, quoted, or of a part or a formula; "denied" if it is said not to be the answer; "open" if another
    value may be it too, or it is cut off."""

    start: int  # where the claim begins in the text that was searched
    end: int  # where its value ends
    text: str  # the value as written
    kind: Kind
    standing: Standing = "claimed"


class ResponseAnswer(NamedTuple):
    """The values as written, of which there is more than one where the response gives several; none if it gives none.
    `how` is the kind of the candidate, or why there is no answer."""

    values: tuple[str, ...]
    how: str


def is_lenient(metadata: Mapping[str, Any], grader: str) -> bool:
    """Return true if `metadata["reader"]` asks for the lenient reader; the default is "strict"."""
    return one_of(metadata, "reader", ("strict", "lenient"), grader) == "lenient"


def find_answer(response: str, asked: AnswerPattern, lenient: bool = False) -> ResponseAnswer:
    """The final answer of a response, which may have reasoning; `lenient` also reads the end of the last line."""
    return read(seen(response), asked, lenient)


def read(text: str, asked: AnswerPattern, lenient: bool = False, since: int = 0) -> ResponseAnswer:
    """The final answer that a text without reasoning gives from `since` on; `find_answer` without its first step."""
    every = (candidate for candidate in _candidates(text, asked) if candidate.end > since)
    if found := sorted(every, key=lambda candidate: candidate.end):
        return choose(text, found)
    bare = text.strip()
    whole = None if "\n" in bare or _ASKED.search(bare) else asked.value(bare)
    if whole is not None and not whole[1].strip(" .!*_`$"):
        return ResponseAnswer((whole[0],), "whole")
    if lenient and (line := _last_line(bare, asked.value)) is not None:
        return ResponseAnswer((line,), "last line")
    return ResponseAnswer((), "no final answer found")


def choose(text: str, found: list[Candidate]) -> ResponseAnswer:
    """The rule of choice; `found` is not empty and in order."""
    claims = [candidate for candidate in found if candidate.standing in ("claimed", "open")]
    claims = claims or [candidate for candidate in found if candidate.standing == "conditional"]
    if not claims:
        return ResponseAnswer((), "no final answer found: all that is said is denied, asked, supposed or quoted")
    if (last := claims[-1]).standing == "open":
        return ResponseAnswer((), "the answer is left open")
    said = squeeze(clean(last.text))
    if any(one.standing == "denied" and one.end > last.end and squeeze(clean(one.text)) == said for one in found):
        return ResponseAnswer((), "the answer is denied in the end")
    if _taken_back("it " + text[last.end :].lstrip(" $)]*"), boxed=last.kind == "box"):
        return ResponseAnswer((), "the answer is taken back")
    announced = [squeeze(clean(claim.text)) for claim in claims if claim.kind in ("announced", "tag")]
    if (changes := sum(first != second for first, second in pairwise(announced))) >= MOST_CLAIMS:
        return ResponseAnswer((), f"the announced answer changes {changes} times")
    values = [last.text]
    for earlier, later in zip(reversed(claims[:-1]), reversed(claims), strict=False):
        if later.start < earlier.end:
            continue  # one stands in the other: an announced box
        final = _FINALLY.search(text, earlier.end, later.start + 8)
        if len(values) > 50 or final is not None or len(gap := text[earlier.end : later.start]) > 120:
            break
        if not _GUESS.search(gap) and ("\n\n" in gap or len(_JOINED.sub("", gap)) > 4):  # something is said between
            break
        values.insert(0, earlier.text)
    return ResponseAnswer(tuple({squeeze(clean(one)): " ".join(one.split()) for one in values}.values()), last.kind)


def _candidates(text: str, asked: AnswerPattern) -> Iterator[Candidate]:
    value = asked.value
    marked = boxes(text)[-_MOST:]
    for box in marked:
        candidate = Candidate(box.start, box.end, box.text, "box")
        yield _judged(text, candidate, value) if box.complete else candidate._replace(standing="open")
    for start, inner in answer_blocks(text)[-_MOST:]:
        if inner and not _boxed(marked, start, start + len(inner) + 8):
            read = value(inner)
            said = read[0] if read is not None and not read[1].strip(" .") else inner
            yield _judged(text, Candidate(start, start + len(inner), said, "tag"), value)
    for line in list(_HASHES.finditer(text))[-_MOST:]:
        if (read := value(line.group(1).strip())) is not None and not read[1].strip(" .*_$"):
            yield _judged(text, Candidate(line.start(), line.end(), read[0], "hashes"), value)
    since = max(0, len(text) - _SEARCHED)
    for claim in list(asked.announced.finditer(text, since))[-_MOST:]:
        another = _ANOTHER_ANSWER.search(text, max(0, claim.start() - 24), claim.start())
        if another or "___" in text[claim.start() : claim.end() + 3]:
            continue
        said, end = sentence(text, claim.end())
        if _boxed(marked, claim.end(), end):
            continue  # what is announced is a box
        denied = _NO.search(claim.group()) is not None
        if (denial := _NO.match(said)) is not None and not known_words(before_break(said)):
            but = _BUT.search(said)
            denied, said = but is None, said[(denial if but is None else but).end() :].lstrip()
        sentence_of_it = SAID.match(said)
        if (read := value(said) or (sentence_of_it and value(said[sentence_of_it.end() :]))) is not None:
            candidate = Candidate(claim.start(), end - len(read[1]), read[0], "announced")
            yield candidate._replace(standing="denied") if denied else _judged(text, candidate, value)
    for claim in list(asked.called.finditer(text, since))[-_MOST:]:
        if (read := value(claim["value"])) is not None:
            yield _judged(text, Candidate(claim.start("value"), claim.end(), read[0], "called"), value)


def _boxed(marked: list[Box], start: int, end: int) -> bool:
    """Return true if one of the boxes, in order, stands between two positions."""
    following = bisect_left(marked, start, key=lambda box: box.end)
    return following < len(marked) and marked[following].start < end


def _judged(text: str, candidate: Candidate, value: Value) -> Candidate:
    """The candidate with the standing that its own sentence and the next one give it."""
    before = text[sentence_start(text, candidate.start) : candidate.start]
    clause = _CLAUSE.split(before)[-1]
    window = following(text, candidate.end)
    stop = next(ends(window), None)
    rest, end = (window[: stop.start()], candidate.end + stop.end()) if stop is not None else (window, len(text))
    if _DENIED.search(before):
        return candidate._replace(standing="denied")
    others = _OTHERS.search(clause, max(0, len(clause) - (25 if candidate.kind == "box" else 60)))
    asked = text[end - 1 : end] in ("?", "？") or _ASKED.search(candidate.text) or _ASKED.search(rest)
    part = candidate.kind == "box" and (_GOES_ON.match(window) or _BEGUN.search(before))
    if others or asked or part:
        return candidate._replace(standing="aside")
    said = squeeze(clean(candidate.text))
    if candidate.kind in ("announced", "called"):
        claim = text[candidate.start : candidate.end]
        condition = _CONDITION.search(before) or _CONDITION.search(rest)
        denials = map(value, filter(_NO.search, _CLAUSE.split(before_break(rest))))
        of_others = all(read and _NO.search(read[1]) and squeeze(clean(read[0])) != said for read in denials)
        if _NO.search(clause, max(0, len(clause) - 60)) or not of_others:
            return candidate._replace(standing="denied")
        behind = rest.strip(" ,*_$")
        conditional = _CONDITION.match(clause.strip()) or _CONDITION.match(behind)
        if conditional or _PARTIAL.search(claim) or _OTHERS.match(behind):
            return candidate._replace(standing="aside")
        if condition is not None:
            supposed = _WOULD.search(f"{clause} {claim[:80]}") is not None
            candidate = candidate._replace(standing="aside" if supposed else "conditional")
    instead = (
        value(_IT_IS.sub("", said_next[word.end() : word.end() + 80].lstrip(" ,:*_"), count=1))
        for said_next in (rest, text[end : end + 100].lstrip())
        for word in (_INSTEAD if candidate.kind == "box" else _MAYBE).finditer(said_next)
        if word.end() <= 40
    )
    if any(other is not None and squeeze(clean(other[0])) != said for other in instead):
        return candidate._replace(standing="open")
    return candidate


def _taken_back(rest: str, *, boxed: bool) -> bool:
    """Return true if the text after an answer takes it back. A pause does not take a box back, nor do words about another
    value or words that depend on something."""
    found = [*_BACK.finditer(rest)] if boxed else [*_BACK.finditer(rest), *_PAUSE.finditer(rest)]
    if boxed:
        about = ((back, rest[sentence_start(rest, back.start()) : back.start()]) for back in found)
        found = [back for back, of in about if not (_DIGIT.search(of) or _DEPENDS.match(rest, back.end()))]
    last = max((back.end() for back in found), default=None)
    return last is not None and _SURE.search(rest, last) is None


def _last_line(text: str, value: Value) -> str | None:
    """The value that the last line comes to: all of it, or what follows a link."""
    line = text[-_LAST_LINE:].rpartition("\n")[2].strip(" \t*_#>`")
    if len(line) == _LAST_LINE:
        return None
    for start in (0, *(link.end() for link in re.finditer(rf"(?i){_LINK}|,\s", line))):
        if (read := value(line[start:].strip(" *_"))) is not None and not read[1].strip(" .!*_$"):
            return read[0]
    return None
