"""Losses against plain Python written from the papers, and their gradients by finite differences."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algorithms import AlgorithmSettings, TokenLoss, algorithm_of
from agentrl.algorithms.ops.clipping import policy_loss
from agentrl.algorithms.ops.kl import approximate_kl
from agentrl.errors import TrainError
from tests.algorithms.views import view
from tests.support.logits import log_probs_from_logits


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
    stopped = result.stats["pg_clipfrac"] + result.stats["pg_clipfrac_dual"]
    assert (new.grad == 0).tolist() == stopped.bool().tolist()
    assert result.stats["pg_clipfrac"].tolist() == [0, 1, 0, 1, 0, 0]
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
    seen = view(new, old_log_probs=old, advantages=advantages, ref_log_probs=ref, entropy=entropy)
    got = algorithm_of(settings).token_loss(seen)
    want = policy_loss(new, old, advantages).loss + 0.1 * approximate_kl(new, ref, "k3") - 0.01 * entropy
    torch.testing.assert_close(got.loss, want)
    assert {"pg_loss", "kl_loss", "entropy", "ratio", "ppo_kl"} <= set(got.stats)
    assert not any(stat.requires_grad for stat in got.stats.values())


def test_sft_is_the_negative_log_likelihood() -> None:
    logits = torch.randn(5, 11, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([1, 0, 10, 4, 4])
    log_probs = log_probs_from_logits(logits, targets)
    want = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    got = algorithm_of(AlgorithmSettings(loss_type="sft_loss")).token_loss(view(log_probs))
    torch.testing.assert_close(got.loss, want)
    torch.testing.assert_close(got.stats["nll"], want)


def test_missing_inputs_are_named() -> None:
    with pytest.raises(TrainError, match="ref_log_probs"):
        algorithm_of(AlgorithmSettings(use_kl_loss=True)).token_loss(view(double(-0.1)))


@pytest.mark.parametrize(
    "changes",
    [
        {"loss_type": "sft_loss"},
        *(
            {"use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_coef": 0.1, "kl_loss_type": kind}
            for kind in ("k1", "k2", "k3", "low_var_kl")
        ),
    ],
)
@pytest.mark.parametrize("poison", ["log_probs", "old_log_probs", "ref_log_probs", "entropy", "advantages", "all"])
@pytest.mark.parametrize("value", [-math.inf, math.nan, -500.0])
def test_nothing_in_a_masked_token_reaches_the_loss_or_its_gradient(
    changes: dict[str, Any], poison: str, value: float
) -> None:
    arrays = {
        name: double(-0.5, -1.0, -0.3)
        for name in ("log_probs", "old_log_probs", "ref_log_probs", "entropy", "advantages")
    }
    mask, weights = torch.tensor([1, 0, 1]), double(0.5, 0.0, 0.5)

    def total(arrays: dict[str, torch.Tensor]) -> tuple[TokenLoss, torch.Tensor, torch.Tensor]:
        new = arrays["log_probs"].clone().requires_grad_()
        out = algorithm_of(AlgorithmSettings(**changes)).token_loss(
            view(new, loss_mask=mask, **{n: a for n, a in arrays.items() if n != "log_probs"})
        )
        loss = (out.loss * weights).sum()
        (gradient,) = torch.autograd.grad(loss, new)
        return out, loss, gradient

    poisoned = {n: torch.where(mask == 1, a, value) if poison in (n, "all") else a for n, a in arrays.items()}
    (_, want, want_gradient), (out, got, gradient) = total(arrays), total(poisoned)
    assert got.item() == want.item()
    assert gradient.tolist() == want_gradient.tolist()
    assert all((stat * weights).sum().isfinite() for stat in out.stats.values())
