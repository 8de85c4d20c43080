"""Shapes of a model from its folder's config.json, read without transformers."""

import os.path
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.errors import CheckpointError, SettingsError, raised_as
from agentrl.modelfolder import EXPERTS, read_config, text_config


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The model's type, and shapes that a layout must divide; None if the config lacks them."""

    heads: int | None = None
    kv_heads: int | None = None
    layers: int | None = None
    context_length: int | None = None
    vocab_size: int | None = None
    experts: int | None = None
    model_type: str | None = None


def read_model_info(path: str | None) -> ModelInfo | None:
    """Read `<path>/config.json`; None if it is missing (not yet made, a hub name). Raises SettingsError: a bad file."""
    if path is None or not os.path.isfile(file := Path(os.path.expanduser(path), "config.json")):
        return None
    with raised_as(SettingsError, "--hf-checkpoint", CheckpointError):
        config = read_config(file.parent)
    merged = text_config(config)
    heads = _int(merged, "num_attention_heads", "n_head")
    return ModelInfo(
        heads=heads,
        kv_heads=_int(merged, "num_key_value_heads") or heads,
        layers=_int(merged, "num_hidden_layers", "n_layer"),
        context_length=_int(merged, "max_position_embeddings", "n_positions"),
        vocab_size=_int(merged, "vocab_size"),
        experts=_int(merged, *EXPERTS),
        model_type=config.get("model_type"),
    )


def _int(config: dict[str, Any], *names: str) -> int | None:
    return next((value for name in names if isinstance(value := config.get(name), int)), None)
