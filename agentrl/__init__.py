"""agentrl: reinforcement learning of tool-using language-model agents. Public names load lazily, so `import agentrl`
is fast and imports none of torch, ray, transformers."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl.envs import Environment as Environment
    from agentrl.envs import Step as Step
    from agentrl.envs import Turn as Turn
    from agentrl.errors import AgentRLError as AgentRLError
    from agentrl.errors import Blame as Blame
    from agentrl.errors import Failure as Failure
    from agentrl.sample import Message as Message
    from agentrl.sample import Sample as Sample
    from agentrl.sample import Status as Status
    from agentrl.tools import Tool as Tool
    from agentrl.tools import tool as tool

__version__ = "0.1.0"

_HOMES = {
    **dict.fromkeys(("Environment", "Step", "Turn"), "agentrl.envs"),
    **dict.fromkeys(("AgentRLError", "Blame", "Failure"), "agentrl.errors"),
    **dict.fromkeys(("Message", "Sample", "Status"), "agentrl.sample"),
    **dict.fromkeys(("Tool", "tool"), "agentrl.tools"),
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'agentrl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
