"""Checkpoints of a trained slot and the random state, through megatron's `dist_checkpointing`.

1. The tensors are in its fully reshardable form: saved under one layout, loadable under another.
2. The random state is restored only under the layout that saved it; elsewhere the seed's stands.
3. The critic's part is a checkpoint in the actor's, so that it does not matter which processes wrote it.
4. A reference that has followed the actor is in the actor's checkpoint; before, it is what `--ref-load` says.
5. What makes a folder a checkpoint, and of which model, is `agentrl.train.checkpoints`'.
"""

from __future__ import annotations

import contextlib
import queue
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch.distributed.checkpoint.api import CheckpointException

from agentrl.errors import CheckpointError
from agentrl.runfolder import CRITIC, MANIFEST
from agentrl.train.checkpoints import Found, latest, read_manifest, replace_folder, writing
from agentrl.train.learning_rate import end_of_decay
from agentrl.train.megatron.layout import Layout
from agentrl.train.megatron.slots import ModelSlot, TrainedSlot

_REFERENCE = "reference"


def save(
    path: Path,
    slot: TrainedSlot,
    step: int,
    critic: TrainedSlot | Path | None = None,
    reference: ModelSlot | None = None,
) -> None:
    """Write a checkpoint at `path`, replacing one of that name, with the critic's in it or moved into it. Collective.

    Raises:
        CheckpointError: it could not be written; earlier ones are as they were.
    """
    layout, stepped = slot.place.layout, slot.stepped and not slot.place.settings.no_save_optim
    state = slot.state(stepped=stepped, is_loading=False) | {"rng": _rng_object(layout)}
    manifest = {"step": step, "stepped": stepped, "layout": layout.describe(), **slot.identity.entries()}
    if reference is not None:
        state[_REFERENCE], manifest[_REFERENCE] = reference.weights_state(f"{_REFERENCE}."), True
    manifest["lr_decay_end"] = end_of_decay(slot.place.settings, slot.optimizer.total_steps)
    with writing(path, manifest, leader=layout.rank == 0, barrier=dist.barrier) as partial:
        try:
            with _written_in_process():
                dist_checkpointing.save(state, str(partial))
        except (
            Exception,
            CheckpointException,
        ) as error:  # torch's writer has no type for a full disk, and no word for it
            free = shutil.disk_usage(partial.parent).free / 2**20
            raise CheckpointError(
                f"{path} could not be written, with {free:.1f} MiB free on its disk: {_last_line(error)}; earlier "
                "checkpoints are whole. Make room, or choose another --save, and start the same command again"
            ) from error
        if isinstance(critic, TrainedSlot):
            save(partial / CRITIC, critic, step)
        elif critic is not None and layout.rank == 0:
            replace_folder(critic, partial / CRITIC)


def newest_of(path: Path) -> Found:
    """The checkpoint at `path`, or the newest one in a folder of several.

    Raises:
        CheckpointError: nothing complete is there.
    """
    newest = latest(path)
    if newest is None:
        raise CheckpointError(f"{path}: no complete checkpoint here (a folder with {MANIFEST}, or one of such folders)")
    return newest


def load(path: Path, slot: TrainedSlot, reference: ModelSlot | None = None) -> tuple[int, bool]:
    """Restore a checkpoint as `newest_of` finds it; returns its step, and whether `reference` was in it. Collective.

    Raises:
        CheckpointError: nothing complete is there, it is of another model, or it is damaged.
    """
    newest = newest_of(path)
    manifest = read_manifest(newest.path)
    slot.identity.check(newest.path, manifest)
    layout, stepped = slot.place.layout, manifest["stepped"]
    state = slot.state(stepped=stepped, is_loading=True)
    followed = reference is not None and bool(manifest.get(_REFERENCE))
    if reference is not None and followed:
        state[_REFERENCE] = reference.weights_state(f"{_REFERENCE}.")
    same_layout = manifest["layout"] == layout.describe()
    if same_layout:
        state["rng"] = _rng_object(layout)
    try:
        loaded = dist_checkpointing.load(state, str(newest.path))
        slot.restore(loaded, stepped=stepped)
        if reference is not None and followed:
            reference.take(loaded[_REFERENCE], f"{_REFERENCE}.")
        if same_layout:
            _restore_rng(loaded["rng"])
    except (Exception, CheckpointException) as error:
        raise CheckpointError(
            f"{newest.path} is damaged: {_last_line(error)}; move it away to resume from the checkpoint before it"
        ) from error
    return newest.step, followed


def _last_line(error: BaseException) -> str:
    """Of torch's report of all ranks, which is a page of tracebacks, the line that says what happened."""
    return next((line for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)


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


def _rng_object(layout: Layout) -> Any:
    state = {"torch": torch.get_rng_state(), "tracker": get_cuda_rng_tracker().get_states()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return ShardedObject("rng", state, (layout.world,), (layout.rank,), replica_id=0)


def _restore_rng(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    get_cuda_rng_tracker().set_states(state["tracker"])
