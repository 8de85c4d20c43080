"""Inputs and outputs of algorithms: of a rollout, of one optimizer step, of a microbatch.

1. The steps of the policy are the tokens whose mask is 1. Arrays that models computed hold 0 at the others, so returns
   that run along tokens must pass over what the model was shown.
2. A token's loss sees the rest of its sample through `TokenView.sum_over_sample` and `mean_over_sample` only: context
   parallelism cuts samples apart, so a rank may hold some of a sample's tokens, or none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from typing_extensions import deprecated

from agentrl.errors import TrainError

if TYPE_CHECKING:
    from torch import Tensor as Tensor
else:
    Tensor = Any  # torch is loaded by those who compute

Computed = Literal["old_log_probs", "ref_log_probs", "teacher_log_probs", "values"]
"""The outputs of the trainer's models before the first step, [N] over a rollout's response tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleView:
    """S samples with N response tokens in all, flat and in sample order: a rollout's for advantages, a step's for weights.

    Attributes:
        group_ids: [S] int; samples of one prompt share it.
        trajectory_ids: [S] int, unique over groups; samples that one trajectory fanned out into share it.
        lengths: [S] int, response tokens of each sample; sums to N.
        loss_mask: [N], 1 where the token trains.
        rewards: [S] float64; NaN marks a sample that has no reward (a failed one that is kept masked).
        reward_parts: [S, K] float64, the entries of a dict reward that `gdpo_weights` names; NaN as in `rewards`.
        kl: [N] per-token KL to the reference model, for advantages with `kl_coef`; see `ops.returns`.
        values, old_log_probs, ref_log_probs, teacher_log_probs: [N], where `Algorithm.reads` names them.
        tokens: [N] int, ids of the response; what the model was shown tells an environment's states apart.
        turns: [N] int, the turn of each token, from 1; 0 where unknown.
        step_rewards: [N] float64, a turn's part of the sample's reward on its last model token; None if no step gave any.
        observation_ids: [N] int, what the model was shown right before the token's turn; -1 where unknown."""

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
    """[N] float32, what a critic is to predict: the advantages before whitening plus the old values; None without a
    critic."""
    metrics: Mapping[str, float]
    """`advantages/mean`, `std` (biased), `max` and `min` over trained tokens, where there are any; `opd_reverse_kl`,
    the mean log-ratio of student and teacher; `critic/explained_variance`, see `ops.returns`; with `entropy_target`
    `sampled_entropy`."""
    chosen: Tensor | None = None  # [N], 1 at the tokens of `entropy_control`, see `ops.entropy`; None without it


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """A per-token loss [N] with its per-token statistics (each [N], detached)."""

    loss: Tensor
    stats: Mapping[str, Tensor]


Amend = Callable[["TokenView", Tensor], tuple[Tensor, "TokenView", Mapping[str, Tensor]]]
"""Gives for a view and its policy term [N] the term and the view (without the tokens that it rejects), and statistics [N]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenView:
    """Inputs of a loss: N response tokens of one microbatch on one rank; log-probs are natural logs.

    Floating-point arrays read 0 where the mask is 0, whatever was given, so that an infinite log-prob of a token that
    does not train meets neither a loss nor a sum.

    Attributes:
        log_probs: [N] under the model being trained, with gradient.
        loss_mask: [N], 1 where the token trains.
        sample_ids, turn_ids, trajectory_ids: int64 [N]. Samples count from 0 to num_samples - 1, turns from 1 (0 where
            unknown); samples that one trajectory fanned out into share its id.
        staleness: int64 [N], rollouts that the weights were trained on before this one, minus rollouts that the weights
            which sampled the token were trained on; -1 where masked or unknown.
        join: adds [num_samples] sums up over the ranks that hold parts of the same samples, and their gradients too.
        entropy: [N] of the model's next-token distribution, with gradient.
        old_log_probs: [N] under the policy that the ratio is taken against (trainer's own pass, or the engine's).
        advantages: [N].
        rollout_log_probs: [N] as the engine reported them; None if it did not.
        ref_log_probs, teacher_log_probs, values: [N], where `Algorithm.reads` names them.
        chosen: [N], `Estimate.chosen`.
        amend: code in another trainer's form that has a say in the policy term; see `Amend`."""

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
        """For each token the sum of `values` [N] over its sample's trained tokens on all ranks; differentiable. Every
        rank must call it equally often, with tokens or without."""
        sums = values.new_zeros(self.num_samples).index_add(0, self.sample_ids, self._trained(values))
        return self.join(sums)[self.sample_ids]

    def mean_over_sample(self, values: Tensor) -> Tensor:
        """For each token the mean of `values` [N] over its sample's trained tokens; as `sum_over_sample`."""
        return self.sum_over_sample(values) / self.sum_over_sample(values.new_ones(values.shape)).clamp(min=1)

    def _trained(self, values: Tensor) -> Tensor:
        return values.masked_fill(self.loss_mask == 0, 0)


def need(tensor: Tensor | None, name: str, why: str) -> Tensor:
    """`tensor`, or a `TrainError`: `why` cannot do without it."""
    if tensor is None:
        raise TrainError(f"{why} needs {name}, but the trainer passed none")
    return tensor
