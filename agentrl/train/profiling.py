"""What training costs a process: its memory, and torch's profile of the rollouts that were asked for."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import cuda

from agentrl.files import replacing
from agentrl.train.settings import TrainSettings


@contextmanager
def profiled(settings: TrainSettings, rollout: int, rank: int) -> Iterator[None]:
    """Write a trace of what is inside to `profile_dir`, for Chrome's or Perfetto's viewer, if `rollout` is asked for."""
    if not settings.use_pytorch_profiler or not settings.profile_step_start <= rollout < settings.profile_step_end:
        yield
        return
    with torch.profiler.profile(record_shapes=True, profile_memory=True, with_flops=True) as found:
        yield
    path = Path(settings.profile_dir or "profile") / f"rollout_{rollout}_rank_{rank}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as draft:
        found.export_chrome_trace(str(draft))


def memory(device: torch.device) -> dict[str, float]:
    """GiB: `perf/trainer_memory`, the most that the process has held so far; of a GPU `perf/gpu_memory_allocated` and
    `perf/gpu_memory_reserved`, the most since the last call."""
    found = {"trainer_memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
    if device.type == "cuda":
        found["gpu_memory_allocated"] = cuda.max_memory_allocated(device) / 2**30
        found["gpu_memory_reserved"] = cuda.max_memory_reserved(device) / 2**30
        cuda.reset_peak_memory_stats(device)
    return {f"perf/{name}": value for name, value in found.items()}
