"""Log-probs and entropy of next-token distributions from whole (unsharded) logits, in float32 or wider."""

import torch
from torch import Tensor


def log_probs_from_logits(logits: Tensor, targets: Tensor) -> Tensor:
    """Natural-log probability of `targets` [...] under `logits` [..., V]; differentiable."""
    logits = _at_least_float32(logits)
    chosen = logits.gather(-1, targets.long().unsqueeze(-1)).squeeze(-1)
    return chosen - logits.logsumexp(-1)


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Shannon entropy in nats of softmax(logits): [..., V] -> [...]; logits of -inf (banned tokens) count 0."""
    log_p = _at_least_float32(logits).log_softmax(-1)
    return -(log_p.exp() * log_p.clamp(min=-1e4)).sum(-1)  # p is 0 long before, and 0 times infinity would be NaN


def _at_least_float32(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
