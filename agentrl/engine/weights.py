"""Weight updates as plain values that travel between processes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

# Parts of an engine's memory that can be freed, by SGLang's names. To generate, an engine needs all parts.
WHOLE = frozenset({"weights", "kv_cache"})
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


class TensorSpec(NamedTuple):
    """Description of a tensor."""

    name: str  # Hugging Face's name
    dtype: str  # such as `bfloat16`
    shape: list[int]  # unsharded

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return _BYTES[self.dtype] * math.prod(self.shape)


class Bucket(NamedTuple):
    """Tensors that the weight group `group` broadcasts as one flat buffer, without gaps."""

    group: str
    tensors: list[TensorSpec]


def buckets(specs: Sequence[TensorSpec], limit: int) -> list[list[TensorSpec]]:
    """Split tensors, in order, into buckets of at most `limit` bytes (a larger tensor gets its own). A tensor whose
    elements would not be aligned in the flat buffer begins a new bucket."""
    out, filled = list[list[TensorSpec]](), 0
    for spec in specs:
        if not out or filled + spec.nbytes > limit or filled % _BYTES[spec.dtype]:
            out.append([])
            filled = 0
        out[-1].append(spec)
        filled += spec.nbytes
    return out


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """A process group in which one trainer process broadcasts weights. This process is rank 0 of the group."""

    sender: int  # rank of this process in the trainer
    size: int  # bytes of the largest bucket
    address: str  # of the sender's TCP store
    port: int  # of the sender's TCP store
    world_size: int  # all ranks, the sender's included
    name: str  # an engine refuses a name that it knows already
    backend: str  # `nccl`, `gloo`, or `shared_memory` of the built-in engine
    ranks_per_engine: int  # engine i takes ranks from 1 + i * ranks_per_engine
    members: tuple[str, ...]  # the engines, as `EnginePool.epoch` names them


@dataclass(frozen=True, slots=True)
class DiskUpdate:
    """Weights in a Hugging Face folder that every engine can read."""

    folder: str
    adapter: str | None = None  # name of the folder's PEFT adapter: new to all engines, and sent with requests


@dataclass(frozen=True, slots=True)
class BroadcastUpdate:
    """Weights that the senders of weight groups broadcast, in this order."""

    buckets: list[Bucket]


@dataclass(frozen=True, slots=True)
class SharedUpdate:
    """Weights in memory that the trainer shares with engines: a number of buckets, offered under one key."""

    key: str
    buckets: int


# Handles (`numerics.shared_handle`) of a bucket's memory: for each engine, one handle per device.
Handles = Sequence[Sequence[str]]
WeightUpdate = DiskUpdate | BroadcastUpdate | SharedUpdate
