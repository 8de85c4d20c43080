"""A sandbox for Python that a model wrote.

1. `Sandbox.run` runs a program in a process of its own; `Sandbox.session` keeps variables from run to run. Neither
   blocks the event loop; cancellation ends the process tree.
2. Whatever the code is and does comes back as a `RunResult`. `SandboxUnavailable`, `SandboxBusy` and `SandboxFailure`
   are about the machine, `SandboxInput` about the caller's standard input.
3. Backends: `bubblewrap` (namespaces, its own file view), `landlock` (where namespaces are blocked), and, only when
   asked for by its name, `unsafe_subprocess`. `try_backends` says which of them work here.
"""

from agentrl.sandbox.box import Sandbox, SandboxSession, try_backends
from agentrl.sandbox.errors import SandboxBusy, SandboxFailure, SandboxInput, SandboxUnavailable
from agentrl.sandbox.limits import Outcome, RunResult, SandboxLimits

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
