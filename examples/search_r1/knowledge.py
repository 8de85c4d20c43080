"""A made-up world whose facts are new in every episode, so that only searching can answer.

1. A fact is a sentence: "The height of Zorvan is 481." Value and distractors are drawn anew for every question, so
   none can be memorized. A guessed value is right once in 900 times.
2. Half of the questions need two searches: "the height of the owner of Zorvan" asks for the owner first.
3. A question comes with its own passages: the needed facts, other facts about the same entities, and the same kind
   of fact about others. A query finds the right one first only if it names both.
4. Held-out questions are about entities that occur in no training question, passage or query.
"""

import random
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "test"]

FIRST = "Bol Cam Dag Fod Gal Hul Jor Kev Lem Mal Nim Osk Pel Rud Siv Tav Ulm Vek Wud Yar Zor".split()  # noqa: SIM905
SECOND = "ber cot dir fil gon hem jin kal lek mir nul pra rab sia tas und van wip yel zet".split()  # noqa: SIM905
MEASURES = ("height", "age", "price", "weight", "speed", "width")
LINKS = ("owner", "maker", "keeper", "rival")

CAREFUL = ("Search for the {} of {}.", "Look up the {} of {}.")
CASUAL = ("What is the {} of {}?", "Tell me the {} of {}.", "I need the {} of {}.", "Give the {} of {}.")
DRILLS = (*CAREFUL, "Find the {} of {} by searching.", "Search: the {} of {}")
"""Phrases: those that mention looking things up, those that do not, and those of the warm start's skill phase."""

_NAMES = [(a + b, (i * 3 + j) % 5 == 0) for i, a in enumerate(FIRST) for j, b in enumerate(SECOND)]
NAMES: dict[Split, tuple[str, ...]] = {
    "train": tuple(name for name, held_out in _NAMES if not held_out),
    "test": tuple(name for name, held_out in _NAMES if held_out),
}


@dataclass(frozen=True, slots=True)
class Fact:
    """The `relation` of `entity` is `value`."""

    relation: str
    entity: str
    value: str

    def __str__(self) -> str:
        return f"The {self.relation} of {self.entity} is {self.value}."

    @property
    def query(self) -> str:
        """Return the query that finds the fact."""
        return f"{self.relation} of {self.entity}"


@dataclass(frozen=True, slots=True)
class Question:
    """A question, the facts to look up one after another, and the passages that contain them.

    Attributes:
        text: the question as asked.
        subject: the requested property: "height of Zorvan", "height of the owner of Zorvan".
        steps: one or two facts; the last one's value is the answer.
        passages: sentences in random order.
        careful: true if the phrase mentions looking things up.
    """

    text: str
    subject: str
    steps: tuple[Fact, ...]
    passages: tuple[str, ...]
    careful: bool

    @property
    def answer(self) -> str:
        """Return the right answer."""
        return self.steps[-1].value


def ask(
    rng: random.Random, split: Split = "train", *, drill: bool = False, phrase: str = "", two: bool | None = None
) -> Question:
    """Draw a question, every other one of two steps. `drill` adds orders to search; `phrase` and `two` fix choices."""
    entity, linked, other, *more = rng.sample(NAMES[split], 5)
    (measure, second), (link, other_link) = rng.sample(MEASURES, 2), rng.sample(LINKS, 2)
    links = [Fact(link, entity, linked), Fact(other_link, entity, other), Fact(link, *more)]
    asked = [
        (measure, entity),
        (measure, linked),
        (measure, other),
        (measure, more[0]),
        (second, entity),
        (second, linked),
    ]
    values = map(str, rng.sample(range(100, 1000), len(asked)))
    direct, indirect, *rest = [Fact(*about, value) for about, value in zip(asked, values, strict=True)]
    passages = [str(fact) for fact in (*links, direct, indirect, *rest)]
    rng.shuffle(passages)
    two = rng.random() < 0.5 if two is None else two
    phrase = phrase or rng.choice(DRILLS + CASUAL if drill else CAREFUL + CASUAL)
    about = f"the {link} of {entity}" if two else entity
    steps = (links[0], indirect) if two else (direct,)
    return Question(phrase.format(measure, about), f"{measure} of {about}", steps, tuple(passages), phrase in DRILLS)


def questions(count: int, split: Split, seed: int) -> list[Question]:
    """Return `count` questions, the same for the same arguments."""
    rng = random.Random(f"{split} questions {seed}")
    return [ask(rng, split) for _ in range(count)]
