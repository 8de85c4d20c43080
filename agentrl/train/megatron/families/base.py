"""The vocabulary of the family tables: shapes, layouts, rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from agentrl.modelfolder import EXPERTS

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Latent:
    """Sizes of multi-latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1)."""

    query_rank: int | None  # size of the queries' latent; None: queries come from the hidden state itself
    rank: int  # size of the latent of keys and values
    rotated: int  # number of last channels of a head's query and key that RoPE rotates; heads share the key's
    value: int  # number of channels of a head's value


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model's sizes, read from `config.json`; `head_dim` is that of queries and keys."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    head_dim: int
    vocab: int
    norm_eps: float
    rope_theta: float
    max_positions: int
    tied: bool
    rope_scaling: Mapping[str, Any]
    latent: Latent | None = None
    mixture: Mixture | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """Read a `config.json` as transformers completes it."""
        rope = dict(config["rope_parameters"])
        theta = rope.pop("rope_theta")
        heads = config["num_attention_heads"]
        latent, head_dim = None, config.get("head_dim") or config["hidden_size"] // heads
        if rank := config.get("kv_lora_rank"):
            latent = Latent(config.get("q_lora_rank"), rank, config["qk_rope_head_dim"], config["v_head_dim"])
            head_dim = config["qk_nope_head_dim"] + latent.rotated
        return cls(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            ffn=config["intermediate_size"],
            heads=heads,
            groups=config.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            vocab=config["vocab_size"],
            norm_eps=config["rms_norm_eps"],
            rope_theta=float(theta),
            max_positions=config["max_position_embeddings"],
            tied=config["tie_word_embeddings"],
            rope_scaling=rope,
            latent=latent,
            mixture=Mixture.from_config(config),
        )

    @property
    def channels(self) -> int:
        """Return `channels` of `train.network.CostShape`."""
        return self.layers * self.heads * (self.head_dim + (self.latent.value if self.latent else self.head_dim))


class ShardLayout(Enum):
    """The sharding of a parameter over the tensor-parallel ranks, and the way in which it joins HF's tensors."""

    WHOLE = "whole"
    ROWS = "rows"
    COLUMNS = "columns"
    VOCAB = "rows, padded with zeros to a multiple of the ranks"
    GATED = "the ranks' rows of each of two tensors"
    JOINED = "as gated, of one tensor that has the gate above"
    QKV = "for each key-value group its queries, its key and its value together, weights and biases"

    def split(self, hf: Sequence[Tensor], rank: int, ranks: int, shape: ModelShape) -> Tensor:
        """Return a rank's megatron tensor from HF's whole tensors."""
        import torch  # not at the top: settings import the families

        if self is ShardLayout.WHOLE:
            return hf[0]
        if self is ShardLayout.VOCAB:
            hf = [torch.nn.functional.pad(hf[0], (0, 0, 0, -len(hf[0]) % ranks))]
        if self is ShardLayout.JOINED:
            hf = hf[0].chunk(2)
        turns, rest = self._turns(ranks, shape), hf[0].shape[1:]
        woven = torch.cat([tensor.view(turns, -1, *rest) for tensor in hf], 1).view(-1, *rest)
        return woven.chunk(ranks, self._axis)[rank]

    def merge(self, parts: Sequence[Tensor], shape: ModelShape) -> list[Tensor]:
        """Return HF's tensors from the megatron tensors of all ranks."""
        import torch

        if self is ShardLayout.WHOLE:
            return [parts[0]]
        woven = torch.cat(list(parts), self._axis)
        if self in (ShardLayout.ROWS, ShardLayout.COLUMNS, ShardLayout.VOCAB):
            return [woven[: shape.vocab] if self is ShardLayout.VOCAB else woven]
        turns, rest = self._turns(len(parts), shape), woven.shape[1:]
        sizes = [len(woven) // turns // 2] * 2
        if self is ShardLayout.QKV:
            sizes = [shape.heads // shape.groups * shape.head_dim, shape.head_dim, shape.head_dim]
        found = [block.reshape(-1, *rest) for block in woven.view(turns, sum(sizes), *rest).split(sizes, 1)]
        return [torch.cat(found)] if self is ShardLayout.JOINED else found

    @property
    def _axis(self) -> int:
        return 1 if self is ShardLayout.COLUMNS else 0

    def _turns(self, ranks: int, shape: ModelShape) -> int:
        """Return the number of rounds in which megatron interleaves rows of HF's tensors."""
        return {ShardLayout.QKV: shape.groups, ShardLayout.GATED: ranks, ShardLayout.JOINED: ranks}.get(self, 1)


@dataclass(frozen=True, slots=True)
class Rule:
    """One megatron parameter and the HF tensors that make it. `{}` stands for the layer's number in both, `{expert}`
    for the expert's (in megatron's name, the number on its rank)."""

    megatron: str
    hf: tuple[str, ...]
    layout: ShardLayout
    when: str = ""  # a key of `config.json` that is true for models with this parameter; `!key`: false or absent

    @property
    def of_expert(self) -> bool:
        return "{expert}" in self.megatron

    def holds(self, config: Mapping[str, Any]) -> bool:
        """Return true if a model of this config has the parameter."""
        return not self.when or bool(config.get(self.when.removeprefix("!"))) != self.when.startswith("!")


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """A model family: its `model_type`, and the rules, which also define its layers."""

    model_type: str
    layer_rules: tuple[Rule, ...]
    refuse: tuple[str, ...] = ()  # keys of `config.json` that must be absent or false
    interleaved: bool = False  # rotary pairs are neighbours, not halves of a head
    partial: bool = False  # transformers' model rotates only the part of a head that `partial_rotary_factor` says
    like: str = ""  # transformers' `model_type`, if it differs
    experts: tuple[Rule, ...] = ()  # in place of a layer's `.mlp.` rules if the layer has experts

    def of(self, config: Mapping[str, Any]) -> ModelFamily:
        """Return the family with only the rules that hold for a whole `config.json`."""
        layer, experts = (tuple(r for r in rules if r.holds(config)) for rules in (self.layer_rules, self.experts))
        return replace(self, layer_rules=layer, experts=experts)

    def rules(self, layer: int, shape: ModelShape) -> tuple[Rule, ...]:
        """Return the rules of a layer."""
        if shape.mixture is None or not shape.mixture.layers[layer]:
            return self.layer_rules
        return (*(rule for rule in self.layer_rules if ".mlp." not in rule.megatron), *self.experts)

    def has(self, parameter: str) -> bool:
        """Return true if layers have a parameter whose megatron name ends with `parameter`."""
        return any(rule.megatron.endswith(parameter) for rule in (*self.layer_rules, *self.experts))


EMBEDDING = Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), ShardLayout.VOCAB)
FINAL_NORM = Rule("decoder.final_layernorm.weight", ("model.norm.weight",), ShardLayout.WHOLE)
HEAD = Rule("output_layer.weight", ("lm_head.weight",), ShardLayout.VOCAB)
TIED_HEAD = replace(HEAD, hf=EMBEDDING.hf)  # read from the embedding, and never exported
VALUE_HEAD = Rule("output_layer.weight", ("score.weight",), ShardLayout.WHOLE)
"""The name in transformers' classifiers, so that a critic can start from a reward model with one score."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """The experts of a model."""

    experts: int  # number of experts of a layer
    topk: int  # number of experts per token
    ffn: int  # width of an expert
    shared_ffn: int  # width of the expert that every token goes to, 0 if there is none
    layers: list[int]  # for each layer 1 if it has experts, 0 if it is dense
    normalised: bool  # true if the weights of a token's experts add up to `scaling`
    scaling: float
    groups: int  # number of groups; a token's experts are in its best `group_topk` groups. 1 and 1 without groups.
    group_topk: int

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Mixture | None:
        """Read a `config.json` with the keys of Qwen, DeepSeek or GLM; None for a dense model."""
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
        """Yield entries of `config.json` with which megatron's router would weigh or choose experts differently."""
        if sigmoid and not self.normalised:
            yield "norm_topk_prob", False
        if self.topk == 1 and (sigmoid or self.normalised):
            yield "num_experts_per_tok", 1
        if self.groups > 1 and self.topk // self.group_topk != 2:
            yield "topk_group", self.group_topk
