"""Normalization of rewards within their group, and of values over the whole batch."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

STD_EPSILON = 1e-6  # added to the group's standard deviation, as in slime


def group_normalize(
    rewards: Tensor,
    group_ids: Tensor,
    trajectory_ids: Tensor,
    *,
    divide_by_std: bool = True,
    leave_one_out: bool = False,
) -> Tensor:
    """Return rewards relative to their group, [S] float64.

    The members of a group are its trajectories. Samples of one trajectory are one member with their mean reward, so a
    split trajectory counts no more than others. Each sample's own reward is compared with the members' mean (with
    `leave_one_out`, the other members' mean) and (n - 1) standard deviation. A group of equal rewards, or of one
    member, gives zeros. NaN rewards are left out and get zero."""
    known, filled = _known(rewards)
    group = Members.of(filled, known, group_ids, trajectory_ids)
    size, mean = group.size, group.per_group(group.rewards * group.counted) / group.size.clamp(min=1)
    deviation = (group.rewards - mean[group.group_of_member]) * group.counted
    std = (group.per_group(deviation.square()) / (size - 1).clamp(min=1)).sqrt()

    baseline = mean[group.group_of_sample]
    if leave_one_out:
        own, n = group.rewards[group.member_of_sample], size[group.group_of_sample]
        baseline = (n * baseline - own) / (n - 1).clamp(min=1)
    relative = filled - baseline
    if divide_by_std:
        relative = relative / (std[group.group_of_sample] + STD_EPSILON)
    # Rounding in the mean must not turn equal rewards into a signal.
    flat = std <= 1e-12 * (1 + mean.abs())
    return torch.where(known & ~flat[group.group_of_sample], relative, 0.0)


def decoupled_normalize(parts: Tensor, weights: Tensor, group_ids: Tensor, trajectory_ids: Tensor) -> Tensor:
    """Compute GDPO's advantages [S] float64 of K rewards [S, K] with `weights` [K] (arXiv:2601.05242, eq. 4 to 7). Each
    reward is normalized by `group_normalize`; so is the weighted sum, with the batch as one group."""
    own = [group_normalize(reward, group_ids, trajectory_ids) for reward in parts.unbind(1)]
    total = (torch.stack(own, 1) * weights.double()).sum(1).masked_fill(parts.isnan().any(1), torch.nan)
    return group_normalize(total, torch.zeros_like(group_ids), trajectory_ids)


def pass_at_k_advantages(
    rewards: Tensor, group_ids: Tensor, trajectory_ids: Tensor, *, k: int, threshold: float
) -> Tensor:
    """Compute each trajectory's mean advantage [S] float64 over all sets of `k` of its group. A set earns 1 if one of
    its trajectories has a reward above `threshold` (arXiv:2508.10751, eq. 11 to 15).

    With f the share of sets without a success, a success gets f / s and a failure (f - g) / s. s is sqrt(f (1 - f)),
    and g the share of sets without a success among the sets that hold a given failure. If s is 0, so is the advantage.
    A group of fewer than `k` is one set. For split trajectories and NaN see `group_normalize`."""
    known, filled = _known(rewards)
    group = Members.of(filled, known, group_ids, trajectory_ids)
    failed = (group.rewards <= threshold) & (group.counted > 0)
    failures = group.per_group(failed.double())
    without = _all_failed(failures, group.size, k)
    given = _all_failed(failures - 1, group.size - 1, k - 1)
    spread = (without * (1 - without)).sqrt()
    sample = group.group_of_sample
    credit = (without[sample] - torch.where(failed[group.member_of_sample], given[sample], 0.0)) / spread[sample]
    return torch.where(known & (spread[sample] > 0), credit, 0.0)


def _all_failed(failures: Tensor, size: Tensor, k: int) -> Tensor:
    """Return C(failures, k) / C(size, k) of each group; k is at most the group's size."""
    drawn = torch.arange(k, device=size.device)
    left, of = failures[:, None] - drawn, size[:, None] - drawn
    return torch.where(of > 0, left.clamp(min=0) / of.clamp(min=1), 1.0).prod(1)


@dataclass(frozen=True, slots=True)
class Members:
    """The trajectories of groups: M members of G groups, of S samples."""

    group_of_sample: Tensor  # int64 [S]
    member_of_sample: Tensor  # int64 [S]
    group_of_member: Tensor  # int64 [M]
    rewards: Tensor  # float64 [M], the mean of the samples' known rewards
    counted: Tensor  # float64 [M], 0 where no reward is known
    size: Tensor  # float64 [G], the members that are counted

    @classmethod
    def of(cls, rewards: Tensor, known: Tensor, group_ids: Tensor, trajectory_ids: Tensor) -> Self:
        """Group `rewards` [S], of which only the `known` [S] count, by trajectory."""
        groups, group_of_sample = torch.unique(group_ids, return_inverse=True)
        members, member_of_sample = torch.unique(trajectory_ids, return_inverse=True)
        group_of_member = torch.zeros(len(members), dtype=torch.long, device=rewards.device)
        group_of_member[member_of_sample] = group_of_sample
        counts = _sum_by(known.double(), member_of_sample, len(members))
        means = _sum_by(rewards, member_of_sample, len(members)) / counts.clamp(min=1)
        counted = (counts > 0).double()
        size = _sum_by(counted, group_of_member, len(groups))
        return cls(group_of_sample, member_of_sample, group_of_member, means, counted, size)

    def per_group(self, values: Tensor) -> Tensor:
        """Return the sums [G] of members' `values` [M]."""
        return _sum_by(values, self.group_of_member, len(self.size))


def _known(rewards: Tensor) -> tuple[Tensor, Tensor]:
    """Return a mask of the rewards that are not NaN, and the rewards as float64, with 0 in place of NaN."""
    known = ~rewards.isnan()
    return known, torch.where(known, rewards.double(), 0.0)


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Shift and scale `values` [N] to mean 0 and (biased) variance 1 over the tokens where `mask` [N] is 1. Other
    tokens have no influence on mean and variance. Without any such token `values` are unchanged."""
    if not (chosen := values[mask > 0]).numel():
        return values
    mean = chosen.mean()
    variance = (chosen - mean).square().mean()
    return (values - mean) * (variance + 1e-8).rsqrt()


def spread(values: Tensor, mask: Tensor) -> dict[str, float]:
    """Return mean, biased std, max and min of `values` [N] where `mask` [N] is 1; empty if the mask is all 0."""
    if not (chosen := values[mask > 0].double()).numel():
        return {}
    found = {"mean": chosen.mean(), "std": chosen.std(correction=0), "max": chosen.max(), "min": chosen.min()}
    return {name: value.item() for name, value in found.items()}


def _sum_by(values: Tensor, index: Tensor, size: int) -> Tensor:
    return torch.zeros(size, dtype=values.dtype, device=values.device).index_add(0, index, values)
