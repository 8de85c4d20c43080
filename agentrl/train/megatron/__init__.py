"""The Megatron training backend, built from megatron.core alone; importing the package loads none of it."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl.train.megatron.backend import MegatronBackend

__all__ = ["MegatronBackend"]


def __getattr__(name: str) -> Any:
    if name == "MegatronBackend":
        from agentrl.train.megatron.backend import MegatronBackend

        return MegatronBackend
    raise AttributeError(f"module 'agentrl.train.megatron' has no attribute {name!r}")
