"""A process group of its own between the trainer's rank 0 and the engines, beside the trainer's default group.

The members meet as SGLang's `init_weights_update_group` does: over a TCP store at the master's address, with keys
under the group's name.
"""

from __future__ import annotations

import datetime
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _new_process_group_helper, _world, default_pg_timeout
from torch.distributed.rendezvous import rendezvous

from agentrl.errors import TrainError


class WeightGroup:
    """Membership in such a group."""

    def __init__(self, group: Any) -> None:
        self._group = group

    @classmethod
    def join(
        cls,
        backend: str,
        master_addr: str,
        master_port: int,
        world_size: int,
        rank: int,
        name: str,
        timeout: datetime.timedelta = default_pg_timeout,
    ) -> WeightGroup:
        """Join as `rank` of `world_size`; rank 0 hosts the store. Blocks until all have joined.

        Raises:
            TrainError: the members did not meet within `timeout`.
        """
        address = f"tcp://{master_addr}:{master_port}"
        try:
            store, rank, world_size = next(rendezvous(address, rank, world_size, timeout=timeout))
            store.set_timeout(timeout)
            make: Any = _new_process_group_helper  # its argument types differ between torch versions
            group, _ = make(
                world_size,
                rank,
                [],
                dist.Backend(backend),
                PrefixStore(name, store),
                group_name=name,
                backend_options=None,
                timeout=timeout,
            )
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            raise TrainError(
                f"weight group {name!r} at {address}: {world_size} members did not meet: {error}"
            ) from error
        _world.pg_group_ranks[group] = {i: i for i in range(world_size)}
        return cls(group)

    def broadcast(self, tensor: Tensor) -> None:
        """Send `tensor` from rank 0, or receive into it; waits until it is done.

        Raises:
            TrainError: a member was lost.
        """
        try:
            dist.broadcast(tensor.contiguous(), src=0, group=self._group)
        except RuntimeError as error:
            raise TrainError(f"a member of the weight group was lost: {error}") from error

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group(self._group)
