"""Losses that clip, gate or mask: the policy gradient in several forms, and a critic's."""

from typing import Literal

import torch
from torch import Tensor

from agentrl.algorithms.base import TokenLoss

MAX_LOG_RATIO = 20.0  # bound of |log ratio| before exp: far outside every clip range, and finite in fp32


def log_ratio_of(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """Return log_probs - old_log_probs, clamped to `MAX_LOG_RATIO`. Only `log_probs` has a gradient."""
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
    """Compute the clipped policy-gradient loss [N] per token; `log_probs` [N] has a gradient.

    With ratio = exp(log_probs - old_log_probs) and A the advantage, loss = max(-ratio * A, -clip(ratio, 1 - eps_clip, 1
    + eps_clip_high) * A) (PPO, arXiv:1707.06347; a wider upper bound is DAPO's clip-higher, arXiv:2503.14476). With
    `eps_clip_c` the loss of a token with A < 0 is at most -eps_clip_c * A (dual clip, arXiv:1912.09729).

    The statistics are `ratio`, `ppo_kl` (the k1 estimate of KL(old || new)), and four that are 1 for tokens without a
    gradient: `pg_clipfrac_low`, `pg_clipfrac_high`, `pg_clipfrac` (low or high, as in slime) and `pg_clipfrac_dual`
    (dual clip, which `pg_clipfrac` does not count)."""
    high = eps_clip if eps_clip_high is None else eps_clip_high
    log_ratio = log_ratio_of(log_probs, old_log_probs)
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
    """Compute CISPO's loss [N] per token: -clip(ratio, 1 - eps_clip, 1 + eps_clip_high) * A * log_probs, with the
    weight detached. The statistics are `ratio`, `ppo_kl` and `pg_clipfrac` (1 where the weight is clipped; the
    gradient is not 0 there)."""
    log_ratio = log_ratio_of(log_probs.detach(), old_log_probs)
    ratio = log_ratio.exp()
    weight = ratio.clamp(max(1 - eps_clip, 0.0), 1 + eps_clip_high)
    hit = (weight != ratio).to(ratio.dtype)
    return TokenLoss(-weight * advantages * log_probs, {"ratio": ratio, "ppo_kl": -log_ratio, "pg_clipfrac": hit})


def soft_gate_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, positive: float, negative: float
) -> TokenLoss:
    """Compute SAPO's loss [N] per token (arXiv:2511.20347): -sigmoid(tau * (ratio - 1)) * 4 / tau * A, with tau `positive`
    for A > 0 and `negative` otherwise. The statistics are `ratio`, `ppo_kl` and `sapo_gate`: 4 p (1 - p), with p the
    sigmoid. It is the gradient relative to that of -ratio * A."""
    log_ratio = log_ratio_of(log_probs, old_log_probs)
    ratio = log_ratio.exp()
    tau = torch.where(advantages > 0, positive, negative).to(ratio.dtype)
    gate = torch.sigmoid(tau * (ratio - 1))
    held = gate.detach()
    stats = {"ratio": ratio.detach(), "ppo_kl": -log_ratio.detach(), "sapo_gate": 4 * held * (1 - held)}
    return TokenLoss(-gate * 4 / tau * advantages, stats)


def divergence_masked_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, kind: Literal["tv", "kl"], threshold: float
) -> TokenLoss:
    """Compute DPPO's loss [N] per token (arXiv:2602.04879): -ratio * A, and 0 where the token moved away from the old
    policy in the direction of its advantage (ratio above 1 and A > 0, or below 1 and A < 0) with a divergence above `threshold`.

    With p and q the old and new probability of the token, the divergence is |p - q| (`tv`, total variation), or
    p log(p / q) + (1 - p) log((1 - p) / (1 - q)) (`kl`). The statistics are `ratio`, `ppo_kl`, `dppo_divergence` and
    `pg_clipfrac` (1 where the loss is masked)."""
    log_ratio = log_ratio_of(log_probs, old_log_probs)
    ratio, moved = log_ratio.exp(), log_ratio.detach()
    old, new = old_log_probs.detach().double().exp(), log_probs.detach().double().exp()
    if kind == "tv":
        divergence = (old - new).abs()
    else:
        tiny = torch.finfo(torch.float64).tiny
        rest = (1 - old) * ((1 - old).clamp(min=tiny).log() - (1 - new).clamp(min=tiny).log())
        divergence = rest - old * moved.double()
    hit = (moved * advantages > 0) & (divergence > threshold)
    stats = {"ratio": ratio.detach(), "ppo_kl": -moved, "dppo_divergence": divergence.to(ratio.dtype)}
    stats["pg_clipfrac"] = hit.to(ratio.dtype)
    return TokenLoss(torch.where(hit, torch.zeros_like(ratio), -ratio * advantages), stats)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float) -> TokenLoss:
    """Compute max((value - return)^2, (clipped value - return)^2) [N]. A clipped value is within `clip` of its old one.

    Clipping of values is that of PPO's code (OpenAI baselines; not in arXiv:1707.06347); as in slime there is no factor
    1/2. A value that moved further than `clip` has no gradient if it is nearer to its return. The statistics are `value_loss` and
    `value_clipfrac` (1 where a value moved further than `clip`)."""
    old, target = old_values.detach(), returns.detach()
    held = old + (values - old).clamp(-clip, clip)
    loss = torch.maximum((values - target).square(), (held - target).square())
    moved = ((values - old).abs() > clip).to(loss.dtype)
    return TokenLoss(loss, {"value_loss": loss.detach(), "value_clipfrac": moved.detach()})
