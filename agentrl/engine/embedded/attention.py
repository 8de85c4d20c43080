"""KV memory and the attention function that reads and writes it.

1. `KVCache` holds one `[slot, kv_head, position, head_dim]` pair of tensors a layer, keys and values each with a head_dim
   of their own. On CPU the pages are touched lazily, so unused slots and positions cost address space only.
2. One forward pass carries many sequences, packed without padding into `[1, T]`: first the sequences that add one token,
   then the chunks of those that add more. A `Plan` says which is which.
3. `slot_attention` is registered with transformers under the name `ATTENTION`; the plan reaches it as a keyword argument
   of the model's forward. Causal attention is served, in sliding windows too; anything else (soft-capping, sinks) raises
   `AgentRLError` instead of giving wrong numbers. A window hides keys, it does not free them.
4. What siblings have in common is read once for all of them, on a CPU: two softmaxes over parts of the keys are joined by
   their masses, as in flash attention (Dao et al. 2022).
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from agentrl.errors import AgentRLError

ATTENTION = "agentrl_slots"
Pair = tuple[Tensor, Tensor]
DENSE_ENOUGH = 0.6
"""Share of useful entries above which one batched call over a range of slots beats a call per sequence."""


@dataclass(frozen=True)
class Layer:
    """What one layer keeps of a token, as its own attention makes it: `[heads, key_dim]` and `[heads, value_dim]` numbers."""

    heads: int
    key_dim: int
    value_dim: int

    def bytes(self, length: int, dtype: torch.dtype) -> int:
        return self.heads * (self.key_dim + self.value_dim) * length * dtype.itemsize


class KVCache:
    """Keys and values of `slots` sequences of up to `length` tokens."""

    def __init__(
        self, layers: Sequence[Layer], slots: int, length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._layers, self._slots, self._length, self.dtype, self._device = layers, slots, length, dtype, device
        self.restore()

    def restore(self) -> None:
        """Take the memory."""
        self.keys = [self._zeros(layer.heads, layer.key_dim) for layer in self._layers]
        self.values = [self._zeros(layer.heads, layer.value_dim) for layer in self._layers]

    def release(self) -> None:
        """Give it back, with all that is in it, until `restore`."""
        self.keys, self.values = [], []

    def _zeros(self, heads: int, dim: int) -> Tensor:
        """Zeros that on CPU take no memory before they are written (torch.zeros touches every page, calloc does not)."""
        shape = (self._slots, heads, self._length, dim)
        if self._device.type != "cpu":
            return torch.zeros(shape, dtype=self.dtype, device=self._device)
        raw = np.zeros(math.prod(shape) * self.dtype.itemsize, dtype=np.uint8)
        return torch.from_numpy(raw).view(self.dtype).view(shape)

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        for cache in (*self.keys, *self.values):
            cache[target, :, :length] = cache[source, :, :length]

    def scrub(self, slot: int) -> None:
        """Forget a slot's content: a masked NaN would still spoil its neighbours (0 * NaN is NaN)."""
        for cache in (*self.keys, *self.values):
            cache[slot].zero_()


@dataclass(frozen=True)
class Chunk:
    """`count` new tokens of one sequence, at `offset` of the packed batch, with `start` tokens already in `slot`."""

    slot: int
    start: int
    count: int
    offset: int


@dataclass(frozen=True)
class Share:
    """Single-token sequences, `rows` of them all, whose first `length` keys and values are also those of slot `root`."""

    root: int
    length: int
    rows: list[int]

    @functools.cached_property
    def index(self) -> slice | Tensor:
        """`rows`, as what picks them fastest."""
        first, end = self.rows[0], self.rows[-1] + 1
        return slice(first, end) if end - first == len(self.rows) else torch.tensor(self.rows)


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
    shares: Sequence[Share] = ()

    def __post_init__(self) -> None:
        self.dense = functools.cache(self._dense)
        self.chunk_mask = functools.cache(self._chunk_mask)

    def spans(self, window: int | None, sharing: bool) -> list[tuple[int, int]]:
        """First position that each single-token sequence reads for itself, and its length."""
        shared = {row: share.length for share in self.shares for row in share.rows} if sharing else {}
        return [(shared.get(row, _first_seen(length, window)), length) for row, (_, length) in enumerate(self.singles)]

    def _dense(self, window: int | None, sharing: bool) -> "SlotRange | None":
        """The slots that one batched call reads, if that pays."""
        if not self.singles:
            return None
        low, high = self.singles[0][0], self.singles[-1][0] + 1
        spans = self.spans(window, sharing)
        first, last, count = min(start for start, _ in spans), max(end for _, end in spans), high - low
        if sum(end - start for start, end in spans) <= DENSE_ENOUGH * count * (last - first):
            return None
        whole = count == len(spans)
        if whole and len(set(spans)) == 1:
            return SlotRange(low, high, first, last, None, None)
        device = self.slots.device
        bounds = torch.tensor([[first], [first + 1]], device=device).repeat(1, count)
        rows = torch.tensor([slot - low for slot, _ in self.singles], device=device)
        bounds[:, rows] = torch.tensor(spans, device=device).T
        place = torch.arange(first, last, device=device)
        seen = (place >= bounds[0, :, None]) & (place < bounds[1, :, None])
        mask = torch.where(seen, 0.0, -math.inf).to(self.cache.dtype)[:, None, None]
        return SlotRange(low, high, first, last, mask, None if whole else rows)

    def _chunk_mask(self, start: int, count: int, window: int | None) -> Tensor | None:
        """Which keys [from the first that any of them sees on] each token of a chunk sees; None where plain causal does."""
        if count == 1 or (start == 0 and (window is None or count <= window)):
            return None
        mask = torch.ones(count, start + count, dtype=torch.bool, device=self.slots.device).tril(start)
        return mask if window is None else mask.triu(start - window + 1)[:, _first_seen(start + 1, window) :]


@dataclass(frozen=True)
class SlotRange:
    """Single-token sequences served by one batched call on positions `first` to `last` of the slots `low` to `high`."""

    low: int
    high: int
    first: int
    last: int
    mask: Tensor | None
    rows: Tensor | None


def _first_seen(length: int, window: int | None) -> int:
    """The first position that the last of `length` tokens sees: itself and the `window - 1` before it, as in transformers."""
    return 0 if window is None else max(0, length - window)


def slot_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **options: Any
) -> tuple[Tensor, None]:
    """Attention over the slots; `query` [1, H, T, D], `key` [1, KV, T, D], `value` [1, KV, T, V]; returns [1, T, H, V]."""
    for name in ("softcap", "s_aux", "position_bias"):
        if options.get(name) is not None:
            raise AgentRLError(
                f"the embedded engine serves causal attention and its windows only; this model needs {name}."
            )
    scale, window = options.get("scaling"), options.get("sliding_window")
    if isinstance(plan := options["plan"], Probe):
        return plan.seen(module.layer_idx, query, key, value, options), None
    keys, values = plan.cache.keys[module.layer_idx], plan.cache.values[module.layer_idx]
    parts = []
    if count := len(plan.singles):
        keys[plan.slots, :, plan.positions] = key[0, :, :count].transpose(0, 1)
        values[plan.slots, :, plan.positions] = value[0, :, :count].transpose(0, 1)
        parts.append(_attend_singles(plan, query, keys, values, scale, window))
    groups = query.shape[1] // key.shape[1]
    for chunk in plan.chunks:
        stop = chunk.offset + chunk.count
        end = chunk.start + chunk.count
        keys[chunk.slot, :, chunk.start : end] = key[0, :, chunk.offset : stop]
        values[chunk.slot, :, chunk.start : end] = value[0, :, chunk.offset : stop]
        mask = plan.chunk_mask(chunk.start, chunk.count, window)
        first = _first_seen(chunk.start + 1, window)
        past_keys, past_values = (cache[chunk.slot : chunk.slot + 1, :, first:end] for cache in (keys, values))
        if groups > 1:
            past_keys = past_keys.repeat_interleave(groups, 1)
            past_values = past_values.repeat_interleave(groups, 1)
        attended = scaled_dot_product_attention(
            query[:, :, chunk.offset : stop],
            past_keys,
            past_values,
            attn_mask=mask,
            is_causal=mask is None and chunk.count > 1,
            scale=scale,
        )
        parts.append(attended[0].transpose(0, 1))
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).unsqueeze(0), None


def _attend_singles(
    plan: Plan, query: Tensor, keys: Tensor, values: Tensor, scale: float | None, window: int | None
) -> Tensor:
    """One new token a sequence; query heads of one group are folded into the query axis, so that KV is never copied."""
    heads, dim, kv_heads = query.shape[1], query.shape[3], keys.shape[1]
    count = len(plan.singles)
    folded = query[0, :, :count].transpose(0, 1).reshape(count, kv_heads, heads // kv_heads, dim)
    shares = plan.shares if window is None and keys.is_cpu and keys.shape == values.shape else ()
    attend = functools.partial(_attend_noting if shares else _attend, scale=scale)
    span = plan.dense(window, bool(shares))
    if span is None:
        parts = []
        for i, ((slot, _), (first, last)) in enumerate(
            zip(plan.singles, plan.spans(window, bool(shares)), strict=True)
        ):
            parts.append(
                attend(folded[i : i + 1], *(cache[slot : slot + 1, :, first:last] for cache in (keys, values)))
            )
        attended, mass = (torch.cat(part) for part in zip(*parts, strict=True))
    else:
        spread = folded
        if span.rows is not None:
            spread = folded.new_zeros(span.high - span.low, *folded.shape[1:])
            spread[span.rows] = folded
        read = (cache[span.low : span.high, :, span.first : span.last] for cache in (keys, values))
        attended, mass = attend(spread, *read, mask=span.mask)
        if span.rows is not None:
            attended, mass = attended[span.rows], mass[span.rows]
    for share in shares:
        rows = folded[share.index].transpose(0, 1)
        read = (cache[share.root : share.root + 1, :, : share.length] for cache in (keys, values))
        common, its_mass = (part[0].unflatten(1, rows.shape[1:3]) for part in attend(rows.flatten(1, 2)[None], *read))
        weight = torch.sigmoid(its_mass.transpose(0, 1) - mass[share.index]).unsqueeze(-1).to(common.dtype)
        attended[share.index] = attended[share.index].lerp(common.transpose(0, 1), weight)
    return attended.reshape(count, heads, -1)


def _attend(query: Tensor, keys: Tensor, values: Tensor, *, mask: Tensor | None = None, scale: float | None) -> Pair:
    """As `_attend_noting`, but with any numbers for the mass."""
    return scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale), query[..., 0]


def _attend_noting(
    query: Tensor, keys: Tensor, values: Tensor, *, mask: Tensor | None = None, scale: float | None
) -> Pair:
    """What is attended to, and the logarithm of the mass that the softmax divided by: with it two parts are joined."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    attended, mass = flash(query, keys, values, attn_mask=mask, scale=scale)
    return attended, mass


class Probe:
    """In a plan's place: takes notes of what each layer's attention is given; every token sees itself alone."""

    def __init__(self) -> None:
        self.given: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
        """Of each layer: queries, keys and values."""
        self.options: dict[int, dict[str, Any]] = {}

    def seen(self, index: int, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        self.given[index] = query, key, value
        self.options[index] = {name: options.get(name) for name in ("scaling", "sliding_window")}
        return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2)

    def layer(self, index: int) -> Layer:
        _, key, value = self.given[index]
        return Layer(key.shape[1], key.shape[3], value.shape[3])


def layers_of(model: Any) -> list[Layer]:
    """The layers of a model that was registered with `ATTENTION`, found by one token's way through it.

    Raises:
        AgentRLError: a layer needs other attention, keeps something else of a token, or its window is not known.
    """
    probe = Probe()
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    with torch.inference_mode():
        model(input_ids=token, position_ids=token, use_cache=False, plan=probe)
    count = model.config.num_hidden_layers
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * count
    for index, kind in enumerate(kinds[:count]):
        windowed = probe.options.get(index, {}).get("sliding_window") is not None
        fits = {"full_attention": True, "sliding_attention": windowed}.get(kind, False)
        if index not in probe.given or not fits or getattr(model, "_is_stateful", False):
            raise AgentRLError(
                "the embedded engine serves causal attention and its windows only; this model keeps other states, or has "
                f"other layers: layer {index} is {kind}."
            )
    return [probe.layer(index) for index in range(count)]


def register() -> None:
    """Make the attention function known to transformers, which makes no masks for it then; safe to repeat."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, slot_attention)
