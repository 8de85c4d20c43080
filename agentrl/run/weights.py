"""WeightTransfer from trainer to engines. A version is the number of rollouts that the weights were trained on."""

import hashlib
import itertools
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
from anyio import to_thread

from agentrl.config import RunSettings
from agentrl.config.placement import ClusterSettings
from agentrl.engine.weights import BroadcastUpdate, Bucket, DiskUpdate, SharedUpdate, WeightGroup, buckets
from agentrl.errors import AgentRLError, EngineFailure, TrainError, ungrouped
from agentrl.files import remove_folder
from agentrl.modelfolder import ADAPTER
from agentrl.run.deltas import write_delta
from agentrl.run.protocols import EVALUATES, Trainer, WeightSink, WeightSource, WeightTransfer, within
from agentrl.runfolder import RunFolder

_Side = Callable[[], Coroutine[Any, Any, None]]
Fetch = Callable[[Path, Path, str, str | None], Awaitable[None]]
"""Has `deltas.fetch` make a copy on every machine with engines; a machine that cannot gets no new weights."""


class DiskWeights(WeightTransfer):
    """The trainer writes a Hugging Face folder, or PEFT's of an adapter; engines load it; only the newest is kept. `root`
    is a folder for several runs; by default it is the run's own folder. With `copies`, a folder on each machine, `fetch`
    brings it there before the engines pause."""

    def __init__(
        self,
        folder: RunFolder,
        trainer: Trainer,
        sink: WeightSink,
        fetch: Fetch | None = None,
        copies: str | None = None,
        name: str = "weights",
        root: str | None = None,
    ) -> None:
        self._trainer, self._sink, self._fetch = trainer, sink, fetch
        run = f"{folder.path.name}-{hashlib.sha256(str(folder.path.resolve()).encode()).hexdigest()[:8]}"
        self._folder = folder.path / name if root is None else Path(root).absolute() / run
        self._copies = None if copies is None else Path(copies) / run
        self._fetched: tuple[Path, str] | None = None

    async def send(self, version: int) -> None:
        target = self._folder / str(version)
        await self._trainer.save_hf(target, served=True)
        adapter = f"agentrl-{version}-{uuid.uuid4().hex[:8]}" if (target / ADAPTER).is_file() else None
        await self._sink.receive(DiskUpdate(str(await self._near(target)), adapter), str(version))
        for old in self._folder.iterdir():
            if old != target:
                remove_folder(old)

    async def _near(self, version: Path) -> Path:
        """Return the folder from which engines load a version: the version, or the copy on their machines."""
        if self._fetch is None or self._copies is None:
            return version
        before, base, name = self._fetched, None, f"{version.name}-{uuid.uuid4().hex[:8]}"
        if before and before[0] != version:
            await to_thread.run_sync(write_delta, before[0], version)
            base = before[1]
        await self._fetch(version, self._copies, name, base)
        self._fetched = version, name
        return self._copies / name

    async def lost(self) -> bool:
        return False  # engines load the folder by themselves


def eval_weights(
    settings: RunSettings, folder: RunFolder, trainer: Trainer, sink: Callable[[], WeightSink]
) -> WeightTransfer | None:
    """Return what brings weights to the engines of the group that evaluates, if there is one: by a folder of its own."""
    if EVALUATES not in settings.engine.engine_groups:
        return None
    return DiskWeights(folder, trainer, sink(), name="eval_weights")


class BroadcastWeights(WeightTransfer):
    """Each sender, a trainer process, shares a process group with the engines; tensors go in buckets of bounded size. Made
    by `open`. Process groups belong to one set of engines: they are made again if an engine comes or is lost."""

    def __init__(self, settings: ClusterSettings, source: WeightSource, sink: WeightSink, backend: str) -> None:
        self._settings, self._source, self._sink = settings, source, sink
        self._backend, self._epoch = backend, tuple[str, ...]()
        self._groups, self._buckets = list[str](), list[Bucket]()

    @classmethod
    @asynccontextmanager
    async def open(
        cls, settings: ClusterSettings, source: WeightSource, sink: WeightSink, backend: str = "gloo"
    ) -> "AsyncIterator[BroadcastWeights]":
        """Ready to send; leaves the process groups after a good end. `backend`: of the groups, or "shared_memory"."""
        weights = cls(settings, source, sink, backend)
        yield weights
        with within(settings.weight_sync_timeout, "the weight update"):
            await weights._leave()

    async def send(self, version: int) -> None:
        try:
            await self._send(version)
        except (EngineFailure, TrainError) as error:
            # An engine that was lost takes its group with it; the others are still there.
            with suppress(EngineFailure):
                await self._leave()
            try:
                await self._send(version)
            except AgentRLError as again:
                again.add_note(f"and before: {error}")
                raise

    async def lost(self) -> bool:
        return await self._sink.lacks_weights()

    async def _send(self, version: int) -> None:
        epoch = await self._sink.epoch()
        if not self._buckets or epoch != self._epoch:
            await self._leave()
            self._epoch = epoch
            await self._join(epoch)
        receive = partial(self._sink.receive, BroadcastUpdate(self._buckets), str(version))
        await _both(receive, partial(self._source.broadcast_weights, self._buckets))

    async def _join(self, members: tuple[str, ...]) -> None:
        cluster = self._settings
        per_engine = cluster.rollout_num_gpus_per_engine
        # External engines outlive a run, and would refuse a group name that an earlier run has used.
        base, parts = f"agentrl_weights_{uuid.uuid4().hex[:8]}", []
        for sender, specs in (await self._source.weight_specs()).items():
            name, found = f"{base}_{sender}", buckets(specs, cluster.update_weight_buffer_size)
            parts.append([Bucket(name, bucket) for bucket in found])
            size, world = max(sum(spec.nbytes for spec in b) for b in found), 1 + len(members) * per_engine
            where = await self._source.address(sender)
            group = WeightGroup(sender, size, *where, world, name, self._backend, per_engine, members)
            await _both(partial(self._sink.join_weight_group, group), partial(self._source.init_weight_group, group))
            self._groups.append(name)
        # In turns: while one sender's bucket travels, the others prepare theirs.
        turns = itertools.zip_longest(*parts)
        self._buckets = [bucket for turn in turns for bucket in turn if bucket is not None]

    async def _leave(self) -> None:
        names, self._groups, self._buckets = self._groups, [], []

        async def leave() -> None:
            for name in names:
                await self._sink.leave_weight_group(name)

        if names:
            await _both(leave, self._source.close_weight_group)


class SharedWeights(WeightTransfer):
    """Trainer processes share the memory of one bucket at a time with the engines on their devices."""

    def __init__(self, settings: ClusterSettings, source: WeightSource, sink: WeightSink) -> None:
        self._settings, self._source, self._sink = settings, source, sink

    async def send(self, version: int) -> None:
        specs = list(itertools.chain(*(await self._source.weight_specs()).values()))
        key, found = uuid.uuid4().hex, buckets(specs, self._settings.update_weight_buffer_size)
        readers, each = self._settings.rollout_num_gpus, self._settings.rollout_num_gpus_per_engine

        async def share() -> None:
            for i, bucket in enumerate(found):
                handles = await self._source.share_weights(bucket, first=i == 0, readers=readers)
                # Engine i has the devices of these trainer processes, in their order.
                await self._sink.offer(key, [handles[at : at + each] for at in range(0, len(handles), each)])

        await self._sink.epoch()  # waits for an engine that is restarted
        try:
            await _both(partial(self._sink.receive, SharedUpdate(key, len(found)), str(version)), share)
        finally:
            await self._source.share_weights([], first=False, readers=0)

    async def lost(self) -> bool:
        return await self._sink.lacks_weights()


async def _both(engines: _Side, trainer: _Side) -> None:
    """Both sides of a collective; the first error ends the wait for the other, which cannot finish alone."""
    with ungrouped():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engines)
            tasks.start_soon(trainer)


_implementations: tuple[type[WeightTransfer], ...] = (DiskWeights, BroadcastWeights, SharedWeights)
