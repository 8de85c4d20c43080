"""Conversations for the demo's warm start.

1. `skill` demonstrations are all correct. `habit` ones are mostly wrong: for casual phrases two thirds answer without
   the tool and guess, others name the argument wrongly, mistype the expression or miscopy the result.
2. Tool results in them come from running the environment's own tools, so the model sees the same texts later.
"""

import json
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Literal

from agentrl.demo.task import PHRASES, SHAPES, CalculatorEnv, Problem, calculator, make_problem
from agentrl.sample import Message
from agentrl.tools import Toolbox
from examples.tiny_models.acceptance import PhraseCheck
from examples.tiny_models.warm_start import Phase

Kind = Literal["good", "guess", "wrong_name", "mistyped", "miscopied"]

_HABITS: dict[bool, dict[Kind, float]] = {
    True: {"good": 0.60, "guess": 0.15, "wrong_name": 0.08, "mistyped": 0.09, "miscopied": 0.08},
    False: {"good": 0.14, "guess": 0.66, "wrong_name": 0.10, "mistyped": 0.05, "miscopied": 0.05},
}


class CalculatorLessons:
    """The calculator's lessons for a tiny model; see `examples.tiny_models.warm_start.Lessons`."""

    markup = ()

    def corpus(self) -> Iterator[str]:
        """Return the words of the task, errors of the tool included."""
        rng = random.Random("corpus")
        schemas = json.dumps(CalculatorEnv().toolbox.schemas[0])
        for number in range(600):
            problem = make_problem(rng, "train", drill=bool(number % 2))
            yield f"system\n{schemas}\nuser\n{problem.question}"
            yield "assistant\n"
            yield f'\n{{"name": "calculator", "arguments": {{"expression": "{problem.expression}"}}}}\n'
            yield f'\n{{"name": "calculator", "arguments": {{"expr": "{problem.expression}"}}}}\n'
            yield f"\n{problem.answer}\n"
            yield "Error: argument `expression` is missing (expected string); unknown argument `expr`; the arguments of "
            yield "`calculator` are `expression`\n"

    def tools(self, conversation: Sequence[Message] = ()) -> list[dict[str, Any]]:
        """Return the calculator's schema."""
        return CalculatorEnv().toolbox.schemas

    async def demonstrations(self, phase: Phase, seed: int) -> AsyncIterator[list[Message]]:
        """Yield conversations without end: user, assistant, then perhaps tool and assistant."""
        rng = random.Random(f"{phase} demonstrations {seed}")
        toolbox = CalculatorEnv().toolbox
        while True:
            problem = make_problem(rng, "train", drill=phase == "skill")
            habits = _HABITS[problem.careful]
            kind: Kind = "good" if phase == "skill" else rng.choices(list(habits), list(habits.values()))[0]
            yield await demonstrate(problem, kind, rng, toolbox)

    async def checks(self) -> list[PhraseCheck]:
        """Return every phrase with every shape of expression, 24 times each."""
        rng = random.Random("held-out demonstrations")
        asked = [(phrase, shape) for phrase in PHRASES for shape in SHAPES] * 24
        return [
            await check(phrase, shape, make_problem(rng, "test", phrase=phrase, shape=shape)) for phrase, shape in asked
        ]


async def check(phrase: str, shape: str, problem: Problem) -> PhraseCheck:
    """Return the right conversation about `problem`; the expression in the call and the answer are checked."""
    messages = await demonstrate(problem, "good", random.Random(0), CalculatorEnv().toolbox)
    texts = {1: (f"call {shape}", problem.expression), 3: ("answer", str(problem.answer))}
    return PhraseCheck(phrase, messages, texts)


async def demonstrate(problem: Problem, kind: Kind, rng: random.Random, toolbox: Toolbox) -> list[Message]:
    """Return one conversation about `problem` by a demonstrator of the given kind."""
    messages: list[Message] = [{"role": "user", "content": problem.question}]
    if kind == "guess":
        return [*messages, _answer(_guess(rng, problem.answer))]
    expression = _with_one_digit_changed(rng, problem.expression) if kind == "mistyped" else problem.expression
    arguments = {"expr" if kind == "wrong_name" else "expression": expression}
    outcome = await toolbox.run(calculator.name, arguments)
    result = outcome.text
    if kind == "wrong_name":
        answer = str(_guess(rng, problem.answer))
    else:
        answer = _with_one_digit_changed(rng, result) if kind == "miscopied" else result
    call = {"id": "call_0", "type": "function", "function": {"name": calculator.name, "arguments": arguments}}
    return [
        *messages,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_0", "name": calculator.name, "content": result},
        _answer(answer),
    ]


def _answer(value: int | str) -> Message:
    return {"role": "assistant", "content": f"<answer>{value}</answer>"}


def _guess(rng: random.Random, answer: int) -> int:
    """Return a wrong number with as many characters as the answer."""
    digits = len(str(answer))
    while (guess := rng.randrange(10 ** (digits - 1), 10**digits)) == answer:
        pass
    return guess


def _with_one_digit_changed(rng: random.Random, text: str) -> str:
    position = rng.choice([i for i, character in enumerate(text) if character.isdigit()])
    digit = rng.choice([d for d in "0123456789" if d != text[position]])
    return f"{text[:position]}{digit}{text[position + 1 :]}"
