"""What the warm start learns from: conversations, and the same as `Sample`s with a loss mask.

1. `skill` demonstrations are all correct. `habit` ones are mostly not: for casual phrases two thirds answer without
   the tool and guess, others name the argument wrongly, mistype the expression or miscopy the result.
2. Tool results in them come from running the environment's own tools, so the model sees the same texts later.
3. The assistant's turns, end token included, have loss mask 1, everything else 0. A tool call is written exactly as
   the chat template writes it.
"""

import json
import random
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Literal

from agentrl.demo.task import CalculatorEnv, Problem, calculator, make_problem
from agentrl.sample import Message, Sample, Status
from agentrl.tools import Toolbox

if TYPE_CHECKING:
    from agentrl.chat import Chat

Phase = Literal["skill", "habit"]
Kind = Literal["good", "guess", "wrong_name", "mistyped", "miscopied"]

_HABITS: dict[bool, dict[Kind, float]] = {
    True: {"good": 0.60, "guess": 0.15, "wrong_name": 0.08, "mistyped": 0.09, "miscopied": 0.08},
    False: {"good": 0.14, "guess": 0.66, "wrong_name": 0.10, "mistyped": 0.05, "miscopied": 0.05},
}


async def demonstrations(phase: Phase, seed: int) -> AsyncIterator[list[Message]]:
    """An endless stream of conversations: user, assistant, then perhaps tool and assistant."""
    rng = random.Random(f"{phase} demonstrations {seed}")
    toolbox = CalculatorEnv().toolbox
    while True:
        problem = make_problem(rng, "train", drill=phase == "skill")
        habits = _HABITS[problem.careful]
        kind: Kind = "good" if phase == "skill" else rng.choices(list(habits), list(habits.values()))[0]
        yield await demonstrate(problem, kind, rng, toolbox)


async def demonstrate(problem: Problem, kind: Kind, rng: random.Random, toolbox: Toolbox) -> list[Message]:
    """One conversation about `problem` by a demonstrator of the given kind."""
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


def assistant_text(message: Message) -> str:
    """An assistant message as the model writes it, without the end token: content, then Hermes tool calls."""
    parts = [message["content"]] if message.get("content") else []
    for call in message.get("tool_calls", ()):
        name, arguments = call["function"]["name"], json.dumps(call["function"]["arguments"])
        parts.append(f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>')
    return "\n".join(parts)


def to_sample(chat: "Chat", messages: list[Message], index: int = 0) -> Sample:
    """The conversation as a completed `Sample` that a supervised loss can train on; log-probs are 0."""
    start = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
    session = chat.session(messages[:start], CalculatorEnv().toolbox.schemas)
    sample = Sample(index=index, group_index=index, prompt=messages[:start], reward=0.0)
    sample.set_prompt_tokens(session.prompt_ids)
    for turn, message in enumerate(messages[start::2], 1):
        text = assistant_text(message)
        ids = [*chat.encode(text), chat.stop_token_ids[0]]
        session.sampled(ids)
        sample.append_model(ids, [0.0] * len(ids), "0", text=text, turn=turn)
        shown = messages[start + 2 * turn - 1 : start + 2 * turn]
        if shown:
            delta = session.extend(shown)
            sample.append_observation([*delta.close, *delta.env], turn=turn)
    sample.status = Status.COMPLETED
    return sample


def corpus() -> Iterator[str]:
    """Texts to train the demo's tokenizer on: the words of the task, so that each becomes a token or two."""
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


def _answer(value: int | str) -> Message:
    return {"role": "assistant", "content": f"<answer>{value}</answer>"}


def _guess(rng: random.Random, answer: int) -> int:
    """A wrong number with as many characters as the answer."""
    digits = len(str(answer))
    while (guess := rng.randrange(10 ** (digits - 1), 10**digits)) == answer:
        pass
    return guess


def _with_one_digit_changed(rng: random.Random, text: str) -> str:
    position = rng.choice([i for i, character in enumerate(text) if character.isdigit()])
    digit = rng.choice([d for d in "0123456789" if d != text[position]])
    return f"{text[:position]}{digit}{text[position + 1 :]}"
