"""Batch-invariant arithmetic: bits depend only on a row's own numbers, and equal usual arithmetic up to rounding."""

import pytest
import torch
from torch import Tensor

from agentrl.numerics import batch_invariant


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Return numbers of very different sizes."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draw) * torch.rand(shape, generator=draw).mul(12).sub(6).exp()


@pytest.mark.parametrize("width", [1, 2, 33, 384, 5000])
def test_a_product_of_two_matrices_does_not_depend_on_what_else_is_in_them(width: int) -> None:
    rows, columns = numbers(37, width), numbers(width, 19, seed=1)
    whole = batch_invariant.product(rows, columns)
    for i in range(37):
        assert torch.equal(batch_invariant.product(rows[i : i + 1], columns)[0], whole[i])
    assert torch.equal(batch_invariant.product(rows, columns[:, 3:4])[:, 0], whole[:, 3])
    order = torch.randperm(width, generator=torch.Generator().manual_seed(2))
    assert torch.equal(batch_invariant.product(rows[:, order], columns[order]), whole)
    size = rows.abs().amax(-1)[:, None].double() * columns.abs().amax(0).double()
    assert (whole - rows.double() @ columns.double()).abs().div(size * width).max() < 1e-5


def test_a_sum_does_not_depend_on_its_order() -> None:
    rows = numbers(5, 1001)
    order = torch.randperm(1001, generator=torch.Generator().manual_seed(2))
    assert torch.equal(batch_invariant.total(rows), batch_invariant.total(rows[:, order]))
    assert torch.equal(batch_invariant.total(rows.T[order], [0]), batch_invariant.total(rows))
    torch.testing.assert_close(
        batch_invariant.total(rows, [0, 1], keepdim=True), rows.double().sum([0, 1], keepdim=True)
    )


def test_exp_and_log_are_accurate_at_every_place_of_an_array() -> None:
    x = torch.linspace(-699, 699, 10007, dtype=torch.float64)
    torch.testing.assert_close(batch_invariant.exp(x), x.exp(), rtol=1e-13, atol=0)
    torch.testing.assert_close(batch_invariant.log(x.exp()), x, rtol=1e-14, atol=1e-14)
    assert torch.equal(torch.stack([batch_invariant.exp(one) for one in x[:100]]), batch_invariant.exp(x)[:100])
    assert batch_invariant.exp(torch.tensor([-torch.inf, -701.0], dtype=torch.float64)).tolist() == [0, 0]


def test_attention_token_by_token_is_that_of_all_tokens_at_once() -> None:
    query, key, value = numbers(1, 4, 70, 32), numbers(1, 2, 70, 32, seed=1) / 8, numbers(1, 2, 70, 32, seed=2)
    out, lse = batch_invariant.attention(query, key, value, causal=True)
    for t in range(70):
        one, one_lse = batch_invariant.attention(query[:, :, t : t + 1], key[:, :, : t + 1], value[:, :, : t + 1])
        assert torch.equal(one[:, :, 0], out[:, :, t])
        assert torch.equal(one_lse[:, :, 0], lse[:, :, t])
    usual = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    assert (out - usual).abs().max() < 1e-4 * value.abs().max()


def test_only_inside_of_the_context_are_sums_exact() -> None:
    rows, columns = numbers(8, 300), numbers(300, 8, seed=1)
    with batch_invariant.batch_invariant(True):
        inside = rows @ columns
    with batch_invariant.batch_invariant(False):
        outside = rows @ columns
    assert torch.equal(inside, batch_invariant.product(rows, columns).float())
    assert torch.equal(outside, rows @ columns)
    assert not torch.equal(inside, outside)


def test_more_tokens_than_the_grid_holds_are_refused() -> None:
    many = torch.zeros(1, 1, batch_invariant.MAX_KEYS + 1, 2)
    with pytest.raises(ValueError, match="at most 16384 tokens"):
        batch_invariant.attention(many[:, :, :1], many, many)
