"""What the sandbox raises. What the model's code does is never an exception, but a `RunResult`."""

from agentrl.errors import AgentRLError, ToolFailure


class SandboxUnavailable(AgentRLError):
    """No backend works as asked on this machine; names what is missing and what to do."""


class SandboxBusy(ToolFailure):
    """A run waited longer than `queue_seconds` for its turn and was not started."""

    usual_kind = "sandbox_busy"


class SandboxFailure(ToolFailure):
    """The sandbox itself broke during a run: its process ended or answered nonsense. The run may be tried again."""

    usual_kind = "sandbox_failure"


class SandboxInput(AgentRLError, ValueError):
    """A text that cannot be handed to a program as its standard input; says why and what to do."""
