"""Multi-latent attention for megatron's layer spec (DeepSeek-V2, arXiv:2405.04434, section 2.1), over packed trees.

Megatron's own module, but for how queries, keys and values are made: positions come from the pack, and the gradient of the
key's rotated channels, which all heads share, is summed over the tensor-parallel ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor

from agentrl.train.megatron.rope import rotated


class LatentAttention(MLASelfAttention):
    """Attention whose queries, keys and values are made from latents; parameters as megatron names them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        del self.rotary_pos_emb

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Any = None,
        position_ids: Any = None,
        packed_seq_params: Any = None,
        inference_context: Any = None,
    ) -> tuple[Tensor, ...]:
        """Make and rotate.

        Args:
            hidden_states: [t, 1, hidden], t those of this rank under sequence parallelism.
            packed_seq_params: the microbatch's `Pack`.

        Returns:
            query, key: [t, heads, dim] and value [t, heads, value dim] of all tokens and this rank's heads; both latents.
        """
        config, pack = self.config, packed_seq_params
        fixed, turned = config.qk_head_dim, config.qk_pos_emb_head_dim
        queries = hidden_states
        if config.q_lora_rank is None:
            query = self.linear_q_proj(queries)[0]
        else:
            queries = self.q_layernorm(self._cut(self._whole(self.linear_q_down_proj(hidden_states)[0])))
            query = self.linear_q_up_proj(queries)[0]
        down = self._whole(self.linear_kv_down_proj(hidden_states)[0])
        latent, shared = down.split([config.kv_lora_rank, turned], -1)
        latent = self.kv_layernorm(self._cut(latent))
        made = self.linear_kv_up_proj(latent)[0].squeeze(1).unflatten(-1, (-1, fixed + config.v_head_dim))
        key, value = made.split([fixed, config.v_head_dim], -1)
        still, moved = query.squeeze(1).unflatten(-1, (-1, fixed + turned)).split([fixed, turned], -1)
        shared = rotated(
            copy_to_tensor_model_parallel_region(shared, group=self.tp_group), pack.cos, pack.sin, interleaved=True
        )
        query = torch.cat([still, rotated(moved, pack.cos, pack.sin, interleaved=True)], -1)
        key = torch.cat([key, shared.expand(-1, key.size(1), -1)], -1)
        return query, key, value, queries, latent

    def _whole(self, x: Tensor) -> Tensor:
        """A latent's channels from all ranks."""
        return gather_from_tensor_model_parallel_region(x, group=self.tp_group)

    def _cut(self, x: Tensor) -> Tensor:
        """This rank's tokens under sequence parallelism."""
        return scatter_to_sequence_parallel_region(x, group=self.tp_group) if self.config.sequence_parallel else x
