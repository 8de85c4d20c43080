"""REINFORCE++ with the group's mean as a baseline (arXiv:2501.03262)."""

from __future__ import annotations

from agentrl.algorithms import ops
from agentrl.algorithms.base import Tensor
from agentrl.algorithms.group_relative import GroupRelative


class ReinforcePlusPlusBaseline(GroupRelative):
    """A sample's reward less its group's mean, the same for all its tokens, whitened over the rollout's trained tokens.

    The reward is the environment's less `kl_coef` times the sample's KL. (slime subtracts the token's own KL instead.)
    """

    name = "reinforce_plus_plus_baseline"
    whitened = True

    def compare(self, rewards: Tensor, group_ids: Tensor, rollout_ids: Tensor) -> Tensor:
        return ops.normalization.group_normalize(rewards, group_ids, rollout_ids, divide_by_std=False)
