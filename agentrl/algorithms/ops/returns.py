"""Rewards of the policy's steps, and sums of them along a sample. The policy's steps are the tokens with mask 1;
returns and GAE skip all other tokens. A reward at another token is added to the step before it; a reward before the
first step is dropped. Each sample ends with value 0. Estimators with `turn_credit` compare `Turns`."""

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from agentrl.algorithms.base import SampleView, need
from agentrl.errors import TrainError


def sample_rewards(inputs: SampleView, kl_coef: float = 0.0) -> Tensor:
    """Return each sample's reward minus kl_coef times the KL summed over its steps; [S] float64, NaN where unknown."""
    rewards = inputs.rewards.double()
    return rewards - kl_coef * _per_sample(step_kl(inputs), inputs) if kl_coef else rewards


def token_rewards(inputs: SampleView, kl_coef: float = 0.0) -> Tensor:
    """Return the reward of each step, [N] float64: the sample's reward at its last step, minus kl_coef times KL at
    every step. `step_rewards`, if given, replace the sample's reward. A NaN reward is 0."""
    if inputs.step_rewards is None:
        last, sample = _last_steps(inputs)
        own = inputs.rewards.double().nan_to_num(nan=0.0)[sample]
        rewards = torch.zeros(len(inputs.loss_mask), dtype=torch.float64, device=own.device).index_copy(0, last, own)
    else:
        rewards = _onto_steps(inputs.step_rewards.double(), inputs)
    return rewards - kl_coef * step_kl(inputs) if kl_coef else rewards


def overlong_shaped(inputs: SampleView, buffer: int, limit: int, factor: float) -> SampleView:
    """Penalize long samples (DAPO, arXiv:2503.14476, eq. 13). A sample of n steps loses factor * (n - (limit - buffer))
    / buffer, at least 0 and at most `factor`. Step rewards lose the same at the sample's last step."""
    written = _per_sample((inputs.loss_mask > 0).double(), inputs)
    penalty = factor * ((written - (limit - buffer)) / buffer).clamp(0, 1)
    if (credit := inputs.step_rewards) is not None:
        last, sample = _last_steps(inputs)
        credit = credit.double().index_add(0, last, -penalty[sample])
    return replace(inputs, rewards=inputs.rewards.double() - penalty, step_rewards=credit)


def discounted_returns(rewards: Tensor, inputs: SampleView, gamma: float) -> Tensor:
    """Sum gamma^(steps between) * reward over each step and its sample's later steps; [N] float64."""
    steps, sample = _steps(inputs)
    return _onto_tokens(discounted(rewards.double()[steps], sample, gamma), steps, inputs)


def generalized_advantages(rewards: Tensor, values: Tensor, inputs: SampleView, gamma: float, lambd: float) -> Tensor:
    """Compute GAE (arXiv:1506.02438, eq. 16) over steps, [N] float64. `rewards` and `values` [N] are read at steps
    only. It sums (gamma * lambd)^(steps between) * delta over a step and its sample's later steps, with delta = reward
    + gamma * V(next step) - V(step)."""
    steps, sample = _steps(inputs)
    here = values.double()[steps]
    following = torch.zeros_like(here)
    following[:-1] = torch.where(sample[1:] == sample[:-1], here[1:], 0.0)
    delta = rewards.double()[steps] + gamma * following - here
    return _onto_tokens(discounted(delta, sample, gamma * lambd), steps, inputs)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """Return 1 - Var(returns - values) / Var(returns) over tokens with `mask` 1; 0 if all returns [N] are equal."""
    kept, target = values[mask > 0].double(), returns[mask > 0].double()
    spread = target.var(correction=0) if len(target) else target.sum()
    return float(1 - (target - kept).var(correction=0) / spread) if spread > 0 else 0.0


def _steps(inputs: SampleView) -> tuple[Tensor, Tensor]:
    """Return the indices of the steps among the tokens, [K], and each step's sample."""
    steps = inputs.loss_mask.nonzero().flatten()
    return steps, sample_of_token(inputs)[steps]


def _last_steps(inputs: SampleView) -> tuple[Tensor, Tensor]:
    """Return the last step of each sample that has steps, [L], and the sample."""
    steps, sample = _steps(inputs)
    last = torch.ones(len(steps), dtype=torch.bool, device=steps.device)
    last[:-1] = sample[1:] != sample[:-1]
    return steps[last], sample[last]


def sample_of_token(inputs: SampleView) -> Tensor:
    return torch.arange(len(inputs.lengths), device=inputs.lengths.device).repeat_interleave(inputs.lengths)


def step_kl(inputs: SampleView) -> Tensor:
    """Return the KL, [N] float64, with 0 at tokens that are no steps."""
    return need(inputs.kl, "kl", "kl_coef").double().masked_fill(inputs.loss_mask == 0, 0)


def _per_sample(values: Tensor, inputs: SampleView) -> Tensor:
    return values.new_zeros(len(inputs.lengths)).index_add(0, sample_of_token(inputs), values)


def _onto_steps(rewards: Tensor, inputs: SampleView) -> Tensor:
    """Move each token's reward to the last step of its sample that is not after the token."""
    steps, sample = _steps(inputs)
    out, tokens = torch.zeros_like(rewards), torch.arange(len(rewards), device=rewards.device)
    if not len(steps):
        return out
    before = torch.searchsorted(steps, tokens, right=True) - 1
    own = (before >= 0) & (sample[before.clamp(min=0)] == sample_of_token(inputs))
    return out.index_add(0, steps[before[own]], rewards[own])


def _onto_tokens(values: Tensor, steps: Tensor, inputs: SampleView) -> Tensor:
    return values.new_zeros(len(inputs.loss_mask)).index_copy(0, steps, values)


def discounted(values: Tensor, sample: Tensor, factor: float) -> Tensor:
    """Sum factor^j * values[k + j] over j within a sample, [K]. Spans double: log2 of the longest sample in passes."""
    left = torch.searchsorted(sample, sample, right=True) - torch.arange(len(values), device=values.device)
    total, span, longest = values.clone(), 1, int(left.max()) if len(values) else 0
    while span < longest:
        total[:-span] += torch.where(left[:-span] > span, factor**span * total[span:], 0.0)
        span *= 2
    return total


@dataclass(frozen=True, slots=True)
class Turns:
    """K turns, sample by sample and in order. A turn has the model's tokens and the environment's answer."""

    of_token: Tensor  # int64 [N], the turn [0..K) that each token belongs to
    sample: Tensor  # int64 [K], its sample
    number: Tensor  # int64 [K], its number in the trajectory
    state: Tensor  # int64 [K], id of what the model answered, see `SampleView.observation_ids`
    rewards: Tensor  # float64 [K], NaN where the sample's reward is unknown

    @classmethod
    def of(cls, inputs: SampleView, kl_coef: float = 0.0) -> Self:
        """Split a rollout into turns. Without `step_rewards`, the last turn gets the sample's reward. `kl_coef` times
        the KL of a turn's tokens is subtracted from its reward. Raises TrainError: no turn is known."""
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
        """Sum gamma^(turns between) * reward over each turn and its sample's later turns; [K] float64."""
        return discounted(self.rewards, self.sample, gamma)

    def by_number(self, returns: Tensor, inputs: SampleView) -> tuple[Tensor, Tensor, Tensor]:
        """Return returns, groups and members [K], to compare turns of the same number in a prompt's trajectories."""
        width = self.number.max() + 1
        groups, members = (ids[self.sample] * width + self.number for ids in (inputs.group_ids, inputs.trajectory_ids))
        return returns, groups, members

    def by_state(self, returns: Tensor, inputs: SampleView) -> tuple[Tensor, Tensor, Tensor]:
        """Return the same, to compare turns that answer the same observation; NaN where it is unknown."""
        return returns.masked_fill(self.state < 0, torch.nan), self.state, torch.arange(len(returns))
