"""Compare our advantages, losses, weights and corrections with `reference.py`, values and gradients, on the same cases.

Inputs are float64. Numbers agree to 1e-6, relative if they are larger than 1. At a masked token the model's values are
-inf in a loss's view. They are 0, as the trainer makes them, in the view that estimates advantages.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from agentrl.algorithms import (
    AlgorithmSettings,
    SampleView,
    TokenView,
    algorithm_of,
    compute_advantages,
)
from tests.acceptance.algorithms import reference as ref
from tests.acceptance.algorithms.cases import Case, Floats, Ints, cases

TOLERANCE = 1e-6

Advantages = Callable[[Case], Floats]
Loss = Callable[[Case, Floats], ref.Graded]


def differ(ours: Tensor, theirs: Floats, where: Ints | None = None) -> float:
    """Return the largest difference, relative to numbers above 1; infinite if one of ours is not a number."""
    mine = ours.detach().double().numpy()
    difference = np.nan_to_num(np.abs(mine - theirs) / np.maximum(1, np.abs(theirs)), nan=np.inf)
    return float(np.where(where == 0, 0, difference).max(initial=0.0))


def agree(differences: list[float]) -> None:
    worst = int(np.argmax(differences))
    assert differences[worst] <= TOLERANCE, f"case({worst}) differs by {differences[worst]:.2g}"


def settings(given: dict[str, Any]) -> AlgorithmSettings:
    return AlgorithmSettings.model_validate(given)


def inputs(made: Case, by_turn: bool = False) -> SampleView:
    arrays = {
        "rewards": made.rewards,
        "group_ids": made.groups,
        "trajectory_ids": made.rollouts,
        "lengths": made.lengths,
    }
    arrays |= {"loss_mask": made.mask, "kl": made.kl, "values": made.values, "turns": made.turns, "tokens": made.tokens}
    arrays |= {"old_log_probs": made.old, "ref_log_probs": made.ref, "teacher_log_probs": made.teacher}
    arrays |= {"reward_parts": made.parts}
    arrays |= {"step_rewards": made.step_rewards} if by_turn else {}
    anchors = ref.states(made)
    known, sample = list(dict.fromkeys(anchors.values())), np.repeat(np.arange(len(made.lengths)), made.lengths)
    state = [known.index(anchors[s, k]) for s, k in zip(sample.tolist(), made.turns.tolist(), strict=True)]
    arrays |= {"observation_ids": np.array(state, np.int64)}
    return SampleView(**{name: torch.from_numpy(array) for name, array in arrays.items()})


def view(made: Case, log_probs: Tensor, *, chosen: bool = False) -> TokenView:
    sample = torch.arange(len(made.lengths)).repeat_interleave(torch.from_numpy(made.lengths))

    def computed(array: Floats) -> Tensor:
        return torch.from_numpy(np.where(made.mask == 1, array, -np.inf))

    return TokenView(
        log_probs=log_probs,
        loss_mask=torch.from_numpy(made.mask),
        sample_ids=sample,
        turn_ids=torch.from_numpy(made.turns),
        trajectory_ids=torch.from_numpy(made.rollouts)[sample],
        staleness=torch.from_numpy(made.staleness),
        num_samples=len(made.lengths),
        join=lambda sums: sums,
        entropy=torch.zeros_like(log_probs),
        old_log_probs=computed(made.old),
        rollout_log_probs=computed(made.rollout),
        ref_log_probs=computed(made.ref),
        teacher_log_probs=computed(made.teacher),
        values=computed(made.values),
        advantages=computed(made.advantages),
        chosen=torch.from_numpy(made.chosen).double() if chosen else None,
    )


def of(name: str, **given: Any) -> dict[str, Any]:
    return {"advantage_estimator": name, **given}


def rpp(made: Case, *, gamma: float = 0.9, by_turn: bool = False) -> Floats:
    return ref.discounted(made, ref.token_rewards(made, 0.1, by_turn), gamma)


def ppo(made: Case, by_turn: bool = False) -> tuple[Floats, Floats]:
    return ref.gae(made, ref.token_rewards(made, 0.1, by_turn), gamma=0.9, lambd=0.8)


def shaped(made: Case) -> Case:
    penalties = [ref.overlong(len(steps), 8, 4) for _, steps in made.steps()]
    credit = made.step_rewards.copy()
    for penalty, (_, steps) in zip(penalties, made.steps(), strict=True):
        credit[steps[-1:]] += penalty
    return replace(made, rewards=made.rewards + np.array(penalties), step_rewards=credit)


GAMMA = {"kl_coef": 0.1, "gamma": 0.9}
OVERLONG = {"loss_max_length": 8, "overlong_buffer_len": 4}
ADVANTAGES: dict[str, tuple[dict[str, Any], Advantages]] = {
    "grpo": ({}, ref.grpo),
    "grpo, KL": ({"kl_coef": 0.1}, partial(ref.grpo, kl_coef=0.1)),
    "Dr. GRPO": ({"grpo_std_normalization": False}, partial(ref.grpo, std=False)),
    "rewards": ({"rewards_normalization": False}, lambda c: ref.spread(c, ref.scores(c))),
    "grpo, whitened": ({"normalize_advantages": True}, lambda c: ref.whitened(c, ref.grpo(c))),
    "grpo, overlong": (OVERLONG, lambda c: ref.grpo(shaped(c))),
    "distillation": (of("on_policy_distillation", opd_kl_coef=0.5), partial(ref.distilled, coef=0.5)),
    "grpo + teacher": (
        {"use_opd": True, "opd_kl_coef": 0.1},
        lambda c: ref.distilled(c, base=ref.grpo(c), coef=0.1),
    ),
    "gspo": (of("gspo"), ref.grpo),
    "cispo": (of("cispo"), ref.grpo),
    "sapo": (of("sapo"), ref.grpo),
    "dppo": (of("dppo"), ref.grpo),
    "gmpo": (of("gmpo"), ref.grpo),
    "gdpo": (of("gdpo", gdpo_weights={"a": 1.0, "b": 0.5}), partial(ref.gdpo, weights=[1.0, 0.5])),
    "gdpo, one negative": (of("gdpo", gdpo_weights={"a": -2.0, "b": 1.0}), partial(ref.gdpo, weights=[-2.0, 1.0])),
    "pass at k": (of("pass_at_k"), partial(ref.pass_at_k, k=4, threshold=0.5)),
    "pass at 1": (of("pass_at_k", pass_k=1), partial(ref.pass_at_k, k=1, threshold=0.5)),
    "pass at 2 of more than 0": (
        of("pass_at_k", pass_k=2, pass_threshold=0.0),
        partial(ref.pass_at_k, k=2, threshold=0.0),
    ),
    "rloo": (of("rloo"), ref.rloo),
    "rloo, KL": (of("rloo", kl_coef=0.1), partial(ref.rloo, kl_coef=0.1)),
    "reinforce++": (of("reinforce_plus_plus", **GAMMA), lambda c: ref.whitened(c, rpp(c))),
    "reinforce++, raw": (of("reinforce_plus_plus", **GAMMA, normalize_advantages=False), rpp),
    "reinforce++-baseline": (
        of("reinforce_plus_plus_baseline", kl_coef=0.1),
        lambda c: ref.whitened(c, ref.reinforce_plus_plus_baseline(c, kl_coef=0.1)),
    ),
    "ppo": (of("ppo", **GAMMA, lambd=0.8), lambda c: ppo(c)[0]),
    "ppo, whitened": (of("ppo", **GAMMA, lambd=0.8, normalize_advantages=True), lambda c: ref.whitened(c, ppo(c)[0])),
}
TURNS = {"turn_credit": "returns", "gamma": 0.9, "kl_coef": 0.1}
GIGPO = TURNS | {"turn_credit": "gigpo", "turn_credit_weight": 0.5}
BY_TURN: dict[str, tuple[dict[str, Any], Advantages]] = {
    "reinforce++": (ADVANTAGES["reinforce++, raw"][0], partial(rpp, by_turn=True)),
    "ppo": (ADVANTAGES["ppo"][0], lambda c: ppo(c, by_turn=True)[0]),
    "turn credit": (TURNS, partial(ref.turn_credit, gamma=0.9, kl_coef=0.1)),
    "turn credit, rloo": (TURNS | of("rloo"), partial(ref.turn_credit, gamma=0.9, kl_coef=0.1, how="others")),
    "gigpo": (GIGPO, partial(ref.gigpo, gamma=0.9, weight=0.5, kl_coef=0.1)),
    "gigpo, mean": (
        GIGPO | {"grpo_std_normalization": False},
        partial(ref.gigpo, gamma=0.9, weight=0.5, kl_coef=0.1, how="mean"),
    ),
    "ppo, overlong": (ADVANTAGES["ppo"][0] | OVERLONG, lambda c: ppo(shaped(c), by_turn=True)[0]),
}


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages(name: str) -> None:
    given, reference = ADVANTAGES[name]
    chosen = settings(given)
    agree([differ(compute_advantages(inputs(c), chosen).advantages, reference(c), c.mask) for c in cases()])


@pytest.mark.parametrize("name", BY_TURN)
def test_advantages_of_turns(name: str) -> None:
    given, reference = BY_TURN[name]
    chosen = settings(given)
    agree([differ(compute_advantages(inputs(c, True), chosen).advantages, reference(c), c.mask) for c in cases()])


@pytest.mark.parametrize("whiten", [False, True])
def test_a_critics_targets(whiten: bool) -> None:
    chosen, found = settings(of("ppo", **GAMMA, lambd=0.8, normalize_advantages=whiten)), []
    for made in cases():
        targets = compute_advantages(inputs(made), chosen).returns
        assert targets is not None
        found.append(differ(targets, ppo(made)[1], made.mask))
    agree(found)


LOSSES: dict[str, tuple[dict[str, Any], Loss]] = {
    "sft": ({"loss_type": "sft_loss"}, ref.sft),
    "clip": ({}, partial(ref.ppo, low=0.2, high=0.2)),
    "clip higher": ({"eps_clip_high": 0.28}, partial(ref.ppo, low=0.2, high=0.28)),
    "gspo": (of("gspo", eps_clip=0.1, eps_clip_high=0.15), partial(ref.gspo, low=0.1, high=0.15)),
    "gspo, dual clip": (of("gspo", eps_clip_c=3.0), partial(ref.gspo, low=0.2, high=0.2, dual=3.0)),
    "cispo": (of("cispo", eps_clip_high=4.0), partial(ref.cispo, low=0.2, high=4.0)),
    "cispo, no lower bound": (of("cispo", eps_clip=1.0, eps_clip_high=4.0), partial(ref.cispo, low=1.0, high=4.0)),
    "sapo": (of("sapo"), partial(ref.sapo, positive=1.0, negative=1.05)),
    "sapo, hot": (
        of("sapo", sapo_tau_positive=3.0, sapo_tau_negative=0.2),
        partial(ref.sapo, positive=3.0, negative=0.2),
    ),
    "dppo": (of("dppo"), partial(ref.dppo, kind="tv", threshold=0.15)),
    "dppo, KL": (of("dppo", dppo_divergence="kl"), partial(ref.dppo, kind="kl", threshold=0.05)),
    "dppo, narrow": (of("dppo", dppo_threshold=0.001), partial(ref.dppo, kind="tv", threshold=0.001)),
    "gmpo": (of("gmpo", eps_clip=0.4), partial(ref.gmpo, bound=0.4)),
    "gmpo, wide": (of("gmpo", eps_clip=5.0), partial(ref.gmpo, bound=5.0)),
    "dual clip": ({"eps_clip_c": 3.0}, partial(ref.ppo, low=0.2, high=0.2, dual=3.0)),
    "clip-cov": ({"entropy_control": "clip"}, ref.clip_cov),
    "kl-cov": ({"entropy_control": "kl"}, partial(ref.kl_cov, coef=1.0)),
    "kl-cov, strong": ({"entropy_control": "kl", "covariance_kl_coef": 7.0}, partial(ref.kl_cov, coef=7.0)),
}


def with_kl(kind: str, unbiased: bool) -> tuple[dict[str, Any], Loss]:
    def reference(made: Case, weights: Floats) -> ref.Graded:
        policy = ref.ppo(made, weights, low=0.2, high=0.2)
        kl = ref.kl_loss(made, weights, kind, unbiased=unbiased)
        return policy[0] + 0.5 * kl[0], policy[1] + 0.5 * kl[1]

    given = {"use_kl_loss": True, "kl_loss_coef": 0.5, "kl_loss_type": kind, "use_unbiased_kl": unbiased}
    return given, reference


LOSSES |= {kind: with_kl(kind, False) for kind in ("k1", "k2", "k3", "low_var_kl")}
LOSSES |= {f"unbiased {kind}": with_kl(kind, True) for kind in ("k1", "k2", "k3", "low_var_kl")}


Factors = Callable[[Case], Floats]


def everything(made: Case) -> Floats:
    return np.ones(len(made.mask))


def corrected(given: dict[str, Any], factors: Factors, kept: Factors = everything) -> tuple[dict[str, Any], Loss]:
    """Return the clipped surrogate times factors, plus a KL term that rejected tokens do not have."""

    def reference(made: Case, weights: Floats) -> ref.Graded:
        left = kept(made)
        factor = factors(made) * left
        policy = ref.ppo(made, weights * factor, low=0.2, high=0.2)
        kl = ref.kl_loss(made, weights * left, "k2")
        return policy[0] * factor + 0.5 * left * kl[0], policy[1] + 0.5 * kl[1]

    return given | {"use_kl_loss": True, "kl_loss_coef": 0.5, "kl_loss_type": "k2"}, reference


TIS = {"use_tis": True, "tis_clip": 3.0, "tis_clip_low": 0.5}
REJECT = {"use_rs": True, "rs_upper_bound": 4.0}
for level in get_args(ref.Level):
    LOSSES |= {
        f"tis, {level}": corrected(TIS | {"tis_level": level}, partial(ref.tis, level=level, low=0.5, high=3.0)),
        f"mis, {level}": corrected(
            TIS | {"tis_level": level, "tis_mode": "mask"}, partial(ref.mis, level=level, low=0.5, high=3.0)
        ),
        f"rejection, {level}": corrected(
            REJECT | {"rs_level": level}, everything, partial(ref.rejected, level=level, low=0.25, high=4.0)
        ),
    }
LOSSES |= {
    "decoupled": corrected({"use_tis": True, "tis_clip": 1e9}, ref.decoupled),
    "opsm": corrected({"use_opsm": True, "opsm_delta": 0.1}, partial(ref.opsm, delta=0.1)),
    "veto": corrected(
        REJECT | {"rs_lower_bound": 1e-12, "rs_upper_bound": 1e9, "rs_veto_threshold": 0.5},
        everything,
        partial(ref.veto, threshold=0.5),
    ),
    "tis, opsm and rejection": corrected(
        TIS | REJECT | {"use_opsm": True, "opsm_delta": 0.1},
        lambda c: ref.tis(c, "token", 0.5, 3.0) * ref.opsm(c, 0.1),
        partial(ref.rejected, level="token", low=0.25, high=4.0),
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str) -> None:
    given, reference = LOSSES[name]
    algorithm, found = algorithm_of(settings(given)), []
    for seed, made in enumerate(cases()):
        weights = np.random.default_rng(seed).uniform(0.1, 1.0, len(made.mask)) * made.mask
        log_probs = torch.from_numpy(np.where(made.mask == 1, made.log_probs, -np.inf)).requires_grad_()
        loss = algorithm.token_loss(view(made, log_probs, chosen="entropy_control" in given)).loss
        (torch.from_numpy(weights) * loss).sum().backward()
        values, gradient = reference(made, weights)
        assert log_probs.grad is not None
        found.append(max(differ(loss, values, made.mask), differ(log_probs.grad, gradient)))
    agree(found)


@pytest.mark.parametrize("ratio", [2e-4, 0.1, 0.5])
@pytest.mark.parametrize("kind", ["clip", "kl"])
def test_tokens_of_entropy_control(kind: str, ratio: float) -> None:
    bounds = {"covariance_low": 0.2, "covariance_high": 1.5} if kind == "clip" else {}
    chosen, drawn = settings({"entropy_control": kind, "covariance_ratio": ratio, **bounds}), 0
    for made in cases():
        estimate = compute_advantages(inputs(made), chosen)
        assert estimate.chosen is not None
        tokens = set(estimate.chosen.nonzero().flatten().tolist())
        found = ref.covariances(made, made.old, ref.grpo(made))
        if kind == "kl":
            assert {round(found[t], 9) for t in tokens} == {round(found[t], 9) for t in ref.kl_cov_tokens(found, ratio)}
        else:
            inside, count = ref.clip_cov_candidates(found, ratio, 0.2, 1.5)
            assert tokens <= inside
            assert len(tokens) == count
            assert torch.equal(estimate.chosen, compute_advantages(inputs(made), chosen).chosen)  # type: ignore[arg-type]
        drawn += len(tokens)
    assert drawn > len(cases()) / 3


def test_the_adaptive_entropy_coefficient() -> None:
    given = {"entropy_target": 0.2, "entropy_coef": 0.001, "entropy_coef_step": 0.002, "entropy_coef_max": 0.005}
    algorithm, used = algorithm_of(settings(given)), []
    entropies = np.random.default_rng(0).uniform(0.0, 0.4, 300).tolist() + [0.1] * 5 + [0.2, 0.3] * 3
    for entropy in entropies:
        now, algorithm = algorithm.adapted({"sampled_entropy": entropy})
        used.append(now.settings.entropy_coef)
    theirs = ref.adaptive_entropy(entropies, start=0.001, step=0.002, target=0.2, most=0.005)
    assert used == pytest.approx(theirs, abs=1e-12)


def test_value_loss() -> None:
    algorithm, found = algorithm_of(settings({})), []
    for made in cases():
        weights = made.mask / 3
        predicted = torch.from_numpy(made.values.copy()).requires_grad_()
        old, target = torch.from_numpy(made.old_values), torch.from_numpy(made.returns)
        loss = algorithm.value_loss(predicted, old, target).loss
        (torch.from_numpy(weights) * loss).sum().backward()
        values, gradient = ref.value_loss(made, weights, 0.2)
        assert predicted.grad is not None
        found.append(max(differ(loss, values, made.mask), differ(predicted.grad, gradient)))
    agree(found)


WEIGHTS: dict[str, tuple[dict[str, Any], Advantages]] = {
    "per token": ({"calculate_per_token_loss": True}, ref.per_token),
    "live trajectories": ({}, partial(ref.per_trajectory, live=True)),
    "all trajectories": ({"loss_denominator": "all"}, partial(ref.per_trajectory, live=False)),
    "constant": ({"loss_denominator": "constant", "loss_max_length": 16}, partial(ref.constant, length=16, live=False)),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights(name: str) -> None:
    given, reference = WEIGHTS[name]
    algorithm, found = algorithm_of(settings(given)), []
    for made in cases():
        arrays = {"loss_mask": made.mask, "lengths": made.lengths, "trajectory_ids": made.rollouts}
        tensors = {
            k: torch.from_numpy(array)
            for k, array in (arrays | {"group_ids": made.groups, "rewards": made.rewards}).items()
        }
        found.append(differ(algorithm.token_weights(SampleView(**tensors)), reference(made)))
    agree(found)
