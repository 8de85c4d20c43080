"""Losses against plain Python written from the papers, and their gradients by finite differences."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algorithms import (
    AlgorithmSettings,
    TokenInputs,
    approximate_kl,
    entropy_from_logits,
    log_probs_from_logits,
    policy_loss,
    sft_loss,
    token_loss,
)
from agentrl.errors import TrainError


def reference_policy_loss(
    new: float, old: float, advantage: float, low: float, high: float, dual: float | None
) -> float:
    ratio = math.exp(new - old)
    surrogate = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
    if dual is not None and advantage < 0:
        surrogate = max(surrogate, dual * advantage)
    return -surrogate


def double(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@given(
    new=st.floats(-5, 0),
    old=st.floats(-5, 0),
    advantage=st.floats(-3, 3),
    low=st.sampled_from([0.1, 0.2, 0.5]),
    high=st.sampled_from([None, 0.28, 1.0]),
    dual=st.sampled_from([None, 1.5, 3.0]),
)
def test_policy_loss_is_the_papers(
    new: float, old: float, advantage: float, low: float, high: float | None, dual: float | None
) -> None:
    got = policy_loss(double(new), double(old), double(advantage), eps_clip=low, eps_clip_high=high, eps_clip_c=dual)
    want = reference_policy_loss(new, old, advantage, low, low if high is None else high, dual)
    assert got.loss.item() == pytest.approx(want, rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("dual", [None, 3.0])
def test_policy_loss_gradients(dual: float | None) -> None:
    new = double(-0.5, -1.0, -0.2, -3.0, -0.1, -0.9).requires_grad_()
    old, advantages = double(-0.6, -0.5, -1.0, -1.0, -3.0, -1.0), double(1.0, -2.0, 1.5, 0.5, -1.0, -0.3)
    assert torch.autograd.gradcheck(lambda x: policy_loss(x, old, advantages, eps_clip_c=dual).loss, (new,))


def test_gradient_on_policy_is_reinforce() -> None:
    new = double(-0.5, -1.0).requires_grad_()
    advantages = double(2.0, -0.5)
    policy_loss(new, new.detach(), advantages).loss.sum().backward()
    torch.testing.assert_close(new.grad, -advantages)


def test_clip_statistics_mark_the_tokens_without_gradient() -> None:
    ratios = double(0.5, 0.5, 1.0, 1.5, 1.5, 9.0)
    advantages = double(1.0, -1.0, 1.0, 1.0, -1.0, -1.0)
    new = ratios.log().requires_grad_()
    result = policy_loss(new, torch.zeros(6, dtype=torch.float64), advantages, eps_clip_c=3.0)
    assert result.stats["pg_clipfrac_low"].tolist() == [0, 1, 0, 0, 0, 0]
    assert result.stats["pg_clipfrac_high"].tolist() == [0, 0, 0, 1, 0, 0]
    assert result.stats["pg_clipfrac_dual"].tolist() == [0, 0, 0, 0, 0, 1]
    result.loss.sum().backward()
    assert new.grad is not None
    assert (new.grad == 0).tolist() == result.stats["pg_clipfrac"].bool().tolist()
    torch.testing.assert_close(result.stats["ratio"], ratios)
    torch.testing.assert_close(result.stats["ppo_kl"], -ratios.log())


def test_clip_higher_leaves_room_only_above() -> None:
    new, old, advantages = double(0.25, -0.25).exp().log(), double(0.0, 0.0), double(1.0, -1.0)
    result = policy_loss(new, old, advantages, eps_clip=0.2, eps_clip_high=0.3)
    assert result.stats["pg_clipfrac"].tolist() == [0, 1]


def test_untrained_tokens_cannot_poison_the_sum() -> None:
    new = torch.tensor([-1.0, 0.0, -500.0], requires_grad=True)
    old = torch.tensor([-1.0, -500.0, 0.0])
    weights = torch.tensor([1.0, 0.0, 0.0])
    loss = (policy_loss(new, old, torch.tensor([1.0, -1.0, -1.0])).loss * weights).sum()
    loss.backward()
    assert loss.item() == -1.0
    assert new.grad is not None
    assert new.grad.tolist() == [-1.0, 0.0, 0.0]


def test_token_loss_adds_the_terms_it_is_asked_for() -> None:
    new = double(-0.5, -1.2).requires_grad_()
    old, advantages, ref, entropy = double(-0.5, -1.0), double(1.0, -1.0), double(-0.7, -1.0), double(0.3, 0.9)
    settings = AlgorithmSettings(use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k3", entropy_coef=0.01)
    got = token_loss(settings, TokenInputs(new, old, advantages, ref, entropy))
    want = policy_loss(new, old, advantages).loss + 0.1 * approximate_kl(new, ref, "k3") - 0.01 * entropy
    torch.testing.assert_close(got.loss, want)
    assert {"pg_loss", "kl_loss", "entropy", "ratio", "ppo_kl"} <= set(got.stats)
    assert not any(stat.requires_grad for stat in got.stats.values())


def test_sft_is_the_negative_log_likelihood() -> None:
    logits = torch.randn(5, 11, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([1, 0, 10, 4, 4])
    log_probs = log_probs_from_logits(logits, targets)
    want = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    torch.testing.assert_close(sft_loss(log_probs).loss, want)
    torch.testing.assert_close(token_loss(AlgorithmSettings(loss_type="sft_loss"), TokenInputs(log_probs)).loss, want)


@pytest.mark.parametrize(
    ("settings", "missing"),
    [({}, "advantages"), ({"use_kl_loss": True}, "ref_log_probs"), ({"entropy_coef": 0.1}, "entropy")],
)
def test_missing_inputs_are_named(settings: dict[str, object], missing: str) -> None:
    x = double(-0.1)
    inputs = TokenInputs(x, x) if missing == "advantages" else TokenInputs(x, x, x)
    with pytest.raises(TrainError, match=missing):
        token_loss(AlgorithmSettings(**settings), inputs)


def test_entropy_is_the_distributions() -> None:
    logits = torch.randn(4, 9, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    want = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(entropy_from_logits(logits), want)
    assert entropy_from_logits(torch.zeros(3, 8)).tolist() == pytest.approx([math.log(8)] * 3)
    assert torch.autograd.gradcheck(entropy_from_logits, (logits.requires_grad_(),))


def test_entropy_with_banned_tokens() -> None:
    logits = torch.tensor([[0.0, 0.0, -math.inf]], requires_grad=True)
    entropy = entropy_from_logits(logits)
    entropy.sum().backward()
    assert entropy.item() == pytest.approx(math.log(2))
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_bfloat16_logits_are_widened() -> None:
    logits = torch.randn(2, 5).bfloat16()
    assert log_probs_from_logits(logits, torch.tensor([0, 1])).dtype == torch.float32
    assert entropy_from_logits(logits).dtype == torch.float32
