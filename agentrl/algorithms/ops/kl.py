"""Distance of the policy from a reference or a teacher, by log-probs of tokens that the policy sampled.

Estimators of KL(policy || reference): J. Schulman, "Approximating KL divergence",
http://joschu.net/blog/kl-approx.html, with `x ~ policy` and `log_ratio = log policy(x) - log reference(x)`:

1. k1 = log_ratio: unbiased, high variance, can be negative.
2. k2 = log_ratio^2 / 2: biased, low variance; its gradient is an unbiased gradient of the KL on-policy.
3. k3 = exp(-log_ratio) - 1 + log_ratio: unbiased, low variance, never negative. The log-ratio is clamped at -20 from
   below, where k3 is 5e8; further below, k3 would soon be infinite.
4. low_var_kl = k3 clamped to [-10, 10], so that no outlier dominates a batch; a clamped token's gradient is 0."""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from agentrl.algorithms.base import SampleView, need


def _k3(log_ratio: Tensor) -> Tensor:
    bounded = log_ratio.clamp(min=-20.0)
    return (-bounded).expm1() + bounded


_ESTIMATORS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "k1": lambda log_ratio: log_ratio,
    "k2": lambda log_ratio: log_ratio.square() / 2,
    "k3": _k3,
    "low_var_kl": _k3,
}


def approximate_kl(
    log_probs: Tensor, reference_log_probs: Tensor, kind: str = "k1", *, weight: Tensor | None = None
) -> Tensor:
    """Estimate KL(policy || reference) per token, in nats, from natural-log probabilities of the sampled tokens;
    differentiable in both. `kind` is k1, k2, k3 or low_var_kl. `weight` multiplies the estimate before the clamp."""
    kl = _ESTIMATORS[kind](log_probs - reference_log_probs)
    kl = kl if weight is None else weight * kl
    return kl.clamp(-10.0, 10.0) if kind == "low_var_kl" else kl


def reverse_kl(inputs: SampleView) -> Tensor:
    """Return log p_student (old) - log p_teacher of the sampled tokens, [N] float64, in nats; 0 if masked.

    The mean over tokens that the student sampled is the next token's KL(student || teacher), the reverse KL (K. Lu et
    al., "On-Policy Distillation", Thinking Machines Lab 2025; GKD, arXiv:2306.13649). A token's value is subtracted
    from its own advantage only, so no token gets credit for later tokens."""
    student = need(inputs.old_log_probs, "old_log_probs", "on-policy distillation").double()
    teacher = need(inputs.teacher_log_probs, "teacher_log_probs", "on-policy distillation").double()
    return torch.where(inputs.loss_mask > 0, student - teacher, 0.0)
