"""Search-R1's reward: answer, structure and retrieval, in tags and in messages."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import GraderFailure
from agentrl.rm_hub import grade

LABEL = {"target": ["Paris"]}
SCORES = {"structure_format_score": 0.2, "final_format_score": 0.1, "retrieval_score": 0.1}
RIGHT = (
    "<think>search</think><search>capital</search><information>Paris is it.</information>"
    "<think>found</think><answer>Paris</answer>"
)


def test_parts() -> None:
    assert grade("search_r1", RIGHT, LABEL).parts == {"em": 1.0, "format": 1.0, "retrieval": 1.0}
    assert grade("search_r1", "<answer>Paris</answer>", LABEL).parts == {"em": 1.0, "format": 0.0, "retrieval": 0.0}
    assert grade("search_r1", "", LABEL).parts == {"em": 0.0, "format": 0.0, "retrieval": 0.0}


@pytest.mark.parametrize(
    ("response", "score"),
    [
        (RIGHT, 1.0),
        ("x" + RIGHT, 0.8),
        (RIGHT.replace("<answer>Paris", "<answer>Lyon"), 0.3),
        (RIGHT.replace("<answer>Paris", "<answer>Lyon").replace("Paris is it", "Lyon is not"), 0.2),
        ("x" + RIGHT.replace("<answer>Paris", "<answer>Lyon"), 0.1),
        ("x", 0.0),
    ],
)
def test_format_scores(response: str, score: float) -> None:
    assert grade("search_r1", response, LABEL, SCORES).score == pytest.approx(score)


@pytest.mark.parametrize(
    ("response", "shape"),
    [
        ("hello", "structure ., expected think, (search"),
        (" ", "structure of nothing"),
        ("<search>q</search>", "structure <search>.</search>,"),
        ("<think>a</think>so<answer>x</answer>", "structure <think>.</think>.<answer>.</answer>,"),
        ("<think>a", "structure <think>.,"),
        ("<think>a</think><answer>x</answer> bye", "</answer>.,"),
        ("<think>a<search></think>", "structure <think>.<search></think>,"),
        ("<think>a</think><tool_call>q</tool_call><information>b", "</search><information>,"),
    ],
)
def test_the_reason_shows_the_structure(response: str, shape: str) -> None:
    assert shape in grade("search_r1", response, LABEL).reason


@given(st.text(alphabet="Paris <>/", max_size=80))
def test_retrieved_text_never_is_the_answer(text: str) -> None:
    inner = text.replace("</information>", "")
    response = f"<think>a</think><search>q</search><information>{inner}<answer>Paris</answer></information>"
    assert not grade("search_r1", response, LABEL).correct


@pytest.mark.parametrize(
    "metadata",
    [
        {"structure_format_score": "0.2"},
        {"retrieval_score": float("inf")},
        {"sub_em": "yes"},
        {"messages": "x"},
        {"messages": [1]},
    ],
)
def test_metadata_of_the_wrong_type_is_an_error(metadata: dict[str, Any]) -> None:
    with pytest.raises(GraderFailure) as caught:
        grade("search_r1", RIGHT, LABEL, metadata)
    assert caught.value.kind == "grader_bad_metadata"


@pytest.mark.parametrize(
    "text", ["<answer>" * 100_000, "<think>" * 100_000, "<information>" * 80_000, "\ud800\0", "<" * 1_000_000]
)
@pytest.mark.timeout(120)
def test_hostile_text(text: str) -> None:
    assert grade("search_r1", text, LABEL, SCORES).score == 0
