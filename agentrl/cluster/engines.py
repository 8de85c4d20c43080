"""Engine actors: one Ray actor an engine, so that engines land on the cluster's nodes and end with the run."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from agentrl.cluster.runtime import enter_workspace, wait, worker_environment
from agentrl.cluster.trainers import node_address
from agentrl.config import RunSettings


@ray.remote
class EngineActor:
    """Starts one inference server on its node and stops it when the actor ends."""

    def __init__(self, settings: RunSettings, folder: str) -> None:
        enter_workspace(folder)
        self._settings, self._stack = settings, ExitStack()

    def start(self, index: int, log_folder: str) -> str:
        """Start the server; returns its URL."""
        from agentrl.engine import launch_blocking

        s = self._settings
        assert s.train.hf_checkpoint is not None
        base = s.engine.engine_port_base
        own = s.engine.model_copy(update={"engine_port_base": None if base is None else base + index})
        folder = Path(log_folder) / f"engine_{index}"
        launched = launch_blocking(
            own,
            s.train.hf_checkpoint,
            count=1,
            log_dir=folder,
            host=node_address(s) if s.cluster.ray_address else None,
            gpus_per_engine=s.cluster.rollout_num_gpus_per_engine,
        )
        self._process = self._stack.enter_context(launched)[0]
        return self._process.url

    def pid(self) -> int | None:
        """The server's process id."""
        return self._process.pid

    def stop(self) -> None:
        """Stop the server."""
        self._stack.close()


class EngineGroup:
    """All engines; the driver's handle. External engines have URLs and no actors."""

    def __init__(self, actors: list[Any], urls: list[str] | None, settings: RunSettings, log_folder: Path) -> None:
        self.actors, self._urls, self._settings, self._log_folder = actors, urls, settings, log_folder

    @classmethod
    def create(
        cls, settings: RunSettings, placement: PlacementGroup, first_bundle: int, folder: str, log_folder: Path
    ) -> "EngineGroup":
        """Start the actors in the bundles from `first_bundle` on."""
        if settings.engine.engine == "external":
            return cls([], list(settings.engine.rollout_external_engine_addrs), settings, log_folder)
        cuda = settings.cluster.device == "cuda"
        per_engine = settings.cluster.rollout_num_gpus_per_engine
        actors = []
        for index in range(settings.cluster.num_engines):
            strategy = PlacementGroupSchedulingStrategy(placement, placement_group_bundle_index=first_bundle + index)
            actors.append(
                EngineActor.options(  # type: ignore[attr-defined]
                    num_cpus=1,
                    num_gpus=per_engine if cuda else 0,
                    scheduling_strategy=strategy,
                    runtime_env={"env_vars": worker_environment()},
                ).remote(settings, folder)
            )
        return cls(actors, None, settings, log_folder)

    def start(self) -> list[Any]:
        """Begin starting all servers; the references resolve to their URLs."""
        return [actor.start.remote(i, str(self._log_folder)) for i, actor in enumerate(self.actors)]

    def urls(self, started: list[Any]) -> list[str]:
        """Wait for `start`'s references."""
        if self._urls is None:
            timeout = self._settings.cluster.start_timeout
            self._urls = wait(started, what="starting the inference engines", timeout=timeout)
        return self._urls

    def stop(self) -> None:
        """Stop all servers, within seconds."""
        if self.actors:
            wait([actor.stop.remote() for actor in self.actors], what="stopping the inference engines", timeout=15)
