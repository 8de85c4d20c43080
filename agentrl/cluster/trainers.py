"""The trainer's actors: one Ray actor a rank, each with a `TrainBackend`, called all together."""

import os
import socket
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from agentrl.cluster.runtime import enter_workspace, wait, worker_environment
from agentrl.config import RunSettings


@ray.remote
class TrainActor:
    """One rank of the trainer."""

    def __init__(self, settings: RunSettings, rank: int, world_size: int, folder: str) -> None:
        enter_workspace(folder)
        self._settings, self._rank, self._world_size = settings, rank, world_size

    def address(self) -> tuple[str, int]:
        """This node's address and a free port on it, for the ranks to meet at."""
        return node_address(self._settings), free_port()

    def pid(self) -> int:
        """The process id."""
        return os.getpid()

    def start(self, address: tuple[str, int]) -> None:
        """Join the other ranks, build the model and load its first weights."""
        from agentrl.train.contracts import RankInfo
        from agentrl.train.megatron.backend import MegatronBackend

        s = self._settings
        local = self._rank % s.cluster.actor_num_gpus_per_node
        where = RankInfo(self._rank, self._world_size, local, *address)
        self.backend = MegatronBackend(
            s.train,
            s.algorithm,
            rollout_temperature=s.rollout.rollout_temperature,
            total_steps=s.rollout.num_rollout * s.train.num_steps_per_rollout,
            device=s.cluster.device,
        )
        self.backend.init(where)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the backend; only rank 0 sends back a result."""
        result = getattr(self.backend, method)(*args, **kwargs)
        return result if self._rank == 0 else None


class TrainGroup:
    """All ranks of the trainer, called at once; the driver's handle."""

    def __init__(self, actors: list[Any], settings: RunSettings) -> None:
        self.actors, self._settings = actors, settings

    @classmethod
    def create(cls, settings: RunSettings, placement: PlacementGroup, folder: str) -> "TrainGroup":
        """Start the actors in the first bundles of `placement`."""
        cuda = settings.cluster.device == "cuda"
        actors = []
        for rank in range(settings.cluster.world_size):
            strategy = PlacementGroupSchedulingStrategy(placement, placement_group_bundle_index=rank)
            threads = settings.train.train_threads
            environment = worker_environment() | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
            actors.append(
                TrainActor.options(  # type: ignore[attr-defined]
                    num_cpus=1,
                    num_gpus=1 if cuda else 0,
                    scheduling_strategy=strategy,
                    runtime_env={"env_vars": environment},
                ).remote(settings, rank, settings.cluster.world_size, folder)
            )
        return cls(actors, settings)

    def start(self) -> list[Any]:
        """Begin starting all ranks; the references resolve when they are ready."""
        timeout = self._settings.cluster.start_timeout
        address = wait(self.actors[0].address.remote(), what="starting the trainer", timeout=timeout)
        return [actor.start.remote(address) for actor in self.actors]

    def begin(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a backend method on all ranks without waiting."""
        return [actor.call.remote(method, *args, **kwargs) for actor in self.actors]

    def call(self, method: str, *args: Any, what: str, **kwargs: Any) -> Any:
        """Call a backend method on all ranks and return rank 0's result."""
        return wait(self.begin(method, *args, **kwargs), what=what, timeout=self._settings.cluster.train_timeout)[0]

    def address(self) -> tuple[str, int]:
        """Rank 0's node and a free port on it."""
        address: tuple[str, int] = wait(self.actors[0].address.remote(), what="asking the trainer", timeout=60)
        return address


def node_address(settings: RunSettings) -> str:
    """This node's address: loopback for a cluster of our own, else the address that Ray knows the node by."""
    return "127.0.0.1" if settings.cluster.ray_address is None else ray.util.get_node_ip_address()


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def resolved(path: str | None) -> Path | None:
    """An absolute path, or None."""
    return None if path is None else Path(path).expanduser().resolve()
