"""Boxes in answers: which one counts, its content, and text that is not a box."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.rm_hub.reading.common import boxes, last_box
from tests.support.nightly import nightly


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{7}", "7"),
        (r"\fbox{7}", "7"),
        (r"\boxed {7}", "7"),
        ("\\boxed\n{7}", "7"),
        (r"\boxed{ 7 }", "7"),
        (r"so $\boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
        (r"\boxed{3} and then \boxed{4}", "4"),
        (r"\boxed{4}. I put it in \boxed{} as asked", "4"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{x = \boxed{3}}", r"x = \boxed{3}"),
        (r"\boxed{so \boxed{7}", "7"),
        (r"\boxed{5} or rather \boxed{6", "5"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{ 1 \right.}", r"\left\{ 1 \right."),
        (r"$\boxed 7$", "7"),
        (r"$\boxed7$.", "7"),
        (r"\boxed\frac12", r"\frac12"),
        (r"\boxed\text{(A)}", r"\text{(A)}"),
        (r"\boxed\{42\}", r"\{42\}"),
        (r"\\boxed{\\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\\\boxed{a\\b}", r"a\\b"),
        ("\boxed{3}", "3"),
        (r"} } \boxed{8}", "8"),
        (r"\boxed{\text{the set } \{1\}}", r"\text{the set } \{1\}"),
    ],
)
def test_content(text: str, content: str) -> None:
    assert last_box(text) == content


@pytest.mark.parametrize(
    "text",
    [
        "",
        "7",
        r"\boxed{7",
        r"\boxed",
        r"\boxed{}",
        r"\boxed{  }",
        r"put it in \boxed as asked",
        r"\boxedx{7}",
        "boxed{7}",
    ],
)
def test_no_box(text: str) -> None:
    assert last_box(text) is None


@given(st.text(alphabet="ab{}\\ 1", max_size=40), st.text(max_size=20))
def test_a_closed_box_at_the_end_is_found(before: str, after: str) -> None:
    text = before + " \\boxed{7}" + after.replace("\\", "").replace("\x08", "")
    assert last_box(text) == "7"


@given(st.recursive(st.text("x1+", min_size=1, max_size=4), lambda inner: inner.map(lambda text: "{" + text + "}")))
def test_balanced_braces_are_kept(content: str) -> None:
    assert last_box(f"\\boxed{{{content}}}") == content


@given(st.text(alphabet="\\boxedf{} \n7", max_size=200))
def test_any_text_has_a_box_or_none(text: str) -> None:
    for box in boxes(text):
        assert box.text == box.text.strip()
        assert box.text or not box.complete
        assert 0 <= box.start < box.end <= len(text)


@pytest.mark.parametrize(
    "text",
    nightly(
        [
            "\\boxed{" * 150_000,
            "\\boxed1" * 100_000,
            "\\" * 1_000_000,
            "{" * 1_000_000,
            "\\boxed{" * 70_000 + "}" * 70_000,
            "\\boxed " * 100_000,
        ],
        2,
    ),
)
@pytest.mark.timeout(120)
def test_hostile_text_takes_linear_time(text: str) -> None:
    last_box(text)
