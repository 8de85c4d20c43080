"""The phrases by which running text is read: what announces an answer, corrects it, denies it or goes on after it.

The languages beside English are those that models most often fall into; the patterns look at words, not at grammar.
"""

import re

MARKS = r"[*_`\s\"'“”]{0,6}"
ANNOUNCED = re.compile(
    rf"""(?:
      \b(?:answers?|antwort|lösung|ergebnis|respuesta|réponse|resposta|risposta|antwoord|svar(?:et)?|odpowiedź|cevap|jawaban(?:nya)?|đáp\ án|đáp\ số|ответ
         |відповідь|απάντηση)\b
      (?:\s*\#?\s*(?P<number>\d)(?=\s*[:=.)]))?
      (?:\s+(?:to|for|of|auf|à|a|zu|на|for)\s+[^.\n:=]{{1,80}}?)?
      (?:\s*\([^()\n]{{1,60}}\))?
      {MARKS}
      (?:\s*(?:therefore|thus|then|hence|here|indeed|finale?|correcta|definitiva|so))?{MARKS}
      (?:(?:ist|lautet|es|est|é|è|is|are|was|will|would|should|must|could|might|may|can|adalah|là|это|равен|je)(?!\w)
         (?:{MARKS}(?:(?:be|therefore|thus|then|simply|just|indeed|clearly|given\ by|equal\ to|probably|either|likely|now|still|also|approximately|about|around|exactly|as\ follows)(?!\w)|:|=))*
       |:|=|：|-{{1,2}}>|-(?=\s)|→|⇒|equals?|comes\ (?:out\ )?to|turns\ out\ to\ be|—|–)
    | (?:最终答案|正确答案|答案|答え|解答|正解|答|결과|정답|답)\s*{MARKS}(?:应该是|应为|就是|分别是|是|为|為|：|:|は|은|는|이|가|=)+
    | (?:الجواب|الإجابة|उत्तर|คำตอบ)\s*{MARKS}(?:هو|هي|है|คือ|:|：)
    )""",
    re.IGNORECASE | re.VERBOSE,
)
WORKED_ON = re.compile(
    r"(?i)\b(?:convert|change|turn|express|round|divide|multiply|subtract|add|check|find|get|write|put)(?:ing|s)?\s+"
    r"(?:(?:the|this|that|our|your)\s+)?(?:final\s+)?$"
)
"""Before an announcement: "to convert the answer to weeks: 28 / 7" says what is done to an answer, not what it is."""
HEADING = re.compile(rf"(?im)^[# \t>*_]{{0,8}}(?:the\s+)?(?:final\s+)?answer{MARKS}$")
COPULA = re.compile(r"(?<=[$)}\]])\s*(?:です|である|だ|となります|になります|입니다|이다)$")
LINKS = re.compile(r"\b(?:and|or)\b")
NEGATED = re.compile(r"(?i)^\W*(?:not|n't|no longer|nicht|pas|no es|не|不是)\b")
BUT = re.compile(r"(?i)\b(?:but(?: rather)?|rather|sondern|mais|sino|а|а именно|instead)\b|而是")
END = re.compile(r"(?<![.\s])(?:[.?]|!(?!\s*[=+*/)\\-]))(?=\s+[^\s\d]|\s*$|\s*\*\*)|。|！|？|\n|(?<=\d)\.(?=[A-Z])")
BREAK = re.compile(
    r"(?is)(?:,|;|\s[-–—]{1,2}\s|\s)\s*(?:so|because|since|which|as (?:we|the|it|there|required|shown|desired|stated)|where|given that|after|when|if|rounded|assuming|(?<!does )not\s+\S+"
    r"|meaning|i\.e\.|that is|for a total|making|leaving|using|by\s+\w+ing|weil|denn|car|porque|так как|因为)\b.*$|\s(?:[-–—]|--)\s(?=[a-zA-Z]{3}).*$|(?:,|;)\s+(?!and\b|or\b|und\b|oder\b|y\b|et\b|ou\b|[a-zA-Z]\s*=)[a-z]{2,}\b(?!\s*=).*$"
)
ASIDE = re.compile(
    r"(?i)\s+\((?=[^()]*(?<![\\a-zA-Z])[a-zA-Z]{2})(?!\s*(?:or|oder|maybe|possibly|perhaps)\b)[^()]*\)\s*\.?$"
)
FRAME = re.compile(
    r"(?i)^(?:that\s+)?(?:the\s+(?:total|final|exact|correct|value|number|amount|answer)\s+(?:of\s+)?)?(?:is\s+)?(?:about|approximately|roughly|around|exactly|precisely|only|just|simply|"
    r"a\s+total\s+of|equal\s+to|option|choice|etwa|environ|unos|около|约|大约|(?:US|AU|CA|HK|C|A)(?=\s*\\?\$)|USD|EUR|GBP|INR|CNY|RMB|Rs\.?)\s*(?=[-+\d$\\(A-Z.€£¥])"
)
CORRECTED = re.compile(
    r"(?i)\b(?:wait|actually|correction|scratch that|oops|sorry|my mistake|my bad|apologies|i made (?:a|an) \w+|i was wrong|let me (?:re|correct|fix)\w*|hmm+|i meant?|moment"
    r"|(?:that|this)(?:'s| is| was) (?:not (?:right|correct)|wrong|incorrect)|on second thought|no,|espera|attends|warte|стоп|нет,)|等等|不对|等一下"
)
CONFIRMED = re.compile(
    r"(?i)\b(?:yes|correct|right|confirmed|checks out|matches|verified|holds|consistent|same)\b|✓|✔|✅|正确"
)
INSTEAD = re.compile(
    r"(?i)\b(?:it|this|that|value|total|number|sum|result|count|answer)\s*(?:'s|is|should be|must be|has to be|equals|becomes|would be)\s+(?:actually\s+|really\s+|in fact\s+|indeed\s+|instead\s+)?"
    r"|\bi (?:mean|meant)\s+|\bshould be\s+|\bmake that\s+|应该是|应为|是"
)
NUMBER = re.compile(
    r"(?<![a-zA-Z0-9.\\^_])(?<!\^\{)(?<!_\{)(?:(?<![\d)}])-\s?)?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+,\d{1,2}(?![\d,])|\d+(?:\.\d+)?|\.\d+)(?:\s+\d+/\d+|\s*/\s*\d+(?![\d/])|\s*:\s*\d+|\s*\\frac\{\d+\}\{\d+\})?"
    r"(?:\s*(?:%|percent\b|million\b|billion\b|thousand\b|hundred\b|dozen\b))?(?!(?:st|nd|rd|th)\b)"
    r"|(?<![\w\\])-?\s?\d*\s*\\frac\{-?[\d.]+\}\{-?[\d.]+\}"
)
VERB = re.compile(
    r"(?i)(?:\b(?:so|thus|hence|giving|making|is|are|was|were|be|equals?|equal to|makes?|made|earn(?:s|ed)?|has|have|had|total(?:s|ing|ed)?|costs?|gets?|got|needs?|takes?|took|pays?|paid|spends?|spent|leaves?|left|gives?"
    r"|sells?|sold|receives?|weighs?|travels?|saves?|saved|comes to|amounts? to|will|can|there (?:are|is|were|will be)|of|by|ist|sind|beträgt|est|sont|es|son|равно|это|in total|altogether)\b|=|:|≈|\\approx|是|为|有|共|→|=>)"
    r"\s*(?:be|a total of|about|approximately|exactly|only|just|now|then|also|around|roughly|up to|still|therefore|thus|equal to|to|of|\$|\\\$|\*)*\s*$"
)
SEGMENT = re.compile(
    r"(?s)\\\((.{1,300}?)\\\)|\\\[(.{1,400}?)\\\]|\$\$(.{1,400}?)\$\$|(?<![\\\d])\$(?!\s*\d[\d,.]*\s+[a-zA-Z]{2})([^$\n]{1,300}?)(?<!\\)\$(?!\d)"
)
BOLD = re.compile(r"(?<![\w*])(\*\*|__)(?=\S)([^*_\n]{1,200}?)(?<=\S)\1(?!\w)")
HEDGED = re.compile(
    r"(?i)(?:\b(?:it|this|that|answer|or|but)\s+)?\b(?:could|might|may)\s+(?:also\s+|instead\s+|well\s+|possibly\s+)?be\s+|\b(?:or|alternatively|otherwise),?\s+(?:maybe|possibly|perhaps|it is)?\s*(?=[-\d$])"
)
MISTAKEN = re.compile(r"(?i)wrong|mistake|incorrect|not right|forgot|correction")
BESIDE = re.compile(
    r"(?i)\b(?:in|at|for|from|per|every|each|day|within|over|during|after|than|with|until|step|to \w+)\s+(?:the\s+|a\s+|only\s+)?\$?\s*$"
)
CLAUSE = re.compile(
    r"(?:\s[-–—]\s(?:which|because)\b|,?\s(?:because|since|given)\b"
    r"|,\s(?:which\s(?:satisf\w+|meets|is\s(?:valid|consistent|within|less|greater|positive))|satisfying)\b)[^=]*$|\s+\([^()]*\)\s*\.?$"
)
QUESTION = re.compile(r"(?:^|(?<=[.!]))[^.!?]*\?\s*$")
STEP = re.compile(r"(?i)^step \d+\W{1,3}")
DENIED = re.compile(r"(?i)\bnot (?:the (?:final |right |correct )?answer\b|\$?\d)|\banswer is not\b|\bis not \$?\d")
EXPLAINED = re.compile(
    r"(?i)^\W{0,8}([^\n]{1,80}?)\W{0,8}\n\W{0,12}(?:explanation|here'?s (?:how|why)|reasoning|because)\b"
)
HTML = re.compile(r"</?(?:b|strong|i|em|p|u|span)>")
SEVERAL = re.compile(r"(?<![\w\\])([a-zA-Z]) = -?[\d./]+,? (?:and|or) \1 = -?[\d./]+$")
_NUMBER = r"-?\$?[\d./]+"
PLURAL = re.compile(
    rf"(?i)\b(?:roots|solutions|zeros|zeroes|values|answers|intercepts)\b[^.:=]{{0,60}}?\bare:?\s+((?:{_NUMBER}\s*,\s*){{0,8}}{_NUMBER},?\s+(?:and|or)\s+{_NUMBER})$"
)
CONCLUDED = re.compile(
    r"(?i)^.*=[^=\n]{1,60}?[,;]?\s+(?:(?:and\s+)?(?:so|thus|hence|therefore|which (?:gives|means|yields)|giving|meaning)\b|\\implies\b|\\Rightarrow\b|⇒|⟹|=>),?\s*(?=.*=)"
)
POINT = re.compile(
    r"(?i)^(?:[a-z]+\s+){1,10}(?:is|at|are|be)\s*(?:at\s+|the\s+point\s+|[A-Z]\s*=?\s*)?:?\s*([(\[].*[)\]])$"
)
RETRACTED = re.compile(
    r"(?i)(?:[\s,.:;—-]|\b(?:no|wait|actually|sorry|make that|rather|hmm|it's|it is|oops)\b){0,12}(?=-?\$?\d)"
)
FORMULA = re.compile(
    r"(?:\\[a-zA-Z]+|[\d.]+|[-+*/^=_(){}|!%]|(?<![a-zA-Z'])[b-hj-zB-HJ-Zi](?![a-zA-Z'])|\s|,(?=\d{3}))+"
)
BLANK = re.compile(r"[ \t]{3,}")
SAID = re.compile(r"(?i)(?:(?:so|and|or)\b,?\s*)?it(?:'s| is| was)\b")
OR_SO = re.compile(r"\s+or(?: so)?$")
OTHER = re.compile(r"(?i)\b(?:or|oder|ou|или)\b|或")
