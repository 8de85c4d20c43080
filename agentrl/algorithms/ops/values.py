"""The loss of a critic."""

import torch
from torch import Tensor

from agentrl.algorithms.base import TokenLoss


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float) -> TokenLoss:
    """The larger of (value - return)^2 and the same with the value held within `clip` of its old one, a token.

    Clipping of values is that of PPO's code (OpenAI baselines; not in arXiv:1707.06347); as in slime there is no
    factor 1/2. A value that moved further than `clip` towards its return has no gradient.

    Args:
        values: [N], with gradient.
        old_values, returns: [N].

    Returns:
        loss [N], and the statistics `value_loss` and `value_clipfrac` (1 where a value moved further than `clip`).
    """
    old, target = old_values.detach(), returns.detach()
    held = old + (values - old).clamp(-clip, clip)
    loss = torch.maximum((values - target).square(), (held - target).square())
    moved = ((values - old).abs() > clip).to(loss.dtype)
    return TokenLoss(loss, {"value_loss": loss.detach(), "value_clipfrac": moved.detach()})
