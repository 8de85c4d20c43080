"""Control of the policy's entropy by tokens of high covariance (arXiv:2505.22617). They are chosen once per rollout,
before its first step, so that every parallel layout chooses the same tokens."""

import torch
from torch import Tensor

from agentrl.algorithms.base import SampleView, need
from agentrl.algorithms.fields import AlgorithmFields
from agentrl.algorithms.ops.clipping import log_ratio_of

NUMERICS = 1e-4  # largest log-ratio that may be rounding between two passes: it must give no gradient


def covariances(log_probs: Tensor, advantages: Tensor) -> Tensor:
    """Return (log-prob - mean) * (advantage - mean) of N tokens, float64 (eq. 10). Entropy falls by their mean."""
    logs, credit = log_probs.double(), advantages.double()
    return (logs - logs.mean()) * (credit - credit.mean())


def chosen_tokens(inputs: SampleView, advantages: Tensor, settings: AlgorithmFields) -> Tensor:
    """Choose the tokens that `entropy_control` acts on, as [N] of 0 and 1, by old log-probs and final `advantages` [N].

    `kl`: the share `covariance_ratio` of the trained tokens with the highest covariance (eq. 13). `clip`: the same
    number, drawn from the tokens with a covariance in [`covariance_low`, `covariance_high`] (eq. 11). At least one
    token is chosen, if there is one. The draw is seeded by the rollout's tokens, so every rank draws the same."""
    old = need(inputs.old_log_probs, "old_log_probs", "entropy_control")
    trained = inputs.loss_mask.nonzero().flatten()
    chosen = torch.zeros_like(inputs.loss_mask, dtype=torch.float32)
    if not len(trained):
        return chosen
    found = covariances(old[trained], advantages[trained])
    count = max(int(settings.covariance_ratio * len(trained)), 1)
    if settings.entropy_control == "kl":
        best = found.sort(descending=True, stable=True).indices
    else:
        inside = ((found >= settings.covariance_low) & (found <= settings.covariance_high)).nonzero().flatten()
        seed = int(need(inputs.tokens, "tokens", "entropy_control clip").sum())
        draw = torch.randperm(len(inside), generator=torch.Generator().manual_seed(seed))
        best = inside[draw.to(inside.device)]
    chosen[trained[best[:count]]] = 1.0
    return chosen


def penalty(log_probs: Tensor, old_log_probs: Tensor, chosen: Tensor, coef: float) -> Tensor:
    """Compute kl-cov's term [N] (eq. 14): coef * |log-prob - old log-prob| at chosen tokens; 0 within `NUMERICS`."""
    apart = log_ratio_of(log_probs, old_log_probs).abs()
    return coef * chosen * torch.where(apart > NUMERICS, apart, 0.0)


def sampled_entropy(inputs: SampleView) -> float:
    """Return the mean of -old log-prob over trained tokens: the old policy's estimated entropy, in nats per token."""
    old = need(inputs.old_log_probs, "old_log_probs", "entropy_target")[inputs.loss_mask > 0]
    return float(-old.double().mean()) if len(old) else 0.0
