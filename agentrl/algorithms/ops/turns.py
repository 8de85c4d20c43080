"""The turns of a rollout as an estimator compares them: what each earned, and what came of it."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from agentrl.algorithms.base import AdvantageInputs, need
from agentrl.algorithms.ops.returns import discounted, sample_of_token, step_kl
from agentrl.errors import TrainError


@dataclass(frozen=True, slots=True)
class Turns:
    """K turns, sample by sample and in order; a turn is what the model wrote and what it was shown in answer.

    Attributes:
        of_token: int64 [N], the turn [0..K) that each token belongs to.
        sample, number, state: int64 [K], its sample, its number in the trajectory, and what it was an answer to (see
            `AdvantageInputs.states`).
        rewards: float64 [K], what it earned; NaN where the sample's reward is unknown.
    """

    of_token: Tensor
    sample: Tensor
    number: Tensor
    state: Tensor
    rewards: Tensor

    @classmethod
    def of(cls, inputs: AdvantageInputs, kl_coef: float = 0.0) -> Self:
        """The turns of a rollout; a sample's reward is its last turn's where there are no `step_rewards`.

        With `kl_coef` each turn's reward is lessened by that times the KL of its trained tokens.

        Raises:
            TrainError: no token's turn is known.
        """
        numbers = need(inputs.turns, "turns", "turn_credit").long()
        if not (numbers > 0).any():
            raise TrainError(
                "turn_credit needs to know which tokens are one turn's, and no sample says so; build them with "
                "Sample.append_model(..., turn=1) and so on, or set --turn-credit none"
            )
        width = int(numbers.max()) + 1
        keys, of_token = torch.unique(sample_of_token(inputs) * width + numbers, return_inverse=True)
        sample = keys // width
        states = need(inputs.states, "states", "turn_credit").long()
        state = torch.full_like(keys, -1).scatter_reduce(0, of_token, states, "amax")
        rewards = inputs.rewards.double()[sample]
        if inputs.step_rewards is None:
            later = torch.zeros_like(sample, dtype=torch.bool)
            later[:-1] = sample[1:] == sample[:-1]
            rewards = torch.where(later, rewards * 0, rewards)
        else:
            rewards = (rewards * 0).index_add(0, of_token, inputs.step_rewards.double())
        if kl_coef:
            rewards = rewards.index_add(0, of_token, -kl_coef * step_kl(inputs))
        return cls(of_token, sample, keys % width, state, rewards)

    def returns(self, gamma: float) -> Tensor:
        """Of each turn the sum over it and its sample's later ones of gamma^(turns between) * reward; [K] float64."""
        return discounted(self.rewards, self.sample, gamma)


def beside_the_mean(advantages: Tensor, inputs: AdvantageInputs) -> Tensor:
    """Of each trained token its advantage less the mean over its sample's trained tokens."""
    trained = inputs.loss_mask > 0
    values, sample = advantages[trained], sample_of_token(inputs)[trained]
    sums = torch.zeros(len(inputs.lengths), 2, dtype=values.dtype)
    sums.index_add_(0, sample, torch.stack([values, torch.ones_like(values)], 1))
    return values - (sums[:, 0] / sums[:, 1].clamp(min=1))[sample]
