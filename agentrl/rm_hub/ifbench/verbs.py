"""Does a text start with a verb?

The benchmark asks a statistical part-of-speech tagger, whose weights are a download. Here closed lists decide: forms of
the verbs below (regular forms are derived) are verbs; a word that is as often a noun ("Design", "Water") is one if what
follows is an object, an adverb or a preposition, as after an imperative. Modals ("can", "will") are no verbs, as in
the benchmark. Expect other verdicts than the tagger's on rare verbs, and on ambiguous words.
"""

from functools import cache

from agentrl.rm_hub.ifbench.lists import words_of
from agentrl.rm_hub.ifbench.passage import Passage, tokenise

_ENOUGH = 1_000
"""Characters that the first two words are looked for in."""

_AUXILIARIES = frozenset(words_of("am are is was were be been being have has had having do does did done doing"))
_CLITICS = frozenset(words_of("'s 're 'm n't ’"))

_VERBS = """
abandon accelerate accept accompany accomplish accumulate achieve acknowledge acquire activate adapt add adhere adjust
admire admit adopt advise affect affirm agree align allocate allow alter amend amplify analyse analyze animate announce
answer anticipate apologize appear append apply appoint appreciate approve argue arise arrange arrive articulate ascend
ask assemble assert assess assign assist assume assure attach attain attend attract author automate avoid await awake
awaken bake banish be beat become befriend beg begin behave behold believe belong blend bless boil borrow breathe brew
bring broaden brush build burn bury buy calculate calibrate carry carve cast categorize cease celebrate challenge choose
chop cite clarify classify clean clear click climb close collaborate collapse collect combine come commence communicate
compare compile complete compose compress compute conceal conceive conclude configure confirm confront connect conquer
consider consist construct consult consume contain contemplate continue contribute convert convey convince cook
coordinate correct count craft create cultivate customize cut dare decide declare decline decode decompose decrease
dedicate deduce deepen define delegate delete deliver delve demonstrate deny depart depend depict deploy derive descend
describe deserve destroy detect determine develop deviate devise diagnose dig dilute diminish direct discard discern
disclose discover discuss dismiss display dispose dissolve distinguish distribute dive divide donate draft drag draw
dream drift drink drive drop earn eat edit educate elaborate elevate eliminate embark embed embody embrace emerge
emphasize employ empower enable encode encounter encourage endure enforce engage enhance enjoy enlighten enlist ensure
enter entertain envision envisage equip erase erect escape establish estimate evaluate evoke evolve examine exceed
excel exchange exclude execute exercise exist expand expect expel experience experiment explain explore expose express
extend extract fabricate facilitate fail fall familiarize fasten feed feel fetch fight fill filter finalize find finish
fit fix flee flourish fly focus fold follow forbid forecast forge forget forgive formulate foster frame free freeze
fulfil fulfill gain gather gaze generate get give glance glimpse glow go govern grab grant grasp greet grind
grow guard guess guide hack handle happen harness hasten hear heat help hide highlight hire hit hold hone hope
hypothesize identify ignite ignore illuminate illustrate imagine immerse implement imply impose impress improve include
incorporate increase indicate infer influence inform inherit initialize initiate inject innovate inquire insert insist
inspect inspire install instruct integrate intend interact interpret intertwine interview introduce invent invest
investigate invite involve isolate iterate join judge jump justify keep kick kill kneel knit know launch lay lead lean
leap learn leave lend let leverage lie lift limit link listen live locate look lose love lower maintain make manage
manipulate march marry master match maximize mean measure meditate meet melt memorize mend mention merge migrate
minimize mix model modify monitor motivate mount move multiply narrate navigate negotiate normalize note notice nurture
obey observe obtain occur offer omit open operate oppose optimize orchestrate order organise organize outline overcome
overlook oversee own pack paint parse participate partner pass pause pay perceive perform permit persist persuade pick
picture place plan plant play plead pledge plot plunge polish ponder position possess pour practice praise pray
precede predict prefer prepare present preserve press pretend prevent print prioritize probe proceed process produce
progress promote propose protect prove provide publish pull purchase pursue push put qualify question quit quote raise
rank reach react read realize rearrange reason rebuild recall receive recite recognise recognize recommend
reconsider record recover recreate recruit rectify recycle redefine redesign reduce refactor refer refine reflect
reframe regard register regulate reimagine reinforce reject rejoice relate relax release rely remain remember remind
remove rename render renew reopen repair repeat rephrase replace reply report represent request require research
resist resolve resonate respect respond rest restore restructure retain retire retrieve return reuse reveal review
revise revisit revolutionize rewrite ride ring rise roll rotate rub ruin rule run sail save savor say scan scatter
schedule scream search see seek seem seize select sell send sense separate serve set settle sew shake shape share
shatter shed shift shine shoot show shut simplify simulate sing sink sit skip sleep slice slide slip smile soar solve
sort sow spark speak specify speculate spell spend spin split spot spray spread stand start state stay steal step
stir stitch stop store strengthen stretch strike strive structure struggle study submit substitute subtract succeed
suffer suggest sum summarise summarize supply support suppose suppress surf surrender survive suspect sustain swallow
swap swear sweep swim swing switch synthesize tackle tailor take talk taste teach tear tell tend test thank think
thrive throw tie touch trace track trade train transcend transcribe transfer transform transition translate transmit
transport travel traverse treat trigger trim trust try tune turn type unbox uncover undergo underline underscore
understand undertake undo unfold unify unite unleash unlock unravel unveil unwind update uphold upgrade use utilise
utilize validate value vanish vary venture verify view visit visualise visualize vote wait wake walk wander want warm
warn wash waste watch weave weigh welcome whisper win wish withdraw witness wonder work worship wrap wrestle write
yearn yield
"""

_IRREGULAR = """
arose arisen awoke ate eaten began begun became beheld bit bitten blew blown bore born bought bound broke broken brought
built burnt came caught chose chosen clung crept dealt drank drove driven drew drawn drunk dug fed fell fallen felt fled
flew flown forgave forgiven forgot forgotten fought found froze frozen gave given went gone got gotten grew grown heard
held hid hidden kept knew known laid led left lent lit lost made meant met paid rode ridden rang rung rose risen said
sang sung sank sat saw seen sent shook shaken shone shot shown slept slid sold sought spent spoke spoken spun sprang
stole stolen stood stuck struck swam swept swore sworn swung taken taught threw thrown told took tore torn understood
undergone withdrew withdrawn woke woken won wore worn wove woven wrote written
"""

_ALSO_NOUNS = frozenset(
    words_of("""
    answer attach author beat burn cast cause challenge change clean clear close collapse contract count craft cut
    design display draft drag draw dream drift drink drive drop estimate exchange exercise experience experiment
    exercise express fall feed feel fight fill filter find finish fit fix focus fold forecast forge form frame free
    gain gaze glance glimpse glow grant grasp guard guess guide hack handle harness heat help highlight hire hit hold
    hope increase influence interview judge jump kick kill lay lead lean leap leverage lie lift limit link live look
    love lower march master match mean measure model monitor mount move note notice offer open order outline own pack
    paint partner pass pause pay pick picture place plan plant play pledge plot polish position pour practice praise
    present press print probe process produce progress purchase push question quote rank reach reason record
    register reject release repair reply report request research respect rest return review ride ring rise roll rub
    ruin rule run sail scan schedule scream search sense set shake shape share shed shift shine show sink sleep slice
    slide slip smile sort spark spell spin split spot spray spread stand start state stay step stir stitch stop store
    stretch strike structure struggle study sum supply support surf suspect swap sweep swim swing switch talk taste
    tear test thank tie touch trace track trade train transfer transition transport travel treat trigger trim trust
    try tune turn type update upgrade use value venture view visit vote wait wake walk want wash waste watch welcome
    whisper win wish witness wonder work worship yield name water color colour cover deal delay engineer fuel fund
    google hunt label list log map mark mask matter mind mirror mine nail need pin point pump rate rent rock sample
    score screen seal shoulder sketch source stamp surface tag target task time tip title top tour trap twist voice wing
    """)
)
"""Verbs that are as likely nouns or adjectives; those of the last lines are verbs only where their object follows."""

_AFTER_A_VERB = frozenset(
    words_of("""
    a an the this that these those my your our his her its their me you him us them it each every all any some both
    no one two three what how why whether who where when which with into on up out through over around back down away
    forward for at by from about against as carefully closely first not only yourself ourselves themselves
    """)
)
"""What follows a verb at the start of a sentence rather than a noun."""


@cache
def _forms() -> dict[str, str]:
    """Every regular form of the verbs, to its base."""
    forms: dict[str, str] = {}
    for base in (*_VERBS.split(), *_ALSO_NOUNS):
        forms.update(dict.fromkeys(_inflected(base), base))
    forms.update({form: form for form in _IRREGULAR.split()})
    forms.update({base: base for base in (*_VERBS.split(), *_ALSO_NOUNS)})
    return forms


def _inflected(base: str) -> list[str]:
    if base.endswith("e") and base != "be":
        stem, extra = base[:-1], [base + "s", base + "d"]
        return [*extra, stem + "ing", base[:-2] + "ying"] if base.endswith("ie") else [*extra, stem + "ing"]
    if base.endswith("y") and base[-2] not in "aeiou":
        return [base[:-1] + "ies", base[:-1] + "ied", base + "ing"]
    plural = base + ("es" if base.endswith(("s", "sh", "ch", "x", "z", "o")) else "s")
    doubled = [base + base[-1] + "ed", base + base[-1] + "ing"]
    return [plural, base + "ed", base + "ing", *doubled]


def starts_with_verb(passage: Passage) -> bool:
    """Whether the first word is a verb; marks before it, as of bold text, are no words, so that it is not."""
    sentences = Passage(passage.raw.lstrip()[:_ENOUGH]).sentences
    tokens = tokenise(sentences[0]) if sentences else []
    if not tokens:
        return False
    first, following = tokens[0].lower(), tokens[1].lower() if len(tokens) > 1 else ""
    if first in _AUXILIARIES:
        return True
    base = _forms().get(first)
    if base is None:
        return False
    if base not in _ALSO_NOUNS or first.endswith("ing"):
        return following not in _CLITICS
    return following in _AFTER_A_VERB or following.endswith("ly")
