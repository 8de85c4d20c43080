"""Weight transfers from trainer to engines. A version is the number of rollouts that the weights were trained on."""

import hashlib
import itertools
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

from anyio import to_thread

from agentrl.config import RunSettings
from agentrl.config.placement import ClusterSettings
from agentrl.engine.weights import BroadcastUpdate, Bucket, DiskUpdate, SharedUpdate, WeightGroup, buckets
from agentrl.errors import AgentRLError, EngineFailure, TrainError
from agentrl.files import remove_folder
from agentrl.modelfolder import ADAPTER
from agentrl.run.deltas import write_delta
from agentrl.run.protocols import EVALUATES, Trainer, WeightSink, WeightSource, WeightTransfer, within
from agentrl.runfolder import RunFolder
from agentrl.tasks import together

Fetch = Callable[[Path, Path, str, str | None], Awaitable[None]]
"""Runs `deltas.fetch` on every machine with engines. A machine on which it fails gets no new weights."""


class DiskWeights(WeightTransfer):
    """Transfer by disk: the trainer writes a Hugging Face folder, or a PEFT adapter's, and engines load it. Only the
    newest is kept. `root`: parent folder for several runs; default: the run's folder. `copies`: folder on each machine,
    to which `fetch` copies the version before the engines pause."""

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
        """Return the folder from which engines load a version: its own folder, or the copy on their machines."""
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
    """Return the transfer to the engine group that evaluates, through its own folder; None without such a group."""
    if EVALUATES not in settings.engine.engine_groups:
        return None
    return DiskWeights(folder, trainer, sink(), name="eval_weights")


class BroadcastWeights(WeightTransfer):
    """Transfer by broadcast, in buckets of limited size. Each trainer process that sends shares a process group with
    the engines. The groups are made again if an engine joins or is lost. Made by `open`."""

    def __init__(self, settings: ClusterSettings, source: WeightSource, sink: WeightSink, backend: str) -> None:
        self._settings, self._source, self._sink = settings, source, sink
        self._backend, self._epoch = backend, tuple[str, ...]()
        self._groups, self._buckets = list[str](), list[Bucket]()

    @classmethod
    @asynccontextmanager
    async def open(
        cls, settings: ClusterSettings, source: WeightSource, sink: WeightSink, backend: str = "gloo"
    ) -> "AsyncIterator[BroadcastWeights]":
        """Yield a transfer; leave the process groups unless the block fails. `backend`: theirs, or "shared_memory"."""
        weights = cls(settings, source, sink, backend)
        yield weights
        with within(settings.weight_sync_timeout, "the weight update"):
            await weights._leave()

    async def send(self, version: int) -> None:
        try:
            await self._send(version)
        except (EngineFailure, TrainError) as error:
            # A lost engine breaks its process groups. The other engines still run, so try again with new groups.
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
        # A failure on one side cancels the other, which cannot finish alone.
        await together(receive, partial(self._source.broadcast_weights, self._buckets))

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
            await together(partial(self._sink.join_weight_group, group), partial(self._source.init_weight_group, group))
            self._groups.append(name)
        # Interleave the senders: while one sends a bucket, the others prepare theirs.
        turns = itertools.zip_longest(*parts)
        self._buckets = [bucket for turn in turns for bucket in turn if bucket is not None]

    async def _leave(self) -> None:
        names, self._groups, self._buckets = self._groups, [], []

        async def leave() -> None:
            for name in names:
                await self._sink.leave_weight_group(name)

        if names:
            await together(leave, self._source.close_weight_group)


class SharedWeights(WeightTransfer):
    """Transfer by shared memory: trainer processes share one bucket at a time with the engines on their devices."""

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

        await self._sink.epoch()  # waits for engines that are restarting
        try:
            await together(partial(self._sink.receive, SharedUpdate(key, len(found)), str(version)), share)
        finally:
            await self._source.share_weights([], first=False, readers=0)

    async def lost(self) -> bool:
        return await self._sink.lacks_weights()


_implementations: tuple[type[WeightTransfer], ...] = (DiskWeights, BroadcastWeights, SharedWeights)
