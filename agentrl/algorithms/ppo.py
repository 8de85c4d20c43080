"""PPO: advantages of a critic's values by GAE (arXiv:1707.06347; arXiv:1506.02438)."""

from __future__ import annotations

from agentrl.algorithms import ops
from agentrl.algorithms.base import AdvantageInputs, Computed, Tensor, need
from agentrl.algorithms.policy import PolicyGradient


class PPO(PolicyGradient):
    """GAE over the steps of a sample, with `gamma` and `lambd`; token rewards and steps are those of `ops.returns`."""

    name = "ppo"
    takes = PolicyGradient.takes | {"gamma", "lambd", "value_clip"}

    @property
    def reads(self) -> frozenset[Computed]:
        return super().reads | {"values"}

    def advantages(self, inputs: AdvantageInputs) -> Tensor:
        settings, values = self.settings, need(inputs.values, "values", self.name)
        rewards = ops.returns.token_rewards(inputs, settings.kl_coef)
        return ops.returns.generalized_advantages(rewards, values, inputs, settings.gamma, settings.lambd)
