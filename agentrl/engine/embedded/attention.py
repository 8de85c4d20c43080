"""KV memory, and the attention function that reads and writes it.

1. `KVCache` holds `[slot, kv_head, position, head_dim]` keys and values per layer. On CPU, unused pages cost no memory.
2. A forward pass packs sequences into `[1, T]` without padding: first sequences that add one token, then longer chunks.
3. Layers with a state (gated delta nets, short convolutions) keep the states in a transformers cache for each slot. A
   state can continue only after the slot's last token.
4. `slot_attention` is registered with transformers as `ATTENTION`. It serves causal attention and sliding windows; soft
   caps and sinks raise `AgentRLError`."""

import copy
import functools
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from agentrl.engine.embedded import kernels
from agentrl.engine.embedded.kernels import Floats, Places
from agentrl.errors import AgentRLError
from agentrl.modelfolder import STATEFUL, is_stateful

ATTENTION = "agentrl_slots"
_ATTENTION, _STATES = {"full_attention", "sliding_attention"}, {"linear_attention", "conv"}
_ENDLESS = 1 << 40
_THREADS = ThreadPoolExecutor()
Scale = float | None  # softmax scale of a layer; None: 1 / sqrt(head_dim)
Window = int | None  # number of tokens that a token sees, itself included; None: all earlier tokens


@dataclass(frozen=True)
class Layer:
    """Cache shape of one layer: `[heads, key_dim]` and `[heads, value_dim]` per token."""

    heads: int
    key_dim: int
    value_dim: int

    def bytes(self, length: int, dtype: torch.dtype) -> int:
        return self.heads * (self.key_dim + self.value_dim) * length * dtype.itemsize


class KVCache:
    """Keys and values of `slots` sequences of up to `length` tokens, and `states` if layers have states."""

    def __init__(self, model: Any, slots: int, length: int) -> None:
        self._layers, self._slots, self._length = layers_of(model), slots, length
        self._config = model.config.get_text_config()
        self.dtype, self.device = model.dtype, model.device
        self.stateful = any(is_stateful(name) for name, _ in model.named_modules())
        self.states: dict[int, Any] = {}
        self.restore()

    def restore(self) -> None:
        """Allocate the memory."""
        self.keys = [self._zeros(layer.heads, layer.key_dim) for layer in self._layers]
        self.values = [self._zeros(layer.heads, layer.value_dim) for layer in self._layers]

    def release(self) -> None:
        """Free the memory with its contents, until `restore`."""
        self.keys, self.values, self.states = [], [], {}

    def begin(self, slot: int) -> None:
        """Begin a sequence in a slot: its states are zeros."""
        if self.stateful:
            from transformers import DynamicCache

            self.states[slot] = DynamicCache(config=self._config)

    def _zeros(self, heads: int, dim: int) -> Tensor:
        """Return zeros. On CPU, unwritten zeros take no memory (torch.zeros touches every page, calloc does not)."""
        shape = (self._slots, heads, self._length, dim)
        if self.device.type != "cpu" or 0 in shape:
            return torch.zeros(shape, dtype=self.dtype, device=self.device)
        raw = np.zeros(math.prod(shape) * self.dtype.itemsize, dtype=np.uint8)
        return torch.from_numpy(raw).view(self.dtype).view(shape)

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        for cache in (*self.keys, *self.values):
            cache[target, :, :length] = cache[source, :, :length]
        if self.stateful:
            self.states[target] = copy.deepcopy(self.states[source])

    def scrub(self, slot: int) -> None:
        """Fill a slot with zeros: even a masked NaN would make other results NaN (0 * NaN is NaN)."""
        for cache in (*self.keys, *self.values):
            cache[slot].zero_()


@dataclass(frozen=True)
class Chunk:
    """`count` new tokens of one sequence, at `offset` of the packed batch, with `start` tokens already in `slot`."""

    slot: int
    start: int
    count: int
    offset: int


@dataclass
class AttentionPlan:
    """Reads and writes of one forward pass in the KV memory."""

    cache: KVCache
    singles: list[tuple[int, int]]  # (slot, length including the new token), ascending by slot
    chunks: list[Chunk]
    where: Places  # see `kernels`
    by_kernel: bool  # use the kernel: float32 on a CPU, and results need not be batch-invariant

    def __post_init__(self) -> None:
        self.seen = functools.cache(self._seen)
        self.chunk_mask = functools.cache(self._chunk_mask)

    @functools.cached_property
    def places(self) -> Tensor:
        """Slots and positions of the single-token sequences' new tokens, [2, singles]."""
        return torch.from_numpy(self.where[:2, : len(self.singles)]).to(self.cache.device)

    def _seen(self, window: int | None) -> tuple[slice, Tensor]:
        """Return the span of positions that any single-token sequence sees, and the mask in it [singles, 1, 1, P]."""
        ends = self.places[1, :, None, None, None] + 1
        span = slice(min(_first_seen(end, window) for _, end in self.singles), max(end for _, end in self.singles))
        place = torch.arange(span.start, span.stop, device=ends.device)
        return span, (place < ends) if window is None else (place < ends) & (place >= ends - window)

    def _chunk_mask(self, start: int, count: int, window: int | None) -> Tensor | None:
        """Return a chunk's mask [count, keys], from the first key that any token sees; None: plain causal attention."""
        if count == 1 or (start == 0 and (window is None or count <= window)):
            return None
        mask = torch.ones(count, start + count, dtype=torch.bool, device=self.cache.device).tril(start)
        return mask if window is None else mask.triu(start - window + 1)[:, _first_seen(start + 1, window) :]


def _first_seen(length: int, window: int | None) -> int:
    """Return the first position that the last of `length` tokens sees: it sees `window` tokens, itself included."""
    return 0 if window is None else max(0, length - window)


def slot_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **options: Any
) -> tuple[Tensor, None]:
    """Attend over the slots; `query` [1, H, T, D], `key` [1, KV, T, D], `value` [1, KV, T, V]; return [1, T, H, V]."""
    for name in ("softcap", "s_aux", "position_bias"):
        if options.get(name) is not None:
            served = "the embedded engine serves causal attention and its windows only"
            raise AgentRLError(f"{served}; this model needs {name}.")
    scale, window = options.get("scaling"), options.get("sliding_window")
    if isinstance(plan := options["plan"], Probe):
        return plan.seen(module.layer_idx, query, key, value, options), None
    keys, values = plan.cache.keys[module.layer_idx], plan.cache.values[module.layer_idx]
    parts = []
    if count := len(plan.singles):
        slots, positions = plan.places
        keys[slots, :, positions] = key[0, :, :count].transpose(0, 1)
        values[slots, :, positions] = value[0, :, :count].transpose(0, 1)
        if plan.by_kernel:
            rows = query[0, :, :count].transpose(0, 1).contiguous().numpy()
            out = np.empty((*rows.shape[:2], values.shape[3]), np.float32)
            attend_singles(plan, rows, keys, values, out, scale, window)
            parts.append(torch.from_numpy(out))
        else:
            parts.append(_attend_masked(plan, query, keys, values, scale, window))
    for chunk in plan.chunks:
        span, new = slice(chunk.offset, chunk.offset + chunk.count), slice(chunk.start, chunk.start + chunk.count)
        keys[chunk.slot, :, new], values[chunk.slot, :, new] = key[0, :, span], value[0, :, span]
        parts.append(attend_chunk(plan, chunk, query, keys, values, scale, window))
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).unsqueeze(0), None


def attend_singles(
    plan: AttentionPlan, rows: Floats, keys: Tensor, values: Tensor, out: Floats, scale: Scale, window: Window
) -> None:
    """Attend for sequences that add one token: from the first of `rows` [T, H or more, D] to `out` [singles, H, V]."""
    options = scale or keys.shape[3] ** -0.5, window or _ENDLESS
    attend = partial(kernels.attend, rows, keys.numpy(), values.numpy(), plan.where, out, *options)
    in_threads(attend, keys.shape[1], keys.shape[1])


def in_threads(work: Callable[[int, int], None], count: int, most: int) -> None:
    """Split `count` into ranges and call `work` for each, in torch's number of threads but at most `most`."""
    if (threads := min(torch.get_num_threads(), most)) > 1:
        ends = [i * count // threads for i in range(threads + 1)]
        list(_THREADS.map(work, ends, ends[1:]))
    else:
        work(0, count)


def attend_chunk(
    plan: AttentionPlan, chunk: Chunk, query: Tensor, keys: Tensor, values: Tensor, scale: Scale, window: Window
) -> Tensor:
    """Attend for one chunk of `query` [1, H, T, D]; its keys and values are in the cache. Return [count, H, V]."""
    mask = plan.chunk_mask(chunk.start, chunk.count, window)
    first, end = _first_seen(chunk.start + 1, window), chunk.start + chunk.count
    groups = query.shape[1] // keys.shape[1]
    past_keys, past_values = (cache[chunk.slot : chunk.slot + 1, :, first:end] for cache in (keys, values))
    if groups > 1:
        past_keys, past_values = (past.repeat_interleave(groups, 1) for past in (past_keys, past_values))
    own, causal = query[:, :, chunk.offset : chunk.offset + chunk.count], mask is None and chunk.count > 1
    attended = scaled_dot_product_attention(own, past_keys, past_values, mask, is_causal=causal, scale=scale)
    return attended[0].transpose(0, 1)


def _attend_masked(
    plan: AttentionPlan, query: Tensor, keys: Tensor, values: Tensor, scale: Scale, window: Window
) -> Tensor:
    """Attend for one new token per sequence. Query heads of a group are folded into the query axis: no copy of KV."""
    slots, heads, groups = plan.places[0], query.shape[1], query.shape[1] // keys.shape[1]
    folded = query[0, :, : len(slots)].transpose(0, 1).unflatten(1, (-1, groups))
    low, high = plan.singles[0][0], plan.singles[-1][0] + 1
    rows = slice(low, high) if high - low == len(slots) else slots  # an index list copies; needed if slots have gaps
    span, mask = plan.seen(window)
    keys, values = keys[rows, :, span], values[rows, :, span]
    attended = scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=scale)
    return attended.reshape(len(slots), heads, -1)


class Probe:
    """A substitute for a plan that records the inputs of each layer's attention. Each token sees only itself."""

    def __init__(self) -> None:
        self.given: dict[int, tuple[Tensor, Tensor, Tensor]] = {}  # by layer: queries, keys and values
        self.options: dict[int, dict[str, Any]] = {}

    def seen(self, index: int, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        self.given[index] = query, key, value
        self.options[index] = {name: options.get(name) for name in ("scaling", "sliding_window")}
        return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2)

    def layer(self, index: int) -> Layer:
        if index not in self.given:
            return Layer(0, 0, 0)
        _, key, value = self.given[index]
        return Layer(key.shape[1], key.shape[3], value.shape[3])


def _by_slot(forward: Callable[..., Tensor], hidden_states: Tensor, *, plan: Any, **given: Any) -> Tensor:
    """Run a module with a state over each sequence of a packed batch [1, T, width], from its slot's state."""
    if isinstance(plan, Probe):
        return forward(hidden_states, **given)
    name = next(name for name in ("cache_params", "past_key_values") if name in given)
    pieces = [(slot, offset, 1) for offset, (slot, _) in enumerate(plan.singles)]
    pieces += [(chunk.slot, chunk.offset, chunk.count) for chunk in plan.chunks]
    states = plan.cache.states
    found = [forward(hidden_states[:, at : at + count], **given | {name: states[slot]}) for slot, at, count in pieces]
    return torch.cat(found, 1)


def _unserved(index: int, kind: str) -> AgentRLError:
    served = "the embedded engine serves causal attention, its windows, gated delta nets and short convolutions only"
    kept = f"this model keeps other states, or has other layers: layer {index} is {kind}"
    return AgentRLError(f"{served}; {kept}. SGLang may serve it.")


def layers_of(model: Any) -> list[Layer]:
    """Return the layers of a model with `ATTENTION`, found by a forward pass of one token. Raises AgentRLError: a layer
    needs other attention, keeps another kind of state, or has an unknown window."""
    config = model.config.get_text_config()
    count, known = config.num_hidden_layers, config.model_type in STATEFUL
    kinds = (getattr(config, "layer_types", None) or ["full_attention"] * count)[:count]
    kept = getattr(model, "_is_stateful", False) and not known
    for index, kind in enumerate(kinds):
        if kept or kind not in _ATTENTION | (_STATES if known else set()):
            raise _unserved(index, kind)
    probe, token = Probe(), torch.zeros(1, 1, dtype=torch.long, device=model.device)
    with torch.inference_mode():
        model(input_ids=token, position_ids=token, use_cache=False, plan=probe)
    for index, kind in enumerate(kinds):
        windowed = probe.options.get(index, {}).get("sliding_window") is not None
        if (index not in probe.given and kind not in _STATES) or (kind == "sliding_attention" and not windowed):
            raise _unserved(index, kind)
    return [probe.layer(index) for index in range(count)]


def decoder_of(model: Any) -> Any:
    """Return the decoder of a causal language model, without the head and without a vision tower."""
    return getattr(model.base_model, "language_model", model.base_model)


def attach(model: Any) -> None:
    """Make a model attend over the slots; transformers then creates no masks."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, slot_attention)
    decoder_of(model).set_attn_implementation(ATTENTION)
    for name, module in model.named_modules():
        if is_stateful(name):
            module.forward = partial(_by_slot, module.forward)
