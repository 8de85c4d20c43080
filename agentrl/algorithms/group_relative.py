"""Estimators that compare a trajectory, or each of its turns, with the prompt's other trajectories."""

import math
from abc import abstractmethod
from dataclasses import replace

from agentrl.algorithms import ops
from agentrl.algorithms.base import SampleView, Tensor, TokenLoss, TokenView, need
from agentrl.algorithms.policy import ENTROPY_CONTROL, PolicyGradient


class GroupRelative(PolicyGradient):
    """Base of estimators that compare rewards. A subclass defines `compare`; `turn_credit` selects what is compared.

    1. none: samples, by their rewards; all tokens of a sample have the same advantage.
    2. returns: turns, by their rewards and those of later turns, discounted by `gamma` per turn. A turn is compared
       with the turns of the same number in its group. The result equals `none` if gamma is 1, only last turns have
       rewards, and all trajectories have the same number of turns.
    3. gigpo (arXiv:2505.10978): the advantage of `none`, plus `turn_credit_weight` times the turn's own. For it, the
       turn's discounted return is compared with those of the group's turns that answer the same tokens: the tokens
       shown since the model's last turn, or the prompt. A turn without such turns has 0.

    Rewards of turns are `SampleView.step_rewards`; without them, the last turn gets the sample's reward. `kl_coef`
    times the KL of the sample, or of the turn, is subtracted. Untrained turns are compared too."""

    takes = PolicyGradient.takes | {"turn_credit"}

    @abstractmethod
    def compare(self, rewards: Tensor, group_ids: Tensor, trajectory_ids: Tensor) -> Tensor:
        """Return rewards [K] relative to their group, float64; 0 for NaN. Rewards of one trajectory are one member."""

    @property
    def compares_within_group(self) -> bool:
        return True

    @property
    def taken(self) -> frozenset[str]:
        credit = self.settings.turn_credit
        return super().taken | {"none": set(), "returns": {"gamma"}, "gigpo": {"gamma", "turn_credit_weight"}}[credit]

    def advantages(self, inputs: SampleView) -> Tensor:
        settings = self.settings
        if settings.turn_credit == "returns":
            return self._of_turns(inputs)
        rewards = ops.returns.sample_rewards(inputs, settings.kl_coef)
        whole = self.compare(rewards, inputs.group_ids, inputs.trajectory_ids).repeat_interleave(inputs.lengths)
        if settings.turn_credit == "gigpo":
            whole = whole + settings.turn_credit_weight * self._of_turns(inputs)
        return whole

    def _of_turns(self, inputs: SampleView) -> Tensor:
        turns = ops.returns.Turns.of(inputs, self.settings.kl_coef)
        peers = turns.by_number if self.settings.turn_credit == "returns" else turns.by_state
        return self.compare(*peers(turns.returns(self.settings.gamma), inputs))[turns.of_token]


class GRPO(GroupRelative):
    """Group-relative advantages; without `turn_credit` the same for all tokens of a sample.

    A = (reward - mean) / (std + 1e-6) over the sample's group; without `grpo_std_normalization` only the mean is
    subtracted (Dr. GRPO, arXiv:2503.20783); without `rewards_normalization` the reward is used as it is. The reward is
    the environment's minus `kl_coef` times the sample's KL."""

    name = "grpo"
    takes = GroupRelative.takes | {"rewards_normalization", "grpo_std_normalization"}

    @property
    def compares_within_group(self) -> bool:
        return self.settings.rewards_normalization

    @property
    def taken(self) -> frozenset[str]:
        return super().taken - (set() if self.settings.rewards_normalization else {"grpo_std_normalization"})

    def compare(self, rewards: Tensor, group_ids: Tensor, trajectory_ids: Tensor) -> Tensor:
        if self.settings.rewards_normalization:
            divide = self.settings.grpo_std_normalization
            rewards = ops.normalization.group_normalize(rewards, group_ids, trajectory_ids, divide_by_std=divide)
        return rewards.nan_to_num(nan=0.0)


class GSPO(GRPO):
    """GRPO's advantages; the ratio is exp of the mean of log-prob - old log-prob over a sample's trained tokens. A
    split trajectory has a ratio for each of its samples. The paper clips at 3e-4 from below and 4e-4 from above,
    because a mean moves far less than a token."""

    name = "gspo"
    takes = GRPO.takes - {"turn_credit"} - ENTROPY_CONTROL

    def surrogate(self, view: TokenView) -> TokenLoss:
        log_ratio = view.mean_over_sample(view.log_probs - view.old_log_probs)
        old = log_ratio.new_zeros(log_ratio.shape)
        return super().surrogate(replace(view, log_probs=log_ratio, old_log_probs=old))


class CISPO(GRPO):
    """GRPO's advantages; every token keeps a gradient, weighted by its clipped ratio. The paper has no lower bound
    (`eps_clip` of 1 or more) and tunes `eps_clip_high`."""

    name = "cispo"
    takes = GRPO.takes - {"eps_clip_c"}
    highest_eps_clip = math.inf

    def surrogate(self, view: TokenView) -> TokenLoss:
        low, high = self.settings.eps_clip, self.settings.eps_clip_high
        clips = {"eps_clip": low, "eps_clip_high": low if high is None else high}
        return ops.clipping.clipped_weight_loss(view.log_probs, view.old_log_probs, view.advantages, **clips)


class RLOO(GroupRelative):
    """The baseline excludes the sample itself, so the gradient is unbiased. All its tokens have the same advantage. The
    reward is the environment's minus `kl_coef` times the sample's KL. At ratio 1 the loss is REINFORCE's."""

    name = "rloo"

    def compare(self, rewards: Tensor, group_ids: Tensor, trajectory_ids: Tensor) -> Tensor:
        how = {"divide_by_std": False, "leave_one_out": True}
        return ops.normalization.group_normalize(rewards, group_ids, trajectory_ids, **how)


class ReinforcePlusPlusBaseline(GroupRelative):
    """A sample's reward minus its group's mean, for all its tokens, whitened over the rollout's trained tokens. The
    reward is the environment's minus `kl_coef` times the sample's KL. (slime subtracts each token's own KL.)"""

    name = "reinforce_plus_plus_baseline"
    whitened = True

    def compare(self, rewards: Tensor, group_ids: Tensor, trajectory_ids: Tensor) -> Tensor:
        return ops.normalization.group_normalize(rewards, group_ids, trajectory_ids, divide_by_std=False)


class GDPO(PolicyGradient):
    """Several rewards, each compared separately in its group (arXiv:2601.05242). `gdpo_weights` names the entries of a
    dict reward, with weights. A_k = (reward k - mean) / (std + 1e-6) over the sample's group. The weighted sum of the
    A_k is normalized alike over the rollout's trajectories. All tokens of a sample have the same advantage. The scale
    and spread of a reward do not change its influence."""

    name = "gdpo"
    takes = (PolicyGradient.takes - {"kl_coef", "overlong_buffer_len", "overlong_penalty_factor"}) | {"gdpo_weights"}
    compares_within_group = True

    def problems(self) -> list[str]:
        none = "gdpo compares the entries of a dict reward: name them with gdpo_weights KEY=WEIGHT, one entry or more"
        return super().problems() + ([] if self.settings.gdpo_weights else [none])

    def advantages(self, inputs: SampleView) -> Tensor:
        parts = need(inputs.reward_parts, "reward_parts", self.name)
        weights = parts.new_tensor(list(self.settings.gdpo_weights.values()))
        found = ops.normalization.decoupled_normalize(parts, weights, inputs.group_ids, inputs.trajectory_ids)
        return found.repeat_interleave(inputs.lengths)


class PassAtK(PolicyGradient):
    """The reward of a set of `pass_k` trajectories of a prompt is 1 if one of them earned more than `pass_threshold`
    (arXiv:2508.10751). A trajectory's advantage is the mean of those of the sets with it, in closed form, for all its
    tokens. Prompts that are solved often have small advantages, so the policy keeps several ways to an answer. The
    reward is the environment's minus `kl_coef` times the sample's KL."""

    name = "pass_at_k"
    takes = PolicyGradient.takes | {"pass_k", "pass_threshold"}
    compares_within_group = True

    def advantages(self, inputs: SampleView) -> Tensor:
        settings = self.settings
        rewards = ops.returns.sample_rewards(inputs, settings.kl_coef)
        found = ops.normalization.pass_at_k_advantages(
            rewards, inputs.group_ids, inputs.trajectory_ids, k=settings.pass_k, threshold=settings.pass_threshold
        )
        return found.repeat_interleave(inputs.lengths)
