"""Protocols for the parts of a run, as the driver and the weight update call them.

1. All calls are async. `Rollouts` generate, a `Trainer` trains, a `WeightTransfer` sends the weights to the engines.
   `agentrl.cluster` implements them with Ray actors, `agentrl.run.local` in one process.
2. The payload of a batch is opaque to the driver: a reference into an object store, or the arrays themselves.
3. A part raises `AgentRLError`; `ComponentLost` if a process or a machine failed. The driver sets the deadlines."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import anyio

from agentrl.config import RunSettings
from agentrl.engine.weights import Bucket, Handles, WeightGroup, WeightUpdate
from agentrl.engine.weights import TensorSpec as TensorSpec
from agentrl.errors import AgentRLError
from agentrl.observability.progress import Progress as Progress
from agentrl.observability.progress import counted as counted
from agentrl.runfolder import RunFolder
from agentrl.train.checkpoints import Found as Found


class ComponentLost(AgentRLError):
    """A process of the run died, or its code raised an error that is not an `AgentRLError`."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The groups of one training step, by their numbers in the ledger, and the metrics of their rollout. `payload`: a
    `TrainBatch`, or a reference to one that the trainer accepts."""

    payload: Any
    group_ids: tuple[int, ...]
    metrics: Mapping[str, float]


class Rollouts(Protocol):
    """The part that generates, grades and evaluates. It owns data source, admission and ledger.

    batch = await rollouts.next_batch(0)  # waits until the batch is full
    await trainer.train(batch, 0)
    await rollouts.trained(batch.group_ids, 0)  # the ledger does not lease these groups again"""

    async def next_batch(self, step: int) -> Batch | None:
        """Return the batch of training step `step`; None if the data ended before the batch was full."""

    async def trained(self, group_ids: Sequence[int], step: int, details: Any = None) -> None:
        """Record that `step` trained these groups. `details`: the trainer's per-token values, for the viewer."""

    async def saving(self) -> None:
        """Prepare for a checkpoint of all steps trained so far, which is about to be written."""

    async def checkpointed(self, step: int) -> None:
        """Record that a durable checkpoint covers all steps up to `step`."""

    async def updated(self, version: int) -> None:
        """Record that the engines have weight version `version`."""

    async def set_resident_memory(self, memory: frozenset[str]) -> None:
        """Have the engines keep or onload these parts of `WHOLE`, and offload the others."""

    async def evaluate(self, done: int) -> Mapping[str, float]:
        """Evaluate all sets with the engines' current weights, which were trained on `done` rollouts."""


EVALUATES = "eval"  # the engine group that evaluates, if there is one


class WithoutEngines(Rollouts):
    """Rollouts that no engine generates, so that nothing is updated or evaluated."""

    async def updated(self, version: int) -> None:
        pass

    async def set_resident_memory(self, memory: frozenset[str]) -> None:
        pass

    async def evaluate(self, done: int) -> Mapping[str, float]:
        return {}


class Trainer(Protocol):
    """All ranks of the trainer."""

    async def train(self, batch: Batch, step: int) -> Mapping[str, float]:
        """Take the optimizer steps of training step `step`; return metrics."""

    async def details(self) -> Any:
        """Return the per-token values of the last `train` (see `TrainBackend.details`), for `Rollouts.trained`."""

    async def offload(self) -> None:
        """Free device memory; only `onload` may follow. A second call does nothing."""

    async def onload(self) -> None:
        """Restore device memory with the same state. A second call does nothing."""

    async def save(self, path: Path, step: int) -> None:
        """Write a checkpoint of rollouts up to `step`, atomically. With `--async-save`, return before it ends."""

    async def saved(self, *, wait: bool) -> bool:
        """Return true if no checkpoint is being written. With `wait`, first wait until none is."""

    async def save_hf(self, path: Path, *, served: bool = False) -> None:
        """Write the model as a Hugging Face folder. `served`: engines will load the folder."""


class WeightSource(Protocol):
    """The trainer's side of a weight update by broadcast."""

    async def address(self, rank: int) -> tuple[str, int]:
        """Return the node address of a trainer process, and a free port on that node."""

    async def weight_specs(self) -> Mapping[int, list[TensorSpec]]:
        """Return name, dtype and shape of every tensor, in the order of sending, by the rank that sends the tensor."""

    async def init_weight_group(self, group: WeightGroup) -> None:
        """Open the process group as its rank 0; returns when all members have joined."""

    async def broadcast_weights(self, buckets: Sequence[Bucket]) -> None:
        """Send every tensor: each sender's in its group, in this order."""

    async def close_weight_group(self) -> None:
        """Leave the process groups."""

    async def share_weights(self, specs: Sequence[TensorSpec], *, first: bool, readers: int) -> list[str]:
        """Return a handle per trainer process, for these tensors on its device. `specs` continue the `weight_specs`.
        Only the first `readers` handles are read. The memory stays until the next call; empty `specs` free it."""


class WeightSink(Protocol):
    """The engines' side of a weight update.

    await sink.receive(DiskUpdate("weights/3"), "3")  # engines are paused meanwhile
    await rollouts.updated(3)  # groups are leased under version 3 from now on"""

    async def epoch(self) -> tuple[str, ...]:
        """Return the names of the engines that would take an update now. A restarted engine has a new name."""

    async def join_weight_group(self, group: WeightGroup) -> None:
        """Have every engine join; return when all members have joined."""

    async def leave_weight_group(self, name: str) -> None:
        """Have every engine leave."""

    async def receive(self, update: WeightUpdate, version: str) -> None:
        """Have every engine load the weights and label them `version`."""

    async def offer(self, key: str, handles: Handles) -> None:
        """Have the running `receive` of update `key` read the next bucket from shared memory; return when read."""

    async def lacks_weights(self) -> bool:
        """Return true if no engine has the current weights and only the trainer can send them."""


class WeightTransfer(Protocol):
    """Carries weights from the trainer to the engines."""

    async def send(self, version: int) -> None:
        """Send the trainer's current weights to all engines as `version`."""

    async def lost(self) -> bool:
        """Return true if the last weights must be sent again because all engines were restarted."""


@dataclass(frozen=True, slots=True)
class Components:
    """A started run. `weights` is None without engines. `eval_weights`: transfer to the engine group that evaluates."""

    rollouts: Rollouts
    trainer: Trainer
    weights: WeightTransfer | None
    eval_weights: WeightTransfer | None = None


Start = Callable[[RunSettings, RunFolder, Found | None, Progress], AbstractAsyncContextManager[Components]]
"""Starts all parts, from a checkpoint if one is found. Stops all parts at the end, also after an error."""


@contextmanager
def within(seconds: float, what: str) -> Iterator[None]:
    """Limit the time of a block; messages call it `what`. Raises AgentRLError: it timed out, or a part was lost."""
    try:
        with anyio.fail_after(seconds) as scope:
            yield
    except TimeoutError as error:
        if not scope.cancelled_caught:
            raise
        raise AgentRLError(f"{what} took longer than {seconds:g} s") from error
    except ComponentLost as error:
        raise AgentRLError(f"{what} failed: {error}") from error.__cause__
