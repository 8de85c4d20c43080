"""GRPO: a trajectory's reward relative to the others of its prompt (DeepSeekMath, arXiv:2402.03300, eq. 4.1.2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from agentrl.algorithms.base import AdvantageInputs
from agentrl.algorithms.policy import ONE_EACH, PolicyGradient

if TYPE_CHECKING:
    from torch import Tensor


class GRPO(PolicyGradient):
    """Group-relative advantages, the same for all tokens of a sample.

    A = (reward - mean) / (std + 1e-6) over the sample's group; without `grpo_std_normalization` only the mean is
    subtracted (Dr. GRPO, arXiv:2503.20783); without `rewards_normalization` the reward is used as it is. The reward is
    that of the environment less `kl_coef` times the sample's KL.
    """

    name = "grpo"
    takes = PolicyGradient.takes | {"rewards_normalization", "grpo_std_normalization"}
    hints: ClassVar[Mapping[str, str]] = ONE_EACH

    @property
    def compares_within_group(self) -> bool:
        return self.settings.rewards_normalization

    def advantages(self, inputs: AdvantageInputs) -> Tensor:
        from agentrl.algorithms.ops.normalization import group_normalize
        from agentrl.algorithms.ops.returns import sample_rewards

        settings = self.settings
        rewards = sample_rewards(inputs, settings.kl_coef)
        if settings.rewards_normalization:
            divide = settings.grpo_std_normalization
            rewards = group_normalize(rewards, inputs.group_ids, inputs.rollout_ids, divide_by_std=divide)
        return rewards.nan_to_num(nan=0.0).repeat_interleave(inputs.lengths)
