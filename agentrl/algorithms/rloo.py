"""RLOO: a trajectory's reward less the mean of the others of its prompt (arXiv:2402.14740, eq. 6)."""

from __future__ import annotations

from agentrl.algorithms import ops
from agentrl.algorithms.base import Tensor
from agentrl.algorithms.group_relative import GroupRelative


class RLOO(GroupRelative):
    """The baseline does not contain the sample itself, so the gradient has no bias; the same for all its tokens.

    The reward is the environment's less `kl_coef` times the sample's KL. The paper's loss is REINFORCE, which the
    clipped ratio is as long as it is 1.
    """

    name = "rloo"

    def compare(self, rewards: Tensor, group_ids: Tensor, rollout_ids: Tensor) -> Tensor:
        return ops.normalization.group_normalize(
            rewards, group_ids, rollout_ids, divide_by_std=False, leave_one_out=True
        )
