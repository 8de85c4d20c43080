"""WeightTransfer from the trainer to the engines, under a new version. The version is the number of rollouts that the
weights were trained on."""

import math
import shutil
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import anyio

from agentrl.config.placement import ClusterSettings
from agentrl.engine.weights import BroadcastUpdate, DiskUpdate, TensorSpec, WeightGroup
from agentrl.errors import AgentRLError, EngineFailure, TrainError, ungrouped
from agentrl.modelfolder import ADAPTER
from agentrl.run.protocols import Trainer, WeightSink, WeightSource, WeightTransfer, within
from agentrl.runfolder import RunFolder

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class DiskWeights(WeightTransfer):
    """The trainer writes a Hugging Face folder, or PEFT's of an adapter; engines load it; only the newest is kept."""

    def __init__(self, folder: RunFolder, trainer: Trainer, sink: WeightSink) -> None:
        self._folder, self._trainer, self._sink = folder.weights, trainer, sink

    async def send(self, version: int) -> None:
        target = self._folder / str(version)
        await self._trainer.save_hf(target, served=True)
        adapter = f"agentrl-{version}-{uuid.uuid4().hex[:8]}" if (target / ADAPTER).is_file() else None
        await self._sink.receive(DiskUpdate(str(target), adapter), str(version))
        for old in self._folder.iterdir():
            if old != target:
                shutil.rmtree(old)

    async def lost(self) -> bool:
        return False  # engines load the folder by themselves


class BroadcastWeights(WeightTransfer):
    """Trainer rank 0 and the engines share a process group; tensors go in buckets of bounded size. Made by `open`. The
    group is that of one set of engines: it is made again when others are there, or when one of them was lost."""

    def __init__(self, settings: ClusterSettings, source: WeightSource, sink: WeightSink) -> None:
        self._settings, self._source, self._sink = settings, source, sink
        self._epoch: tuple[str, ...] = ()
        self._update: BroadcastUpdate | None = None

    @classmethod
    @asynccontextmanager
    async def open(
        cls, settings: ClusterSettings, source: WeightSource, sink: WeightSink
    ) -> "AsyncIterator[BroadcastWeights]":
        """Ready to send; leaves the process group after a good end."""
        weights = cls(settings, source, sink)
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
        if self._update is None or epoch != self._epoch:
            await self._leave()
            self._epoch, self._update = epoch, await self._join(epoch)
        await _both(partial(self._sink.receive, self._update, str(version)), self._source.broadcast_weights)

    async def _join(self, members: tuple[str, ...]) -> BroadcastUpdate:
        alone = self._settings.device == "cuda" and not self._settings.colocate  # NCCL takes one process a GPU
        backend = "nccl" if alone else "gloo"
        per_engine = self._settings.rollout_num_gpus_per_engine
        # External engines outlive a run, and would refuse a group name that an earlier life has used.
        name = f"agentrl_weights_{uuid.uuid4().hex[:8]}"
        where = await self._source.address()
        group = WeightGroup(*where, 1 + len(members) * per_engine, name, backend, per_engine, members)
        await _both(partial(self._sink.join_weight_group, group), partial(self._source.init_weight_group, group))
        specs = await self._source.weight_specs()
        return BroadcastUpdate(name, buckets(specs, self._settings.update_weight_buffer_size))

    async def _leave(self) -> None:
        if self._update is not None:
            name, self._update = self._update.group, None
            await _both(partial(self._sink.leave_weight_group, name), self._source.close_weight_group)


async def _both(
    engines: Callable[[], Coroutine[Any, Any, None]], trainer: Callable[[], Coroutine[Any, Any, None]]
) -> None:
    """Both sides of a collective; the first error ends the wait for the other, which cannot finish alone."""
    with ungrouped():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(engines)
            tasks.start_soon(trainer)


def buckets(specs: Sequence[TensorSpec], limit: int) -> list[list[TensorSpec]]:
    """Split tensors, in order, into buckets of at most `limit` bytes (a larger tensor gets its own)."""
    out: list[list[TensorSpec]] = []
    room = 0
    for spec in specs:
        size = _BYTES[spec.dtype] * math.prod(spec.shape)
        if size > room or not out:
            out.append([])
            room = limit
        out[-1].append(spec)
        room -= size
    return out


_implementations: tuple[type[WeightTransfer], ...] = (DiskWeights, BroadcastWeights)
