"""Advantage estimators: functions from the rewards of a whole batch to one advantage a response token.

1. An estimator is a function `(AdvantageInputs, AlgorithmSettings) -> Tensor[N]`. Built-in ones are named in
   `registry.ESTIMATORS`; any other is given by path. A new algorithm is a new function, not a branch here.
2. It sees the whole batch at once, so groups of any size, fan-out and global statistics need no communication.
3. Estimators never look at the mask to decide a value: masked tokens get one too, and weight 0 later.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algorithms.registry import ESTIMATORS, check_estimator_name
from agentrl.algorithms.settings import AlgorithmSettings
from agentrl.errors import SettingsError
from agentrl.plugins import load_object

STD_EPSILON = 1e-6
"""Added to the group's standard deviation, as in slime."""


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """What an estimator may read: S samples with N response tokens in all, flat and in sample order.

    Attributes:
        rewards: [S] float64; NaN marks a sample that has no reward (a failed one that is kept masked).
        group_ids: [S] int; samples of one prompt share it.
        rollout_ids: [S] int, unique over groups; samples that one trajectory fanned out into share it.
        lengths: [S] int, response tokens of each sample; sums to N.
        loss_mask: [N], 1 where the token trains.
        kl: [N] per-token KL to the reference model, for estimators with token rewards.
        values: [N] value estimates, for estimators with a critic.
    """

    rewards: Tensor
    group_ids: Tensor
    rollout_ids: Tensor
    lengths: Tensor
    loss_mask: Tensor
    kl: Tensor | None = None
    values: Tensor | None = None


Estimator = Callable[[AdvantageInputs, AlgorithmSettings], Tensor]


def get_estimator(name: str) -> Estimator:
    """The estimator called `name`, or the one that the path `name` points to.

    Raises:
        SettingsError: no such built-in estimator.
        PluginError: the path cannot be loaded.
    """
    try:
        check_estimator_name(name)
    except ValueError as error:
        raise SettingsError(str(error)) from None
    found: Estimator = load_object(ESTIMATORS.get(name, name), what="--advantage-estimator")
    return found


def compute_advantages(inputs: AdvantageInputs, settings: AlgorithmSettings) -> Tensor:
    """Advantages [N] float32 by the estimator of the settings, whitened if `normalize_advantages`.

    Raises:
        SettingsError: the estimator is unknown or returned something of another shape.
    """
    advantages = get_estimator(settings.advantage_estimator)(inputs, settings)
    if advantages.shape != inputs.loss_mask.shape:
        raise SettingsError(
            f"advantage_estimator {settings.advantage_estimator!r} must return one value for each of the "
            f"{inputs.loss_mask.numel()} response tokens, got shape {tuple(advantages.shape)}"
        )
    if settings.normalize_advantages:
        advantages = whiten(advantages, inputs.loss_mask)
    return advantages.float()


def grpo(inputs: AdvantageInputs, settings: AlgorithmSettings) -> Tensor:
    """Group-relative advantages, the same for all tokens of a sample (DeepSeekMath, arXiv:2402.03300, eq. 4.1.2).

    A = (reward - mean) / (std + 1e-6) over the sample's group; without `grpo_std_normalization` only the mean is
    subtracted (Dr. GRPO, arXiv:2503.20783); without `rewards_normalization` the reward is used as it is.
    """
    rewards = inputs.rewards.double()
    if settings.rewards_normalization:
        rewards = group_normalize(
            rewards, inputs.group_ids, inputs.rollout_ids, divide_by_std=settings.grpo_std_normalization
        )
    return torch.nan_to_num(rewards, nan=0.0).repeat_interleave(inputs.lengths)


def group_normalize(rewards: Tensor, group_ids: Tensor, rollout_ids: Tensor, *, divide_by_std: bool = True) -> Tensor:
    """Rewards [S] relative to their group.

    The members of a group are its trajectories. Samples that share a rollout id are one member, whose reward is
    their mean, so a trajectory that fanned out does not outvote its siblings; each sample's own reward is then
    compared with the members' mean and (n - 1) standard deviation. A group whose members all have the same reward,
    or that has only one, gives zeros. Samples with a NaN reward are left out of the statistics and get zero.

    Returns:
        [S] float64.
    """
    rewards = rewards.double()
    known = ~rewards.isnan()
    filled = torch.where(known, rewards, torch.zeros_like(rewards))
    groups, group_of_sample = torch.unique(group_ids, return_inverse=True)
    members, member_of_sample = torch.unique(rollout_ids, return_inverse=True)
    group_of_member = torch.zeros(len(members), dtype=torch.long, device=rewards.device)
    group_of_member[member_of_sample] = group_of_sample

    counts = _sum_by(known.double(), member_of_sample, len(members))
    member_rewards = _sum_by(filled, member_of_sample, len(members)) / counts.clamp(min=1)
    counted = (counts > 0).double()
    size = _sum_by(counted, group_of_member, len(groups))
    mean = _sum_by(member_rewards * counted, group_of_member, len(groups)) / size.clamp(min=1)
    deviation = (member_rewards - mean[group_of_member]) * counted
    std = (_sum_by(deviation.square(), group_of_member, len(groups)) / (size - 1).clamp(min=1)).sqrt()

    relative = filled - mean[group_of_sample]
    if divide_by_std:
        relative = relative / (std[group_of_sample] + STD_EPSILON)
    # Rounding in the mean must not turn equal rewards into a signal.
    flat = std <= 1e-12 * (1 + mean.abs())
    return torch.where(known & ~flat[group_of_sample], relative, torch.zeros_like(relative))


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Shift and scale `values` [N] to mean 0 and (biased) variance 1 over the tokens where `mask` [N] is 1."""
    weights = mask.to(values.dtype)
    total = weights.sum().clamp(min=1)
    mean = (values * weights).sum() / total
    variance = ((values - mean).square() * weights).sum() / total
    return (values - mean) * (variance + 1e-8).rsqrt()


def _sum_by(values: Tensor, index: Tensor, size: int) -> Tensor:
    return torch.zeros(size, dtype=values.dtype, device=values.device).index_add(0, index, values)
