"""The rollouts as one async Ray actor, and the driver's handle of it."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar

import anyio
import ray

from agentrl.clock import freeze_loaded_objects
from agentrl.cluster.runtime import enter_workspace, this_node, unless, value, worker_environment
from agentrl.cluster.workers import open_workers
from agentrl.config import RunSettings
from agentrl.errors import AgentRLError
from agentrl.run.preflight import Plugins
from agentrl.run.protocols import Batch, Rollouts, WeightSink, within
from agentrl.run.rollouts import LedgerRollouts
from agentrl.runfolder import RunFolder

T = TypeVar("T")
_CLOSE_TIMEOUT = 15.0  # seconds that closing the environment, the pool and the ledger may take


@ray.remote
class RolloutActor:
    """Holds open `LedgerRollouts` from `serve` until `stop`."""

    def __init__(self, settings: RunSettings, workspace: str, folder: RunFolder) -> None:
        from transformers import AutoTokenizer  # noqa: F401 - a slow import, done while the engines start

        enter_workspace(workspace)
        self._settings, self._folder = settings, folder
        self._ready, self._stopping, self._ending = asyncio.Event(), asyncio.Event(), False
        self._calls: set[asyncio.Task[Any]] = set()

    async def check(self) -> None:
        """Import the user's code. Raises PluginError: this machine lacks a part of it."""
        Plugins.load(self._settings)

    async def serve(self, urls: Sequence[str], groups: dict[str, int | str], resume_step: int | None) -> None:
        """Open everything; at the end cancel the calls in flight, and close everything. All of it runs in this task.
        `groups`: addresses of the engines of `--engine-groups`."""
        workers = open_workers if self._settings.cluster.rollout_workers > 1 else None
        settings = self._settings.replace(engine_groups=groups) if groups else self._settings
        opening = LedgerRollouts.open(settings, self._folder, urls, resume_step, workers=workers)
        async with opening as self._rollouts:
            freeze_loaded_objects()
            self._ready.set()
            try:
                await self._stopping.wait()
            finally:
                self._ending = True
            for call in self._calls:
                call.cancel()
            if self._calls:
                await asyncio.wait(self._calls)

    async def ready(self) -> int:
        """Return the process id when everything is open."""
        await self._ready.wait()
        return os.getpid()

    async def stop(self) -> None:
        self._stopping.set()

    async def call(self, name: str, *args: Any) -> Any:
        """Call this method of the rollouts, or of their `engines`; `serve` may cancel the call."""
        return await self._breakable(attrgetter(name)(self._rollouts)(*args))

    async def _breakable(self, awaited: Coroutine[Any, Any, T]) -> T:
        task = asyncio.ensure_future(awaited)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        try:
            return await task
        except AgentRLError:
            if self._ending:
                await asyncio.Event().wait()  # `serve` raises the reason
            raise

    @ray.method(num_returns=2)
    async def next_batch(self, step: int) -> tuple[Any, Batch | None]:
        """Return the payload, which the object store keeps for the trainers, and the batch without the payload."""
        batch = await self._breakable(self._rollouts.next_batch(step))
        if batch is None:
            return None, None
        # The parts of a payload are in the object store. A process calls a part to fetch it.
        return batch.payload.with_parts(lambda own: partial(ray.get, ray.put(own))), replace(batch, payload=None)


def rollout_actor(settings: RunSettings, workspace: str, folder: RunFolder) -> Any:
    """Create the rollout actor on the driver's node, where the ledger is. It starts in parallel with other parts."""
    kind: Any = RolloutActor
    environment = {"env_vars": worker_environment(settings)}
    options = {"num_cpus": 0, "scheduling_strategy": this_node(), "runtime_env": environment}
    return kind.options(**options).remote(settings, workspace, folder)


class _Handle:
    """Calls methods of the actor's rollouts, as long as `serve` runs."""

    def __init__(self, actor: Any, serving: Any) -> None:
        self._actor, self._serving = actor, serving


def _asks(name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
    """Make a method of a `_Handle` that calls this method of the rollouts."""

    async def ask(self: _Handle, *args: Any) -> Any:
        return await unless(self._serving, self._actor.call.remote(name, *args))

    return ask


def _engines(which: str) -> Any:
    """Make the handle of a pool of engines, which the actor's process controls."""
    names = ("epoch", "join_weight_group", "leave_weight_group", "receive", "offer", "lacks_weights")
    return type("RayEngines", (_Handle, WeightSink), {name: _asks(f"{which}.{name}") for name in names})


RayEngines, RayEvalEngines = _engines("engines"), _engines("eval_engines")


class RayRollouts(_Handle, Rollouts):
    """The driver's handle; made by `open`. `pid` is the actor's process; `engines` take weight updates."""

    trained, saving, checkpointed = _asks("trained"), _asks("saving"), _asks("checkpointed")
    updated, set_resident_memory, evaluate = _asks("updated"), _asks("set_resident_memory"), _asks("evaluate")

    def __init__(self, actor: Any, serving: Any, pid: int) -> None:
        super().__init__(actor, serving)
        self.pid = pid
        self.engines: WeightSink = RayEngines(actor, serving)
        self.eval_engines: WeightSink = RayEvalEngines(actor, serving)

    @classmethod
    @asynccontextmanager
    async def open(
        cls, actor: Any, urls: Sequence[str], groups: dict[str, int | str], resume_step: int | None
    ) -> "AsyncIterator[RayRollouts]":
        """Have a `rollout_actor` open everything, and close it at the end."""
        serving = actor.serve.remote(urls, groups, resume_step)
        try:
            yield cls(actor, serving, await unless(serving, actor.ready.remote()))
        except BaseException:
            # If the actor is dead or broken, there is nothing left to close.
            with anyio.move_on_after(_CLOSE_TIMEOUT, shield=True), suppress(AgentRLError):
                await _stop(actor, serving)
            raise
        with within(_CLOSE_TIMEOUT, "closing the rollouts"):
            await _stop(actor, serving)

    async def next_batch(self, step: int) -> Batch | None:
        payload, rest = self._actor.next_batch.remote(step)
        batch: Batch | None = await unless(self._serving, rest)
        return None if batch is None else replace(batch, payload=payload)


async def _stop(actor: Any, serving: Any) -> None:
    await value(actor.stop.remote())
    await value(serving)
