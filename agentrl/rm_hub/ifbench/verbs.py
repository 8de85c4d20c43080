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
admire admit adopt advise affect affirm agree align allocate allow alter amend amplify analyse analyze animate
announce answer anticipate apologize appear append apply appoint appreciate approve argue arise arrange arrive
articulate ascend ask assemble assert assess assign assist assume assure attach attain attend attract author automate
avoid await awake awaken bake banish bask bathe be beat become befriend beg begin behave behold believe belong beware
bind blend bless boil borrow brainstorm breathe brew bring broaden brush build burn bury buy calculate calibrate carry
carve cast categorize cease celebrate challenge chill choose chop cite clarify clash classify clean clear click climb
close collaborate collapse collect combine come commence communicate compare compete compile complete compose compress
compute conceal conceive concentrate conclude confess configure confirm confront connect conquer consider consist
construct consult consume contain contemplate continue contribute convert convey convince cook coordinate cope correct
count craft crash crawl create cultivate customize cut dare darken decide declare decline decode decompose decrease
dedicate deduce deem deepen defeat defend define defy delegate delete deliver delve demonstrate denote deny depart
depend depict deploy deprive derive descend describe deserve destroy detect determine develop deviate devise diagnose
differ dig dilute diminish direct disappear discard discern disclose discover discuss dismiss display dispose dissolve
distinguish distribute dive divert divide dodge donate draft drag draw dream drift drink drive drop drown earn eat
edit educate elaborate elevate eliminate embark embarrass embed embody embrace emerge emphasize employ empower enable
encode encounter encourage endure enforce engage enhance enjoy enlighten enlist enslave ensnare ensure enter entertain
entrust envelop envisage envision equip erase erect erode erupt escape establish estimate evaluate evoke evolve
examine exceed excel exchange exclaim exclude execute exercise exist expand expect expel experience experiment explain
explore expose express extend extract fabricate facilitate fade fail fall familiarize fasten feed feel fetch fight
fill filter finalize find finish fit fix flee flip float flourish fly focus fold follow forbid forecast forge forget
forgive formulate forsake foster frame free freeze fulfil fulfill gain gather gaze generate get give glance gleam
glimpse glorify glow go govern grab grant grasp greet grind grow guard guess guide hack handle happen harness hasten
hear heat help herald hide highlight hire hit hold hone hope hover hurry hypothesize identify ignite ignore illuminate
illustrate imagine immerse implement imply impose impress improve include incorporate increase indicate infer
influence inform inhabit inherit initialize initiate inject innovate inquire insert insist inspect inspire install
instruct integrate intend intensify interact interpret intertwine interview introduce invent invest investigate invite
involve isolate iterate join judge jump justify keep kick kill kindle kneel knit know lament launch lay lead lean leap
learn leave lend let leverage lie lift limit linger link listen live locate look loom lose love lower lurk maintain
make manage manipulate march marry master match maximize mean measure meditate meet melt memorize mend mention merge
migrate minimize mix model modify monitor motivate mount mourn move multiply narrate navigate negotiate normalize note
notice notify nourish nurture obey observe obtain occur offer omit open operate oppose oppress optimize orchestrate
order organise organize outline overcome overlook oversee owe own pack paint parse participate partner pass pause pay
peer perceive perform permit persist persuade pick picture place plan plant play plead pledge plot plummet plunder
plunge polish ponder position possess pour practice praise pray preach precede predict prefer prepare present preserve
press pretend prevent print prioritize probe proceed process proclaim produce progress promote propose prosper protect
prove provide publish pull punish purchase pursue push put qualify quell quench question quit quote raise rank reach
react read realize rearrange reason rebuild recall receive recite recognise recognize recommend reconsider record
recount recover recreate recruit rectify recycle redefine redesign reduce refactor refer refine reflect reframe regain
regard register regulate reimagine reinforce reject rejoice relate relax release relish relive rely remain remark
remember remind remove rename render renew reopen repair repeat repent rephrase replace reply report represent request
require research resist resolve resonate respect respond rest restore restructure retain retell retire retrieve return
reuse reveal revel revere review revise revisit revolutionize rewrite ride ring rise roam roll rotate rub ruin rule
run sail save savor savour say scan scatter schedule scour scream scribble search see seek seem seize select sell send
sense separate serve set settle sew shake shape share shatter shed shift shine shiver shoot show shudder shut simplify
simulate sing sink sit skip slay sleep slice slide slip smile sneak soar solve soothe sort sow spark speak specify
speculate spell spend spill spin split spot spray spread sprinkle squeeze stand stare start state stay steal steer
step stir stitch stop store strengthen stretch strike strive structure struggle study stumble submit substitute
subtract succeed suffer suggest sum summarise summarize summon supply support suppose suppress surf surpass surrender
surround survive suspect sustain swallow swap swear sweep swim swing swirl switch synthesize tackle tailor take talk
tame taste teach tear tell tempt tend terrify test testify thank think thrive throw tie toil touch trace track trade
train transcend transcribe transfer transform transition translate transmit transport travel traverse treat tremble
trigger trim trust try tune turn twirl type unbox uncover undergo underline underscore understand undertake undo
unearth unfold unify unite unleash unlock unmask unravel unveil unwind update upgrade uphold use usher utilise utilize
utter validate value vanish vary venture verify view visit visualise visualize vote vow wail wait wake walk wander
want warm warn wash waste watch weave weep weigh welcome whirl whisper wield win wish withdraw wither witness wonder
work worship wrap wrestle write yearn yield
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
    answer attach author beat bow bridge burn burst call cast cause chain challenge change chart chat check cheer
    clean clear close collapse color colour compliment contract contrast count cover craft cross cry cut dance dash
    deal delay delight demand design despair display draft drag draw dream drift drink drive drop engineer estimate
    exchange exercise exile experience experiment exploit express fall fear feed feel fight fill filter find finish
    fit fix flow focus fold forecast forge form frame free fuel fund gain gaze glance glimpse glow google grant grasp
    guard guess guide hack handle harness haunt heat help highlight hire hit hold hope hunt increase influence
    interview journey judge jump kick kill label laugh lay lead lean leap leverage lick lie lift limit link list live
    log look love lower map march mark mask master match matter mean measure mind mine mirror model monitor mount move
    nail name need nod note notice offer open order outline own pack paint partner pass pause pay pick picture pin
    pity place plan plant play pledge plot point polish position pour practice praise present press print probe
    process produce progress pump purchase push question quote rally rank rate reach reason record register reign
    reject release rent repair reply report request rescue research respect rest return review ride ring rise rock
    roll rub ruin rule run sail sample scale scan schedule score scream screen seal search sense set shake shape share
    shed shelter shift shine shoulder shout show sigh silence sink sketch sleep slice slide slip smell smile snap sort
    source span spark spell spin split spot spray spread stamp stand start state stay step stir stitch stop store
    stretch strike structure struggle study subject sum supply support surf surface surge suspect swap sweep swim
    swing switch tag talk target task taste tear test thank tie time tip title top torment torture touch tour trace
    track trade train transfer transition transport trap travel treat trigger trim triumph trust try tune turn twist
    type update upgrade use value venture view visit voice vote wait wake walk want wash waste watch water welcome
    whisper win wing wish witness wonder work worship yield
""")
)
"""Verbs whose base form is as likely a noun or an adjective."""

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
    if base not in _ALSO_NOUNS or (first != base and first.endswith(("ed", "ing"))):
        return following not in _CLITICS
    return following in _AFTER_A_VERB or following.endswith("ly")
