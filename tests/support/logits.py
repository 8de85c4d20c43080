"""Log-probs and entropies of whole logits, as an independent reference."""

import torch
from torch import Tensor


def log_probs_from_logits(logits: Tensor, targets: Tensor) -> Tensor:
    """Natural-log probability of `targets` [...] under `logits` [..., V]; differentiable."""
    return logits.log_softmax(-1).gather(-1, targets.long().unsqueeze(-1)).squeeze(-1)


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Shannon entropy in nats of softmax(logits): [..., V] -> [...]."""
    entropy: Tensor = torch.distributions.Categorical(logits=logits).entropy()
    return entropy
