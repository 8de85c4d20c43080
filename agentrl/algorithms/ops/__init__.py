"""Tensor code of the algorithms, which imports torch: a module is loaded when it is first asked for, as `ops.clipping`."""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentrl.algorithms.ops import clipping, corrections, entropy, kl, normalization, returns

__all__ = ["clipping", "corrections", "entropy", "kl", "normalization", "returns"]


def __getattr__(name: str) -> ModuleType:
    if name.startswith("_"):
        raise AttributeError(name)
    return importlib.import_module(f"{__name__}.{name}")
