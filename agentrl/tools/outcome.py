"""What came of one tool call."""

from dataclasses import dataclass
from enum import StrEnum

from agentrl.errors import AgentRLError


class OutcomeKind(StrEnum):
    """How a tool call ended; the values are stable names for metrics."""

    OK = "ok"
    """The tool returned a usable result."""
    BAD_ARGUMENTS = "bad_arguments"
    """The arguments are not a JSON object, or do not fit the tool's schema."""
    UNKNOWN_TOOL = "unknown_tool"
    """There is no tool of that name."""
    REFUSED = "refused"
    """The tool raised a `ToolError`: it answers with an error that it words for the model."""
    RAISED = "raised"
    """The tool raised any other exception."""
    TIMEOUT = "timeout"
    """The tool did not finish before its deadline."""
    HUNG = "hung"
    """The tool was not run: too many calls of sync tools have outlived their deadline and never returned."""
    BAD_RESULT = "bad_result"
    """The tool returned something that cannot be shown to a model."""


class ToolError(AgentRLError):
    """A failed call. The message is written for the model; a tool may raise it to word its own errors."""

    def __init__(self, message: str, *, kind: OutcomeKind = OutcomeKind.REFUSED) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class ToolOutcome:
    """The text to show the model, how the call ended, and how long it took (seconds)."""

    text: str
    kind: OutcomeKind
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether the tool returned a usable result."""
        return self.kind is OutcomeKind.OK
