"""The calculator task: tool, reward, and a held-out split without overlap."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.demo.data import TEST_PROBLEMS, write_train_and_test
from agentrl.demo.task import (
    HELD_OUT_OPERANDS,
    TRAIN_OPERANDS,
    CalculatorEnv,
    evaluate,
    explain,
    make_problem,
    make_problems,
    score,
)
from agentrl.sample import Sample, Status

EXPRESSIONS = st.recursive(
    st.integers(-99, 99).map(str),
    lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map(lambda x: f"({x[0]}{x[1]}{x[2]})"),
    max_leaves=4,
)


@given(EXPRESSIONS)
def test_evaluate_agrees_with_python(expression: str) -> None:
    if len(expression) <= 40:
        assert evaluate(expression) == eval(expression)  # noqa: S307 - digits, brackets and + - * only


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "1/2",
        "2**9",
        "x",
        "__import__('os')",
        "1,2",
        "True",
        "1.5",
        "'a'*9",
        "~1",
        "9" * 41,
        "(" * 39,
        "1 if 1 else 2",
        "999999999*999999999",
        "lambda: 1",
        "\x00",
        "9999999999999",
    ],
)
def test_evaluate_refuses(expression: str) -> None:
    with pytest.raises(ValueError):
        evaluate(expression)


def operands(text: str) -> set[int]:
    return {int(number) for number in re.findall(r"\d+", text)}


def test_held_out_operands_never_occur_in_training() -> None:
    assert not set(HELD_OUT_OPERANDS) & set(TRAIN_OPERANDS)
    rng = random.Random(0)
    for _ in range(2000):
        assert operands(make_problem(rng, "train").question) <= set(TRAIN_OPERANDS)
        assert operands(make_problem(rng, "train", drill=True).question) <= set(TRAIN_OPERANDS)
        assert operands(make_problem(rng, "test").question) <= set(HELD_OUT_OPERANDS)


def test_problems_are_different_and_the_same_for_the_same_seed() -> None:
    problems = make_problems(300, "train", 1)
    assert len({problem.question for problem in problems}) == 300
    assert problems == make_problems(300, "train", 1) != make_problems(300, "train", 2)


def test_prompt_files(tmp_path: Path) -> None:
    train, test = write_train_and_test(tmp_path, train_count=32, seed=5)
    rows = [[json.loads(line) for line in path.read_text().splitlines()] for path in (train, test)]
    assert [len(part) for part in rows] == [32, TEST_PROBLEMS]
    for row in rows[1]:
        expression = re.search(r"\d[\d*+-]*\d", row["prompt"][0]["content"])
        assert expression is not None
        assert row["label"] == str(evaluate(expression[0]))
    assert write_train_and_test(tmp_path / "again", train_count=32, seed=6)[1].read_bytes() == test.read_bytes()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("<answer>42</answer>", 1.0),
        ("so <answer> 42 </answer>.", 1.0),
        ("<answer>-42</answer>", 0.0),
        ("42", 0.0),
        ("<answer>42", 0.0),
        ("<answer>42</answer><answer>42</answer>", 0.0),
        ("<answer>43</answer><answer>42</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_score(text: str, value: float) -> None:
    assert score(text, "42") == value


async def test_reward_looks_at_the_last_turn_only() -> None:
    env, answer = CalculatorEnv(), {"role": "assistant", "content": "<answer>42</answer>"}
    messages = [{"role": "user", "content": "What?"}, answer]
    done = Sample(label="42", status=Status.COMPLETED, metadata={"messages": messages})
    assert await env.reward(done) == 1.0
    cut = Sample(label="42", status=Status.TRUNCATED, metadata={"messages": messages})
    assert await env.reward(cut) == 0.0
    tool_last = [*messages, {"role": "tool", "content": "<answer>42</answer>"}]
    assert await env.reward(Sample(label="42", metadata={"messages": tool_last})) == 0.0
    assert await env.reward(Sample(label=42, response="x</tool_response>\n<answer>42</answer>")) == 1.0


def told(*messages: dict[str, Any], status: Status = Status.COMPLETED) -> Sample:
    asked = {"role": "user", "content": "How much is 10*17+24?"}
    return Sample(reward=0.0, status=status, metadata={"messages": [asked, *messages]})


def called(result: str, **arguments: str) -> list[dict[str, Any]]:
    call = {"id": "c", "type": "function", "function": {"name": "calculator", "arguments": json.dumps(arguments)}}
    return [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": result}]


ANSWER = {"role": "assistant", "content": "<answer>195</answer>"}


@pytest.mark.parametrize(
    ("sample", "mistake"),
    [
        (told(ANSWER), "answer without a call"),
        (told({"role": "assistant", "content": '<tool_call>\n{"name": "calc'}), "malformed call"),
        (told(*called("Error: argument `expression` is missing; x", expr="10*17+24"), ANSWER), "refused call"),
        (told(*called("195", expression="10*17+25"), ANSWER), "call with another expression"),
        (told(*called("194", expression="10*17+24"), ANSWER), "another answer than the result"),
        (told(*called("194", expression="10*17+24"), status=Status.TRUNCATED), "cut off"),
    ],
)
def test_a_failure_is_explained_by_its_phrase_and_its_mistake(sample: Sample, mistake: str) -> None:
    phrase, said = explain(sample)
    assert phrase == "How much is {}?"
    assert said.startswith(mistake)


async def test_the_tool_answers_and_explains() -> None:
    toolbox = CalculatorEnv().toolbox
    assert (await toolbox.run("calculator", {"expression": "12*34-5"})).text == "403"
    assert (await toolbox.run("calculator", {"expression": "1/2"})).text == (
        "Error: only integers, + - * and brackets are allowed"
    )
