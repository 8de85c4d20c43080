"""Step rewards, discounted returns and GAE against loops over each sample's trained tokens."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algorithms import AlgorithmSettings, SampleView, compute_advantages
from agentrl.algorithms.ops.clipping import value_loss
from agentrl.algorithms.ops.returns import (
    discounted_returns,
    generalized_advantages,
    overlong_shaped,
    sample_rewards,
    token_rewards,
)
from agentrl.errors import SettingsError, TrainError


def inputs(masks: list[list[int]], rewards: list[float], **changes: Any) -> SampleView:
    fields: dict[str, Any] = {
        "rewards": torch.tensor(rewards, dtype=torch.float64),
        "group_ids": torch.zeros(len(masks), dtype=torch.int64),
        "trajectory_ids": torch.arange(len(masks)),
        "lengths": torch.tensor([len(mask) for mask in masks]),
        "loss_mask": torch.tensor([float(m) for mask in masks for m in mask]),
    }
    return SampleView(**(fields | changes))


def test_a_reward_stands_on_the_last_step_and_kl_on_every_one() -> None:
    kl = torch.tensor([1.0, math.inf, 2.0, math.nan, 4.0, math.nan])
    batch = inputs([[1, 0, 1, 0], [1], [0], []], [1.0, math.nan, 5.0, 7.0], kl=kl)
    assert token_rewards(batch).tolist() == [0, 0, 1, 0, 0, 0]
    assert token_rewards(batch, 0.5).tolist() == [-0.5, 0, 0, 0, -2, 0]
    assert sample_rewards(batch, 0.5)[[0, 2, 3]].tolist() == [1 - 1.5, 5, 7]
    assert sample_rewards(batch, 0.5)[1].isnan()
    with pytest.raises(TrainError, match="kl_coef needs kl"):
        token_rewards(inputs([[1]], [1.0]), 0.5)


def test_step_rewards_are_the_whole_credit_and_go_to_the_step_before() -> None:
    """A turn whose last token is masked keeps its reward. A reward before any trained token is ignored."""
    credit = torch.tensor([9.0, 0.0, 1.0, 2.0, 4.0, 8.0])
    batch = inputs([[0, 1, 1, 0], [0, 1]], [100.0, 100.0], step_rewards=credit)
    assert token_rewards(batch).tolist() == [0, 0, 3, 0, 0, 8]


def test_returns_pass_over_what_the_model_was_shown() -> None:
    batch = inputs([[1, 0, 0, 1, 0], [1]], [8.0, 2.0])
    assert discounted_returns(token_rewards(batch), batch, 0.5).tolist() == [4, 0, 0, 8, 0, 2]
    values = torch.tensor([1.0, 9.0, 9.0, 2.0, 9.0, 3.0])
    got = generalized_advantages(token_rewards(batch), values, batch, 0.5, 0.5)
    assert got.tolist() == [(0.5 * 2 - 1) + 0.25 * (8 - 2), 0, 0, 8 - 2, 0, 2 - 3]


@st.composite
def cases(draw: st.DrawFn) -> tuple[SampleView, torch.Tensor, torch.Tensor, float, float]:
    masks = draw(st.lists(st.lists(st.integers(0, 1), max_size=9), min_size=1, max_size=5))
    batch = inputs(masks, [0.0] * len(masks))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    rewards, values = (torch.randn(len(batch.loss_mask), generator=generator, dtype=torch.float64) for _ in range(2))
    gamma, lambd = draw(st.sampled_from([0.0, 0.9, 1.0])), draw(st.sampled_from([0.0, 0.95, 1.0]))
    return batch, rewards, values, gamma, lambd


@given(cases())
def test_returns_and_gae_are_those_of_a_loop(
    case: tuple[SampleView, torch.Tensor, torch.Tensor, float, float],
) -> None:
    batch, rewards, values, gamma, lambd = case
    returns, advantages = torch.zeros_like(rewards), torch.zeros_like(rewards)
    end = 0
    for length in batch.lengths.tolist():
        start, end = end, end + length
        later, following, advantage = 0.0, 0.0, 0.0
        for t in range(end - 1, start - 1, -1):
            if batch.loss_mask[t]:
                later = rewards[t].item() + gamma * later
                advantage = rewards[t].item() + gamma * following - values[t].item() + gamma * lambd * advantage
                following = values[t].item()
                returns[t], advantages[t] = later, advantage
    torch.testing.assert_close(discounted_returns(rewards, batch, gamma), returns)
    torch.testing.assert_close(generalized_advantages(rewards, values, batch, gamma, lambd), advantages)


def test_long_samples_are_summed_exactly() -> None:
    batch = inputs([[1] * 5000, [1] * 3], [1.0, 1.0])
    got = discounted_returns(token_rewards(batch), batch, 0.999)
    torch.testing.assert_close(got[:5000], 0.999 ** torch.arange(4999, -1, -1, dtype=torch.float64))


def test_a_value_is_clipped_at_its_old_one() -> None:
    values = torch.tensor([0.1, 1.0, -1.0, 0.5], dtype=torch.float64, requires_grad=True)
    old, returns = torch.zeros(4, dtype=torch.float64), torch.tensor([1.0, 1.0, 1.0, 0.5], dtype=torch.float64)
    got = value_loss(values, old, returns, clip=0.2)
    assert got.loss.tolist() == pytest.approx([0.81, 0.64, 4.0, 0.09])
    assert got.stats["value_clipfrac"].tolist() == [0, 1, 1, 1]
    got.loss.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([-1.8, 0.0, -4.0, 0.0])


def test_long_samples_lose_reward_as_in_dapo() -> None:
    masks = [[1] * n + [0] * 9 for n in (3, 6, 7, 8, 10, 12)]
    batch = inputs(masks, [1.0] * 6)
    got = overlong_shaped(batch, 4, 10, 0.5)
    assert got.rewards.tolist() == [1, 1, 1 - 0.125, 1 - 0.25, 0.5, 0.5]
    assert got.step_rewards is None
    credit = torch.zeros(len(batch.loss_mask))
    credit[10] = 3.0
    stepped = overlong_shaped(inputs([[1] * 12 + [0], [0]], [3.0, math.nan], step_rewards=credit[:14]), 4, 10, 0.5)
    assert token_rewards(stepped)[[10, 11]].tolist() == [3, -0.5]
    assert stepped.rewards[0] == 2.5
    assert stepped.rewards[1].isnan()
    settings = AlgorithmSettings(advantage_estimator="rloo", overlong_buffer_len=4, loss_max_length=10)
    got_advantages = compute_advantages(inputs([[1] * 6, [1] * 10], [1.0, 1.0]), settings).advantages
    assert got_advantages[[0, 6]].tolist() == [1, -1]
    with pytest.raises(SettingsError, match="needs loss_max_length"):
        compute_advantages(batch, AlgorithmSettings(overlong_buffer_len=4))
