"""`PassAtK`: advantages of sets of trajectories (arXiv:2508.10751)."""

from agentrl.algorithms import ops
from agentrl.algorithms.base import SampleView, Tensor
from agentrl.algorithms.policy import PolicyGradient


class PassAtK(PolicyGradient):
    """The reward of a set of `pass_k` trajectories of a prompt is 1 if one of them earned more than `pass_threshold`. A
    trajectory's advantage is the expected one of the sets that hold it, in closed form; the same for all its tokens. Prompts
    that are solved often give little of it, so the policy keeps several ways to an answer. The reward is the environment's
    less `kl_coef` times the sample's KL."""

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
