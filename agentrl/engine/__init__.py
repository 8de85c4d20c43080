"""Inference engines over SGLang's HTTP protocol: the pool, the launcher, and the built-in CPU server.

Public names load on first use; `import agentrl.engine` alone loads neither httpx nor torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl.engine.launcher import check_launch as check_launch
    from agentrl.engine.launcher import launch as launch
    from agentrl.engine.launcher import launch_blocking as launch_blocking
    from agentrl.engine.pool import EnginePool as EnginePool
    from agentrl.engine.process import EngineProcess as EngineProcess
    from agentrl.engine.settings import EngineSettings as EngineSettings
    from agentrl.engine.weights import BroadcastUpdate as BroadcastUpdate
    from agentrl.engine.weights import DiskUpdate as DiskUpdate
    from agentrl.engine.weights import TensorSpec as TensorSpec
    from agentrl.engine.weights import WeightGroup as WeightGroup
    from agentrl.engine.weights import WeightUpdate as WeightUpdate
    from agentrl.engine.wire import FinishReason as FinishReason
    from agentrl.engine.wire import Generation as Generation
    from agentrl.engine.wire import SamplingParams as SamplingParams

_HOMES = {
    **dict.fromkeys(("check_launch", "launch", "launch_blocking"), "launcher"),
    **dict.fromkeys(("EnginePool",), "pool"),
    **dict.fromkeys(("EngineProcess",), "process"),
    **dict.fromkeys(("EngineSettings",), "settings"),
    **dict.fromkeys(("BroadcastUpdate", "DiskUpdate", "TensorSpec", "WeightGroup", "WeightUpdate"), "weights"),
    **dict.fromkeys(("FinishReason", "Generation", "SamplingParams"), "wire"),
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
