"""Checkpoints of a trained slot and the random state, through the backend's `Store`.

The random state is restored only under the layout that saved it; elsewhere the seed's stands. The critic's part is a
checkpoint in the actor's, so that it does not matter which processes wrote it. A reference that has followed the actor is in
the actor's checkpoint; before, it is what `--ref-load` says.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from agentrl.errors import CheckpointError
from agentrl.runfolder import CRITIC
from agentrl.train.checkpoints import read_manifest, replace_folder, writing
from agentrl.train.learning_rate import end_of_decay
from agentrl.train.slots import ModelSlot, TrainedSlot

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
    ranks, store = slot.place.ranks, slot.network.store
    stepped = slot.optimizer.stepped and not slot.place.settings.no_save_optim
    state = slot.state(stepped=stepped, is_loading=False) | {"rng": store.random(ranks)}
    manifest = {"step": step, "stepped": stepped, "layout": ranks.describe(), **dataclasses.asdict(slot.identity)}
    if reference is not None:
        state[_REFERENCE], manifest[_REFERENCE] = reference.network.state(f"{_REFERENCE}."), True
    manifest["lr_decay_end"] = end_of_decay(slot.place.settings, slot.optimizer.total_steps)
    with writing(path, manifest, leader=ranks.rank == 0, barrier=dist.barrier) as partial:
        try:
            store.save(state, partial)
        # Torch's writer has no type for a full disk, and no word for it.
        except (Exception, CheckpointException) as error:
            free = shutil.disk_usage(partial.parent).free / 2**20
            raise CheckpointError(
                f"{path} could not be written, with {free:.1f} MiB free on its disk: {_last_line(error)}; earlier "
                "checkpoints are whole. Make room, or choose another --save, and start the same command again"
            ) from error
        if isinstance(critic, TrainedSlot):
            save(partial / CRITIC, critic, step)
        elif critic is not None and ranks.rank == 0:
            replace_folder(critic, partial / CRITIC)


def load(path: Path, slot: TrainedSlot, reference: ModelSlot | None = None) -> bool:
    """Restore the checkpoint at `path`; returns whether `reference` was in it. Collective.

    Raises:
        CheckpointError: it is not complete, of another model, or damaged.
    """
    manifest = read_manifest(path)
    slot.identity.check(path, manifest)
    ranks, store, stepped = slot.place.ranks, slot.network.store, manifest["stepped"]
    state = slot.state(stepped=stepped, is_loading=True)
    followed = reference if manifest.get(_REFERENCE) else None
    if followed:
        state[_REFERENCE] = followed.network.state(f"{_REFERENCE}.")
    same_layout = manifest["layout"] == ranks.describe()
    if same_layout:
        state["rng"] = store.random(ranks)
    try:
        loaded = store.load(state, path)
        slot.restore(loaded, stepped=stepped)
        if followed:
            followed.network.take(loaded[_REFERENCE], f"{_REFERENCE}.")
        if same_layout:
            store.restore_random(loaded["rng"])
    except (Exception, CheckpointException) as error:
        raise CheckpointError(
            f"{path} is damaged: {_last_line(error)}; move it away to resume from the checkpoint before it"
        ) from error
    return followed is not None


def _last_line(error: BaseException) -> str:
    """Of torch's report of all ranks, which is a page of tracebacks, the line that says what happened."""
    return next((line for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
