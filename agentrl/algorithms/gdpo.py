"""`GDPO`: several rewards, each compared in its group by itself (arXiv:2601.05242)."""

from agentrl.algorithms import ops
from agentrl.algorithms.base import SampleView, Tensor, need
from agentrl.algorithms.policy import PolicyGradient


class GDPO(PolicyGradient):
    """A dict of rewards, of which `gdpo_weights` names the entries and their weights. A_k = (reward k - mean) / (std + 1e-6)
    over the sample's group; their weighted sum less its mean over the rollout's trajectories, by its std there (+ 1e-6). The
    same for all tokens of a sample. A reward of large numbers, or with little spread, counts no less than another."""

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
