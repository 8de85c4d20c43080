"""The error table of published answers: conversion, verdicts and counts."""

import json
import subprocess
from pathlib import Path

import pytest

from agentrl.rm_hub import grade
from benchmarks import foreign_answers, grader_errors, small_reader


def test_answers_come_out_of_a_pinned_commit(tmp_path: Path) -> None:
    work, path = tmp_path / "work", "grade_school_math/data/example_model_solutions.jsonl"
    models = ("6b_finetuning", "6b_verification", "175b_finetuning", "175b_verification")
    row = {"ground_truth": "4 * 2 = 8\nA: 8", **{name: {"solution": "A: 8", "is_correct": True} for name in models}}
    (work / path).parent.mkdir(parents=True)
    (work / path).write_text(json.dumps(row) + "\n")

    def git(*command: str) -> str:
        git = ["git", "-C", str(work), "-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run([*git, *command], check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    pinned = git("rev-parse", "HEAD")
    (work / path).write_text("later")
    git("commit", "-qam", "two")
    git("clone", "-q", "--bare", ".", str(tmp_path / "openai+grade-school-math"))
    files = foreign_answers.Repository(tmp_path, "openai/grade-school-math", pinned)
    answers = [(answer.id, answer.label, answer.right) for answer in foreign_answers.grade_school_math(files)]
    assert answers == [(f"{name}:0", "8", True) for name in models]
    assert files.paths("grade_school_math/") == [path]
    assert files.has(path)
    assert not files.has("nothing")


def test_every_verdict_has_a_source_and_a_reason() -> None:
    lines = foreign_answers.VERDICTS.read_text(encoding="utf-8").splitlines()
    assert len(foreign_answers.verdicts()) == len(lines), "a verdict twice"
    assert all(line.split("\t")[3].strip() for line in lines)


@pytest.mark.parametrize(
    ("published", "paid", "right"),
    [
        (True, (False, False, False, False), True),
        (None, (True, True, True, True), True),
        (None, (False, False, False, None), False),
        (None, (True, False, True, True), None),
    ],
)
def test_truth_is_the_published_verdict_or_what_all_say(
    published: bool | None, paid: tuple[bool | None, ...], right: bool | None
) -> None:
    assert grader_errors.Read({"right": published}, paid).right is right


def test_only_decided_answers_are_counted() -> None:
    rows: list[tuple[bool | None, tuple[bool, ...]]] = [
        (True, (False, True, True, True)),
        (False, (False, False, True, False)),
        (None, (True, False, True, True)),
    ]
    answers = [grader_errors.Read({"right": right}, paid) for right, paid in rows]
    assert grader_errors.line("s", "math", answers) == "| s | `math` | 1 | 1 | 0 | 0 | 0 | 1 | 0 | 0 | 1 | 0 |"


@pytest.mark.parametrize(
    ("response", "claim"),
    [
        ("So \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("<think>It is 3.", ""),
        ("<think>No</think>The answer is 7.", "7"),
        ("3 + 4 = 7\n#### 7", "7"),
        ("It follows that\n12", "12"),
    ],
)
def test_the_small_reader_reads_as_one_expects(response: str, claim: str) -> None:
    assert small_reader.claim(response) == claim


def test_the_plain_readers_are_graders() -> None:
    assert grade("benchmarks/small_reader.py:gpqa", "The answer is (C).", "C", {"choices": ["a", "b", "c"]}).correct
    assert grade("benchmarks/math_verify_alone.py:math", "so $x=\\frac12$ \\boxed{0.5}", "\\frac{1}{2}").correct
