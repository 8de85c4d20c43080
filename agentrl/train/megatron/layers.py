"""The transformer layer's parts: megatron's own linear layers, an RMSNorm for any layout, and `PackedAttention`.

Stock `torch_norm` refuses sequence parallelism; the norm here marks its weight so that megatron sums its gradient over
the tensor-parallel ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

from agentrl.train.megatron.attention import PackedAttention


class RMSNorm(torch.nn.RMSNorm):
    """Root-mean-square norm over the last axis, built as megatron builds a norm: (config, hidden_size, eps)."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_kwargs: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        weight: Any = self.weight
        weight.sequence_parallel = config.sequence_parallel


def block_spec(config: Any) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage and the final norm, for a `TransformerConfig`."""
    spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    attention = layer.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return TransformerBlockSubmodules(layer_specs=[spec] * get_num_layers_to_build(config), layer_norm=RMSNorm)
