"""Tensor code of the algorithms. It imports torch, so a module such as `ops.clipping` is loaded at its first use."""

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
