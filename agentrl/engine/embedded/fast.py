"""A transformers model in the form in which a CPU computes it fastest; numbers stay the same to rounding.

1. Names, shapes and meanings of the model's tensors are as before, so weight updates and checksums do not notice.
2. Linear maps of a few rows, which is what decoding is made of, take up to 1.7 times as long where the weights lie row
   by row (measured at 1 to 64 rows in float32; no difference from 256 on). So their memory lies column by column.
3. A decoder of the common form (norms, attention with a rope by halves, a gated or any other MLP) runs in a `Decoder`: the
   queries, keys and values of a token are one product, as are gate and up, and no module stands between them that only
   passes on. Whether a model has that form is asked of its parts and then of its numbers; others run as they are.
"""

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm

from agentrl.engine.embedded.attention import Plan, Probe, slot_attention

Forward = Callable[[Tensor, Tensor, Tensor, "Plan | Probe"], Tensor]
"""(ids [1, T], their positions [1, T], places [K] of which logits are wanted, plan) -> logits [K, vocabulary]."""
_MODEL = {"embed_tokens", "layers", "norm", "rotary_emb"}
_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_HEADS = {"q_proj", "k_proj", "v_proj", "o_proj"}
_NORMS = {"q_norm", "k_norm"}


def forward_of(model: Any, *, exact: bool = False) -> Forward:
    """How to run `model`; with `exact`, or elsewhere than on a CPU in float32, as transformers does."""

    def plain(ids: Tensor, positions: Tensor, keep: Tensor, plan: Plan | Probe) -> Tensor:
        out = model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=keep, plan=plan)
        logits: Tensor = out.logits[0]
        return logits

    if exact or model.device.type != "cpu" or model.dtype != torch.float32:
        return plain
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data = _by_columns(module.weight.data)
        elif type(module).__name__.endswith("RMSNorm") and (norm := _norm(module)) is not None:
            module.forward = norm
    if not _has_common_form(model):
        return plain
    expected, probe = _tried(plain, model)
    decoder = Decoder(model, probe)
    return decoder if all(map(_alike, expected, _tried(decoder, model)[0])) else plain


class Decoder:
    """Runs a causal language model of the common form; see `Forward`."""

    def __init__(self, model: Any, probe: Probe) -> None:
        base = model.model
        self._embed, self._rope, self._norm, self._head = base.embed_tokens, base.rotary_emb, base.norm, model.lm_head
        self._layers = [
            (layer.input_layernorm, _Attention(layer.self_attn, probe), layer.post_attention_layernorm, _mlp(layer.mlp))
            for layer in base.layers
        ]

    def __call__(self, ids: Tensor, positions: Tensor, keep: Tensor, plan: Plan | Probe) -> Tensor:
        hidden = self._embed(ids)
        cos, sin = self._rope(hidden, positions)
        half = sin.shape[-1] // 2
        turn = cos[0, :, None], torch.cat((-sin[..., :half], sin[..., half:]), -1)[0, :, None]
        for before, attention, between, mlp in self._layers:
            hidden = hidden + attention(before(hidden), turn, plan)
            hidden = hidden + mlp(between(hidden))
        logits: Tensor = self._head(self._norm(hidden[0, keep]))
        return logits


class _Attention:
    def __init__(self, own: Any, probe: Probe) -> None:
        self._own, self._out = own, own.o_proj
        self._project = _together(own.q_proj, own.k_proj, own.v_proj)
        self._options, self._dim = probe.options[own.layer_idx], own.head_dim
        self._heads, self._kv_heads = (len(part.weight) // self._dim for part in (own.q_proj, own.k_proj))
        self._norms: Tensor | None = None
        if hasattr(own, "q_norm"):
            self._norms = torch.stack((own.q_norm.weight.data, own.k_norm.weight.data))
            own.q_norm.weight.data, own.k_norm.weight.data = self._norms
            self._eps = _eps(own.q_norm)
            self._which = torch.tensor([0] * self._heads + [1] * self._kv_heads)

    def __call__(self, hidden: Tensor, turn: tuple[Tensor, Tensor], plan: Plan | Probe) -> Tensor:
        count, turning = hidden.shape[1], self._heads + self._kv_heads
        parts = self._project(hidden).view(count, turning + self._kv_heads, self._dim)
        some = parts[:, :turning]
        if self._norms is not None:
            some = rms_norm(some, (self._dim,), None, self._eps) * self._norms[self._which]
        some = _turned(some, *turn).transpose(0, 1)[None]
        value = parts[:, turning:].transpose(0, 1)[None]
        query, key = some[:, : self._heads], some[:, self._heads :]
        attended, _ = slot_attention(self._own, query, key, value, plan=plan, **self._options)
        out: Tensor = self._out(attended.reshape(1, count, -1))
        return out


def _turned(some: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rope by halves, with the sines of the first half negated; `some` [T, heads, dim], of which the first may turn."""
    if (size := cos.shape[-1]) < some.shape[-1]:
        return torch.cat((_turned(some[..., :size], cos, sin), some[..., size:]), -1)
    return torch.addcmul(some * cos, some.roll(size // 2, -1), sin)


def _mlp(own: Any) -> Callable[[Tensor], Tensor]:
    """The module itself, if it is not gated and dense."""
    if _children(own) != {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        return own
    project, act, down = _together(own.gate_proj, own.up_proj), own.act_fn, own.down_proj

    def mlp(hidden: Tensor) -> Tensor:
        gate, up = project(hidden).chunk(2, -1)
        out: Tensor = down(act(gate).mul_(up))
        return out

    return mlp


def _together(*parts: Any) -> Callable[[Tensor], Tensor]:
    """Linear maps of the same input as one product, whose weights they are parts of from now on."""
    weight = _by_columns(torch.cat([part.weight.data for part in parts]))
    bias = None if parts[0].bias is None else torch.cat([part.bias.data for part in parts])
    sizes = [len(part.weight) for part in parts]
    for i, part in enumerate(parts):
        part.weight.data = weight.split(sizes)[i]
        if bias is not None:
            part.bias.data = bias.split(sizes)[i]

    def product(hidden: Tensor) -> Tensor:
        if any(part._forward_hooks for part in parts):  # an adapter's
            return torch.cat([part(hidden) for part in parts], -1)
        return linear(hidden, weight, bias)

    return product


def _by_columns(weight: Tensor) -> Tensor:
    return weight.t().contiguous().t()


def _has_common_form(model: Any) -> bool:
    if _children(model) != {"model", "lm_head"} or _children(model.model) != _MODEL:
        return False
    for layer in model.model.layers:
        if _children(layer) != _LAYER or _children(layer.self_attn) not in (_HEADS, _HEADS | _NORMS):
            return False
        norms = [getattr(layer.self_attn, name) for name in _NORMS & _children(layer.self_attn)]
        if any(_eps(norm) is None or norm.weight.shape != (layer.self_attn.head_dim,) for norm in norms):
            return False
    return True


def _children(module: Any) -> set[str]:
    return {name for name, _ in module.named_children()}


def _norm(module: Any) -> Any:
    """What computes the module's RMS norm in one call; None where it is another one (`1 + weight`, gates)."""
    weight, eps = getattr(module, "weight", None), _eps(module)
    if weight is None or not isinstance(eps, float):
        return None
    norm = partial(rms_norm, normalized_shape=weight.shape, weight=weight, eps=eps)
    sample = torch.randn(8, *weight.shape, generator=torch.Generator().manual_seed(0)) + 1
    with torch.inference_mode():
        return norm if torch.allclose(module(sample), norm(sample), rtol=1e-5, atol=1e-6) else None


def _eps(norm: Any) -> Any:
    return getattr(norm, "variance_epsilon", getattr(norm, "eps", None))


def _tried(forward: Forward, model: Any) -> tuple[list[Tensor], Probe]:
    """What `forward` makes of some ids: logits, and what each layer's attention was given."""
    probe, count = Probe(), min(8, model.config.vocab_size)
    ids = torch.arange(count)[None] * (model.config.vocab_size // count)
    with torch.inference_mode():
        logits = forward(ids, torch.arange(count)[None], torch.arange(count), probe)
    return [logits, *chain(*probe.given.values())], probe


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool((one - other).abs().max() <= 1e-5 * one.abs().max())
