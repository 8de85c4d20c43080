"""The families, from two tables. `families.tsv` has the parts of each model type's layers: `part?key` is a part of models
whose config has a true `key`; `rotary` has the flags of `ModelFamily`. `rules.tsv` has the rules of each part.

1. `norms`, `attention` and `mlp` are Llama's decoder layer: pre-norm, grouped-query attention, gated MLP. `after` are
   norms of the outputs of attention and MLP, before the residual addition.
2. `joined_mlp` has gate and up projection in one tensor. `latent` is multi-latent attention.
3. With `experts` the router chooses some for each token by a softmax. `gated_expert` is an expert for every token,
   weighted by its own gate. `shared_expert` has a shared expert, and makes scores sigmoids with a bias that is not
   trained (DeepSeek-V3, arXiv:2412.19437)."""

from dataclasses import replace

from agentrl.files import read_table
from agentrl.train.megatron.families.base import ModelFamily, Rule, ShardLayout

_PARTS: dict[str, list[Rule]] = {}
for _part, _megatron, _hf, _when, _layout in read_table(__file__, "rules.tsv"):
    _names = tuple(f"model.layers.{{}}.{name}" for name in _hf.split())
    _PARTS.setdefault(_part, []).append(Rule(f"decoder.layers.{{}}.{_megatron}", _names, ShardLayout[_layout], _when))


def _rules(parts: str) -> tuple[Rule, ...]:
    """Return the rules of a layer with these parts."""
    named = [part.partition("?") for part in parts.split()]
    return tuple(replace(rule, when=key or rule.when) for part, _, key in named for rule in _PARTS[part])


def _family(
    model_type: str, like: str, layer: str, experts: str, refuse: str, rotary: str, _models: str
) -> ModelFamily:
    flags = dict.fromkeys(rotary.split(), True)
    return ModelFamily(model_type, _rules(layer), tuple(refuse.split()), like=like, experts=_rules(experts), **flags)


FAMILIES = tuple(_family(*row) for row in read_table(__file__, "families.tsv"))
