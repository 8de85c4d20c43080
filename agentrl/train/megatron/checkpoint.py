"""Checkpoints of model, optimizer and random state, written whole or not at all.

1. The tensors are megatron's `dist_checkpointing` in its fully reshardable form: saved under one layout, loadable
   under another.
2. A checkpoint is written into a hidden folder beside its place and renamed when complete; `manifest.json` is the
   last file in it. A folder without one is not a checkpoint, so an interrupted save is never found.
3. The manifest names the model's sizes and the kind of optimizer state; loading into another model, or under another
   kind of optimizer state, says which of them differ.
4. The random state is restored only under the layout that saved it; elsewhere the seed's stands.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import queue
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.errors import CheckpointError

if TYPE_CHECKING:
    from agentrl.train.megatron.families import ModelShape
    from agentrl.train.megatron.layout import Layout

MANIFEST = "manifest.json"
FORMAT = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """A complete checkpoint on disk and the step it was saved at."""

    path: Path
    step: int


@dataclasses.dataclass(frozen=True, slots=True)
class Identity:
    """What a checkpoint must have in common with the run that loads it."""

    model: ModelShape
    optimizer: str
    distributed_optimizer: bool
    bf16: bool

    def entries(self) -> dict[str, Any]:
        """For the manifest: the model's sizes and their hash, and the kind of optimizer state."""
        parts: dict[str, Any] = dataclasses.asdict(self)
        model = parts.pop("model")
        digest = hashlib.sha256(json.dumps(model, sort_keys=True).encode()).hexdigest()
        return {"model": model, "model_hash": digest, "optimizer": parts}


def latest(root: str | Path) -> Found | None:
    """The complete checkpoint with the highest step in `root` (or `root` itself), or None. Imports nothing heavy."""
    root = Path(root)
    folders = [root] if (root / MANIFEST).is_file() else [m.parent for m in root.glob(f"[!.]*/{MANIFEST}")]
    found = [Found(folder, read_manifest(folder)["step"]) for folder in folders]
    return max(found, key=lambda f: f.step, default=None)


def read_manifest(path: Path) -> dict[str, Any]:
    """A checkpoint's manifest: `step`, `stepped` (whether there is optimizer state), `layout`, `model` (its sizes), ...

    Raises:
        CheckpointError: the folder is not a complete checkpoint, or of another format.
    """
    try:
        manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: not a complete checkpoint ({error})") from error
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path}: expected checkpoint format {FORMAT}, got {manifest.get('format')!r}")
    return manifest


def save(path: Path, model: Any, optimizer: Any, layout: Layout, identity: Identity, step: int) -> None:
    """Write a checkpoint at `path`, replacing one of that name. Collective.

    Raises:
        CheckpointError: it could not be written; earlier ones are as they were.
    """
    import torch.distributed as dist
    from megatron.core import dist_checkpointing
    from torch.distributed.checkpoint.api import CheckpointException

    partial = path.with_name(f".{path.name}.partial")
    if layout.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    stepped = _has_state(optimizer)
    state = _state(model, optimizer if stepped else None, layout, is_loading=False)
    state["rng"] = _rng_object(layout)
    try:
        with _written_in_process():
            dist_checkpointing.save(state, str(partial))
    except (Exception, CheckpointException) as error:  # torch's writer has no type for a full disk, and no word for it
        free = shutil.disk_usage(partial.parent).free / 2**20
        raise CheckpointError(
            f"{path} could not be written, with {free:.1f} MiB free on its disk: {_last_line(error)}; earlier checkpoints "
            "are whole. Make room, or choose another --save, and start the same command again"
        ) from error
    dist.barrier()
    if layout.rank == 0:
        manifest = {
            "format": FORMAT,
            "step": step,
            "stepped": stepped,
            "layout": layout.describe(),
            **identity.entries(),
        }
        with (partial / MANIFEST).open("w") as file:
            json.dump(manifest, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        old = path.with_name(f".{path.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if path.exists():
            path.rename(old)
        partial.rename(path)
        shutil.rmtree(old, ignore_errors=True)
    dist.barrier()


def load(path: Path, model: Any, optimizer: Any, layout: Layout, identity: Identity) -> int:
    """Restore a checkpoint (the newest one in a folder of several); returns its step. Collective.

    Raises:
        CheckpointError: nothing complete is there, it is of another model, or it is damaged.
    """
    from megatron.core import dist_checkpointing
    from torch.distributed.checkpoint.api import CheckpointException

    from agentrl.train.megatron.model import unwrap

    newest = latest(path)
    if newest is None:
        raise CheckpointError(f"{path}: no complete checkpoint here (a folder with {MANIFEST}, or one of such folders)")
    manifest = read_manifest(newest.path)
    _check_identity(newest.path, manifest, identity)
    state = _state(model, optimizer if manifest["stepped"] else None, layout, is_loading=True)
    same_layout = manifest["layout"] == layout.describe()
    if same_layout:
        state["rng"] = _rng_object(layout)
    try:
        loaded = dist_checkpointing.load(state, str(newest.path))
    except (Exception, CheckpointException) as error:
        raise CheckpointError(
            f"{newest.path} is damaged: {_last_line(error)}; move it away to resume from the checkpoint before it"
        ) from error
    unwrap(model).load_state_dict(loaded["model"], strict=True)
    if manifest["stepped"]:
        optimizer.load_state_dict(loaded["optimizer"])
    else:
        _forget_state(optimizer)
    if same_layout:
        _restore_rng(loaded["rng"])
    return newest.step


def _last_line(error: BaseException) -> str:
    """Of torch's report of all ranks, which is a page of tracebacks, the line that says what happened."""
    return next((line for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)


@contextlib.contextmanager
def _written_in_process() -> Iterator[None]:
    """Let megatron's writer write in this process.

    Its default starts a manager process and forks a writer on every save: seconds of overhead, and re-import of the
    main module, for nothing when the caller waits anyway.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

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


def _state(model: Any, optimizer: Any, layout: Layout, *, is_loading: bool) -> dict[str, Any]:
    from agentrl.train.megatron.model import unwrap

    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "dp_cp_group": layout.dp_cp_group,
    }
    state: dict[str, Any] = {"model": unwrap(model).sharded_state_dict(metadata=metadata)}
    if optimizer is not None:
        state["optimizer"] = optimizer.sharded_state_dict(state["model"], is_loading=is_loading, metadata=metadata)
    return state


def _has_state(optimizer: Any) -> bool:
    return any(len(part.optimizer.state) > 0 for part in optimizer.chained_optimizers)


def _forget_state(optimizer: Any) -> None:
    """Put the optimizer back to before its first step, with the model's weights as its master copies."""
    for part in optimizer.chained_optimizers:
        part.optimizer.state.clear()
    optimizer.reload_model_params()


def _rng_object(layout: Layout) -> Any:
    import torch
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    state = {"torch": torch.get_rng_state(), "tracker": get_cuda_rng_tracker().get_states()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return ShardedObject("rng", state, (layout.world,), (layout.rank,), replica_id=0)


def _restore_rng(state: dict[str, Any]) -> None:
    import torch
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    get_cuda_rng_tracker().set_states(state["tracker"])


def _check_identity(path: Path, manifest: dict[str, Any], identity: Identity) -> None:
    mine = identity.entries()
    if differ := _differences(manifest["model"], mine["model"]):
        raise CheckpointError(f"{path}: a checkpoint of another model: {differ}")
    if differ := _differences(manifest["optimizer"], mine["optimizer"]):
        raise CheckpointError(f"{path}: its optimizer state is of another kind: {differ}; use its settings to load it")


def _differences(theirs: dict[str, Any], ours: dict[str, Any]) -> str:
    keys = sorted(key for key in set(theirs) | set(ours) if theirs.get(key) != ours.get(key))
    return "; ".join(f"{key} is {theirs.get(key)!r} there and {ours.get(key)!r} here" for key in keys)
