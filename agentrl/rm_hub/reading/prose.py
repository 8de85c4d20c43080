"""Answers in running text: sentences that announce one, values in sentences, and corrections of what was said before.

The languages beside English are those that models most often fall into; the patterns look at the words that announce an
answer, not at the grammar.
"""

import re

from agentrl.rm_hub.reading import numbers
from agentrl.rm_hub.reading.latex import clean
from agentrl.rm_hub.reading.shapes import is_symbol, shape
from agentrl.rm_hub.reading.words import choice, wordy

_SEARCHED = 20_000
_MARKS = r"[*_`\s\"'“”]{0,6}"
_ANNOUNCED = re.compile(
    rf"""(?:
      \b(?:answers?|antwort|lösung|ergebnis|respuesta|réponse|resposta|risposta|antwoord|svar(?:et)?|odpowiedź|cevap|jawaban(?:nya)?|đáp\ án|đáp\ số|ответ
         |відповідь|απάντηση)\b
      (?:\s*\#?\s*(?P<number>\d)(?=\s*[:=.)]))?
      (?:\s+(?:to|for|of|auf|à|a|zu|на|for)\s+[^.\n:=]{{1,80}}?)?
      (?:\s*\([^()\n]{{1,60}}\))?
      {_MARKS}
      (?:\s*(?:therefore|thus|then|hence|here|indeed|finale?|correcta|definitiva|so))?{_MARKS}
      (?:(?:ist|lautet|es|est|é|è|is|are|was|will|would|should|must|could|might|may|can|adalah|là|это|равен|je)(?!\w)
         (?:{_MARKS}(?:(?:be|therefore|thus|then|simply|just|indeed|clearly|given\ by|equal\ to|probably|either|likely|now|still|also|approximately|about|around|exactly|as\ follows)(?!\w)|:|=))*
       |:|=|：|-{{1,2}}>|-(?=\s)|→|⇒|equals?|comes\ (?:out\ )?to|turns\ out\ to\ be|—|–)
    | (?:最终答案|正确答案|答案|答え|解答|正解|答|결과|정답|답)\s*{_MARKS}(?:应该是|应为|就是|分别是|是|为|為|：|:|は|은|는|이|가|=)+
    | (?:الجواب|الإجابة|उत्तर|คำตอบ)\s*{_MARKS}(?:هو|هي|है|คือ|:|：)
    )""",
    re.IGNORECASE | re.VERBOSE,
)
_HEADING = re.compile(rf"^[# \t>*_]{{0,8}}(?:the\s+)?(?:final\s+)?answer{_MARKS}$", re.IGNORECASE | re.MULTILINE)
_COPULA = re.compile(r"(?<=[$)}\]])\s*(?:です|である|だ|となります|になります|입니다|이다)$")
_LINKS = re.compile(r"\b(?:and|or)\b")
_NEGATED = re.compile(r"^\W*(?:not|n't|no longer|nicht|pas|no es|не|不是)\b", re.IGNORECASE)
_BUT = re.compile(r"\b(?:but(?: rather)?|rather|sondern|mais|sino|а|а именно|instead)\b|而是", re.IGNORECASE)
_END = re.compile(r"(?<![.\s])(?:[.?]|!(?!\s*[=+*/)\\-]))(?=\s+[^\s\d]|\s*$|\s*\*\*)|。|！|？|\n|(?<=\d)\.(?=[A-Z])")
_BREAK = re.compile(
    r"(?:,|;|\s[-–—]{1,2}\s|\s)\s*(?:so|because|since|which|as (?:we|the|it|there|required|shown|desired|stated)|where|given that|after|when|if|rounded|assuming|(?<!does )not\s+\S+"
    r"|meaning|i\.e\.|that is|for a total|making|leaving|using|by\s+\w+ing|weil|denn|car|porque|так как|因为)\b.*$|\s(?:[-–—]|--)\s(?=[a-zA-Z]{3}).*$|(?:,|;)\s+(?!and\b|or\b|und\b|oder\b|y\b|et\b|ou\b|[a-zA-Z]\s*=)[a-z]{2,}\b(?!\s*=).*$",
    re.IGNORECASE | re.DOTALL,
)
_ASIDE = re.compile(
    r"\s+\((?=[^()]*(?<![\\a-zA-Z])[a-zA-Z]{2})(?!\s*(?:or|oder|maybe|possibly|perhaps)\b)[^()]*\)\s*\.?$",
    re.IGNORECASE,
)
_FRAME = re.compile(
    r"^(?:that\s+)?(?:the\s+(?:total|final|exact|correct|value|number|amount|answer)\s+(?:of\s+)?)?(?:is\s+)?(?:about|approximately|roughly|around|exactly|precisely|only|just|simply|"
    r"a\s+total\s+of|equal\s+to|option|choice|etwa|environ|unos|около|约|大约|(?:US|AU|CA|HK|C|A)(?=\s*\\?\$)|USD|EUR|GBP|INR|CNY|RMB|Rs\.?)\s*(?=[-+\d$\\(A-Z.€£¥])",
    re.IGNORECASE,
)
_CORRECTED = re.compile(
    r"\b(?:wait|actually|correction|scratch that|oops|sorry|my mistake|my bad|apologies|i made (?:a|an) \w+|i was wrong|let me (?:re|correct|fix)\w*|hmm+|i meant?|moment"
    r"|(?:that|this)(?:'s| is| was) (?:not (?:right|correct)|wrong|incorrect)|on second thought|no,|espera|attends|warte|стоп|нет,)|等等|不对|等一下",
    re.IGNORECASE,
)
_CONFIRMED = re.compile(
    r"\b(?:yes|correct|right|confirmed|checks out|matches|verified|holds|consistent|same)\b|✓|✔|✅|正确", re.IGNORECASE
)
_INSTEAD = re.compile(
    r"\b(?:it|this|that|value|total|number|sum|result|count|answer)\s*(?:'s|is|should be|must be|has to be|equals|becomes|would be)\s+(?:actually\s+|really\s+|in fact\s+|indeed\s+|instead\s+)?"
    r"|\bi (?:mean|meant)\s+|\bshould be\s+|\bmake that\s+|应该是|应为|是",
    re.IGNORECASE,
)
_NUMBER = re.compile(
    r"(?<![a-zA-Z0-9.\\^_])(?<!\^\{)(?<!_\{)(?:(?<![\d)}])-\s?)?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+,\d{1,2}(?![\d,])|\d+(?:\.\d+)?|\.\d+)(?:\s+\d+/\d+|\s*/\s*\d+(?![\d/])|\s*:\s*\d+|\s*\\frac\{\d+\}\{\d+\})?"
    r"(?:\s*(?:%|percent\b|million\b|billion\b|thousand\b|hundred\b|dozen\b))?(?!(?:st|nd|rd|th)\b)"
    r"|(?<![\w\\])-?\s?\d*\s*\\frac\{-?[\d.]+\}\{-?[\d.]+\}"
)
_VERB = re.compile(
    r"(?:\b(?:so|thus|hence|giving|making|is|are|was|were|be|equals?|equal to|makes?|made|earn(?:s|ed)?|has|have|had|total(?:s|ing|ed)?|costs?|gets?|got|needs?|takes?|took|pays?|paid|spends?|spent|leaves?|left|gives?"
    r"|sells?|sold|receives?|weighs?|travels?|saves?|saved|comes to|amounts? to|will|can|there (?:are|is|were|will be)|of|by|ist|sind|beträgt|est|sont|es|son|равно|это|in total|altogether)\b|=|:|≈|\\approx|是|为|有|共|→|=>)"
    r"\s*(?:be|a total of|about|approximately|exactly|only|just|now|then|also|around|roughly|up to|still|therefore|thus|equal to|to|of|\$|\\\$|\*)*\s*$",
    re.IGNORECASE,
)
_SEGMENT = re.compile(
    r"\\\((.{1,300}?)\\\)|\\\[(.{1,400}?)\\\]|\$\$(.{1,400}?)\$\$|(?<![\\\d])\$(?!\s*\d[\d,.]*\s+[a-zA-Z]{2})([^$\n]{1,300}?)(?<!\\)\$(?!\d)",
    re.DOTALL,
)
_BOLD = re.compile(r"(?<![\w*])(\*\*|__)(?=\S)([^*_\n]{1,200}?)(?<=\S)\1(?!\w)")
_HEDGED = re.compile(
    r"(?:\b(?:it|this|that|answer|or|but)\s+)?\b(?:could|might|may)\s+(?:also\s+|instead\s+|well\s+|possibly\s+)?be\s+|\b(?:or|alternatively|otherwise),?\s+(?:maybe|possibly|perhaps|it is)?\s*(?=[-\d$])",
    re.IGNORECASE,
)
_MISTAKEN = re.compile(r"wrong|mistake|incorrect|not right|forgot|correction", re.IGNORECASE)
_BESIDE = re.compile(
    r"\b(?:in|at|for|from|per|every|each|day|within|over|during|after|than|with|until|step|to \w+)\s+(?:the\s+|a\s+|only\s+)?\$?\s*$",
    re.IGNORECASE,
)
_CLAUSE = re.compile(r"(?:\s[-–—]\s(?:which|because)\b|,?\s(?:because|since|given)\b)[^=]*$|\s+\([^()]*\)\s*\.?$")
_QUESTION = re.compile(r"(?:^|(?<=[.!]))[^.!?]*\?\s*$")
_STEP = re.compile(r"^step \d+\W{1,3}", re.IGNORECASE)
_DENIED = re.compile(
    r"\bnot (?:the (?:final |right |correct )?answer\b|\$?\d)|\banswer is not\b|\bis not \$?\d", re.IGNORECASE
)
_EXPLAINED = re.compile(
    r"^\W{0,8}([^\n]{1,80}?)\W{0,8}\n\W{0,12}(?:explanation|here'?s (?:how|why)|reasoning|because)\b", re.IGNORECASE
)
_HTML = re.compile(r"</?(?:b|strong|i|em|p|u|span)>")
_SEVERAL = re.compile(r"(?<![\w\\])([a-zA-Z]) = -?[\d./]+,? (?:and|or) \1 = -?[\d./]+$")
_RETRACTED = re.compile(
    r"(?:[\s,.:;—-]|\b(?:no|wait|actually|sorry|make that|rather|hmm|it's|it is|oops)\b){0,12}(?=-?\$?\d)",
    re.IGNORECASE,
)
_FORMULA = re.compile(
    r"(?:\\[a-zA-Z]+|[\d.]+|[-+*/^=_(){}|!%]|(?<![a-zA-Z'])[b-hj-zB-HJ-Zi](?![a-zA-Z'])|\s|,(?=\d{3}))+"
)
_BLANK = re.compile(r"[ \t]{3,}")
_OR_SO = re.compile(r"\s+or(?: so)?$")
_OTHER = re.compile(r"\b(?:or|oder|ou|или)\b|或", re.IGNORECASE)


def find(text: str, words: bool, lines: bool) -> str | None:
    """The answer that running text gives; None if it gives none.

    Args:
        text: no boxes or tags in it.
        words: words are looked for, not values.
        lines: without a sentence that announces an answer, take the last line with a value.
    """
    text = _HTML.sub("", text)
    text = _BOLD.sub(r"\2", _BLANK.sub(" ", text[-_SEARCHED:]))
    announced = _announced(text)
    if announced is not None:
        found, end, others = announced
        value = found if words else _value(found)
        if value is not None:
            if others:
                return value + " or " + " or ".join(others)
            return correction(found + text[end:], words) or value
        if found and not words and len(text) - end < 4000:
            later = _last_value(text[end - len(found) :])
            if later is not None:
                return later
    if not lines:
        return None
    if words:
        return _last_words(text)
    first = _EXPLAINED.match(text)
    if first is not None and numbers.read(clean(first.group(1))) is not None:
        return first.group(1)
    return _last_value(text)


def correction(rest: str, words: bool = False) -> str | None:
    """The new answer if the text after an answer takes that back; None if it stands."""
    taken_back = _CORRECTED.search(rest)
    if taken_back is None:
        return None
    rest = _BOLD.sub(r"\2", rest[taken_back.start() :])
    announced = _announced(rest)
    if announced is not None:
        return announced[0] if words else _value(announced[0])
    if _CONFIRMED.search(rest):
        return None
    if re.match(r"correction\W{1,4}\$?-?\d", rest, re.IGNORECASE):
        return leading_value(rest.partition(":")[2])
    for match in reversed(list(_INSTEAD.finditer(rest))):
        if _NEGATED.match(rest[match.end() :]):
            continue
        value = leading_value(_sentence(rest[match.end() :])[0])
        if value:
            return value
    at_once = _RETRACTED.match(rest)
    if at_once is not None:
        return leading_value(rest[at_once.end() :])
    return (
        _last_value(rest)
        if _MISTAKEN.search(rest[:200]) and re.search(r"=\s*\$?\d|correction: ", rest, re.IGNORECASE)
        else None
    )


def hedge(rest: str) -> str | None:
    """Another value that the text right after an answer holds possible."""
    match = _HEDGED.search(rest[:120])
    return leading_value(rest[match.end() :]) if match is not None else None


def leading_value(text: str) -> str | None:
    """The value that a text begins with; None if it begins with none."""
    text = clean(_sentence(text)[0])
    match = _NUMBER.match(text)
    if match is not None:
        return match.group().strip()
    return text if text and not wordy(text) else None


def _announced(text: str) -> tuple[str, int, list[str]] | None:
    """(what the last sentence that announces an answer says, where it ends, values of numbered answers before it)."""
    matches = list(_ANNOUNCED.finditer(text))
    headings = list(_HEADING.finditer(text))
    if headings and (not matches or headings[-1].end() > matches[-1].end()):
        matches.append(headings[-1])
    numbered = [match for match in matches if match.re is _ANNOUNCED and match.group("number")]
    for match in reversed(matches):
        said, length = _sentence(text[match.end() :])
        end = match.end() + length
        cue = _CORRECTED.search(text, match.end(), end)
        if cue is not None and re.search(r"\w", text[match.end() : cue.start()]):
            said, end = text[match.end() : cue.start()], cue.start()
        if _NEGATED.match(said):
            but = _BUT.search(said)
            if but is None:
                continue
            said = said[but.end() :]
        said = _COPULA.sub("", said.strip(" \t*_:\"'"))
        if said.count("}") > said.count("{"):
            said = said.rstrip(' "}')
        hedge = _HEDGED.search(said) or _HEDGED.match(text[end : end + 80])
        said = _OR_SO.sub("", _ASIDE.sub("", _BREAK.sub("", said).strip()))
        if hedge is not None and (other := leading_value(hedge.string[hedge.end() :])):
            said = f"{_BREAK.sub('', said)} or {other}"
        if not said.strip(" .,:;*_$"):
            continue
        if len(numbered) > 1 and match is numbered[-1]:
            others = [_BREAK.sub("", _sentence(text[other.end() :])[0].strip(" *_:")) for other in numbered[:-1]]
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
    end = _END.search(limit)
    while end is not None and _abbreviated(limit, end):
        end = _END.search(limit, end.end())
    if end is None:
        return limit, skipped + len(limit)
    return limit[: end.start()], skipped + end.end()


def _abbreviated(text: str, end: re.Match[str]) -> bool:
    before = text[max(0, end.start() - 6) : end.start()]
    return (
        end.group() == "."
        and re.search(r"(?:\b(?:[ap]\.?m|approx|ca|Rs|No|sq|ft|in|cu|vs|Mr|Mrs|Ms|Dr)|[ap]\.m)$", before) is not None
        and bool(text[end.end() :].strip())
    )


def _value(said: str) -> str | None:
    """The value in what a sentence says, as mathematics; None if there is none."""
    said = _FRAME.sub("", said.strip())
    cleaned = clean(said)
    if not cleaned:
        return None
    if (ends := re.match(r"between (.{1,40}) and (.{1,40})$", cleaned)) is not None:
        return f"{ends.group(1)} or {ends.group(2)}"
    if numbers.read(cleaned) is not None or not wordy(cleaned) or choice(cleaned):
        return said
    parts = shape(cleaned)
    if (
        parts.kind in {"list", "set", "brackets", "union"}
        and parts.items
        and not any(_prosy(item.text) for item in parts.items)
    ):
        return said
    if parts.name and not _prosy(parts.text):
        return said
    if not re.search(r"\d", cleaned) and len(cleaned.split()) <= 5:
        return said
    return _in_sentence(said)


def _prosy(text: str) -> bool:
    return wordy(text) and numbers.read(text) is None


def _in_sentence(sentence: str) -> str | None:
    """The value that a whole sentence comes to: after its last equals sign or verb, else its only or last number."""
    segments = [match for match in _SEGMENT.finditer(sentence) if _mathematics(match)]
    if len(segments) > 1 and (joined := _joined(sentence, segments[-2:])) is not None:
        return joined
    if segments:
        later = clean(sentence[segments[-1].end() :])
        told = [match for match in _NUMBER.finditer(later) if _VERB.search(later[: match.start()][-60:])]
        return told[-1].group().strip() if told else _content(segments[-1])
    text = _breakdown(clean(sentence))
    if (several := _SEVERAL.search(text)) is not None:
        return several.group()
    found = list(_NUMBER.finditer(text))
    if not found:
        spelled = numbers.read(text)
        return text if spelled is not None else None
    main = [match for match in found if not _BESIDE.search(text[max(0, match.start() - 40) : match.start()])]
    found = main or found
    after = [match for match in found if _VERB.search(text[max(0, match.start() - 60) : match.start()])]
    best = after[-1] if after else found[-1]
    for span in _FORMULA.finditer(text):
        if span.start() <= best.start() < span.end() and re.search(r"\\[a-zA-Z]|\^", span.group()):
            return span.group().rpartition("=")[2].strip(" ,(")
    index = found.index(best)
    if index + 1 < len(found):
        following = found[index + 1]
        if _OTHER.fullmatch(text[best.end() : following.start()].strip()):
            return f"{best.group().strip()} or {following.group().strip()}"
    return best.group().strip()


def _breakdown(text: str) -> str:
    """A sentence without the parts that its result is made of ("3 bolts: 2 blue and 1 white")."""
    head, colon, tail = text.partition(": ")
    if not colon or "=" in tail or re.search(r"total|so |answer|result", tail, re.IGNORECASE):
        return text
    told = [match for match in _NUMBER.finditer(head) if _VERB.search(head[: match.start()][-60:])]
    return head if told else text


def _joined(sentence: str, pair: list[re.Match[str]]) -> str | None:
    """Two values that stand side by side ("$2$ and $3$"); None if they are about different things."""
    first, second = (shape(clean(_content(segment))) for segment in pair)
    if first.name != second.name or not re.fullmatch(
        r"\s*,?\s*(?:and|or)\s*", sentence[pair[0].end() : pair[1].start()]
    ):
        return None
    return f"{_content(pair[0])} or {_content(pair[1])}"


def _content(segment: re.Match[str]) -> str:
    return str(next(part for part in segment.groups() if part is not None))


def _mathematics(segment: re.Match[str]) -> bool:
    """Whether what stands between delimiters could be an answer: not words, a lone variable, or text between two prices."""
    text = clean(_content(segment))
    return (
        bool(text) and not wordy(text) and not is_symbol(text) and not re.search(r"[-+*/=<]$|\\(?:times|cdot)$", text)
    )


def _last_value(text: str) -> str | None:
    """The value of the last line that has one."""
    lines = [line for line in text.splitlines() if line.strip(" \t*_#>-|`")]
    for line in reversed(lines[-6:]):
        stripped = _STEP.sub("", _QUESTION.sub("", line.strip(" \t*_#>`")).strip(" \t*_"))
        if not stripped or re.match(r"^(?:let me know|hope|feel free|note|check)", stripped, re.IGNORECASE):
            continue
        cleaned = clean(stripped)
        if not re.search(r"[\d\\]", cleaned) and not (len(lines) == 1 and len(cleaned.split()) <= 3):
            if numbers.read(cleaned) is not None:
                return stripped
            continue
        value = _line(stripped)
        if value is not None:
            return value
    return None


def _line(line: str) -> str | None:
    """The value of one line: the whole of it, or that of its last sentence that has one."""
    whole = _value_or_none(line)
    if whole is not None:
        return whole
    sentences: list[str] = []
    rest = line
    while rest.strip() and len(sentences) < 200:
        said, length = _sentence(rest)
        sentences.append(said)
        rest = rest[max(length, 1) :]
    for said in reversed(sentences):
        if re.search(r"[\d\\]", said) and not (_DENIED.search(said) and len(_NUMBER.findall(said)) < 2):
            head = _CLAUSE.sub("", said)
            value = _in_sentence(head if re.search(r"\d", head) else said)
            if value is not None:
                return value
    return None


def _value_or_none(line: str) -> str | None:
    cleaned = clean(line)
    if len(cleaned) <= 200 and (numbers.read(cleaned) is not None or not wordy(_LINKS.sub(" ", cleaned))):
        return line
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
