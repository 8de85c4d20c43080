"""A sandbox for Python that a model wrote, and machines for any command.

`Sandbox.run` runs a program; `Sandbox.session` keeps variables from run to run. Cancellation ends the process tree. The
code's outcome is a `RunResult`; exceptions are about the machine or the caller's input. Backends: `bubblewrap`,
`landlock`, and `unsafe_subprocess` if asked for by name. `try_backends` reports the usable ones.

A `Machine` has a file system for one trajectory: `BubblewrapMachine`, or `ContainerMachine` of Docker or Podman. A
`MachinePool` keeps started machines ready."""

from agentrl.errors import SandboxBusy, SandboxFailure, SandboxInput, SandboxUnavailable
from agentrl.sandbox.box import Sandbox, SandboxSession, try_backends
from agentrl.sandbox.bubblewrap_machine import BubblewrapMachine
from agentrl.sandbox.command import CommandResult
from agentrl.sandbox.container_machine import ContainerMachine
from agentrl.sandbox.limits import MachineLimits, Outcome, RunResult, SandboxLimits
from agentrl.sandbox.machine import Machine
from agentrl.sandbox.machine_pool import MachinePool

__all__ = [
    "BubblewrapMachine", "CommandResult", "ContainerMachine", "Machine", "MachineLimits", "MachinePool", "Outcome",
    "RunResult", "Sandbox", "SandboxBusy", "SandboxFailure", "SandboxInput", "SandboxLimits", "SandboxSession",
    "SandboxUnavailable", "try_backends",
]  # fmt: skip
