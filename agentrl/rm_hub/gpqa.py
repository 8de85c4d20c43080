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
from agentrl.rm_hub.reading.hedges import doubts, is_hedged

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
        rf"(?i)(?<!\w)(?:{_ANSWER}){_BETWEEN}{_GAP}{_IS}(?:(?<=[=:：>→—–])|(?!\w))(?:\s(?:therefore|thus|clearly|indeed|likely|definitely|most likely))?"
    ),
    re.compile(r"(?im)^[#*_\s]{0,8}(?:the )?(?:final |correct )?answer[*_ \t]{0,6}$"),
    re.compile(
        r"(?:答案|正确选项|答え|正解|정답)[\s*]{0,3}(?:应该|应)?(?:选择|選擇|是|为|選|选|は|은|:|：)|答[：:]|(?<!不)正确的(?:选项|答案)?是|(?:选项|選項)(?:应该|应)?(?:是|为|為)|(?<![不没可])(?:故|应|应该|因此|所以|我)?(?<![不没可])(?:选择|选|選)(?:项|項)?[:：]?"
    ),
    re.compile(
        r"(?i)\b(?:I|we)(?:'ll| will| would|'d|’ll|’d)? (?:therefore |thus )?(?:choose|select|pick|go with|answer|opt for|chose|selected)\b"
        r"|\b(?:going|go) with\b|\bmy (?:final )?(?:choice|pick|selection) is\b|\b(?:richtige|korrekte) (?:antwort|option|lösung)\b(?=\s[(*]{0,3}[A-J]\b)"
    ),
    re.compile(
        r"(?i)\brichtig(?:e|er)? (?:ist|wäre)(?: (?:die )?(?:antwort|option|lösung))?\b|(?:الإجابة|الجواب|الخيار)(?: (?:الصحيحة|الصحيح|النهائية|النهائي))?\s?(?:هي|هو|:|：)"
        r"|\bonly (?:correct|right|valid|true) (?:one|answer|option|choice|statement) is\b"
        r"|\b(?:which|this|that|it) (?:is|corresponds to|matches|agrees with) (?:answer )?(?:option|choice|answer)\b(?=\s[(*\[]{0,3}[A-J]\b)"
    ),
    re.compile(
        r"(?im)(?:\b(?:it|that|this|which)(?:'s|’s| is| must be)\s"
        r"|^[\s#*_>]{0,8}(?:final|correct|result|solution|conclusion|verdict|decision|selected|pick)(?: (?:answer|choice|option|pick|verdict))?[*_ ]{0,4}[:=])"
        r"(?=[\s*_(\[$]{0,6}(?:option |choice )?[(*]{0,3}(?-i:[A-J]|[b-hj])[)\]*_$]{0,4}(?:, not\b|[.!]?[*_]{0,2}\s*$))"
    ),
    re.compile(r"(?i)[\"'](?:final_?)?(?:answer|choice|option|letter)[\"']\s{0,4}:"),
    re.compile(
        r"(?im)\b(?:actually|no,? wait|wait,? no|wait|hmm|no|correction|rather|i mean|make that|scratch that|sorry|it (?:should|must) be|so it(?:'s|’s| is)"
        r"|(?:so|therefore|thus|hence),? (?:it(?:'s|’s| is| must be) )?(?:the answer (?:is|must be) )?)[,.:;!—–-]{0,2}\s{0,2}"
        r"(?:it(?:'s|’s| is| should be| must be) |that(?:'s|’s) )?(?=\(?(?:option |choice |answer )?[\[(*]{0,3}[A-J]\b[\])*.!]{0,4}(?:\s*$|\s*\n|[.!]))"
    ),
)
_NAMED = (
    r"(?P<mark>\b(?i:option|choice|answer|statement|letter)\s{1,2}[(\[*]{0,4}|[(\[*]{1,4}|(?<![\w'’-])(?<!not )(?<!nor ))"
    r"(?P<letter>[A-Ja-j])[)\]*.:]{0,4}"
)
_IS_CORRECT = re.compile(
    _NAMED
    + r"(?:\s{1,2}\([^()\n]{1,80}\)|,[^,.\n]{1,60},|(?<=[)\]:]) [^,.;:\n]{1,80}?)? (?:is|must be|would be|seems|seems to be|appears to be|looks to be|should be|has to be)(?: (?:therefore|thus|clearly|indeed|definitely|then))?"
    r"(?: the)?(?:(?: (?:only|most|best|single|final|likely)){1,3}(?: (?:likely|correct|right|accurate|true|valid|appropriate|plausible)){0,2}"
    r"| (?:correct|right|accurate|true|valid|appropriate))\b(?! for\b)"
    r"(?! (?:\w+ )?(?:incorrect|wrong|false|invalid|impossible)\b)(?! \w+ (?:that|which) (?:fails|violates|is (?:not|wrong|false|incorrect)|does(?:n['’]t| not)|can(?:not|['’]t)))"
    r"|"
    + _NAMED.replace("mark", "mark2").replace("letter>", "letter2>")
    + r" (?:(?:is|must be) (?:(?:the|my|our) (?:(?:final )?(?:answer|choice)|(?:best|better|closest|right|correct) (?:answer|choice|option|one|match|fit|pick))"
    r"|better(?! than))\b|(?:fits|matches|works) best\b|it is(?=[.!*]{0,3}\s*$))",
)
_IS_CORRECT_ABROAD = re.compile(
    r"(?i)(?<![A-Za-z'’-])(?P<letter>[A-J])\s?(?:项|項|选项)?\s?(?:是|才是|為)?(?:正确|正確|对的|正解)"
    r"|\b(?:antwort|option|opción|réponse|risposta|resposta|alternativa) [(*]{0,3}(?P<abroad>[A-J])[)*]{0,3} (?:ist|es|est|è|é) "
    r"(?:la |die |a )?(?:richtig|korrekt|correct|corrett|corret)"
)
_ONLY = re.compile(
    r"\b(?i:only) (?:(?i:option|choice|answer|statement) )?[(\[*]{0,3}([A-J])[)\]*]{0,3}"
    r" (?:is|fits|satisfies|matches|gives|has|can|remains|works|agrees|meets|explains|shows|contains|survives|makes)\b"
)
_MADE = re.compile(
    r"\bmak(?:es|ing) (?:(?i:option|choice|answer|statement) )?[(\[*]{0,3}([A-J])[)\]*]{0,3} (?:the (?:only |most |best )?)?(?:correct|right|best|likely|appropriate|accurate)\b"
)
_LINES = re.compile(r"[^\n]+")
_OPTION_LINE = re.compile(r"^[\s>*_-]{0,6}[(\[]?([A-Ja-j])[)\].:][*_]{0,2}\s+\S")
_VERDICT_LINE = re.compile(
    r"^[\s>*_|•-]{0,8}(?:(?i:option|choice|statement) )?[(\[*]{0,4}([A-J])[)\]*.:]{0,4}(?=[\s|—–-])(.*)$"
)
_FOUND_WRONG = re.compile(
    r"(?i)\b(?:incorrect|wrong|false|not?|eliminated|excluded|impossible|ruled out)\b|n['’]t\b|[✗✘❌×]"
)
_FOUND_RIGHT = re.compile(r"(?i)\b(?:correct|true|right|yes)\b|[✓✔✅]")
_CONCLUDED = re.compile(
    r"\b(?i:option|choice|answer)\s{1,2}[(\[*]{0,4}([A-J])\b|[(\[*]{1,4}([A-J])[)\]*]{1,4}(?!\w)"
    r"|\b(?i:only) ([A-J])(?= (?!and\b|or\b)\w)"
    r"|(?<![\w'’-])(?<!\bor )([A-HJ])(?=[.!*`]{0,3}$)|∴ ?([A-J])(?=[.!*]{0,3}$)"
)
_NAME_OF_THINGS = re.compile(
    r"(?i)\b(?:vitamins?|hepatitis|types?|groups?|class|compounds?|points?|genes?|proteins?|rings?|isomers?|reagents?|reactants?|products?|species|states?|systems?|particles?|samples?|figure|alleles?"
    r"|strains?|factor|antigens?|enzymes?|substances?|intermediates?|materials?|planets?|stars?|steps?|parts?|chains?|plasmids?|cells?|blocks?|h[ae]mophilia|influenza|structures?|molecules?|regions?"
    r"|lines?|metals?|elements?|a|an|the|and|than|with|from|by|of|like|not|in) [*(]{0,3}$"
)
_CONSEQUENCE = re.compile(r"(?:[,;:—–]\s|\s)(?:and )?(?:so|thus|therefore|hence|meaning|but(?! not\b))\b,?\s")
_EXPLORES = re.compile(
    r"(?i)\b(?:let(?:'s|’s| us| me)|next|now|consider(?:ing)?|look(?:ing)? at|turn(?:ing)? to|moving on|analy[sz](?:e|ing)|analysis of (?:option|choice|answer)|evaluat\w+|examin\w+|check(?:ing)?|compare|comparing|start(?:ing)? with)\b"
)
_OTHERS_ANSWER = re.compile(
    r"(?i)\b(?:incorrect|wrong|false|least \w+|second(?:[ -]best)?|initial|first|previous|earlier|worst|other|each|every|any|either|another)(?: best| likely)?\s$"
)
_TAGS = re.compile(r"(?m)</?(?!answer>)[a-z]{1,12}>|^\s{0,4}```\w{0,12}$")
_BARE = re.compile(r"(?<![\w'’-])([B-HJ]|A(?!\s+[a-z]))(?![\w'’-])")
_DENIED = re.compile(
    r"(?i)\b(?:not|incorrect|wrong|false|eliminat\w+|fails?|worst|violates|rule[sd]? out|exclude[sd]?|cannot|unlikely|neither|there (?:is|was|are|will be) no|no es|nicht|falsch|pas|non è|não)\b"
    r"|n['’]t\b|не |不|아니|ない"
)
_REJECTED = re.compile(
    r"(?i)^\W{0,6}(?:(?:option|choice|answer|statement|letter)\b)?\W{0,4}[A-J]\W{0,4} (?:is|was|seems|looks|can|must|would|could|does|did|has)\b"
    r"[^.\n]{0,30}?(?:\bnot\b|n['’]t\b|\b(?:wrong|incorrect|false|worst|fails?|violates|eliminated|excluded|impossible|unlikely)\b|ruled out)"
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
    got = chosen(_TAGS.sub("", compose(after_reasoning(response)[-_MAX_TEXT:])), choices)
    if got is None:
        return Grade(0.0, False, None, "no choice found")
    if got == MANY:
        return Grade(0.0, False, None, "several choices are named")
    right = got == wanted
    reason = "the right choice" if right else f"not the right choice {clip(wanted)}"
    return Grade(float(right), right, clip(got), reason)


def chosen(text: str, choices: Choices) -> str | None:
    """The letter that an answer chooses (or the normalised text if the choices are unknown); MANY, or None."""
    claims = _claims(text)
    for start, end in reversed(claims[-_MAX_CLAIMS:]):
        letter = text[start:end].upper() if end - start == 1 else read_letter(text, start, choices)
        if letter is not None and (letter == MANY or choices.knows(letter)) and not is_hedged(text, start):
            return letter
    return _unclaimed(text, choices)


def _claims(text: str) -> list[tuple[int, int]]:
    """(start, end): where a claimed letter is to be read; of length 1 where it is the letter itself."""
    claims = {
        (match.end(), match.end())
        for pattern in _FORWARD
        for match in pattern.finditer(text)
        if not _OTHERS_ANSWER.search(text[max(0, match.start() - 30) : match.start()])
    }
    claims.update((start, start) for start, _ in answer_blocks(text)[-1:])
    if box := find_last_box(text):
        claims.add((box[0], box[0]))
    for match in _IS_CORRECT.finditer(text):
        group, mark = ("letter", "mark") if match["letter"] else ("letter2", "mark2")
        bare = match[mark] == ""
        article = bare and match[group] in "AI" and text[match.end(group)] not in ")]*.: "
        if not article and not (bare and match[group].islower()):
            claims.add(match.span(group))
    claims.update(match.span(match.lastgroup or 0) for match in _IS_CORRECT_ABROAD.finditer(text))
    claims.update(match.span(1) for pattern in (_ONLY, _MADE) for match in pattern.finditer(text))
    return sorted(claims)


def _unclaimed(text: str, choices: Choices) -> str | None:
    lines = [line for line in _LINES.findall(text) if line.strip()]
    whole = _alone(text, choices) if len(lines) < 2 else choices.by_text(text)
    if whole is not None:
        return whole
    if (judged := _only_right(lines)) and choices.knows(judged):
        return judged
    alone = {_alone(line, choices) for line in lines[:_MAX_CLAIMS]}
    if len(alone) > 1 and None not in alone:
        return MANY
    listed = {found[1].upper() for line in lines if (found := _OPTION_LINE.match(line))}
    edges = [line for line in lines[-1:] + lines[:1] if len(listed) < 2 or not _OPTION_LINE.match(line)]
    if said := next((letter for line in edges if (letter := _alone(line, choices))), None):
        return said
    return _last_sentence(text, choices) if lines and not _OPTION_LINE.match(lines[-1]) else None


def _only_right(lines: list[str]) -> str | None:
    """The letter of a list of verdicts ("A: incorrect", "B: correct") that is the only one found right."""
    verdicts: dict[str, bool] = {}
    for line in lines:
        judged = _VERDICT_LINE.match(line)
        wrong = judged is not None and bool(_FOUND_WRONG.search(judged[2]))
        if judged is None or not (wrong or _FOUND_RIGHT.search(judged[2])):
            continue
        if verdicts.setdefault(judged[1], not wrong) is wrong:
            return None
    right = [letter for letter, found in verdicts.items() if found]
    return right[0] if len(right) == 1 and len(verdicts) > 1 else None


def _alone(text: str, choices: Choices) -> str | None:
    """The choice that a text is and nothing else; a list of letters may be the text of a choice."""
    said = choices.by_text(text) if len(plain(text)) > 1 else None
    if said is None and not _REJECTED.match(text):
        said = read_letter(text, 0, choices, alone=True)
    return said if said and (said == MANY or choices.knows(said)) else choices.by_text(text)


def _last_sentence(text: str, choices: Choices) -> str | None:
    sentences = [sentence.strip() for sentence in _SENTENCES.split(text[-2000:]) if sentence.strip()]
    if not sentences or sentences[-1].endswith("?"):
        return None
    said = _CONSEQUENCE.split(sentences[-1])[-1]
    if _DENIED.search(said) or doubts(said) or _EXPLORES.search(said):
        return None
    if (whole := _alone(said, choices)) is not None:
        return whole
    found = {
        str(letter)
        for match in _CONCLUDED.finditer(said)
        for letter in match.groups()
        if letter and not (match[4] and _NAME_OF_THINGS.search(said[: match.start()]))
    }
    named = sorted(letter for letter in found if choices.knows(letter))
    others = {letter for letter in _BARE.findall(said) if choices.knows(letter)}
    if len(named) == 1 and not others - set(named):
        return named[0]
    hedged = re.search(r"\bor\b", said) and not any(" or " in text for text in choices.texts.values())
    return MANY if named or hedged else choices.within(said)
