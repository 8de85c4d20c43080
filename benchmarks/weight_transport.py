"""Time of a weight update between two processes of this machine: flat buckets in shared memory, flat buckets over gloo,
and one tensor at a time over gloo.

    python -m benchmarks.weight_transport [--megabytes 1024] [--bucket 512] [--rounds 5]

The three ways alternate in one run, so that other load affects all of them. A round ends when the receiver has
copied every tensor into its model. The receiver's tensors are then compared bit by bit. The figures are medians of the
rounds: seconds, and CPU seconds of both processes with all their threads, which depend less on other load.
"""

import argparse
import datetime
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

from agentrl.engine.weights import TensorSpec, buckets
from agentrl.numerics.weight_group import WeightReceiver, WeightSender, views
from agentrl.run.training import free_port
from tests.support.distributed import run_ranks

CPU = torch.device("cpu")
WAYS: dict[str, tuple[str, bool]] = {
    "shared memory": ("shared_memory", True),
    "gloo, flat": ("gloo", True),
    "gloo, tensors": ("gloo", False),
}


def model(megabytes: int) -> list[TensorSpec]:
    """Return tensors in the sizes of a transformer's layers, in bfloat16."""
    layer = [[1024], [1024, 1024], [256, 1024], [256, 1024], [1024, 1024], [3072, 1024], [3072, 1024], [1024, 3072]]
    specs: list[TensorSpec] = []
    while sum(spec.nbytes for spec in specs) < megabytes << 20:
        specs += [TensorSpec(f"{len(specs) + i}", "bfloat16", shape) for i, shape in enumerate(layer)]
    return specs


def by_tensor(part: list[TensorSpec], mine: dict[str, torch.Tensor], group: Any, rank: int) -> None:
    """Broadcast the tensors of a bucket one by one, as agentrl did before buckets were flat."""
    if rank == 0:
        for spec in part:
            dist.broadcast(mine[spec.name], src=0, group=group)
        return
    named = [(spec.name, torch.empty_like(mine[spec.name])) for spec in part]
    for handle in [dist.broadcast(tensor, 0, group=group, async_op=True) for _, tensor in named]:
        handle.wait()
    for name, tensor in named:
        mine[name].copy_(tensor)


def taken(
    rank: int, ports: list[int], megabytes: int, bucket: int, rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """Send and receive. Returns the seconds and CPU seconds of each way, in this process."""
    torch.set_num_threads(1)
    specs = model(megabytes)
    generator = torch.Generator().manual_seed(0)
    source = {s.name: torch.randn(s.shape, generator=generator).bfloat16() for s in specs}
    mine = source if rank == 0 else {name: torch.zeros_like(tensor) for name, tensor in source.items()}
    cut = buckets(specs, bucket << 20)
    timeout, ends = datetime.timedelta(seconds=300), dict[str, Any]()
    for port, (way, (kind, _)) in zip(ports, WAYS.items(), strict=True):
        where, name = f"tcp://127.0.0.1:{port}", f"bench_{port}"
        if rank == 0:
            ends[way] = WeightSender(kind, where, 2, name, bucket << 20)
        else:
            ends[way] = WeightReceiver(backend=kind, address=where, world_size=2, rank=1, name=name, timeout=timeout)
    seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    group = ends["gloo, flat"].group
    for _ in range(rounds + 1):
        for way in WAYS:
            dist.barrier(group)
            began, used = time.perf_counter(), time.process_time()
            for part in cut:
                size = sum(spec.nbytes for spec in part)
                if not WAYS[way][1]:
                    by_tensor(part, mine, group, rank)
                elif rank == 0:
                    flat = ends[way].buffer(size, CPU)
                    for name, view in views(flat, part):
                        view.copy_(mine[name])
                    ends[way].send(flat)
                else:
                    for name, view in views(ends[way].receive(size, CPU), part):
                        mine[name].copy_(view)
            ends[way].end()
            seconds[way].append((time.perf_counter() - began, time.process_time() - used))
            if rank:
                assert all(torch.equal(mine[name], source[name]) for name in source), way
                for tensor in mine.values():
                    tensor.zero_()
    return {way: found[1:] for way, found in seconds.items()}  # the first round allocates the memory


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--bucket", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    ports = [free_port() for _ in WAYS]
    sender, receiver = run_ranks(taken, 2, ports, asked.megabytes, asked.bucket, asked.rounds)
    wall = {way: statistics.median(each for each, _ in rounds) for way, rounds in receiver.items()}
    cpu = {
        way: statistics.median(a + b for (_, a), (_, b) in zip(sender[way], receiver[way], strict=True)) for way in WAYS
    }
    for way in WAYS:
        times, used = wall[way] / wall["shared memory"], cpu[way] / cpu["shared memory"]
        print(f"{way:14} {wall[way]:6.2f} s ({times:.2f} x shared memory)   CPU {cpu[way]:6.2f} s ({used:.2f} x)")


if __name__ == "__main__":
    main()
