"""Log-probs and entropies of whole logits, as an independent reference."""

from torch import Tensor


def log_probs_from_logits(logits: Tensor, targets: Tensor) -> Tensor:
    """Natural-log probability of `targets` [...] under `logits` [..., V]; differentiable."""
    return logits.log_softmax(-1).gather(-1, targets.long().unsqueeze(-1)).squeeze(-1)


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Shannon entropy in nats of softmax(logits): [..., V] -> [...]."""
    log_p = logits.log_softmax(-1)
    return -(log_p.exp() * log_p.clamp(min=-1e4)).sum(-1)  # p is 0 long before, and 0 times infinity would be NaN
