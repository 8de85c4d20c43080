"""Attention in blocks over packed trees against one dense softmax for each sequence; values and gradients."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from agentrl.train.kernels import AttentionBlocks, FlashOnCpu, Kernel, Plain, attention, kernel_for, merge
from agentrl.train.microbatches import PackedLayout
from agentrl.train.tree import Ids, SharedPrefixes, Tree
from tests.support.nightly import nightly
from tests.train.test_tree import sequences

HEADS, GROUPS, DIM, SCALE = 4, 2, 8, 0.3
KERNELS: dict[str, Kernel] = {"plain": Plain(), "flash": FlashOnCpu()}


def inputs(
    tokens: int, seed: int, dtype: torch.dtype = torch.float64, value_dim: int = DIM
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Make queries, keys, values, and a gradient of the outputs."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(tokens, HEADS, DIM), (tokens, GROUPS, DIM), (tokens, GROUPS, value_dim), (tokens, HEADS, value_dim)]
    q, k, v, grad = (torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes)
    return q, k, v, grad


def leaves_of(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    return q, k, v


def dense(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Return softmax attention in which query i attends to key j if `seen[i, j]`."""
    k, v = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * SCALE
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


def seen_by(tree: Tree, laid: PackedLayout) -> Tensor:
    """Return the global positions that each real token attends to, by the tree's paths; padding attends to itself."""
    seen = torch.eye(laid.total, dtype=torch.bool)
    for path in tree.paths:
        places = np.concatenate([np.arange(laid.starts[n], laid.starts[n] + len(tree.nodes[n])) for n in path])
        for i, place in enumerate(places):
            seen[place, places[: i + 1]] = True
    return seen


@pytest.mark.parametrize("kernel", nightly(KERNELS, 1))
@hypothesis_settings(max_examples=25, deadline=None)
@given(
    found=sequences(),
    cp=st.sampled_from([1, 2, 3]),
    pad=st.sampled_from([1, 4]),
    seed=st.integers(0, 99),
    value_dim=st.sampled_from([DIM, DIM - 3, DIM + 4]),
)
def test_blocks_are_one_softmax_over_the_path(
    kernel: str, found: list[Ids], cp: int, pad: int, seed: int, value_dim: int
) -> None:
    tree = Tree.of([len(ids) for ids in found], SharedPrefixes.of(found))
    alignment = 2 * cp if cp > 1 else 1
    ranks = [PackedLayout(tree, alignment, cp, rank, pad) for rank in range(cp)]
    q, k, v, weight = inputs(ranks[0].total, seed, value_dim=value_dim)
    for x in (q, k, v):
        x.requires_grad_()
    seen = seen_by(tree, ranks[0])
    real = torch.from_numpy(np.concatenate([np.arange(ranks[0].starts[n], ranks[0].starts[n] + len(node)) for n, node in enumerate(tree.nodes)]))  # fmt: skip
    total: Any = 0
    for laid in ranks:
        assert len(laid.held) % pad == 0
        out = attention(q[laid.held], k, v, laid.parts(), SCALE, KERNELS[kernel])
        whole = torch.zeros_like(weight).index_copy(0, torch.from_numpy(laid.held), out)
        total = total + whole
    want = dense(q, k, v, seen)
    torch.testing.assert_close(total[real], want[real], rtol=1e-10, atol=1e-12)
    got_grads = torch.autograd.grad((total * weight)[real].sum(), (q, k, v))
    want_grads = torch.autograd.grad((want * weight)[real].sum(), (q, k, v))
    for got, expected in zip(got_grads, want_grads, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("cp", [1, 2])
def test_a_shared_token_has_the_routing_of_the_first_that_knows_it(cp: int) -> None:
    begin = np.arange(20)
    found = [np.concatenate([begin, [n] * 4]).astype(np.int32) for n in (50, 40, 60)]
    tree = Tree.of([24] * 3, SharedPrefixes.of(found))
    rows = [np.full((24, 2), n, np.int16) for n in range(3)]
    rows[0][10:] = -1
    for rank in range(cp):
        laid = PackedLayout(tree, 2 * cp, cp, rank, 1)
        tokens, positions = laid.local(found)
        want = [
            0 if at < 10 else 1 if at < 20 else {50: -1, 40: 1, 60: 2}[int(id_)]
            for id_, at in zip(tokens, positions, strict=True)
        ]
        np.testing.assert_array_equal(laid.routing(rows), np.array(want)[:, None].repeat(2, 1))


def test_merged_halves_are_the_whole() -> None:
    q, k, v, _ = inputs(12, 0)
    parts = [
        next(iter(Plain().forward(q, k, v, AttentionBlocks(((0, 12, s, e),)), SCALE))) for s, e in ((0, 5), (5, 12))
    ]
    (_, a, a_lse), (_, b, b_lse) = parts
    out, lse = merge(a, a_lse, b, b_lse)
    _, want, want_lse = next(iter(Plain().forward(q, k, v, AttentionBlocks(((0, 12, 0, 12),)), SCALE)))
    torch.testing.assert_close((out, lse), (want, want_lse))
    # Keys with a far lower score change nothing, and nothing overflows.
    out, _ = merge(a, a_lse + 1e4, b, b_lse - 1e4)
    assert torch.equal(out, a)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_precision_of_the_merged_parts_is_that_of_one_call(dtype: torch.dtype) -> None:
    exact = inputs(96, 1)
    q, k, v, _ = (x.to(dtype) for x in exact)
    cut = (AttentionBlocks(((0, 40, 0, 40), (40, 96, 40, 96)), causal=True), AttentionBlocks(((40, 96, 0, 40),)))
    whole = (AttentionBlocks(((0, 96, 0, 96),), causal=True),)
    want = dense(exact[0], exact[1], exact[2], torch.ones(96, 96, dtype=torch.bool).tril())
    errors = [(attention(q, k, v, parts, SCALE, FlashOnCpu()) - want).abs().max() for parts in (cut, whole)]
    assert errors[0] <= 1.5 * errors[1] + 1e-7


def test_the_plain_kernel_in_chunks_is_the_plain_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, grad = inputs(30, 2)
    parts = (AttentionBlocks(((0, 10, 0, 10), (10, 30, 10, 30)), causal=True), AttentionBlocks(((10, 30, 0, 10),)))
    results = []
    for elements in (1 << 24, 100):
        monkeypatch.setattr("agentrl.train.kernels.CHUNK_ELEMENTS", elements)
        leaves = leaves_of(q, k, v)
        out = attention(*leaves, parts, SCALE, Plain())
        results.append((out, *torch.autograd.grad(out, leaves, grad)))
    torch.testing.assert_close(results[0], results[1])


def test_the_same_key_in_several_blocks_gathers_all_its_gradients() -> None:
    """One launch computes a whole part like this: queries and keys as indices."""

    class Gathered(Plain):
        def backward(self, *args: Any) -> Any:
            found = list(super().backward(*args))
            places = [torch.cat([torch.arange(r.start, r.stop) for r in rows]) for rows in zip(*((a, b) for a, b, *_ in found), strict=True)]  # fmt: skip
            yield (*places, *(torch.cat(grads) for grads in zip(*((dq, dk, dv) for _, _, dq, dk, dv in found), strict=True)))  # fmt: skip

    q, k, v, grad = inputs(24, 3)
    parts = (AttentionBlocks(((0, 24, 0, 24),), causal=True), AttentionBlocks(((8, 16, 0, 8), (16, 24, 0, 16))))
    found = []
    for kernel in (Plain(), Gathered()):
        leaves = leaves_of(q, k, v)
        found.append(torch.autograd.grad(attention(*leaves, parts, SCALE, kernel), leaves, grad))
    torch.testing.assert_close(found[0], found[1])


def test_a_part_on_a_device() -> None:
    touching, apart = (
        AttentionBlocks(((0, 4, 0, 4), (4, 9, 4, 9)), causal=True),
        AttentionBlocks(((2, 4, 0, 2), (6, 9, 4, 6))),
    )
    queries, keys = touching.on(torch.device("cpu"))
    assert (queries.rows, keys.rows) == (slice(0, 9), slice(0, 9))
    assert queries.bounds.tolist() == [0, 4, 9]
    queries, keys = apart.on(torch.device("cpu"))
    assert isinstance(queries.rows, Tensor)
    assert isinstance(keys.rows, Tensor)
    assert (queries.rows.tolist(), keys.rows.tolist()) == ([2, 3, 6, 7, 8], [0, 1, 4, 5])
    assert (keys.bounds.tolist(), queries.most, keys.most) == ([0, 2, 4], 3, 2)
    assert dataclasses.replace(apart) == apart


def test_the_cpu_has_its_own_kernel() -> None:
    assert isinstance(kernel_for(torch.zeros(1, 1, 8)), FlashOnCpu)
