"""Attention of transformers models over packed trees of tokens.

1. `packed_attention` is registered with transformers as `PACKED`. It gets the microbatch by the keyword `pack` of the
   model's forward, and computes plain causal attention in blocks (`kernels`).
2. If a layer needs more (a window shorter than a sample, sinks, soft caps), the architecture's eager function computes
   it with a mask [t, t]. That is correct, and slow for long microbatches.
3. `by_sequence` runs layers with a state (linear attention, short convolutions) over one sequence after another."""

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from agentrl.errors import TrainError
from agentrl.modelfolder import is_stateful
from agentrl.train.kernels import attention, kernel_for
from agentrl.train.microbatches import MicrobatchTensors
from agentrl.train.routing import Replay

PACKED = "agentrl_packed"
_PLAIN = {"dropout", "sliding_window", "is_causal", "position_ids", "use_cache", "output_attentions", "layer_idx"}
"""Options of transformers' attention functions with which `packed_attention` uses `kernels`; dropout is off."""


@dataclass
class FsdpPack:
    """The microbatch in the form that layers get; `routing` is [t, layers, experts per token] or None."""

    mb: MicrobatchTensors
    routing: Tensor | None = None
    masks: dict[int | None, Tensor] = field(default_factory=dict)

    @cached_property
    def longest(self) -> int:
        """Return the number of tokens of the longest sequence."""
        return int(self.mb.positions.max()) + 1

    @cached_property
    def sequences(self) -> list[tuple[Tensor, int]]:
        """Return for each sequence the places [n] of its tokens, and the number of its last tokens in no earlier one. A
        shared prefix counts for the first of its sequences. In depth-first order the other tokens have no gap."""
        nodes, *above = self.mb.parts
        shared = [block for part in above for block in part.blocks]
        inner, found, done = {start for _, _, start, _ in shared}, [], 0
        for start, end, *_ in nodes.blocks:
            if start not in inner:
                path = [(a, b) for first, last, a, b in shared if first <= start < last] + [(start, end)]
                places = [torch.arange(a, b, device=self.mb.tokens.device) for a, b in path]
                found.append((torch.cat(places), end - done))
                done = end
        return found

    def mask(self, window: int | None, like: Tensor) -> Tensor:
        """Return the mask to add to scores, [1, 1, t, t]: 0 where a token sees one at most `window - 1` before."""
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
    module: Any, query: Tensor, key: Tensor, value: Tensor, _mask: Any, *, pack: FsdpPack, **options: Any
) -> tuple[Tensor, None]:
    """Return attention [1, t, heads, dim] of queries [1, heads, t, dim], keys and values [1, groups, t, dim]."""
    window, scaling = _window(module, options), options.pop("scaling", None)
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
    """Register `packed_attention` with transformers; idempotent."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(PACKED, packed_attention)
    AttentionMaskInterface.register(PACKED, lambda *_, **__: None)


_LAYER = re.compile(r"(.*\blayers\.(\d+))\b.*\bexperts")


class _Choosing(TorchFunctionMode):
    def __init__(self, replay: Replay, experts: int) -> None:
        super().__init__()
        self.replay, self.experts, self.used = replay, experts, False

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        scores, *_ = args = tuple(args) or (None,)
        out = func(*args, **(kwargs or {}))
        chosen = self.replay.chosen
        if chosen is None or func not in (torch.topk, Tensor.topk) or not isinstance(scores, Tensor):
            return out
        if scores.shape != (len(chosen), self.experts) or out[1].shape != chosen.shape:
            return out
        self.used = True
        return torch.return_types.topk(self.replay.pick(scores, out[1]))


def replaying(model: Any) -> tuple[list[bool], int, int]:
    """Make a model's experts use `FsdpPack.routing`. Returns which layers have experts, their number, and the top k."""
    modules, config = dict(model.named_modules()), model.config.get_text_config()
    sparse, experts = [False] * config.num_hidden_layers, 0
    for name, module in modules.items():
        if (place := _LAYER.fullmatch(name)) and not isinstance(module, torch.nn.ModuleList):
            mixture, layer = modules[name.rpartition(".")[0]], int(place[2])
            replay, experts = Replay(), module.num_experts
            modules[place[1]].register_forward_pre_hook(partial(replay.hand, "pack", layer), with_kwargs=True)
            mixture.forward = partial(_forward, mixture.forward, replay, experts)
            sparse[layer] = True
    return sparse, experts, config.num_experts_per_tok if experts else 0


def _forward(forward: Callable[..., Any], replay: Replay, experts: int, *args: Any, **kwargs: Any) -> Any:
    if replay.chosen is None:
        return forward(*args, **kwargs)
    with _Choosing(replay, experts) as choosing:
        out = forward(*args, **kwargs)
    if not choosing.used:
        said = "this model's mixtures choose their experts otherwise than by one topk over all of them"
        raise TrainError(f"{said}; leave --use-rollout-routing-replay out, or use --train-backend megatron")
    return out


def by_sequence(model: Any) -> None:
    """Make each stateful module of a model start every sequence of a microbatch from a state of zeros. Such a module
    computes a shared prefix again for each sequence, because no module takes the state of a prefix."""
    for name, module in model.named_modules():
        if is_stateful(name):
            module.forward = partial(_by_sequence, module.forward)


def _by_sequence(forward: Callable[..., Tensor], hidden_states: Tensor, *, pack: FsdpPack, **kwargs: Any) -> Tensor:
    found = [forward(hidden_states[:, places], **kwargs)[:, -own:] for places, own in pack.sequences]
    return torch.cat(found, 1)
