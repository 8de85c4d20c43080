"""Rollout workers as Ray actors, on any node."""

import os
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

import ray

from agentrl.cluster.runtime import enter_workspace, ray_runtime, this_node, value, worker_environment
from agentrl.config import RunSettings
from agentrl.run.engines import on_loopback
from agentrl.run.workers import EnginePool, Player, RolloutProcess, RolloutWorkers, WorkerServer, share


@ray.remote
class WorkerActor:
    """The process of a worker."""

    def __init__(self, settings: RunSettings, workspace: str, urls: Sequence[str]) -> None:
        enter_workspace(workspace)
        self._server = WorkerServer(settings, urls)

    @ray.method(enable_task_events=False)
    async def call(self, name: str, *args: Any) -> Any:
        return await getattr(self._server, name)(*args)


def _asks(name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
    """Make a method of a `RayWorker` that calls this method of the server."""
    return lambda self, *args: value(self._actor.call.remote(name, *args))


class RayWorker(RolloutProcess):
    """The handle of a `WorkerActor`, for `RolloutWorkers`."""

    serve, ready, follow, stop = _asks("serve"), _asks("ready"), _asks("follow"), _asks("stop")
    figures, take_orders, answers = _asks("figures"), _asks("take_orders"), _asks("answers")

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def kill(self) -> None:
        ray.kill(self._actor)


@asynccontextmanager
async def open_workers(settings: RunSettings, urls: Sequence[str], pool: EnginePool) -> AsyncIterator[Player]:
    """Start the workers on this process's Ray, or on a new Ray; see `RolloutWorkers.open`. The workers run on this
    machine if an engine is reachable from this machine only."""
    given: tuple[Any, ...] = share(settings), os.getcwd(), tuple(urls)
    kind: Any = WorkerActor
    with ray_runtime(settings.cluster, cpus=settings.cluster.rollout_workers):
        chosen: dict[str, Any] = {"num_cpus": 1, "scheduling_strategy": "SPREAD"}
        if any(map(on_loopback, urls)):
            chosen = {"num_cpus": 0, "scheduling_strategy": this_node()}
        start = kind.options(**chosen, runtime_env={"env_vars": worker_environment(settings)}).remote
        async with RolloutWorkers.open(settings, lambda _: RayWorker(start(*given)), pool) as workers:
            yield workers
