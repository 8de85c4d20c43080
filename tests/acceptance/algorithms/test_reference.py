"""Test the references on examples worked out by hand, and their slopes against finite differences."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from tests.acceptance.algorithms import reference as ref
from tests.acceptance.algorithms.cases import Case, Floats, case, cases

NAN = float("nan")
E = math.e


def near(values: object, expected: object) -> None:
    np.testing.assert_allclose(np.asarray(values, float), np.asarray(expected, float), rtol=1e-9, atol=1e-9)


def one(**given: object) -> Case:
    """Make one sample of one token."""
    return Case.of([[1]], [0.0], **given)


def flat(*samples: int) -> list[list[int]]:
    return [[1] * n for n in samples]


def test_group_advantages() -> None:
    four = Case.of(flat(1, 1, 1, 1), [1.0, 0.0, 0.0, 1.0])
    # mean 1/2, squared deviations 4 * 1/4, divided by 3: std = sqrt(1/3) = .57735
    near(ref.grpo(four), np.array([1, -1, -1, 1]) * 0.5 / (math.sqrt(1 / 3) + 1e-6))
    near(ref.grpo(four, std=False), [0.5, -0.5, -0.5, 0.5])
    # leave-one-out: 1 - 1/3, 0 - 2/3; equal to 4/3 of the centred reward
    near(ref.rloo(four), [2 / 3, -2 / 3, -2 / 3, 2 / 3])
    near(ref.grpo(Case.of(flat(2, 1), [0.3, 0.3])), [0, 0, 0])


def test_groups_of_trajectories_and_of_one() -> None:
    # Group 0: trajectory 5 has two samples (1 and 3: mean 2). Trajectory 6 has one (0) and one without a reward,
    # which does not count. Group 1 is one trajectory.
    made = Case.of([[1], [1, 0], [1], [0], [1]], [1, 3, 0, NAN, 9], groups=[0, 0, 0, 0, 1], rollouts=[5, 5, 6, 6, 7])
    near(ref.grpo(made, std=False), [0, 2, 0, -1, 0, 0])
    near(ref.grpo(made), np.array([0, 2, 0, -1, 0, 0]) / (math.sqrt(2) + 1e-6))
    near(ref.rloo(made), [1, 3, 0, -2, 0, 0])
    # KL of 0.5 on each token, coefficient 2, is subtracted before comparing in the group: 1 for each trained token.
    # The trajectory's mean stays 2 - 1, and trajectory 6 has 0 - 1.
    near(ref.grpo(replace(made, kl=np.full(6, 0.5)), std=False, kl_coef=2.0), [0, 2, 0, -1, 0, 0])
    near(ref.rloo(Case.of(flat(1, 2), [1.0, 1.0], kl=[0.1, 0.2, 0.3]), kl_coef=1.0), [0.4, -0.4, -0.4])


def test_returns_pass_over_tools() -> None:
    made = Case.of([[1, 0, 1, 0]], [1.0], kl=[0.1, 9.0, 0.2, 9.0])
    near(ref.token_rewards(made, 1.0), [-0.1, 0, 0.8, 0])
    # G = (-.1 + .5 * .8, .8): the tool token is not a step
    near(ref.reinforce_plus_plus(made, kl_coef=1.0, gamma=0.5), [0.3, 0, 0.8, 0])
    near(ref.reinforce_plus_plus_baseline(Case.of(flat(1, 1), [1, 0], kl=[0.1, 0.3]), kl_coef=1.0), [0.6, -0.6])
    # mean 2, variance (1 + 1) / 2 = 1; masked tokens neither count nor get a value
    near(
        ref.whitened(Case.of([[1, 0, 1]], [0.0]), np.array([1.0, 50.0, 3.0])), np.array([-1, 0, 1]) / (1 + 1e-8) ** 0.5
    )


def test_gae() -> None:
    made = Case.of([[1, 0, 1, 1]], [1.0], values=[0.5, 0.0, 0.6, 0.7])
    rewards = ref.token_rewards(made, 0.0)
    # gamma .9: deltas .9*.6-.5 = .04, .9*.7-.6 = .03, 1-.7 = .3; gamma*lambda = .45: .03+.135, .04+.45*.165
    advantages, returns = ref.gae(made, rewards, gamma=0.9, lambd=0.5)
    near(advantages, [0.11425, 0, 0.165, 0.3])
    near(returns, [0.61425, 0, 0.765, 1.0])
    # lambda 1: the return does not depend on the values
    near(ref.gae(made, rewards, gamma=0.9, lambd=1.0)[1], [0.81, 0, 0.9, 1.0])


def turns() -> Case:
    """Make two samples of a group. Both are shown token 3 before their second turn."""
    made = Case.of([[1, 1, 0, 1], [1, 0, 1]], [1.0, 0.0], turns=[1, 1, 1, 2, 1, 1, 2], tokens=[4, 4, 3, 4, 4, 3, 4])
    return replace(made, step_rewards=np.array([0, 0.5, 0, 0.5, 0, 0, 0.0]))


def test_turns() -> None:
    # gamma .5: .5 + .5 * .5 = .75 and .5; the second sample 0 and 0
    near(list(ref.turn_returns(turns(), 0.5).values()), [0.75, 0.5, 0, 0])
    near(ref.turn_credit(turns(), gamma=0.5, how="mean"), [0.375, 0.375, 0, 0.25, -0.375, 0, -0.25])
    near(ref.turn_credit(turns(), gamma=0.5, how="others"), [0.75, 0.75, 0, 0.5, -0.75, 0, -0.5])
    # Step groups: both first turns (mean .375), both second turns after token 3 (mean .25). Episodes: mean .5.
    near(ref.gigpo(turns(), gamma=0.5, weight=1.0, how="mean"), [0.875, 0.875, 0, 0.75, -0.875, 0, -0.75])
    # Another token was shown: each second turn is alone in its state, and only the episode's advantage counts.
    other = replace(turns(), tokens=np.array([4, 4, 3, 4, 4, 4, 4]))
    near(ref.gigpo(other, gamma=0.5, weight=1.0, how="mean"), [0.875, 0.875, 0, 0.5, -0.875, 0, -0.5])
    # A state is the last observation: in a third turn after token 3 the state is that of the second turn.
    again = Case.of([[1, 0, 1, 0, 1]], [3.0], turns=[1, 1, 2, 2, 3], tokens=[4, 3, 4, 3, 4])
    again = replace(again, step_rewards=np.array([0, 0, 1.0, 0, 2.0]))
    near(ref.gigpo(again, gamma=1.0, weight=1.0, how="mean"), [0, 0, 0.5, 0, -0.5])
    # With two members (R - mean) / std is +-sqrt(1/2), up to the 1e-6: twice, from episode and step
    expected = math.sqrt(2) * np.array([1, 1, 0, 1, -1, 0, -1])
    np.testing.assert_allclose(ref.gigpo(turns(), gamma=0.5, weight=1.0), expected, rtol=1e-5)


def test_distillation_and_length() -> None:
    made = Case.of([[1, 0, 1]], [0.0], old=[-1.0, 0, -2.0], teacher=[-3.0, 0, -1.0])
    near(ref.distilled(made), [-2, 0, 1])
    near(ref.distilled(made, base=np.array([0.5, 0.5, 0.5]), coef=0.1), [0.3, 0, 0.6])
    # The paper's run: at most 20480 tokens, and the penalty starts 4096 tokens before.
    near([ref.overlong(n, 20480, 4096) for n in (0, 16384, 18432, 20480, 20481)], [0, 0, -0.5, -1, -1])


@pytest.mark.parametrize(
    ("r", "advantage", "dual", "value", "slope"),
    [
        (1.0, 2.0, None, -2.0, -2.0),
        (1.5, 1.0, None, -1.28, 0.0),  # clipped above at 1 + .28
        (1.5, -1.0, None, 1.5, 1.5),
        (0.5, 1.0, None, -0.5, -0.5),
        (0.5, -1.0, None, 0.8, 0.0),  # clipped below at 1 - .2
        (5.0, -1.0, 3.0, 3.0, 0.0),  # dual clip
        (5.0, 1.0, 3.0, -1.28, 0.0),
        (2.0, -1.0, 3.0, 2.0, 2.0),
    ],
)
def test_clipping(r: float, advantage: float, dual: float | None, value: float, slope: float) -> None:
    made = one(log_probs=[math.log(r) - 1], old=[-1.0], advantages=[advantage])
    losses, gradient = ref.ppo(made, np.array([0.5]), low=0.2, high=0.28, dual=dual)
    near([losses[0], gradient[0]], [value, 0.5 * slope])


def test_the_deviation() -> None:
    for log_ratio, value, slope in [(19.0, E**19, E**19), (100.0, E**20, 0.0), (-100.0, E**-20, 0.0)]:
        near(np.array(ref.ratio(log_ratio)) / E**20, np.array([value, slope]) / E**20)


def test_sequence_ratio() -> None:
    # log-ratios .3, (masked), .1: s = e^.2; a tool token splits the third token's sample
    made = Case.of([[1, 0, 1], [1]], [0, 0], log_probs=[0.3, 7, 0.1, 0], advantages=[1, 1, 1, 1])
    values, gradient = ref.gspo(made, np.array([0.25, 0.25, 0.5, 1.0]), low=0.2, high=0.28)
    near(values, [-(E**0.2), 0, -(E**0.2), -1])
    near(gradient, [-0.375 * E**0.2, 0, -0.375 * E**0.2, -1])
    near(ref.gspo(made, np.ones(4), low=0.2, high=0.1)[1], [0, 0, 0, -1])


def test_cispo() -> None:
    # ratio 2 is clipped to 1.28 and keeps its gradient; ratio .5 with A < 0 keeps its .8
    made = Case.of(
        [[1, 1]], [0.0], log_probs=[-1.0, -2.0], old=[-1 - math.log(2), -2 + math.log(2)], advantages=[1, -1]
    )
    values, gradient = ref.cispo(made, np.ones(2), low=0.2, high=0.28)
    near(values, [1.28, -1.6])
    near(gradient, [-1.28, 0.8])


def test_kl() -> None:
    x = math.log(2)
    near([ref.kl(kind, -1, -1 - x)[0] for kind in ("k1", "k2", "k3", "low_var_kl")], [x, x * x / 2, x - 0.5, x - 0.5])
    near([ref.kl(kind, -1, -1 - x)[1] for kind in ("k1", "k2", "k3", "low_var_kl")], [1, x, 0.5, 0.5])
    near(ref.kl("low_var_kl", -9, -1), [10, 0])
    near(ref.kl("k3", 0, -100), [99, 1])
    near(np.array(ref.kl("k3", -100, 0)) / E**20, [1 - 21 / E**20, 0])
    made = one(log_probs=[-1.0], ref=[-1 - x], old=[-1 - math.log(3)])
    near(np.concatenate(ref.kl_loss(made, np.ones(1), "k1", unbiased=True)), [3 * x, 3 * x + 3])


def test_value_loss() -> None:
    def at(value: float, target: float) -> list[float]:
        made = one(values=[value], old_values=[0.0], returns=[target])
        return [float(x[0]) for x in ref.value_loss(made, np.ones(1), 0.2)]

    near(at(0.1, 1.0), [0.81, -1.8])
    near(at(0.5, 1.0), [0.64, 0.0])  # clipped to .2, which is worse
    near(at(0.5, -1.0), [2.25, 3.0])  # clipped to .2 would be better: 1.44


def test_weights() -> None:
    # Trajectory 5: 2 + 1 trained tokens in two samples; 6: one; 7: none
    made = Case.of([[1, 0, 1], [1], [1], [0], []], [0, 0, 0, 0, 0], rollouts=[5, 5, 6, 7, 7])
    near(ref.per_token(made), [0.25, 0, 0.25, 0.25, 0.25, 0])
    near(ref.per_trajectory(made, live=True), [1 / 6, 0, 1 / 6, 1 / 6, 1 / 2, 0])
    near(ref.per_trajectory(made, live=False), [1 / 9, 0, 1 / 9, 1 / 9, 1 / 3, 0])
    near(ref.constant(made, 10, live=False), [1 / 30, 0, 1 / 30, 1 / 30, 1 / 30, 0])


def test_corrections() -> None:
    # rho: 2 and 1/8 (a tool token between them) in one sample, 4 in the other. Products 1/4 and 4, geometric 1/2 and 4.
    old = [math.log(2), 0, math.log(1 / 8), math.log(4)]
    made = Case.of([[1, 0, 1], [1]], [0, 0], old=old, advantages=[1, 1, -1, -1])
    trained = made.mask == 1
    near(ref.tis(made, "token", 0.5, 3.0)[trained], [2, 0.5, 3])
    near(ref.tis(made, "sequence", 0.0, 2.0)[trained], [0.25, 0.25, 2])
    near(ref.tis(made, "geometric", 0.0, 9.0)[trained], [0.5, 0.5, 4])
    near(ref.mis(made, "token", 0.5, 3.0)[trained], [2, 0, 0])
    near(ref.rejected(made, "sequence", 0.5, 5.0)[trained], [0, 0, 1])
    near(ref.rejected(made, "geometric", 0.4, 2.0)[trained], [1, 1, 0])
    near(ref.veto(made, 0.2)[trained], [0, 0, 1])
    near(ref.decoupled(made)[trained], [2, 1 / 8, 4])
    # mean of rollout - new in the first sample: (log 2 - log 8) / 2 < 0; log 4 in the second, whose A is negative
    near(ref.opsm(replace(made, rollout=made.old), 0.0)[trained], [1, 1, 0])
    near(ref.opsm(replace(made, rollout=made.old), 1.5)[trained], [1, 1, 1])


Loss = Callable[[Case, Floats], ref.Graded]
LOSSES: dict[str, tuple[str, Loss]] = {
    "ppo": ("log_probs", lambda c, w: ref.ppo(c, w, low=0.2, high=0.28, dual=3.0)),
    "gspo": ("log_probs", lambda c, w: ref.gspo(c, w, low=0.2, high=0.28)),
    "value": ("values", lambda c, w: ref.value_loss(c, w, 0.2)),
    **{kind: ("log_probs", partial(ref.kl_loss, kind=kind)) for kind in ("k1", "k2", "k3", "low_var_kl")},
    "unbiased": ("log_probs", lambda c, w: ref.kl_loss(c, w, "low_var_kl", unbiased=True)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_slopes_are_those_of_the_values(name: str) -> None:
    """Compare with a central difference of the weighted sum, for log-ratios for which exp stays moderate."""
    varied, loss = LOSSES[name]
    seen = 0
    for seed in range(12):
        made = case(seed)
        made = replace(made, log_probs=np.clip(made.log_probs, made.old - 3, made.old + 3))
        made = replace(made, ref=np.clip(made.ref, made.log_probs - 5, made.log_probs + 5))
        weights = np.random.default_rng(seed).uniform(0.1, 1.0, len(made.mask))
        _, gradient = loss(made, weights)
        for t in np.flatnonzero(made.mask)[:10]:
            sums = []
            for step in (1e-6, -1e-6):
                moved = getattr(made, varied).copy()
                moved[t] += step
                sums.append((weights * loss(replace(made, **{varied: moved}), weights)[0]).sum())
            assert (sums[0] - sums[1]) / 2e-6 == pytest.approx(gradient[t], rel=1e-4, abs=1e-4)
            seen += gradient[t] != 0
    assert seen > 30


def test_cases_have_what_they_say() -> None:
    made = cases()
    least = len(made) / 8
    assert sum((c.lengths == 0).any() for c in made) > least
    assert sum(np.isnan(c.rewards).any() for c in made) > least
    assert sum(any(len(p) and not c.mask[p].any() for _, p in c.samples()) for c in made) > least
    assert sum(len(set(c.rollouts)) < len(c.rollouts) for c in made) > least
    assert sum((abs(c.log_probs - c.old) > 20).any() for c in made) > least
    assert sum((np.unique(c.groups, return_counts=True)[1] == 1).any() for c in made) > least
    sizes = [len(c.mask) for c in made]
    assert min(sizes) < 10
    assert 20 < sum(sizes) / len(made) < 150
