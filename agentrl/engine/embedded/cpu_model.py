"""A transformers model in the form that a CPU computes fastest; results are equal up to rounding.

1. Names and shapes of tensors stay, so weight updates and checksums work unchanged.
2. Linear maps of up to `_FEW` rows use our kernel, up to 1.9 times as fast as MKL's (AVX-512).
3. A decoder of the common form (norms, half-split RoPE, MLP) runs as a `CpuModel` with fused products. Module names and
   a comparison of outputs decide if a decoder has this form. Other models keep transformers' decoder."""

from collections.abc import Callable
from functools import partial
from itertools import chain, zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.backends import mkl
from torch.nn.functional import linear, rms_norm, silu

from agentrl.engine.embedded import kernels
from agentrl.engine.embedded.attention import AttentionPlan, Probe, attend_chunk, attend_singles, decoder_of, in_threads
from agentrl.engine.embedded.images import ImageRows
from agentrl.engine.embedded.kernels import Floats, Places

Plan = AttentionPlan | Probe
Forward = Callable[[Tensor, Tensor, Tensor, Plan, ImageRows | None], Tensor]
"""(ids [1, T], positions [1, T] or [3, 1, T], indices [K] of needed tokens, plan, images) -> logits [K, vocabulary]."""
_MODEL = {"embed_tokens", "layers", "norm", "rotary_emb"}
_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_HEADS = {"q_proj", "k_proj", "v_proj", "o_proj"}
_NORMS = {"q_norm", "k_norm"}
_FEW = 64


def forward_of(model: Any, *, by_kernel: bool) -> Forward:
    """Return the function that runs `model`; transformers' own without `by_kernel` (see `AttentionPlan`)."""

    def plain(ids: Tensor, positions: Tensor, keep: Tensor, plan: Plan, images: ImageRows | None) -> Tensor:
        if images is not None:
            return _with_images(model, ids, positions, keep, plan, images)
        return model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=keep, plan=plan).logits[0]

    if not by_kernel:
        return plain
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            _by_kernel(module)
        elif type(module).__name__.endswith("RMSNorm") and (norm := _norm(module)) is not None:
            module.forward = norm
    if not _has_common_form(model):
        return plain
    expected, probe = _tried(plain, model)
    decoder = CpuModel(model, probe)
    return decoder if all(map(_alike, expected, _tried(decoder, model)[0])) else plain


def _with_images(model: Any, ids: Tensor, positions: Tensor, keep: Tensor, plan: Plan, images: ImageRows) -> Tensor:
    """Run a model that sees images like transformers does, but with given image features and places."""
    embeds = model.get_input_embeddings()(ids)
    embeds[0, images.places] = images.features
    more: dict[str, Any] = {}
    if images.deepstack:
        mask = torch.zeros(ids.shape, dtype=torch.bool, device=ids.device)
        mask[0, images.places] = True
        more = {"visual_pos_masks": mask, "deepstack_visual_embeds": images.deepstack}
    out = decoder_of(model)(inputs_embeds=embeds, position_ids=positions, use_cache=False, plan=plan, **more)
    return model.lm_head(out.last_hidden_state[0, keep])


class CpuModel:
    """A causal language model of the common form with fused products; see `Forward`."""

    def __init__(self, model: Any, probe: Probe) -> None:
        base = decoder_of(model)
        self._embed, self._rope, self._norm, self._head = base.embed_tokens, base.rotary_emb, base.norm, model.lm_head
        self._layers = []
        for layer in base.layers:
            before, between = _added(layer.input_layernorm), _added(layer.post_attention_layernorm)
            self._layers.append((before, _CpuAttention(layer.self_attn, probe), between, _mlp(layer.mlp)))

    def __call__(self, ids: Tensor, positions: Tensor, keep: Tensor, plan: Plan, images: ImageRows | None) -> Tensor:
        more: Floats = self._embed(ids[0]).numpy()
        deepstack = [] if images is None else images.deepstack
        if images is not None:
            more[images.places.numpy()] = images.features.numpy()
        turn = torch.cat(self._rope(torch.from_numpy(more), positions)).numpy()
        where = np.array([[0, i, 0, 0] for i in range(len(more))]).T.copy() if isinstance(plan, Probe) else plan.where
        hidden = np.zeros_like(more)
        for (before, attention, between, mlp), added in zip_longest(self._layers, deepstack):
            more = attention(before(hidden, more), turn, where, plan)
            more = mlp(between(hidden, more))
            if images is not None and added is not None:
                more[images.places.numpy()] += added.numpy()
        return self._head(self._norm(torch.from_numpy(hidden + more)[keep]))


class _CpuAttention:
    def __init__(self, own: Any, probe: Probe) -> None:
        self._project, self._out = _together(own.q_proj, own.k_proj, own.v_proj), _together(own.o_proj)
        self._index, self._dim, options = own.layer_idx, own.head_dim, probe.options[own.layer_idx]
        self._scale, self._window = options["scaling"], options["sliding_window"]
        self._heads, self._kv_heads = (len(part.weight) // self._dim for part in (own.q_proj, own.k_proj))
        norms, self._eps = torch.empty(0, self._dim), 0.0
        if hasattr(own, "q_norm"):
            norms, self._eps = torch.stack((own.q_norm.weight.data, own.k_norm.weight.data)), _eps(own.q_norm)
            own.q_norm.weight.data, own.k_norm.weight.data = norms
        self._norms = norms.numpy()

    def __call__(self, hidden: Floats, turn: Floats, where: Places, plan: Plan) -> Floats:
        count = len(hidden)
        parts = self._project(hidden).reshape(count, -1, self._dim)
        if isinstance(plan, Probe):
            keys, values = torch.empty(2, 1, self._kv_heads, count, self._dim)
        else:
            keys, values = plan.cache.keys[self._index], plan.cache.values[self._index]
        kernels.place(parts, keys.numpy(), values.numpy(), where, turn, self._norms, self._eps)
        query = torch.from_numpy(parts[:, : self._heads]).transpose(0, 1)[None]
        attended = np.empty((count, self._heads, self._dim), np.float32)
        if isinstance(plan, Probe):
            options = {"scaling": self._scale, "sliding_window": self._window}
            attended[:] = plan.seen(self._index, query, keys, values, options)[0].numpy()
        else:
            if singles := len(plan.singles):
                attend_singles(plan, parts, keys, values, attended[:singles], self._scale, self._window)
            for chunk in plan.chunks:
                found = attend_chunk(plan, chunk, query, keys, values, self._scale, self._window)
                attended[chunk.offset : chunk.offset + chunk.count] = found.numpy()
        return self._out(attended.reshape(count, -1))


def _added(norm: Any) -> Callable[[Floats, Floats], Floats]:
    """Return a function that adds its second argument to the first in place, and returns the normalized sum."""
    if not isinstance(norm.forward, partial):
        return lambda hidden, more: norm(torch.from_numpy(hidden).add_(torch.from_numpy(more))).numpy()
    weight, eps = norm.weight.data.numpy(), _eps(norm)

    def add_norm(hidden: Floats, more: Floats) -> Floats:
        out = np.empty_like(hidden)
        kernels.add_norm(hidden, more, weight, eps, out)
        return out

    return add_norm


def _mlp(own: Any) -> Callable[[Floats], Floats]:
    """Return a function with fused products for a dense SiLU-gated MLP; for other modules, a call of the module."""
    sample = torch.linspace(-9, 9, 64)
    if _children(own) != {"gate_proj", "up_proj", "down_proj", "act_fn"} or not own.act_fn(sample).equal(silu(sample)):
        return lambda hidden: own(torch.from_numpy(hidden)[None])[0].numpy()
    project, down = _together(own.gate_proj, own.up_proj), _together(own.down_proj)

    def mlp(hidden: Floats) -> Floats:
        parts = project(hidden)
        inner = np.empty((len(parts), parts.shape[1] // 2), np.float32)
        kernels.gated(parts, inner)
        return down(inner)

    return mlp


def _together(*parts: Any) -> Callable[[Floats], Floats]:
    """Return linear maps of the same input as one product. The maps' weights become views of the product's weight."""
    weight = torch.cat([part.weight.data for part in parts])
    bias = None if parts[0].bias is None else torch.cat([part.bias.data for part in parts])
    sizes = [len(part.weight) for part in parts]
    for i, part in enumerate(parts):
        part.weight.data = weight.split(sizes)[i]
        if bias is not None:
            part.bias.data = bias.split(sizes)[i]
        _by_kernel(part)
    product = _product(weight, bias)

    def together(hidden: Floats) -> Floats:
        if any(part._forward_hooks for part in parts):  # hooks of an adapter
            return torch.cat([part(torch.from_numpy(hidden)) for part in parts], -1).numpy()
        return product(hidden)

    return together


def _by_kernel(module: Any) -> None:
    """Have a torch linear module compute with `_product`."""
    product, wide = _product(module.weight.data, None if module.bias is None else module.bias.data), len(module.weight)

    def forward(hidden: Tensor) -> Tensor:
        return torch.from_numpy(product(hidden.contiguous().flatten(0, -2).numpy())).view(*hidden.shape[:-1], wide)

    module.forward = forward


def _product(weight: Tensor, bias: Tensor | None) -> Callable[[Floats], Floats]:
    """Return a linear map [T, K] -> [T, N] with `weight` [N, K] and `bias` [N]. The weight's memory must not move."""
    array, added, (wide, deep) = weight.numpy(), None if bias is None else bias.numpy(), weight.shape
    few = _FEW if wide >= 8 and weight.is_contiguous() and mkl.is_available() else 0

    def product(rows: Floats) -> Floats:
        if len(rows) > few:
            return linear(torch.from_numpy(rows), weight, bias).numpy()
        out = np.empty((len(rows), wide), np.float32)
        most = min(1 + (len(rows) * wide * deep >> 20), wide // 8)
        in_threads(partial(kernels.product, rows, array, out), wide, most)
        return out if added is None else np.add(out, added, out)

    return product


def _has_common_form(model: Any) -> bool:
    if _children(model) != {"model", "lm_head"} or _children(decoder_of(model)) != _MODEL:
        return False
    for layer in decoder_of(model).layers:
        if _children(layer) != _LAYER or _children(layer.self_attn) not in (_HEADS, _HEADS | _NORMS):
            return False
        norms = [getattr(layer.self_attn, name) for name in _NORMS & _children(layer.self_attn)]
        if any(_eps(norm) is None or norm.weight.shape != (layer.self_attn.head_dim,) for norm in norms):
            return False
    return True


def _children(module: Any) -> set[str]:
    return {name for name, _ in module.named_children()}


def _norm(module: Any) -> Any:
    """Return a function that computes the module's RMSNorm in one call; None for other norms (`1 + weight`, gates)."""
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
    """Run `forward` on some ids; return the logits and the inputs of each layer's attention, and the probe."""
    size = model.config.get_text_config().vocab_size
    probe, count = Probe(), min(8, size)
    ids = torch.arange(count)[None] * (size // count)
    with torch.inference_mode():
        logits = forward(ids, torch.arange(count)[None], torch.arange(count), probe, None)
    return [logits, *chain(*probe.given.values())], probe


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool((one - other).abs().max() <= 1e-5 * one.abs().max())
