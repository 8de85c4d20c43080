"""REINFORCE++: discounted returns, whitened over the rollout in place of a critic (arXiv:2501.03262)."""

from __future__ import annotations

from agentrl.algorithms import ops
from agentrl.algorithms.base import AdvantageInputs, Tensor
from agentrl.algorithms.policy import PolicyGradient


class ReinforcePlusPlus(PolicyGradient):
    """Discounted returns of token rewards (`ops.returns`), whitened over the rollout's trained tokens.

    One sample a prompt is enough.
    """

    name = "reinforce_plus_plus"
    takes = PolicyGradient.takes | {"gamma"}
    whitened = True

    def advantages(self, inputs: AdvantageInputs) -> Tensor:
        settings = self.settings
        return ops.returns.discounted_returns(
            ops.returns.token_rewards(inputs, settings.kl_coef), inputs, settings.gamma
        )
