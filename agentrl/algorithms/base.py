"""Inputs and outputs of algorithms, for a rollout, an optimizer step and a microbatch.

1. The policy's steps are the tokens with mask 1. Arrays that models computed are 0 at all other tokens, so returns
   along tokens must skip the tokens that the model was shown.
2. A token's loss reads other tokens of its sample only through `TokenView.sum_over_sample` and `mean_over_sample`:
   context parallelism splits samples, so a rank may have only some of a sample's tokens, or none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import deprecated

from agentrl.errors import TrainError

if TYPE_CHECKING:
    from torch import Tensor as Tensor
else:
    Tensor = Any  # only modules that compute import torch

Computed = Literal["old_log_probs", "ref_log_probs", "teacher_log_probs", "values"]
"""Outputs that the trainer's models compute before the first step, [N] over a rollout's response tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleView:
    """S samples with N response tokens in all, flat, in sample order: a rollout (for advantages) or step (for weights).

    Attributes:
        group_ids: [S] int; samples of one prompt share it.
        trajectory_ids: [S] int, unique over groups; the samples of one trajectory share it.
        lengths: [S] int, response tokens of each sample; sums to N.
        loss_mask: [N], 1 where the token trains.
        rewards: [S] float64; NaN marks a sample without a reward (a failed sample that is kept masked).
        reward_parts: [S, K] float64, the entries of a dict reward that `gdpo_weights` names; NaN as in `rewards`.
        kl: [N] per-token KL to the reference model, for advantages with `kl_coef`; see `ops.returns`.
        values, old_log_probs, ref_log_probs, teacher_log_probs: [N], if `Algorithm.reads` names them.
        tokens: [N] int, ids of the response tokens, also of the tokens that the model was shown.
        turns: [N] int, the turn of each token, from 1; 0 where unknown.
        step_rewards: [N] float64, a turn's part of the reward, at its last model token; None if no step gave any.
        observation_ids: [N] int, id of what the model was shown right before the token's turn; -1 where unknown."""

    group_ids: Tensor
    trajectory_ids: Tensor
    lengths: Tensor
    loss_mask: Tensor
    rewards: Tensor
    reward_parts: Tensor | None = None
    kl: Tensor | None = None
    values: Tensor | None = None
    old_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    teacher_log_probs: Tensor | None = None
    tokens: Tensor | None = None
    turns: Tensor | None = None
    step_rewards: Tensor | None = None
    observation_ids: Tensor | None = None

    @property
    @deprecated("rollout_ids is now trajectory_ids")
    def rollout_ids(self) -> Tensor:
        """Former name of `trajectory_ids`."""
        return self.trajectory_ids

    @property
    @deprecated("states is now observation_ids")
    def states(self) -> Tensor | None:
        """Former name of `observation_ids`."""
        return self.observation_ids


AdvantageInputs = WeightInputs = SampleView  # former names of `SampleView`, kept for one release


@dataclass(frozen=True, slots=True)
class Estimate:
    """Advantages [N] of a rollout's N response tokens, float32, as the loss reads them."""

    advantages: Tensor
    returns: Tensor | None
    """[N] float32, the critic's targets: the advantages before whitening plus the old values; None without a critic."""
    metrics: Mapping[str, float]
    """`advantages/mean`, `std` (biased), `max` and `min` over trained tokens, if there are any. With the settings that
    need them: `opd_reverse_kl`, the mean log-ratio of student and teacher; `critic/explained_variance`, see
    `ops.returns`; `sampled_entropy`."""
    chosen: Tensor | None = None  # [N], 1 at the tokens of `entropy_control`, see `ops.entropy`; None without it


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """A per-token loss [N] with its per-token statistics (each [N], detached)."""

    loss: Tensor
    stats: Mapping[str, Tensor]


Amend = Callable[["TokenView", Tensor], tuple[Tensor, "TokenView", Mapping[str, Tensor]]]
"""Maps a view and its policy term [N] to the new term, the view without rejected tokens, and statistics [N]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenView:
    """Inputs of a loss: N response tokens of one microbatch on one rank; log-probs are natural logs.

    Floating-point arrays are set to 0 where the mask is 0. So an infinite log-prob of an untrained token enters neither
    a loss nor a sum.

    Attributes:
        log_probs: [N] under the model being trained, with gradient.
        loss_mask: [N], 1 where the token trains.
        sample_ids, turn_ids, trajectory_ids: int64 [N]. Samples count from 0 to num_samples - 1, turns from 1 (0 where
            unknown). The samples of one trajectory share its id.
        staleness: int64 [N], age of the weights that sampled the token, in rollouts before this rollout's first step;
            -1 where masked or unknown.
        join: adds up [num_samples] sums, and their gradients, over the ranks that have parts of the same samples.
        entropy: [N] of the model's next-token distribution, with gradient.
        old_log_probs: [N] under the ratio's old policy (from the trainer's own pass, or from the engine).
        advantages: [N].
        rollout_log_probs: [N] as the engine reported them; None if it did not.
        ref_log_probs, teacher_log_probs, values: [N], where `Algorithm.reads` names them.
        chosen: [N], `Estimate.chosen`.
        amend: a hook in another trainer's form that changes the policy term; see `Amend`."""

    log_probs: Tensor
    loss_mask: Tensor
    sample_ids: Tensor
    turn_ids: Tensor
    trajectory_ids: Tensor
    staleness: Tensor
    num_samples: int
    join: Callable[[Tensor], Tensor]
    entropy: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    rollout_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    teacher_log_probs: Tensor | None = None
    values: Tensor | None = None
    chosen: Tensor | None = None
    amend: Amend | None = None

    def __post_init__(self) -> None:
        from torch import Tensor

        for field in fields(self):
            if isinstance(array := getattr(self, field.name), Tensor) and array.is_floating_point():
                object.__setattr__(self, field.name, self._trained(array))

    def sum_over_sample(self, values: Tensor) -> Tensor:
        """Return for each token the sum of `values` [N] over its sample's trained tokens on all ranks; differentiable.
        All ranks must make the same number of calls, even a rank without tokens."""
        sums = values.new_zeros(self.num_samples).index_add(0, self.sample_ids, self._trained(values))
        return self.join(sums)[self.sample_ids]

    def mean_over_sample(self, values: Tensor) -> Tensor:
        """Return for each token the mean of `values` [N] over its sample's trained tokens; see `sum_over_sample`."""
        return self.sum_over_sample(values) / self.sum_over_sample(values.new_ones(values.shape)).clamp(min=1)

    def _trained(self, values: Tensor) -> Tensor:
        return values.masked_fill(self.loss_mask == 0, 0)


def need(tensor: Tensor | None, name: str, why: str) -> Tensor:
    """Return `tensor`. Raises TrainError: the tensor, which `why` needs, is None."""
    if tensor is None:
        raise TrainError(f"{why} needs {name}, but the trainer passed none")
    return tensor
