"""`Grade`, the result of every grader, and the two forms of graders."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Self

Metadata = Mapping[str, Any]  # an item's data besides its label


@dataclass(frozen=True, slots=True)
class Grade:
    """One answer's grade.

    Attributes:
        score: the reward, finite; most graders give 0 or 1.
        correct: true if the answer counts as right (for pass@k and error rates).
        extracted: the text that was graded as the answer; None if no answer was found.
        reason: one sentence that explains the score to people.
        parts: named partial scores, for graders that have several (`--reward-key` picks one).
        unjudged: "" for a judged answer, else the reason: "no_box", "grader_timeout", "grader_out_of_memory",
            "grader_crashed" or "grader_too_large". An unjudged answer has a wrong answer's score."""

    score: float
    correct: bool
    extracted: str | None = None
    reason: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)
    unjudged: str = ""

    def part(self, name: str) -> float | None:
        """Return a part, or the score for "score"; None if the name is unknown. An unjudged answer's parts are 0."""
        return self.score if name == "score" else self.parts.get(name, 0.0 if self.unjudged else None)

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__} | {"parts": dict(self.parts)}


GraderFunction = Callable[[str, Any, Metadata], Grade]
"""A grader: `(response, label, metadata) -> Grade`; pure, so that it can run in another process. If the data is wrong,
it raises a `GraderFailure` of kind "grader_bad_label" or "grader_bad_metadata"."""


class GraderService(ABC):
    """A grader that waits for a server or the sandbox: an async context manager, made from `RmHubSettings`. It serves
    many answers and keeps its `parts` open. It starts no tasks, so another task may close it."""

    def __init__(self, *parts: AbstractAsyncContextManager[Any]) -> None:
        self._parts = parts

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as opened:
            for part in self._parts:
                await opened.enter_async_context(part)
            self._opened = opened.pop_all()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._opened.aclose()

    @abstractmethod
    async def grade(self, response: str, label: Any, metadata: Metadata) -> Grade:
        """Grade one answer."""
