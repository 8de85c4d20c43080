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


def choose_backend() -> BackendReport:
    """Try every safe backend, in the order of preference; takes about a second, and runs an event loop of its own."""
    return anyio.run(_try_all)


async def _try_all() -> BackendReport:
    reasons: dict[str, str] = {}
    python: dict[str, str] = {}
    for name in SAFE_BACKENDS:
        try:
            async with Sandbox(name, preload=(), warm=0) as box:
                python[name], reasons[name] = box.python, "works"
        except (SandboxUnavailable, SandboxFailure) as error:
            reasons[name] = str(error.__cause__ or error)
    return BackendReport(next((name for name in SAFE_BACKENDS if name in python), None), reasons, python)
