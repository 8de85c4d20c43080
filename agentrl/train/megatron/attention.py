"""Core attention for megatron's layer spec that needs no Transformer Engine.

1. Runs on any device through torch's scaled dot-product attention, one call a sequence, always causal.
2. Takes packed sequences: query [t, heads, dim], key and value [t, groups, dim] with `PackedSeqParams`.
3. Context parallelism: every rank holds chunks r and 2n-1-r of the 2n chunks of each sequence (the zigzag layout);
   keys and values are gathered over the group, the queries stay where they are.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from torch import Tensor


class _Gather(torch.autograd.Function):
    """All-gather on a new leading axis; the backward pass sums over the group and keeps this rank's slice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad[ctx.group.rank()], None


class PackedAttention(MegatronModule):
    """Causal grouped-query attention over packed sequences; the constructor is the one that megatron's spec calls."""

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.cp_group: dist.ProcessGroup = groups.cp

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Attend within each packed sequence.

        Args:
            query, key, value: [t, heads or groups, dim], t the tokens of this context-parallel rank.
            packed_seq_params: `cu_seqlens_q` counts whole (padded) sequences over all context-parallel ranks.

        Returns:
            [t, heads * dim].
        """
        size = self.cp_group.size()
        bounds = [int(b) // size for b in packed_seq_params.cu_seqlens_q.tolist()]
        if size > 1:
            key, value = _Gather.apply(key, self.cp_group), _Gather.apply(value, self.cp_group)
        # Not slices: the gradient of each would be as large as the whole pack.
        lengths = [end - start for start, end in itertools.pairwise(bounds)]
        sequences = zip(query.split(lengths), key.split(lengths, -3), value.split(lengths, -3), strict=True)
        outputs = []
        for q, k, v in sequences:
            if size == 1:
                out = self._attend(q, k, v, None)
            else:
                mask = _zigzag_mask(len(q), self.cp_group, q.device)
                out = self._attend(q, _unzigzag(k), _unzigzag(v), mask)
            outputs.append(out)
        return torch.cat(outputs).flatten(-2)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=q.size(1) != k.size(1)
        )
        return out[0].transpose(0, 1)


def _unzigzag(gathered: Tensor) -> Tensor:
    """[ranks, tokens, ...] in zigzag order -> [ranks * tokens, ...] in sequence order."""
    first, second = gathered.chunk(2, dim=1)
    return torch.cat([*first.unbind(0), *reversed(second.unbind(0))])


def _zigzag_mask(tokens: int, group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """[tokens, size * tokens] bool: which keys this rank's queries may see."""
    half, size, rank = tokens // 2, group.size(), group.rank()
    steps = torch.arange(half, device=device)
    positions = torch.cat([steps + rank * half, steps + (2 * size - 1 - rank) * half])
    return torch.arange(size * tokens, device=device)[None] <= positions[:, None]
