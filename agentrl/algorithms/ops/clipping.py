"""Losses that clip: the policy gradient, that with a clipped weight, and a critic's."""

import torch
from torch import Tensor

from agentrl.algorithms.base import TokenLoss

MAX_LOG_RATIO = 20.0
"""|log ratio| is bounded by this before exp: e^20 is far outside every clip range and still finite in fp32."""


def ratio_of(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """exp(log_probs - old_log_probs), with gradient in the first; the difference is bounded by `MAX_LOG_RATIO`."""
    return _log_ratio(log_probs, old_log_probs).exp()


def _log_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    return (log_probs - old_log_probs.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    eps_clip: float = 0.2,
    eps_clip_high: float | None = None,
    eps_clip_c: float | None = None,
) -> TokenLoss:
    """The clipped policy-gradient loss [N] per token, of `log_probs` [N] with gradient.

    With ratio = exp(log_probs - old_log_probs) and A the advantage, loss = max(-ratio * A, -clip(ratio, 1 - eps_clip, 1
    + eps_clip_high) * A) (PPO, arXiv:1707.06347; a wider upper bound is DAPO's clip-higher, arXiv:2503.14476). With
    `eps_clip_c` the loss of a token with A < 0 is at most -eps_clip_c * A (dual clip, arXiv:1912.09729).

    The statistics are `ratio`, `ppo_kl` (the k1 estimate of KL(old || new)), `pg_clipfrac_low`, `pg_clipfrac_high`,
    `pg_clipfrac` (either of them, as in slime) and apart from these `pg_clipfrac_dual` (1 where that bound is in
    force); each marks tokens without a gradient.
    """
    high = eps_clip if eps_clip_high is None else eps_clip_high
    log_ratio = _log_ratio(log_probs, old_log_probs)
    ratio = log_ratio.exp()
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1 - eps_clip, 1 + high) * advantages
    loss = torch.maximum(unclipped, clipped)
    dual = torch.zeros_like(loss)
    if eps_clip_c is not None:
        bound = -eps_clip_c * advantages
        dual = ((advantages < 0) & (loss > bound)).to(loss.dtype)
        loss = torch.where(advantages < 0, torch.minimum(loss, bound), loss)
    fixed = ratio.detach()
    low_hit = ((advantages < 0) & (fixed < 1 - eps_clip)).to(loss.dtype)
    high_hit = ((advantages > 0) & (fixed > 1 + high)).to(loss.dtype)
    stats = {
        "ratio": fixed,
        "ppo_kl": -log_ratio.detach(),
        "pg_clipfrac_low": low_hit,
        "pg_clipfrac_high": high_hit,
        "pg_clipfrac_dual": dual.detach(),
        "pg_clipfrac": low_hit + high_hit,
    }
    return TokenLoss(loss, stats)


def clipped_weight_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, eps_clip: float, eps_clip_high: float
) -> TokenLoss:
    """CISPO's loss [N] per token: -clip(ratio, 1 - eps_clip, 1 + eps_clip_high) * A * log_probs, the weight detached.
    The statistics are `ratio`, `ppo_kl` and `pg_clipfrac` (1 where the weight is a bound; the token has a gradient
    nevertheless)."""
    log_ratio = _log_ratio(log_probs.detach(), old_log_probs)
    ratio = log_ratio.exp()
    weight = ratio.clamp(max(1 - eps_clip, 0.0), 1 + eps_clip_high)
    hit = (weight != ratio).to(ratio.dtype)
    return TokenLoss(-weight * advantages * log_probs, {"ratio": ratio, "ppo_kl": -log_ratio, "pg_clipfrac": hit})


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float) -> TokenLoss:
    """The larger of (value - return)^2 and the same with the value held within `clip` of its old one, [N]; `values` [N]
    have a gradient.

    Clipping of values is that of PPO's code (OpenAI baselines; not in arXiv:1707.06347); as in slime there is no factor
    1/2. A value that moved further than `clip` towards its return has no gradient. The statistics are `value_loss` and
    `value_clipfrac` (1 where a value moved further than `clip`).
    """
    old, target = old_values.detach(), returns.detach()
    held = old + (values - old).clamp(-clip, clip)
    loss = torch.maximum((values - target).square(), (held - target).square())
    moved = ((values - old).abs() > clip).to(loss.dtype)
    return TokenLoss(loss, {"value_loss": loss.detach(), "value_clipfrac": moved.detach()})
