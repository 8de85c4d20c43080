"""On-policy distillation alone: the student learns to say what its teacher would, on the tokens that it sampled itself."""

from __future__ import annotations

from agentrl.algorithms.base import AdvantageInputs, Tensor
from agentrl.algorithms.policy import PolicyGradient


class OnPolicyDistillation(PolicyGradient):
    """A_t = -opd_kl_coef * (log p_student - log p_teacher), see `ops.kl`: no rewards, no groups.

    slime's form of it is grpo under use_opd with rewards of 0.
    """

    name = "on_policy_distillation"
    takes = PolicyGradient.takes - {"kl_coef", "overlong_buffer_len", "overlong_penalty_factor"}
    needs_rewards = False

    @property
    def distills(self) -> bool:
        return True

    def advantages(self, inputs: AdvantageInputs) -> Tensor:
        """0: the teacher's part is added to every distilling algorithm's."""
        return inputs.loss_mask.double() * 0
