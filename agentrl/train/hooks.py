"""`TrainHooks`: the hooks of training for code that was written for another trainer. The base class changes nothing;
`hooks_of` returns the hooks that `agentrl.compat` makes from a run's args. All ranks make the same calls with the same
batch. Losses, weights and corrections that are written for agentrl are settings of the algorithm, not hooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agentrl.algorithms.base import Amend, Computed
from agentrl.algorithms.settings import AlgorithmSettings
from agentrl.plugins import compat
from agentrl.sample import Sample

if TYPE_CHECKING:
    from torch import Tensor, device

    from agentrl.algorithms.algorithm import Algorithm
    from agentrl.train.batch import TrainBatch
    from agentrl.train.microbatches import MicrobatchTensors
    from agentrl.train.objective import StepInputs

Groups = Sequence[Sequence[Sample]]


class TrainHooks:
    """Hooks that change nothing."""

    reads: frozenset[Computed] = frozenset()  # outputs to compute in addition to those that the algorithm reads
    takes_logits: bool = False  # true if `loss` replaces the algorithm's loss
    makes_rows: bool = False  # true if `samples` may return new samples

    def samples(self, groups: Groups) -> tuple[Groups, Sequence[float] | None]:
        """Return the groups to train on, and rewards in place of the samples' own, or None."""
        return groups, None

    def objective(self, algorithm: AlgorithmSettings) -> AlgorithmSettings:
        """Return the algorithm settings that the trainer uses."""
        return algorithm

    def started(self) -> None:
        """Run after the ranks have joined, before any model is built."""

    def model(self, build: Callable[..., Any], *, pre_process: bool, post_process: bool) -> Any:
        """Build this rank's part of a model. With megatron, its weights are loaded later."""
        return build(pre_process=pre_process, post_process=post_process)

    def before_log_probs(self, model: Any, prefix: str) -> None:
        """Run before a pass without gradients; `prefix` is "" for a model that learns, else "ref_" or "teacher_"."""

    def advantages(self, batch: TrainBatch, algorithm: Algorithm) -> tuple[Tensor, Tensor] | None:
        """Return advantages and returns [R] that replace the algorithm's, or None."""
        return None

    def prepared(self, batch: TrainBatch, step: int, device: device) -> TrainBatch:
        """Return the batch to train on, from the rollout's batch with all computed arrays."""
        return batch

    def before_step(self, number: int, model: Any, optimizer: Any) -> None:
        """Run before optimizer step `number` of the run; gradients are zero."""

    def amend(self, step: StepInputs, mb: MicrobatchTensors) -> Amend | None:
        """Return `TokenView.amend` for a microbatch, or None."""
        return None

    def loss(self, step: StepInputs, mb: MicrobatchTensors, logits: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the microbatch's share of the step's loss, and of its statistics (scalars), from logits float32 [N,
        vocabulary]. The N rows are those of all response tokens, untrained ones too."""
        raise NotImplementedError

    def weights_written(self, folder: str) -> None:
        """Run after weights are written to a folder, before the engines read them."""


NO_HOOKS = TrainHooks()


def hooks_of(args: Any) -> TrainHooks:
    """Return the hooks that a run's args name. Raises PluginError, SettingsError: a hook cannot be loaded or used."""
    found = compat()
    return NO_HOOKS if found is None else found.train_hooks(args)
