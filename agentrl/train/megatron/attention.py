"""Core attention for megatron's layer spec, without Transformer Engine.

1. The input is a packed tree of tokens (`MegatronPack`): query [t, heads, dim], key and value [t, groups, dim]. A token
   sees earlier tokens of its node and all tokens of the nodes above. `kernels` computes this in blocks, without masks.
2. RoPE is applied here (latent attention applies it itself), because a token's place in the pack is not its position.
3. Context parallelism: rank r of n has chunks r and 2n-1-r of the 2n chunks of each node (zigzag). Only keys and values
   are gathered."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region as gathered
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor

from agentrl.errors import TrainError
from agentrl.train.kernels import attention, kernel_for
from agentrl.train.megatron.families import theirs
from agentrl.train.microbatches import MicrobatchTensors
from agentrl.train.network import rope_max_length


@dataclass(frozen=True, slots=True)
class Rope:
    """RoPE of a model: the rotation of queries and keys by position."""

    frequencies: Tensor  # float32 [rotated channels / 2], angle per position
    factor: float  # factor of cosines and sines
    reach: tuple[int, str] | None = None  # see `Network.reach`

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Rope:
        """Build the RoPE of a `config.json`. Raises TrainError: transformers has no function for the RoPE type."""
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        read = theirs(config)
        rope = read.rope_parameters
        kind = rope["rope_type"]
        window = getattr(read, "sliding_window", None)
        limits = [rope_max_length(read), (window, "sliding_window") if window else None]
        if kind == "default":
            kind, read.rope_parameters = "linear", {**rope, "rope_type": "linear", "factor": 1.0}
        if kind not in ROPE_INIT_FUNCTIONS:
            known = ", ".join(["default", *ROPE_INIT_FUNCTIONS])
            raise TrainError(f"rope type {kind!r} cannot be trained with megatron; expected one of {known}")
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](read)
        return cls(frequencies, factor, min(filter(None, limits), default=None))

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosine and sine [t, 1, rotated channels / 2] of positions [t], times the factor, in `dtype`."""
        found = positions[:, None, None].float() * self.frequencies.to(positions.device)
        return (found.cos() * self.factor).to(dtype), (found.sin() * self.factor).to(dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate the first channels of x [t, heads, dim], as many as have angles, in halves or in neighbouring pairs."""
    turned, rest = x.split([2 * cos.size(-1), x.size(-1) - 2 * cos.size(-1)], -1)
    first, second = turned.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else turned.chunk(2, -1)
    pair = first * cos - second * sin, second * cos + first * sin
    out = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([out, rest], -1) if rest.size(-1) else out


@dataclass(kw_only=True)
class MegatronPack(PackedSeqParams):
    """The layers' view of a microbatch with t tokens on this rank, T on all ranks of the context-parallel group."""

    mb: MicrobatchTensors
    cos: Tensor  # [t, 1, rotated channels / 2], of the angles of the tokens' positions
    sin: Tensor  # [t, 1, rotated channels / 2]
    routing: Tensor | None = None  # int16 [tokens that this rank routes, layers, experts per token], or None
    qkv_format: str = "thd"


class PackedAttention(MegatronModule):
    """Causal grouped-query attention over packed trees, with megatron's signatures; unused arguments are ignored."""

    def __init__(self, config: Any, *, pg_collection: Any, softmax_scale: float | None = None, **_more: Any) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        self.cp_group: dist.ProcessGroup = pg_collection.cp

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: Any, **_more: Any
    ) -> Tensor:
        """Return attention [t, heads * value dim] of queries, keys and values [t, heads or groups, dim]; t counts this
        context-parallel rank's tokens. RoPE is applied here. `packed_seq_params` is a microbatch's `MegatronPack`."""
        pack: MegatronPack = packed_seq_params
        if not self.config.multi_latent_attention:
            turn = partial(rotated, cos=pack.cos, sin=pack.sin, interleaved=self.config.rotary_interleaved)
            query, key = turn(query), turn(key)
        if pack.mb.order is not None:
            key, value = (gathered(x, group=self.cp_group)[pack.mb.order] for x in (key, value))
        return attention(query, key, value, pack.mb.parts, self.scale, kernel_for(query)).flatten(-2)


class LatentAttention(MLASelfAttention):
    """Attention with queries, keys and values that are computed from latents; parameters have megatron's names."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        del self.rotary_pos_emb

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, _other: Any, _positions: Any, pack: MegatronPack, **_more: Any
    ) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """Return query and key [t, heads, dim], value [t, heads, value dim], None and None, for all tokens and this
        rank's heads, from hidden states [t, 1, hidden]. The Nones replace megatron's two latents."""
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
        sizes = [fixed, config.v_head_dim]
        key, value = made.squeeze(1).unflatten(-1, (-1, sum(sizes))).split(sizes, -1)
        still, moved = query.squeeze(1).unflatten(-1, (-1, fixed + turned)).split([fixed, turned], -1)
        shared = turn(copy_to_tensor_model_parallel_region(shared, group=self.tp_group))
        key = torch.cat([key, shared.expand(-1, key.size(1), -1)], -1)
        return torch.cat([still, turn(moved)], -1), key, value, None, None

    def _whole(self, x: Tensor) -> Tensor:
        """Gather a latent's channels from all ranks."""
        return gather_from_tensor_model_parallel_region(x, group=self.tp_group)

    def _cut(self, x: Tensor) -> Tensor:
        """Return this rank's tokens under sequence parallelism, else all tokens."""
        return scatter_to_sequence_parallel_region(x, group=self.tp_group) if self.config.sequence_parallel else x
