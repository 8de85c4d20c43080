"""Rewards relative to their group, and values relative to the whole batch."""

import torch
from torch import Tensor

STD_EPSILON = 1e-6
"""Added to the group's standard deviation, as in slime."""


def group_normalize(
    rewards: Tensor,
    group_ids: Tensor,
    trajectory_ids: Tensor,
    *,
    divide_by_std: bool = True,
    leave_one_out: bool = False,
) -> Tensor:
    """Rewards relative to their group, [S] float64.

    The members of a group are its trajectories. Samples that share a trajectory are one member, whose reward is their
    mean, so a trajectory that fanned out does not outvote its siblings; each sample's own reward is then compared with
    the members' mean (with `leave_one_out` that of the other members) and (n - 1) standard deviation. A group whose
    members all have the same reward, or that has only one, gives zeros. Samples with a NaN reward are left out of the
    statistics and get zero.
    """
    rewards = rewards.double()
    known = ~rewards.isnan()
    filled = torch.where(known, rewards, 0.0)
    groups, group_of_sample = torch.unique(group_ids, return_inverse=True)
    members, member_of_sample = torch.unique(trajectory_ids, return_inverse=True)
    group_of_member = torch.zeros(len(members), dtype=torch.long, device=rewards.device)
    group_of_member[member_of_sample] = group_of_sample

    counts = _sum_by(known.double(), member_of_sample, len(members))
    member_rewards = _sum_by(filled, member_of_sample, len(members)) / counts.clamp(min=1)
    counted = (counts > 0).double()
    size = _sum_by(counted, group_of_member, len(groups))
    mean = _sum_by(member_rewards * counted, group_of_member, len(groups)) / size.clamp(min=1)
    deviation = (member_rewards - mean[group_of_member]) * counted
    std = (_sum_by(deviation.square(), group_of_member, len(groups)) / (size - 1).clamp(min=1)).sqrt()

    baseline = mean[group_of_sample]
    if leave_one_out:
        own, n = member_rewards[member_of_sample], size[group_of_sample]
        baseline = (n * baseline - own) / (n - 1).clamp(min=1)
    relative = filled - baseline
    if divide_by_std:
        relative = relative / (std[group_of_sample] + STD_EPSILON)
    # Rounding in the mean must not turn equal rewards into a signal.
    flat = std <= 1e-12 * (1 + mean.abs())
    return torch.where(known & ~flat[group_of_sample], relative, 0.0)


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Shift and scale `values` [N] to mean 0 and (biased) variance 1 over the tokens where `mask` [N] is 1. Whatever
    stands at the others does not matter; nothing happens if there is no token."""
    chosen = values[mask > 0]
    if not chosen.numel():
        return values
    mean = chosen.mean()
    variance = (chosen - mean).square().mean()
    return (values - mean) * (variance + 1e-8).rsqrt()


def spread(values: Tensor, mask: Tensor) -> dict[str, float]:
    """Mean, biased std, max and min of `values` [N] where `mask` [N] is 1; empty if it is nowhere."""
    chosen = values[mask > 0].double()
    if not chosen.numel():
        return {}
    found = {"mean": chosen.mean(), "std": chosen.std(correction=0), "max": chosen.max(), "min": chosen.min()}
    return {name: value.item() for name, value in found.items()}


def _sum_by(values: Tensor, index: Tensor, size: int) -> Tensor:
    return torch.zeros(size, dtype=values.dtype, device=values.device).index_add(0, index, values)
