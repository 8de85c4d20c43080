"""The device of a trainer process, and its place among the other processes."""

import datetime
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, cuda
from torch._C._distributed_c10d import TCPStore

from agentrl.errors import TrainError
from agentrl.files import replacing
from agentrl.train.contracts import RankInfo
from agentrl.train.settings import TrainSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Sizes of data and context parallelism, and this process's rank in each; backends add other kinds."""

    rank: int
    world: int
    dp: int
    dp_rank: int
    cp: int = 1
    cp_rank: int = 0
    dp_cp_group: dist.ProcessGroup  # the processes that have different tokens of a batch
    cp_group: dist.ProcessGroup
    owns_default_group: bool  # whether `started` started torch.distributed
    before: frozenset[dist.ProcessGroup]  # the groups that existed before this backend's

    def leave(self) -> None:
        """Destroy the groups made since `started`, and torch.distributed's default group if `started` made it."""
        if self.owns_default_group:
            dist.destroy_process_group()
            return
        for group in _groups() - self.before:
            dist.destroy_process_group(group)

    def describe(self) -> dict[str, int]:
        """Return the sizes, for manifests and logs."""
        return {"cp": self.cp, "dp": self.dp}

    def add_up(self, sums: Tensor) -> Tensor:
        """Add up `sums` over the ranks that have parts of the same samples; the backward pass adds up gradients."""
        joined: Tensor = sums if self.cp == 1 else _Joined.apply(sums, self.cp_group)
        return joined


class _Joined(torch.autograd.Function):
    """A sum over ranks. The loss of every rank reads the sum, so gradients are added up too."""

    @staticmethod
    def forward(ctx: Any, sums: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, total = group, sums.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _Joined.apply(grads[0], ctx.group), None


def started(settings: TrainSettings, where: RankInfo, device: torch.device) -> dict[str, Any]:
    """Start torch.distributed unless it runs; returns `owns_default_group` and `before` of `Ranks`. Collective."""
    owns = not dist.is_initialized()
    if owns:
        backend, minutes = settings.distributed_backend, settings.distributed_timeout_minutes
        timeout = datetime.timedelta(minutes=minutes)
        if backend == "auto":
            backend = "nccl" if device.type == "cuda" else "gloo"
        address, size, leads = (where.master_addr, where.master_port), where.world_size, where.rank == 0
        store = TCPStore(*address, size, is_master=leads, timeout=timeout, wait_for_workers=False)
        dist.init_process_group(backend, store=store, rank=where.rank, world_size=size, timeout=timeout)
    return {"owns_default_group": owns, "before": _groups()}


def _groups() -> frozenset[dist.ProcessGroup]:
    return frozenset(dist.distributed_c10d._world.pg_map)


def pick(kind: str = "auto", local_rank: int = 0) -> torch.device:
    """Return a trainer process's GPU if it has one, else the CPU. Raises TrainError: `kind` names the other device."""
    if kind != "auto" and (kind == "cuda") != torch.cuda.is_available():
        have = "has" if torch.cuda.is_available() else "has no"
        raise TrainError(f"device {kind} was asked for, but this process {have} CUDA; set CUDA_VISIBLE_DEVICES")
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.backends.cudnn.allow_tf32 = False  # convolutions in full float32; torch allows TF32 by default
    return device


@contextmanager
def profiled(settings: TrainSettings, rollout: int, rank: int) -> Iterator[None]:
    """Write a trace of the block to `profile_dir`, for Chrome's or Perfetto's viewer, if `rollout` is profiled."""
    if not settings.use_pytorch_profiler or not settings.profile_step_start <= rollout < settings.profile_step_end:
        yield
        return
    with torch.profiler.profile(record_shapes=True, profile_memory=True, with_flops=True) as found:
        yield
    path = Path(settings.profile_dir or "profile") / f"rollout_{rollout}_rank_{rank}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as draft:
        found.export_chrome_trace(str(draft))


@contextmanager
def memory_recorded(settings: TrainSettings, rank: int) -> Iterator[None]:
    """With `record_memory_history`, write a snapshot of CUDA memory if the block fails. Raises TrainError: the block
    failed. The error names the snapshot, for https://pytorch.org/memory_viz."""
    try:
        yield
    except Exception as error:
        if not settings.record_memory_history:
            raise
        path = Path(settings.memory_snapshot_dir or "memory") / f"rank_{rank}.pickle"
        path.parent.mkdir(parents=True, exist_ok=True)
        cuda.memory._dump_snapshot(str(path))
        raise TrainError(f"{type(error).__name__}: {error}; a snapshot of the GPU's memory is in {path}") from error


def memory(device: torch.device) -> dict[str, float]:
    """Return peaks in GiB: `perf/trainer_memory`, the process's resident memory so far; with a GPU, since the last
    call, `perf/gpu_memory_allocated` and `perf/gpu_memory_reserved`."""
    found = {"trainer_memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
    if device.type == "cuda":
        found["gpu_memory_allocated"] = cuda.max_memory_allocated(device) / 2**30
        found["gpu_memory_reserved"] = cuda.max_memory_reserved(device) / 2**30
        cuda.reset_peak_memory_stats(device)
    return {f"perf/{name}": value for name, value in found.items()}
