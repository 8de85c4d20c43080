"""Demonstrations for the tiny model before reinforcement learning.

1. `skill` demonstrations are all correct: code in a tool call, its output, the answer.
2. `habit` demonstrations are mostly wrong: more than half guess without any code, others leave a bracket open, mistype
   a number or miscopy the result. Reinforcement learning has to correct this.
3. Outputs of tool calls are written here by hand, in the tool's own words: thousands of sandbox calls would take
   long. A test compares the two.
"""

import json
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

from agentrl import Message
from examples.retool.data import KINDS, TRAIN_NUMBERS, Problem, make_problem
from examples.retool.env import RetoolEnv
from examples.tiny_models.acceptance import PhraseCheck
from examples.tiny_models.warm_start import Phase

DemonstrationKind = Literal["good", "guess", "broken", "mistyped", "miscopied"]

_HABITS: dict[DemonstrationKind, float] = {
    "good": 0.34,
    "guess": 0.60,
    "broken": 0.03,
    "mistyped": 0.015,
    "miscopied": 0.015,
}


class PythonLessons:
    """The code interpreter's lessons for a tiny model; see `examples.tiny_models.warm_start.Lessons`."""

    markup = ()

    def corpus(self) -> Iterator[str]:
        """Return the words of the task, so that each becomes a token or two."""
        rng = random.Random("corpus")
        for _ in range(600):
            problem = make_problem(rng)
            yield f"system\n{json.dumps(self.tools()[0])}\nuser\n{problem.question}"
            yield f'assistant\n{{"name": "python", "arguments": {{"code": "print({problem.expression})"}}}}\n'
            yield f"\n{problem.answer}\nThe answer is \\boxed{{{problem.answer}}}.\n{broken_result(problem)}\n"

    def tools(self, conversation: Sequence[Message] = ()) -> list[dict[str, Any]]:
        """Return the interpreter's schema."""
        return RetoolEnv().toolbox.schemas

    async def demonstrations(self, phase: Phase, seed: int) -> AsyncIterator[list[Message]]:
        """Yield conversations without end: user, assistant, then perhaps tool and assistant."""
        rng = random.Random(f"{phase} demonstrations {seed}")
        while True:
            problem = make_problem(rng)
            kind = "good" if phase == "skill" else rng.choices(list(_HABITS), list(_HABITS.values()))[0]
            yield demonstrate(problem, kind, rng)

    async def checks(self) -> list[PhraseCheck]:
        """Return every kind of question, 64 times each; the code and the answer are checked."""
        rng, found = random.Random("held-out demonstrations"), []
        for kind in KINDS * 64:
            problem = replace(make_problem(rng, "test"), kind=kind)
            texts = {1: ("code", f"print({problem.expression})"), 3: ("answer", f"{{{problem.answer}}}")}
            found.append(PhraseCheck(kind.question, demonstrate(problem, "good", rng), texts))
        return found


def demonstrate(problem: Problem, kind: DemonstrationKind, rng: random.Random) -> list[Message]:
    """Return one conversation about `problem` by a demonstrator of the given kind."""
    messages: list[Message] = [{"role": "user", "content": problem.question}]
    if kind == "guess":
        return [*messages, _answer(_guess(rng, problem.answer))]
    done = _with_another_number(rng, problem) if kind == "mistyped" else problem
    code = f"print({done.expression})"
    if kind == "broken":
        code, result, answer = code[:-1], broken_result(done), _guess(rng, done.answer)
    else:
        result = str(done.answer)
        answer = _with_another_digit(rng, result) if kind == "miscopied" else result
    call = {"id": "call_0", "type": "function", "function": {"name": "python", "arguments": {"code": code}}}
    return [
        *messages,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_0", "name": "python", "content": result},
        _answer(answer),
    ]


def broken_result(problem: Problem) -> str:
    """Return the tool's error for code that lacks its last bracket."""
    shown = f'  File "<cell 1>", line 1\n    print({problem.expression}\n         ^\n'
    return f"Error: the code failed\n{shown}SyntaxError: '(' was never closed"


def _answer(value: str) -> Message:
    return {"role": "assistant", "content": f"The answer is \\boxed{{{value}}}."}


def _guess(rng: random.Random, answer: int) -> str:
    """Return a wrong number with as many digits as the answer."""
    digits = len(str(abs(answer)))
    while (guess := rng.randrange(10 ** (digits - 1), 10**digits)) == answer:
        pass
    return str(guess)


def _with_another_number(rng: random.Random, problem: Problem) -> Problem:
    numbers = list(problem.numbers)
    numbers[rng.randrange(problem.kind.expression.count("{}"))] = rng.choice(TRAIN_NUMBERS)
    return Problem(problem.kind, (numbers[0], numbers[1], numbers[2]))


def _with_another_digit(rng: random.Random, text: str) -> str:
    position = rng.choice([i for i, character in enumerate(text) if character.isdigit()])
    digit = rng.choice([d for d in "0123456789" if d != text[position]])
    return f"{text[:position]}{digit}{text[position + 1 :]}"
