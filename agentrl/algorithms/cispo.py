"""CISPO: the importance weight is clipped and not the gradient (MiniMax-M1, arXiv:2506.13585, eq. 4 and 5)."""

from __future__ import annotations

import math

from agentrl.algorithms import ops
from agentrl.algorithms.base import TokenLoss, TokenView
from agentrl.algorithms.grpo import GRPO


class CISPO(GRPO):
    """GRPO's advantages; every token keeps a gradient, weighed by its clipped ratio.

    The paper has no bound from below (`eps_clip` of 1 or more) and tunes `eps_clip_high`.
    """

    name = "cispo"
    takes = GRPO.takes - {"eps_clip_c"}
    highest_eps_clip = math.inf

    def surrogate(self, view: TokenView) -> TokenLoss:
        low, high = self.settings.eps_clip, self.settings.eps_clip_high
        clips = {"eps_clip": low, "eps_clip_high": low if high is None else high}
        return ops.clipping.clipped_weight_loss(view.log_probs, view.old_log_probs, view.advantages, **clips)
