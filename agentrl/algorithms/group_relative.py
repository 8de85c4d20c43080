"""What estimators share that compare a trajectory with the others of its prompt: whole, or turn by turn."""

from __future__ import annotations

from abc import abstractmethod

from agentrl.algorithms import ops
from agentrl.algorithms.base import AdvantageInputs, Tensor
from agentrl.algorithms.policy import PolicyGradient


class GroupRelative(PolicyGradient):
    """A subclass says how rewards are compared (`compare`), and `turn_credit` what is compared.

    1. none: samples, by their rewards; all tokens of a sample have the same advantage.
    2. returns: turns, by what they and the later ones earned, discounted by `gamma` a turn. A turn is compared with the
       turns of the same number in its group; a trajectory that had ended by then takes no part. With gamma 1, rewards
       on last turns only and as many turns in each trajectory this is 1.
    3. gigpo (arXiv:2505.10978): the advantage of 1, plus `turn_credit_weight` times that of the turn: its
       discounted return, compared with those of the group's turns that were an answer to the same tokens: what the
       model was shown since its last turn, at first the prompt. A turn that is alone in that has 0.

    Rewards of turns are `AdvantageInputs.step_rewards`; where there are none a sample's reward is its last turn's. They
    are lessened by `kl_coef` times the KL of the sample, or of the turn. Turns that do not train are compared with too.
    """

    takes = PolicyGradient.takes | {"turn_credit"}

    @abstractmethod
    def compare(self, rewards: Tensor, group_ids: Tensor, rollout_ids: Tensor) -> Tensor:
        """Rewards [K] relative to their group, float64; 0 where they are NaN.

        Those that share a rollout id are one member of their group.
        """

    @property
    def compares_within_group(self) -> bool:
        return True

    @property
    def taken(self) -> frozenset[str]:
        credit = self.settings.turn_credit
        more = {"none": set(), "returns": {"gamma"}, "gigpo": {"gamma", "turn_credit_weight"}}[credit]
        return super().taken | more

    def advantages(self, inputs: AdvantageInputs) -> Tensor:
        settings = self.settings
        if settings.turn_credit == "returns":
            return self._of_turns(inputs)
        rewards = ops.returns.sample_rewards(inputs, settings.kl_coef)
        whole = self.compare(rewards, inputs.group_ids, inputs.rollout_ids).repeat_interleave(inputs.lengths)
        if settings.turn_credit == "gigpo":
            whole = whole + settings.turn_credit_weight * self._of_turns(inputs)
        return whole

    def _of_turns(self, inputs: AdvantageInputs) -> Tensor:
        turns = ops.turns.Turns.of(inputs, self.settings.kl_coef)
        peers = turns.by_number if self.settings.turn_credit == "returns" else turns.by_state
        return self.compare(*peers(turns.returns(self.settings.gamma), inputs))[turns.of_token]
