"""GRPO: a trajectory's reward relative to the others of its prompt (DeepSeekMath, arXiv:2402.03300, eq. 4.1.2)."""

from __future__ import annotations

from agentrl.algorithms import ops
from agentrl.algorithms.base import Tensor
from agentrl.algorithms.group_relative import GroupRelative


class GRPO(GroupRelative):
    """Group-relative advantages; without `turn_credit` the same for all tokens of a sample.

    A = (reward - mean) / (std + 1e-6) over the sample's group; without `grpo_std_normalization` only the mean is
    subtracted (Dr. GRPO, arXiv:2503.20783); without `rewards_normalization` the reward is used as it is. The reward is
    that of the environment less `kl_coef` times the sample's KL.
    """

    name = "grpo"
    takes = GroupRelative.takes | {"rewards_normalization", "grpo_std_normalization"}

    @property
    def compares_within_group(self) -> bool:
        return self.settings.rewards_normalization

    @property
    def taken(self) -> frozenset[str]:
        return super().taken - (set() if self.settings.rewards_normalization else {"grpo_std_normalization"})

    def compare(self, rewards: Tensor, group_ids: Tensor, rollout_ids: Tensor) -> Tensor:
        if self.settings.rewards_normalization:
            divide = self.settings.grpo_std_normalization
            rewards = ops.normalization.group_normalize(rewards, group_ids, rollout_ids, divide_by_std=divide)
        return rewards.nan_to_num(nan=0.0)
