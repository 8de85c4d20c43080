"""Whether a sentence that names a choice as the answer only considers it.

1. What others think, a first impression, a condition or a question claims nothing: "many students choose A", "B seems
   right at first", "C would be correct if the field were zero", "is it D?".
2. A concession is about its own clause: "although A is tempting, B is correct" claims B, and "B, though A is correct in
   a vacuum" does not claim A.
"""

import re

_HEDGED = re.compile(
    r"(?i)\b(?:tempting|tempted|might (?:think|say|assume|choose)|may (?:think|say)|one could|could be argued|some(?:one| people| students)?(?: might| may)? (?:say|think|choose|pick)"
    r"|students?|mistak\w*|wrong(?:ly)?|initially|at first|first (?:thought|glance|instinct|guess)|naive|least likely|doubt|no way|second[- ]best|if(?! I (?:had|have) to (?:guess|choose|pick|say))|unless|suppose|were to|common (?:error|answer)|trap|previously|earlier i)\b"
)
_SENTENCE_START = re.compile(
    r"(?i)[.!?。！？\n]\s|\n|^|[;:]\s|[,—–]? (?:but|however|yet|on reflection)\b,? ?|[,—–] (?:and )?(?:so|therefore|thus|hence)\b,? "
)
_CONCESSION = r"(?:although|though|even though|even if|while|whereas|despite)\b"
_CONCEDED_BEFORE = re.compile(rf"(?i)^\W*{_CONCESSION}[^,]*,")
_CONCEDED = re.compile(rf"(?i)(?:^|[,(—–])\W*(?:and )?{_CONCESSION}[^,]*$")
_CONDITIONAL = re.compile(
    r"(?i)\W{0,4}[A-Ja-j]\W{1,4}(?:\([^()\n]{1,80}\) )?(?:(?:would|could|might|may)\b[^.!\n]{0,120}?\b(?:if|unless|were|had|when|under|provided|only)\b"
    r"|(?:seems|appears|looks|sounds|was)\b[^.!\n]{0,80}?\b(?:at first|initially|but|however|until)\b)"
)
_WOULD_BE = re.compile(r"(?i)\b(?:would|could|might) (?:have been|be)\W{0,4}$")
_IF = re.compile(r"(?i)[^.!\n]{0,100}?\b(?:if|unless|were)\b")
_ASKED = re.compile(r"[^.!\n]{0,100}?([?.!\n]|$)")
_WINDOW = 200


def doubts(sentence: str) -> bool:
    """Whether a sentence has words of doubt, of others' opinion or of a condition."""
    return bool(_HEDGED.search(sentence))


def is_hedged(text: str, position: int) -> bool:
    """Whether the claim whose choice begins at `position` is only considered, conceded or asked."""
    window = text[max(0, position - _WINDOW) : position]
    starts = [match.end() for match in _SENTENCE_START.finditer(window) if match.end() < len(window) - 1]
    before = window[starts[-1] if starts else 0 :]
    after = text[position : position + _WINDOW]
    asked = _ASKED.match(after)
    if (asked and asked[1] == "?") or _CONDITIONAL.match(after) or (_WOULD_BE.search(before) and _IF.match(after)):
        return True
    return bool(_CONCEDED.search(before)) or doubts(_CONCEDED_BEFORE.sub("", before))
