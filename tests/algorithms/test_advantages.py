"""GRPO against plain numpy, and changes that must not affect it."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from agentrl.algorithms import AlgorithmSettings, SampleView, algorithm_of
from agentrl.algorithms import compute_advantages as estimate
from agentrl.algorithms.group_relative import GRPO
from agentrl.algorithms.ops.normalization import group_normalize, whiten
from agentrl.errors import PluginError, SettingsError, TrainError

rewards_st = st.lists(st.lists(st.sampled_from([0.0, 1.0, -0.5, 0.25]), min_size=1, max_size=6), min_size=1, max_size=4)


def inputs(groups: list[list[float]], rollouts: list[int] | None = None, length: int = 2) -> SampleView:
    rewards = [r for group in groups for r in group]
    sizes = torch.tensor([len(group) for group in groups])
    return SampleView(
        rewards=torch.tensor(rewards, dtype=torch.float64),
        group_ids=torch.arange(len(groups)).repeat_interleave(sizes),
        trajectory_ids=torch.arange(len(rewards)) if rollouts is None else torch.tensor(rollouts),
        lengths=torch.full((len(rewards),), length),
        loss_mask=torch.ones(len(rewards) * length),
    )


def compute_advantages(batch: SampleView, settings: AlgorithmSettings) -> torch.Tensor:
    return estimate(batch, settings).advantages


def naive_grpo(groups: list[list[float]], std: bool) -> list[float]:
    out = []
    for group in groups:
        spread = float(np.std(group, ddof=1)) if len(group) > 1 else 0.0
        for reward in group:
            centred = reward - float(np.mean(group))
            out.append(0.0 if spread < 1e-9 else centred / (spread + 1e-6) if std else centred)
    return out


@given(rewards_st, st.booleans())
def test_grpo_is_the_papers(groups: list[list[float]], std: bool) -> None:
    settings = AlgorithmSettings(grpo_std_normalization=std)
    got = compute_advantages(inputs(groups, length=1), settings)
    np.testing.assert_allclose(got.numpy(), naive_grpo(groups, std), rtol=1e-5, atol=1e-6)


def test_every_token_of_a_sample_has_the_samples_advantage() -> None:
    batch = SampleView(
        rewards=torch.tensor([1.0, 0.0]),
        group_ids=torch.tensor([0, 0]),
        trajectory_ids=torch.tensor([0, 1]),
        lengths=torch.tensor([3, 0]),
        loss_mask=torch.ones(3),
    )
    got = compute_advantages(batch, AlgorithmSettings(grpo_std_normalization=False))
    assert got.tolist() == [0.5, 0.5, 0.5]


@pytest.mark.parametrize("value", [0.0, 0.1, 1.0, 1e6, -1 / 3])
@pytest.mark.parametrize("size", [1, 3, 7])
def test_equal_rewards_give_exact_zeros(value: float, size: int) -> None:
    got = compute_advantages(inputs([[value] * size]), AlgorithmSettings())
    assert got.tolist() == [0.0] * (2 * size)


def test_fanned_out_samples_are_one_member() -> None:
    plain = group_normalize(torch.tensor([1.0, 0.0, 0.0]), torch.zeros(3).long(), torch.arange(3))
    fanned = group_normalize(
        torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0]), torch.zeros(5).long(), torch.tensor([4, 4, 4, 5, 6])
    )
    torch.testing.assert_close(fanned, plain[[0, 0, 0, 1, 2]])


def test_fan_out_with_different_rewards_counts_by_its_mean() -> None:
    got = group_normalize(
        torch.tensor([1.0, 0.0, 0.0]), torch.zeros(3).long(), torch.tensor([0, 0, 1]), divide_by_std=False
    )
    assert got.tolist() == [0.75, -0.25, -0.25]


def test_samples_without_a_reward_are_left_out() -> None:
    got = group_normalize(torch.tensor([1.0, math.nan, 0.0]), torch.zeros(3).long(), torch.arange(3))
    want = group_normalize(torch.tensor([1.0, 0.0]), torch.zeros(2).long(), torch.arange(2))
    assert got.tolist() == [want[0].item(), 0.0, want[1].item()]
    only = compute_advantages(inputs([[math.nan]]), AlgorithmSettings(rewards_normalization=False))
    assert only.tolist() == [0.0, 0.0]


@given(rewards_st, st.randoms(use_true_random=False), st.floats(-5, 5), st.floats(0.5, 4))
def test_invariances(groups: list[list[float]], random: object, shift: float, scale: float) -> None:
    batch = inputs(groups, length=1)
    base = group_normalize(batch.rewards, batch.group_ids, batch.trajectory_ids)
    order = list(range(len(base)))
    random.shuffle(order)  # type: ignore[attr-defined]
    shuffled = group_normalize(batch.rewards[order], batch.group_ids[order], batch.trajectory_ids[order])
    torch.testing.assert_close(shuffled, base[order])
    moved = group_normalize(batch.rewards * scale + shift, batch.group_ids, batch.trajectory_ids)
    torch.testing.assert_close(moved, base, rtol=1e-4, atol=1e-5)
    for group in range(len(groups)):
        assert base[batch.group_ids == group].sum().item() == pytest.approx(0, abs=1e-9)


def test_rewards_can_be_used_as_they_are() -> None:
    got = compute_advantages(inputs([[1.0, 0.5]]), AlgorithmSettings(rewards_normalization=False))
    assert got.tolist() == [1.0, 1.0, 0.5, 0.5]


def test_whitening_looks_at_trained_tokens_only() -> None:
    values = torch.tensor([1.0, 2.0, 3.0, 1000.0], dtype=torch.float64)
    got = whiten(values, torch.tensor([1, 1, 1, 0]))[:3].numpy()
    np.testing.assert_allclose(got, (np.array([1, 2, 3]) - 2) / np.std([1, 2, 3]), rtol=1e-6)
    batch = dataclasses.replace(inputs([[1.0, 0.0, 0.0]]), loss_mask=torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 0.0]))
    whitened = compute_advantages(batch, AlgorithmSettings(normalize_advantages=True))[:3]
    assert whitened.mean().item() == pytest.approx(0, abs=1e-6)
    assert whitened.var(unbiased=False).item() == pytest.approx(1, abs=1e-5)


def length_penalty(batch: SampleView, settings: AlgorithmSettings) -> torch.Tensor:
    return (batch.rewards - batch.lengths * settings.gamma).repeat_interleave(batch.lengths)


def no_broadcast(batch: SampleView, settings: AlgorithmSettings) -> torch.Tensor:
    return batch.rewards


def test_an_estimator_can_be_given_by_path() -> None:
    here = f"{__file__}:length_penalty"
    assert compute_advantages(inputs([[3.0]]), AlgorithmSettings(advantage_estimator=here)).tolist() == [1.0, 1.0]


def test_mistakes_are_named() -> None:
    with pytest.raises(ValidationError, match="one of"):
        AlgorithmSettings(advantage_estimator="nope")
    with pytest.raises(PluginError, match="nope"):
        algorithm_of(AlgorithmSettings(advantage_estimator="agentrl.algorithms.base:nope"))
    with pytest.raises(SettingsError, match="expected a function, got '/"):
        algorithm_of(AlgorithmSettings(advantage_estimator=f"{__file__}:__file__"))
    with pytest.raises(
        PluginError, match="no_broadcast: the advantages: expected one value for each of the 2 response"
    ):
        compute_advantages(inputs([[1.0]]), AlgorithmSettings(advantage_estimator=f"{__file__}:no_broadcast"))


class Critic(GRPO):
    """Reads values. A token's advantage is the reward of its sample minus its value."""

    name = "critic"

    @property
    def reads(self) -> frozenset[Any]:
        return super().reads | {"values"}

    def advantages(self, inputs: SampleView) -> torch.Tensor:
        assert inputs.values is not None
        return inputs.rewards.repeat_interleave(inputs.lengths) - inputs.values


def test_returns_are_of_advantages_before_whitening_and_metrics_of_those_after() -> None:
    settings = AlgorithmSettings(advantage_estimator=f"{__file__}:Critic", normalize_advantages=True)
    batch = dataclasses.replace(inputs([[1.0, 3.0]]), values=torch.tensor([0.5, 0.25, 2.0, 9.0]))
    batch = dataclasses.replace(batch, loss_mask=torch.tensor([1.0, 1.0, 1.0, 0.0]))
    got = estimate(batch, settings)
    assert got.returns is not None
    assert got.returns.tolist() == [1, 1, 3, 3]
    assert got.returns.dtype == got.advantages.dtype == torch.float32
    assert got.metrics["advantages/mean"] == pytest.approx(0, abs=1e-6)
    assert got.metrics["advantages/std"] == pytest.approx(1, abs=1e-6)
    assert got.metrics["advantages/max"] == pytest.approx(got.advantages[:3].max().item())
    assert got.metrics["advantages/min"] == pytest.approx(got.advantages[:3].min().item())
    with pytest.raises(TrainError, match="critic needs values"):
        estimate(inputs([[1.0]]), AlgorithmSettings(advantage_estimator=f"{__file__}:ForgetsValues"))


class ForgetsValues(Critic):
    def advantages(self, inputs: SampleView) -> torch.Tensor:
        return inputs.loss_mask


def test_without_a_critic_there_are_no_returns_and_without_a_trained_token_no_metrics() -> None:
    assert estimate(inputs([[1.0, 0.0]]), AlgorithmSettings()).returns is None
    nothing = dataclasses.replace(inputs([[1.0, 0.0]]), loss_mask=torch.zeros(4))
    assert estimate(nothing, AlgorithmSettings()).metrics == {}
