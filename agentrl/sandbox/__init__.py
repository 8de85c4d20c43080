"""A sandbox for Python that a model wrote.

`Sandbox.run` runs a program; `Sandbox.session` keeps variables from run to run. Cancellation ends the process tree. The
code's outcome is a `RunResult`; exceptions are about the machine or the caller's input. Backends: `bubblewrap`,
`landlock`, and `unsafe_subprocess` if asked for by name. `try_backends` reports the usable ones.
"""

from agentrl.sandbox.box import Sandbox, SandboxSession, try_backends
from agentrl.sandbox.limits import (
    Outcome,
    RunResult,
    SandboxBusy,
    SandboxFailure,
    SandboxInput,
    SandboxLimits,
    SandboxUnavailable,
)

__all__ = [
    "Outcome",
    "RunResult",
    "Sandbox",
    "SandboxBusy",
    "SandboxFailure",
    "SandboxInput",
    "SandboxLimits",
    "SandboxSession",
    "SandboxUnavailable",
    "try_backends",
]
