"""Model families: the mapping of Hugging Face names and shapes to megatron's, as declarative tables. A family is data:
its `model_type`, and one `Rule` per parameter. The rules also define what layers have. Entries that `config.json` lacks
have the defaults of transformers' config class."""

from collections.abc import Iterator, Mapping
from typing import Any

from agentrl.errors import TrainError, raised_as
from agentrl.train.megatron.families.base import Mixture, ModelFamily, ModelShape, Rule, ShardLayout
from agentrl.train.megatron.families.tables import FAMILIES

__all__ = ["FAMILIES", "Mixture", "ModelFamily", "ModelShape", "Rule", "ShardLayout", "family_of", "shape_of", "theirs"]


def family_of(config: Mapping[str, Any]) -> ModelFamily:
    """Return the family of a `config.json`. Raises TrainError: the tables cannot express its architecture."""
    family = _named(config)
    whole = theirs(config).to_dict()
    if refused := [f"{key}={value!r}" for key, value in _unexpressed(family, whole)]:
        raise TrainError(f"{family.model_type} models with {', '.join(refused)} cannot be trained with megatron yet")
    return family.of(whole)


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """Return the sizes in a `config.json` of a family."""
    return ModelShape.from_config(theirs(config).to_dict())


def theirs(config: Mapping[str, Any]) -> Any:
    """Return a family's `config.json` as transformers' config object. Raises TrainError: transformers refuses it."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    family = _named(config)
    what = f"config.json is not one of a {family.model_type} model"
    with raised_as(TrainError, what, StrictDataclassError, KeyError):
        return CONFIG_MAPPING[family.like or family.model_type].from_dict(dict(config))


def _named(config: Mapping[str, Any]) -> ModelFamily:
    model_type = config.get("model_type")
    for family in FAMILIES:
        if family.model_type == model_type:
            return family
    if "vision_config" in config:
        raise TrainError(f"{model_type} models see images; megatron trains text models alone: set --train-backend fsdp")
    known = ", ".join(f.model_type for f in FAMILIES)
    raise TrainError(f"expected a model_type among {known}; config.json says {model_type!r}")


def _unexpressed(family: ModelFamily, config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield entries of a whole `config.json` that change the model and that the tables cannot express."""
    found = {**config, **config["rope_parameters"]}
    for key in (*family.refuse, "quantization_config"):
        if found.get(key):
            yield key, found[key]
    if mixture := Mixture.from_config(config):
        yield from mixture.unexpressed(sigmoid=family.has("router.expert_bias"))
    for key, expressed in _EXPRESSED.items():
        value = found.get(key)
        given = set(value if isinstance(value, list) else [] if value is None else [value])
        if not (given <= expressed or (family.partial and key == "partial_rotary_factor")):
            yield key, value


_EXPRESSED: Mapping[str, set[Any]] = {
    "hidden_act": {"silu", "swish"},
    "partial_rotary_factor": {1},
    "layer_types": {"full_attention", "sliding_attention"},  # as long as no sample is longer than the window
    "rope_interleave": {True},
    "qkv_bias": {True},
    "moe_layer_freq": {1},
}
"""Keys of `config.json` that choose a variant, and the supported variants. An absent key means one of these."""
