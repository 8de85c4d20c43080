"""`Algorithm`: the contract of a learning algorithm, bound to a run's settings.

1. `advantages` sees the whole rollout, so groups and global statistics need no communication.
2. `token_loss` and `value_loss` map a microbatch's tokens to one loss each; nothing is reduced. `token_weights` gives
   the weight of a token in its step, so a step's loss is `(loss * weights).sum()` in every layout."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from agentrl.algorithms import ops
from agentrl.algorithms.base import Computed, SampleView, Tensor, TokenLoss, TokenView
from agentrl.algorithms.fields import AlgorithmFields
from agentrl.algorithms.own import WEIGHTS as REDUCER
from agentrl.algorithms.own import is_own, own_weights

_REDUCER = "custom_pg_loss_reducer_function_path"
WEIGHTS = frozenset({"calculate_per_token_loss", "loss_denominator", "loss_max_length", _REDUCER})
"""The settings of `Algorithm.token_weights`."""


@dataclass(frozen=True)
class Algorithm(ABC):
    """An algorithm with the settings of a run."""

    name: ClassVar[str]
    """The name on the command line and in messages."""
    takes: ClassVar[frozenset[str]]
    """The fields of `AlgorithmFields`, besides `WEIGHTS`, that have an effect. Others are refused if set."""
    supervised: ClassVar[bool] = False
    """True if the algorithm needs neither rewards nor log-probs of samples."""
    whitened: ClassVar[bool] = False
    """True if the advantages are whitened by default, without `normalize_advantages`."""
    anchored_at_rollout: ClassVar[bool] = False
    """True if the old log-probs are the engine's by default, without `use_rollout_logprobs`."""
    needs_rewards: ClassVar[bool] = True
    """True if a run without any grader makes no sense."""

    settings: AlgorithmFields

    @property
    def origin(self) -> str:
        """The source of the loss, for messages."""
        path = self.settings.custom_loss_function_path
        return f"--custom-loss-function-path {path}" if path else self.name

    @property
    def reads(self) -> frozenset[Computed]:
        """Inputs to compute. Losses always get `old_log_probs`, so only advantages that read them must name them."""
        return frozenset()

    @property
    def distills(self) -> bool:
        """True if the log-ratio of student and teacher is subtracted from the advantages; see `ops.kl`."""
        return False

    @property
    def compares_within_group(self) -> bool:
        """True if a trajectory that is alone in its group has advantage 0."""
        return False

    @property
    def taken(self) -> frozenset[str]:
        """The fields that have an effect with these settings: `takes`, with additions or removals."""
        return self.takes

    @abstractmethod
    def advantages(self, inputs: SampleView) -> Tensor:
        """Return the advantage [N] of each response token of the whole rollout, before any whitening."""

    @abstractmethod
    def token_loss(self, view: TokenView) -> TokenLoss:
        """Compute the loss [N] of each token."""

    def token_weights(self, inputs: SampleView) -> Tensor:
        """Compute the weight of each token [N] in its step's loss; 0 for tokens that do not train. By default
        `ops.corrections.token_weights`, or the function of `custom_pg_loss_reducer_function_path`."""
        settings = self.settings
        if is_own(settings.custom_pg_loss_reducer_function_path, REDUCER):
            return own_weights(inputs, settings)
        return ops.corrections.token_weights(
            inputs.loss_mask,
            inputs.lengths,
            inputs.trajectory_ids,
            per_token=settings.calculate_per_token_loss,
            denominator=settings.loss_denominator,
            max_length=settings.loss_max_length,
        )

    def adapted(self, metrics: Mapping[str, float]) -> tuple[Self, Self]:
        """Return the algorithm for the rollout with these `Estimate.metrics`, and the algorithm for later rollouts."""
        return self, self

    @property
    def state(self) -> Mapping[str, float]:
        """The values of the settings that `adapted` changes: logged as metrics, and saved in checkpoints."""
        return {}

    def with_settings(self, changed: Mapping[str, float]) -> Self:
        """Return the algorithm with other values of some settings."""
        return replace(self, settings=self.settings.model_copy(update=dict(changed)))

    def value_loss(self, values: Tensor, old_values: Tensor, returns: Tensor) -> TokenLoss:
        """Compute the critic's loss [N], if `reads` names "values"; by default `ops.clipping.value_loss`. `values` [N]
        have a gradient. `old_values` are from before the first step; `returns` are `Estimate.returns`."""
        return ops.clipping.value_loss(values, old_values, returns, clip=self.settings.value_clip)

    @property
    def whitens(self) -> bool:
        """True if the advantages are whitened."""
        given = self.settings.normalize_advantages
        return self.whitened if given is None else given

    def problems(self) -> list[str]:
        """Return a sentence for each setting that the algorithm cannot use, settings without effect included."""
        return self.unused_settings()

    def unused_settings(self) -> list[str]:
        """Return a sentence for each setting that was given and has no effect."""
        chosen = {"loss_type", "advantage_estimator"} | WEIGHTS | self.taken
        return [
            f"{name} {value} has no effect with {self.name}; leave it out"
            for name, field in type(self.settings).model_fields.items()
            if name not in chosen and (value := getattr(self.settings, name)) != field.default
        ]


class SFT(Algorithm):
    """The loss -log p of each token. The statistic `nll` is the same number, detached."""

    name = "sft_loss"
    takes = frozenset()
    supervised = True
    needs_rewards = False

    def unused_settings(self) -> list[str]:
        given = self.settings.advantage_estimator
        why = f"advantage_estimator {given} has no effect with sft_loss, which estimates no advantages; leave it out"
        return super().unused_settings() + ([why] if given != "grpo" else [])

    def advantages(self, inputs: SampleView) -> Tensor:
        """Return ones, with which the policy gradient equals this loss's gradient."""
        return inputs.loss_mask.new_ones(inputs.loss_mask.shape)

    def token_loss(self, view: TokenView) -> TokenLoss:
        loss = -view.log_probs
        return TokenLoss(loss, {"nll": loss.detach()})
