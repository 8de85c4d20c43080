"""The parts of a run, as the driver and the weight sync see them.

1. Protocols, all of them awaited: `Rollouts` generate, a `Trainer` learns, `WeightTransfer` travel from one to the other.
   `agentrl.cluster` gives them as Ray actors, `agentrl.run.local` in one process.
2. What a batch holds is opaque to the driver: a reference into an object store, or the arrays themselves.
3. A part raises `AgentRLError`; `ComponentLost` if a process or a machine is to blame. Deadlines are the driver's."""

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
    """A process of the run died, or its code failed in a way that none of our errors describes."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The groups of one training step, by their numbers in the ledger, and the metrics of their rollout. `payload`: a
    `TrainBatch`, or whatever the trainer takes for one."""

    payload: Any
    group_ids: tuple[int, ...]
    metrics: Mapping[str, float]


class Rollouts(Protocol):
    """Generates, grades and evaluates; the owner of the data source, the admission and the ledger.

    batch = await rollouts.next_batch(0)  # waits until the batch is full
    await trainer.train(batch, 0)
    await rollouts.trained(batch.group_ids, 0)  # the ledger does not give these groups out again"""

    async def next_batch(self, step: int) -> Batch | None:
        """The batch of training step `step`; None when the data has come to its end before it was full."""

    async def trained(self, group_ids: Sequence[int], step: int, details: Any = None) -> None:
        """The optimizer has taken the batch's steps; `details` are the trainer's, kept to look at."""

    async def saving(self) -> None:
        """A checkpoint of all steps trained so far is about to be written."""

    async def checkpointed(self, step: int) -> None:
        """A durable checkpoint covers everything up to `step`."""

    async def updated(self, version: int) -> None:
        """The engines have the weights that `version` rollouts have trained."""

    async def set_resident_memory(self, memory: frozenset[str]) -> None:
        """Have the engines keep or take this part of `WHOLE`, and give back the rest."""

    async def evaluate(self, done: int) -> Mapping[str, float]:
        """Play all evaluation sets with the engines' current weights; `done` rollouts have been trained."""


EVALUATES = "eval"  # the engine group that evaluates, if there is one


class WithoutEngines(Rollouts):
    """Rollouts that are not generated: there is nothing to evaluate with."""

    async def updated(self, version: int) -> None:
        pass

    async def set_resident_memory(self, memory: frozenset[str]) -> None:
        pass

    async def evaluate(self, done: int) -> Mapping[str, float]:
        return {}


class Trainer(Protocol):
    """All ranks of the trainer."""

    async def train(self, batch: Batch, step: int) -> Mapping[str, float]:
        """Take the optimizer steps of training step `step`; returns metrics."""

    async def details(self) -> Any:
        """The figures of each token in the last `train` (`Training.details`), as `Rollouts.trained` takes them."""

    async def offload(self) -> None:
        """Give back the devices' memory; only `onload` may follow. Twice is once."""

    async def onload(self) -> None:
        """Take it again, with the same state. Twice is once."""

    async def save(self, path: Path, step: int) -> None:
        """Write a checkpoint of rollouts up to `step`, whole or not at all. With `--async-save`, return meanwhile."""

    async def saved(self, *, wait: bool) -> bool:
        """Return true if no checkpoint is under way any more; with `wait`, return when that is so."""

    async def save_hf(self, path: Path, *, served: bool = False) -> None:
        """Write the model as a Hugging Face folder, which engines are about to read if it is `served`."""


class WeightSource(Protocol):
    """The trainer's side of a weight update by broadcast."""

    async def address(self, rank: int) -> tuple[str, int]:
        """The node of a trainer process and a free port on it."""

    async def weight_specs(self) -> Mapping[int, list[TensorSpec]]:
        """Name, dtype and shape of every tensor, by the rank of the process that sends it, in the order of sending."""

    async def init_weight_group(self, group: WeightGroup) -> None:
        """Open the process group as its rank 0; returns when all members have joined."""

    async def broadcast_weights(self, buckets: Sequence[Bucket]) -> None:
        """Send every tensor: each sender's in its group, in this order."""

    async def close_weight_group(self) -> None:
        """Leave the process groups."""

    async def share_weights(self, specs: Sequence[TensorSpec], *, first: bool, readers: int) -> list[str]:
        """Return handles of these tensors, one a trainer process, on whose device they lie: the next ones in the order of
        `weight_specs`. Only the first `readers` are read. The memory stays until the next call; no specs give it back."""


class WeightSink(Protocol):
    """The engines' side of a weight update.

    await sink.receive(DiskUpdate("weights/3"), "3")  # engines are paused meanwhile
    await rollouts.updated(3)  # groups are leased under version 3 from now on"""

    async def epoch(self) -> tuple[str, ...]:
        """Names of the engines that would take an update now; an engine that was away has a new one."""

    async def join_weight_group(self, group: WeightGroup) -> None:
        """Every engine joins; returns when all members have."""

    async def leave_weight_group(self, name: str) -> None:
        """Every engine leaves."""

    async def receive(self, update: WeightUpdate, version: str) -> None:
        """Every engine takes the weights and labels them `version`."""

    async def offer(self, key: str, handles: Handles) -> None:
        """The update `key`, whose `receive` is under way, takes the next bucket from shared memory; returns when it has."""

    async def lacks_weights(self) -> bool:
        """Return true if no engine has the current weights any more, and only the trainer can give them."""


class WeightTransfer(Protocol):
    """Carries weights from the trainer to the engines."""

    async def send(self, version: int) -> None:
        """Bring all engines to the trainer's current weights."""

    async def lost(self) -> bool:
        """Return true if the engines need the last weights once more, as all of them were started again."""


@dataclass(frozen=True, slots=True)
class Components:
    """A started run. Without `weights` there are no engines. `eval_weights`: to the engine group that evaluates."""

    rollouts: Rollouts
    trainer: Trainer
    weights: WeightTransfer | None
    eval_weights: WeightTransfer | None = None


Start = Callable[[RunSettings, RunFolder, Found | None, Progress], AbstractAsyncContextManager[Components]]
"""Starts every part, going on from a checkpoint if one is found, and stops every one at the end, whatever ends it."""


@contextmanager
def within(seconds: float, what: str) -> Iterator[None]:
    """Limit the time of a block, `what` in messages. Raises AgentRLError: the deadline passed, or a part was lost."""
    try:
        with anyio.fail_after(seconds) as scope:
            yield
    except TimeoutError as error:
        if not scope.cancelled_caught:
            raise
        raise AgentRLError(f"{what} took longer than {seconds:g} s") from error
    except ComponentLost as error:
        raise AgentRLError(f"{what} failed: {error}") from error.__cause__
