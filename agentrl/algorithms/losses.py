"""Per-token losses.

1. Every function maps flat per-token tensors [N] to a per-token loss [N]; nothing is reduced here.
   `aggregation.token_weights` says what each token counts, so a step's loss is `(loss * weights).sum()`.
2. Statistics are per-token and detached, so the caller can reduce them with the same weights.
3. Tokens that are not trained may hold any log-probs: log-ratios are bounded, so weight 0 never meets infinity.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algorithms.kl import approximate_kl
from agentrl.algorithms.settings import AlgorithmSettings
from agentrl.errors import TrainError

MAX_LOG_RATIO = 20.0
"""|log ratio| is bounded by this before exp: e^20 is far outside every clip range and still finite in fp32."""


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """A per-token loss [N] with its per-token statistics (each [N], detached)."""

    loss: Tensor
    stats: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class TokenInputs:
    """What a loss may read, all flat over the same N tokens and in natural-log units.

    Attributes:
        log_probs: under the model being trained, with gradient.
        old_log_probs: under the policy that the ratio is taken against (trainer's own pass, or the engine's).
        advantages: one per token.
        ref_log_probs: under the reference model; needed with `use_kl_loss`.
        entropy: of the model's next-token distribution, with gradient; needed with `entropy_coef`.
    """

    log_probs: Tensor
    old_log_probs: Tensor | None = None
    advantages: Tensor | None = None
    ref_log_probs: Tensor | None = None
    entropy: Tensor | None = None


def token_loss(settings: AlgorithmSettings, inputs: TokenInputs) -> TokenLoss:
    """The loss that the settings ask for: `loss_type`, clipping, KL term and entropy bonus.

    Statistics for policy_loss are those of `policy_loss` plus `pg_loss`, and where they apply `kl_loss` and
    `entropy`; for sft_loss those of `sft_loss`.

    Raises:
        TrainError: an input that the settings need is missing.
    """
    if settings.loss_type == "sft_loss":
        return sft_loss(inputs.log_probs)
    policy = policy_loss(
        inputs.log_probs,
        _need(inputs.old_log_probs, "old_log_probs", "policy_loss"),
        _need(inputs.advantages, "advantages", "policy_loss"),
        eps_clip=settings.eps_clip,
        eps_clip_high=settings.eps_clip_high,
        eps_clip_c=settings.eps_clip_c,
    )
    loss, stats = policy.loss, {**policy.stats, "pg_loss": policy.loss.detach()}
    if settings.use_kl_loss:
        reference = _need(inputs.ref_log_probs, "ref_log_probs", "use_kl_loss")
        kl = approximate_kl(inputs.log_probs, reference, settings.kl_loss_type)
        loss = loss + settings.kl_loss_coef * kl
        stats["kl_loss"] = kl.detach()
    if settings.entropy_coef:
        loss = loss - settings.entropy_coef * _need(inputs.entropy, "entropy", "entropy_coef")
    if inputs.entropy is not None:
        stats["entropy"] = inputs.entropy.detach()
    return TokenLoss(loss, stats)


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    eps_clip: float = 0.2,
    eps_clip_high: float | None = None,
    eps_clip_c: float | None = None,
) -> TokenLoss:
    """The clipped policy-gradient loss per token.

    With ratio = exp(log_probs - old_log_probs) and A the advantage,
    loss = max(-ratio * A, -clip(ratio, 1 - eps_clip, 1 + eps_clip_high) * A) (PPO, arXiv:1707.06347; a wider upper
    bound is DAPO's clip-higher, arXiv:2503.14476). With `eps_clip_c` the loss of a token with A < 0 is at most
    -eps_clip_c * A (dual clip, arXiv:1912.09729).

    Args:
        log_probs: [N], with gradient.
        old_log_probs: [N].
        advantages: [N].

    Returns:
        loss [N], and the statistics `ratio`, `ppo_kl` (the k1 estimate of KL(old || new)), `pg_clipfrac_low`,
        `pg_clipfrac_high`, `pg_clipfrac_dual` (1 where that bound is in force and stops the gradient) and
        `pg_clipfrac` (any of them).
    """
    high = eps_clip if eps_clip_high is None else eps_clip_high
    log_ratio = (log_probs - old_log_probs.detach()).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
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
        "pg_clipfrac": low_hit + high_hit + dual.detach(),
    }
    return TokenLoss(loss, stats)


def sft_loss(log_probs: Tensor) -> TokenLoss:
    """Negative log-likelihood per token; the statistic `nll` is the same number, detached."""
    loss = -log_probs
    return TokenLoss(loss, {"nll": loss.detach()})


def _need(tensor: Tensor | None, name: str, why: str) -> Tensor:
    if tensor is None:
        raise TrainError(f"{why} needs {name}, but the trainer passed none")
    return tensor
