"""`PolicyGradient`: the clipped policy gradient with KL and entropy terms, which most algorithms share. A subclass
defines `advantages`, and `surrogate` if its policy term differs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from agentrl.algorithms import ops
from agentrl.algorithms.algorithm import Algorithm
from agentrl.algorithms.base import Computed, SampleView, Tensor, TokenLoss, TokenView, need
from agentrl.algorithms.fields import AlgorithmFields
from agentrl.algorithms.own import own_loss

ENTROPY_CONTROL = frozenset(
    {"entropy_control", "covariance_ratio", "covariance_low", "covariance_high", "covariance_kl_coef"}
)
"""The settings of `ops.entropy.chosen_tokens`."""


class PolicyGradient(Algorithm):
    """Loss per token: surrogate * importance weight + kl_loss_coef * KL(policy || reference) - entropy_coef * entropy.
    `use_unbiased_kl` multiplies the KL by the ratio to the old policy, with its gradient (arXiv:2512.02556)."""

    takes = frozenset(
        {"normalize_advantages", "eps_clip", "eps_clip_high", "eps_clip_c", "use_rollout_logprobs"}
        | {"use_kl_loss", "kl_loss_coef", "kl_loss_type", "use_unbiased_kl", "entropy_coef"}
        | {"kl_coef", "overlong_buffer_len", "overlong_penalty_factor", "custom_loss_function_path"}
        | {"use_opd", "opd_type", "opd_kl_coef"}
        | {"entropy_target", "entropy_coef_step", "entropy_coef_max"}
        | {"use_tis", "tis_clip", "tis_clip_low", "tis_level", "tis_mode", "custom_tis_function_path"}
        | {"use_rs", "rs_level", "rs_lower_bound", "rs_upper_bound", "rs_veto_threshold", "use_opsm", "opsm_delta"}
        | ENTROPY_CONTROL
    )

    highest_eps_clip: ClassVar[float] = 1.0
    """`eps_clip` must be below this number."""

    @property
    def distills(self) -> bool:
        return self.settings.use_opd

    @property
    def reads(self) -> frozenset[Computed]:
        found: set[Computed] = {"old_log_probs", "teacher_log_probs"} if self.distills else set()
        if self.settings.entropy_control != "none" or self.settings.entropy_target is not None:
            found |= {"old_log_probs"}
        if self.settings.kl_coef:
            found |= {"old_log_probs", "ref_log_probs"}
        return frozenset(found | {"ref_log_probs"} if self.settings.use_kl_loss else found)

    def unused_settings(self) -> list[str]:
        found, s = super().unused_settings(), self.settings
        if not self.distills:
            lonely = {"opd_type": s.opd_type, "opd_kl_coef": None if s.opd_kl_coef == 1 else s.opd_kl_coef}
            why = "has no effect without use_opd; set use_opd, or leave this setting out"
            found += [f"{name} {value} {why}" for name, value in lonely.items() if value is not None]
        return found

    def problems(self) -> list[str]:
        if self.settings.custom_loss_function_path:
            return []  # it may read any setting
        wide = f"eps_clip {self.settings.eps_clip} would not bound the ratio from below; use less than 1"
        return self.unused_settings() + ([wide] if self.settings.eps_clip >= self.highest_eps_clip else [])

    def adapted(self, metrics: Mapping[str, float]) -> tuple[Self, Self]:
        """See `Algorithm.adapted`. `entropy_coef` rises by a step after a rollout whose `sampled_entropy` is below
        `entropy_target`, else falls. It is 0 in rollouts above the target (Skywork-OR1, arXiv:2505.22312, 3.2.5)."""
        s, entropy = self.settings, metrics.get("sampled_entropy")
        if s.entropy_target is None or entropy is None:
            return self, self
        moved = s.entropy_coef + (s.entropy_coef_step if entropy < s.entropy_target else -s.entropy_coef_step)
        now = s.entropy_coef if entropy <= s.entropy_target else 0.0
        later = min(max(moved, 0.0), s.entropy_coef_max)
        return self.with_settings({"entropy_coef": now}), self.with_settings({"entropy_coef": later})

    @property
    def state(self) -> Mapping[str, float]:
        return {} if self.settings.entropy_target is None else {"entropy_coef": self.settings.entropy_coef}

    def surrogate(self, view: TokenView) -> TokenLoss:
        """Compute the policy term; by default PPO's, see `ops.clipping.policy_loss`."""
        clips = {name: getattr(self.settings, name) for name in ("eps_clip", "eps_clip_high", "eps_clip_c")}
        return ops.clipping.policy_loss(view.log_probs, view.old_log_probs, view.advantages, **clips)

    def token_loss(self, view: TokenView) -> TokenLoss:
        """Compute the loss. Statistics: those of `surrogate` and `correct`, `pg_loss`, `entropy`, `kl_loss` if used.
        With `custom_loss_function_path`, that function alone computes loss and statistics."""
        if self.settings.custom_loss_function_path:
            return own_loss(view, self.settings)
        settings, corrected = self.settings, ops.corrections.correct(view, self.settings)
        seen = corrected.view
        policy = self.surrogate(seen)
        loss = policy.loss * corrected.weights
        stats = {**policy.stats, **corrected.stats}
        if seen.chosen is not None:
            stats["entropy_controlled"] = seen.chosen
            if settings.entropy_control == "clip":
                loss = loss.masked_fill(seen.chosen > 0, 0)
            else:
                coef = settings.covariance_kl_coef
                loss = loss + ops.entropy.penalty(seen.log_probs, seen.old_log_probs, seen.chosen, coef)
        if view.amend is not None:
            loss, seen, more = view.amend(seen, loss)
            stats |= more
        stats["pg_loss"] = loss.detach()
        if settings.use_kl_loss:
            reference = need(seen.ref_log_probs, "ref_log_probs", "use_kl_loss")
            unbiased = settings.use_unbiased_kl
            weight = ops.clipping.log_ratio_of(seen.log_probs, seen.old_log_probs).exp() if unbiased else None
            kl = ops.kl.approximate_kl(seen.log_probs, reference, settings.kl_loss_type, weight=weight)
            loss = loss + settings.kl_loss_coef * kl
            stats["kl_loss"] = kl.detach()
        if settings.entropy_coef:
            loss = loss - settings.entropy_coef * seen.entropy
        stats["entropy"] = view.entropy.detach()
        return TokenLoss(loss, stats)


Estimator = Callable[[SampleView, "AlgorithmFields"], Tensor]
"""A user's function that returns the advantages [N] of a whole rollout's response tokens."""


@dataclass(frozen=True)
class Estimated(PolicyGradient):
    """The policy gradient with advantages from a user's function, which may read any setting."""

    estimator: Estimator
    name = "a custom estimator"

    def advantages(self, inputs: SampleView) -> Tensor:
        return self.estimator(inputs, self.settings)

    def unused_settings(self) -> list[str]:
        return []


class PPO(PolicyGradient):
    """GAE over the steps of a sample, with `gamma` and `lambd`; token rewards and steps are those of `ops.returns`."""

    name = "ppo"
    takes = PolicyGradient.takes | {"gamma", "lambd", "value_clip"}

    @property
    def reads(self) -> frozenset[Computed]:
        return super().reads | {"values"}

    def advantages(self, inputs: SampleView) -> Tensor:
        settings, values = self.settings, need(inputs.values, "values", self.name)
        rewards = ops.returns.token_rewards(inputs, settings.kl_coef)
        return ops.returns.generalized_advantages(rewards, values, inputs, settings.gamma, settings.lambd)


class ReinforcePlusPlus(PolicyGradient):
    """Discounted returns of token rewards (`ops.returns`), whitened over the rollout. One sample a prompt is enough."""

    name = "reinforce_plus_plus"
    takes = PolicyGradient.takes | {"gamma"}
    whitened = True

    def advantages(self, inputs: SampleView) -> Tensor:
        rewards = ops.returns.token_rewards(inputs, self.settings.kl_coef)
        return ops.returns.discounted_returns(rewards, inputs, self.settings.gamma)


class OnPolicyDistillation(PolicyGradient):
    """A_t = -opd_kl_coef * (log p_student - log p_teacher), see `ops.kl`: no rewards, no groups. slime's equivalent is
    grpo with use_opd and rewards of 0."""

    name = "on_policy_distillation"
    takes = PolicyGradient.takes - {"kl_coef", "overlong_buffer_len", "overlong_penalty_factor"}
    needs_rewards = False
    distills = True

    def advantages(self, inputs: SampleView) -> Tensor:
        """Return zeros. `compute_advantages` adds the teacher's term, as for every algorithm that `distills`."""
        return inputs.loss_mask.double() * 0
