"""KV memory and the attention function that reads and writes it.

1. `KVCache` holds one `[slot, kv_head, position, head_dim]` pair of tensors a layer. On CPU the pages are touched lazily,
   so unused slots and positions cost address space only.
2. One forward pass carries many sequences, packed without padding into `[1, T]`: first the sequences that add one token,
   then the chunks of those that add more. A `Plan` says which is which.
3. `slot_attention` is registered with transformers under the name `ATTENTION`; the plan reaches it as a keyword argument
   of the model's forward. Only full causal attention is served: anything else (sliding windows, soft-capping, sinks)
   raises `AgentRLError` instead of giving wrong numbers.
"""

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from agentrl.errors import AgentRLError

ATTENTION = "agentrl_slots"
DENSE_ENOUGH = 0.6
"""Share of useful entries above which one batched call over a range of slots beats a call per sequence."""


class KVCache:
    """Keys and values of `slots` sequences of up to `length` tokens."""

    def __init__(self, config: Any, slots: int, length: int, dtype: torch.dtype, device: torch.device) -> None:
        self._shape = (slots, config.num_key_value_heads, length, head_dim(config))
        self._layers, self._dtype, self._device = config.num_hidden_layers, dtype, device
        self.restore()

    def restore(self) -> None:
        """Take the memory."""
        make = partial(_zeros, self._shape, self._dtype, self._device)
        self.keys, self.values = ([make() for _ in range(self._layers)] for _ in range(2))

    def release(self) -> None:
        """Give it back, with all that is in it, until `restore`."""
        self.keys, self.values = [], []

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        for cache in (*self.keys, *self.values):
            cache[target, :, :length] = cache[source, :, :length]

    def scrub(self, slot: int) -> None:
        """Forget a slot's content: a masked NaN would still spoil its neighbours (0 * NaN is NaN)."""
        for cache in (*self.keys, *self.values):
            cache[slot].zero_()


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that on CPU take no memory before they are written (torch.zeros touches every page, calloc does not)."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)


def head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def slot_bytes(config: Any, length: int, dtype: torch.dtype) -> int:
    """Bytes of keys and values for one slot of `length` tokens."""
    width = config.num_key_value_heads * head_dim(config)
    return int(2 * config.num_hidden_layers * width * length * dtype.itemsize)


@dataclass(frozen=True)
class Chunk:
    """`count` new tokens of one sequence, at `offset` of the packed batch, with `start` tokens already in `slot`."""

    slot: int
    start: int
    count: int
    offset: int
    mask: Tensor | None


@dataclass(frozen=True)
class SlotRange:
    """Single-token sequences served by one batched call on the slots `low` to `high`."""

    low: int
    high: int
    length: int
    mask: Tensor | None
    rows: Tensor | None


@dataclass
class Plan:
    """What one forward pass does to the KV memory."""

    cache: KVCache
    slots: Tensor
    """Of the single-token sequences, [singles]; `positions` of their new tokens likewise."""
    positions: Tensor
    singles: list[tuple[int, int]]
    """(slot, length including the new token), ascending by slot."""
    chunks: list[Chunk]
    dense: SlotRange | None = field(init=False)

    def __post_init__(self) -> None:
        self.dense = _dense_range(self.singles, self.slots.device)


def chunk_mask(start: int, count: int, device: torch.device) -> Tensor | None:
    """Causal mask [count, start + count] of a chunk behind `start` cached tokens; None where plain causal will do."""
    if start == 0 or count == 1:
        return None
    return torch.ones(count, start + count, dtype=torch.bool, device=device).tril(start)


def _dense_range(singles: list[tuple[int, int]], device: torch.device) -> SlotRange | None:
    if not singles:
        return None
    low, high = singles[0][0], singles[-1][0] + 1
    lengths = [length for _, length in singles]
    longest, count = max(lengths), high - low
    if sum(lengths) <= DENSE_ENOUGH * count * longest:
        return None
    whole = count == len(singles)
    if whole and min(lengths) == longest:
        return SlotRange(low, high, longest, None, None)
    full = torch.ones(count, dtype=torch.long, device=device)
    rows = torch.tensor([slot - low for slot, _ in singles], device=device)
    full[rows] = torch.tensor(lengths, device=device)
    mask = (torch.arange(longest, device=device) < full[:, None])[:, None, None]
    return SlotRange(low, high, longest, mask, None if whole else rows)


def slot_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **options: Any
) -> tuple[Tensor, None]:
    """Attention over the slots; `query` [1, H, T, D], `key` and `value` [1, KV, T, D]; returns [1, T, H, D]."""
    plan: Plan = options["plan"]
    scale: float | None = options.get("scaling")
    for name in ("softcap", "s_aux", "sliding_window"):
        if options.get(name) is not None:
            raise AgentRLError(f"the embedded engine serves plain causal attention only; this model needs {name}.")
    keys, values = plan.cache.keys[module.layer_idx], plan.cache.values[module.layer_idx]
    heads, total, dim = query.shape[1:]
    out = query.new_empty(total, heads, dim)
    count = len(plan.singles)
    if count:
        keys[plan.slots, :, plan.positions] = key[0, :, :count].transpose(0, 1)
        values[plan.slots, :, plan.positions] = value[0, :, :count].transpose(0, 1)
        out[:count] = _attend_singles(plan, query, keys, values, scale)
    groups = heads // key.shape[1]
    for chunk in plan.chunks:
        stop = chunk.offset + chunk.count
        end = chunk.start + chunk.count
        keys[chunk.slot, :, chunk.start : end] = key[0, :, chunk.offset : stop]
        values[chunk.slot, :, chunk.start : end] = value[0, :, chunk.offset : stop]
        past_keys, past_values = (cache[chunk.slot : chunk.slot + 1, :, :end] for cache in (keys, values))
        if groups > 1:
            past_keys = past_keys.repeat_interleave(groups, 1)
            past_values = past_values.repeat_interleave(groups, 1)
        attended = scaled_dot_product_attention(
            query[:, :, chunk.offset : stop],
            past_keys,
            past_values,
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None and chunk.count > 1,
            scale=scale,
        )
        out[chunk.offset : stop] = attended[0].transpose(0, 1)
    return out.unsqueeze(0), None


def _attend_singles(plan: Plan, query: Tensor, keys: Tensor, values: Tensor, scale: float | None) -> Tensor:
    """One new token a sequence; query heads of one group are folded into the query axis, so that KV is never copied."""
    heads, dim, kv_heads = query.shape[1], query.shape[3], keys.shape[1]
    count = len(plan.singles)
    folded = query[0, :, :count].transpose(0, 1).reshape(count, kv_heads, heads // kv_heads, dim)
    span = plan.dense
    if span is None:
        parts = [
            scaled_dot_product_attention(
                folded[i : i + 1], keys[slot : slot + 1, :, :length], values[slot : slot + 1, :, :length], scale=scale
            )
            for i, (slot, length) in enumerate(plan.singles)
        ]
        return torch.cat(parts).reshape(count, heads, dim)
    if span.rows is not None:
        spread = folded.new_zeros(span.high - span.low, *folded.shape[1:])
        spread[span.rows] = folded
        folded = spread
    attended = scaled_dot_product_attention(
        folded,
        keys[span.low : span.high, :, : span.length],
        values[span.low : span.high, :, : span.length],
        attn_mask=span.mask,
        scale=scale,
    )
    return (attended if span.rows is None else attended[span.rows]).reshape(count, heads, dim)


def register() -> None:
    """Make the attention function known to transformers; safe to repeat."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(ATTENTION, slot_attention)
    AttentionMaskInterface.register(ATTENTION, lambda *_, **__: None)
