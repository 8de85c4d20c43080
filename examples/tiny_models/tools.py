"""Lessons of `agentrl init --skilled`: a tiny model calls the one tool that its prompt offers and copies its answer.

1. Names of tools and arguments, subjects and results are drawn anew for every conversation. So the
   model learns to read the schema and to copy, not the words. A tool has one text argument.
2. First come lists of words to repeat: with these lists, copying is learned in a fraction of the time.
"""

import json
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import count
from typing import Any

from agentrl.sample import Message
from examples.tiny_models.acceptance import PhraseCheck
from examples.tiny_models.warm_start import Phase

_LISTS = 2400
"""Conversations that repeat a list, before the first call of a tool."""

_VERBS = ("look_up", "search", "find", "get", "lookup", "fetch", "query", "read")
_NOUNS = ("city", "population", "price", "weather", "country", "word", "name", "capital", "fact", "item", "value")
_ARGUMENTS = ("city", "query", "name", "word", "item", "place", "country", "text", "key", "topic", "q")
_WHAT = ("population", "price", "weather", "capital", "size", "age", "height", "value", "name", "colour")
_DESCRIPTIONS = ("{} of a {}.", "The {} of a {}.", "Look up the {} of a {}.", "Get {} by {}.")
_ABOUT = ("its English name", "the {}", "name of the {}", "what to look for")
_QUESTIONS = (
    *("How many people live in {}?", "What is the {what} of {}?", "What is {}?", "Tell me the {what} of {}."),
    *("How much is {}?", "Look up {}.", "{what} of {}?", "Find the {what} of {}.", "Where is {}?"),
)
_NAMES = """
Amsterdam Athens Bangkok Barcelona Beijing Berlin Bern Bogota Boston Brussels Budapest Cairo Chicago Copenhagen Delhi Dublin
Edinburgh Florence Geneva Hamburg Helsinki Istanbul Jakarta Kyiv Lima Lisbon London Madrid Manila Melbourne Milan Montreal
Moscow Mumbai Munich Nairobi Naples Oslo Paris Porto Prague Quito Riga Rome Santiago Seoul Singapore Sofia Stockholm Sydney
Tallinn Tokyo Toronto Venice Vienna Warsaw Zurich Austria Belgium Brazil Canada Chile China Denmark Egypt England Finland
France Germany Greece India Ireland Italy Japan Kenya Mexico Norway Peru Poland Portugal Russia Spain Sweden Turkey Alice Bob
Carol Dave Emma Frank Grace Mars Venus Jupiter Saturn
"""
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_UNITS = (" million", "", " km", " people", " euros", "%", " degrees", " thousand")


class ToolLessons:
    """See `examples.tiny_models.warm_start.Lessons`."""

    markup = ()

    def corpus(self) -> Iterator[str]:
        """Return the words of schemas, questions and answers; names only in parts."""
        rng = random.Random("corpus")
        for _ in range(400):
            function, messages = _tool(rng), _asked(rng, "tool", "argument")
            yield f"system\n{json.dumps(_schema(function))}\nuser\n{messages[0]['content']}"
            yield f'assistant\n\n{{"name": "{function["name"]}", "arguments": {{"'
            yield messages[-1]["content"]
        yield from _NAMES.split() * 40

    def tools(self, conversation: Sequence[Message] = ()) -> list[dict[str, Any]]:
        """Return the schema of the tool that the conversation is about."""
        return [_schema(message["offers"]) for message in conversation if "offers" in message]

    async def demonstrations(self, phase: Phase, seed: int) -> AsyncIterator[list[Message]]:
        """Yield conversations without end: lists, then one to three questions that the same tool answers."""
        rng = random.Random(f"{phase} demonstrations {seed}")
        for number in count():
            yield _repeated(rng) if number < _LISTS and number % 2 else conversation(rng)

    async def checks(self) -> list[PhraseCheck]:
        """Return every form of question, 64 times each; the whole call and the answer are checked."""
        rng, found = random.Random("held-out demonstrations"), []
        for question in _QUESTIONS * 64:
            messages = conversation(rng, 1, question)
            function = messages[1]["tool_calls"][0]["function"]
            ((argument, value),) = function["arguments"].items()
            call = f'{function["name"]}", "arguments": {{"{argument}": "{value}'
            found.append(PhraseCheck(question, messages, {1: ("call", call), 3: ("answer", messages[3]["content"])}))
        return found


def conversation(rng: random.Random, most: int = 5, question: str = "") -> list[Message]:
    """Return some questions and their answers by a tool, which the first message `offers`; `question` fixes forms."""
    function = _tool(rng)
    (argument,) = function["parameters"]["properties"]
    messages = [m for _ in range(rng.randint(1, most)) for m in _asked(rng, function["name"], argument, question)]
    return [{**messages[0], "offers": function}, *messages[1:]]


def _repeated(rng: random.Random) -> list[Message]:
    words = "".join(_word(rng) for _ in range(rng.randint(15, 35)))
    return [{"role": "user", "content": words}, {"role": "assistant", "content": words}]


def _asked(rng: random.Random, tool: str, argument: str, question: str = "") -> list[Message]:
    subject, found = _subject(rng), _found(rng)
    question = (question or rng.choice(_QUESTIONS)).format(subject, what=rng.choice(_WHAT))
    call = {"id": "call_0", "type": "function", "function": {"name": tool, "arguments": {argument: subject}}}
    return [
        {"role": "user", "content": question[0].upper() + question[1:]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_0", "name": tool, "content": found},
        {"role": "assistant", "content": f"{subject}: {found}"},
    ]


def _schema(function: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": function}


def _tool(rng: random.Random) -> dict[str, Any]:
    verb, noun, argument = rng.choice(_VERBS), rng.choice(_NOUNS), rng.choice(_ARGUMENTS)
    said = {"description": rng.choice(_ABOUT).format(argument)} if rng.random() < 0.7 else {}
    properties = {argument: {"type": "string", **said}}
    return {
        "name": rng.choice((verb, f"{verb}_{noun}", f"{noun}_{verb}")),
        "description": rng.choice(_DESCRIPTIONS).format(rng.choice(_WHAT), noun).capitalize(),
        "parameters": {"type": "object", "properties": properties, "required": [argument]},
    }


def _word(rng: random.Random) -> str:
    return rng.choice((_subject(rng), _found(rng), rng.choice(_WHAT), rng.choice(_VERBS)))


def _subject(rng: random.Random) -> str:
    """Return a name, of parts that are tokens or of letters, or a small sum."""
    kind = rng.random()
    if kind < 0.1:
        return rng.choice("+-*").join(str(rng.randint(2, 99)) for _ in range(2))
    if kind < 0.2:
        return "".join(rng.choices(_LETTERS, k=rng.randint(3, 6))).capitalize()
    return " ".join(rng.choices(_NAMES.split(), k=1 if kind < 0.8 else 2))


def _found(rng: random.Random) -> str:
    if rng.random() < 0.2:
        return rng.choice((_subject(rng), "unknown"))
    number = rng.choice((str(rng.randint(0, 999)), f"{rng.randint(0, 99)}.{rng.randint(0, 9)}"))
    return number + rng.choice(_UNITS)
