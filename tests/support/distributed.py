"""Run a function in several processes that communicate, and return their results.

The function must be importable (module level). An exception in any rank ends the others and is raised here with that
rank's traceback. The processes are forked from one that has only imported torch and megatron.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing import forkserver, resource_tracker, spawn
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
import torch

from tests.support.warm import python


def run_ranks(
    function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 500.0, fresh: bool = False
) -> list[Any]:
    """Call `function(rank, *args)` in `world_size` processes. Returns their results by rank.

    Args:
        timeout: seconds after which a rank counts as stuck, also on a busy machine.
        fresh: the processes start without imported packages.

    Skips the test on a machine with fewer GPUs than processes (but not without GPUs): NCCL takes one process a GPU.

    Raises:
        RuntimeError: a rank raised, died, or did not answer within `timeout` seconds.
    """
    if torch.cuda.is_available() and torch.cuda.device_count() < world_size:
        pytest.skip(f"{world_size} processes need as many GPUs")
    context: Any = multiprocessing.get_context("spawn" if fresh else "forkserver")
    if not fresh:
        context.set_forkserver_preload(["tests.train.megatron.helpers"])
        _start_forkserver()
    ends, processes = [], []
    for rank in range(world_size):
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_run, args=(theirs, function, rank, args), daemon=True)
        process.start()
        theirs.close()
        ends.append(mine)
        processes.append(process)
    try:
        return _collect(ends, timeout)
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _start_forkserver() -> None:
    """Start the fork server with the packages that it needs, if tests have such a Python."""
    resource_tracker.ensure_running()
    usual = spawn.get_executable()
    spawn.set_executable(python())
    try:
        forkserver.ensure_running()
    finally:
        spawn.set_executable(usual)


def _collect(ends: list[Connection], timeout: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(ends):
        ready = wait([end for rank, end in enumerate(ends) if rank not in results], timeout)
        if not ready:
            raise RuntimeError(f"ranks {sorted(set(range(len(ends))) - set(results))} gave no answer in {timeout} s")
        for rank in [r for r, end in enumerate(ends) if end in ready]:
            try:
                failed, answer = ends[rank].recv()
            except EOFError:
                raise RuntimeError(f"rank {rank} died without an answer") from None
            if failed:
                raise RuntimeError(f"rank {rank} failed:\n{answer}")
            results[rank] = answer
    return [results[rank] for rank in range(len(ends))]


def _run(end: Connection, function: Callable[..., Any], rank: int, args: tuple[Any, ...]) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    gc.freeze()  # as in `tests.conftest`
    try:
        end.send((False, function(rank, *args)))
    except BaseException:  # noqa: BLE001  (whatever it is, the parent must hear of it)
        end.send((True, traceback.format_exc()))
