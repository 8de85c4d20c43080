"""A loss of one's own on the advantages of an estimator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from agentrl.algorithms.algorithm import Algorithm
from agentrl.algorithms.base import AdvantageInputs, Computed, TokenLoss, TokenView
from agentrl.algorithms.own import own_loss

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class CustomLoss(Algorithm):
    """`custom_loss_function_path` in place of the estimator's loss; its KL and entropy terms are left out with it.

    The function may read any setting.
    """

    estimator: Algorithm
    name = "custom_loss"
    takes = frozenset()

    @property
    def origin(self) -> str:
        return f"--custom-loss-function-path {self.settings.custom_loss_function_path}"

    @property
    def reads(self) -> frozenset[Computed]:
        return self.estimator.reads

    @property
    def compares_within_group(self) -> bool:
        return self.estimator.compares_within_group

    @property
    def whitens(self) -> bool:
        return self.estimator.whitens

    def advantages(self, inputs: AdvantageInputs) -> Tensor:
        return self.estimator.advantages(inputs)

    def token_loss(self, view: TokenView) -> TokenLoss:
        return own_loss(view, self.settings)

    def unused_settings(self) -> list[str]:
        return []
