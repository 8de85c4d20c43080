"""Rollout workers as Ray actors, on any node."""

import os
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import ray

from agentrl.cluster.runtime import enter_workspace, ray_runtime, value, worker_environment
from agentrl.config import RunSettings
from agentrl.run.workers import (
    Answer,
    CallProgress,
    EnginePool,
    EngineView,
    Order,
    Player,
    RolloutProcess,
    RolloutWorkers,
    WorkerServer,
    share,
)


@ray.remote
class WorkerActor:
    """The process of a worker."""

    def __init__(self, settings: RunSettings, workspace: str, urls: Sequence[str]) -> None:
        enter_workspace(workspace)
        self._server = WorkerServer(settings, urls)

    async def call(self, name: str, *args: Any) -> Any:
        return await getattr(self._server, name)(*args)


class RayWorker(RolloutProcess):
    """The pool's handle of a `WorkerActor`."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def _call(self, name: str, *args: Any) -> Coroutine[Any, Any, Any]:
        return value(self._actor.call.remote(name, *args))

    async def serve(self) -> None:
        await self._call("serve")

    async def ready(self) -> None:
        await self._call("ready")

    async def follow(self, view: EngineView) -> None:
        await self._call("follow", view)

    async def figures(self) -> Mapping[str, float]:
        figures: Mapping[str, float] = await self._call("figures")
        return figures

    async def take_orders(self, orders: Sequence[Order]) -> None:
        await self._call("take_orders", orders)

    async def answers(self) -> list[CallProgress | Answer]:
        messages: list[CallProgress | Answer] = await self._call("answers")
        return messages

    def kill(self) -> None:
        ray.kill(self._actor)


@asynccontextmanager
async def open_workers(settings: RunSettings, urls: Sequence[str], pool: EnginePool) -> AsyncIterator[Player]:
    """Start the workers on the Ray that this process uses, or else on one that is started for them; see
    `RolloutWorkers.open`."""
    given, here = (share(settings), os.getcwd(), tuple(urls)), worker_environment(settings.engine.admin_api_key)
    kind: Any = WorkerActor
    chosen = {"num_cpus": 1, "scheduling_strategy": "SPREAD", "runtime_env": {"env_vars": here}}
    with ray_runtime(settings.cluster, cpus=settings.cluster.rollout_workers):
        start = kind.options(**chosen).remote
        async with RolloutWorkers.open(settings, lambda _: RayWorker(start(*given)), pool) as workers:
            yield workers
