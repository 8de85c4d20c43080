"""Weight updates as plain values that travel between processes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

WHOLE = frozenset({"weights", "kv_cache"})
"""Parts of an engine's memory that can be freed, by SGLang's names. To generate, an engine needs all parts."""


_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


class TensorSpec(NamedTuple):
    """A tensor's Hugging Face name, its dtype (such as `bfloat16`) and its unsharded shape."""

    name: str
    dtype: str
    shape: list[int]

    @property
    def nbytes(self) -> int:
        """The size of the tensor."""
        return _BYTES[self.dtype] * math.prod(self.shape)


class Bucket(NamedTuple):
    """Tensors that the weight group `group` broadcasts as one flat buffer, without gaps."""

    group: str
    tensors: list[TensorSpec]


def buckets(specs: Sequence[TensorSpec], limit: int) -> list[list[TensorSpec]]:
    """Split tensors, in order, into buckets of at most `limit` bytes (a larger tensor gets its own). A tensor whose
    elements would not be aligned in the flat buffer begins a new bucket."""
    out: list[list[TensorSpec]] = []
    filled = 0
    for spec in specs:
        if not out or filled + spec.nbytes > limit or filled % _BYTES[spec.dtype]:
            out.append([])
            filled = 0
        out[-1].append(spec)
        filled += spec.nbytes
    return out


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """A process group in which one trainer process broadcasts weights. This process is rank 0 of the group.

    Attributes:
        sender: rank of this process in the trainer.
        size: bytes of the largest bucket.
        address, port: address of the sender's TCP store.
        world_size: all ranks, the sender's included.
        name: name of the group; an engine refuses a name that it knows already.
        backend: `nccl`, `gloo`, or `shared_memory` of the built-in engine.
        ranks_per_engine: engine i takes ranks from 1 + i * ranks_per_engine.
        members: the engines, as `EnginePool.epoch` names them."""

    sender: int
    size: int
    address: str
    port: int
    world_size: int
    name: str
    backend: str
    ranks_per_engine: int
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DiskUpdate:
    """Weights in a Hugging Face folder that every engine can read.

    Attributes:
        adapter: if the folder has a PEFT adapter, its name: new to all engines, and sent with requests."""

    folder: str
    adapter: str | None = None


@dataclass(frozen=True, slots=True)
class BroadcastUpdate:
    """Weights that the senders of weight groups broadcast, in this order."""

    buckets: list[Bucket]


@dataclass(frozen=True, slots=True)
class SharedUpdate:
    """Weights in memory that the trainer shares with engines: a number of buckets, offered under one key."""

    key: str
    buckets: int


Handles = Sequence[Sequence[str]]
"""A bucket's handles (`numerics.shared_handle`): for each engine one a device, of memory on that device."""

WeightUpdate = DiskUpdate | BroadcastUpdate | SharedUpdate
