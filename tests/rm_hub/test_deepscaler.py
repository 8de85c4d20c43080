"""The `deepscaler` grader: reasoning that ends, then a box."""

from typing import Any

import pytest

from agentrl.errors import GraderFailure
from agentrl.rm_hub import grade


@pytest.mark.parametrize(
    ("response", "label"),
    [
        ("<think>2 + 2</think>\n\\boxed{4}", "4"),
        ("2 + 2</think>So it is $\\boxed{\\text{4 apples}}$.", "4"),
        ("<think>\\boxed{3}?</think>\\boxed{4}", 4),
        ("2 + 2\n###Response\n\\boxed{4}", "4"),
        ("</think>\\boxed{\\frac12}", ["2", "0.5"]),
        ("</think>First \\boxed{2} are added. The final answer is \\boxed{4}.", "4"),
        ("</think>\\boxed{x^2+2x+1}", "(x+1)^2"),
        ("<think>a</think><think>b</think>\\boxed{4}", "4"),
    ],
)
def test_right_answers(response: str, label: Any) -> None:
    assert grade("deepscaler", response, label).score == 1.0


@pytest.mark.parametrize(
    "response",
    [
        "",
        "\\boxed{4}",
        "<think>\\boxed{4}",
        "<think>\\boxed{4}</think>",
        "<think>2 + 2</think>The answer is 4.",
        "<think>\\boxed{4}</think>\\boxed{5}",
        "<think>?</think>\\boxed{3}, \\boxed{4}, \\boxed{5}",
        "<think>?</think>\\boxed{4",
        "<think>?</think>\\boxed{}",
        "<think>?</think>\\boxed{9^{9^{9^{9}}}}",
    ],
)
def test_all_others(response: str) -> None:
    assert grade("deepscaler", response, "4").score == 0.0


@pytest.mark.parametrize("label", ["", [], {"answer": 4}])
def test_labels_that_are_no_answers(label: Any) -> None:
    with pytest.raises(GraderFailure) as caught:
        grade("deepscaler", "</think>\\boxed{4}", label)
    assert caught.value.kind == "grader_bad_label"


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "tail", ["\\boxed{" * 100_000, "{" * 100_000, "\\boxed{" + "1" * 1_000_000 + "}", "\\boxed{\ud800\0}"]
)
def test_hostile_answers(tail: str) -> None:
    assert grade("deepscaler", "</think>" + tail, "4").score == 0.0
