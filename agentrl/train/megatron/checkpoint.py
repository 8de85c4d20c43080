"""Checkpoints through megatron's `dist_checkpointing`, in its fully reshardable form."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from agentrl.train.megatron.layout import Layout
from agentrl.train.network import Store


class MegatronStore(Store):
    """Sharded states as megatron's."""

    def save(self, state: dict[str, Any], folder: Path) -> None:
        with _written_in_process():
            dist_checkpointing.save(state, str(folder))

    def load(self, state: dict[str, Any], folder: Path) -> dict[str, Any]:
        loaded: dict[str, Any] = dist_checkpointing.load(state, str(folder))
        return loaded

    def random(self, ranks: Layout) -> Any:
        state = {"torch": torch.get_rng_state(), "tracker": get_cuda_rng_tracker().get_states()}
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state()
        return ShardedObject("rng", state, (ranks.world,), (ranks.rank,), replica_id=0)

    def restore_random(self, loaded: dict[str, Any]) -> None:
        torch.set_rng_state(loaded["torch"])
        if "cuda" in loaded and torch.cuda.is_available():
            torch.cuda.set_rng_state(loaded["cuda"])
        get_cuda_rng_tracker().set_states(loaded["tracker"])


@contextlib.contextmanager
def _written_in_process() -> Iterator[None]:
    """Let megatron's writer write in this process.

    Its default starts a manager process and forks a writer on every save: seconds of overhead, and re-import of the
    main module, for nothing when the caller waits anyway.
    """
    writer = filesystem_async.FileSystemWriterAsync

    def write(transforms: list[Any], _use_msc: bool, _rank: int, buckets: list[Any], results: queue.Queue[Any]) -> None:
        outcome: dict[int, Any] = {}
        for i, bucket in enumerate(buckets):
            mine: queue.Queue[Any] = queue.Queue()
            pending: queue.Queue[Any] = queue.Queue()
            pending.put(i)
            writer.write_preloaded_data(transforms, i, bucket, mine, pending, use_fsync=True)
            _, outcome[i] = mine.get_nowait()
            if isinstance(outcome[i], Exception):
                results.put(outcome[i])
                return
        results.put(outcome)

    kept = filesystem_async._results_queue, writer.__dict__["write_preloaded_data_multiproc"]
    filesystem_async._results_queue = queue.Queue()
    writer.write_preloaded_data_multiproc = staticmethod(write)
    try:
        yield
    finally:
        filesystem_async._results_queue, writer.write_preloaded_data_multiproc = kept
