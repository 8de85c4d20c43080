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
            `AdvantageInputs.observation_ids`).
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
        states = need(inputs.observation_ids, "observation_ids", "turn_credit").long()
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

    def by_number(self, returns: Tensor, inputs: AdvantageInputs) -> tuple[Tensor, Tensor, Tensor]:
        """Returns, groups and members [K] that compare a turn with those of its number in the prompt's trajectories."""
        width = self.number.max() + 1
        groups, members = (ids[self.sample] * width + self.number for ids in (inputs.group_ids, inputs.trajectory_ids))
        return returns, groups, members

    def by_state(self, returns: Tensor, inputs: AdvantageInputs) -> tuple[Tensor, Tensor, Tensor]:
        """The same to compare it with all turns that answer what it answers; NaN where that is unknown."""
        return returns.masked_fill(self.state < 0, torch.nan), self.state, torch.arange(len(returns))
