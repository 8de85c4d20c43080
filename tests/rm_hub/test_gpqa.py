"""gpqa: labels and choices of all forms, and hostile text; the forms of answers are in the conformance corpus."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import GraderFailure
from agentrl.rm_hub import grade
from tests.support.nightly import nightly

CHOICES = ["40 nm", "41 nm", "42 nm", "a photon of 43 nm"]
TEMPLATES = [
    "{}", "({})", "**{}**", "{}.", "{})", "Answer: {}", "The answer is {}.", "The correct answer is ({}) because of that.",
    "Answer: \\boxed{{{}}}", "$\\boxed{{\\text{{({})}}}}$", "option {}", "Option {} is correct.", '{{"answer": "{}"}}',
    "<think>A or B?</think>{}", "<answer>{}</answer>", "答案是{}", "I choose {}.",
    "The answer is A. No wait, that is wrong. The answer is {}.", "({}) is correct.\n\nQuestion: And now?\nAnswer: E",
]  # fmt: skip


@given(st.sampled_from("ABCD"), st.sampled_from("ABCD"), st.sampled_from(TEMPLATES), st.booleans())
def test_the_letter_that_is_given_is_the_letter_that_is_read(
    wanted: str, said: str, template: str, known: bool
) -> None:
    metadata = {"choices": CHOICES} if known else {}
    assert grade("gpqa", template.format(said), wanted, metadata).correct == (said == wanted)


@given(
    st.sampled_from("ABCD"),
    st.sampled_from("ABCD"),
    st.sampled_from(["{} or {}", "{} and {}", "The answer is {} or {}.", "\\boxed{{{}, {}}}"]),
)
def test_two_letters_are_no_answer(one: str, other: str, template: str) -> None:
    if one != other:
        assert not grade("gpqa", template.format(one, other), one).correct


@pytest.mark.parametrize(
    "claim", ["The answer is B", "Option B is correct", "B is correct", "The correct answer is (B)"]
)
@pytest.mark.parametrize(
    ("rest", "right"),
    [
        (", and A is wrong.", True),
        (" and option C is incorrect.", True),
        (", A is not the answer, D is wrong.", True),
        (", and that is wrong.", False),
        (", and B is wrong.", False),
        (", A is wrong and B is wrong.", False),
    ],
)
def test_a_denial_counts_against_the_choice_that_it_is_about(claim: str, rest: str, right: bool) -> None:
    assert grade("gpqa", claim + rest, "B").correct == right


@pytest.mark.parametrize(
    ("label", "metadata"),
    [
        ("C", {}),
        ("(C)", {}),
        ("c", {}),
        ("C", {"choices": CHOICES}),
        (2, {"choices": CHOICES}),
        ("42 nm", {"choices": CHOICES}),
        ("C", {"choices": dict(zip("ABCD", CHOICES, strict=True))}),
        ("42 nm", {"choices": [f"{letter}) {text}" for letter, text in zip("ABCD", CHOICES, strict=True)]}),
        ("C. 42 nm", {"choices": CHOICES}),
        ("C", {"valid_letters": "ABC"}),
        ("C", {"valid_letters": "A-E"}),
        ("C", {"valid_letters": ["A", "B", "C"]}),
    ],
)
def test_labels(label: Any, metadata: dict[str, Any]) -> None:
    assert grade("gpqa", "The answer is (C).", label, metadata).correct
    assert not grade("gpqa", "The answer is (B).", label, metadata).correct


@pytest.mark.parametrize(
    ("label", "metadata"),
    [
        ("E", {"choices": CHOICES}),
        ("50 nm", {"choices": CHOICES}),
        (4, {"choices": CHOICES}),
        (-1, {}),
        ("", {}),
        (True, {}),
        ([], {}),
        ("K", {}),
    ],
)
def test_a_label_that_is_no_choice_is_an_error(label: Any, metadata: dict[str, Any]) -> None:
    with pytest.raises(GraderFailure) as caught:
        grade("gpqa", "A", label, metadata)
    assert caught.value.kind == "grader_bad_label"


@pytest.mark.parametrize(
    "metadata",
    [
        {"choices": "ABCD"},
        {"choices": ["one"]},
        {"choices": 4},
        {"valid_letters": []},
        {"valid_letters": 3},
        {"valid_letters": ["AB"]},
    ],
)
def test_metadata_of_the_wrong_type_is_an_error(metadata: dict[str, Any]) -> None:
    with pytest.raises(GraderFailure) as caught:
        grade("gpqa", "A", "A", metadata)
    assert caught.value.kind == "grader_bad_metadata"


@pytest.mark.parametrize(
    "unit",
    nightly(
        [
            "(",
            "answer is ",
            "answer of the ",
            "**A",
            "A ",
            "\ud800",
            "\0",
            " ",
            "A) x\n",
            "so ",
            "option ",
            "\\text",
            "42 nm ",
            "{",
            "if ",
        ],
        5,
    ),
)
@pytest.mark.timeout(120)
def test_hostile_text(unit: str) -> None:
    assert not grade("gpqa", unit * (300_000 // len(unit)), "D", {"choices": CHOICES}).correct


@pytest.mark.parametrize("choices", [["c", "a", "d", "b"], ["O", "A", "B", "AB"], ["B", "A", "D", "C"]])
@pytest.mark.parametrize(
    "form", ["The answer is ({letter}) {text}.", "\\boxed{{{letter}}}", "Answer: {letter}", "{letter}"]
)
def test_a_letter_is_a_choice_even_if_it_is_the_text_of_another(choices: list[str], form: str) -> None:
    for right, letter in enumerate("ABCD"):
        response = form.format(letter=letter, text=choices[right])
        for at, label in enumerate("ABCD"):
            assert grade("gpqa", response, label, {"choices": choices}).correct == (at == right)
            assert grade("gpqa", response, at, {"choices": choices}).correct == (at == right)


def test_a_text_of_one_letter_that_is_no_choice_is_a_text() -> None:
    metadata = {"choices": ["O", "A", "B", "AB"]}
    assert grade("gpqa", "The answer is O.", "O", metadata).correct
    assert grade("gpqa", "The answer is AB.", 3, metadata).correct


@pytest.mark.parametrize("response", ["The answer is several.", "\\boxed{several}"])
def test_several_may_be_a_choice(response: str) -> None:
    metadata = {"choices": ["one", "several"]}
    assert grade("gpqa", response, "B", metadata).correct
    assert not grade("gpqa", "The answer is A or B.", "B", metadata).correct


@pytest.mark.parametrize(
    "response",
    ['The correct answer is "(B) 41 nm".', 'Answer: "B. 41 nm"', "Answer: B ✓", '```json\n{"answer": "B"}\n```'],
)
def test_quoted_ticked_and_json_choices(response: str) -> None:
    assert grade("gpqa", response, "B", {"choices": CHOICES}).correct
