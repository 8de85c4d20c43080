"""PPO: advantages of a critic's values by GAE (arXiv:1707.06347; arXiv:1506.02438)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl.algorithms.base import AdvantageInputs, Computed, need
from agentrl.algorithms.policy import TOKEN_REWARDS, PolicyGradient

if TYPE_CHECKING:
    from torch import Tensor


class PPO(PolicyGradient):
    """GAE over the steps of a sample, with `gamma` and `lambd`; token rewards and steps are those of `ops.returns`."""

    name = "ppo"
    takes = PolicyGradient.takes | {"gamma", "lambd", "value_clip"}
    hints = TOKEN_REWARDS

    @property
    def reads(self) -> frozenset[Computed]:
        return super().reads | {"values"}

    def advantages(self, inputs: AdvantageInputs) -> Tensor:
        from agentrl.algorithms.ops.returns import generalized_advantages, token_rewards

        settings, values = self.settings, need(inputs.values, "values", self.name)
        rewards = token_rewards(inputs, settings.kl_coef)
        return generalized_advantages(rewards, values, inputs, settings.gamma, settings.lambd)
