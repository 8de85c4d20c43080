"""The graders' conformance corpus: labelled answers, `tests/conformance/rm_hub/<grader>.jsonl`.

A line has `id`, `category`, `response`, `label`, `correct` and optionally `metadata`, the exact `score`, a `note`, and
`known_error` with the reason if the grader is known to be wrong: known errors are counted, never hidden.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.errors import GraderFailure
from agentrl.rm_hub import GRADERS, Grade

FOLDER = Path(__file__).parents[1] / "conformance" / "rm_hub"


@dataclass(frozen=True, slots=True)
class Item:
    """One labelled answer."""

    id: str
    category: str
    response: str
    label: Any
    correct: bool
    score: float | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    known_error: str = ""


def load(name: str) -> list[Item]:
    """Return the items of one grader."""
    lines = (FOLDER / f"{name}.jsonl").read_text(encoding="utf-8").split("\n")
    return [Item(**json.loads(line)) for line in lines if line]


def gsm8k_solutions() -> list[str]:
    """Return the 1,319 reference solutions of GSM8K's test split; each ends with `#### ` and its number."""
    lines = (FOLDER.parent / "data" / "gsm8k_test_answers.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["answer"] for line in lines]


def names(runs: str) -> list[str]:
    """Return the graders that have a corpus of labelled answers and this kind ("process" or "async")."""
    # The judge's corpus holds answers of judges; test_llm_judge.py uses it.
    return [name for name, spec in GRADERS.items() if spec.runs == runs and name not in NO_CORPUS]


NO_CORPUS = {
    "random": "it does not read the answer",
    "llm_judge": "its corpus is of judges' words",
    "remote_rm": "the server is the grader",
    "reasoning_gym": "the library's own functions score; tests/adapters compares with them",
}


@dataclass(slots=True)
class Tally:
    """Counts of right and wrong grades of a grader on its corpus."""

    right: int = 0
    wrong: int = 0
    false_negatives: list[str] = field(default_factory=list)
    false_positives: list[str] = field(default_factory=list)
    other: list[str] = field(default_factory=list)
    known: int = 0
    fixed: list[str] = field(default_factory=list)

    def add(self, item: Item, outcome: Grade | GraderFailure) -> None:
        """Count one item's outcome."""
        self.right += item.correct
        self.wrong += not item.correct
        told = problem(item, outcome)
        if not told:
            self.fixed += [item.id] if item.known_error else []
            return
        self.known += bool(item.known_error)
        if item.known_error:
            told += f" (known: {item.known_error})"
        if not isinstance(outcome, Grade) or outcome.correct == item.correct:
            self.other.append(told)
        elif item.correct:
            self.false_negatives.append(told)
        else:
            self.false_positives.append(told)


def problem(item: Item, outcome: Grade | GraderFailure) -> str:
    """Describe the problem of the outcome; empty if there is none."""
    if isinstance(outcome, GraderFailure):
        return f"{item.id}: {outcome.kind}: {outcome}"
    if outcome.correct == item.correct and (item.score is None or abs(outcome.score - item.score) < 1e-9):
        return ""
    return (
        f"{item.id}: correct={outcome.correct} score={outcome.score:g}, expected {item.correct} {item.score}; "
        f"extracted {outcome.extracted!r:.60}, label {item.label!r:.60}, response {item.response[-80:]!r}: {outcome.reason}"
    )
