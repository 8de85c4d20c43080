"""`TrainBackend`: what a run asks of a training framework.

1. One backend object lives in each trainer process; all processes make the same calls in the same order, because
   most of them are collective.
2. A batch goes in whole on every rank (it is shared memory); the backend takes its own part by the same pure plan
   (`packing.make_plan`) on every rank, so nothing needs to be scattered.
3. Weights leave under Hugging Face names and in Hugging Face layout, whatever the parallel layout inside.
4. `backends.backend_class` is the only place that knows which backends there are.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from agentrl.algorithms.settings import AlgorithmSettings
from agentrl.errors import TrainError
from agentrl.train.batch import TrainBatch
from agentrl.train.hf import HFFolder
from agentrl.train.hooks import NO_HOOKS, TrainHooks
from agentrl.train.settings import TrainSettings

if TYPE_CHECKING:
    from torch import Tensor

ModelRole = Literal["actor", "ref", "teacher"]
Learners = Literal["all", "actor", "critic"]
"""The learning models of a process: those of the run, or one of two that have processes of their own."""
Device = Literal["auto", "cuda", "cpu"]


@dataclass(frozen=True, slots=True)
class RankInfo:
    """Where a trainer process stands: its rank, the number of processes, and where they meet."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0


class WeightSpec(NamedTuple):
    """One exported tensor: its Hugging Face name, the name of its dtype (`bfloat16`, ...) and its full shape."""

    name: str
    dtype: str
    shape: list[int]


@dataclass(frozen=True, slots=True)
class Prepared:
    """What is fixed of a rollout before its first optimizer step.

    Attributes:
        arrays: float32 [R] each, in the batch's flat response layout: `advantages`, with a critic `values` and `returns`
            (what it is to predict), and the log-probs that the loss reads, by their names in `TokenView`.
        metrics: of the advantages, and of the critic before it learns.
    """

    arrays: Mapping[str, NDArray[np.float32]]
    metrics: Mapping[str, float]


class TrainBackend(ABC):
    """One rank of a trainer. All backends are made with the same arguments; `init` does the work.

    A critic with processes of its own takes part in a rollout so: its processes give `values`, the actor's `prepare` the
    batch with them, and both `train` on what was prepared.

    Args:
        settings: the trainer's settings; `hf_checkpoint` names the starting weights.
        algorithm: the objective's settings.
        rollout_temperature: the sampling temperature, by which logits are divided.
        total_steps: optimizer steps of the whole run, where the learning rate's decay ends by default.
        device: `cuda`, `cpu`, or whichever this machine has.
        learners: the models that learn in this process; one of the critic alone knows values, training and checkpoints.
        hooks: code in another trainer's form; by default there is none.
    """

    @final
    def __init__(
        self,
        settings: TrainSettings,
        algorithm: AlgorithmSettings,
        *,
        rollout_temperature: float = 1.0,
        total_steps: int | None = None,
        device: Device = "auto",
        learners: Learners = "all",
        hooks: TrainHooks = NO_HOOKS,
    ) -> None:
        if settings.hf_checkpoint is None:
            raise TrainError("the trainer needs hf_checkpoint, the Hugging Face folder to start from")
        self.settings, self.algorithm, self.hooks = settings, hooks.objective(algorithm), hooks
        self.temperature, self.total_steps, self.device_kind = rollout_temperature, total_steps, device
        self.learners = learners
        self.folder = HFFolder(settings.hf_checkpoint)

    @abstractmethod
    def init(self, where: RankInfo) -> None:
        """Join the process group, build the models and the optimizer, and load the starting weights. Collective.

        Raises:
            TrainError: the model or the layout cannot be trained.
            CheckpointError: the starting folder is not a readable model.
        """

    @abstractmethod
    def prepare(self, batch: TrainBatch, values: NDArray[np.float32] | None = None) -> Prepared:
        """What `train` starts from; the same on every rank. Collective.

        Args:
            batch: the rollout's samples.
            values: `values` of a critic that has processes of its own.

        Raises:
            TrainError: the algorithm reads what no model of this process computes.
        """

    @abstractmethod
    def train(self, batch: TrainBatch, step: int, prepared: Prepared | None = None) -> Mapping[str, float]:
        """Train on one rollout's batch: `num_steps_per_rollout` optimizer steps. Collective.

        The first `num_critic_only_steps` rollouts leave the actor as it is.

        Args:
            batch: the rollout's samples.
            step: the number of optimizer steps (not rollouts) taken before this call; it places the learning rate.
            prepared: by default `prepare(batch)`.

        Returns:
            Metrics averaged as the loss is, the same on every rank; `steps` is how many optimizer steps were taken.

        Raises:
            TrainError: a token id outside the vocabulary; or a non-finite loss or gradient, and the weights are then
                as before the failed step.
        """

    @abstractmethod
    def details(self) -> Mapping[str, NDArray[np.float16]]:
        """What the last `train` said of each response token, to look at: [R] each in the batch's flat layout.

        `log_probs` are the actor's when it took its step on the token; `advantages`, and `values`, `ref_log_probs` and
        `teacher_log_probs` where the objective has them. NaN where the token did not train. The same on every rank.
        """

    @abstractmethod
    def log_probs(self, batch: TrainBatch, model: ModelRole = "actor") -> NDArray[np.float32]:
        """Natural-log probabilities [R] of all response tokens of `batch`, in its flat layout, on every rank. Collective.

        The rollout temperature is applied to the logits, so the numbers compare with the engine's.

        Raises:
            TrainError: the run has no such model.
        """

    @abstractmethod
    def values(self, batch: TrainBatch) -> NDArray[np.float32]:
        """The critic's value [R] of the state before each trained token, 0 at others, on every rank. Collective.

        Raises:
            TrainError: this process has no critic.
        """

    @abstractmethod
    def close(self) -> None:
        """Leave all process groups. Collective."""

    # ---- the actor's weights on their way to the engines -------------------------------------------------

    @abstractmethod
    def weight_specs(self) -> list[WeightSpec]:
        """What `export_weights` yields, in its order; local and cheap."""

    @abstractmethod
    def export_weights(self, only: Collection[str] | None = None) -> Iterator[tuple[str, "Tensor"]]:
        """Full tensors under HF names, on rank 0; elsewhere an empty stream that must be exhausted. Collective.

        `only` restricts it to these HF names (the same on every rank).
        """

    @abstractmethod
    def init_weight_group(
        self,
        master_addr: str,
        master_port: int,
        world_size: int,
        group_name: str = "agentrl_weights",
        backend: str | None = None,
    ) -> None:
        """Rank 0 opens the group over which engines receive weights, as its rank 0; elsewhere a no-op.

        Blocks until all `world_size` members have joined, so ask the engines to join at the same time.
        """

    @abstractmethod
    def broadcast_weights(self, buckets: Sequence[Sequence[str]] | None = None) -> None:
        """Send weights to the engines, tensor by tensor in the order of `weight_specs`. Collective.

        Args:
            buckets: the HF names as the engines were told to expect them; None sends all. Their borders do not
                matter to the sender, their order must be that of `weight_specs`.

        Raises:
            TrainError: no group was opened, or the names are in another order.
        """

    @abstractmethod
    def close_weight_group(self) -> None:
        """Leave the group that `init_weight_group` opened, if any."""

    # ---- memory while engines on the same devices generate: nothing else is called in between ------------

    @abstractmethod
    def offload(self) -> None:
        """Give back the memory of models, gradients and optimizer states; twice is once.

        Raises:
            TrainError: there is no room for their bytes; everything is as before.
        """

    @abstractmethod
    def onload(self) -> None:
        """Bring it all back, bit for bit but for gradients, which are zero; twice is once."""

    # ---- what outlives the process -----------------------------------------------------------------------

    @abstractmethod
    def save(self, path: str | Path, step: int, critic: str | Path | None = None) -> None:
        """Write model, optimizer, random state and `step` into the folder `path`, whole or not at all. Collective.

        The critic's part is in a folder of it, so that one placement of the critic resumes from another's. `critic`:
        what the processes of the critic alone have saved; it is moved there.

        Raises:
            CheckpointError: it could not be written; earlier ones are as they were.
        """

    @abstractmethod
    def load(self, path: str | Path) -> int:
        """Restore what `save` wrote, under this or another parallel layout; returns its step. Collective.

        `path` is a checkpoint, or a folder of checkpoints of which the newest complete one is taken.

        Raises:
            CheckpointError: nothing complete is there, or it is damaged, or of another model, or it holds a critic and
                the run has none, or the other way round.
        """

    @abstractmethod
    def save_hf(self, path: str | Path, *, served: bool = False) -> None:
        """Write a Hugging Face folder (weights, config, tokenizer files) atomically. Collective.

        `served`: engines are about to read it.
        """
