"""Inference engines over SGLang's HTTP protocol: the client, the launcher, and the built-in CPU server.

Public names load on first use; `import agentrl.engine` alone loads neither httpx nor torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl.engine.client import EngineClient
    from agentrl.engine.control import EngineControl
    from agentrl.engine.launcher import EngineProcess, check_launch, launch, launch_blocking
    from agentrl.engine.settings import EngineSettings
    from agentrl.engine.wire import FinishReason, Generation, SamplingParams

__all__ = [
    "EngineClient",
    "EngineControl",
    "EngineProcess",
    "EngineSettings",
    "FinishReason",
    "Generation",
    "SamplingParams",
    "check_launch",
    "launch",
    "launch_blocking",
]

_HOMES = {
    "EngineClient": "client",
    "EngineControl": "control",
    "EngineProcess": "launcher",
    "EngineSettings": "settings",
    "FinishReason": "wire",
    "Generation": "wire",
    "SamplingParams": "wire",
    "check_launch": "launcher",
    "launch": "launcher",
    "launch_blocking": "launcher",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
