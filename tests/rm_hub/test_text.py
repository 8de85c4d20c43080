"""exact_match and f1: normalisation, labels of all forms, and errors of the data."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import GraderFailure
from agentrl.rm_hub import grade
from agentrl.rm_hub.text import normalise
from tests.support.nightly import nightly


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("The  Eiffel Tower!", "eiffel tower"),
        ("“Eiffel” — Tower", "eiffel tower"),
        ("3.5.", "3.5"),
        ("1,000", "1000"),
        ("12.05.2020", "12052020"),
        ("−40", "-40"),
        ("twenty-one", "twentyone"),
        ("A", "a"),
        ("!!!", "!!!"),
        ("ＡＢＣ\u200b", "abc"),
        (r"\textbf{New~York}", "new york"),
        (r"\mathrm{H}_2\mathrm{O}", "h2o"),
        (r"\text {\textit{New}\ York}", "new york"),
        ("~", "~"),
        (r"\text", "text"),
    ],
)
def test_normalise(text: str, plain: str) -> None:
    assert normalise(text) == plain


@pytest.mark.parametrize("box", [r"\boxed{\text{Paris}}", r"\\boxed{\\textbf{\\textit{Paris}}}"])
def test_fonts_in_a_box_are_no_part_of_the_answer(box: str) -> None:
    assert grade("boxed_exact_match", box, "Paris").correct
    assert grade("boxed_f1", box, "Paris").score == 1
    assert grade("search_r1", f"<answer>{box}</answer>", "Paris").correct


@given(
    st.lists(st.sampled_from(["red", "blue", "green", "grey"]), min_size=1),
    st.lists(st.sampled_from(["red", "blue"]), min_size=1),
)
def test_f1_is_symmetric_and_bounded(one: list[str], other: list[str]) -> None:
    there = grade("f1", " ".join(one), " ".join(other)).score
    assert there == pytest.approx(grade("f1", " ".join(other), " ".join(one)).score)
    assert 0 <= there <= 1
    assert (there == pytest.approx(1)) == (sorted(one) == sorted(other))


@pytest.mark.parametrize(("threshold", "correct"), [(0.49, True), (0.5, True), (0.51, False)])
def test_the_threshold_itself_counts_as_correct(threshold: float, correct: bool) -> None:
    found = grade("f1", "Chief", "Chief of Protocol", {"f1_threshold": threshold})
    assert (found.score, found.correct) == (0.5, correct)


@given(st.text(min_size=1).filter(str.strip))
def test_exact_match_implies_f1_of_one(text: str) -> None:
    if grade("exact_match", text, ["gold", text]).correct:
        assert grade("f1", text, ["gold", text]).score == 1


@pytest.mark.parametrize(
    "label", [[], {}, "", "  ", [""], [None], {"other": "x"}, object(), [[["deep", [["er"]]]]], float("nan"), b"x"]
)
@pytest.mark.parametrize("grader", ["exact_match", "f1", "search_r1", "gsm8k"])
def test_a_label_without_an_answer_is_an_error(grader: str, label: Any) -> None:
    with pytest.raises(GraderFailure, match="label must be") as caught:
        grade(grader, "Paris", label)
    assert caught.value.kind == "grader_bad_label"


@pytest.mark.parametrize(
    "metadata", [{"f1_threshold": "high"}, {"f1_threshold": float("nan")}, {"f1_threshold": True}, {"f1_yes_no": 1}]
)
def test_metadata_of_the_wrong_type_is_an_error(metadata: dict[str, Any]) -> None:
    with pytest.raises(GraderFailure, match="metadata f1_") as caught:
        grade("f1", "Paris", "Paris", metadata)
    assert caught.value.kind == "grader_bad_metadata"


@pytest.mark.parametrize(
    "text",
    ["\ud800", "\0", "a\u0300\u0316" * 300_000, "{" * 100_000, "the " * 250_000, "." * 1_000_000, "1." * 500_000],
)
@pytest.mark.parametrize("grader", nightly(["boxed_f1", "exact_match", "f1"], 1))
@pytest.mark.timeout(120)
def test_hostile_text(grader: str, text: str) -> None:
    result = grade(grader, text, "Paris")
    assert not result.correct
    assert len(result.extracted or "") < 1000
