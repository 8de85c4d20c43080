"""The definitions of the papers in plain float64: one sample, one token at a time, slopes written out by hand.

Written from the papers before our own functions were read. Each docstring names the equation or the section. Values at
masked tokens are 0 and have no meaning.

1. A loss takes the weights of the tokens. It returns its value for each token and the gradient of
   `(weights * loss).sum()` by the log-probs (or values). The slope is the formula's derivative, not autograd's.
2. **The one deviation.** A log-ratio is clamped to [-20, 20] before `exp`; outside, the slope is 0. In k3, low_var_kl
   it is clamped only from below, where exp grows, and in both terms. In exp alone the slope would have the wrong sign.
3. If a paper leaves a choice open, slime's choice is marked `[slime]`. If slime leaves it open or does not support tool
   tokens, ours is marked `[ours]`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable
from typing import Literal

import numpy as np

from tests.acceptance.algorithms.cases import Case, Floats

Graded = tuple[Floats, Floats]
"""A loss a token [N], and the gradient [N] of its weighted sum."""
Level = Literal["token", "sequence", "geometric"]
BOUND = 20.0
EPSILON = 1e-6
"""[slime] added to a group's standard deviation, which divides by n - 1."""


# Advantages. Members of a group are trajectories: samples that share a rollout id count once, by their mean [ours].


def scores(case: Case, kl_coef: float = 0.0) -> list[float]:
    """A sample's reward minus kl_coef times the sum of its tokens' KL (2402.14740 sec. 2; InstructGPT's)."""
    return [float(case.rewards[s]) - kl_coef * sum(float(case.kl[t]) for t in steps) for s, steps in case.steps()]


How = Literal["std", "mean", "others"]
Entry = tuple[Hashable, Hashable, float]
"""A group, a member of the group, and a number."""


def relative(entries: list[Entry], how: How) -> list[float]:
    """Return each number relative to its group, whose members count once, by their mean. NaN is left out and gives 0.

    std: minus the mean, over the standard deviation [slime: n - 1, plus 1e-6]. mean: minus the mean. others: minus the
    mean of the other members. [ours] a group of one member, or of equal members, gives 0.
    """
    found: dict[Hashable, dict[Hashable, list[float]]] = defaultdict(lambda: defaultdict(list))
    for group, member, number in entries:
        if not math.isnan(number):
            found[group][member].append(number)
    means = {g: {m: sum(xs) / len(xs) for m, xs in inside.items()} for g, inside in found.items()}
    return [0.0 if math.isnan(x) else _beside(x, member, means[group], how) for group, member, x in entries]


def _beside(number: float, member: Hashable, means: dict[Hashable, float], how: How) -> float:
    numbers = list(means.values())
    mean = sum(numbers) / len(numbers)
    if max(numbers) - min(numbers) <= 1e-12 * (1 + abs(mean)):
        return 0.0
    if how == "others":
        rest = [x for m, x in means.items() if m != member]
        return number - sum(rest) / len(rest)
    if how == "mean":
        return number - mean
    return (number - mean) / (math.sqrt(sum((x - mean) ** 2 for x in numbers) / (len(numbers) - 1)) + EPSILON)


def spread(case: Case, per_sample: list[float]) -> Floats:
    """Return a sample's number on each of its trained tokens; NaN (no reward) gives 0."""
    out = np.zeros(len(case.mask))
    for sample, steps in case.steps():
        for t in steps:
            out[t] = 0.0 if math.isnan(per_sample[sample]) else per_sample[sample]
    return out


def compared(case: Case, kl_coef: float, how: How) -> Floats:
    """Return samples' scores relative to their group. [ours] a sample of a split trajectory keeps its own reward."""
    entries = zip(case.groups.tolist(), case.rollouts.tolist(), scores(case, kl_coef), strict=True)
    return spread(case, relative(list(entries), how))


def grpo(case: Case, *, std: bool = True, kl_coef: float = 0.0) -> Floats:
    """2402.03300 sec. 4.1.2: (r - mean) / std; without std Dr. GRPO, 2503.20783 sec. 3.2: r - mean."""
    return compared(case, kl_coef, "std" if std else "mean")


def rloo(case: Case, *, kl_coef: float = 0.0) -> Floats:
    """2402.14740 sec. 2.2: r_i minus the mean of the other k - 1."""
    return compared(case, kl_coef, "others")


def gdpo(case: Case, weights: list[float]) -> Floats:
    """2601.05242 eq. 4 to 7: each reward minus its group's mean, over its group's standard deviation. The weighted sum
    minus its mean over the batch, over its standard deviation there plus epsilon.

    [ours] trajectories count once in the batch too; every divisor gets 1e-6 added; n - 1.
    """
    groups, members = case.groups.tolist(), case.rollouts.tolist()
    total = [0.0 if not math.isnan(r) else math.nan for r in case.rewards.tolist()]
    for k, weight in enumerate(weights):
        own = relative(list(zip(groups, members, case.parts[:, k].tolist(), strict=True)), "std")
        total = [t + weight * a for t, a in zip(total, own, strict=True)]
    return spread(case, relative([("the batch", m, t) for m, t in zip(members, total, strict=True)], "std"))


def pass_at_k(case: Case, *, k: int, threshold: float) -> Floats:
    """2508.10751 eq. 11 to 15: with P = C(negatives, k) / C(all, k), so that the mean reward of sets of k is 1 - P and its
    standard deviation sqrt(P (1 - P)): a positive gets P / sigma, a negative (P - C(negatives - 1, k - 1) / C(all - 1, k -
    1)) / sigma.

    [ours] a reward above the threshold is positive. A trajectory counts once, by its samples' mean. sigma 0 gives 0. In
    a group with fewer than k members, k is their number.
    """
    rewards: dict[Hashable, dict[Hashable, list[float]]] = defaultdict(lambda: defaultdict(list))
    for s, reward in enumerate(case.rewards.tolist()):
        if not math.isnan(reward):
            rewards[case.groups[s]][case.rollouts[s]].append(reward)
    out = []
    for s, reward in enumerate(case.rewards.tolist()):
        if math.isnan(reward):
            out.append(0.0)
            continue
        group = {m: sum(xs) / len(xs) > threshold for m, xs in rewards[case.groups[s]].items()}
        n, negatives = len(group), sum(not right for right in group.values())
        size = min(k, n)
        miss = math.comb(negatives, size) / math.comb(n, size)
        sigma = math.sqrt(miss * (1 - miss))
        own = 0.0 if group[case.rollouts[s]] else math.comb(negatives - 1, size - 1) / math.comb(n - 1, size - 1)
        out.append((miss - own) / sigma if sigma else 0.0)
    return spread(case, out)


def covariances(case: Case, log_probs: Floats, advantages: Floats) -> dict[int, float]:
    """2505.22617 eq. 10, of each trained token: (log pi - its mean) (A - its mean), means over the N trained tokens."""
    tokens = [t for _, steps in case.steps() for t in steps]
    logs = math.fsum(float(log_probs[t]) for t in tokens) / max(len(tokens), 1)
    mean = math.fsum(float(advantages[t]) for t in tokens) / max(len(tokens), 1)
    return {t: (float(log_probs[t]) - logs) * (float(advantages[t]) - mean) for t in tokens}


def clip_cov_candidates(found: dict[int, float], ratio: float, low: float, high: float) -> tuple[set[int], int]:
    """2505.22617 eq. 11: the tokens with a covariance in [low, high], and how many are drawn: r N, [the authors' code] at
    least one."""
    inside = {t for t, cov in found.items() if low <= cov <= high}
    return inside, min(max(int(ratio * len(found)), 1), len(inside))


def kl_cov_tokens(found: dict[int, float], ratio: float) -> set[int]:
    """2505.22617 eq. 13: the k N tokens of the highest covariance, [the authors' code] at least one."""
    ranked = sorted(found, key=lambda t: (-found[t], t))
    return set(ranked[: max(int(ratio * len(found)), 1)])


def adaptive_entropy(entropies: list[float], *, start: float, step: float, target: float, most: float) -> list[float]:
    """2505.22312 sec. 3.2.5: alpha_k = c_k where e_k <= target, else 0; c rises by the step after an entropy below the
    target, and falls by the step after a higher one. [the authors' code] c stays within 0 and a maximum."""
    c, out = start, []
    for entropy in entropies:
        out.append(c if entropy <= target else 0.0)
        c = min(most, max(0.0, c + step if entropy < target else c - step))
    return out


def token_rewards(case: Case, kl_coef: float, by_turn: bool = False) -> Floats:
    """r_t = 1[t is the last step] r - kl_coef kl_t (2501.03262 sec. 3; 1909.08593 eq. 2).

    With `by_turn` the turns' rewards replace the sample's [ours].
    """
    out = np.zeros(len(case.mask))
    for sample, steps in case.steps():
        for t in steps:
            out[t] = -kl_coef * case.kl[t] + (case.step_rewards[t] if by_turn else 0.0)
        if steps and not by_turn:
            out[steps[-1]] += case.rewards[sample]
    return out


def discounted(case: Case, rewards: Floats, gamma: float) -> Floats:
    """G_t = r_t + gamma G_{t+1} over the steps, which are the tokens with mask 1 [ours: slime counts a tool's too]."""
    out = np.zeros(len(case.mask))
    for _, steps in case.steps():
        following = 0.0
        for t in reversed(steps):
            following = float(rewards[t]) + gamma * following
            out[t] = following
    return out


def whitened(case: Case, values: Floats) -> Floats:
    """(A - mean) / sqrt(var + 1e-8) over all trained tokens (2501.03262 sec. 3); var divides by n, as the authors'
    OpenRLHF; [slime] divides by n - 1."""
    trained = [float(values[t]) for _, steps in case.steps() for t in steps]
    if not trained:
        return np.zeros(len(values))
    mean = math.fsum(trained) / len(trained)
    variance = math.fsum((x - mean) ** 2 for x in trained) / len(trained)
    return np.where(case.mask == 1, (values - mean) / math.sqrt(variance + 1e-8), 0.0)


def reinforce_plus_plus(case: Case, *, kl_coef: float = 0.0, gamma: float = 1.0) -> Floats:
    """2501.03262 sec. 3, before whitening: discounted returns of the token rewards."""
    return discounted(case, token_rewards(case, kl_coef), gamma)


def reinforce_plus_plus_baseline(case: Case, *, kl_coef: float = 0.0) -> Floats:
    """2501.03262 sec. 3 (baseline), before whitening: reward minus the group's mean. The paper has its KL in the loss.

    [ours] with kl_coef the KL is subtracted from the reward, as for the other group estimators. [slime] subtracts a
    token's own KL from its advantage instead.
    """
    return grpo(case, std=False, kl_coef=kl_coef)


def gae(case: Case, rewards: Floats, *, gamma: float, lambd: float) -> tuple[Floats, Floats]:
    """1506.02438 eq. 16: A_t = sum_l (gamma lambda)^l delta_{t+l}, delta_t = r_t + gamma V_{t+1} - V_t; A and A + V.

    Over steps: V_{t+1} is the value at the next trained token, and 0 after the last.
    """
    advantages = np.zeros(len(case.mask))
    for _, steps in case.steps():
        deltas = []
        for i, t in enumerate(steps):
            following = float(case.values[steps[i + 1]]) if i + 1 < len(steps) else 0.0
            deltas.append(float(rewards[t]) + gamma * following - float(case.values[t]))
        for k, t in enumerate(steps):
            advantages[t] = sum((gamma * lambd) ** i * delta for i, delta in enumerate(deltas[k:]))
    return advantages, np.where(case.mask == 1, advantages + case.values, 0.0)


def turn_returns(case: Case, gamma: float, kl_coef: float = 0.0) -> dict[tuple[int, int], float]:
    """2505.10978 eq. 5: R_k = sum_j gamma^(j-k) r_j over a sample's turns, by (sample, turn); NaN without a reward.

    [ours] kl_coef times the KL of its trained tokens is subtracted from a turn's reward; untrained turns are turns too.
    """
    out = {}
    for sample, positions in case.samples():
        turns = sorted({int(case.turns[t]) for t in positions})
        rewards = [0.0 * float(case.rewards[sample])] * len(turns)
        for t in positions:
            rewards[turns.index(int(case.turns[t]))] += float(
                case.step_rewards[t] - kl_coef * case.kl[t] * case.mask[t]
            )
        for i, turn in enumerate(turns):
            out[sample, turn] = sum(gamma**j * r for j, r in enumerate(rewards[i:]))
    return out


def over_turns(case: Case, per_turn: dict[tuple[int, int], float]) -> Floats:
    """Return a turn's number on each of its trained tokens."""
    out = np.zeros(len(case.mask))
    for sample, steps in case.steps():
        for t in steps:
            out[t] = per_turn[sample, int(case.turns[t])]
    return out


def turn_credit(case: Case, *, gamma: float, kl_coef: float = 0.0, how: How = "std") -> Floats:
    """[ours] A turn's return relative to the same turn of the group's other trajectories."""
    found = turn_returns(case, gamma, kl_coef)
    entries: list[Entry] = [((case.groups[s], k), case.rollouts[s], total) for (s, k), total in found.items()]
    return over_turns(case, dict(zip(found, relative(entries, how), strict=True)))


def states(case: Case) -> dict[tuple[int, int], Hashable]:
    """2505.10978 eq. 6: a turn's anchor state is its group and the observation directly before the turn."""
    out: dict[tuple[int, int], Hashable] = {}
    for sample, positions in case.samples():
        shown: list[int] = []
        for t in positions:
            if case.written[t]:
                out.setdefault((sample, int(case.turns[t])), (int(case.groups[sample]), tuple(shown)))
                shown = []
            else:
                shown.append(int(case.tokens[t]))
    return out


def gigpo(case: Case, *, gamma: float, weight: float, kl_coef: float = 0.0, how: How = "std") -> Floats:
    """2505.10978 eq. 8: A = A_episode + w A_step. A_step (eq. 7) is a turn's return relative to the turns with the
    same state, A_episode (eq. 3) the sample's reward relative to its group."""
    found, anchors = turn_returns(case, gamma, kl_coef), states(case)
    entries: list[Entry] = [(anchors[turn], turn, total) for turn, total in found.items()]
    steps = over_turns(case, dict(zip(found, relative(entries, how), strict=True)))
    return compared(case, kl_coef, how) + weight * steps


def distilled(case: Case, *, base: Floats | None = None, coef: float = 1.0) -> Floats:
    """Reverse KL a token as the advantage: -(log student - log teacher) (2306.13649 sec. 3, sampled by the student;
    Thinking Machines, On-Policy Distillation); mixed [slime]: A - coef (log student - log teacher)."""
    base = np.zeros(len(case.mask)) if base is None else base
    return np.where(case.mask == 1, base - coef * (case.old - case.teacher), 0.0)


def overlong(length: int, limit: int, buffer: int) -> float:
    """2503.14476 eq. 13: 0 up to limit - buffer, then linear to -1 at the limit, -1 beyond."""
    if length <= limit - buffer:
        return 0.0
    return ((limit - buffer) - length) / buffer if length <= limit else -1.0


# Losses.


def ratio(log_ratio: float) -> tuple[float, float]:
    """exp(clamp(x, -20, 20)) and its derivative by x."""
    value = math.exp(max(-BOUND, min(BOUND, log_ratio)))
    return value, value if abs(log_ratio) < BOUND else 0.0


def clipped(log_ratio: float, advantage: float, low: float, high: float, dual: float | None) -> tuple[float, float]:
    """1707.06347 eq. 7: -min(r A, clip(r, 1 - low, 1 + high) A); separate low and high as in 2503.14476 eq. 8.

    Dual clip, 1912.09729 eq. 5: for A < 0 the objective is at least c A. Also the derivative by the log-ratio.
    """
    r, dr = ratio(log_ratio)
    value, slope = -r * advantage, -dr * advantage
    bounded = -max(1 - low, min(1 + high, r)) * advantage
    if bounded > value:
        value, slope = bounded, 0.0
    if dual is not None and advantage < 0 and -dual * advantage < value:
        value, slope = -dual * advantage, 0.0
    return value, slope


def sft(case: Case, weights: Floats) -> Graded:
    """-log pi."""
    return np.where(case.mask == 1, -case.log_probs, 0.0), np.where(case.mask == 1, -weights, 0.0)


def ppo(case: Case, weights: Floats, *, low: float, high: float, dual: float | None = None) -> Graded:
    """Return the clipped surrogate of each token."""
    value, gradient = np.zeros(len(weights)), np.zeros(len(weights))
    for _, steps in case.steps():
        for t in steps:
            value[t], slope = clipped(case.log_probs[t] - case.old[t], case.advantages[t], low, high, dual)
            gradient[t] = weights[t] * slope
    return value, gradient


def gspo(case: Case, weights: Floats, *, low: float, high: float, dual: float | None = None) -> Graded:
    """2507.18071 eq. 5 and 7: s = exp(mean over the sample's trained tokens of the log-ratio), clipped as PPO's ratio.

    Each token carries the sequence's loss; by eq. 10 each token's log-prob gets 1/n of the sequence's slope.
    """
    value, gradient = np.zeros(len(weights)), np.zeros(len(weights))
    for _, steps in case.steps():
        mean = sum(float(case.log_probs[t] - case.old[t]) for t in steps) / max(len(steps), 1)
        total = 0.0
        for t in steps:
            value[t], slope = clipped(mean, case.advantages[t], low, high, dual)
            total += weights[t] * slope
        for t in steps:
            gradient[t] = total / len(steps)
    return value, gradient


def cispo(case: Case, weights: Floats, *, low: float, high: float) -> Graded:
    """2506.13585 eq. 4 and 5: -sg(clip(r, 1 - low, 1 + high)) A log pi."""
    value, gradient = np.zeros(len(weights)), np.zeros(len(weights))
    for _, steps in case.steps():
        for t in steps:
            factor = max(1 - low, min(1 + high, ratio(case.log_probs[t] - case.old[t])[0]))
            value[t] = -factor * case.advantages[t] * case.log_probs[t]
            gradient[t] = weights[t] * -factor * case.advantages[t]
    return value, gradient


def sapo(case: Case, weights: Floats, *, positive: float, negative: float) -> Graded:
    """2511.20347: -f(r) A with f(r) = sigma(tau (r - 1)) 4 / tau; d f / d log pi = 4 sigma (1 - sigma) r."""
    value, gradient = np.zeros(len(weights)), np.zeros(len(weights))
    for _, steps in case.steps():
        for t in steps:
            r, dr = ratio(case.log_probs[t] - case.old[t])
            tau = positive if case.advantages[t] > 0 else negative
            x = tau * (r - 1)
            gate = 1 / (1 + math.exp(-x)) if x > -700 else 0.0
            value[t] = -gate * 4 / tau * case.advantages[t]
            gradient[t] = weights[t] * -4 * gate * (1 - gate) * dr * case.advantages[t]
    return value, gradient


def dppo(case: Case, weights: Floats, *, kind: str, threshold: float) -> Graded:
    """2602.04879 eq. 12 with the binary divergences of eq. 13 and 14: -r A, but 0 where (A > 0, r > 1) or (A < 0, r < 1) with a divergence above the bound."""
    value, gradient = np.zeros(len(weights)), np.zeros(len(weights))
    for _, steps in case.steps():
        for t in steps:
            r, dr = ratio(case.log_probs[t] - case.old[t])
            p, q, a = math.exp(case.old[t]), math.exp(case.log_probs[t]), float(case.advantages[t])
            if kind == "tv":
                distance = abs(p - q)
            else:
                tiny = 2.2250738585072014e-308
                rest = (1 - p) * (math.log(max(1 - p, tiny)) - math.log(max(1 - q, tiny)))
                distance = p * math.log(1 / r) + rest
            if ((a > 0 and r > 1) or (a < 0 and r < 1)) and distance > threshold:
                continue
            value[t], gradient[t] = -r * a, weights[t] * -dr * a
    return value, gradient


def clip_cov(case: Case, weights: Floats) -> Graded:
    """2505.22617 eq. 12: the surrogate, and 0 for the chosen tokens."""
    value, gradient = ppo(case, weights, low=0.2, high=0.2)
    return np.where(case.chosen == 1, 0.0, value), np.where(case.chosen == 1, 0.0, gradient)


def kl_cov(case: Case, weights: Floats, *, coef: float) -> Graded:
    """2505.22617 eq. 14 and listing 1: the chosen tokens' loss adds coef |log pi - log pi_old|. [ours] 0 within 1e-4,
    where rounding would decide the sign."""
    value, gradient = ppo(case, weights, low=0.2, high=0.2)
    for _, steps in case.steps():
        for t in steps:
            if case.chosen[t] and abs(case.log_probs[t] - case.old[t]) > 1e-4:
                apart = float(case.log_probs[t] - case.old[t])
                value[t] += coef * min(abs(apart), BOUND)
                gradient[t] += weights[t] * coef * float(np.sign(apart)) * (abs(apart) < BOUND)
    return value, gradient


def gmpo(case: Case, weights: Floats, *, bound: float) -> Graded:
    """2507.20673 eq. 4: -A (product of min(r^s, e^bound))^(s / n) with s the sign of A; a bounded factor has no slope."""
    value, gradient = np.zeros(len(weights)), np.zeros(len(weights))
    for _, steps in case.steps():
        logs, free = [], []
        for t in steps:
            sign = float(np.sign(case.advantages[t]))
            r, dr = ratio(case.log_probs[t] - case.old[t])
            towards = sign * math.log(r)
            logs.append(sign * min(towards, bound))
            free.append(towards <= bound and dr != 0 and sign != 0)
        if not steps:
            continue
        mean = math.exp(sum(logs) / len(logs))
        total = sum(float(weights[t] * -mean * case.advantages[t]) for t in steps)
        for t, slopes in zip(steps, free, strict=True):
            value[t] = -mean * case.advantages[t]
            gradient[t] = total / len(steps) if slopes else 0.0
    return value, gradient


def kl(kind: str, log_prob: float, ref: float) -> tuple[float, float]:
    """Estimates of KL(pi || ref) (joschu.net/blog/kl-approx.html; k3 is 2402.03300 eq. 4) and d/d log pi.

    [slime] low_var_kl is k3 clamped to [-10, 10].
    """
    x = log_prob - ref
    if kind == "k1":
        return x, 1.0
    if kind == "k2":
        return x * x / 2, x
    bounded = max(x, -BOUND)
    value = math.exp(-bounded) - 1 + bounded
    slope = 1 - math.exp(-x) if x > -BOUND else 0.0
    if kind == "low_var_kl" and abs(value) > 10:
        return 10.0, 0.0
    return value, slope


def kl_loss(case: Case, weights: Floats, kind: str, *, unbiased: bool = False) -> Graded:
    """KL to the reference in the loss. Unbiased (2512.02556 sec. 3.1): times the ratio to the old policy, whose slope
    counts too; [slime] low_var_kl is clamped after that."""
    value, gradient = np.zeros(len(weights)), np.zeros(len(weights))
    for _, steps in case.steps():
        for t in steps:
            plain = "k3" if unbiased and kind == "low_var_kl" else kind
            k, dk = kl(plain, case.log_probs[t], case.ref[t])
            if unbiased:
                r, dr = ratio(case.log_probs[t] - case.old[t])
                k, dk = r * k, dr * k + r * dk
                if kind == "low_var_kl" and abs(k) > 10:
                    k, dk = math.copysign(10.0, k), 0.0
            value[t], gradient[t] = k, weights[t] * dk
    return value, gradient


def value_loss(case: Case, weights: Floats, clip: float) -> Graded:
    """max((V - R)^2, (clip(V, V_old +- clip) - R)^2) (PPO's code; 1811.02553 sec. 4.1). [slime] no factor 1/2."""
    value, gradient = np.zeros(len(weights)), np.zeros(len(weights))
    for _, steps in case.steps():
        for t in steps:
            v, old, target = float(case.values[t]), float(case.old_values[t]), float(case.returns[t])
            near = max(old - clip, min(old + clip, v))
            free, bound = (v - target) ** 2, (near - target) ** 2
            value[t] = max(free, bound)
            gradient[t] = weights[t] * (2 * (v - target) if free >= bound else 0.0)
    return value, gradient


# Token weights.


def per_token(case: Case) -> Floats:
    """2503.14476 eq. 12: 1 over the step's trained tokens."""
    return np.where(case.mask == 1, 1 / max(int(case.mask.sum()), 1), 0.0)


def per_trajectory(case: Case, *, live: bool) -> Floats:
    """2402.03300 eq. 3: the mean over trajectories of the mean over a trajectory's trained tokens (over all its samples
    [slime]). Trajectories: all of the step [slime, and the paper's 1/G], or those with a trained token."""
    tokens: dict[int, int] = defaultdict(int)
    for sample, steps in case.steps():
        tokens[int(case.rollouts[sample])] += len(steps)
    count = max(sum(1 for n in tokens.values() if n or not live), 1)
    out = np.zeros(len(case.mask))
    for sample, steps in case.steps():
        out[steps] = 1 / (max(tokens[int(case.rollouts[sample])], 1) * count)
    return out


def constant(case: Case, length: int, *, live: bool) -> Floats:
    """2503.20783 sec. 3.2 (Dr. GRPO): the sum over tokens divided by a constant length, mean over trajectories."""
    seen = {int(case.rollouts[s]) for s, steps in case.steps() if steps or not live}
    return np.where(case.mask == 1, 1 / (length * max(len(seen), 1)), 0.0)


# Off-policy corrections: factors and masks on the surrogate, without gradient. rho = old policy / engine's policy.


def log_rho(case: Case, level: Level) -> Floats:
    """Return log rho of a token. A sequence's is the sum over its trained tokens (product of ratios), or their mean."""
    out = np.zeros(len(case.mask))
    for _, steps in case.steps():
        each = [float(case.old[t] - case.rollout[t]) for t in steps]
        for t, x in zip(steps, each, strict=True):
            out[t] = x if level == "token" else sum(each) if level == "sequence" else sum(each) / len(each)
    return out


def rho(case: Case, level: Level) -> Floats:
    return np.array([ratio(x)[0] for x in log_rho(case, level).tolist()])


def tis(case: Case, level: Level, low: float, high: float) -> Floats:
    """Truncated importance sampling (Yao et al. 2025, fengyao.notion.site/off-policy-rl): clamp(rho, low, high)."""
    return np.array([max(low, min(high, x)) for x in rho(case, level).tolist()])


def mis(case: Case, level: Level, low: float, high: float) -> Floats:
    """Masked importance sampling, IcePop (2510.18855 sec. 2.3.2): rho inside [low, high], else 0."""
    return np.array([x if low <= x <= high else 0.0 for x in rho(case, level).tolist()])


def rejected(case: Case, level: Level, low: float, high: float) -> Floats:
    """Return 1 if the ratio lies in [low, high], else 0. A sequence's ratio rejects the sequence [slime's mis.py]."""
    return np.array([1.0 if low <= x <= high else 0.0 for x in rho(case, level).tolist()])


def veto(case: Case, threshold: float) -> Floats:
    """Return 0 for every token of a sample in which one trained token's rho is below the threshold [slime's mis.py]."""
    out = np.ones(len(case.mask))
    for _, steps in case.steps():
        if any(float(case.old[t] - case.rollout[t]) < math.log(threshold) for t in steps):
            out[steps] = 0.0
    return out


def opsm(case: Case, delta: float) -> Floats:
    """2512.02556 eq. 9: 0 where A < 0 and the sample's mean of log(behaviour / pi) is above delta.

    The paper's pi_old is the engine's; [slime] takes its old log-probs, which are the engine's with use_rollout_logprobs.
    """
    out = np.ones(len(case.mask))
    for _, steps in case.steps():
        mean = sum(float(case.rollout[t] - case.log_probs[t]) for t in steps) / max(len(steps), 1)
        for t in steps:
            out[t] = 0.0 if case.advantages[t] < 0 and mean > delta else 1.0
    return out


def decoupled(case: Case) -> Floats:
    """2505.24298 eq. 5 (2110.00641): pi_proximal / pi_behaviour, multiplied with PPO's surrogate around the proximal
    policy. If `old` holds the proximal log-probs, the surrogate is `ppo` times this factor."""
    return rho(case, "token")
