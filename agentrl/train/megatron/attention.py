"""Core attention for megatron's layer spec that needs no Transformer Engine.

1. Takes packed trees of tokens (`Pack`): query [t, heads, dim], key and value [t, groups, dim]. A token sees those before
   it in its own node and all of the nodes above; `kernels` computes that in blocks, without masks.
2. Rotary positions are applied here (latent attention has done it), because a token's place in the pack is not its position.
3. Context parallelism: every rank holds chunks r and 2n-1-r of the 2n chunks of each node (the zigzag layout); keys and
   values are gathered over the group, the queries stay where they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region as gathered
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from agentrl.train.kernels import Part, attention, kernel_for
from agentrl.train.megatron.rope import rotated


@dataclass(kw_only=True)
class Pack(PackedSeqParams):
    """What the layers must know of a microbatch with t tokens on this rank, T on all ranks of the context-parallel group.

    Attributes:
        parts: blocks of this rank's queries and of all keys in the tree's order; see `kernels`.
        order: int64 [T], where the keys in the tree's order lie in those gathered from the ranks; None on one rank.
        cos, sin: [t, 1, rotated channels / 2], of the angles of the tokens' positions.
        routing: int16 [tokens that this rank routes, layers, experts a token], see `routing`; None if nothing is replayed.
    """

    parts: tuple[Part, ...]
    order: Tensor | None
    cos: Tensor
    sin: Tensor
    routing: Tensor | None = None
    qkv_format: str = "thd"


class PackedAttention(MegatronModule):
    """Causal grouped-query attention over packed trees, made and called as megatron does; it gives more than is needed."""

    def __init__(self, config: Any, *, pg_collection: Any, softmax_scale: float | None = None, **_more: Any) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.cp_group: dist.ProcessGroup = pg_collection.cp

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: Any, **_more: Any
    ) -> Tensor:
        """Rotate and attend.

        Args:
            query, key, value: [t, heads or groups, dim], t the tokens of this context-parallel rank; values may have
                another dim.
            packed_seq_params: the microbatch's `Pack`.

        Returns:
            [t, heads * dim of the values].
        """
        pack: Pack = packed_seq_params
        if not self.config.multi_latent_attention:
            query, key = (
                rotated(x, pack.cos, pack.sin, interleaved=self.config.rotary_interleaved) for x in (query, key)
            )
        if pack.order is not None:
            key, value = (gathered(x, group=self.cp_group)[pack.order] for x in (key, value))
        return attention(query, key, value, pack.parts, self.scale, kernel_for(query)).flatten(-2)
