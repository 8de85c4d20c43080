from importlib.util import find_spec
from pathlib import Path

import pytest

from agentrl.errors import GraderFailure, PluginError, SettingsError
from agentrl.rm_hub import GRADERS, Grade, RmHubSettings, check_rm_type, grade, graders, math_verify_reward

ABSENT = {name for name, spec in GRADERS.items() if not all(map(find_spec, spec.packages))}
"""Graders of optional extras that are not installed."""
FAULTY = str(Path(__file__).parent.parent / "support" / "faulty_graders.py")


@pytest.mark.parametrize("name", GRADERS)
def test_every_grader_of_the_table_loads(name: str) -> None:
    if name in ABSENT:
        pytest.skip("its library is not installed")
    function = GRADERS[name].load()
    assert callable(function)
    assert function.__doc__


def test_names() -> None:
    assert set(graders()) == set(GRADERS)
    assert {"reasoning_gym"} >= ABSENT
    for name, spec in GRADERS.items():
        if name in ABSENT:
            with pytest.raises(ModuleNotFoundError, match="reasoning_gym"):
                check_rm_type(name)
            continue
        check_rm_type(name)
        if spec.boxable:
            check_rm_type(f"boxed_{name}")
        else:
            with pytest.raises(SettingsError, match="no such grader"):
                check_rm_type(f"boxed_{name}")


@pytest.mark.parametrize(
    ("wrong", "near"), [("exact_mach", "exact_match"), ("boxed_exactmatch", "boxed_exact_match"), ("F1", "f1")]
)
def test_an_unknown_name_suggests_the_nearest(wrong: str, near: str) -> None:
    with pytest.raises(SettingsError, match=f"{wrong}.*did you mean '{near}'"):
        grade(wrong, "a", "a")


@pytest.mark.parametrize(
    ("response", "label", "metadata", "kind"),
    [
        (None, "a", None, "grader_bad_input"),
        (b"a", "a", None, "grader_bad_input"),
        (["a"], "a", None, "grader_bad_input"),
        ("a", "a", ["x"], "grader_bad_input"),
        ("a", None, None, "grader_no_label"),
    ],
)
def test_inputs_that_cannot_be_graded_are_failures_not_zeros(
    response: object, label: object, metadata: object, kind: str
) -> None:
    with pytest.raises(GraderFailure) as caught:
        grade("exact_match", response, label, metadata)  # type: ignore[arg-type]
    assert caught.value.kind == kind


def test_an_answer_that_is_too_long_gets_the_lowest_score_unjudged() -> None:
    got = grade("dapo", "a" * 4_000_001, "a")
    assert (got.score, got.correct, got.unjudged) == (-1.0, False, "grader_too_large")
    assert "4,000,001 characters; at most 4,000,000" in got.reason


@pytest.mark.parametrize(
    "name", [name for name, spec in GRADERS.items() if spec.needs_label and spec.runs == "process"]
)
def test_a_missing_label_raises(name: str) -> None:
    with pytest.raises(GraderFailure, match=r"--label-key|--metadata-key"):
        grade(name, "an answer", None, {})


def test_a_box_that_is_not_there_scores_zero() -> None:
    assert grade("boxed_exact_match", r"so \boxed{Paris}", "Paris").correct
    missing = grade("boxed_exact_match", "Paris", "Paris")
    assert (missing.score, missing.extracted, missing.reason) == (0.0, None, "no box found")


def test_a_custom_grader_by_path() -> None:
    assert grade(f"{FAULTY}:echo", "x", "x") == Grade(1.0, True, "x", "{}")
    with pytest.raises(PluginError, match="did you mean 'echo'"):
        grade(f"{FAULTY}:ecko", "x", "x")
    with pytest.raises(SettingsError, match="use async_rm"):
        grade(f"{FAULTY}:waits", "0")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("raises", "grader_raised"),
        ("gives_nan", "grader_bad_grade"),
        ("gives_number", "grader_bad_grade"),
        ("extracts_number", "grader_bad_grade"),
    ],
)
def test_a_grader_that_misbehaves_is_named(name: str, kind: str) -> None:
    with pytest.raises(GraderFailure, match=name) as caught:
        grade(f"{FAULTY}:{name}", "x")
    assert caught.value.kind == kind


def test_a_verdict_of_numpy_is_a_verdict() -> None:
    assert grade(f"{FAULTY}:judges_by_numpy", "x").correct is True


def test_long_extracts_are_cut() -> None:
    got = grade(f"{FAULTY}:echo", "a" * 100_000, "b")
    assert got.extracted is not None
    assert len(got.extracted) == 2000


def test_settings_of_a_remote_grader_are_checked_before_the_run() -> None:
    with pytest.raises(SettingsError, match="--rm-url"):
        check_rm_type("remote_rm", RmHubSettings())
    check_rm_type("remote_rm", RmHubSettings(rm_url="http://127.0.0.1:1/"))


def test_math_verify_reward() -> None:
    assert math_verify_reward(r"Therefore \boxed{\frac{1}{2}}", "0.5") == 1.0
    assert math_verify_reward(r"Therefore \boxed{\frac{1}{3}}", "0.5") == 0.0
