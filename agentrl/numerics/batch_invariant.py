"""Batch-invariant arithmetic: bits depend only on a row's own numbers, so trainer and engine agree to the last bit.

1. Numbers are rounded to a grid so coarse that float64 holds each sum of their products exactly. It is the first slice
   of Ozaki's error-free matrix product (Numerical Algorithms 59, 2012). Numbers keep 20 bits below the row's largest.
2. `exp` and `log` use only basic arithmetic. The backward pass does not need batch invariance."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

MAX_KEYS = 1 << 14  # maximum keys of a query; it is fixed, so attention's grid does not depend on the number of keys
_SUM_BITS = 50  # bits of a sum: fewer than the 53 of float64


def batch_invariant(on: bool) -> AbstractContextManager[Any]:
    """Return a context in which this module computes the forward passes of this thread, if `on`."""
    return _BatchInvariant() if on else nullcontext()  # type: ignore[no-untyped-call]


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b, float64 [..., M, N] of [..., M, K] and [..., K, N]. Only its row and column affect an entry."""
    a, b = a.double(), b.double()
    if (width := a.shape[-1]) == 1:
        return a * b
    bits = (_SUM_BITS - _log2(width)) // 2
    return _rounded(a, bits) @ _rounded(b.mT, bits).mT


def total(x: Tensor, dim: Sequence[int] = (-1,), keepdim: bool = False) -> Tensor:
    """Return the sum over `dim` in float64."""
    last = list(range(-len(dim), 0))
    rows = x.double().movedim(list(dim), last)
    out = _rounded(rows.flatten(-len(dim)), _SUM_BITS - _log2(math.prod(rows.shape[-len(dim) :]))).sum(-1)
    return out.reshape([1 if d in {i % x.ndim for i in dim} else n for d, n in enumerate(x.shape)]) if keepdim else out


def exp(x: Tensor) -> Tensor:
    """Return e^x for float64 `x`; 0 below -700."""
    bounded = x.clamp(-700.0, 700.0)
    power = (bounded * (1 / math.log(2))).round()
    rest, out = bounded - power * math.log(2), torch.ones_like(x)
    for order in range(14, 0, -1):
        out = out * rest / order + 1.0
    return (out * ((power.long() + 1023) << 52).view(torch.float64)).masked_fill(x < -700.0, 0.0)


def log(x: Tensor) -> Tensor:
    """Return the natural logarithm of positive float64 `x`."""
    mantissa, exponent = torch.frexp(x)
    ratio, out = (mantissa - 0.75) / (mantissa + 0.75), torch.zeros_like(x)
    for order in range(25, 0, -2):
        out = out * (ratio * ratio) + 1.0 / order
    return exponent.double() * math.log(2) + (out * ratio * 2.0 + math.log(0.75))


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return attention [..., heads, queries, dim] as torch does, and log-sum-exps [..., heads, queries] in float32."""
    if k.shape[-2] > MAX_KEYS:
        raise ValueError(f"batch-invariant attention reads at most {MAX_KEYS} tokens, got {k.shape[-2]}")
    groups = q.shape[-3] // k.shape[-3]
    k, v = k.repeat_interleave(groups, -3), v.repeat_interleave(groups, -3).double()
    factor = torch.tensor(scale or q.shape[-1] ** -0.5, dtype=torch.float32, device=q.device)  # equal last bits
    scores = product(q, k.mT) * factor
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores + mask if mask.is_floating_point() else scores.masked_fill(~mask, -torch.inf)
    top = scores.amax(-1, keepdim=True)
    shares = exp(scores - top)
    # Shares are multiplied by the sizes of values, so that the grid of the values is the same for all keys.
    size = v.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    bits = (_SUM_BITS - _log2(MAX_KEYS)) // 2
    whole = _rounded(shares, 2 * bits, 1.0).sum(-1, keepdim=True)
    out = _rounded(shares * size.mT, bits) @ _rounded(v / size, bits, 1.0) / whole
    return out.to(q.dtype), (top + log(whole)).squeeze(-1).float()


class _BatchInvariant(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        numbers = any(isinstance(a, Tensor) and a.is_floating_point() for a in args)
        return (_INSTEAD.get(func, func) if numbers else func)(*args, **(kwargs or {}))


def _rounded(x: Tensor, bits: int, top: Tensor | float | None = None) -> Tensor:
    """Round `x` float64 [..., n] to a grid of about 2**-bits of `top`, by default the largest magnitude of each row."""
    shift = (x.abs().amax(-1, keepdim=True) if top is None else top) * 2.0 ** (53 - bits)
    return x.add(shift).sub_(shift)


def _log2(count: int) -> int:
    return max(count - 1, 1).bit_length()


def _each(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: function(x.double()).to(x.dtype)


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    return product(a, b).to(a.dtype)


def _sum(x: Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    return total(x, dim or range(x.ndim), keepdim).to(dtype or x.dtype)


def _mean(x: Tensor, dim: Sequence[int], keepdim: bool = False, *, dtype: Any = None) -> Tensor:
    return (total(x, dim, keepdim) / math.prod(x.shape[d] for d in dim)).to(dtype or x.dtype)


def _log_softmax(x: Tensor, dim: int, _dtype: Any = None) -> Tensor:
    """Compute log-softmax with the same rounding as the trainer's `token_log_probs`."""
    top = x.amax(dim, keepdim=True)
    return x - (top + _each(log)(_sum(_each(exp)(x - top), [dim], True)))


_aten = torch.ops.aten
_INSTEAD: Mapping[Any, Callable[..., Any]] = {
    **dict.fromkeys((_aten.mm.default, _aten.bmm.default, _aten.matmul.default), _matmul),
    _aten.linear.default: lambda x, weight, bias=None: _matmul(x, weight.mT) + (0.0 if bias is None else bias),
    _aten.addmm.default: lambda bias, a, b: _matmul(a, b) + bias,
    _aten.mean.dim: _mean,
    _aten.sum.dim_IntList: _sum,
    _aten.exp.default: _each(exp),
    _aten.log.default: _each(log),
    _aten.silu.default: _each(lambda x: x / (1.0 + exp(-x))),
    # Float64 results may differ in the last bits, far below the rounding to the input's dtype.
    _aten.cos.default: _each(torch.cos),
    _aten.sin.default: _each(torch.sin),
    **dict.fromkeys((_aten.log_softmax.int, _aten._log_softmax.default), _log_softmax),
    _aten.scaled_dot_product_attention.default: lambda q, k, v, mask=None, _p=0.0, causal=False, scale=None, **_: (
        attention(q, k, v, mask, causal, scale)[0]
    ),
    _aten._scaled_dot_product_flash_attention_for_cpu.default: lambda q, k, v, _p=0.0, causal=False, scale=None: (
        attention(q, k, v, None, causal, scale)
    ),
}
