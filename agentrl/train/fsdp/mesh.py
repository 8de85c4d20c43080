"""Where a rank of FSDP's trainer stands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from agentrl.errors import TrainError
from agentrl.train.contracts import RankInfo
from agentrl.train.ranks import Ranks, started
from agentrl.train.settings import TrainSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh(Ranks):
    """Data parallelism alone.

    Attributes:
        mesh: over which FSDP shards and, in its first dimension if it has two, copies; None where nothing is sharded.
        shard_group: the processes that have different shards.
    """

    device: torch.device
    mesh: Any
    shard_group: dist.ProcessGroup

    @classmethod
    def join(cls, settings: TrainSettings, where: RankInfo, device: torch.device) -> Self:
        """Join the other trainer processes. Collective.

        Raises:
            TrainError: the number of processes is not a multiple of the copies.
        """
        world, copies = where.world_size, settings.data_parallel_replicate_degree
        if world % copies:
            raise TrainError(f"{world} trainer processes cannot be divided by data_parallel_replicate_degree {copies}")
        groups, mesh = started(settings, where, device), None
        everyone = shard_group = dist.distributed_c10d._get_default_group()
        if world > 1 or settings.bf16 or settings.fsdp_cpu_offload:
            sizes = (copies, world // copies) if copies > 1 else (world,)
            mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("copies", "shards")[-len(sizes) :])
            shard_group = mesh.get_group("shards")
        return cls(
            **groups,
            rank=where.rank,
            world=world,
            dp=world,
            dp_rank=where.rank,
            dp_cp_group=everyone,
            cp_group=everyone,
            device=device,
            mesh=mesh,
            shard_group=shard_group,
        )
