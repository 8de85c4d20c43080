"""The trainer as Ray actors, one a rank, called all together; and the driver's handle of them."""

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

from agentrl.cluster.runtime import enter_workspace, node_address
from agentrl.cluster.waiting import value, values
from agentrl.config import RunSettings
from agentrl.run.parts import Batch, TensorSpec, Trainer, WeightGroup, WeightSource
from agentrl.run.training import RankInfo, free_port, start_backend


@ray.remote
class TrainActor:
    """One rank of the trainer; only rank 0 sends back results."""

    def __init__(self, settings: RunSettings, workspace: str) -> None:
        enter_workspace(workspace)
        self._settings = settings

    def address(self) -> tuple[str, int]:
        """This node's address and a free port on it, for others to meet at."""
        return node_address(self._settings.cluster.ray_address is not None), free_port()

    def pid(self) -> int:
        """The process id."""
        return os.getpid()

    def start(self, where: RankInfo) -> None:
        """Join the other ranks, build the model and load its first weights."""
        self._backend, self._first = start_backend(self._settings, where), where.rank == 0

    def load(self, path: Path) -> None:
        self._backend.load(path)

    def train(self, payload: Any, steps: int) -> Mapping[str, float] | None:
        metrics = self._backend.train(payload, steps)
        return metrics if self._first else None

    def save(self, path: Path, step: int) -> None:
        self._backend.save(path, step)

    def save_hf(self, path: Path) -> None:
        self._backend.save_hf(path)

    def weight_specs(self) -> list[TensorSpec]:
        return [(name, dtype, shape) for name, dtype, shape in self._backend.weight_specs()]

    def init_weight_group(self, group: WeightGroup) -> None:
        self._backend.init_weight_group(group.address, group.port, group.world_size, group.name, group.backend)

    def broadcast_weights(self, names: Sequence[str]) -> None:
        self._backend.broadcast_weights([names])

    def close_weight_group(self) -> None:
        self._backend.close_weight_group()


class RayTrainer(Trainer, WeightSource):
    """All ranks; the driver's handle."""

    def __init__(self, actors: Sequence[Any]) -> None:
        self.actors = actors

    async def start(self, ranks: Sequence[RankInfo]) -> None:
        """Start all ranks; `ranks` say where each stands, but not where they meet."""
        address, port = await self.address()
        await values(
            [
                actor.start.remote(RankInfo(r.rank, r.world_size, r.local_rank, address, port))
                for actor, r in zip(self.actors, ranks, strict=True)
            ]
        )

    async def load(self, path: Path) -> None:
        """Restore a checkpoint."""
        await values([actor.load.remote(path) for actor in self.actors])

    async def train(self, batch: Batch, steps: int) -> Mapping[str, float]:
        found = await values([actor.train.remote(batch.payload, steps) for actor in self.actors])
        metrics: Mapping[str, float] = found[0]
        return metrics

    async def save(self, path: Path, step: int) -> None:
        await values([actor.save.remote(path, step) for actor in self.actors])

    async def save_hf(self, path: Path) -> None:
        await values([actor.save_hf.remote(path) for actor in self.actors])

    async def address(self) -> tuple[str, int]:
        address: tuple[str, int] = await value(self.actors[0].address.remote())
        return address

    async def weight_specs(self) -> list[TensorSpec]:
        specs: list[TensorSpec] = await value(self.actors[0].weight_specs.remote())
        return specs

    async def init_weight_group(self, group: WeightGroup) -> None:
        await values([actor.init_weight_group.remote(group) for actor in self.actors])

    async def broadcast_weights(self, names: Sequence[str]) -> None:
        await values([actor.broadcast_weights.remote(names) for actor in self.actors])

    async def close_weight_group(self) -> None:
        await values([actor.close_weight_group.remote() for actor in self.actors])


def rank_order(nodes: Sequence[str]) -> list[int]:
    """Which bundle each rank takes, so that neighbouring ranks (tensor parallel) share a node.

    Ray does not keep a placement group's bundles together by node.

    Args:
        nodes: the node that each bundle lies on.
    """
    first = {node: at for at, node in reversed(list(enumerate(nodes)))}
    return sorted(range(len(nodes)), key=lambda bundle: (first[nodes[bundle]], bundle))


def local_ranks(nodes: Sequence[str]) -> list[int]:
    """For each rank, in order, how many ranks before it are on its node."""
    seen: Counter[str] = Counter()
    out = []
    for node in nodes:
        out.append(seen[node])
        seen[node] += 1
    return out


_trainer: type[Trainer] = RayTrainer
_source: type[WeightSource] = RayTrainer
