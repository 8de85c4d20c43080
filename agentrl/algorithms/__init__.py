"""Advantages, losses, KL estimators and loss aggregation: pure tensor functions that import no other room.

Names load lazily: importing this package or its `settings` does not import torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl.algorithms.advantages import AdvantageInputs, Estimator, compute_advantages, get_estimator
    from agentrl.algorithms.aggregation import token_weights
    from agentrl.algorithms.entropy import entropy_from_logits, log_probs_from_logits
    from agentrl.algorithms.kl import approximate_kl
    from agentrl.algorithms.losses import TokenInputs, TokenLoss, policy_loss, sft_loss, token_loss
    from agentrl.algorithms.settings import AlgorithmSettings

_HOMES = {
    "AdvantageInputs": "advantages",
    "AlgorithmSettings": "settings",
    "Estimator": "advantages",
    "TokenInputs": "losses",
    "TokenLoss": "losses",
    "approximate_kl": "kl",
    "compute_advantages": "advantages",
    "entropy_from_logits": "entropy",
    "get_estimator": "advantages",
    "log_probs_from_logits": "entropy",
    "policy_loss": "losses",
    "sft_loss": "losses",
    "token_loss": "losses",
    "token_weights": "aggregation",
}

__all__ = [
    "AdvantageInputs",
    "AlgorithmSettings",
    "Estimator",
    "TokenInputs",
    "TokenLoss",
    "approximate_kl",
    "compute_advantages",
    "entropy_from_logits",
    "get_estimator",
    "log_probs_from_logits",
    "policy_loss",
    "sft_loss",
    "token_loss",
    "token_weights",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"agentrl.algorithms.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'agentrl.algorithms' has no attribute {name!r}")
