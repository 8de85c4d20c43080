"""Demonstrations for a tiny model before it learns by reward: correct ones, then mostly wrong ones.

1. `skill` demonstrations are all correct. `habit` ones are mostly wrong: for casual phrases most answer at once and
   guess, others search for the wrong thing, stop after the first of two searches, or miscopy the value.
2. Their search results come from the environment's own search.
"""

import json
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from agentrl import Message, Sample
from examples.search_r1.env import SearchR1ToolEnv, find
from examples.search_r1.knowledge import CAREFUL, CASUAL, DRILLS, FIRST, LINKS, MEASURES, SECOND, Fact, Question, ask
from examples.tiny_models.acceptance import PhraseCheck
from examples.tiny_models.warm_start import Phase

Kind = Literal["good", "guess", "wrong_query", "stops_early", "miscopied"]

HABITS: dict[bool, dict[Kind, float]] = {
    True: {"good": 0.50, "guess": 0.25, "wrong_query": 0.08, "stops_early": 0.09, "miscopied": 0.08},
    False: {"good": 0.14, "guess": 0.66, "wrong_query": 0.06, "stops_early": 0.08, "miscopied": 0.06},
}


@dataclass(frozen=True)
class SearchLessons:
    """See `examples.tiny_models.warm_start.Lessons`; for `SearchR1Env`, or with `native` for `SearchR1ToolEnv`."""

    native: bool = False
    markup = ("<search>", "</search>", "<information>", "</information>")

    def corpus(self) -> Iterator[str]:
        """Return the words of the task. Names occur only in halves, so that held-out names are two tokens too."""
        yield from [json.dumps(self.tools()), '\n{"name": "search", "arguments": {"query": "'] * (30 * self.native)
        for _ in range(20):
            for relation in MEASURES + LINKS:
                for phrase in DRILLS + CASUAL:
                    yield f"user\n{phrase.format(relation, '')}\nassistant\n"
                    yield f"I need the {relation} of the {relation} of"
                    yield f"{relation} of"
                    yield f"Doc 1 {Fact(relation, '', '0')}\n"
                    yield f"{Fact(relation, '', '0')} I need"
            yield from (f" {half}" for half in FIRST * 20)
            yield from SECOND * 20
            yield "Nothing found."

    def tools(self, conversation: Sequence[Message] = ()) -> list[dict[str, Any]]:
        """Return the schema of native calls; the tags need none."""
        return SearchR1ToolEnv().toolbox.schemas if self.native else []

    async def demonstrations(self, phase: Phase, seed: int) -> AsyncIterator[list[Message]]:
        """Yield conversations without end."""
        rng = random.Random(f"{phase} demonstrations {seed}")
        while True:
            question = ask(rng, "train", drill=phase == "skill")
            habits = HABITS[question.careful]
            kind: Kind = "good" if phase == "skill" else rng.choices(list(habits), list(habits.values()))[0]
            yield demonstrate(question, kind, rng, native=self.native)

    async def checks(self) -> list[PhraseCheck]:
        """Return every phrase with one search and with two, 32 times each; every query and the answer are checked."""
        rng, found = random.Random("held-out demonstrations"), []
        for phrase in (CAREFUL + CASUAL) * 32:
            for two in (False, True):
                question = ask(rng, "test", phrase=phrase, two=two)
                messages = demonstrate(question, "good", rng, native=self.native)
                kind = "tool call" if self.native else "tags"
                texts = {
                    2 * at + 1: (f"query {at + 1} in {kind}", step.query) for at, step in enumerate(question.steps)
                }
                texts[len(messages) - 1] = (f"answer in {kind}", f"<answer>{question.answer}")
                found.append(PhraseCheck(phrase, messages, texts))
        return found


def demonstrate(question: Question, kind: Kind, rng: random.Random, *, native: bool = False) -> list[Message]:
    """Return one conversation about `question` by a demonstrator of the given kind."""
    messages: list[Message] = [{"role": "user", "content": question.text}]
    world = Sample(metadata={"passages": question.passages})
    steps, answer, known = question.steps, question.answer, ""
    if kind in ("guess", "wrong_query", "stops_early"):
        answer = str(rng.randrange(100, 1000))
    if kind == "guess":
        steps = ()
    if kind == "stops_early":
        steps = steps[:1]
    for step in steps:
        query = step.query
        if kind == "wrong_query" and step is steps[-1]:
            query = f"{rng.choice([other for other in MEASURES if other != step.relation])} of {step.entity}"
        messages += _search(f"<think>{known}I need the {query}.</think>", query, find(world, query), native)
        known = f"{step} "
    if kind == "miscopied":
        at = rng.randrange(len(answer))
        answer = answer[:at] + rng.choice([d for d in "123456789" if d != answer[at]]) + answer[at + 1 :]
    about = steps[-1].query if kind not in ("guess", "stops_early") else question.subject
    said = f"The {about} is {answer}."
    return [*messages, {"role": "assistant", "content": f"<think>{said}</think><answer>{answer}</answer>"}]


def _search(thought: str, query: str, found: str, native: bool) -> list[Message]:
    if not native:
        return [
            {"role": "assistant", "content": f"{thought}<search>{query}</search>"},
            {"role": "user", "content": f"<information>{found}</information>"},
        ]
    call = {"id": "call_0", "type": "function", "function": {"name": "search", "arguments": {"query": query}}}
    return [
        {"role": "assistant", "content": thought, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_0", "name": "search", "content": found},
    ]


def native() -> SearchLessons:
    """Make lessons for `SearchR1ToolEnv`."""
    return SearchLessons(native=True)
