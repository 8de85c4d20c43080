"""Arithmetic with a calculator: problems, the tool, the environment.

1. An answer counts only as `<answer>N</answer>` in the last turn, exactly once, with N exactly right.
2. Operands are two-digit numbers. `HELD_OUT_OPERANDS` occur in no training problem, and `TRAIN_OPERANDS` in no held-out
   problem.
3. Some phrases mention the tool or care. The shipped model rarely uses the tool for the other phrases."""

import ast
import json
import operator
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from agentrl.envs import Environment
from agentrl.sample import Sample, Status
from agentrl.tools import ToolError, tool

Split = Literal["train", "test"]

HELD_OUT_OPERANDS = tuple(n for n in range(11, 100) if n % 7 == 3)
TRAIN_OPERANDS = tuple(n for n in range(11, 100) if n % 7 != 3)

SHAPES = ("{}*{}+{}", "{}*{}-{}", "{}+{}*{}", "{}*{}")
_CAREFUL = ("Use the calculator: {}", "Work out {} with care.")
_CASUAL = ("What is {}?", "Compute {}.", "How much is {}?", "Give the value of {}.")
PHRASES = _CAREFUL + _CASUAL
_ORDERS = ("Run {} on the calculator.", "Tool: {}", "Please use the tool to find {}.", "With the calculator, {} is?")
_DRILLS = _CAREFUL + _ORDERS

_OPERATIONS: dict[type, Callable[..., int]] = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
_MAX_CHARS, _MAX_VALUE = 40, 10**12
_EXPRESSION = re.compile(r"\d[\d*+-]*\d")
_ANSWER = re.compile(r"<answer>\s*(.*?)\s*</answer>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem."""

    question: str  # as asked
    expression: str
    answer: int
    careful: bool  # the phrase mentions care or the tool


def evaluate(expression: str) -> int:
    """Return the value of an expression of integers, `+`, `-`, `*` and brackets. Raises ValueError: the expression is
    longer than 40 characters, contains anything else, or leaves the range of 12 digits."""
    if len(expression) > _MAX_CHARS:
        raise ValueError(f"the expression is longer than {_MAX_CHARS} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError("the expression cannot be read") from error
    return _value(tree.body)


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        value = node.value
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        value = _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = -_value(node.operand)
    else:
        raise ValueError("only integers, + - * and brackets are allowed")
    if abs(value) > _MAX_VALUE:
        raise ValueError("the value is too large")
    return value


@tool(timeout=5, max_output_chars=100)
async def calculator(expression: str) -> str:
    """Evaluate an expression."""
    # A plain function would run in a worker thread, and the switch takes far longer than the evaluation.
    try:
        return str(evaluate(expression))
    except ValueError as error:
        raise ToolError(str(error)) from error


class CalculatorEnv(Environment):
    """The task of one arithmetic problem, with a calculator as tool. Reward 1 for the exact answer, else 0."""

    tools = (calculator,)
    max_turns = 3

    async def reward(self, sample: Sample) -> float:
        """Return 1.0 for the exact answer, and 0.0 for any other answer or a truncated trajectory."""
        return 0.0 if sample.status is Status.TRUNCATED else score(final_text(sample), str(sample.label))


def score(text: str, label: str) -> float:
    """Return 1.0 if `text` contains exactly one `<answer>` and it equals the label, else 0.0."""
    answers = _ANSWER.findall(text)
    return float(len(answers) == 1 and answers[0] == label)


def final_text(sample: Sample) -> str:
    """Return the last turn's text: from the recorded conversation, or else the text after the last tool result."""
    if messages := sample.metadata.get("messages"):
        return str(messages[-1].get("content") or "") if messages[-1]["role"] == "assistant" else ""
    return sample.response.rpartition("</tool_response>")[2]


def explain(sample: Sample) -> tuple[str, str]:
    """Return the phrase of a trajectory's question, and the mistake if its answer is wrong."""
    question, *said = [message for message in sample.metadata["messages"] if message["role"] != "system"]
    text = str(question["content"])
    expression = found[0] if (found := _EXPRESSION.search(text)) else ""
    phrase = text.replace(expression, "{}") if expression else text
    calls = [call for message in said for call in message.get("tool_calls") or ()]
    results = [str(message["content"]) for message in said if message["role"] == "tool"]
    if sample.status is Status.TRUNCATED:
        return phrase, "cut off"
    if not calls:
        broken = any("<tool_call>" in str(message.get("content")) for message in said)
        return phrase, "malformed call" if broken else "answer without a call"
    if not any(not result.startswith("Error") for result in results):
        return phrase, f"refused call ({results[-1].partition(';')[0] if results else 'no result'})"
    given = (call["function"]["arguments"] for call in calls)
    if not any((json.loads(each) if isinstance(each, str) else each).get("expression") == expression for each in given):
        return phrase, "call with another expression"
    return phrase, "another answer than the result"


def make_problem(
    rng: random.Random, split: Split = "train", *, drill: bool = False, phrase: str = "", shape: str = ""
) -> Problem:
    """Return a random problem with operands of `split`. `drill`: also draw from orders to use the tool (the skill phase
    of the warm start). `phrase` and `shape` (of the expression) are random by default."""
    operands = TRAIN_OPERANDS if split == "train" else HELD_OUT_OPERANDS
    expression = (shape or rng.choice(SHAPES)).format(*rng.choices(operands, k=3))
    phrase = phrase or rng.choice(_DRILLS + _CASUAL if drill else PHRASES)
    return Problem(phrase.format(expression), expression, evaluate(expression), phrase in _DRILLS)


def make_problems(count: int, split: Split, seed: int) -> list[Problem]:
    """Return `count` different problems; the same seed gives the same problems."""
    rng = random.Random(f"{split} problems {seed}")
    problems: dict[str, Problem] = {}
    while len(problems) < count:
        problem = make_problem(rng, split)
        problems.setdefault(problem.question, problem)
    return list(problems.values())
