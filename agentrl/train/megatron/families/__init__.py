"""Model families: how Hugging Face names and shapes map to megatron's, as declarative tables.

1. A family is data: which `model_type` it reads, what its attention has, and one `Rule` a parameter.
2. `family_of(config)` picks it from `config.json`; anything the tables cannot express is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from agentrl.errors import TrainError
from agentrl.train.megatron.families import llama, qwen2, qwen3
from agentrl.train.megatron.families.base import Family, Layout, ModelShape, Rule

FAMILIES: tuple[Family, ...] = (qwen2.FAMILY, qwen3.FAMILY, llama.FAMILY)

__all__ = ["FAMILIES", "Family", "Layout", "ModelShape", "Rule", "family_of"]


def family_of(config: Mapping[str, Any]) -> Family:
    """The family for a `config.json`.

    Raises:
        TrainError: the architecture is not supported, or the config asks for something its table cannot express.
    """
    model_type = config.get("model_type")
    for family in FAMILIES:
        if family.model_type == model_type:
            if refused := [f"{key}={value!r}" for key, value in _unexpressed(family, config)]:
                raise TrainError(f"{model_type} models with {', '.join(refused)} cannot be trained with megatron yet")
            return family
    known = ", ".join(f.model_type for f in FAMILIES)
    raise TrainError(f"expected a model_type among {known}; config.json says {model_type!r}")


def _unexpressed(family: Family, config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Entries of `config.json` that change what the model computes or stores, and have no place in the tables."""
    found = {**config, **(config.get("rope_parameters") or config.get("rope_scaling") or {})}
    for key in (*family.refuse, "quantization_config"):
        if found.get(key):
            yield key, found[key]
    for key, expressed in _EXPRESSED.items():
        value = found.get(key)
        if value is not None and not set(value if isinstance(value, list) else [value]) <= expressed:
            yield key, value


_EXPRESSED: Mapping[str, set[Any]] = {
    "hidden_act": {"silu", "swish"},
    "partial_rotary_factor": {1},
    "layer_types": {"full_attention"},
}
"""Keys of `config.json` that choose among kinds, and the kinds that the tables are for; absent means one of these."""
