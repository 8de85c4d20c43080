"""Weight updates as plain values that travel between processes."""

from dataclasses import dataclass
from typing import NamedTuple

WHOLE = frozenset({"weights", "kv_cache"})
"""All that an engine can give back of its memory, by SGLang's names; it needs all of it to generate."""


class TensorSpec(NamedTuple):
    """A tensor's Hugging Face name, its dtype (as `bfloat16`) and its whole shape."""

    name: str
    dtype: str
    shape: list[int]


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """The process group in which weights are broadcast: the trainer is rank 0, the engines' ranks follow.

    Attributes:
        address, port: where the trainer's store listens.
        world_size: all ranks, the trainer's included.
        name: the group's; an engine refuses one that it knows already.
        backend: `nccl` or `gloo`.
        ranks_per_engine: engine i takes ranks from 1 + i * ranks_per_engine.
        members: the engines, as `EnginePool.epoch` names them.
    """

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
        adapter: where the folder is PEFT's, a name for it that no engine has had before; requests ask for it.
    """

    folder: str
    adapter: str | None = None


@dataclass(frozen=True, slots=True)
class BroadcastUpdate:
    """Weights that rank 0 of the weight group `group` broadcasts, tensor by tensor, in this order."""

    group: str
    buckets: list[list[TensorSpec]]


WeightUpdate = DiskUpdate | BroadcastUpdate
