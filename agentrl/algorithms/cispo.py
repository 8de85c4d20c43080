"""CISPO: the importance weight is clipped and not the gradient (MiniMax-M1, arXiv:2506.13585, eq. 4 and 5)."""

from __future__ import annotations

import math

from agentrl.algorithms.base import TokenLoss, TokenView, need
from agentrl.algorithms.grpo import GRPO


class CISPO(GRPO):
    """GRPO's advantages; every token keeps a gradient, weighed by its clipped ratio.

    The paper has no bound from below (`eps_clip` of 1 or more) and tunes `eps_clip_high`.
    """

    name = "cispo"
    takes = GRPO.takes - {"eps_clip_c"}
    highest_eps_clip = math.inf

    def surrogate(self, view: TokenView) -> TokenLoss:
        from agentrl.algorithms.ops.clipping import clipped_weight_loss

        old = need(view.old_log_probs, "old_log_probs", self.name)
        low, high = self.settings.eps_clip, self.settings.eps_clip_high
        advantages = need(view.advantages, "advantages", self.name)
        high = low if high is None else high
        return clipped_weight_loss(view.log_probs, old, advantages, eps_clip=low, eps_clip_high=high)
