"""`TrainBackend`: what a run asks of a training framework, as three contracts that the type checker holds.

1. One backend object lives in each trainer process; all processes make the same calls in the same order, because
   most of them are collective.
2. A batch goes in whole on every rank (it is shared memory); the backend takes its own part by the same pure plan
   (`packing.plan`) on every rank, so nothing needs to be scattered.
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
from agentrl.train.settings import TrainSettings

if TYPE_CHECKING:
    from torch import Tensor

ModelRole = Literal["actor", "ref", "teacher"]
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


class Training(ABC):
    """Optimizer steps and log-probabilities."""

    @abstractmethod
    def init(self, where: RankInfo) -> None:
        """Join the process group, build the models and the optimizer, and load the starting weights. Collective.

        Raises:
            TrainError: the model or the layout cannot be trained.
            CheckpointError: the starting folder is not a readable model.
        """

    @abstractmethod
    def train(self, batch: TrainBatch, step: int) -> Mapping[str, float]:
        """Train on one rollout's batch: `num_steps_per_rollout` optimizer steps. Collective.

        Args:
            batch: the rollout's samples.
            step: the number of optimizer steps (not rollouts) taken before this call; it places the learning rate.

        Returns:
            Metrics averaged as the loss is, the same on every rank; `steps` is how many optimizer steps were taken.

        Raises:
            TrainError: a token id outside the vocabulary; or a non-finite loss or gradient, and the weights are then
                as before the failed step.
        """

    @abstractmethod
    def log_probs(self, batch: TrainBatch, model: ModelRole = "actor") -> NDArray[np.float32]:
        """Natural-log probabilities [R] of all response tokens of `batch`, in its flat layout, on every rank. Collective.

        The rollout temperature is applied to the logits, so the numbers compare with the engine's.

        Raises:
            TrainError: the run has no such model.
        """

    @abstractmethod
    def close(self) -> None:
        """Leave all process groups. Collective."""


class Weights(ABC):
    """The actor's weights on their way to the engines."""

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


class Durable(ABC):
    """What outlives the process."""

    @abstractmethod
    def save(self, path: str | Path, step: int) -> None:
        """Write model, optimizer, random state and `step` into the folder `path`, whole or not at all. Collective.

        Raises:
            CheckpointError: it could not be written; earlier ones are as they were.
        """

    @abstractmethod
    def load(self, path: str | Path) -> int:
        """Restore what `save` wrote, under this or another parallel layout; returns its step. Collective.

        `path` is a checkpoint, or a folder of checkpoints of which the newest complete one is taken.

        Raises:
            CheckpointError: nothing complete is there, or it is damaged, or of another model.
        """

    @abstractmethod
    def save_hf(self, path: str | Path) -> None:
        """Write a Hugging Face folder (weights, config, tokenizer files) atomically. Collective."""


class TrainBackend(Training, Weights, Durable, ABC):
    """One rank of a trainer. All backends are made with the same arguments; `init` does the work.

    Args:
        settings: the trainer's settings; `hf_checkpoint` names the starting weights.
        algorithm: the objective's settings.
        rollout_temperature: the sampling temperature, by which logits are divided.
        total_steps: optimizer steps of the whole run, where the learning rate's decay ends by default.
        device: `cuda`, `cpu`, or whichever this machine has.
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
    ) -> None:
        if settings.hf_checkpoint is None:
            raise TrainError("the trainer needs hf_checkpoint, the Hugging Face folder to start from")
        self.settings, self.algorithm = settings, algorithm
        self.temperature, self.total_steps, self.device_kind = rollout_temperature, total_steps, device
        self.folder = HFFolder(settings.hf_checkpoint)
