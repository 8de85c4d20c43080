"""A process group of its own between the trainer's rank 0 and the engines, beside the trainer's default group."""

from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import default_pg_timeout

from agentrl.errors import TrainError
from agentrl.weightgroup import join_group


class WeightGroup:
    """Membership as `rank` of `world_size`; rank 0 hosts the store at `tcp://host:port`. Blocks until all have joined.

    Raises:
        TrainError: the members did not meet within `timeout`.
    """

    def __init__(
        self, backend: str, address: str, world_size: int, rank: int, name: str, timeout: timedelta = default_pg_timeout
    ) -> None:
        members = {"world_size": world_size, "rank": rank}
        try:
            self._group = join_group(backend=backend, address=address, name=name, timeout=timeout, **members)
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            raise TrainError(
                f"weight group {name!r} at {address}: {world_size} members did not meet: {error}"
            ) from error

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
