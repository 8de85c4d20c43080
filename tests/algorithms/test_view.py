"""Sums over a sample, also if its tokens lie on several ranks."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.algorithms.views import view

tokens = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1), st.integers(-9, 9)), min_size=1, max_size=12)


@given(tokens)
def test_a_mean_is_that_of_the_samples_trained_tokens(found: list[tuple[int, int, int]]) -> None:
    samples, mask, values = (torch.tensor(column) for column in zip(*found, strict=True))
    seen = view(torch.zeros(len(found)), loss_mask=mask, sample_ids=samples, num_samples=4)
    got = seen.mean_over_sample(values.double())
    for sample, mean in zip(samples.tolist(), got.tolist(), strict=True):
        trained = [value for s, m, value in found if s == sample and m]
        assert mean == pytest.approx(sum(trained) / len(trained) if trained else 0.0)


def test_sums_of_several_ranks_are_joined() -> None:
    x = torch.tensor([1.0, 2.0, 5.0], requires_grad=True)
    elsewhere = torch.tensor([10.0, 0.0])
    ids, mask = torch.tensor([0, 0, 1]), torch.tensor([1, 1, 0])
    seen = view(x, sample_ids=ids, loss_mask=mask, num_samples=2, join=lambda sums: sums + elsewhere)
    got = seen.sum_over_sample(x)
    assert got.tolist() == [13.0, 13.0, 0.0]
    got[0].backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1.0, 1.0, 0.0]


def test_a_masked_token_reads_zero() -> None:
    x = torch.tensor([-1.0, -math.inf], requires_grad=True)
    seen = view(x, loss_mask=torch.tensor([1, 0]), rollout_log_probs=x.detach(), staleness=torch.tensor([3, -1]))
    assert seen.log_probs.tolist() == [-1.0, 0.0]
    assert seen.rollout_log_probs is not None
    assert seen.rollout_log_probs.tolist() == [-1.0, 0.0]
    assert seen.staleness.tolist() == [3, -1]
    assert seen.mean_over_sample(x).tolist() == [-1.0, -1.0]
