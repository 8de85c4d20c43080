"""The trainer as Ray actors, one per rank, and the driver's handle, which calls all of them together."""

import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

from agentrl.cluster.runtime import enter_workspace, log_output, node_address, value, values
from agentrl.config import RunSettings
from agentrl.run.protocols import Batch, TensorSpec, Trainer, WeightSource
from agentrl.run.training import Learners, RankInfo, free_port, start_backend


@ray.remote
class TrainActor:
    """One rank of the trainer."""

    def __init__(self, settings: RunSettings, workspace: str, logs: Path, learners: Learners = "all") -> None:
        enter_workspace(workspace)
        self._settings, self._logs, self._learners = settings, logs, learners

    def address(self) -> tuple[str, int]:
        """Return this node's address and a free port on it, for the rendezvous of the ranks."""
        return node_address(self._settings), free_port()

    def gpus(self) -> list[str]:
        """Return the GPUs of this process, by their index or name on the node."""
        return [str(gpu) for gpu in ray.get_gpu_ids()]

    def pid(self) -> int:
        return os.getpid()

    def start(self, where: RankInfo) -> None:
        """Join the other ranks, build the model and load its first weights. Output goes to a file of the run's logs."""
        log_output(self._logs / f"{'critic' if self._learners == 'critic' else 'trainer'}-{where.rank}.log")
        self._backend, self._first = start_backend(self._settings, where, self._learners), where.rank == 0

    def call(self, name: str, *args: Any, **named: Any) -> Any:
        """Call this method of the backend; only rank 0 returns the result."""
        found = getattr(self._backend, name)(*args, **named)
        return found if self._first else None


async def _call(actors: Sequence[Any], name: str, *args: Any, **named: Any) -> list[Any]:
    return await values([actor.call.remote(name, *args, **named) for actor in actors])


def _of_actors(name: str) -> Callable[..., Coroutine[Any, Any, None]]:
    """Make a method that calls this method of the actor's processes, but not of a separate critic's."""

    async def call(self: "RayTrainer", *args: Any, **named: Any) -> None:
        await _call(self.actors, name, *args, **named)

    return call


class RayTrainer(Trainer, WeightSource):
    """The driver's handle of all ranks, in order. `critics`: the processes of a separate critic. They and the actor's
    processes exchange data through the object store, and take their optimizer steps at the same time."""

    offload, onload, save_hf = _of_actors("offload"), _of_actors("onload"), _of_actors("save_hf")
    init_weight_group, close_weight_group = _of_actors("init_weight_group"), _of_actors("close_weight_group")
    broadcast_weights = _of_actors("broadcast_weights")

    def __init__(self, actors: Sequence[Any], critics: Sequence[Any] = ()) -> None:
        self.actors, self.critics, self.processes = actors, critics, [*actors, *critics]

    async def start(self, ranks: Sequence[RankInfo]) -> None:
        """Start all processes. `ranks`: the rank of each among its kind, without the address of the rendezvous."""
        firsts = (self.actors[0], *self.critics[:1])
        places: list[tuple[str, int]] = [await value(first.address.remote()) for first in firsts]
        starting = []
        for at, (process, own) in enumerate(zip(self.processes, ranks, strict=True)):
            where = RankInfo(own.rank, own.world_size, own.local_rank, *places[at >= len(self.actors)])
            starting.append(process.start.remote(where))
        await values(starting)

    async def load(self, path: Path) -> None:
        await _call(self.processes, "load", path)

    async def train(self, batch: Batch, step: int) -> Mapping[str, float]:
        prepared = await self._prepared(batch) if self.critics else None
        found = await _call(self.processes, "train", batch.payload, step, prepared)
        critic: Mapping[str, float] = found[len(self.actors)] if self.critics else {}
        return {**critic, **found[0]}

    async def details(self) -> Any:
        """Return a reference, through which the rollouts' process fetches the details."""
        return self.actors[0].call.remote("details")

    async def _prepared(self, batch: Batch) -> Any:
        """Return a reference to the prepared data on which both sides train."""
        found = [critic.call.remote("values", batch.payload) for critic in self.critics]
        await values(found)
        prepared = [actor.call.remote("prepare", batch.payload, found[0]) for actor in self.actors]
        await values(prepared)
        return prepared[0]

    async def save(self, path: Path, step: int) -> None:
        part = path.with_name(f".{path.name}.critic") if self.critics else None
        await _call(self.critics, "save", part, step)
        await _call(self.actors, "save", path, step, part)

    async def saved(self, *, wait: bool) -> bool:
        for processes in filter(None, (self.critics, self.actors)):  # the actor's checkpoint includes the critic's
            if not (await _call(processes, "saved", wait=wait))[0]:
                return False
        return True

    async def address(self, rank: int) -> tuple[str, int]:
        return await value(self.actors[rank].address.remote())

    async def share_weights(self, specs: Sequence[TensorSpec], *, first: bool, readers: int) -> list[str]:
        return (await _call(self.actors, "share_weights", specs, first=first, readers=readers))[0]

    async def weight_specs(self) -> Mapping[int, list[TensorSpec]]:
        return await value(self.actors[0].call.remote("weight_specs"))


def rank_order(nodes: Sequence[str]) -> list[int]:
    """Return the bundle of each rank, given the node of each bundle, so that neighbouring ranks (tensor parallel) share
    a node. Ray does not keep a placement group's bundles together by node."""
    first = {node: at for at, node in reversed(list(enumerate(nodes)))}
    return sorted(range(len(nodes)), key=lambda bundle: (first[nodes[bundle]], bundle))


def local_ranks(nodes: Sequence[str]) -> list[int]:
    """Return the number of earlier ranks on the same node, for each rank in order."""
    return [nodes[:rank].count(node) for rank, node in enumerate(nodes)]
