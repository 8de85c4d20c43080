"""Reading one number out of a sentence that claims or concludes it.

1. `read_claim` reads the text that follows (or precedes) words such as "the answer is".
2. `read_conclusion` reads the last sentence that has a number, where nothing is claimed in so many words.
3. More than one number where one is asked for is `Unclear`: a hedge is not an answer.
"""

import re
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

from agentrl.rm_hub.reading.number_words import parse_number_words
from agentrl.rm_hub.reading.quantity import Quantity, Values, find_quantities, flatten, join_spaced_groups


class Claim(NamedTuple):
    """A number that was claimed, with its possible readings."""

    values: Values
    text: str


class Unclear(NamedTuple):
    """A claim that names no single number."""

    text: str
    why: str


_MAX_CLAIM = 400
_MAX_BACK = 120
_MAX_SENTENCE = 2000
_LEADING = re.compile(r"\A(?:[\s*_`:：\"'“”>=()\[\]{}#|]|\\[\[(]|\$\$|\\begin\{[a-z]+\*?\})*")
_END = re.compile(r"\n|(?<![A-Z])[.;](?=\s|$)|[!?。！？](?=\s|$|[^\d])|<|\\\]")
_SENTENCES = re.compile(r"\n+|(?<=[.!?。！？])(?<!i\.e\.)(?<!e\.g\.)\s+|(?<=[.!?][)])\s+|(?<=[。！？])")
_NOT = re.compile(
    r"(?i)^\s*(?:definitely |certainly )?(?:not|n't|neither)\b(?P<rest>.*?)(?:\bbut(?: rather)?\b(?P<but>.*))?$"
)
_OPERATOR = re.compile(
    r"(?i)\s*(?:[+×*÷=≈→]|[-–](?!\w*\s[A-Za-z])|/)\s*[$€£]?\(?\s?-?[\d(]|\s*[a-z]{0,20}\s*[+×÷=≈]\s*[$€£]?-?\d"
)
_ALTERNATIVE = re.compile(
    r"(?i)(?:\s[^\W\d]+){0,2}\s*(?:,?\s*(?:or|oder|ou|and|to|till)\s+(?:maybe |perhaps |possibly )?|[-–—](?=[$\d])|,\s|/)[$€£]?$"
)
_RESULT = re.compile(r"(?:[=≈→]|=>|->|\b(?:equals|gives|is equal to))\s*[^\d=≈]{0,12}$")
_ADJUNCT = frozenset(re.findall(r"\S+", """
    from by at per after for in over within with than using since because when if given on out every each during among
    between into before until instead compared versus vs minus plus times selling having pour après dans für nach para
    después tras durante en за после для через بعد خلال
"""))  # fmt: skip
_VERB = frozenset(re.findall(r"\S+", """
    is are was were be makes make made earns earn earned has have had costs cost gets get got needs need takes take took
    spends spent spend pays paid pay leaves left equals total altogether = ≈ will would can sold sells ate eats weighs
    saves saved receives received owes walks walked drives drove reads read es est ist sont son sind tout insgesamt
    gesamt всего итого
"""))  # fmt: skip
_DETERMINERS = frozenset(["a", "an", "the", "about", "around", "roughly", "approximately", "only", "just", "exactly"])
_WORDS = re.compile(r"[^\W\d_]+|[=≈]")
_LEFT_WITH = re.compile(
    r"(?i)\b(?:left|leav(?:es?|ing)|end(?:s|ed|ing)?(?: up)?|finish(?:es|ed)?|remain(?:s|ed|ing)?|come(?:s)? up|came up)\b[^.,;\d]{0,30}\bwith (?:about |only |exactly |just |a total of )?[$€£]?$"
)
_UNTOLD = re.compile(
    r"(?i)\b(?:can(?:not|['’]t| not)|unable to|impossible to|not possible to|not able to|no way to)\s(?:be )?(?:solved?|determined?|answer(?:ed)?|calculated?|tell|told|sa(?:y|id)|find|found|know|known)\b"
    r"|\b(?:not enough|insufficient|need more|needs? more|more) (?:information|context|data|details)\b"
    r"|\banswer (?:is|remains) (?:unknown|unclear|undetermined)\b"
)
_BETWEEN = re.compile(r"(?i)\b(?:between|from|either)\s(?:about |around )?[$€£]?$")
_CHOICE = re.compile(r"(?i)\s?(?:or|and|to|[-–—])\s?(?:maybe |perhaps |possibly )?[$€£]?")
_JOINED = re.compile(r"(?:[,;:=+×÷*/^(-]|\bi\.e\.,?)\s*[$€£]?\(?$")
_REASON = re.compile(
    r"(?i)\b(?:because|since|if|given that|assuming|as long as|of which)\b"
    r"|(?:,\s(?:while|whereas)\b|\b(?:above|below|beyond) (?:the|what)\b|其中|\bdavon\b|\bdont\b|из них)(?!.*(?:=|\b(?:so|thus|therefore)\b))"
    r"|,\s*(?:which (?:is|was) )?[$€£]?\d[\d.,]*(?: \w+)? (?:more|less|fewer) than\b"
)
_CONDITION = re.compile(r"(?i)\s*(?:since|if|because|given|when|as)\b[^,]{0,200},(?=\s)")
_DENIED_BEFORE = re.compile(r"(?i)(?:\bnot|n['’]t)(?: be| equal)?\s*[$€£]?$")
_DENIED_AFTER = re.compile(r"(?i)[^.,;\d]{0,20}\b(?:is|are|was)(?: not|n['’]t)\b[^.]{0,12}\b(?:answer|right|correct)")
_AHEAD = re.compile(r"(?i)(?:after|by|in|within|for|over|during|on|at|with|at the end of)\b[^,.:=]{1,60},\s(?=[^,]*\d)")
_PART_OF = re.compile(
    r"(?i)\s?(?:(?!total|sum|profit|cost)[a-z]+ ){0,2}(?:out of|of (?:the|these|those|all|his|her|their|its|our)) [$€£]?|\s?(?:of|des|de los|de las|von den|dei|delle|из) [$€£]?"
)
_PURPOSE = re.compile(r"才能|才可以|以便|为了|用来")
_ASIDE = re.compile(r"\W{0,4}\((?=(?:[^\s()]*\s){4})[^()]*\)\W{0,4}")
_APART = re.compile(
    r"(?i)[^\d.:(=]{0,40}(?:[:(–—]|\s-\s|\bwhich is|\bi\.e\.,?|\bthat is,?|\b(?:namely|consisting of|made up of|including)\b)\D{0,30}"
)
_DETAILS = re.compile(r"(?i)\s*of (?:these|those|them|which|whom)\b")
_COORDINATED = re.compile(r"(?: [^\W\d_]+){1,3},? and ")
_CONCLUDES = re.compile(r"(?i)(?:^|\W)(?:so|therefore|thus|hence|in total|altogether)\b")
_GOES_ON_AFTER = re.compile(r",(?!\d{3}(?!\d))[^,]*\d")
_GOES_ON = re.compile(r"(?i)(?:[,;—–]|\s-|\band\b)\s*(?:and |so |thus |then |therefore |which |meaning |hence ).*\d")
_BRACKETS = re.compile(r"\([^()]{0,300}\)|\[[^\[\]]{0,300}\]")
_POSTSCRIPT = re.compile(
    r"(?im)^[\s#*_>(\[-]{0,8}(?:check|verification|double[- ]check|sanity check|note|p\.?\s?s\.?|explanation|reasoning|working|here(?:'s|’s| is) (?:how|why|the (?:breakdown|reasoning|explanation|working|calculation)))\b[*_\s]{0,4}(?:[:.]|$)"
    r"|(?<=[.!?] )(?:let me know|feel free|i hope|hope this|is there anything)\b"
    r"|^[\s#*_>(\[-]{0,8}(?:checking|verifying|to verify|let(?:'s|’s| me| us) (?:verify|check|double)|note that|let me know|feel free|i hope|hope this"
    r"|if you (?:have|need|want|would))\b"
)
_BOLD = re.compile(r"\*\*([^*\n]{1,120})\*\*|__([^_\n]{1,120})__")
_ENUMERATOR = re.compile(r"(?im)^\s*(?:[-*•]\s+)?(?:\*\*)?(?:step\s+)?\d{1,2}(?:[.):](?!\d)\s|\.\s)")
_COMPOUND = {
    ("hour", "minute"): 60, ("hr", "min"): 60, ("minute", "second"): 60, ("min", "sec"): 60, ("foot", "inch"): 12,
    ("dollar", "cent"): 100, ("euro", "cent"): 100, ("year", "month"): 12, ("week", "day"): 7, ("day", "hour"): 24,
    ("pound", "ounce"): 16, ("meter", "centimeter"): 100, ("kilometer", "meter"): 1000,
}  # fmt: skip
_SINGULAR = {"inches": "inch", "feet": "foot"}


def read_claim(text: str, position: int, *, backward: bool, dotted_thousands: bool) -> Claim | Unclear | None:
    """The number that is claimed at `position`; None if there is none, or it is denied."""
    if backward:
        before = text[max(0, position - _MAX_BACK) : position]
        sentence = flatten(_SENTENCES.split(before)[-1])
        found = find_quantities(sentence, dotted_thousands=dotted_thousands)
        if found and not re.search(r"\b(?:not|nor)\b|n['’]t\b", sentence[found[-1].end :]):
            return Claim(found[-1].values, sentence.strip())
        return None
    raw = text[position : position + _MAX_CLAIM]
    raw = _LEADING.sub("", raw, count=1)
    if text[:position].endswith(("-", "−")):
        raw = "-" + raw
    sentence = join_spaced_groups(flatten(raw[: _end_of_claim(raw)])).strip()
    return _read_sentence(sentence, dotted_thousands)


def _end_of_claim(raw: str) -> int:
    depth = 0
    for index, character in enumerate(raw):
        depth += (character == "{") - (character == "}")
        if depth < 0:
            return index
    ends = (match.start() for match in _END.finditer(raw) if re.search(r"\w", raw[: match.start()]))
    return next(ends, len(raw))


def _read_sentence(sentence: str, dotted_thousands: bool) -> Claim | Unclear | None:
    if denied := _NOT.match(sentence):
        return _read_sentence(denied["but"].strip(), dotted_thousands) if denied["but"] else None
    found = find_quantities(sentence, dotted_thousands=dotted_thousands)
    if not found:
        return _number_in_words(sentence)
    if (ahead := _AHEAD.match(sentence)) and any(item.start >= ahead.end() for item in found):
        return _read_sentence(sentence[ahead.end() :], dotted_thousands)
    first = found[0]
    words = len(re.findall(r"[^\W\d_]+", sentence[: first.start]))
    if words > 3 or _OPERATOR.match(sentence, first.end):
        return _conclude(sentence, found)
    if len(found) > 1:
        second = found[1]
        between = sentence[first.end : second.start]
        if whole := _compound(sentence, first, second):
            return Claim(whole, sentence)
        if _ALTERNATIVE.fullmatch(between) and not set(first.values) & set(second.values):
            return Unclear(sentence, "several numbers")
    return Claim(first.values, sentence)


def _number_in_words(text: str) -> Claim | None:
    value = parse_number_words(text)
    return None if value is None else Claim((Fraction(value),), text.strip())


def _compound(sentence: str, first: Quantity, second: Quantity) -> Values | None:
    between = re.fullmatch(r"\s*([A-Za-z]+)\s*,?\s*(?:and\s+)?", sentence[first.end : second.start])
    unit = re.match(r"\s*([A-Za-z]+)", sentence[second.end :])
    if between is None or unit is None:
        return None
    big, small = (_SINGULAR.get(name, name.rstrip("s")) for name in (between[1].lower(), unit[1].lower()))
    factor = _COMPOUND.get((big, small))
    if factor is None:
        return None
    return (first.values[0] + second.values[0] / factor, first.values[0] * factor + second.values[0])


def read_conclusion(text: str, *, dotted_thousands: bool) -> Claim | Unclear | None:
    """The number of the last sentence that has one; None if the text has no number."""
    head = text
    if (postscript := _POSTSCRIPT.search(text)) and re.search(r"\d", _ENUMERATOR.sub("", text[: postscript.start()])):
        head = text[: postscript.start()]
    if said := _concluded_in_words(head):
        return said
    last = _SENTENCES.split(head[-_MAX_SENTENCE:].rstrip())[-1]
    if _UNTOLD.search(last):
        return Unclear(last.strip(), "it says that it cannot tell")
    asked: Claim | Unclear | None = None
    if len(text) < _MAX_BACK:
        head = join_spaced_groups(head)
    for raw in reversed(_SENTENCES.split(_ENUMERATOR.sub(" ", head))):
        sentence = flatten(_BOLD.sub(r"\1\2", raw[-_MAX_SENTENCE:])).strip()
        found = find_quantities(sentence, dotted_thousands=dotted_thousands)
        if not found:
            continue
        if _ASIDE.fullmatch(sentence):
            asked = asked or _conclude(sentence, found)
            continue
        if _DETAILS.match(sentence) and _adds_up(found, head[: head.rfind(raw)], dotted_thousands):
            continue
        if bold := _bold_numbers(raw, dotted_thousands):
            return bold
        ahead = _CONDITION.match(sentence)
        only_condition = ahead is not None and found[-1].start < ahead.end()
        concluded = _conclude(sentence, found)
        if concluded is not None and not only_condition and not (sentence.endswith("?") and "=" not in sentence):
            return concluded
        asked = asked or concluded
    if asked is not None:
        return asked
    return _number_in_words(text) if len(text) < _MAX_BACK else None


def _adds_up(found: list[Quantity], before: str, dotted_thousands: bool) -> bool:
    """Whether numbers only divide a total that was said just before: "8 in all. Of these, 3 are red and 5 are blue"."""
    said = find_quantities(flatten(before[-_MAX_BACK:]), dotted_thousands=dotted_thousands)
    return len(found) > 1 and _sum(found) in [value for quantity in said for value in quantity.values]


def _sum(terms: list[Quantity]) -> Fraction:
    return sum((term.values[0] for term in terms), Fraction(0))


def _concluded_in_words(text: str) -> Claim | None:
    """The number of a last sentence such as "So it took three days."; "one" is more often a pronoun."""
    sentence = _SENTENCES.split(text[-_MAX_SENTENCE:].rstrip())[-1]
    concludes = _CONCLUDES.search(sentence)
    if concludes is None or re.search(r"\d", sentence):
        return None
    value = parse_number_words(sentence[concludes.end() :])
    return None if value in (None, 1) else Claim((Fraction(value or 0),), sentence)


def _bold_numbers(raw: str, dotted_thousands: bool) -> Claim | None:
    """The only bold number of a sentence, if the bold text is that number with at most a few words."""
    claims: list[Claim] = []
    for match in _BOLD.finditer(raw):
        bold = flatten(match[1] or match[2])
        found = find_quantities(bold, dotted_thousands=dotted_thousands)
        after = raw[match.end() :]
        heads = (bold.rstrip().endswith(":") or after.lstrip().startswith(":")) and re.search(r"\d", after)
        if len(found) == 1 and not heads and len(re.findall(r"[^\W\d_]+", bold)) <= 4:
            claims.append(Claim(found[0].values, bold.strip()))
    return claims[0] if len(claims) == 1 else None


def _conclude(sentence: str, found: list[Quantity]) -> Claim | Unclear | None:
    """The number that a sentence comes to: what its last equation gives, or its last number not said in passing."""
    brackets = [match.span() for match in _BRACKETS.finditer(sentence)]
    outside = [item for item in found if not any(start < item.start < end for start, end in brackets)] or found
    outside = [item for item in outside if not _is_denied(sentence, item)]
    if not outside:
        return None
    outside = [item for item in outside if item is outside[0] or not _DETAILS.match(sentence, item.end)]
    if len(outside) > 1 and (whole := _compound(sentence, outside[-2], outside[-1])):
        return Claim(whole, sentence)
    if (ahead := _CONDITION.match(sentence)) and outside[-1].start > ahead.end():
        outside = [quantity for quantity in outside if quantity.start > ahead.end()]
    reason = _REASON.search(sentence, outside[0].end)
    if reason and not _GOES_ON_AFTER.search(sentence, reason.end()):
        outside = [quantity for quantity in outside if quantity.start < reason.start()]
    results = (b for a, b in reversed([*pairwise(outside)]) if _RESULT.search(sentence[a.end : b.start]))
    if (result := next(results, None)) and not _GOES_ON.search(sentence[result.end :]):
        return Claim(result.values, sentence)
    if (total := _sum_of_terms(sentence, outside)) is not None:
        return Claim(total.values, sentence)
    for index in range(len(outside) - 1, 0, -1):
        quantity, previous = outside[index], index - 1
        joined = previous and _COORDINATED.fullmatch(sentence[outside[previous].end : quantity.start])
        if joined and _in_passing(sentence, outside[previous - 1].end, outside[previous].start):
            continue
        if not _in_passing(sentence, outside[previous].end, quantity.start):
            return _one_of_two(sentence, outside[previous], quantity) or Claim(quantity.values, sentence)
    return Claim(outside[0].values, sentence)


def _one_of_two(sentence: str, first: Quantity, second: Quantity) -> Unclear | None:
    """Whether a conclusion leaves open which number it is: "27 or 17", "between 14 and 17"."""
    between = sentence[first.end : second.start]
    if not _CHOICE.fullmatch(between) or set(first.values) & set(second.values):
        return None
    is_open = _BETWEEN.search(sentence[: first.start]) or re.search(r"\bor\b", between, re.IGNORECASE)
    return Unclear(sentence, "several numbers") if is_open else None


def _sum_of_terms(sentence: str, found: list[Quantity]) -> Quantity | None:
    """A number that a sentence takes apart behind it: "12 books, i.e. 5 + 7", "12 books: 5 old ones and 7 new ones"."""
    for index in range(len(found) - 2):
        terms = found[index + 1 :]
        ahead = sentence[found[index].end : terms[0].start]
        if (
            _sum(terms) in found[index].values
            and _APART.fullmatch(ahead)
            and not _CONCLUDES.search(sentence, terms[0].end)
        ):
            return found[index]
    return None


def _is_denied(sentence: str, quantity: Quantity) -> bool:
    """Whether a sentence says that it is not this number."""
    before, after = sentence[max(0, quantity.start - 30) : quantity.start], sentence[quantity.end : quantity.end + 40]
    return bool(_DENIED_BEFORE.search(before) or _DENIED_AFTER.match(after))


def _in_passing(sentence: str, since: int, start: int) -> bool:
    """Whether a number is a side remark: "from 9 eggs", "at $2 each", "to make 16 muffins", "horse #12"."""
    between = sentence[since:start]
    if between.endswith("#"):
        return True
    if _RESULT.search(between) or _JOINED.search(between) or _LEFT_WITH.search(between):
        return False
    if _PURPOSE.search(between) or _PART_OF.fullmatch(between):
        return True
    words = _WORDS.findall(between.lower())[-5:]
    for index in range(len(words) - 1, -1, -1):
        if index and words[index - 1] == "to" and words[index] not in _DETERMINERS:
            return True
        if words[index] in _VERB:
            return False
        if words[index] in _ADJUNCT:
            return True
    return False
