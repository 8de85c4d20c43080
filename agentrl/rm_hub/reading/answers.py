r"""Finds the final answer of a response for every grader of answers: collects candidates, and chooses by one rule.

1. Candidates are boxes, `<answer>` tags, `#### 42`, and values before or after a phrase ("The answer is 42.", "42 is
   the answer"). Without candidates: the whole response, or leniently the end of its last line. Reasoning is skipped.
2. The answer is the last candidate that is not denied ("the answer is not 5"), asked, supposed, a part of a formula, or
   said by another person. Candidates directly before that one, without words between, are values of the same answer.
3. There is no answer if the chosen candidate is hedged ("5, or maybe 6"), withdrawn, denied later, or a truncated box.
   There is also no answer if the announced value changes `MAX_CLAIMS` times or more: the response guesses.
4. `Value` reads the kind of value that is asked for: a number or formula, words, or a choice."""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from agentrl.rm_hub.reading.common import Box, answer_blocks, boxes, one_of
from agentrl.rm_hub.reading.latex import clean, squeeze
from agentrl.rm_hub.reading.phrases import any_of, words
from agentrl.rm_hub.reading.sentences import SAID, STATED, before_break, ends, following, seen, sentence, sentence_start
from agentrl.rm_hub.reading.words import known_words

Kind = Literal["box", "tag", "hashes", "announced", "called", "whole", "last line"]
Standing = Literal["claimed", "conditional", "aside", "denied", "open"]
Value = Callable[[str], "tuple[str, str] | None"]
"""A function from a text to (the value at its beginning, the rest of the sentence), or to None without a value."""

NOTHING = re.compile(r"(?!)")
MAX_CLAIMS = 3  # a response that changes its announced value this often only guesses

_SEARCHED, _MAX, _LAST_LINE = 20_000, 300, 400
"""Maximum characters to search for phrases, candidates of a kind, characters of a last line; the last ones count."""
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
"""The texts before and after a box that is part of a formula."""
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
    """The kind of answer that a response should give. `value` reads it. A match of `announced` ends before the value.
    In a match of `called` ("42 is the answer") the value is the group `value`."""

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
    """A place where a response may give its answer. `standing` is "conditional" if the value has a condition, and
    "aside" if the value is asked, supposed, quoted, for a part, or in a formula. It is "denied" if the text says that
    the value is not the answer. It is "open" if another value may be the answer too, or the box is truncated."""

    start: int  # where the claim begins in the text that was searched
    end: int  # where its value ends
    text: str  # the value as written
    kind: Kind
    standing: Standing = "claimed"


class ResponseAnswer(NamedTuple):
    """The values of the answer as written: several if the response gives several, none if it gives no answer. `how` is
    the kind of the candidate, or the reason why there is no answer."""

    values: tuple[str, ...]
    how: str


def is_lenient(metadata: Mapping[str, Any], grader: str) -> bool:
    """Return true if `metadata["reader"]` asks for the lenient reader; the default is "strict"."""
    return one_of(metadata, "reader", ("strict", "lenient"), grader) == "lenient"


def find_answer(response: str, asked: AnswerPattern, lenient: bool = False) -> ResponseAnswer:
    """Return the final answer of a response, after its reasoning. `lenient` also reads the end of the last line."""
    return read(seen(response), asked, lenient)


def read(text: str, asked: AnswerPattern, lenient: bool = False, since: int = 0) -> ResponseAnswer:
    """Return the final answer of a text without reasoning. Candidates must end after the position `since`."""
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
    """Choose the answer. `found` is not empty, and in order of position."""
    claims = [candidate for candidate in found if candidate.standing in ("claimed", "open")]
    claims = claims or [candidate for candidate in found if candidate.standing == "conditional"]
    if not claims:
        return ResponseAnswer((), "no final answer found: every candidate is denied, asked, supposed or quoted")
    if (last := claims[-1]).standing == "open":
        return ResponseAnswer((), "the answer is left open")
    said = squeeze(clean(last.text))
    if any(one.standing == "denied" and one.end > last.end and squeeze(clean(one.text)) == said for one in found):
        return ResponseAnswer((), "the answer is denied in the end")
    if _taken_back("it " + text[last.end :].lstrip(" $)]*"), boxed=last.kind == "box"):
        return ResponseAnswer((), "the answer is taken back")
    announced = [squeeze(clean(claim.text)) for claim in claims if claim.kind in ("announced", "tag")]
    if (changes := sum(first != second for first, second in pairwise(announced))) >= MAX_CLAIMS:
        return ResponseAnswer((), f"the announced answer changes {changes} times")
    values = [last.text]
    for earlier, later in zip(reversed(claims[:-1]), reversed(claims), strict=False):
        if later.start < earlier.end:
            continue  # they overlap, such as an announced box
        final = _FINALLY.search(text, earlier.end, later.start + 8)
        if len(values) > 50 or final is not None or len(gap := text[earlier.end : later.start]) > 120:
            break
        if not _GUESS.search(gap) and ("\n\n" in gap or len(_JOINED.sub("", gap)) > 4):  # there are words between
            break
        values.insert(0, earlier.text)
    return ResponseAnswer(tuple({squeeze(clean(one)): " ".join(one.split()) for one in values}.values()), last.kind)


def _candidates(text: str, asked: AnswerPattern) -> Iterator[Candidate]:
    value = asked.value
    marked = boxes(text)[-_MAX:]
    for box in marked:
        candidate = Candidate(box.start, box.end, box.text, "box")
        yield _judged(text, candidate, value) if box.complete else candidate._replace(standing="open")
    for start, inner in answer_blocks(text)[-_MAX:]:
        if inner and not _boxed(marked, start, start + len(inner) + 8):
            read = value(inner)
            said = read[0] if read is not None and not read[1].strip(" .") else inner
            yield _judged(text, Candidate(start, start + len(inner), said, "tag"), value)
    for line in list(_HASHES.finditer(text))[-_MAX:]:
        if (read := value(line.group(1).strip())) is not None and not read[1].strip(" .*_$"):
            yield _judged(text, Candidate(line.start(), line.end(), read[0], "hashes"), value)
    since = max(0, len(text) - _SEARCHED)
    for claim in list(asked.announced.finditer(text, since))[-_MAX:]:
        another = _ANOTHER_ANSWER.search(text, max(0, claim.start() - 24), claim.start())
        if another or "___" in text[claim.start() : claim.end() + 3]:
            continue
        said, end = sentence(text, claim.end())
        if _boxed(marked, claim.end(), end):
            continue  # the announced value is a box, which is its own candidate
        denied = _NO.search(claim.group()) is not None
        if (denial := _NO.match(said)) is not None and not known_words(before_break(said)):
            but = _BUT.search(said)
            denied, said = but is None, said[(denial if but is None else but).end() :].lstrip()
        sentence_of_it = SAID.match(said) or STATED.match(said)
        if (read := value(said) or (sentence_of_it and value(said[sentence_of_it.end() :]))) is not None:
            candidate = Candidate(claim.start(), end - len(read[1]), read[0], "announced")
            yield candidate._replace(standing="denied") if denied else _judged(text, candidate, value)
    for claim in list(asked.called.finditer(text, since))[-_MAX:]:
        if (read := value(claim["value"])) is not None:
            yield _judged(text, Candidate(claim.start("value"), claim.end(), read[0], "called"), value)


def _boxed(marked: list[Box], start: int, end: int) -> bool:
    """Return true if a box overlaps the range between two positions. `marked` is in order of position."""
    following = bisect_left(marked, start, key=lambda box: box.end)
    return following < len(marked) and marked[following].start < end


def _judged(text: str, candidate: Candidate, value: Value) -> Candidate:
    """Return the candidate with the standing that follows from its sentence and the next sentence."""
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
    """Return true if the text after an answer withdraws it. No pause, condition or other value withdraws a box."""
    found = [*_BACK.finditer(rest)] if boxed else [*_BACK.finditer(rest), *_PAUSE.finditer(rest)]
    if boxed:
        about = ((back, rest[sentence_start(rest, back.start()) : back.start()]) for back in found)
        found = [back for back, of in about if not (_DIGIT.search(of) or _DEPENDS.match(rest, back.end()))]
    last = max((back.end() for back in found), default=None)
    return last is not None and _SURE.search(rest, last) is None


def _last_line(text: str, value: Value) -> str | None:
    """Return the value at the end of the last line: the whole line, or the text after a link (`=`, "is")."""
    line = text[-_LAST_LINE:].rpartition("\n")[2].strip(" \t*_#>`")
    if len(line) == _LAST_LINE:
        return None
    for start in (0, *(link.end() for link in re.finditer(rf"(?i){_LINK}|,\s", line))):
        if (read := value(line[start:].strip(" *_"))) is not None and not read[1].strip(" .!*_$"):
            return read[0]
    return None
