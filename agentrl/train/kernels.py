"""Attention in blocks: the blocks of queries and keys, kernels for a block, and the merge of blocks into one softmax.

1. `AttentionBlocks` is a set of blocks. Each query of a block sees all keys or, if causal, the keys up to its own.
   No query is in two blocks of a set, so one kernel call may compute the whole set.
2. A kernel returns outputs and log-sum-exps; `merge` combines two results (arXiv:2205.14135, arXiv:2310.01889).
3. `kernel_for` chooses torch's flash attention if it supports the queries, else matrix products."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Rows = slice | Tensor  # places of queries: a slice, or int64 indices
Outputs = Iterator[tuple[Rows, Tensor, Tensor]]  # queries, their outputs [n, heads, dim] and log-sum-exps [n, heads]
Gradients = Iterator[tuple[Rows, Rows, Tensor, Tensor, Tensor]]
"""Places of queries and of keys, and their contributions to the gradients of queries, keys and values."""
CHUNK_ELEMENTS = 1 << 24  # scores that the plain kernel computes at once


@dataclass(frozen=True)
class AttentionBlocks:
    """Blocks `(first query, end, first key, end)`; a causal block has as many keys as queries."""

    blocks: tuple[tuple[int, int, int, int], ...]
    causal: bool = False

    def on(self, device: torch.device) -> tuple[_Runs, _Runs]:
        """Return the ranges of queries and of keys on a device; cached."""
        if device not in self._moved:
            ranges = [(a, b) for a, b, _, _ in self.blocks], [(s, e) for _, _, s, e in self.blocks]
            self._moved[device] = _Runs.of(ranges[0], device), _Runs.of(ranges[1], device)
        return self._moved[device]

    _moved: dict[torch.device, tuple[_Runs, _Runs]] = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class _Runs:
    """Concatenated ranges: places, int32 bounds of each range in the concatenation, and the maximum length."""

    rows: Rows  # a slice if the ranges are contiguous
    bounds: Tensor
    most: int

    @classmethod
    def of(cls, ranges: Sequence[tuple[int, int]], device: torch.device) -> _Runs:
        lengths = [end - start for start, end in ranges]
        bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)
        rows: Rows = slice(ranges[0][0], ranges[-1][1])
        if any(end != start for (_, end), (start, _) in itertools.pairwise(ranges)):
            rows = torch.cat([torch.arange(a, b, device=device) for a, b in ranges])
        return cls(rows, bounds, max(lengths))


class Saved(NamedTuple):
    """Queries, keys and values; the outputs and log-sum-exps over all parts; the gradient of the outputs."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    grad: Tensor


class Kernel(ABC):
    """A kernel for the blocks of one part. Queries are [t, heads, dim], keys and values [T, groups, dim]."""

    one_dim = True  # true if values must have the keys' dim

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, part: AttentionBlocks, scale: float) -> Outputs:
        """Yield the outputs of a part's queries: all at once, block by block, or in pieces of a block."""

    @abstractmethod
    def backward(self, saved: Saved, part: AttentionBlocks, scale: float) -> Gradients:
        """Yield the contributions of a part's blocks to the gradients, in the same ways."""


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Combine the attention over two sets of keys: outputs [n, heads, dim] and log-sum-exps [n, heads]."""
    total = torch.logaddexp(lse, other_lse)
    weight, other_weight = (lse - total).exp(), (other_lse - total).exp()
    return out * weight[..., None] + other * other_weight[..., None], total


def attention(
    q: Tensor, k: Tensor, v: Tensor, parts: Sequence[AttentionBlocks], scale: float, kernel: Kernel
) -> Tensor:
    """Return attention [t, heads, dim of the values]; differentiable. The first part's blocks contain every query, and
    no key twice. If the kernel needs one dim for keys and values, the narrower ones are padded with zeros."""
    wide, width = max(k.size(-1), v.size(-1)), v.size(-1)
    if kernel.one_dim:
        q, k, v = (x if x.size(-1) == wide else F.pad(x, (0, wide - x.size(-1))) for x in (q, k, v))
    out: Tensor = _BlockAttention.apply(q, k, v, tuple(parts), scale, kernel)
    return out[..., :width]


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, parts: tuple[AttentionBlocks, ...], scale: float, kernel: Kernel
    ) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        shape = (*q.shape[:-1], v.size(-1))
        out = torch.empty(shape, dtype=wide if len(parts) > 1 else q.dtype, device=q.device)
        lse = torch.empty(q.shape[:2], dtype=wide, device=q.device)
        for number, part in enumerate(parts):
            for rows, found, found_lse in kernel.forward(q, k, v, part, scale):
                if number:
                    found, found_lse = merge(out[rows], lse[rows], found, found_lse)
                out[rows], lse[rows] = found, found_lse
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.parts, ctx.scale, ctx.kernel = parts, scale, kernel
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        saved = Saved(q, k, v, out, lse, grads[0])
        wide = torch.promote_types(q.dtype, torch.float32) if len(ctx.parts) > 1 else q.dtype
        dq = torch.empty_like(q, dtype=wide)
        # Zeros, because with context parallelism some keys are in no block of this rank's first part.
        dk, dv = (torch.zeros_like(x, dtype=wide) for x in (k, v))
        for number, part in enumerate(ctx.parts):
            for rows, keys, *found in ctx.kernel.backward(saved, part, ctx.scale):
                for total, at, value in zip((dq, dk, dv), (rows, keys, keys), found, strict=True):
                    if number == 0 and total is dq:  # the first part has every query once
                        total[at] = value
                    elif isinstance(at, slice):
                        total[at] += value
                    else:  # the same key may be in several blocks
                        total.index_add_(0, at, value.to(total.dtype))
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None


class Plain(Kernel):
    """Attention by matrix products, for any device and dtype."""

    one_dim = False

    def forward(self, q: Tensor, k: Tensor, v: Tensor, part: AttentionBlocks, scale: float) -> Outputs:
        for rows, keys, hidden in _chunks(part, q.size(1), q.device):
            scores = _scores(q[rows], k[keys], scale, hidden)
            lse = scores.logsumexp(-1)
            yield rows, _heads((scores - lse[..., None]).exp(), v[keys]).to(q.dtype), lse.transpose(0, 1)

    def backward(self, saved: Saved, part: AttentionBlocks, scale: float) -> Gradients:
        q, k, v, out, lse, grad = saved
        for rows, keys, hidden in _chunks(part, q.size(1), q.device):
            given = [x.detach().requires_grad_() for x in (q[rows], k[keys], v[keys])]
            d_out = grad[rows].to(lse.dtype)
            with torch.enable_grad():
                p = (_scores(given[0], given[1], scale, hidden) - lse[rows].transpose(0, 1)[..., None]).exp()
                found = (_heads(p, given[2]) * d_out).sum()
                # `lse` is a constant here. This term is the part of the gradient that flows through it.
                found = found - (p.sum(-1).transpose(0, 1) * (d_out * out[rows]).sum(-1)).sum()
            dq, dk, dv = torch.autograd.grad(found, given)
            yield rows, keys, dq, dk, dv


class FlashOnCpu(Kernel):
    """Torch's flash attention for the CPU, one block per call."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, part: AttentionBlocks, scale: float) -> Outputs:
        for a, b, s, e in part.blocks:
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                _batch(q[a:b]), _batch(k[s:e]), _batch(v[s:e]), 0.0, part.causal, scale=scale
            )
            yield slice(a, b), out[0].transpose(0, 1), lse[0].transpose(0, 1)

    def backward(self, saved: Saved, part: AttentionBlocks, scale: float) -> Gradients:
        q, k, v, out, lse, grad = saved
        for a, b, s, e in part.blocks:
            tensors = [_batch(x) for x in (grad[a:b], q[a:b], k[s:e], v[s:e], out[a:b])]
            found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *tensors, lse[a:b].transpose(0, 1)[None].contiguous(), 0.0, part.causal, scale=scale
            )
            dq, dk, dv = (x[0].transpose(0, 1) for x in found)
            yield slice(a, b), slice(s, e), dq, dk, dv


class FlashOnCuda(Kernel):
    """Torch's variable-length flash attention, one part per launch."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, part: AttentionBlocks, scale: float) -> Outputs:
        at, seen = part.on(q.device)
        shape = (at.bounds, seen.bounds, at.most, seen.most)
        tensors, how = (q[at.rows], k[seen.rows], v[seen.rows]), (0.0, part.causal, False)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(*tensors, *shape, *how, scale=scale)
        yield at.rows, out, lse.transpose(0, 1)

    def backward(self, saved: Saved, part: AttentionBlocks, scale: float) -> Gradients:
        q, k, v, out, lse, grad = saved
        at, seen = part.on(q.device)
        tensors = (grad[at.rows].contiguous(), q[at.rows], k[seen.rows], v[seen.rows], out[at.rows])
        lse, shape = lse[at.rows].transpose(0, 1).contiguous(), (at.bounds, seen.bounds, at.most, seen.most)
        seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # the seed of dropout, which is off
        how = (0.0, part.causal, seed, seed)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(*tensors, lse, *shape, *how, scale=scale)
        yield at.rows, seen.rows, dq, dk, dv


def kernel_for(q: Tensor) -> Kernel:
    """Return the fastest kernel for the device, dtype and dim of queries [t, heads, dim]."""
    if q.device.type == "cpu":
        return FlashOnCpu()
    half = q.dtype in (torch.float16, torch.bfloat16)
    return FlashOnCuda() if q.is_cuda and half and q.size(-1) <= 256 and q.size(-1) % 8 == 0 else Plain()


def _batch(x: Tensor) -> Tensor:
    """Transpose [t, heads, dim] to [1, heads, t, dim]."""
    return x.transpose(0, 1)[None]


def _chunks(part: AttentionBlocks, heads: int, device: torch.device) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Yield some queries of a block, the block's keys, and a mask [queries, keys] of hidden keys, or None."""
    for a, b, s, e in part.blocks:
        step = max(1, CHUNK_ELEMENTS // max(1, heads * (e - s)))
        for first in range(a, b, step):
            last, hidden = min(first + step, b), None
            if part.causal:
                hidden = torch.arange(s, e, device=device) - s > torch.arange(first, last, device=device)[:, None] - a
            yield slice(first, last), slice(s, e), hidden


def _scores(q: Tensor, k: Tensor, scale: float, hidden: Tensor | None) -> Tensor:
    """Return scores [heads, queries, keys], float32 or wider, of q [queries, heads, dim] and k [keys, groups, dim]."""
    wide = torch.promote_types(q.dtype, torch.float32)
    k = k.repeat_interleave(q.size(1) // k.size(1), 1)
    scores = torch.einsum("qhd,khd->hqk", q.to(wide), k.to(wide)) * scale
    return scores if hidden is None else scores.masked_fill(hidden, -torch.inf)


def _heads(weights: Tensor, values: Tensor) -> Tensor:
    """Return outputs [queries, heads, dim] of weights [heads, queries, keys] and values [keys, groups, dim]."""
    values = values.repeat_interleave(weights.size(0) // values.size(1), 1)
    return torch.einsum("hqk,khd->qhd", weights, values.to(weights.dtype))
