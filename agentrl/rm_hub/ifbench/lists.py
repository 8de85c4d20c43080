"""Closed lists of English words and names that the constraints speak of."""


def words_of(text: str) -> tuple[str, ...]:
    """The words of a text, for lists that are written as one."""
    return tuple(text.split())


def set_of(text: str) -> frozenset[str]:
    """The same as a set."""
    return frozenset(text.split())


STOP_WORDS = set_of("""
    i me my myself we our ours ourselves you your yours yourself yourselves he him his himself she her hers herself
    it its itself they them their theirs themselves what which who whom this that these those am is are was were be
    been being have has had having do does did doing a an the and but if or because as until while of at by for with
    about against between into through during before after above below to from up down in out on off over under again
    further then once here there when where why how all any both each few more most other some such no nor not only
    own same so than too very can will just should now
    s t d ll m o re ve y don ain aren couldn didn doesn hadn hasn haven isn ma mightn mustn needn shan shouldn wasn
    weren won wouldn
    """)
"""English stop words; the last two lines are what is left of contractions where an apostrophe ends a word."""

PERSON_NAMES = words_of("""
    Emma Liam Sophia Jackson Olivia Noah Ava Lucas Isabella Mason Mia Ethan Charlotte Alexander Amelia Benjamin Harper
    Leo Zoe Daniel Chloe Samuel Lily Matthew Grace Owen Abigail Gabriel Ella Jacob Scarlett Nathan Victoria Elijah
    Layla Nicholas Audrey David Hannah Christopher Penelope Thomas Nora Andrew Aria Joseph Claire Ryan Stella Jonathan
    """)
"""The names that the prompt of `count:person_names` gives."""

CONJUNCTIONS = set_of("and but for nor or so yet")
"""The coordinating conjunctions."""

PRONOUNS = set_of("""
    i me we us you he him she her it they them my mine our ours your yours his hers its their theirs
    myself ourselves yourself yourselves himself herself itself themselves
    this that these those who whom whose which what whoever whomever whatever whichever
    anybody anyone anything everybody everyone everything nobody nothing somebody someone something
    each either neither both all some any none
    """)
"""Personal, possessive, reflexive, demonstrative, interrogative and indefinite pronouns."""

NORTHERN_CAPITALS = words_of("""
    Reykjavik Helsinki Oslo Tallinn Stockholm Riga Moscow Copenhagen Vilnius Minsk Dublin Berlin Amsterdam Warsaw London
    Brussels Prague Luxembourg Paris Vienna Bratislava Budapest Vaduz Chisinau Bern Ljubljana Zagreb
    """)
"""European capitals north of 45 degrees, from north to south, as the benchmark has them (Kyiv is not among them)."""
