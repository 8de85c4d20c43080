"""A process group beside the default one, in which a trainer process sends weights to engines.

1. Weights travel in buckets. The tensors of a bucket are views of one flat buffer of bytes, without gaps.
2. A group of the backend `shared_memory` is for processes of one machine. Its buckets lie in memory that all map."""

import itertools
import math
import mmap
import os
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous

from agentrl.errors import TrainError, raised_as

SHARED = "shared_memory"
MEETING_TIMEOUT = timedelta(seconds=60)
"""Time in which all members must join. An engine that died meanwhile never joins, and a new group is needed."""
TRANSFER_TIMEOUT = timedelta(seconds=300)  # minimum timeout of one broadcast in the group
_FOLDER, _PAGE = Path("/dev/shm"), mmap.PAGESIZE


def join_group(*, backend: str, address: str, world_size: int, rank: int, name: str, timeout: timedelta) -> Any:
    """Join the group `name` by the store at `tcp://host:port`, which rank 0 hosts; returns when all ranks have joined.

    Trainer and engines call it with the same address, world size and name. torch has no public call for a second group
    with its own store: this follows `init_process_group` (as SGLang, vLLM and OpenRLHF do), torch 2.9 to 2.13. Raises
    RuntimeError (mostly torch's DistNetworkError or DistStoreError): not all ranks joined within `timeout`."""
    store, rank, world_size = next(rendezvous(address, rank, world_size, timeout=timeout))
    store.set_timeout(timeout)
    make: Any = c10d._new_process_group_helper  # its argument types differ between torch versions
    limit, kept = max(timeout, TRANSFER_TIMEOUT), c10d.PrefixStore(name, store)
    group, _ = make(world_size, rank, [], c10d.Backend(backend), kept, group_name=name, timeout=limit)
    c10d._world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group


def views(flat: Tensor, specs: Iterable[tuple[str, str, list[int]]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a bucket by name, as views of its flat buffer."""
    start = 0
    for name, dtype, shape in specs:
        kind: torch.dtype = getattr(torch, dtype)
        end = start + kind.itemsize * math.prod(shape)
        yield name, flat[start:end].view(kind).view(shape)
        start = end


class _SharedBuffers:
    """Two flat buffers that this machine's processes map, in turns: while members read one, rank 0 fills the other."""

    def __init__(self, name: str, size: int | None = None) -> None:
        """Make the memory for buckets of `size` bytes, or map what rank 0 has made."""
        self._path = _FOLDER / name
        file = os.open(self._path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if size is not None else 0), 0o600)
        try:
            if size is not None:
                os.posix_fallocate(file, 0, 2 * -(-size // _PAGE) * _PAGE)
            self._halves = itertools.cycle(torch.frombuffer(mmap.mmap(file, 0), dtype=torch.uint8).chunk(2))
        except OSError:
            self.unlink()
            raise
        finally:
            os.close(file)

    def unlink(self) -> None:
        """Remove the file's name; the memory lasts as long as a process maps it."""
        self._path.unlink(missing_ok=True)

    def next(self, size: int) -> Tensor:
        """Return the first `size` bytes of the next buffer."""
        return next(self._halves)[:size]


class _Member:
    """One member of a group. All buckets share one flat buffer: allocating new memory is slower than the copy."""

    group: Any
    _shared: _SharedBuffers | None = None
    _flat: Tensor | None = None

    def _own_buffer(self, size: int, device: torch.device) -> Tensor:
        if self._flat is None or self._flat.numel() < size:
            self._flat = torch.empty(size, dtype=torch.uint8, device=device)
        return self._flat[:size]

    def end(self) -> None:
        """Free the buffer after the last bucket of a weight update."""
        self._flat = None

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group(self.group)


class WeightReceiver(_Member):
    """The member of one engine rank in a group; made when all members have joined. Raises RuntimeError, OSError: not
    all joined, or rank 0 is on another machine and the backend is `shared_memory`."""

    def __init__(
        self, *, backend: str, address: str, world_size: int, rank: int, name: str, timeout: timedelta
    ) -> None:
        join = partial(join_group, address=address, world_size=world_size, rank=rank, name=name, timeout=timeout)
        self.group = join(backend="gloo" if backend == SHARED else backend)
        if backend == SHARED:
            try:
                self._shared = _SharedBuffers(name)
            finally:
                dist.barrier(self.group)

    def receive(self, size: int, device: torch.device) -> Tensor:
        """Return the next bucket, of `size` bytes, valid until the next call. Raises RuntimeError: rank 0 was lost."""
        if self._shared:
            dist.barrier(self.group)  # rank 0 has filled this bucket, and the members are done with the one before
            return self._shared.next(size)
        flat = self._own_buffer(size, device)
        dist.broadcast(flat, src=0, group=self.group)
        return flat


class WeightSender(_Member):
    """The sender, rank 0 of a group; made when all `world_size` members have joined. `size`: bytes of the largest
    bucket. Raises TrainError: not all joined within `MEETING_TIMEOUT`, or shared memory is full."""

    def __init__(self, backend: str, address: str, world_size: int, name: str, size: int) -> None:
        self.name = name
        join = partial(join_group, address=address, world_size=world_size, rank=0, name=name, timeout=MEETING_TIMEOUT)
        try:
            if backend == SHARED:
                self._shared = _SharedBuffers(name, size)
            self.group = join(backend="gloo" if backend == SHARED else backend)
            if self._shared:
                dist.barrier(self.group)
        except OSError as error:
            said = f"{_FOLDER} has no room for two buckets of {size} bytes ({error}); lower --update-weight-buffer-size"
            raise TrainError(said) from error
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            said = f"weight group {name!r} at {address}: {world_size} members did not meet: {error}"
            raise TrainError(said) from error
        finally:
            if self._shared:
                self._shared.unlink()

    def buffer(self, size: int, device: torch.device) -> Tensor:
        """Return the flat buffer for the next bucket, of `size` bytes; on `device`, or in shared memory."""
        return self._shared.next(size) if self._shared else self._own_buffer(size, device)

    def close(self) -> None:
        if dist.get_backend(self.group) == "nccl":  # destroying the group would wait for a lost member
            c10d._abort_process_group(self.group)
        else:
            super().close()

    def send(self, flat: Tensor) -> None:
        """Send a bucket that was written into the result of `buffer`. Raises TrainError: a member was lost."""
        with raised_as(TrainError, "a member of the weight group was lost", RuntimeError):
            if self._shared:
                dist.barrier(self.group)
            else:
                work = dist.broadcast(flat, src=0, group=self.group, async_op=True)
                late = time.monotonic() + TRANSFER_TIMEOUT.total_seconds() / 2  # NCCL ends the process at its timeout
                while flat.is_cuda and not work.is_completed():
                    if time.monotonic() > late:
                        raise TrainError("a member of the weight group takes no weights")
                    time.sleep(0.001)
                work.wait()
