"""The process layout: process groups, ranks and sizes of tensor, pipeline, context and data parallelism. They are read
from megatron's global parallel state in `join`. `leave` destroys that state, so a process can join again."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from agentrl.errors import TrainError
from agentrl.train.contracts import RankInfo
from agentrl.train.ranks import Ranks, started
from agentrl.train.settings import TrainSettings

T = TypeVar("T")


def alike(settings: TrainSettings, taker: Callable[..., Any]) -> dict[str, Any]:
    """Return the settings that a config class or function of megatron takes under the same names."""
    return settings.model_dump(include=set(inspect.signature(taker).parameters))


@dataclass(frozen=True, slots=True)
class Cut:
    """The sharding of a kind of parameters on a pipeline stage, over `size` ranks, of which this is `rank`. `first`:
    true if this rank belongs to the first replica."""

    size: int
    rank: int
    group: dist.ProcessGroup
    first: bool

    def gathered(self, local: Tensor) -> list[Tensor]:
        """Gather the shards of a parameter; `local` is this rank's. Collective."""
        if self.size == 1:
            return [local]
        parts = [torch.empty_like(local) for _ in range(self.size)]
        dist.all_gather(parts, local.contiguous(), group=self.group)
        return parts


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout(Ranks):
    """Megatron's `Ranks`: also sizes of tensor, pipeline and expert parallelism, and this process's rank in each."""

    tp: int
    tp_rank: int
    pp: int
    pp_rank: int
    tp_group: dist.ProcessGroup
    pp_group: dist.ProcessGroup
    pp_ranks: tuple[int, ...]  # global ranks of this process's pipeline, first stage first
    own_stages: Mapping[str, int]
    ep_rank: int
    ep_ranks: tuple[int, ...]  # global ranks of this process's expert-parallel group
    experts: Cut

    @classmethod
    def join(cls, settings: TrainSettings, where: RankInfo, device: torch.device) -> Self:
        """Join the other trainer processes. Collective. Raises TrainError: the layout does not fit their number."""
        from megatron.core import parallel_state as mpu

        if where.world_size % settings.model_parallel_size:
            raise TrainError(
                f"{where.world_size} trainer processes cannot be divided by TP x PP x CP = {settings.model_parallel_size}"
            )
        etp, pp = settings.expert_tensor_parallel, settings.pipeline_model_parallel_size
        if where.world_size % (of_experts := etp * settings.expert_model_parallel_size * pp):
            said = f"{where.world_size} trainer processes cannot be divided by expert TP x EP x PP = {of_experts}"
            raise TrainError(f"{said}; change expert_model_parallel_size or expert_tensor_parallel_size")
        groups = started(settings, where, device)
        sizes = alike(settings, mpu.initialize_model_parallel) | {"expert_tensor_parallel_size": etp}
        mpu.initialize_model_parallel(**sizes)
        kinds = {"tp": "tensor_model", "pp": "pipeline_model", "cp": "context", "dp": "data"}
        found = {name: getattr(mpu, f"get_{kind}_parallel_world_size")() for name, kind in kinds.items()}
        found |= {f"{name}_rank": getattr(mpu, f"get_{kind}_parallel_rank")() for name, kind in kinds.items()}
        del kinds["dp"]  # its group is `dp_cp_group` below
        found |= {f"{name}_group": getattr(mpu, f"get_{kind}_parallel_group")() for name, kind in kinds.items()}
        size, rank, group = (
            getattr(mpu, f"get_expert_tensor_parallel_{what}")() for what in ("world_size", "rank", "group")
        )
        return cls(
            rank=dist.get_rank(),
            world=dist.get_world_size(),
            dp_cp_group=mpu.get_data_parallel_group(with_context_parallel=True),
            own_stages=settings.own_stages,
            pp_ranks=tuple(dist.get_process_group_ranks(found["pp_group"])),
            ep_rank=mpu.get_expert_model_parallel_rank(),
            ep_ranks=tuple(dist.get_process_group_ranks(mpu.get_expert_model_parallel_group())),
            experts=Cut(size, rank, group, mpu.get_expert_data_parallel_rank() == 0),
            **found,
            **groups,
        )

    def leave(self) -> None:
        """Destroy megatron's groups, and torch.distributed's if `join` started it."""
        from megatron.core import parallel_state as mpu

        mpu.destroy_model_parallel()  # drops its groups, but their threads go on until they are destroyed
        Ranks.leave(self)

    @property
    def dense(self) -> Cut:
        """Return the sharding of all parameters except the experts'."""
        return Cut(self.tp, self.tp_rank, self.tp_group, self.dp_rank == 0 and self.cp_rank == 0)

    def from_stages(self, mine: dict[str, T]) -> dict[str, T]:
        """Return the entries of all stages of this pipeline, merged, on every stage. Collective."""
        every = [mine] * self.pp
        if self.pp > 1:
            dist.all_gather_object(every, mine, group=self.pp_group)
        return {name: value for stage in every for name, value in stage.items()}

    def describe(self) -> dict[str, int]:
        experts = {"ep": len(self.ep_ranks), "etp": self.experts.size}
        return {"tp": self.tp, "pp": self.pp, "cp": self.cp, "dp": self.dp, **experts, **self.own_stages}
