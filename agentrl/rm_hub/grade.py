"""`Grade`: what every grader answers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Grade:
    """One answer's grade.

    Attributes:
        score: the reward, finite; most graders give 0 or 1.
        correct: whether the answer counts as right (for pass@k and error rates).
        extracted: the text that was taken for the answer; None if none was found.
        reason: one sentence that says why, for people.
        parts: named partial scores, for graders that have several (`--reward-key` picks one).
    """

    score: float
    correct: bool
    extracted: str | None = None
    reason: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)

    def __float__(self) -> float:
        return self.score


GraderFunction = Callable[[str, Any, Mapping[str, Any]], Grade]
"""A grader: `(response, label, metadata) -> Grade`; pure, so that it can run in another process."""
