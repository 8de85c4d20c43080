"""Finds, atomically writes and compares the checkpoint folders of any train backend. A checkpoint is written
into a hidden folder and renamed when complete. Its last file is `manifest.json`, which names the files, so an
interrupted save is never found and damage is detected. This module does not import torch."""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.errors import CheckpointError, disk_trouble, raised_as
from agentrl.files import sync_folder, write_atomic
from agentrl.runfolder import CRITIC, MANIFEST
from agentrl.train.learning_rate import learning_rate
from agentrl.train.settings import TrainSettings

FORMAT = 1
TRACKER = "latest_checkpointed_iteration.txt"
"""Megatron's file that names the newest checkpoint of a folder: `release`, or `10` for `iter_0000010`."""
_DIGESTED = 2**26  # bytes of the largest file that is checked by a digest; of larger files only the size is checked
_ENTRIES = {"step": int, "stepped": bool, "layout": dict, "model": dict, "optimizer": dict}


@dataclass(frozen=True, slots=True)
class Found:
    """A complete checkpoint on disk and the step it was saved at."""

    path: Path
    step: int


@dataclass(frozen=True, slots=True)
class Identity:
    """The properties that a checkpoint must share with the run that loads it: plain values by name."""

    model: Mapping[str, Any]
    optimizer: Mapping[str, Any]

    def check(self, path: Path, manifest: Mapping[str, Any]) -> None:
        """Raises `CheckpointError`, with the differences, if the checkpoint at `path` is damaged or of other settings."""
        files = manifest.get("files")  # older checkpoints do not have it
        if isinstance(files, dict) and (differ := _differences(files, _contents(path))):
            raise CheckpointError(f"{path} is damaged: {differ}; move it away to resume from the checkpoint before it")
        if differ := _differences(manifest["model"], self.model):
            raise CheckpointError(f"{path}: a checkpoint of another model: {differ}")
        if differ := _differences(manifest["optimizer"], self.optimizer):
            raise CheckpointError(
                f"{path}: the optimizer differs: {differ}; use the settings of the checkpoint to load it"
            )


def check_critic(path: Path, *, wanted: bool) -> None:
    """Raises `CheckpointError` if the checkpoint at `path` lacks a wanted critic, or has one that is not wanted."""
    if (path / CRITIC / MANIFEST).is_file() == wanted:
        return
    holds = "no critic, and this run's algorithm learns one" if wanted else "a critic, and this run has none"
    raise CheckpointError(
        f"{path}: it holds {holds}; use the checkpoint's --advantage-estimator, or start a new --output-dir "
        "from the checkpoint's exported model (--hf-checkpoint)"
    )


def check_curve(found: Found, settings: TrainSettings, total_steps: int, step: int) -> None:
    """Raises `CheckpointError` if the learning rate would jump at optimizer step `step`, where the run goes on.
    By default the decay ends with the run, so a longer run changes it. `lr_decay_iters` fixes the end. Another number
    of steps per rollout moves the run to another place of the curve."""
    manifest, rollouts = read_manifest(found.path), max(found.step + 1 - settings.num_critic_only_steps, 0)
    theirs, each = manifest.get("lr_decay_end"), manifest.get("steps_per_rollout", settings.num_steps_per_rollout)
    ours = settings.lr_wsd_decay_iters
    wsd = ours and manifest.get("lr_wsd_decay_iters", ours)  # older checkpoints do not have it
    before = {"lr_decay_iters": theirs, "lr_wsd_decay_iters": wsd} if type(theirs) is int else {}
    own = settings.model_copy(update=before)
    if each != settings.num_steps_per_rollout:
        last, new = learning_rate(rollouts * each, own, total_steps), learning_rate(step, settings, total_steps)
        if not math.isclose(last, new):
            raise CheckpointError(
                f"{found.path}: its run took {each} optimizer steps per rollout, this run takes {settings.num_steps_per_rollout}. "
                f"The learning rate would jump from {last:.3g} to {new:.3g}. Keep --num-steps-per-rollout {each}"
            )
        return
    warming = settings.lr_warmup_fraction is None and step <= settings.lr_warmup_iters  # both curves are alike there
    if settings.lr_decay_iters is not None or type(theirs) is not int or warming:
        return
    last, new = learning_rate(step, own), learning_rate(step, settings, total_steps)
    if last != new:
        kept = f"--lr-decay-iters {theirs}{f' --lr-wsd-decay-iters {wsd}' if wsd else ''}"
        raise CheckpointError(
            f"{found.path}: the checkpoint's learning rate ({settings.lr_decay_style}) changes until optimizer step {theirs}, "
            f"this run's until step {total_steps}. It would jump from {last:.3g} to {new:.3g}. Set {kept} "
            f"to keep the curve (then constant at {learning_rate(theirs + 1, own):g}), or --lr-decay-iters {total_steps} for the new one"
        )


def latest(root: str | Path) -> Found | None:
    """The complete checkpoint with the highest step in `root` (or `root` itself), or None."""
    root = Path(root)
    folders = [root] if (root / MANIFEST).is_file() else [m.parent for m in root.glob(f"[!.]*/{MANIFEST}")]
    found = [Found(folder, read_manifest(folder)["step"]) for folder in folders]
    return max(found, key=lambda f: f.step, default=None)


def torch_dist(root: str | Path) -> Path | None:
    """Return Megatron's torch_dist checkpoint that `root` is, or that its `TRACKER` names; else None. Raises
    CheckpointError: the named checkpoint is missing, or of another format."""
    folder, tracker = Path(root), Path(root) / TRACKER
    if tracker.is_file():
        said = tracker.read_text().strip()
        folder = folder / (said if not said.isdigit() else f"iter_{int(said):07d}")
        if not (folder / ".metadata").is_file():
            raise CheckpointError(f"{tracker}: {said!r:.80}, but {folder} is not a torch_dist checkpoint")
    return folder if (folder / ".metadata").is_file() else None


def foreign(root: str | None) -> Path | None:
    """Return the Megatron checkpoint or the Hugging Face folder at `root`; None if agentrl wrote a checkpoint there."""
    if root is None or latest(folder := Path(root).expanduser()):
        return None
    return torch_dist(folder) or (folder if (folder / "config.json").is_file() else None)


def read_manifest(path: Path) -> dict[str, Any]:
    """Return a checkpoint's manifest: `step`, `stepped` (true if it has optimizer state), `layout`, `model` (sizes), ...
    Raises CheckpointError: the folder is not a complete checkpoint, or of another format."""
    what = f"{path}: not a complete checkpoint"
    with raised_as(CheckpointError, what, OSError, ValueError, RecursionError, shown=" ({})"):
        manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text())
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path}: expected a checkpoint of format {FORMAT}, got {manifest!r:.80}")
    for name, kind in _ENTRIES.items():
        if type(value := manifest.get(name)) is not kind:
            raise CheckpointError(f"{path}: {name} in {MANIFEST} is damaged: {value!r:.80}")
    return manifest


@contextmanager
def writing(path: Path, manifest: Mapping[str, Any], *, leader: bool, barrier: Callable[[], Any]) -> Iterator[Path]:
    """The hidden folder to write into; it becomes `path`, in place of an old one, when the block ends without an error.
    Collective: the `leader` makes and renames the folder; `barrier` waits for all ranks."""
    partial = path.with_name(f".{path.name}.partial")
    if leader:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    barrier()
    yield partial
    barrier()
    if leader:
        whole = {"format": FORMAT, **manifest, "files": _contents(partial)}
        write_atomic(partial / MANIFEST, json.dumps(whole, indent=2))
        replace_folder(partial, path)
    barrier()


def replace_folder(made: Path, target: Path) -> None:
    """Rename `made` to `target`; an old folder is moved aside first, since a rename cannot replace one."""
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    made.rename(target)
    sync_folder(target.parent)
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A new hidden folder beside `path` to fill; it takes the place of `path` if the block ends without an error. Raises
    CheckpointError: a library reported a full disk with an error of its own, which names no file."""
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        replace_folder(partial, path)
    except Exception as error:
        if isinstance(error, OSError) or (trouble := disk_trouble(error)) is None:
            raise
        raise CheckpointError(f"{path}: {trouble}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _contents(folder: Path) -> dict[str, list[Any]]:
    """The size of each file and, up to `_DIGESTED` bytes, its digest."""
    files = ((file, file.stat().st_size) for file in folder.rglob("*") if file.is_file() and file.name != MANIFEST)
    return {str(file.relative_to(folder)): [size, size <= _DIGESTED and _digest(file)] for file, size in files}


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    keys = sorted(key for key in set(theirs) | set(ours) if theirs.get(key) != ours.get(key))
    return "; ".join(f"{key} is {theirs.get(key)!r} there and {ours.get(key)!r} here" for key in keys)
