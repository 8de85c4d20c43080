"""The `dapo` grader: the form of the answer, the score's sign, its variants."""

import pytest

from agentrl.errors import GraderFailure
from agentrl.rm_hub import grade

FILLER = "We go over every step of this once more, slowly and in detail. " * 6


@pytest.mark.parametrize(
    "response",
    [
        "2 + 2 = 4.\n\nAnswer: 4",
        "Answer: $4$",
        "**Answer:** 4",
        "Final Answer: \\boxed{4}",
        "Answer: 3\n\nThat was wrong.\n\nAnswer: 4",
        "<think>Answer: 3</think>Answer: 4",
        "Answer:\n4",
        "Answer: $x = 4$.",
        "answer : 4 apples",
    ],
)
def test_right_answers_score_one(response: str) -> None:
    verdict = grade("dapo", response, "4")
    assert (verdict.score, verdict.correct, dict(verdict.parts)) == (1.0, True, {"score": 1.0, "acc": 1.0})


@pytest.mark.parametrize(
    "response",
    [
        "",
        "Answer: 5",
        "Answer: -4",
        "Answer: 4 or 5",
        "The answer is 4.",
        "\\boxed{4}",
        "Answer: 4\n\nAnswer: 5",
        f"Answer: 4\n\n{FILLER}",
        "<think>Answer: 4</think>",
        "Answer:",
        "Answer: 4^{4^{4^{4}}}",
    ],
)
def test_all_others_score_minus_one(response: str) -> None:
    verdict = grade("dapo", response, "4")
    assert (verdict.score, verdict.correct, dict(verdict.parts)) == (-1.0, False, {"score": -1.0, "acc": 0.0})


def test_the_strict_form_wants_the_last_line() -> None:
    strict = {"dapo_form": "strict"}
    assert grade("dapo", "Answer: 4", "4", strict).correct
    assert not grade("dapo", "Answer: 4\nGood luck!", "4", strict).correct
    assert grade("dapo", "Answer: 4\nGood luck!", "4").correct


def test_the_boxed_form_reads_only_boxes() -> None:
    boxed = {"dapo_form": "boxed"}
    assert grade("dapo", "Hence $\\boxed{4}$.", "4", boxed).correct
    assert not grade("dapo", "Answer: 4", "4", boxed).correct
    assert not grade("dapo", f"$\\boxed{{4}}$ {FILLER}", "4", boxed).correct


def test_an_unknown_form_is_the_datas_mistake() -> None:
    with pytest.raises(GraderFailure, match="answer, strict, boxed") as caught:
        grade("dapo", "Answer: 4", "4", {"dapo_form": "box"})
    assert caught.value.kind == "grader_bad_metadata"


def test_an_unusable_label_is_the_datas_mistake() -> None:
    with pytest.raises(GraderFailure) as caught:
        grade("dapo", "Answer: 4", " ")
    assert caught.value.kind == "grader_bad_label"


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "response", ["Answer: " * 100_000, "Answer: " + "{" * 100_000, "\n" * 500_000, "Answer: \ud800\0"]
)
def test_hostile_answers(response: str) -> None:
    assert grade("dapo", response, "4").score == -1.0
