"""gsm8k: the reference solutions in many forms, wrong answers, labels, and hostile text."""

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import GraderFailure
from agentrl.rm_hub import grade
from agentrl.rm_hub.reading import numbers
from tests.support.corpus import gsm8k_solutions
from tests.support.nightly import nightly


def solutions() -> list[tuple[str, str, str]]:
    """Return (whole solution, its working without annotations, its number) of each question."""
    rows = []
    for whole in gsm8k_solutions():
        working, _, number = whole.rpartition("####")
        rows.append((whole, re.sub(r"<<.*?>>", "", working).strip(), number.strip()))
    return rows


FORMS: dict[str, Callable[[str, str, str], str]] = {
    "solution": lambda whole, working, number: whole,
    "number": lambda whole, working, number: number,
    "sentence": lambda whole, working, number: f"{working}\nThe answer is {number}.",
    "box": lambda whole, working, number: f"{working}\n\n$$\\boxed{{{number}}}$$",
    "money": lambda whole, working, number: f"{working}\n\n**Final Answer:** ${number}.00",
    "bold": lambda whole, working, number: f"{working}\n\nThe answer is **{number}** of them.",
    "tags": lambda whole, working, number: f"<think>{working}</think>\n<answer>{number}</answer>",
    "german": lambda whole, working, number: f"{working}\nDie Antwort ist {number}.",
    "corrected": lambda whole, working, number: f"The answer is 987123. Wait, that is wrong.\n{working}\n#### {number}",
}


def test_all_reference_solutions_are_there() -> None:
    assert len(solutions()) == 1319


@pytest.mark.parametrize("form", nightly(FORMS, 1))
def test_every_reference_answer_is_accepted(form: str) -> None:
    refused = [
        number
        for whole, working, number in solutions()
        if not grade("gsm8k", FORMS[form](whole, working, number), whole).correct
    ]
    assert refused == []


@pytest.mark.parametrize("change", [1, -1, 10])
def test_every_changed_answer_is_refused(change: int) -> None:
    for whole, working, number in solutions()[::3]:
        wrong = int(number.replace(",", "")) + change
        assert not grade("gsm8k", f"{working}\nThe answer is {wrong}.", whole).correct


def test_working_without_a_claim_is_read_leniently_only() -> None:
    """Three in four last sentences end with the number; the strict reader accepts none."""
    lenient = {"reader": "lenient"}
    graded = [(grade("gsm8k", w, n), grade("gsm8k", w, n, lenient)) for _, w, n in solutions()[::10]]
    assert not any(strict.correct for strict, _ in graded)
    assert sum(kind.correct for _, kind in graded) > 0.75 * len(graded)


@given(st.integers(-(10**9), 10**9))
def test_integers_in_all_notations(value: int) -> None:
    for text in (
        f"{value}",
        f"{value:,}",
        f"{value}.0",
        f"#### {value:,}",
        f"The answer is ${value:,}.00.",
        f"\\boxed{{{value}}}",
    ):
        assert grade("gsm8k", text, value).correct, text
    assert not grade("gsm8k", f"The answer is {value + 1}.", value).correct


@given(st.decimals(min_value=0, max_value=10**6, places=2))
def test_decimals(value: Any) -> None:
    assert grade("gsm8k", f"The answer is ${value:,}.", str(value)).correct


@given(st.integers(0, 50), st.integers(2, 9), st.integers(1, 8))
def test_mixed_numbers(whole: int, below: int, above: int) -> None:
    if above < below:
        value = whole + Fraction(above, below)
        for text in (f"{whole} {above}/{below}", f"{whole}\\frac{{{above}}}{{{below}}}"):
            assert grade("gsm8k", text, str(value)).correct


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("eighteen", 18),
        ("one hundred and twenty-three", 123),
        ("two thousand five hundred", 2500),
        ("three million", 3_000_000),
        ("zero", 0),
        ("none", None),
        ("two cats, three dogs", None),
        ("and", None),
    ],
)
def test_number_words(text: str, value: int | None) -> None:
    number = numbers.read(text)
    assert (number and number.value * number.scale) == value


@pytest.mark.parametrize("label", ["no number", "3 and 4", "####", True, "<think>", ["18", "x"]])
def test_a_label_without_one_number_is_an_error(label: Any) -> None:
    with pytest.raises(GraderFailure, match="one number") as caught:
        grade("gsm8k", "18", label)
    assert caught.value.kind == "grader_bad_label"


@pytest.mark.parametrize(
    "unit",
    [
        "9",
        "9,",
        "answer is ",
        "(",
        "#### x ",
        "\\frac{",
        "**1",
        "1 ",
        "wait ",
        "\ud800",
        "\0",
        " ",
        "1:",
        "-",
        "[1",
        "1 if ",
        "$",
        "1e9",
    ],
)
@pytest.mark.timeout(120)
def test_hostile_text(unit: str) -> None:
    result = grade("gsm8k", unit * (300_000 // len(unit)), "5")
    assert not result.correct


def test_long_answers_are_read_from_their_end() -> None:
    assert grade("gsm8k", "step 3 gives 4. " * 60_000 + "\n#### 18", "18").correct
