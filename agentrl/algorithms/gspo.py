"""GSPO: the ratio and its clipping are those of whole samples (arXiv:2507.18071, eq. 5 to 7)."""

from __future__ import annotations

from dataclasses import replace

from agentrl.algorithms.base import TokenLoss, TokenView
from agentrl.algorithms.grpo import GRPO


class GSPO(GRPO):
    """GRPO's advantages; the ratio is exp of the mean of log-prob - old log-prob over a sample's trained tokens.

    A trajectory that fanned out has a ratio for each of its samples. The paper clips at 3e-4 from below and 4e-4 from
    above, since a mean moves far less than a token.
    """

    name = "gspo"
    takes = GRPO.takes - {"turn_credit"}

    def surrogate(self, view: TokenView) -> TokenLoss:
        log_ratio = view.mean_over_sample(view.log_probs - view.old_log_probs)
        old = log_ratio.new_zeros(log_ratio.shape)
        return super().surrogate(replace(view, log_probs=log_ratio, old_log_probs=old))
