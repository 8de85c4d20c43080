"""REINFORCE++: discounted returns, whitened over the rollout in place of a critic (arXiv:2501.03262)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentrl.algorithms.base import AdvantageInputs
from agentrl.algorithms.policy import ONE_EACH, TOKEN_REWARDS, PolicyGradient

if TYPE_CHECKING:
    from torch import Tensor


class ReinforcePlusPlus(PolicyGradient):
    """Discounted returns of token rewards (`ops.returns`), whitened over the rollout's trained tokens.

    One sample a prompt is enough.
    """

    name = "reinforce_plus_plus"
    takes = PolicyGradient.takes | {"gamma"}
    hints = TOKEN_REWARDS | {"value_clip": ONE_EACH["value_clip"]}
    whitened = True

    def advantages(self, inputs: AdvantageInputs) -> Tensor:
        from agentrl.algorithms.ops.returns import discounted_returns, token_rewards

        settings = self.settings
        return discounted_returns(token_rewards(inputs, settings.kl_coef), inputs, settings.gamma)
