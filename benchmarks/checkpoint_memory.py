"""Memory that a checkpoint takes while it is written and read, beside the optimizer's part of each process.

    python -m benchmarks.checkpoint_memory [--backend megatron fsdp] [--replicas 1 2 4] [--bf16] [--async-save]

A random model of 14 M parameters. Each of `--replicas` data-parallel processes trains a step, saves, and loads. A
thread reads the process's resident memory every 2 ms. `own` is the process's part of the optimizer: float32 weights and
two moments. `equal` says that the step after loading has the gradient norm of the step after saving. With
`--async-save` the next step runs during the write, and the memory of a step alone is subtracted.
"""

import argparse
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch

from agentrl.run.training import free_port
from agentrl.train.contracts import RankInfo
from tests.support.distributed import run_ranks
from tests.support.tiny_models import make_tiny_model
from tests.train.megatron.helpers import backend, make_batch, settings

MIB = 2**20


@contextmanager
def peak(found: dict[str, float], name: str) -> Iterator[None]:
    """Record the peak growth of the process in the block, in MiB."""
    process, ended = psutil.Process(), threading.Event()
    before = most = process.memory_info().rss

    def look() -> None:
        nonlocal most
        while not ended.is_set():
            most = max(most, process.memory_info().rss)
            time.sleep(0.002)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    found[name] = (most - before) / MIB


def measured(rank: int, world: int, port: int, model: str, folder: str, changes: dict[str, Any]) -> dict[str, float]:
    torch.set_num_threads(1)  # with two threads the order of sums differs from run to run
    where, found, batch = RankInfo(rank, world, rank, "127.0.0.1", port), dict[str, float](), make_batch()
    train = settings(Path(model), **changes)
    with backend(train, where=where) as made:
        for number in range(2):
            with peak(found, "step"):
                made.train(batch, number)
        with peak(found, "save"):
            made.save(Path(folder) / "one", 1)
            if train.async_save:
                after = made.train(batch, 2)["grad_norm"]
                made.saved()
        if train.async_save:
            found["save"] = max(0.0, found["save"] - found["step"])
        else:
            after = made.train(batch, 2)["grad_norm"]
    with backend(train, where=RankInfo(rank, world, rank, "127.0.0.1", port + 1)) as made:
        made.train(batch, 0)  # creates the optimizer's state
        with peak(found, "load"):
            made.load(Path(folder))
        found["equal"] = float(made.train(batch, 2)["grad_norm"] == after)
        weights = sum(parameter.numel() for parameter in made.actor.network.parameters().values())
    return found | {"own": weights * 12 / MIB / world}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", nargs="+", choices=["megatron", "fsdp"], default=["megatron", "fsdp"])
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--async-save", action="store_true")
    options = parser.parse_args()
    print(f"{'backend':>9} {'replicas':>8} {'own MiB':>8} {'save, most over own (each rank)':>34} {'load':>24} equal")
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder) / "model", "qwen3", layers=6, hidden_size=512)
        for name in options.backend:
            for world in options.replicas:
                changes = {"train_backend": name, "bf16": options.bf16, "async_save": options.async_save}
                changes |= {"use_distributed_optimizer": True} if name == "megatron" else {}
                saved = str(Path(folder) / f"{name}-{world}")
                ranks = run_ranks(measured, world, world, free_port(), str(model), saved, changes)
                shares = {
                    kind: " ".join(f"{each[kind]:.0f} ({each[kind] / each['own']:.2f})" for each in ranks)
                    for kind in ("save", "load")
                }
                equal = all(each["equal"] for each in ranks)
                print(
                    f"{name:>9} {world:>8} {ranks[0]['own']:>8.0f} {shares['save']:>34} {shares['load']:>24} {equal}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
