"""Everyone on stage: placement, engines, rollout worker and trainer, started side by side and stopped together."""

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from agentrl.cluster.engines import EngineGroup
from agentrl.cluster.rollouts import RolloutWorker
from agentrl.cluster.runtime import ray_runtime, wait, wait_each, worker_environment
from agentrl.cluster.trainers import TrainGroup
from agentrl.config import RunSettings
from agentrl.errors import AgentRLError, SettingsError
from agentrl.observability.progress import Progress, counted
from agentrl.run.weights import WeightSync
from agentrl.runfolder import RunFolder

_ENGINES, _TRAINER = "starting the inference engines", "starting the trainer"


class Cast:
    """The run's processes. `worker` and `sync` are None when a dump of rollouts takes the engines' place."""

    def __init__(self, settings: RunSettings, folder: RunFolder, trainers: TrainGroup) -> None:
        self.settings, self.folder, self.trainers = settings, folder, trainers
        self.worker: Any = None
        self.sync: WeightSync | None = None

    def ask(self, reference: Any, *, what: str) -> Any:
        """Wait for a short answer of the rollout worker."""
        return wait(reference, what=what, timeout=self.settings.cluster.start_timeout)

    def ask_rollouts(self, reference: Any, *, what: str) -> Any:
        """Wait for the rollout worker to generate."""
        return wait(reference, what=what, timeout=self.settings.cluster.rollout_timeout)


@contextlib.contextmanager
def assemble(
    settings: RunSettings, folder: RunFolder, checkpoint: tuple[str, int] | None, progress: Progress
) -> Iterator[Cast]:
    """Start everything; stop everything at the end, whatever ends it.

    Args:
        checkpoint: folder of the checkpoint to resume from and the last rollout that it covers.
        progress: told what is being started, and when it is there.
    """
    engines_needed = settings.cluster.load_debug_rollout_data is None
    own_engines = engines_needed and settings.engine.engine != "external"
    bundles = settings.cluster.world_size + (settings.cluster.num_engines if own_engines else 0)
    with contextlib.ExitStack() as stack:
        joined, began = settings.cluster.ray_address, time.monotonic()
        progress.begin(f"joining Ray at {joined}" if joined else "starting Ray")
        stack.enter_context(ray_runtime(settings.cluster, cpus=bundles + 1))
        progress.ready("Ray is up", began)
        names = _names(settings, own_engines)
        began = time.monotonic()
        progress.begin(
            f"{f'loading the model into {names[_ENGINES]}, ' if own_engines else ''}starting {names[_TRAINER]}"
        )
        placement = stack.enter_context(_placed(settings, own_engines))
        here = os.getcwd()
        trainers = TrainGroup.create(settings, placement, here)
        cast = Cast(settings, folder, trainers)
        engines = None
        engines_starting: list[Any] = []
        if engines_needed:
            engines = EngineGroup.create(settings, placement, settings.cluster.world_size, here, folder.logs)
            engines_starting = engines.start()
            stack.callback(_stop_quietly, engines)
            cast.worker = RolloutWorker.options(  # type: ignore[attr-defined]
                num_cpus=0, runtime_env={"env_vars": worker_environment()}
            ).remote(settings, here, str(folder.path))
        starting = {_ENGINES: engines_starting, _TRAINER: trainers.start()}
        for what in wait_each(starting, timeout=settings.cluster.start_timeout):
            progress.ready(f"{names[what]} ready", began)
        began = time.monotonic()
        if checkpoint is not None:
            progress.begin(f"loading the checkpoint of rollout {checkpoint[1] + 1}")
            trainers.call("load", checkpoint[0], what="loading the checkpoint")
            progress.ready("checkpoint loaded", began)
        if engines is not None:
            progress.phase("opening the data")
            urls = engines.urls(engines_starting)
            stack.callback(_close_quietly, cast.worker)
            started = cast.worker.start.remote(urls, checkpoint[1] if checkpoint else None)
            wait(started, what="starting the rollout worker", timeout=settings.cluster.start_timeout)
            cast.sync = WeightSync(settings, trainers, cast.worker, len(urls), folder)
        folder.write_processes(_processes(cast, engines))
        yield cast
        if cast.sync is not None:
            cast.sync.close()


def _names(settings: RunSettings, own_engines: bool) -> dict[str, str]:
    """What is started, counted."""
    engines = settings.cluster.num_engines if own_engines else 0
    return {
        _ENGINES: counted(engines, "engine"),
        _TRAINER: counted(settings.cluster.world_size, "trainer process", "trainer processes"),
    }


def _processes(cast: Cast, engines: EngineGroup | None) -> dict[str, list[int]]:
    """Process ids by role."""
    actors = {"trainer": cast.trainers.actors, "engine": engines.actors if engines else []}
    if cast.worker is not None:
        actors["rollout_worker"] = [cast.worker]
    timeout = cast.settings.cluster.start_timeout
    found = {
        role: wait([actor.pid.remote() for actor in members], what="asking for process ids", timeout=timeout)
        for role, members in actors.items()
    }
    return {"driver": [os.getpid()], **found}


@contextlib.contextmanager
def _placed(settings: RunSettings, own_engines: bool) -> Iterator[PlacementGroup]:
    cuda = settings.cluster.device == "cuda"
    bundles = [{"CPU": 1.0, **({"GPU": 1.0} if cuda else {})} for _ in range(settings.cluster.world_size)]
    if own_engines:
        per_engine = float(settings.cluster.rollout_num_gpus_per_engine)
        bundles += [{"CPU": 1.0, **({"GPU": per_engine} if cuda else {})} for _ in range(settings.cluster.num_engines)]
    placement = placement_group(bundles, strategy="PACK")
    try:
        if not placement.wait(settings.cluster.start_timeout if settings.cluster.ray_address else 60):
            raise SettingsError(
                f"the cluster has no room for {len(bundles)} processes ({bundles}); it has {ray.available_resources()}; "
                "lower --actor-num-gpus-per-node or --rollout-num-gpus, or join a larger cluster"
            )
        yield placement
    finally:
        remove_placement_group(placement)


def _close_quietly(worker: Any) -> None:
    """Close the worker; one that is already dead has nothing left to close."""
    with contextlib.suppress(AgentRLError):
        wait(worker.close.remote(), what="closing the rollout worker", timeout=15)


def _stop_quietly(engines: EngineGroup) -> None:
    """Stop the engines; those that are already dead are stopped."""
    with contextlib.suppress(AgentRLError):
        engines.stop()
