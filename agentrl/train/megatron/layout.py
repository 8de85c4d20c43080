"""The process layout: process groups, ranks and sizes of tensor, pipeline, context and data parallelism.

1. `Layout.join` starts torch.distributed (unless the process has), checks that the sizes fit, and builds megatron's
   groups. It is the only place that reads megatron's global parallel state.
2. `leave` undoes it, so that a process can join again with another layout. A default group that was there before
   `join` is used as it is and stays.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from agentrl.errors import TrainError
from agentrl.train.contracts import RankInfo
from agentrl.train.settings import TrainSettings


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of the four kinds of parallelism and this process's place in each."""

    rank: int
    world: int
    tp: int
    tp_rank: int
    pp: int
    pp_rank: int
    cp: int
    cp_rank: int
    dp: int
    dp_rank: int
    tp_group: dist.ProcessGroup
    pp_group: dist.ProcessGroup
    cp_group: dist.ProcessGroup
    dp_cp_group: dist.ProcessGroup
    owns_default_group: bool
    """Whether `join` started torch.distributed."""
    before: frozenset[dist.ProcessGroup]
    """The groups that there were before `join`."""
    pp_ranks: tuple[int, ...]
    """Global ranks of this process's pipeline, first stage first."""

    @classmethod
    def join(cls, settings: TrainSettings, where: RankInfo, device: torch.device) -> Layout:
        """Join the other trainer processes. Collective.

        Raises:
            TrainError: the number of processes is not a multiple of TP x PP x CP.
        """
        from megatron.core import parallel_state as mpu

        if where.world_size % settings.model_parallel_size:
            raise TrainError(
                f"{where.world_size} trainer processes cannot be divided by TP x PP x CP = {settings.model_parallel_size}"
            )
        timeout = datetime.timedelta(minutes=settings.distributed_timeout_minutes)
        started = not dist.is_initialized()
        if started:
            backend = settings.distributed_backend
            if backend == "auto":
                backend = "nccl" if device.type == "cuda" else "gloo"
            _start(backend, where, timeout)
        before = frozenset(dist.distributed_c10d._world.pg_map)
        mpu.initialize_model_parallel(
            tensor_model_parallel_size=settings.tensor_model_parallel_size,
            pipeline_model_parallel_size=settings.pipeline_model_parallel_size,
            context_parallel_size=settings.context_parallel_size,
            distributed_timeout_minutes=settings.distributed_timeout_minutes,
        )
        pp_group = mpu.get_pipeline_model_parallel_group()
        return cls(
            rank=dist.get_rank(),
            world=dist.get_world_size(),
            tp=mpu.get_tensor_model_parallel_world_size(),
            tp_rank=mpu.get_tensor_model_parallel_rank(),
            pp=mpu.get_pipeline_model_parallel_world_size(),
            pp_rank=mpu.get_pipeline_model_parallel_rank(),
            cp=mpu.get_context_parallel_world_size(),
            cp_rank=mpu.get_context_parallel_rank(),
            dp=mpu.get_data_parallel_world_size(),
            dp_rank=mpu.get_data_parallel_rank(),
            tp_group=mpu.get_tensor_model_parallel_group(),
            pp_group=pp_group,
            cp_group=mpu.get_context_parallel_group(),
            owns_default_group=started,
            before=before,
            dp_cp_group=mpu.get_data_parallel_group(with_context_parallel=True),
            pp_ranks=tuple(dist.get_process_group_ranks(pp_group)),
        )

    def leave(self) -> None:
        """Destroy megatron's groups, and torch.distributed's if `join` started it."""
        from megatron.core import parallel_state as mpu

        mpu.destroy_model_parallel()  # which forgets its groups; each goes on with threads of its own
        if self.owns_default_group:
            dist.destroy_process_group()
            return
        for group in frozenset(dist.distributed_c10d._world.pg_map) - self.before:
            dist.destroy_process_group(group)

    @property
    def first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def last_stage(self) -> bool:
        return self.pp_rank == self.pp - 1

    def describe(self) -> dict[str, int]:
        """The sizes, for manifests and logs."""
        return {"tp": self.tp, "pp": self.pp, "cp": self.cp, "dp": self.dp}


def _start(backend: str, where: RankInfo, timeout: datetime.timedelta) -> None:
    store = TCPStore(
        where.master_addr,
        where.master_port,
        where.world_size,
        is_master=where.rank == 0,
        timeout=timeout,
        wait_for_workers=False,
    )
    dist.init_process_group(backend, store=store, rank=where.rank, world_size=where.world_size, timeout=timeout)
