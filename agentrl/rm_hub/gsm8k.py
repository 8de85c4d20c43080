"""Grade-school answers: one number, as GSM8K asks for (Cobbe et al. 2021, arXiv:2110.14168).

1. The last claim counts: `#### 18`, a box, an `<answer>` block, "the answer is 18" (in several languages), "18 is the
   answer", or a correction of one ("no, it should be 18"). Without a claim it is the last number of the conclusion;
   numbers in brackets, after "from", "at" and the like, and in what follows a "Check:" are not the conclusion.
2. Numbers are exact: 18, 18.00, $18, 18 dollars, "eighteen" are equal, 17.99 is not. A label with at least two decimals
   accepts a longer number that rounds to it.
3. A claim of several numbers ("18 or 20", "17-19") is no answer. Parts of one quantity are added (3 hours 20 minutes).
4. The label is a number, GSM8K's solution text with `#### 18`, or a list of such.
"""

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from agentrl.rm_hub.grade import Grade
from agentrl.rm_hub.reading.boxed import find_last_box
from agentrl.rm_hub.reading.claims import Claim, Unclear, read_claim, read_conclusion
from agentrl.rm_hub.reading.common import after_reasoning, answer_blocks, bad_label, clip, golds
from agentrl.rm_hub.reading.quantity import Values, find_quantities, flatten

_ANSWER = (
    r"answers?|ans\b|respuesta(?:\s+(?:final|correcta))?|réponse(?:\s+finale)?|antwort|lösung|risposta(?:\s+finale)?"
    r"|resposta(?:\s+final)?|ответ|antwoord|svar(?:et)?|cevap|odpowiedź|jawaban(?:nya)?|đáp án|đáp số|उत्तर|الجواب"
    r"|الإجابة"
)
_TO = r"(?:\s+to\s+(?:the|this|your)\s+(?:question|problem))?"
_IS = (
    r"(?:would be|should be|will be|must be|comes out to|comes to|is|are|equals|es|est|ist|lautet|é|è|is:|är|er|adalah"
    r"|là|है|هو|=>|->|→|=|:|：|—|–)"
)
_MARK = r"[\s*_`\"'“”)\]}]{0,8}"
_CLAIMS = (
    re.compile(r"#{4}(?!#)\s*(?=[-−+$€£¥₹*\\({]{0,6}\s?[\d.])"),
    re.compile(
        rf"(?i)(?<![\w/])(?:{_ANSWER}){_TO}{_MARK}(?<![,;]){_IS}(?:(?<=[=:：>→—–])|(?!\w))(?:{_MARK}(?:=|:|：|is\b))?"
    ),
    re.compile(r"(?im)^[#*_\s]{0,8}(?:the )?(?:final )?answer[*_ \t]{0,6}$"),
    re.compile(r"(?:答案|答え|正解|정답|답)[\s*]{0,3}(?:是|为|為|は|은|:|：|=)?|答[：:]"),
    re.compile(
        r"(?i)\b(?:correction\b\W{0,4}|(?:it|that|this|(?:the )?(?:total|result|answer)) should (?:actually |really )?(?:be|have been)\b(?=[\s*:]{0,4}[$€£]?-?\d)"
        r"|(?:wait|no|sorry|oops|actually|rather)[,.:!—–-]{1,2}\s?(?:no,? )?(?:actually,? )?(?:it(?:'s|’s| is)|that(?:'s|’s| is)"
        r"|make (?:it|that)|it should be)(?! (?:right|correct|true|wrong|not)\b)|make that\b|(?:\.\.\.|[…?—–])\s?no\b[\s,:.—–-]{1,3}(?=[$€£]?\d))"
    ),
)
_BACKWARD = re.compile(r"(?i)\bis (?:the|my|our) (?:final |correct |right )?answer\b(?!\s*to the (?:first|previous))")
_EUROPE = re.compile(r"(?i)\b(?:respuesta|réponse|antwort|lösung|risposta|resposta|antwoord|cevap|jawaban)|đáp|ответ")
_NEXT_QUESTION = re.compile(r"(?i)\n\s{0,4}(?:Question|Q|Problem|Human|User)\s?\d{0,3}\s?:")
_RETRACTED = re.compile(
    r"(?i)\b(?:wait|scratch that|i made an? (?:mistake|error)|that(?:'s|’s| is) (?:wrong|not (?:right|correct)"
    r"|incorrect)|let me (?:re-?do|re-?calculate|re-?compute|re-?consider|correct)|oops|sorry)\b"
)
_CONFIRMED = re.compile(
    r"(?i)\b(?<!the )(?:correct|right)\b|\b(?:yes|confirmed|matches|checks out|holds|same|consistent|verified)\b|[✓✔]"
)
_DENIED = re.compile(r"(?i)\b(?:not|isn't|incorrect|wrong)\b|n['’]t\b")
_ASKED = re.compile(r"[^.!?\n\d]{0,60}[\d.,]{1,40}[^.!?\n]{0,60}\?")
_MAX_TEXT = 100_000
"""Longer answers are read from their end: what a model concludes stands there."""
_MAX_CLAIMS = 64


def grade_gsm8k(response: str, label: Any, metadata: Mapping[str, Any]) -> Grade:
    """1 if the number that the answer claims last equals the label's, else 0.

    Args:
        response: the answer, with or without its working.
        label: see the module's fourth point.
        metadata: not read.

    Raises:
        GraderFailure: of kind "grader_bad_label".
    """
    wanted = [(_label_values(gold, label), gold) for gold in golds(label, "gsm8k")]
    claim = final_number(after_reasoning(response))
    if claim is None:
        return Grade(0.0, False, None, "no number found")
    if isinstance(claim, Unclear):
        return Grade(0.0, False, clip(claim.text), f"the answer is unclear: {claim.why}")
    right = any(_equal(got, want, gold) for values, gold in wanted for got in claim.values for want in values)
    return Grade(float(right), right, clip(claim.text), "equal" if right else "another number than the label's")


def final_number(answer: str) -> Claim | Unclear | None:
    """The number that an answer (without its reasoning) gives; None if it has none."""
    text = answer[-_MAX_TEXT:]
    claims = _claims(text)
    if claims and (following := _NEXT_QUESTION.search(text, claims[0])):
        text = text[: following.start()]
        claims = _claims(text)
    european = bool(_EUROPE.search(text))
    for position in reversed(claims[-_MAX_CLAIMS:]):
        if position > 0 and _ASKED.match(text, position):
            continue
        if found := read_claim(text, abs(position), backward=position < 0, dotted_thousands=european):
            return _retraction(text, abs(position), european) or found
    return read_conclusion(text, dotted_thousands=european)


def _claims(text: str) -> list[int]:
    """Where a claimed number begins; negative where it ends there instead."""
    positions = {match.end() for pattern in _CLAIMS for match in pattern.finditer(text)}
    positions.update(start for start, _ in answer_blocks(text)[-1:])
    if box := find_last_box(text):
        positions.add(box[0])
    positions.update(-match.start() for match in _BACKWARD.finditer(text))
    return sorted(positions, key=abs)


def _retraction(text: str, position: int, european: bool) -> Claim | Unclear | None:
    """What an answer says after it took its last claim back; None if it did not."""
    retracted = _RETRACTED.search(text, position)
    if retracted is None:
        return None
    tail = text[retracted.end() :]
    last = tail.rstrip().rpartition("\n")[2]
    if _CONFIRMED.search(last) and not _DENIED.search(last):
        return None
    return read_conclusion(tail, dotted_thousands=european)


def _label_values(gold: str, label: Any) -> Values:
    number = gold.rpartition("####")[2]
    quantities = find_quantities(flatten(number))
    if len(quantities) == 1:
        return quantities[0].values
    claim = final_number(gold) if _claims(gold) else None
    if isinstance(claim, Claim):
        return claim.values
    raise bad_label("gsm8k", "one number, or a solution that ends with '#### number'", label)


def _equal(got: Fraction, want: Fraction, gold: str) -> bool:
    if got == want:
        return True
    decimals = gold.strip().rpartition(".")[2].rstrip("% ") if "." in gold else ""
    if not (2 <= len(decimals) <= 12 and decimals.isdigit()):
        return False
    scale = Fraction(10) ** len(decimals)
    return abs(got - want) * 2 * scale <= 1 and (got * scale).denominator > 1
