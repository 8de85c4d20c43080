"""Multi-latent attention for megatron's layer spec (DeepSeek-V2, arXiv:2405.04434, section 2.1), over packed trees.

Megatron's own module, but for how queries, keys and values are made: positions come from the pack, and the gradient of the
key's rotated channels, which all heads share, is summed over the tensor-parallel ranks.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor

from agentrl.train.megatron.attention import Pack
from agentrl.train.megatron.rope import rotated


class LatentAttention(MLASelfAttention):
    """Attention whose queries, keys and values are made from latents; parameters as megatron names them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        del self.rotary_pos_emb

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, _other: Any, _positions: Any, pack: Pack, **_more: Any
    ) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """Of hidden states [t, 1, hidden] and the microbatch's `Pack`: for all tokens and this rank's heads.

        Returns:
            Query and key [t, heads, dim], value [t, heads, value dim], and nothing in place of two latents.
        """
        config = self.config
        fixed, turned = config.qk_head_dim, config.qk_pos_emb_head_dim
        turn = partial(rotated, cos=pack.cos, sin=pack.sin, interleaved=True)
        if config.q_lora_rank is None:
            query = self.linear_q_proj(hidden_states)[0]
        else:
            latent = self._cut(self._whole(self.linear_q_down_proj(hidden_states)[0]))
            query = self.linear_q_up_proj(self.q_layernorm(latent))[0]
        down = self._whole(self.linear_kv_down_proj(hidden_states)[0])
        latent, shared = down.split([config.kv_lora_rank, turned], -1)
        made = self.linear_kv_up_proj(self.kv_layernorm(self._cut(latent)))[0]
        key, value = (
            made.squeeze(1).unflatten(-1, (-1, fixed + config.v_head_dim)).split([fixed, config.v_head_dim], -1)
        )
        still, moved = query.squeeze(1).unflatten(-1, (-1, fixed + turned)).split([fixed, turned], -1)
        shared = turn(copy_to_tensor_model_parallel_region(shared, group=self.tp_group))
        key = torch.cat([key, shared.expand(-1, key.size(1), -1)], -1)
        return torch.cat([still, turn(moved)], -1), key, value, None, None

    def _whole(self, x: Tensor) -> Tensor:
        """A latent's channels from all ranks."""
        return gather_from_tensor_model_parallel_region(x, group=self.tp_group)

    def _cut(self, x: Tensor) -> Tensor:
        """This rank's tokens under sequence parallelism."""
        return scatter_to_sequence_parallel_region(x, group=self.tp_group) if self.config.sequence_parallel else x
