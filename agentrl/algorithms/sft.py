"""Supervised fine-tuning: the negative log-likelihood of the response."""

from __future__ import annotations

from agentrl.algorithms.algorithm import Algorithm
from agentrl.algorithms.base import AdvantageInputs, Tensor, TokenLoss, TokenView


class SFT(Algorithm):
    """-log p a token; the statistic `nll` is the same number, detached."""

    name = "sft_loss"
    takes = frozenset()
    supervised = True
    needs_rewards = False

    def unused_settings(self) -> list[str]:
        given = self.settings.advantage_estimator
        why = f"advantage_estimator {given} has no effect with sft_loss, which estimates no advantages; leave it out"
        return super().unused_settings() + ([why] if given != "grpo" else [])

    def advantages(self, inputs: AdvantageInputs) -> Tensor:
        """1 a token, with which the policy gradient would be this one."""
        return inputs.loss_mask.new_ones(inputs.loss_mask.shape)

    def token_loss(self, view: TokenView) -> TokenLoss:
        loss = -view.log_probs
        return TokenLoss(loss, {"nll": loss.detach()})
