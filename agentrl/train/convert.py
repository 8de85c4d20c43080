"""Conversion of models between Hugging Face folders and torch_dist, with at most one weight file in memory."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

from agentrl.errors import CheckpointError
from agentrl.train.checkpoints import TRACKER, whole_folder
from agentrl.train.hf import copy_rest
from agentrl.train.hf import write as write_hf
from agentrl.train.megatron.folder import opened, parts
from agentrl.train.torch_dist import write

Form = Literal["hf", "torch_dist"]
Shown = Callable[[Iterable[Any], int], Iterable[Any]]  # yields the given number of items, with a progress display


def convert(source: Path, target: Path, form: Form, beside: Path | None, shown: Shown) -> list[str]:
    """Write the model at `source` atomically to the new folder `target`. Returns the names of tensors that `form`
    cannot store. Raises CheckpointError: `target` exists already, or `source` cannot be read."""
    if target.exists():
        raise CheckpointError(f"{target} exists already; give a new folder")
    folder = opened(source, beside)
    if form == "hf":
        tensors = ((name, folder.tensor(name)) for name in folder.files)
        write_hf(target, shown(tensors, len(folder.files)), source=folder)
        return []
    names, stream, said = parts(folder)
    with whole_folder(target) as partial:
        copy_rest(folder.path, partial)
        (partial / TRACKER).write_text("release")
        (partial / "release").mkdir()
        write(partial / "release", shown(stream, len(names)), said)
    return sorted(folder.files.keys() - {name for some in names for name in some})
