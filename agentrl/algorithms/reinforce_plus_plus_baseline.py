"""REINFORCE++ with the group's mean as a baseline (arXiv:2501.03262)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from agentrl.algorithms.base import AdvantageInputs
from agentrl.algorithms.policy import ONE_EACH, PolicyGradient

if TYPE_CHECKING:
    from torch import Tensor


class ReinforcePlusPlusBaseline(PolicyGradient):
    """A sample's reward less its group's mean, the same for all its tokens, whitened over the rollout's trained tokens.

    The reward is the environment's less `kl_coef` times the sample's KL. (slime subtracts the token's own KL instead.)
    """

    name = "reinforce_plus_plus_baseline"
    hints: ClassVar[Mapping[str, str]] = ONE_EACH
    whitened = True

    @property
    def compares_within_group(self) -> bool:
        return True

    def advantages(self, inputs: AdvantageInputs) -> Tensor:
        from agentrl.algorithms.ops.normalization import group_normalize
        from agentrl.algorithms.ops.returns import sample_rewards

        rewards = sample_rewards(inputs, self.settings.kl_coef)
        relative = group_normalize(rewards, inputs.group_ids, inputs.rollout_ids, divide_by_std=False)
        return relative.repeat_interleave(inputs.lengths)
