"""`TrainBackend`: what the driver asks of a training framework.

1. One backend object lives in each trainer process; all processes make the same calls in the same order, because
   most of them are collective.
2. A batch goes in whole on every rank (it is shared memory); the backend takes its own part by the same pure plan
   (`packing.plan`) on every rank, so nothing needs to be scattered.
3. Weights leave under Hugging Face names and in Hugging Face layout, whatever the parallel layout inside.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from agentrl.train.batch import TrainBatch

if TYPE_CHECKING:
    from torch import Tensor

ModelRole = Literal["actor", "ref"]


@dataclass(frozen=True, slots=True)
class RankInfo:
    """Where a trainer process stands: its rank, the number of processes, and where they meet."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0


@runtime_checkable
class TrainBackend(Protocol):
    """A trainable copy of the model in one process (one rank of many)."""

    def init(self, where: RankInfo) -> None:
        """Join the process group, build the model and optimizer, and load the starting weights. Collective."""

    def compute_log_probs(self, batch: TrainBatch, model: ModelRole = "actor") -> NDArray[np.float32]:
        """Natural-log probabilities of all response tokens of `batch`, in its flat response layout [R].

        The rollout temperature is applied to the logits, so the numbers compare with the engine's. Collective;
        every rank gets all of them.
        """

    def train(self, batch: TrainBatch, step: int) -> Mapping[str, float]:
        """Train on one rollout's batch: `num_steps_per_rollout` optimizer steps. Collective.

        Args:
            batch: the rollout's samples.
            step: the number of optimizer steps taken before this call; it places the learning rate.

        Returns:
            Metrics averaged as the loss is, the same on every rank; `steps` is how many optimizer steps were taken.

        Raises:
            TrainError: a non-finite loss or gradient; the weights are then as before the failed step.
        """

    def export_weights(self) -> Iterator[tuple[str, "Tensor"]]:
        """Full tensors under Hugging Face names, one after the other. Collective: every rank must exhaust it."""

    def save(self, path: str | Path) -> None:
        """Write model, optimizer and random state into the folder `path`, whole or not at all. Collective."""

    def load(self, path: str | Path) -> None:
        """Restore what `save` wrote, under this or another parallel layout. Collective.

        Raises:
            CheckpointError: the folder is missing, incomplete, or of another model.
        """

    def offload(self) -> None:
        """Free the accelerator's memory for the engines; a no-op on CPU."""

    def onload(self) -> None:
        """Undo `offload`."""
