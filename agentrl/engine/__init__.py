"""Inference engines over SGLang's HTTP protocol: the pool, the launcher, and the built-in CPU server.

Public names load on first use; `import agentrl.engine` alone loads neither httpx nor torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl.engine.launcher import EngineProcess, check_launch, launch, launch_blocking
    from agentrl.engine.pool import EnginePool
    from agentrl.engine.settings import EngineSettings
    from agentrl.engine.weights import BroadcastUpdate, DiskUpdate, TensorSpec, WeightGroup, WeightUpdate
    from agentrl.engine.wire import FinishReason, Generation, SamplingParams

__all__ = [
    "BroadcastUpdate",
    "DiskUpdate",
    "EnginePool",
    "EngineProcess",
    "EngineSettings",
    "FinishReason",
    "Generation",
    "SamplingParams",
    "TensorSpec",
    "WeightGroup",
    "WeightUpdate",
    "check_launch",
    "launch",
    "launch_blocking",
]

_HOMES = {
    "BroadcastUpdate": "weights",
    "DiskUpdate": "weights",
    "EnginePool": "pool",
    "EngineProcess": "launcher",
    "EngineSettings": "settings",
    "FinishReason": "wire",
    "Generation": "wire",
    "SamplingParams": "wire",
    "TensorSpec": "weights",
    "WeightGroup": "weights",
    "WeightUpdate": "weights",
    "check_launch": "launcher",
    "launch": "launcher",
    "launch_blocking": "launcher",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
