"""An algorithm of one's own, given by path: GSPO's ratio, of whole samples (arXiv:2507.18071, eq. 7)."""

import torch

from agentrl.algorithms import TokenLoss, TokenView
from agentrl.algorithms.grpo import GRPO
from agentrl.algorithms.ops.clipping import policy_loss


class SequenceRatio(GRPO):
    name = "sequence_ratio"

    def surrogate(self, view: TokenView) -> TokenLoss:
        assert view.old_log_probs is not None
        assert view.advantages is not None
        log_ratio = view.mean_over_sample(view.log_probs - view.old_log_probs)
        return policy_loss(log_ratio, torch.zeros_like(log_ratio), view.advantages, eps_clip=0.5)
