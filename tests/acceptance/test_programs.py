"""Programs for the `code` grader: hostile programs score 0, usual test forms run, tests without a call are bad labels.

1. `programs/hostile.jsonl`: every hostile submission scores 0 and never causes a data or grader failure.
2. `programs/forms.jsonl`: the right program of a form scores 1 and its wrong ones 0. A form that is marked
   `runs_or_refused` may instead raise `grader_bad_label` with a message that names the form.
3. `programs/unasked.jsonl`: tests that never call the submission are `grader_bad_label`, never a pass.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import GraderFailure
from agentrl.rm_hub import GraderRunner, RmHubSettings
from agentrl.rm_hub.grade import Grade
from agentrl.sandbox import Sandbox, SandboxUnavailable

FOLDER = Path(__file__).parent / "programs"
FIELDS = {
    "hostile": {"id", "kind", "label", "metadata", "response"},
    "forms": {"id", "form", "label", "metadata", "right", "wrong", "expect"},
    "unasked": {"id", "label", "metadata", "response"},
}
EXPECTATIONS = {"runs", "runs_or_refused"}
WIDTH = {"code_concurrency": 8, "grader_processes": 1}
HOSTILE = RmHubSettings(code_test_timeout=1, code_timeout=20, **WIDTH)
"""Short limits: many hostile programs run until the timeout, and all score 0."""
FORMS = RmHubSettings(code_test_timeout=60, code_timeout=600, **WIDTH)
GARBAGE = "garbage"
COMMON = {"a", "by", "from", "in", "of", "shared", "submission", "test", "tests", "the", "with"}
"""Words in the forms' names that are too common to identify a form."""

PARTS = pytest.mark.parametrize(
    "part",
    [pytest.param(slice(0, None, 20), id="a twentieth"), pytest.param(slice(None), id="all", marks=pytest.mark.slow)],
)

Item = Mapping[str, Any]
Outcome = Grade | GraderFailure


def _load(name: str) -> list[Item]:
    return [json.loads(line) for line in (FOLDER / f"{name}.jsonl").read_text().splitlines()]


def _fenced(program: str) -> str:
    return f"```python\n{program}```"


async def _grade(runner: GraderRunner, item: Item, response: str) -> Outcome:
    try:
        return await runner.grade("code", response, item["label"], item["metadata"])
    except GraderFailure as failure:
        return failure


async def _grade_all(settings: RmHubSettings, asked: Iterable[tuple[Item, str]]) -> list[Outcome | BaseException]:
    """Return one outcome for each item and response, in order. Other exceptions are returned as outcomes."""
    try:
        async with Sandbox(preload=(), warm=0):
            pass
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    async with GraderRunner(settings) as runner:
        grading = [_grade(runner, item, response) for item, response in asked]
        return list(await asyncio.gather(*grading, return_exceptions=True))


def _paid(outcome: Outcome | BaseException) -> str | None:
    """Describe the problem if a program that must score 0 did not."""
    if not isinstance(outcome, Grade):
        return f"not a score of 0 but {outcome!r:.300}"
    return None if outcome.score == 0 and not outcome.correct else f"paid {outcome.score}: {outcome.reason:.200}"


def _refused(item: Item, outcome: Outcome | BaseException) -> bool:
    """Return true if the label may be refused and the message names its form."""
    if item["expect"] != "runs_or_refused" or not isinstance(outcome, GraderFailure):
        return False
    words = {word.strip("(),") for word in item["form"].lower().split()} - COMMON
    return outcome.kind == "grader_bad_label" and any(word in str(outcome).lower() for word in words)


def _form_problems(item: Item, outcomes: list[Outcome | BaseException]) -> Iterable[str]:
    right, *wrong = outcomes
    if all(_refused(item, outcome) for outcome in outcomes):
        return
    if not isinstance(right, Grade) or right.score != 1:
        yield f"right program: {right!r:.300}"
    for number, outcome in enumerate(wrong, start=1):
        if problem := _paid(outcome):
            yield f"wrong program {number}: {problem}"


def _report(problems: list[tuple[str, str]]) -> str:
    """Return all problems, after a count for each group."""
    groups = Counter(name.rsplit("-", 1)[0] for name, _ in problems)
    counts = ", ".join(f"{group}: {count}" for group, count in sorted(groups.items()))
    return f"{len(problems)} problems ({counts})\n" + "\n".join(f"{name}: {text}" for name, text in problems)


@pytest.mark.timeout(900)
@PARTS
async def test_a_hostile_program_scores_zero(part: slice) -> None:
    items = _load("hostile")[part]
    outcomes = await _grade_all(HOSTILE, ((item, item["response"]) for item in items))
    problems = [(item["id"], said) for item, outcome in zip(items, outcomes, strict=True) if (said := _paid(outcome))]
    assert not problems, _report(problems)


@pytest.mark.timeout(900)
@PARTS
async def test_every_form_of_tests_tells_right_from_wrong(part: slice) -> None:
    items = _load("forms")[part]
    asked = [(item, _fenced(program)) for item in items for program in (item["right"], *item["wrong"])]
    outcomes = iter(await _grade_all(FORMS, asked))
    problems = [
        (item["id"], said)
        for item in items
        for said in _form_problems(item, [next(outcomes) for _ in range(1 + len(item["wrong"]))])
    ]
    assert not problems, _report(problems)


@pytest.mark.timeout(900)
@PARTS
async def test_tests_that_ask_nothing_are_a_bad_label(part: slice) -> None:
    items = _load("unasked")[part]
    outcomes = await _grade_all(FORMS, ((item, item["response"]) for item in items))
    problems = [
        (item["id"], f"{outcome!r:.200}")
        for item, outcome in zip(items, outcomes, strict=True)
        if not (isinstance(outcome, GraderFailure) and outcome.kind == "grader_bad_label")
    ]
    assert not problems, _report(problems)


@pytest.mark.parametrize("name", FIELDS)
def test_ids_are_unique_and_fields_complete(name: str) -> None:
    items = _load(name)
    assert all(set(item) == FIELDS[name] for item in items)
    assert len({item["id"] for item in items}) == len(items)


def test_there_are_enough_of_each() -> None:
    hostile, forms, unasked = (_load(name) for name in FIELDS)
    assert len(hostile) >= 100
    assert len({item["kind"] for item in hostile}) >= 25
    assert len(forms) >= 100
    assert len({item["form"] for item in forms}) >= 60
    assert len(unasked) >= 30
    assert {item["expect"] for item in forms} == EXPECTATIONS
    assert all(2 <= len(item["wrong"]) <= 3 and item["right"] not in item["wrong"] for item in forms)


def test_a_wrong_program_of_each_form_returns_garbage() -> None:
    without = {item["id"] for item in _load("forms") if GARBAGE not in "".join(item["wrong"])}
    assert not without
