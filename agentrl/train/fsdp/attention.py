"""Attention of transformers' models over packed trees of tokens.

1. `packed_attention` is registered with transformers under `PACKED`; the microbatch reaches it as the keyword `pack` of the
   model's forward. It is computed in blocks by `kernels`, which knows plain causal attention.
2. Whatever a layer asks for beyond that (a window shorter than a sample, sinks, soft caps) its architecture's own plain
   function computes, under a mask of all tokens with all: right, and slow for long microbatches.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from agentrl.train.kernels import attention, kernel_for
from agentrl.train.microbatches import MicrobatchTensors

PACKED = "agentrl_packed"
_PLAIN = {"dropout", "sliding_window", "is_causal", "position_ids", "use_cache", "output_attentions", "layer_idx"}
"""Options of transformers' attention functions that `packed_attention` knows; dropout is off."""


@dataclass
class Pack:
    """What a forward pass tells its layers of the microbatch; `routing` [t, layers, experts a token] if it is replayed."""

    mb: MicrobatchTensors
    routing: Tensor | None = None
    masks: dict[int | None, Tensor] = field(default_factory=dict)

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return int(self.mb.positions.max()) + 1

    def mask(self, window: int | None, like: Tensor) -> Tensor:
        """What is added to scores: [1, 1, t, t], 0 where a token sees another at most `window - 1` positions before it."""
        if window not in self.masks:
            positions = self.mb.positions[0]
            seen = torch.zeros(len(positions), len(positions), dtype=torch.bool, device=like.device)
            for part in self.mb.parts:
                for a, b, s, e in part.blocks:
                    seen[a:b, s:e] = torch.ones(b - a, e - s, device=like.device).tril() > 0 if part.causal else True
            if window is not None:
                seen &= positions[:, None] - positions < window
            hidden = torch.full(seen.shape, torch.finfo(like.dtype).min, dtype=like.dtype, device=like.device)
            self.masks[window] = hidden.masked_fill_(seen, 0.0)[None, None]
        return self.masks[window]


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: Tensor | None,
    *,
    pack: Pack,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """[1, t, heads, dim] of queries [1, heads, t, dim], keys and values [1, groups, t, dim]."""
    window = _window(module, options)
    if window is not None and window >= pack.longest:
        window = None
    if window is None and not {name for name, value in options.items() if value is not None} - _PLAIN:
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        return attention(q, k, v, pack.mb.parts, scaling or query.size(-1) ** -0.5, kernel_for(q))[None], None
    own = sys.modules[type(module).__module__].eager_attention_forward
    options["dropout"] = 0.0
    return own(module, query, key, value, pack.mask(window, query), scaling=scaling, **options)[0], None


def _window(module: Any, options: dict[str, Any]) -> int | None:
    kinds = getattr(module.config, "layer_types", None)
    if kinds and kinds[module.layer_idx] == "full_attention":
        return None
    window: int | None = options.get("sliding_window") or getattr(module.config, "sliding_window", None)
    return window if kinds or options.get("sliding_window") else None


def register() -> None:
    """Make the function known to transformers; safe to repeat."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(PACKED, packed_attention)
    AttentionMaskInterface.register(PACKED, lambda *_, **__: None)
