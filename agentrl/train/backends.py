"""The train backends by name, the one place where `train_backend` is read."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from agentrl.errors import SettingsError

if TYPE_CHECKING:
    from agentrl.train.trainer import TrainBackend


def backend_class(name: str) -> type[TrainBackend]:
    """Return the backend of this name, after its framework is loaded. Raises SettingsError: there is none."""
    if name == "megatron":
        # Megatron says at import what it does without, and later what its checkpoints and torch's say of each other.
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
