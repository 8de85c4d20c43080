"""Multiple choice, by letter or by the text of the choice (GPQA: Rein et al. 2023, arXiv:2311.12022).

1. The last claim counts: a box, an `<answer>` block, JSON with an "answer", "the answer is (B)" in several languages,
   "option B is correct", "B is correct", "I choose B", "no, so B". Without a claim: an answer that is nothing but a
   choice, whose first or last line is one, or whose last sentence names exactly one.
2. A letter counts only where an answer stands: "A photon" is no answer A. Bare small letters count only where a claim or
   the answer ends with them.
3. "A or B", "A and C" and two letters in a box are no answer; "not A but B" is B; "A is wrong" claims nothing.
4. The label is a letter, a choice's text, or a choice's index from 0 (an integer). `choices` (a list, or a mapping from
   letters) and `valid_letters` are read from the metadata; without them the letters are A to D, or up to J if the
   label is one of those.
"""

import re
from collections.abc import Mapping
from typing import Any

from agentrl.rm_hub.grade import Grade
from agentrl.rm_hub.reading.boxed import find_last_box
from agentrl.rm_hub.reading.choices import MANY, Choices, plain, read_choices, read_letter
from agentrl.rm_hub.reading.common import after_reasoning, answer_blocks, clip, compose

_ANSWER = (
    r"(?:(?:final|correct|best|right|my|the|most likely|most accurate) ){0,3}(?:answers?|ans|option|choice|letter|statement|response)\b"
    r"|respuesta(?: correcta| final)?|opción(?: correcta)?|réponse(?: correcte| finale)?|antwort|risposta(?: corretta)?"
    r"|resposta(?: correta)?|alternativa(?: correta)?|(?:правильный )?ответ|antwoord|cevap|odpowiedź|jawaban(?:nya)?|đáp án"
)
_IS = (
    r"(?:would (?:therefore |thus )?be|should be|will be|must be|has to be|is|are|was|es|est|ist|lautet|é|è|это|adalah|là"
    r"|=>|->|→|=|:|：|—|–|-(?=\s))"
)
_GAP = r"[\s*_`\"'“”)\]}]{0,6}"
_BETWEEN = r"(?: (?:to|for|here|among|of|in)\b[^.\n:?]{0,60}?)?"
_FORWARD = (
    re.compile(
        rf"(?<!\w)(?:{_ANSWER}){_BETWEEN}{_GAP}{_IS}(?:(?<=[=:：>→—–])|(?!\w))(?:\s(?:therefore|thus|clearly|indeed|likely|definitely|most likely))?",
        re.IGNORECASE,
    ),
    re.compile(r"^[#*_\s]{0,8}(?:the )?(?:final |correct )?answer[*_ \t]{0,6}$", re.IGNORECASE | re.MULTILINE),
    re.compile(
        r"(?:答案|正确选项|答え|正解|정답)[\s*]{0,3}(?:应该|应)?(?:是|为|選|选|は|은|:|：)|答[：:]|(?:选项|選項)(?:应该|应)?(?:是|为|為)|(?<![不没可])(?:故|应|应该|因此|所以|我)?(?<![不没可])(?:选择|选|選)(?:项|項)?[:：]?"
    ),
    re.compile(
        r"\b(?:I|we)(?:'ll| will| would|'d|’ll|’d)? (?:therefore |thus )?(?:choose|select|pick|go with|answer|opt for|chose|selected)\b"
        r"|\b(?:going|go) with\b|\bmy (?:final )?(?:choice|pick|selection) is\b|\b(?:richtige|korrekte) (?:antwort|option|lösung)\b(?=\s[(*]{0,3}[A-J]\b)",
        re.IGNORECASE,
    ),
    re.compile(
        r"\brichtig(?:e|er)? (?:ist|wäre)(?: (?:die )?(?:antwort|option|lösung))?\b|(?:الإجابة|الجواب|الخيار)(?: (?:الصحيحة|الصحيح|النهائية|النهائي))?\s?(?:هي|هو|:|：)"
        r"|\bonly (?:correct|right|valid|true) (?:one|answer|option|choice|statement) is\b"
        r"|\b(?:which|this|that|it) (?:is|corresponds to|matches|agrees with) (?:answer )?(?:option|choice|answer)\b(?=\s[(*\[]{0,3}[A-J]\b)",
        re.IGNORECASE,
    ),
    re.compile(r"[\"'](?:final_?)?(?:answer|choice|option|letter)[\"']\s{0,4}:", re.IGNORECASE),
    re.compile(
        r"\b(?:actually|no,? wait|wait,? no|wait|hmm|no|correction|rather|i mean|make that|scratch that|sorry|it (?:should|must) be|so it(?:'s|’s| is)"
        r"|(?:so|therefore|thus|hence),? (?:it(?:'s|’s| is| must be) )?(?:the answer (?:is|must be) )?)[,.:;!—–-]{0,2}\s{0,2}"
        r"(?:it(?:'s|’s| is| should be| must be) |that(?:'s|’s) )?(?=\(?(?:option |choice |answer )?[\[(*]{0,3}[A-J]\b[\])*.!]{0,4}(?:\s*$|\s*\n|[.!]))",
        re.IGNORECASE | re.MULTILINE,
    ),
)
_NAMED = r"(?P<mark>(?:option|choice|answer|statement|letter)\s{1,2}[(\[*]{0,4}|[(\[*]{1,4}|(?<![\w'’-])(?<!not )(?<!nor ))(?P<letter>[A-J])[)\]*.:]{0,4}"
_IS_CORRECT = re.compile(
    _NAMED
    + r"(?:\s{1,2}\([^()\n]{1,80}\)|,[^,.\n]{1,60},|(?<=[)\]:]) [^,.;:\n]{1,80}?)? (?:is|must be|would be|seems|appears to be|should be|has to be)(?: (?:therefore|thus|clearly|indeed|definitely|then))?"
    r"(?: the)?(?: (?:only|most|best|single|final|likely|correct|right|accurate|true|valid|appropriate|plausible)){1,4}\b(?! for\b)"
    r"|"
    + _NAMED.replace("mark", "mark2").replace("letter>", "letter2>")
    + r" (?:is|must be) (?:the|my|our) (?:final )?(?:answer|choice)\b",
)
_IS_CORRECT_ABROAD = re.compile(
    r"\b(?:antwort|option|opción|réponse|risposta|resposta|alternativa) [(*]{0,3}(?P<letter>[A-J])[)*]{0,3} (?:ist|es|est|è|é) "
    r"(?:la |die |a )?(?:richtig|korrekt|correct|corrett|corret)",
    re.IGNORECASE,
)
_HEDGED = re.compile(
    r"\b(?:tempting|tempted|might (?:think|say|assume|choose)|may (?:think|say)|one could|could be argued|some(?:one| people| students)?(?: might| may)? (?:say|think|choose|pick)"
    r"|students?|mistak\w*|wrong(?:ly)?|initially|at first|first (?:thought|glance|instinct|guess)|naive|if|unless|suppose|were to|common (?:error|answer)|trap|previously|earlier i)\b",
    re.IGNORECASE,
)
_SENTENCE_START = re.compile(r"[.!?。！？\n]\s|\n|^|[;:]\s|,? but ")
_LINES = re.compile(r"[^\n]+")
_OPTION_LINE = re.compile(r"^[\s>*_-]{0,6}[(\[]?([A-Ja-j])[)\].:][*_]{0,2}\s+\S")
_CONCLUDED = re.compile(
    r"\b(?i:option|choice|answer)\s{1,2}[(\[*]{0,4}([A-J])\b|[(\[*]{1,4}([A-J])[)\]*]{1,4}(?!\w)"
    r"|\b(?i:only) ([A-J])(?= \w)"
    r"|\b(?i:so|thus|therefore|hence|leaves?|leaving|is|it's|be|only|to)\b:?,? (?:it(?:'s| is) )?([B-HJ])(?=[.!*]{0,3}$)|∴ ?([A-J])(?=[.!*]{0,3}$)"
)
_BARE = re.compile(r"(?<![\w'’-])([B-HJ]|A(?!\s+[a-z]))(?![\w'’-])")
_DENIED = re.compile(
    r"\b(?:not|incorrect|wrong|false|eliminat\w+|rule[sd]? out|exclude[sd]?|cannot|unlikely|neither|there (?:is|was|are|will be) no|no es|nicht|falsch|pas|non è|não)\b"
    r"|n['’]t\b|не |不|아니|ない",
    re.IGNORECASE,
)
_REJECTED = re.compile(
    r"^\W{0,6}(?:(?:option|choice|answer|statement|letter)\b)?\W{0,4}[A-J]\W{0,4} (?:is|was|seems|looks|can|must|would|could|does|did|has)\b"
    r"[^.\n]{0,30}?(?:\bnot\b|n['’]t\b|\b(?:wrong|incorrect|false|eliminated|excluded|impossible|unlikely)\b|ruled out)",
    re.IGNORECASE,
)
_SENTENCES = re.compile(r"\n+|(?<=[.!?。！？])\s+")
_MAX_TEXT = 60_000
_MAX_CLAIMS = 64


def grade_gpqa(response: str, label: Any, metadata: Mapping[str, Any]) -> Grade:
    """1 if the choice that the answer claims last is the label's, else 0.

    Args:
        response: the answer, with or without its working.
        label: see the module's fourth point.
        metadata: `choices` and `valid_letters`, both optional.

    Raises:
        GraderFailure: of kind "grader_bad_label" or "grader_bad_metadata".
    """
    choices, wanted = read_choices(label, metadata)
    got = chosen(compose(after_reasoning(response)[-_MAX_TEXT:]), choices)
    if got is None:
        return Grade(0.0, False, None, "no choice found")
    if got == MANY:
        return Grade(0.0, False, None, "several choices are named")
    right = got == wanted
    return Grade(
        float(right), right, clip(got), "the right choice" if right else f"not the right choice {clip(wanted)}"
    )


def chosen(text: str, choices: Choices) -> str | None:
    """The letter that an answer chooses (or the normalised text if the choices are unknown); MANY, or None."""
    claims = _claims(text)
    for start, end in reversed(claims[-_MAX_CLAIMS:]):
        letter = text[start:end] if end - start == 1 else read_letter(text, start, choices)
        if letter is not None and (letter == MANY or choices.knows(letter)) and not _is_hedged(text, start):
            return letter
    return _unclaimed(text, choices)


def _claims(text: str) -> list[tuple[int, int]]:
    """(start, end): where a claimed letter is to be read; of length 1 where it is the letter itself."""
    claims = {(match.end(), match.end()) for pattern in _FORWARD for match in pattern.finditer(text)}
    claims.update((start, start) for start, _ in answer_blocks(text)[-1:])
    if box := find_last_box(text):
        claims.add((box[0], box[0]))
    for match in _IS_CORRECT.finditer(text):
        group = "letter" if match["letter"] else "letter2"
        bare = match["mark" if group == "letter" else "mark2"] == ""
        if not (bare and match[group] in "AI" and text[match.end(group)] not in ")]*.: "):
            claims.add(match.span(group))
    claims.update(match.span("letter") for match in _IS_CORRECT_ABROAD.finditer(text))
    return sorted(claims)


def _is_hedged(text: str, position: int) -> bool:
    """Whether the claim's sentence only considers it, or asks."""
    window = text[max(0, position - 200) : position]
    starts = [match.end() for match in _SENTENCE_START.finditer(window) if match.end() < len(window) - 1]
    before = window[starts[-1] if starts else 0 :]
    after = re.match(r"[^.!\n]{0,100}?([?.!\n]|$)", text[position : position + 120])
    asks = bool(after and after[1] == "?")
    return asks or bool(_HEDGED.search(before))


def _unclaimed(text: str, choices: Choices) -> str | None:
    whole = _alone(text, choices)
    if whole is not None:
        return whole
    lines = [line for line in _LINES.findall(text) if line.strip()]
    listed = {found[1].upper() for line in lines if (found := _OPTION_LINE.match(line))}
    for line in (
        (lines[-1:] + lines[:1])
        if len(listed) < 2
        else [line for line in lines[-1:] + lines[:1] if not _OPTION_LINE.match(line)]
    ):
        letter = _alone(line, choices)
        if letter is not None:
            return letter
    return _last_sentence(text, choices) if lines and not _OPTION_LINE.match(lines[-1]) else None


def _alone(text: str, choices: Choices) -> str | None:
    """The choice that a text is and nothing else; a list of letters may be the text of a choice."""
    said = choices.by_text(text) if len(plain(text)) > 1 else None
    if said is None and not _REJECTED.match(text):
        said = read_letter(text, 0, choices, alone=True)
    return said or choices.by_text(text)


def _last_sentence(text: str, choices: Choices) -> str | None:
    sentences = [sentence for sentence in _SENTENCES.split(text[-2000:]) if sentence.strip()]
    if (
        not sentences
        or _DENIED.search(sentences[-1])
        or _HEDGED.search(sentences[-1])
        or sentences[-1].rstrip().endswith("?")
    ):
        return None
    found = {str(letter) for match in _CONCLUDED.finditer(sentences[-1].strip()) for letter in match.groups() if letter}
    named = sorted(letter for letter in found if choices.knows(letter))
    others = {letter for letter in _BARE.findall(sentences[-1]) if choices.knows(letter)}
    if len(named) == 1 and not others - set(named):
        return named[0]
    hedged = re.search(r"\bor\b", sentences[-1]) and not any(" or " in text for text in choices.texts.values())
    return MANY if named or hedged else choices.within(sentences[-1])
