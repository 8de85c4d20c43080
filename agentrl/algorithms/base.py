"""`Algorithm`: what a learning algorithm reads, the advantages that it gives, and its loss a token.

1. One class and one file an algorithm; an object of it is bound to a run's settings. `registry.algorithm_of` alone
   knows names: everyone else asks the object, so that no trainer has an `if` for an algorithm.
2. `advantages` sees the whole rollout at once: groups of any size, fan-out and global statistics need no
   communication. It gives masked tokens a value too, and they weigh 0 later.
3. The steps of the policy are the tokens whose mask is 1. Arrays that models computed hold 0 at the others, so returns
   that run along tokens must pass over what the model was shown.
4. `token_loss` maps the tokens of a microbatch to one loss each, and statistics, detached. Nothing is reduced:
   `ops.weights` says what a token counts, so that a step's loss is `(loss * weights).sum()` in every layout.
5. A token's loss sees the rest of its sample through `TokenView.sum_over_sample` and `mean_over_sample` only: context
   parallelism cuts samples apart, so a rank may hold some of a sample's tokens, or none.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar, Literal

from agentrl.errors import TrainError

if TYPE_CHECKING:
    from torch import Tensor

    from agentrl.algorithms.fields import AlgorithmFields

Computed = Literal["old_log_probs", "ref_log_probs", "teacher_log_probs", "values"]
"""What the trainer's models compute before the first step, [N] over a rollout's response tokens."""


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """What advantages may be made of: S samples with N response tokens in all, flat and in sample order.

    Attributes:
        rewards: [S] float64; NaN marks a sample that has no reward (a failed one that is kept masked).
        group_ids: [S] int; samples of one prompt share it.
        rollout_ids: [S] int, unique over groups; samples that one trajectory fanned out into share it.
        lengths: [S] int, response tokens of each sample; sums to N.
        loss_mask: [N], 1 where the token trains.
        kl: [N] per-token KL to the reference model, with `kl_coef`; for algorithms with token rewards.
        values, old_log_probs, ref_log_probs, teacher_log_probs: [N], where `Algorithm.reads` names them.
        tokens: [N] int, ids of the response; what the model was shown tells an environment's states apart.
        turns: [N] int, the turn of each token, from 1; 0 where unknown.
        step_rewards: [N], the reward of a turn's step on the turn's last model token; None if no step gave one.
    """

    rewards: Tensor
    group_ids: Tensor
    rollout_ids: Tensor
    lengths: Tensor
    loss_mask: Tensor
    kl: Tensor | None = None
    values: Tensor | None = None
    old_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    teacher_log_probs: Tensor | None = None
    tokens: Tensor | None = None
    turns: Tensor | None = None
    step_rewards: Tensor | None = None


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """A per-token loss [N] with its per-token statistics (each [N], detached)."""

    loss: Tensor
    stats: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenView:
    """What a loss may read: N response tokens of one microbatch on one rank; log-probs are natural logs.

    Floating-point arrays read 0 where the mask is 0, whatever was given, so that an infinite log-prob of a token that
    does not train meets neither a loss nor a sum.

    Attributes:
        log_probs: [N] under the model being trained, with gradient.
        loss_mask: [N], 1 where the token trains.
        sample_ids, turn_ids, trajectory_ids: int64 [N]. Samples count from 0 to num_samples - 1, turns from 1 (0 where
            unknown); samples that one trajectory fanned out into share its id.
        staleness: int64 [N], rollouts that the weights were trained on before this one, minus those that the weights
            which sampled the token were trained on; -1 where masked or unknown.
        join: adds [num_samples] sums up over the ranks that hold parts of the same samples, and their gradients too.
        entropy: [N] of the model's next-token distribution, with gradient.
        old_log_probs: [N] under the policy that the ratio is taken against (trainer's own pass, or the engine's).
        rollout_log_probs: [N] as the engine reported them; None if it did not.
        ref_log_probs, teacher_log_probs, values: [N], where `Algorithm.reads` names them.
        advantages: [N].
    """

    log_probs: Tensor
    loss_mask: Tensor
    sample_ids: Tensor
    turn_ids: Tensor
    trajectory_ids: Tensor
    staleness: Tensor
    num_samples: int
    join: Callable[[Tensor], Tensor]
    entropy: Tensor | None = None
    old_log_probs: Tensor | None = None
    rollout_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    teacher_log_probs: Tensor | None = None
    values: Tensor | None = None
    advantages: Tensor | None = None

    def __post_init__(self) -> None:
        from torch import Tensor

        for field in fields(self):
            array = getattr(self, field.name)
            if isinstance(array, Tensor) and array.is_floating_point():
                object.__setattr__(self, field.name, self._trained(array))

    def sum_over_sample(self, values: Tensor) -> Tensor:
        """For each token the sum of `values` [N] over its sample's trained tokens on all ranks; differentiable.

        Every rank must call it equally often, with tokens or without.
        """
        sums = values.new_zeros(self.num_samples).index_add(0, self.sample_ids, self._trained(values))
        return self.join(sums)[self.sample_ids]

    def mean_over_sample(self, values: Tensor) -> Tensor:
        """For each token the mean of `values` [N] over its sample's trained tokens; as `sum_over_sample`."""
        return self.sum_over_sample(values) / self.sum_over_sample(values.new_ones(values.shape)).clamp(min=1)

    def _trained(self, values: Tensor) -> Tensor:
        return values.masked_fill(self.loss_mask == 0, 0)


@dataclass(frozen=True)
class Algorithm(ABC):
    """An algorithm with the settings of a run."""

    name: ClassVar[str]
    """As the command line and messages spell it."""
    takes: ClassVar[frozenset[str]]
    """The fields of `AlgorithmSettings` that have an effect; the others are refused if they are given."""
    hints: ClassVar[Mapping[str, str]] = {}
    """For settings that are refused: why, and what to do instead."""
    supervised: ClassVar[bool] = False
    """Whether it needs neither rewards nor log-probs of samples."""

    settings: AlgorithmFields

    @property
    def reads(self) -> frozenset[Computed]:
        """What must be computed for it. Losses have `old_log_probs` always; only advantages that read them say so."""
        return frozenset()

    @property
    def compares_within_group(self) -> bool:
        """Whether a trajectory that is alone in its group has advantage 0."""
        return False

    @abstractmethod
    def advantages(self, inputs: AdvantageInputs) -> Tensor:
        """One advantage [N] a response token of the whole rollout, before any whitening."""

    @abstractmethod
    def token_loss(self, view: TokenView) -> TokenLoss:
        """The loss [N] of each token."""

    def unused_settings(self) -> list[str]:
        """A sentence for each setting that was given and has no effect."""
        chosen = {"loss_type", "advantage_estimator"} | self.takes
        return [
            f"{name} {value} has no effect with {self.name}{self.hints.get(name, '; leave it out')}"
            for name, field in type(self.settings).model_fields.items()
            if name not in chosen and (value := getattr(self.settings, name)) != field.default
        ]


def need(tensor: Tensor | None, name: str, why: str) -> Tensor:
    """`tensor`, or a `TrainError`: `why` cannot do without it."""
    if tensor is None:
        raise TrainError(f"{why} needs {name}, but the trainer passed none")
    return tensor
