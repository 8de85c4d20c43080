"""`Grade`: what every grader answers; and the two forms of graders."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Self

Metadata = Mapping[str, Any]  # what the data says of an item besides its label


@dataclass(frozen=True, slots=True)
class Grade:
    """One answer's grade.

    Attributes:
        score: the reward, finite; most graders give 0 or 1.
        correct: whether the answer counts as right (for pass@k and error rates).
        extracted: the text that was taken for the answer; None if none was found.
        reason: one sentence that says why, for people.
        parts: named partial scores, for graders that have several (`--reward-key` picks one).
        unjudged: "" for a judged answer; else why the answer could not be judged: "no_box", "grader_timeout",
            "grader_out_of_memory" or "grader_crashed". Its score is a wrong answer's."""

    score: float
    correct: bool
    extracted: str | None = None
    reason: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)
    unjudged: str = ""

    def part(self, name: str) -> float | None:
        """One of `parts`, or the "score"; None if there is none of that name. An unjudged answer's parts are 0."""
        return self.score if name == "score" else self.parts.get(name, 0.0 if self.unjudged else None)

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__} | {"parts": dict(self.parts)}


GraderFunction = Callable[[str, Any, Metadata], Grade]
"""A grader: `(response, label, metadata) -> Grade`; pure, so that it can run in another process.

Where the data is at fault it raises a `GraderFailure` of kind "grader_bad_label" or "grader_bad_metadata"."""


class GraderService(ABC):
    """A grader that waits for something else (a server, the sandbox), open for many answers: an async context manager,
    made from `RmHubSettings`, that holds its `parts` open. It has no tasks of its own; another task may close it."""

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
