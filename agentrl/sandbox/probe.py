"""Which backend this machine gets, found out by running a program in each."""

from collections.abc import Mapping
from dataclasses import dataclass

import anyio

from agentrl.sandbox.box import Sandbox
from agentrl.sandbox.errors import SandboxFailure, SandboxUnavailable
from agentrl.sandbox.launch import SAFE_BACKENDS, Backend


@dataclass(frozen=True, slots=True)
class BackendReport:
    """What the trials showed.

    Attributes:
        name: the backend that `auto` takes, or None if there is no safe one.
        reasons: for each safe backend "works", or why it does not.
        python: for each that works, the interpreter that runs the code.
    """

    name: Backend | None
    reasons: Mapping[str, str]
    python: Mapping[str, str]


async def probe_backends() -> BackendReport:
    """Try every safe backend, in the order of preference; takes about a second."""
    reasons: dict[str, str] = {}
    python: dict[str, str] = {}
    working: list[Backend] = []
    for name in SAFE_BACKENDS:
        try:
            async with Sandbox(name, preload=(), warm=0) as box:
                python[name] = box.python
                reasons.update(box.reasons)
                working.append(name)
        except (SandboxUnavailable, SandboxFailure) as error:
            reasons[name] = str(error.__cause__ or error)
    return BackendReport(working[0] if working else None, reasons, python)


def choose_backend() -> BackendReport:
    """`probe_backends` for code outside an event loop."""
    return anyio.run(probe_backends)
