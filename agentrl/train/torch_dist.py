"""Megatron's `torch_dist` checkpoints, read and written tensor by tensor, without a model or ranks. `.metadata` is a
pickle that lists the pieces of each tensor; only torch's own description classes are loaded from it. Pieces are read
with `weights_only`. `read` can read one layer or expert of a stacked tensor."""

import argparse
import io
import json
import os
import pickle
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata
from torch.serialization import _get_layout

from agentrl.errors import CheckpointError, raised_as

_INDEX = ".metadata"
_CAUSE = " ({!r:.200})"  # the form of an error in a message
_DESCRIPTIONS = {
    **{("torch.distributed.checkpoint.metadata", name): getattr(metadata, name) for name in metadata.__all__},
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): metadata._MEM_FORMAT_ENCODING,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
}

_WRITTEN: dict[tuple[str, str], Any] = {
    ("torch.serialization", "_get_layout"): _get_layout,
    **{("pathlib", name): PurePosixPath for name in ("Path", "PosixPath", "PurePosixPath")},
    **{("collections", kind.__name__): kind for kind in (OrderedDict, defaultdict)},
}
"""The names that torch's own writer uses in addition to descriptions."""
_ONLY_WEIGHTS = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
"""The environment variable that makes `torch.load` unpickle only tensors and plain values, whatever its arguments."""


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """A tensor to write under `key`: entry `index` of a stack of shape `of`, or a whole tensor if both are empty."""

    key: str
    index: tuple[int, ...]
    of: tuple[int, ...]
    tensor: Tensor


class _Unread(dict[Any, Any]):
    """Placeholder for other objects in `.metadata` than descriptions, such as megatron's own records."""

    def __init__(self, *_args: Any) -> None: ...

    def __setstate__(self, _state: Any) -> None: ...


_BUILT: tuple[Any, ...] = (_Unread, OrderedDict, defaultdict, *filter(is_dataclass, _DESCRIPTIONS.values()))


class _Unpickler(pickle._Unpickler):  # the C version would allocate any size that a damaged file names
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        return _DESCRIPTIONS.get((module, name), _Unread)

    def load_build(self) -> None:
        """Set the attributes of an object. Refuse classes and functions: changes to them would outlast the load."""
        if not isinstance(self.stack[-2], _BUILT):  # type: ignore[attr-defined]
            raise pickle.UnpicklingError(f"it sets attributes of {self.stack[-2]!r:.100}")  # type: ignore[attr-defined]
        super().load_build()  # type: ignore[misc]

    dispatch: ClassVar[dict[int, Any]] = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: load_build}


class _Strict(_Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (known := _WRITTEN.get((module, name))) is not None:
            return known
        found = super().find_class(module, name)
        if found is _Unread:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint of this trainer does")
        return found


@contextmanager
def as_data(path: Path) -> Iterator[None]:
    """Let torch load the checkpoint at `path` without running its code: the index may have only known names, the rest
    loads with `weights_only`. One thread at a time. Raises CheckpointError: the index is damaged or has other names."""
    # A damaged pickle raises whatever its bytes happen to mean.
    with raised_as(CheckpointError, f"{path / _INDEX}: not the index of a checkpoint", Exception, shown=_CAUSE):
        _Strict(io.BytesIO((path / _INDEX).read_bytes())).load()
    before = os.environ.get(_ONLY_WEIGHTS)
    os.environ[_ONLY_WEIGHTS] = "1"
    try:
        yield
    finally:
        os.environ.pop(_ONLY_WEIGHTS)
        if before is not None:
            os.environ[_ONLY_WEIGHTS] = before


class TorchDist:
    """A checkpoint's tensors. Raises CheckpointError: the folder's `.metadata` cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # A damaged pickle raises whatever its bytes happen to mean.
        with raised_as(CheckpointError, f"{path / _INDEX}: not a torch_dist checkpoint's", Exception, shown=_CAUSE):
            found = _Unpickler(io.BytesIO((path / _INDEX).read_bytes())).load()
            entries, self._places = found.state_dict_metadata, dict(found.storage_data)
            kind = metadata.TensorStorageMetadata
            self._entries: dict[str, Any] = {k: e for k, e in entries.items() if isinstance(e, kind)}
            self.shapes = {key: tuple(map(int, entry.size)) for key, entry in self._entries.items()}

    def read(self, key: str, index: tuple[int, ...] = ()) -> Tensor:
        """Read a tensor, or entry `index` of a stack, as stored. Raises CheckpointError: it is missing or damaged."""
        what = f"{self.path}: {key} cannot be read"
        with raised_as(CheckpointError, what, Exception, shown=_CAUSE, remedy="fetch it again"):
            return self._read(key, index)

    def _read(self, key: str, index: tuple[int, ...]) -> Tensor:
        entry, n, filled = self._entries[key], len(index), 0
        found = torch.empty(entry.size[n:], dtype=entry.properties.dtype)
        for chunk in entry.chunks:
            at = tuple(i - start for i, start in zip(index, chunk.offsets, strict=False))
            if all(0 <= i < size for i, size in zip(at, chunk.sizes, strict=False)):
                ends = zip(chunk.offsets[n:], chunk.sizes[n:], strict=True)
                part = found[tuple(slice(start, start + size) for start, size in ends)]
                part.copy_(self._piece(key, chunk)[at])
                filled += part.numel()
        if filled != found.numel():
            raise ValueError(f"{filled} of {found.numel()} numbers are there")
        return found

    def _piece(self, key: str, chunk: Any) -> Tensor:
        place = self._places[metadata.MetadataIndex(key, chunk.offsets)]
        if getattr(place, "transform_descriptors", None) or Path(place.relative_path).name != place.relative_path:
            raise ValueError(f"compressed, or not in a file of its own folder: {place}")
        with (self.path / place.relative_path).open("rb") as file:
            file.seek(place.offset)
            piece: Tensor = torch.load(io.BytesIO(file.read(place.length)), map_location="cpu", weights_only=True)
        return piece.view(chunk.sizes)


def write(path: Path, parts: Iterable[TensorPiece], said: Mapping[str, Any]) -> None:
    """Write a checkpoint to the folder `path`, with one tensor in memory at a time. `said`: entries of its `args`."""
    entries: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    with (path / "__0_0.distcp").open("wb") as file:

        def append(place: Any, value: Any) -> None:
            start = file.tell()
            torch.save(value, file)
            places[place] = filesystem._StorageInfo("__0_0.distcp", start, file.tell() - start)

        for part in parts:
            shape = part.tensor.shape
            sizes, whole = torch.Size((*(1 for _ in part.of), *shape)), torch.Size((*part.of, *shape))
            offsets, kind = torch.Size((*part.index, *(0 for _ in shape))), metadata.TensorProperties(part.tensor.dtype)
            entry = entries.setdefault(part.key, metadata.TensorStorageMetadata(kind, whole, []))
            entry.chunks.append(metadata.ChunkStorageMetadata(offsets, sizes))
            append(metadata.MetadataIndex(part.key, offsets, len(entry.chunks) - 1), part.tensor.reshape(sizes).clone())
            for key in _extra_states(part) - entries.keys():
                entries[key] = metadata.BytesStorageMetadata()
                append(metadata.MetadataIndex(key), [None])
    (path / _INDEX).write_bytes(pickle.dumps(metadata.Metadata(entries, {}, places)))
    args = argparse.Namespace(tensor_model_parallel_size=1, pipeline_model_parallel_size=1, **said)
    # Megatron's `sharded_state_dict` reads here which form the keys have.
    form = {"non_homogeneous_layers": any(".layers.0." in key for key in entries), "singleton_local_shards": False}
    common = {"args": args, "checkpoint_version": 3.0, "iteration": 0, "content_metadata": form}
    torch.save(common, path / "common.pt")
    backends = {"sharded_backend": "torch_dist", "common_backend": "torch"}
    (path / "metadata.json").write_text(json.dumps(backends | {f"{name}_version": 1 for name in backends}))


def _extra_states(part: TensorPiece) -> set[str]:
    """Return the keys of the extra states of a weight's modules: Megatron's loader requires them and accepts None."""
    module = part.key.rpartition(".")[0]
    index, of = (".".join(map(str, numbers)) for numbers in (part.index or (0,), part.of or (1,)))
    holders = module, module.replace(".linear_proj", ".core_attention")
    return {f"{holder}._extra_state/shard_{index}_{of}" for holder in holders}
