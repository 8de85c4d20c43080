"""The estimators other than GRPO, on groups small enough to work out by hand."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from agentrl.algorithms import AlgorithmSettings, SampleView, algorithm_of, compute_advantages
from agentrl.algorithms.ops.normalization import group_normalize, whiten
from agentrl.algorithms.registry import ESTIMATORS
from tests.algorithms.test_returns import inputs
from tests.algorithms.views import view
from tests.support.nightly import nightly

GROUP_ESTIMATORS = (
    "grpo",
    "gspo",
    "cispo",
    "sapo",
    "dppo",
    "gmpo",
    "gdpo",
    "pass_at_k",
    "rloo",
    "reinforce_plus_plus_baseline",
)
REWARDED = [name for name, algorithm in ESTIMATORS.items() if algorithm.needs_rewards]
KL_IN_REWARD = [name for name in REWARDED if "kl_coef" in ESTIMATORS[name].takes]


def settings(name: str, **changes: Any) -> AlgorithmSettings:
    weights = {"gdpo_weights": {"a": 1.0, "b": 1.0}} if name == "gdpo" else {}
    return AlgorithmSettings(advantage_estimator=name, **weights, **changes)


def advantages(name: str, batch: SampleView, **changes: Any) -> list[float]:
    return compute_advantages(batch, settings(name, **changes)).advantages.tolist()


def test_rloo_compares_with_the_others() -> None:
    batch = inputs([[1, 1], [1], [1]], [3.0, 1.0, 2.0])
    assert advantages("rloo", batch) == [1.5, 1.5, -1.5, 0.0]
    how = {"divide_by_std": False, "leave_one_out": True}
    fanned_out = group_normalize(torch.tensor([4.0, 0.0, 1.0]), torch.zeros(3).long(), torch.tensor([0, 0, 1]), **how)
    assert fanned_out.tolist() == [3.0, -1.0, -1.0]
    rewards, groups = torch.tensor([4.0, 7.0, 7.0, math.nan]), torch.tensor([0, 1, 1, 1])
    alone = group_normalize(rewards, groups, torch.arange(4), **how)
    assert alone.tolist() == [0.0, 0.0, 0.0, 0.0]


def test_reinforce_plus_plus_discounts_over_steps_and_whitens() -> None:
    batch = inputs([[1, 0, 1], [1]], [2.0, 0.0])
    assert advantages("reinforce_plus_plus", batch, gamma=0.5, normalize_advantages=False) == [1.0, 0.0, 2.0, 0.0]
    got = advantages("reinforce_plus_plus", batch, gamma=0.5)
    want = whiten(torch.tensor([1.0, 0.0, 2.0, 0.0]), batch.loss_mask)
    assert got == pytest.approx(want.tolist(), abs=1e-6)


def test_the_baseline_is_the_groups_mean() -> None:
    batch = inputs([[1], [1, 1]], [1.0, 4.0])
    name = "reinforce_plus_plus_baseline"
    assert advantages(name, batch, normalize_advantages=False) == [-1.5, 1.5, 1.5]
    assert advantages(name, batch) == pytest.approx([-math.sqrt(2), math.sqrt(0.5), math.sqrt(0.5)])


def test_ppo_takes_values_and_gives_the_critic_its_targets() -> None:
    batch = dataclasses.replace(inputs([[1, 0, 1]], [1.0]), values=torch.tensor([0.25, 9.0, 0.5]))
    got = compute_advantages(batch, settings("ppo", gamma=0.5, lambd=0.5))
    assert got.advantages.tolist() == [0.25 * 0.5, 0.0, 0.5]
    assert got.returns is not None
    assert got.returns[[0, 2]].tolist() == [0.375, 1.0]
    assert settings("ppo").advantage_estimator == "ppo"
    assert algorithm_of(settings("ppo")).reads == {"values"}


@pytest.mark.parametrize("name", KL_IN_REWARD)
def test_kl_in_the_reward_has_the_same_meaning_everywhere(name: str) -> None:
    """For a sample with one trained token both forms equal the reward minus kl_coef * KL."""
    kl, values = torch.tensor([2.0, math.nan, 0.0]), torch.zeros(3)
    batch = dataclasses.replace(inputs([[1, 0], [1]], [3.0, 1.0]), kl=kl, values=values)
    plain = dataclasses.replace(inputs([[1, 0], [1]], [3.0 - 0.5 * 2.0, 1.0]), values=values)
    changes = {"normalize_advantages": False}
    got, want = advantages(name, batch, kl_coef=0.5, **changes), advantages(name, plain, **changes)
    assert [got[0], got[2]] == [want[0], want[2]]
    assert algorithm_of(settings(name, kl_coef=0.5)).reads >= {"old_log_probs", "ref_log_probs"}


@pytest.mark.parametrize("name", REWARDED)
def test_nothing_is_learned_from_samples_that_are_empty_masked_or_unknown(name: str) -> None:
    kl = torch.tensor([math.nan, -math.inf, math.inf])
    parts = torch.tensor([[1.0, 2.0], [math.nan, math.nan], [5.0, 0.0]], dtype=torch.float64)
    batch = inputs([[], [0, 0], [0]], [1.0, math.nan, 5.0], kl=kl, values=torch.zeros(3), reward_parts=parts)
    got = compute_advantages(batch, settings(name, **({"kl_coef": 0.5} if name in KL_IN_REWARD else {})))
    assert got.advantages.isfinite().all()
    assert got.metrics == ({"critic/explained_variance": 0.0} if name == "ppo" else {})
    nothing = {"values": torch.zeros(0), "reward_parts": torch.zeros(0, 2)}
    nobody = inputs([], [], lengths=torch.zeros(0, dtype=torch.int64), **nothing)
    assert compute_advantages(nobody, settings(name)).advantages.shape == (0,)


def test_which_of_them_compare_trajectories_of_a_prompt() -> None:
    assert {name for name in ESTIMATORS if algorithm_of(settings(name)).compares_within_group} == set(GROUP_ESTIMATORS)
    assert not algorithm_of(settings("gspo", rewards_normalization=False)).compares_within_group


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("reinforce++", {}, "unknown advantage_estimator 'reinforce++', expected one of ['cispo', "),
        ("rloo", {"gamma": 0.9}, "gamma 0.9 has no effect with rloo; leave it out"),
        ("rloo", {"grpo_std_normalization": False}, "grpo_std_normalization False has no effect with rloo"),
        ("reinforce_plus_plus", {"lambd": 0.9}, "lambd 0.9 has no effect"),
        ("gspo", {"value_clip": 0.5}, "value_clip 0.5 has no effect with gspo"),
        ("cispo", {"eps_clip_c": 3.0}, "eps_clip_c 3.0 has no effect with cispo"),
        ("sapo", {"eps_clip": 0.3}, "eps_clip 0.3 has no effect with sapo"),
        ("gmpo", {"eps_clip_high": 0.3}, "eps_clip_high 0.3 has no effect with gmpo"),
        ("grpo", {"dppo_threshold": 0.3}, "dppo_threshold 0.3 has no effect with grpo"),
        ("gspo", {"eps_clip": 1.0}, "use less than 1"),
        ("ppo", {"use_unbiased_kl": True}, "set use_kl_loss"),
    ],
)
def test_mistakes_are_named(name: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        settings(name, **changes)
    assert words in str(caught.value)


def test_gspo_clips_whole_samples() -> None:
    """Two tokens that moved in opposite directions have a ratio of 1. A sample that moved is clipped as a whole."""
    old = torch.zeros(4, dtype=torch.float64)
    new = torch.tensor([0.5, -0.5, 0.3, 0.1], dtype=torch.float64, requires_grad=True)
    seen = view(new, old_log_probs=old, advantages=old + 1, sample_ids=torch.tensor([0, 0, 1, 1]), num_samples=2)
    got = algorithm_of(settings("gspo", eps_clip=0.1)).token_loss(seen)
    assert got.stats["ratio"].tolist() == pytest.approx([1, 1, math.exp(0.2), math.exp(0.2)])
    assert got.loss.tolist() == pytest.approx([-1, -1, -1.1, -1.1])
    (gradient,) = torch.autograd.grad(got.loss.sum(), new)
    assert gradient.tolist() == pytest.approx([-1, -1, 0, 0])


def test_cispo_keeps_the_gradient_of_tokens_it_clips() -> None:
    ratios = torch.tensor([0.01, 1.0, 9.0], dtype=torch.float64)
    new = ratios.log().requires_grad_()
    seen = view(new, old_log_probs=torch.zeros_like(ratios), advantages=torch.ones_like(ratios))
    got = algorithm_of(settings("cispo", eps_clip=1.0, eps_clip_high=3.0)).token_loss(seen)
    (gradient,) = torch.autograd.grad(got.loss.sum(), new, retain_graph=True)
    assert gradient.tolist() == pytest.approx([-0.01, -1.0, -4.0])
    assert got.stats["pg_clipfrac"].tolist() == [0, 0, 1]
    bounded = algorithm_of(settings("cispo", eps_clip=0.2)).token_loss(seen)
    assert torch.autograd.grad(bounded.loss.sum(), new)[0].tolist() == pytest.approx([-0.8, -1.0, -1.2])


def test_at_ratio_1_gates_masks_and_means_are_the_policy_gradient() -> None:
    old = torch.tensor([-0.5, -2.0, -3.0], dtype=torch.float64)
    advantages = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    for name in ("grpo", "sapo", "dppo", "gmpo"):
        new = old.clone().requires_grad_()
        seen = view(new, old_log_probs=old, advantages=advantages, sample_ids=torch.arange(3), num_samples=3)
        got = algorithm_of(settings(name)).token_loss(seen)
        (gradient,) = torch.autograd.grad(got.loss.sum(), new)
        assert gradient.tolist() == pytest.approx((-advantages).tolist()), name


def test_dppo_masks_large_moves_of_probability_and_not_of_rare_tokens() -> None:
    old = torch.tensor([0.001, 0.4, 0.4, 0.9], dtype=torch.float64)
    new = torch.tensor([0.004, 0.6, 0.2, 0.5], dtype=torch.float64).log().requires_grad_()
    advantages = torch.tensor([1.0, 1.0, 1.0, -1.0], dtype=torch.float64)
    seen = view(new, old_log_probs=old.log(), advantages=advantages)
    got = algorithm_of(settings("dppo")).token_loss(seen)
    assert got.stats["pg_clipfrac"].tolist() == [0, 1, 0, 1]
    assert got.stats["dppo_divergence"].tolist() == pytest.approx([0.003, 0.2, 0.2, 0.4])
    (gradient,) = torch.autograd.grad(got.loss.sum(), new)
    assert gradient.tolist() == pytest.approx([-4.0, 0.0, -0.5, 0.0])


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("gap", nightly([100.0, -100.0, 1e4], 2))
@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
def test_extreme_ratios_give_finite_losses_and_gradients(name: str, gap: float, kind: str) -> None:
    new = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    moved, mask = new.detach() - gap, torch.tensor([1, 1, 0])
    arrays = {name: torch.where(mask == 1, moved, -math.inf) for name in ("old_log_probs", "ref_log_probs")}
    seen = view(new, loss_mask=mask, advantages=torch.tensor([1.0, -1.0, math.nan]), **arrays)
    terms = {"use_kl_loss": True, "kl_loss_coef": 0.1, "use_unbiased_kl": True, "kl_loss_type": kind}
    got = algorithm_of(settings(name, **terms)).token_loss(seen)
    (gradient,) = torch.autograd.grad(got.loss.sum(), new)
    assert got.loss.isfinite().all()
    assert gradient.isfinite().all()
    assert gradient[2] == 0


def test_the_unbiased_kl_has_the_gradient_of_the_kl() -> None:
    logits = torch.randn(6, generator=torch.Generator().manual_seed(1), dtype=torch.float64, requires_grad=True)
    reference = torch.randn(6, generator=torch.Generator().manual_seed(2), dtype=torch.float64).log_softmax(0)
    policy = logits.log_softmax(0)
    (want,) = torch.autograd.grad((policy.exp() * (policy - reference)).sum(), logits, retain_graph=True)
    chosen = settings("grpo", use_kl_loss=True, kl_loss_coef=1.0, kl_loss_type="k3", use_unbiased_kl=True)
    arrays = {"old_log_probs": policy.detach(), "ref_log_probs": reference, "advantages": torch.zeros_like(reference)}
    loss = algorithm_of(chosen).token_loss(view(policy, **arrays)).loss
    (got,) = torch.autograd.grad((policy.detach().exp() * loss).sum(), logits)
    torch.testing.assert_close(got, want)
