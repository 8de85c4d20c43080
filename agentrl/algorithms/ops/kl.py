"""Per-token estimators of KL(policy || reference) from log-probs of tokens that the policy sampled.

Source: J. Schulman, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html, with
`x ~ policy` and `log_ratio = log policy(x) - log reference(x)`:

1. k1 = log_ratio: unbiased, high variance, can be negative.
2. k2 = log_ratio^2 / 2: biased, low variance; its gradient is an unbiased gradient of the KL on-policy.
3. k3 = exp(-log_ratio) - 1 + log_ratio: unbiased, low variance, never negative. The log-ratio is bounded by -20 from
   below, where it would be 5e8 and soon infinite.
4. low_var_kl = k3 clamped to [-10, 10], so that one outlier cannot dominate a batch; a clamped token's gradient is 0.
"""

from collections.abc import Callable
from typing import Final

from torch import Tensor

from agentrl.errors import SettingsError


def k1(log_ratio: Tensor) -> Tensor:
    """log_ratio itself."""
    return log_ratio


def k2(log_ratio: Tensor) -> Tensor:
    """Half the squared log-ratio."""
    return log_ratio.square() / 2


def k3(log_ratio: Tensor) -> Tensor:
    """exp(-log_ratio) - 1 + log_ratio, with a log-ratio of at least -20."""
    bounded = log_ratio.clamp(min=-20.0)
    return (-bounded).expm1() + bounded


KL_ESTIMATORS: Final[dict[str, Callable[[Tensor], Tensor]]] = {"k1": k1, "k2": k2, "k3": k3, "low_var_kl": k3}


def approximate_kl(
    log_probs: Tensor, reference_log_probs: Tensor, kind: str = "k1", *, weight: Tensor | None = None
) -> Tensor:
    """Per-token estimate of KL(policy || reference), in nats.

    Args:
        log_probs: [...] natural-log probabilities of the sampled tokens under the policy.
        reference_log_probs: the same tokens under the reference model, same shape.
        kind: k1, k2, k3 or low_var_kl.
        weight: multiplies the estimate, before low_var_kl's clamp as in slime; same shape.

    Returns:
        Same shape and dtype as the inputs; differentiable in both.

    Raises:
        SettingsError: unknown `kind`.
    """
    if kind not in KL_ESTIMATORS:
        raise SettingsError(f"kl_loss_type must be one of {sorted(KL_ESTIMATORS)}, got {kind!r}")
    kl = KL_ESTIMATORS[kind](log_probs - reference_log_probs)
    kl = kl if weight is None else weight * kl
    return kl.clamp(-10.0, 10.0) if kind == "low_var_kl" else kl
