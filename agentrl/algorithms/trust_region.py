"""Estimators with GRPO's advantages and a trust region other than the clipped per-token ratio."""

import math

from agentrl.algorithms import ops
from agentrl.algorithms.base import TokenLoss, TokenView
from agentrl.algorithms.group_relative import GRPO
from agentrl.algorithms.policy import ENTROPY_CONTROL

_CLIPS = frozenset({"eps_clip", "eps_clip_high", "eps_clip_c"})


class SAPO(GRPO):
    """A soft gate in place of the clip (arXiv:2511.20347): loss = -f(ratio) * A with f(r) = sigmoid(tau * (r - 1)) * 4
    / tau, where tau is `sapo_tau_positive` for A > 0 and `sapo_tau_negative` otherwise. At ratio 1 the gradient is the
    unclipped policy gradient's; far from 1 it vanishes smoothly."""

    name = "sapo"
    takes = (GRPO.takes - _CLIPS) | {"sapo_tau_positive", "sapo_tau_negative"}

    def surrogate(self, view: TokenView) -> TokenLoss:
        taus = {"positive": self.settings.sapo_tau_positive, "negative": self.settings.sapo_tau_negative}
        return ops.clipping.soft_gate_loss(view.log_probs, view.old_log_probs, view.advantages, **taus)


class DPPO(GRPO):
    """Tokens are masked by a divergence of their distributions instead of the ratio's size (arXiv:2602.04879). The
    distributions are binary, the sampled token against all others (eq. 13 and 14), so two probabilities suffice. A
    token that moved further than `dppo_threshold` in the direction of its advantage has no gradient (eq. 12). The old
    policy is the sampling policy (section 5.2)."""

    name = "dppo"
    anchored_at_rollout = True
    takes = (GRPO.takes - _CLIPS) | {"dppo_divergence", "dppo_threshold"}

    def surrogate(self, view: TokenView) -> TokenLoss:
        kind, given = self.settings.dppo_divergence, self.settings.dppo_threshold
        threshold = {"tv": 0.15, "kl": 0.05}[kind] if given is None else given
        tensors = view.log_probs, view.old_log_probs, view.advantages
        return ops.clipping.divergence_masked_loss(*tensors, kind=kind, threshold=threshold)


class GMPO(GRPO):
    """The geometric mean of a sample's ratios in place of the arithmetic mean (arXiv:2507.20673): loss = -A * exp(mean
    of log ratios), over trained tokens. A token's log ratio is bounded by `eps_clip` in the direction of the advantage;
    the paper uses 0.4. With one token a sample it is the clipped policy gradient, with bound exp(eps_clip)."""

    name = "gmpo"
    takes = GRPO.takes - {"turn_credit", "eps_clip_high", "eps_clip_c"} - ENTROPY_CONTROL
    highest_eps_clip = math.inf

    def surrogate(self, view: TokenView) -> TokenLoss:
        sign, bound = view.advantages.sign(), self.settings.eps_clip
        log_ratio = ops.clipping.log_ratio_of(view.log_probs, view.old_log_probs)
        towards = sign * log_ratio
        ratio = view.mean_over_sample(sign * towards.clamp(max=bound)).exp()
        hit = (towards.detach() > bound).to(ratio.dtype)
        stats = {"ratio": ratio.detach(), "ppo_kl": -log_ratio.detach(), "pg_clipfrac": hit}
        return TokenLoss(-view.advantages * ratio, stats)
