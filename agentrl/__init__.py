"""agentrl: reinforcement learning of tool-using language-model agents.

Public names load lazily, so `import agentrl` costs next to nothing and needs none of torch, ray, transformers.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl.envs import Environment, Step, Turn
    from agentrl.errors import AgentRLError, Blame, Failure
    from agentrl.sample import Message, Sample, Status
    from agentrl.tools import Tool, tool

__version__ = "0.1.0"

_HOMES = {
    "Environment": "agentrl.envs",
    "Step": "agentrl.envs",
    "Turn": "agentrl.envs",
    "AgentRLError": "agentrl.errors",
    "Blame": "agentrl.errors",
    "Failure": "agentrl.errors",
    "Message": "agentrl.sample",
    "Sample": "agentrl.sample",
    "Status": "agentrl.sample",
    "Tool": "agentrl.tools",
    "tool": "agentrl.tools",
}

__all__ = [
    "AgentRLError",
    "Blame",
    "Environment",
    "Failure",
    "Message",
    "Sample",
    "Status",
    "Step",
    "Tool",
    "Turn",
    "tool",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'agentrl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
