"""Models from one form to another, with one file of weights at most in memory: Hugging Face folders and torch_dist."""

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
Shown = Callable[[Iterable[Any], int], Iterable[Any]]  # goes through so many things and shows how far it is


def convert(source: Path, target: Path, form: Form, beside: Path | None, shown: Shown) -> list[str]:
    """Write the model at `source` to the new folder `target`, whole or not at all. Returns the names of tensors that
    `form` has no place for. Raises CheckpointError: `target` is there, or `source` cannot be read."""
    if target.exists():
        raise CheckpointError(f"{target} is there already; give a new folder")
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
