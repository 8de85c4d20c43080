"""Weights against loops, and the guarantee that no split changes the sum."""

from collections import defaultdict
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algorithms import AlgorithmSettings, SampleView, algorithm_of
from agentrl.algorithms.ops.corrections import token_weights
from agentrl.errors import SettingsError
from tests.algorithms.views import view


class Batch(NamedTuple):
    mask: torch.Tensor
    lengths: torch.Tensor
    trajectory_ids: torch.Tensor


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    masks = draw(st.lists(st.lists(st.integers(0, 1), max_size=6), min_size=1, max_size=8))
    ids = draw(st.lists(st.integers(0, 4), min_size=len(masks), max_size=len(masks)))
    return Batch(
        torch.tensor([m for mask in masks for m in mask], dtype=torch.uint8),
        torch.tensor([len(mask) for mask in masks]),
        torch.tensor(ids),
    )


def naive_mean(batch: Batch, losses: torch.Tensor, per_token: bool) -> float:
    by_rollout: dict[int, list[float]] = defaultdict(list)
    at = 0
    for length, rollout in zip(batch.lengths.tolist(), batch.trajectory_ids.tolist(), strict=True):
        for token in range(at, at + length):
            if batch.mask[token]:
                by_rollout[rollout].append(losses[token].item())
        at += length
    if per_token:
        everything = [x for values in by_rollout.values() for x in values]
        return sum(everything) / len(everything) if everything else 0.0
    return sum(sum(v) / len(v) for v in by_rollout.values()) / len(by_rollout) if by_rollout else 0.0


@given(batches(), st.booleans())
def test_weights_are_the_means_they_claim(batch: Batch, per_token: bool) -> None:
    weights = token_weights(*batch, per_token=per_token)
    losses = torch.randn(len(batch.mask), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert (losses * weights).sum().item() == pytest.approx(naive_mean(batch, losses, per_token), abs=1e-12)
    assert weights.sum().item() == pytest.approx(1.0 if batch.mask.any() else 0.0)
    assert ((weights > 0) == (batch.mask > 0)).all()


@given(batches(), st.booleans(), st.randoms(use_true_random=False))
def test_weights_do_not_depend_on_the_order(batch: Batch, per_token: bool, random: object) -> None:
    weights = token_weights(*batch, per_token=per_token).split(batch.lengths.tolist())
    masks = batch.mask.split(batch.lengths.tolist())
    order = list(range(len(batch.lengths)))
    random.shuffle(order)  # type: ignore[attr-defined]
    moved = Batch(torch.cat([masks[i] for i in order]), batch.lengths[order], batch.trajectory_ids[order])
    torch.testing.assert_close(token_weights(*moved, per_token=per_token), torch.cat([weights[i] for i in order]))


@given(batches(), st.booleans(), st.lists(st.integers(0, 3), min_size=8, max_size=8))
def test_any_split_gives_the_same_loss_and_gradient(batch: Batch, per_token: bool, parts: list[int]) -> None:
    generator = torch.Generator().manual_seed(1)
    n = len(batch.mask)
    parameter = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)
    base, old, advantages = (torch.randn(n, generator=generator, dtype=torch.float64) for _ in range(3))
    weights = token_weights(*batch, per_token=per_token)
    part_of_token = torch.tensor(parts)[: len(batch.lengths)].repeat_interleave(batch.lengths)

    def loss_over(chosen: torch.Tensor) -> torch.Tensor:
        seen = view(parameter * base[chosen], old_log_probs=old[chosen], advantages=advantages[chosen])
        return (algorithm_of(AlgorithmSettings()).token_loss(seen).loss * weights[chosen]).sum()

    whole = loss_over(torch.ones(n, dtype=torch.bool))
    pieces = [loss_over(part_of_token == part) for part in range(4)]
    torch.testing.assert_close(torch.stack(pieces).sum(), whole)
    (want,) = torch.autograd.grad(whole, parameter, retain_graph=True)
    (got,) = torch.autograd.grad(torch.stack(pieces).sum(), parameter)
    torch.testing.assert_close(got, want)


def test_fan_out_shares_one_weight() -> None:
    mask, lengths = torch.ones(8), torch.tensor([2, 2, 4])
    apart = token_weights(mask, lengths, torch.tensor([0, 1, 2]))
    together = token_weights(mask, lengths, torch.tensor([0, 0, 2]))
    assert apart.tolist() == pytest.approx([1 / 6] * 4 + [1 / 12] * 4)
    assert together.tolist() == pytest.approx([1 / 8] * 8)


def test_removed_samples_do_not_count() -> None:
    weights = token_weights(torch.tensor([0, 0, 1, 1]), torch.tensor([2, 2]), torch.tensor([0, 1]))
    assert weights.tolist() == [0, 0, 0.5, 0.5]


def test_denominators() -> None:
    """Trajectories of two samples, of one, and of one that does not train."""
    mask, lengths, rollouts = torch.tensor([1, 1, 1, 0, 1, 0]), torch.tensor([2, 2, 1, 1]), torch.tensor([0, 0, 1, 2])

    def weights(**changes: Any) -> list[float]:
        groups = {"rewards": torch.zeros(4), "group_ids": torch.zeros(4).long()}
        given = SampleView(loss_mask=mask, lengths=lengths, trajectory_ids=rollouts, **groups)
        return algorithm_of(AlgorithmSettings(**changes)).token_weights(given).tolist()

    third = 1 / 3
    assert weights() == pytest.approx([third / 2, third / 2, third / 2, 0, 1 / 2, 0])
    assert weights(loss_denominator="all") == pytest.approx([third / 3, third / 3, third / 3, 0, third, 0])
    assert weights(loss_denominator="constant", loss_max_length=10) == pytest.approx([1 / 30] * 3 + [0, 1 / 30, 0])
    with pytest.raises(SettingsError, match="needs loss_max_length"):
        weights(loss_denominator="constant")
