"""Mixtures of experts: what `config.json` says of them, and the rules of a layer that has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.modelfolder import EXPERTS


@dataclass(frozen=True, slots=True)
class Mixture:
    """The experts of a model.

    Attributes:
        experts, topk: how many a layer has, and how many of them a token goes to.
        ffn: width of an expert.
        shared_ffn: width of the expert that every token goes to, 0 if there is none.
        layers: for each layer 1 if it has experts, 0 if it is dense.
        normalised: whether the weights of a token's experts add up to `scaling`.
        groups, group_topk: experts are in so many groups, of which a token's are in the best so many; 1 and 1 for all.
    """

    experts: int
    topk: int
    ffn: int
    shared_ffn: int
    layers: list[int]
    normalised: bool
    scaling: float
    groups: int
    group_topk: int

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Mixture | None:
        """Read a `config.json` of Qwen's or DeepSeek's (and GLM's) keys; None for a dense model."""
        experts = next((config[key] for key in EXPERTS if config.get(key)), 0)
        if not experts:
            return None
        ffn, dense = config["moe_intermediate_size"], set(config.get("mlp_only_layers") or ())
        dense |= set(range(config.get("first_k_dense_replace") or 0))
        dense |= {i for i, kind in enumerate(config.get("mlp_layer_types") or ()) if kind == "dense"}
        every = config.get("decoder_sparse_step") or 1
        layers = [int((i + 1) % every == 0 and i not in dense) for i in range(config["num_hidden_layers"])]
        if not any(layers):
            return None
        return cls(
            experts=experts,
            topk=config["num_experts_per_tok"],
            ffn=ffn,
            shared_ffn=config.get("shared_expert_intermediate_size") or ffn * (config.get("n_shared_experts") or 0),
            layers=layers,
            normalised=bool(config.get("norm_topk_prob", False)),
            scaling=float(config.get("routed_scaling_factor") or 1.0),
            groups=config.get("n_group") or 1,
            group_topk=config.get("topk_group") or 1,
        )

    def unexpressed(self, *, sigmoid: bool) -> Iterator[tuple[str, Any]]:
        """Entries of `config.json` by which megatron's router would weigh or choose otherwise."""
        if sigmoid and not self.normalised:
            yield "norm_topk_prob", False
        if self.topk == 1 and (sigmoid or self.normalised):
            yield "num_experts_per_tok", 1
        if self.groups > 1 and self.topk // self.group_topk != 2:
            yield "topk_group", self.group_topk
