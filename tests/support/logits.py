"""Log-probs and entropies from whole logits, as an independent reference."""

from torch import Tensor


def log_probs_from_logits(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the natural-log probability of `targets` [...] under `logits` [..., V]; differentiable."""
    return logits.log_softmax(-1).gather(-1, targets.long().unsqueeze(-1)).squeeze(-1)


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Return the Shannon entropy in nats of softmax(logits): [..., V] -> [...]."""
    log_p = logits.log_softmax(-1)
    return -(log_p.exp() * log_p.clamp(min=-1e4)).sum(-1)  # p underflows to 0 before; 0 times infinity would be NaN
