"""The cost of attention over a pack."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from agentrl.train.kernels import AttentionBlocks
from agentrl.train.megatron.attention import MegatronPack, PackedAttention
from agentrl.train.microbatches import MicrobatchTensors


class _Written(TorchDispatchMode):
    """Counts the elements of all results of operations inside the block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.elements += sum(t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor))
        return out


def test_the_backward_pass_of_packed_attention_grows_with_the_tokens_only(one_rank: dist.ProcessGroup) -> None:
    """Not with tokens times sequences: with a slice for each sequence, each had a gradient as large as the pack."""

    def written(sequences: int) -> int:
        config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2, kv_channels=8)
        attention = PackedAttention(config, pg_collection=ProcessGroupCollection(cp=one_rank))
        size = 256 // sequences
        part = AttentionBlocks(tuple((a, a + size, a, a + size) for a in range(0, 256, size)), causal=True)
        q, k, v = (torch.randn(256, 2, 8, requires_grad=True) for _ in range(3))
        none = torch.zeros(0, dtype=torch.int64)
        mb = MicrobatchTensors(none, none, (part,), None, none, none, none, 256, (), None)
        packed = MegatronPack(mb=mb, cos=torch.ones(256, 1, 4), sin=torch.zeros(256, 1, 4))
        out = attention(q, k, v, packed_seq_params=packed)
        counter = _Written()
        with counter:
            out.sum().backward()
        return counter.elements

    assert written(32) < 1.5 * written(2)
