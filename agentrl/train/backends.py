"""The train backends by name. No other module imports their classes."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from agentrl.errors import SettingsError

if TYPE_CHECKING:
    from agentrl.train.trainer import TrainBackend


def backend_class(name: str) -> type[TrainBackend]:
    """Load a backend's framework and return the backend's class. Raises SettingsError: no backend has this name."""
    if name == "megatron":
        # Hides megatron's warnings about missing packages, and later ones of megatron's and torch's checkpoint code.
        warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"megatron\.|torch\.distributed\.checkpoint\.")
        from agentrl.train.megatron.device import uncompiled

        with uncompiled():
            from agentrl.train.megatron.network import MegatronBackend
        return MegatronBackend
    if name == "fsdp":
        from agentrl.train.fsdp.network import FsdpBackend

        return FsdpBackend
    raise SettingsError(f"train_backend {name!r}: there is no such backend; expected megatron or fsdp")
