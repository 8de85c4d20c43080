"""Joining a process group beside the default one: where trainer and engines meet to broadcast weights."""

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous

from agentrl.errors import TrainError

MEETING_TIMEOUT = timedelta(seconds=60)
"""Time in which all members must join: an engine that died meanwhile never does, and a new group has to be made."""
TRANSFER_TIMEOUT = timedelta(seconds=300)
"""Least time that one broadcast in the group may take."""


def join_group(*, backend: str, address: str, world_size: int, rank: int, name: str, timeout: timedelta) -> Any:
    """Join the group `name` over `tcp://host:port`, whose store rank 0 hosts; returns when all ranks are there.

    Trainer and engines call it with the same address, world size and name. torch has no public call for a second group
    with its own store: this follows `init_process_group` (as SGLang, vLLM and OpenRLHF do), torch 2.9 to 2.13.

    Raises:
        RuntimeError (torch's DistNetworkError or DistStoreError, mostly): they did not meet within `timeout`.
    """
    store, rank, world_size = next(rendezvous(address, rank, world_size, timeout=timeout))
    store.set_timeout(timeout)
    make: Any = c10d._new_process_group_helper  # its argument types differ between torch versions
    limit, kept = max(timeout, TRANSFER_TIMEOUT), c10d.PrefixStore(name, store)
    group, _ = make(world_size, rank, [], c10d.Backend(backend), kept, group_name=name, timeout=limit)
    c10d._world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group


class WeightSender:
    """The sender's side of a group, whose rank 0 it is; made when all `world_size` members have joined. Raises
    TrainError: they did not meet within `MEETING_TIMEOUT`."""

    def __init__(self, backend: str, address: str, world_size: int, name: str) -> None:
        try:
            self._group = join_group(
                backend=backend, address=address, world_size=world_size, rank=0, name=name, timeout=MEETING_TIMEOUT
            )
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            said = f"weight group {name!r} at {address}: {world_size} members did not meet: {error}"
            raise TrainError(said) from error

    def broadcast(self, tensor: Tensor) -> None:
        """Send `tensor`; waits until it is done. Raises TrainError: a member was lost."""
        try:
            dist.broadcast(tensor.contiguous(), src=0, group=self._group)
        except RuntimeError as error:
            raise TrainError(f"a member of the weight group was lost: {error}") from error

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group(self._group)
