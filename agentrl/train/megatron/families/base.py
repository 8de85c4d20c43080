"""The vocabulary of the family tables: shapes, layouts, rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model's sizes, read from `config.json`."""

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

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """Read a `config.json`; rope settings are found in their old (`rope_theta`) and new (`rope_parameters`) places."""
        rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        theta = rope.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
        rope["rope_type"] = rope.get("rope_type") or rope.pop("type", None) or "default"
        heads = config["num_attention_heads"]
        return cls(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            ffn=config["intermediate_size"],
            heads=heads,
            groups=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocab=config["vocab_size"],
            norm_eps=config.get("rms_norm_eps", 1e-6),
            rope_theta=float(theta),
            max_positions=config.get("max_position_embeddings", 32768),
            tied=bool(config.get("tie_word_embeddings", False)),
            rope_scaling=rope,
        )

    @property
    def attention_crossover(self) -> int:
        """The length, in tokens, at which a sequence's causal attention costs as much as the matrices.

        A token costs 2 operations for each of a layer's P matrix weights; attention over n tokens, halved by causality,
        2 n^2 per layer and channel of the heads.
        """
        return (self._layer + self.hidden * self.vocab // self.layers) // (self.heads * self.head_dim)

    @property
    def _layer(self) -> int:
        """A layer's matrix weights."""
        return 2 * self.hidden * (self.heads + self.groups) * self.head_dim + 3 * self.hidden * self.ffn

    def forward_flops(self, lengths: NDArray[np.int64]) -> float:
        """Operations of a forward pass over sequences of these lengths, each by itself, attention halved by causality."""
        tokens, squares = float(lengths.sum()), float((lengths.astype(np.float64) ** 2).sum())
        matrices = 2 * tokens * (self.layers * self._layer + self.hidden * self.vocab)
        return matrices + 2 * squares * self.layers * self.heads * self.head_dim


Split = Callable[[Sequence[Tensor], int, int, ModelShape], Tensor]
"""(HF tensors, rank, ranks, shape) -> this rank's megatron tensor."""
Merge = Callable[[Sequence[Tensor], ModelShape], list[Tensor]]
"""(the megatron tensors of all ranks, shape) -> HF tensors."""


def _split_whole(hf: Sequence[Tensor], rank: int, ranks: int, shape: ModelShape) -> Tensor:
    return hf[0]


def _merge_whole(parts: Sequence[Tensor], shape: ModelShape) -> list[Tensor]:
    return [parts[0]]


def _split_rows(hf: Sequence[Tensor], rank: int, ranks: int, shape: ModelShape) -> Tensor:
    return hf[0].chunk(ranks, 0)[rank]


def _merge_rows(parts: Sequence[Tensor], shape: ModelShape) -> list[Tensor]:
    return [torch.cat(list(parts), 0)]


def _split_columns(hf: Sequence[Tensor], rank: int, ranks: int, shape: ModelShape) -> Tensor:
    return hf[0].chunk(ranks, 1)[rank]


def _merge_columns(parts: Sequence[Tensor], shape: ModelShape) -> list[Tensor]:
    return [torch.cat(list(parts), 1)]


def _split_vocab(hf: Sequence[Tensor], rank: int, ranks: int, shape: ModelShape) -> Tensor:
    """Rows, after padding with zeros to a multiple of the ranks."""
    padding = -hf[0].size(0) % ranks
    padded = torch.cat([hf[0], hf[0].new_zeros(padding, hf[0].size(1))]) if padding else hf[0]
    return padded.chunk(ranks, 0)[rank]


def _merge_vocab(parts: Sequence[Tensor], shape: ModelShape) -> list[Tensor]:
    return [torch.cat(list(parts), 0)[: shape.vocab]]


def _split_gated(hf: Sequence[Tensor], rank: int, ranks: int, shape: ModelShape) -> Tensor:
    return torch.cat([t.chunk(ranks, 0)[rank] for t in hf])


def _merge_gated(parts: Sequence[Tensor], shape: ModelShape) -> list[Tensor]:
    pairs = [part.chunk(2, 0) for part in parts]
    return [torch.cat([pair[i] for pair in pairs]) for i in (0, 1)]


def _split_qkv(hf: Sequence[Tensor], rank: int, ranks: int, shape: ModelShape) -> Tensor:
    """Megatron keeps, for each key-value group, its queries, its key and its value together (weights and biases)."""
    rest = hf[0].shape[1:]
    blocks = torch.cat([t.view(shape.groups, -1, *rest) for t in hf], 1)
    return blocks.chunk(ranks, 0)[rank].reshape(-1, *rest)


def _merge_qkv(parts: Sequence[Tensor], shape: ModelShape) -> list[Tensor]:
    whole = torch.cat(list(parts), 0)
    rest = whole.shape[1:]
    sizes = [shape.heads // shape.groups * shape.head_dim, shape.head_dim, shape.head_dim]
    blocks = whole.view(shape.groups, sum(sizes), *rest).split(sizes, 1)
    return [block.reshape(-1, *rest) for block in blocks]


class Layout(Enum):
    """How a parameter is cut over the tensor-parallel ranks, and how HF's tensors are joined in megatron's."""

    WHOLE = (_split_whole, _merge_whole)
    ROWS = (_split_rows, _merge_rows)
    COLUMNS = (_split_columns, _merge_columns)
    VOCAB = (_split_vocab, _merge_vocab)
    GATED = (_split_gated, _merge_gated)
    QKV = (_split_qkv, _merge_qkv)

    def __init__(self, split: Split, merge: Merge) -> None:
        self.split = split
        self.merge = merge


@dataclass(frozen=True, slots=True)
class Rule:
    """One megatron parameter and the HF tensors that make it; `{}` stands for the layer's number in both."""

    megatron: str
    hf: tuple[str, ...]
    layout: Layout


@dataclass(frozen=True, slots=True)
class Family:
    """A model family: its `model_type`, what its attention has, and its rules."""

    model_type: str
    layer_rules: tuple[Rule, ...]
    qkv_bias: bool = False
    qk_norm: bool = False
    refuse: tuple[str, ...] = ()
    """Keys of `config.json` that must be absent or false."""

    @property
    def embedding(self) -> Rule:
        return Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), Layout.VOCAB)

    @property
    def final_norm(self) -> Rule:
        return Rule("decoder.final_layernorm.weight", ("model.norm.weight",), Layout.WHOLE)

    def head(self, tied: bool) -> Rule:
        """The output layer; where it is tied to the embedding it is read from it and never exported."""
        source = "model.embed_tokens.weight" if tied else "lm_head.weight"
        return Rule("output_layer.weight", (source,), Layout.VOCAB)


def decoder_rules(*, qkv_bias: bool = False, qk_norm: bool = False) -> tuple[Rule, ...]:
    """The rules of a pre-norm, gated, grouped-query decoder layer as Llama laid it out."""
    hf, mg = "model.layers.{}.", "decoder.layers.{}."
    q_k_v = [f"{hf}self_attn.{x}_proj" for x in "qkv"]
    rules = [
        Rule(f"{mg}input_layernorm.weight", (f"{hf}input_layernorm.weight",), Layout.WHOLE),
        Rule(f"{mg}self_attention.linear_qkv.weight", tuple(f"{x}.weight" for x in q_k_v), Layout.QKV),
        Rule(f"{mg}self_attention.linear_proj.weight", (f"{hf}self_attn.o_proj.weight",), Layout.COLUMNS),
        Rule(f"{mg}pre_mlp_layernorm.weight", (f"{hf}post_attention_layernorm.weight",), Layout.WHOLE),
        Rule(f"{mg}mlp.linear_fc1.weight", (f"{hf}mlp.gate_proj.weight", f"{hf}mlp.up_proj.weight"), Layout.GATED),
        Rule(f"{mg}mlp.linear_fc2.weight", (f"{hf}mlp.down_proj.weight",), Layout.COLUMNS),
    ]
    if qkv_bias:
        rules.append(Rule(f"{mg}self_attention.linear_qkv.bias", tuple(f"{x}.bias" for x in q_k_v), Layout.QKV))
    if qk_norm:
        rules += [
            Rule(f"{mg}self_attention.{x}_layernorm.weight", (f"{hf}self_attn.{x}_norm.weight",), Layout.WHOLE)
            for x in "qk"
        ]
    return tuple(rules)
