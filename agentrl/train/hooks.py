"""`TrainHooks`: the moments of training at which code in another trainer's form has a say. The base class changes
nothing; `hooks_of` gives what `agentrl.compat` makes of a run's args. All ranks make the same calls with the same
batch. Losses, weights and corrections in our own form are settings of the algorithm and none of this."""

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

    reads: frozenset[Computed] = frozenset()  # must be computed beside what the algorithm reads
    takes_logits: bool = False  # `loss` is asked in the algorithm's place
    makes_rows: bool = False  # `samples` may return others than it gets

    def samples(self, groups: Groups) -> tuple[Groups, Sequence[float] | None]:
        """The trained part of a rollout, and the samples' rewards if these are not their own."""
        return groups, None

    def objective(self, algorithm: AlgorithmSettings) -> AlgorithmSettings:
        """The objective's settings, as the trainer takes them."""
        return algorithm

    def started(self) -> None:
        """The ranks have joined; no model is there yet."""

    def model(self, build: Callable[..., Any], *, pre_process: bool, post_process: bool) -> Any:
        """This rank's part of a model, not yet with its weights."""
        return build(pre_process=pre_process, post_process=post_process)

    def before_log_probs(self, model: Any, prefix: str) -> None:
        """A pass without gradients begins; `prefix` is "" for a model that learns, else "ref_" or "teacher_"."""

    def advantages(self, batch: TrainBatch, algorithm: Algorithm) -> tuple[Tensor, Tensor] | None:
        """Advantages and returns [R] in the algorithm's place."""
        return None

    def prepared(self, batch: TrainBatch, step: int, device: device) -> TrainBatch:
        """The rollout as it is trained on."""
        return batch

    def before_step(self, number: int, model: Any, optimizer: Any) -> None:
        """An optimizer step begins, counted over the run; gradients are zero."""

    def amend(self, step: StepInputs, mb: MicrobatchTensors) -> Amend | None:
        """`TokenView.amend`."""
        return None

    def loss(self, step: StepInputs, mb: MicrobatchTensors, logits: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        """The microbatch's share of the step's loss and of its statistics, scalars, of its logits float32 [N,
        vocabulary]. Its tokens are all response tokens, untrained ones too."""
        raise NotImplementedError

    def weights_written(self, folder: str) -> None:
        """Weights lie in a folder from which the engines are about to read them."""


NO_HOOKS = TrainHooks()


def hooks_of(args: Any) -> TrainHooks:
    """The hooks that the run's args name. Raises PluginError or SettingsError: one cannot be loaded, or has no effect."""
    found = compat()
    return NO_HOOKS if found is None else found.train_hooks(args)
