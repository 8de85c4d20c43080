"""Cost of a grade: graders in worker processes, and a plain call in this process (the floor).

    python -m benchmarks.graders [GRADER...]
    python -m benchmarks.graders FILE...

For each grader, on the labelled answers of tests/conformance/rm_hub (several rounds): CPU microseconds of a plain call
(p50, p99) and its items per CPU second; items a second through one worker process, and through one for each core.
A grader that compares strings costs far less than a process: it runs in a process only for the deadline. At the end:
GSM8K's 1,319 gold answers in the words of its solutions, and the lag of the event loop that drives all of this.

With files of answers (from `python -m benchmarks.foreign_answers`), only plain calls run, for each source.
"""

import contextlib
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import anyio

from agentrl.errors import GraderFailure
from agentrl.rm_hub import GraderRunner, RmHubSettings, batched_async_rm, grade
from agentrl.rm_hub.running.runner import entered
from agentrl.sample import Sample
from benchmarks.grader_errors import rows
from tests.support import corpus

Work = Sequence[tuple[str, Any, dict[str, Any]]]
LEAST_ITEMS = 1_000
AT_ONCE = 64
LONG = 1_000_000


def plain(name: str, work: Work) -> list[float]:
    """Return the CPU seconds of each call in this process, after a warm-up round."""

    def one(response: str, label: Any, metadata: dict[str, Any]) -> float:
        started = time.process_time()
        with contextlib.suppress(GraderFailure):
            grade(name, response, label, metadata)
        return time.process_time() - started

    for item in work[:200]:
        one(*item)
    return [one(*item) for item in work]


async def pooled(name: str, work: Work, processes: int) -> tuple[list[float], float]:
    """Return the seconds from request to grade of each item, and the total seconds, with 64 requests in flight."""
    taken: list[float] = []
    left = iter(work)
    settings = RmHubSettings(grader_processes=processes, grader_timeout=60.0)
    async with GraderRunner(settings, preload=[name]) as pool:

        async def ask() -> None:
            for item in left:
                started = time.perf_counter()
                try:
                    await pool.grade(name, *item)
                except GraderFailure as failure:
                    if failure.kind in ("grader_timeout", "grader_crashed"):
                        raise
                taken.append(time.perf_counter() - started)

        # Grade one item on each worker first: process startup is not measured.
        async with anyio.create_task_group() as group:
            for _ in range(processes):
                group.start_soon(pool.grade, name, *work[0])
        started = time.perf_counter()
        async with anyio.create_task_group() as group:
            for _ in range(AT_ONCE):
                group.start_soon(ask)
        return taken, time.perf_counter() - started


def percentiles(seconds: Sequence[float]) -> tuple[float, float]:
    cuts = statistics.quantiles(seconds, n=100)
    return cuts[49] * 1e6, cuts[98] * 1e6


def row(name: str, grader: str, work: Work) -> None:
    """Return one line of the table."""
    alone = plain(grader, work)
    p50, p99 = percentiles(alone)
    rate = len(work) / sum(alone)
    line = f"{name:14} {len(work):6} {p50:9.0f} {p99:9.0f} {rate:9.0f}"
    for processes in (1, os.cpu_count() or 1):
        _, seconds = anyio.run(pooled, grader, work, processes)
        line += f" {len(work) / seconds:10.0f} {len(work) / seconds / rate:6.2f}"
    print(line, flush=True)


async def lags(do: Callable[[GraderRunner], Any], timeout: float) -> tuple[float, float]:
    """Return (largest lag of a 1 ms timer, largest CPU time of this thread between two of its ticks), in ms."""
    wall: list[float] = []
    own: list[float] = []

    async def tick() -> None:
        while True:
            before, cpu = time.perf_counter(), time.thread_time()
            await anyio.sleep(0.001)
            wall.append(time.perf_counter() - before - 0.001)
            own.append(time.thread_time() - cpu)

    # Use one process less than there are cores. With all cores taken the timer would measure the machine.
    processes = max(1, (os.cpu_count() or 2) - 1)
    settings = RmHubSettings(grader_processes=processes, grader_timeout=timeout)
    async with GraderRunner(settings, preload=["exact_match"]) as pool, anyio.create_task_group() as group:
        group.start_soon(tick)
        await do(pool)
        group.cancel_scope.cancel()
    return max(wall) * 1e3, max(own) * 1e3


async def idle(pool: GraderRunner) -> None:
    await anyio.sleep(2.0)


async def long_answers(pool: GraderRunner) -> None:
    texts = ["x" * LONG, "é😀" * (LONG // 2), "\udc80" * LONG, "1 " * (LONG // 2)]
    async with anyio.create_task_group() as group:
        for at in range(24):
            group.start_soon(pool.grade, "exact_match", texts[at % 4], "a")


async def many_answers(pool: GraderRunner) -> None:
    samples = [Sample(response="The answer is Paris. " * 50, label="Paris") for _ in range(2_000)]
    with entered(pool):
        await batched_async_rm(SimpleNamespace(rm_type="exact_match"), samples)


async def hanging_answers(pool: GraderRunner) -> None:
    for _ in range(20):
        with contextlib.suppress(GraderFailure):
            await pool.grade("exact_match", "a " * 400_000, "a")


def foreign(paths: Sequence[str]) -> None:
    """Measure the CPU of plain calls on answers from files: one line for each source and for each grader."""
    works: dict[tuple[str, str], list[tuple[str, Any, dict[str, Any]]]] = defaultdict(list)
    for answer in (row for path in paths for row in rows(path)):
        works[answer["grader"], answer["source"]].append((answer["response"], answer["label"], answer["metadata"]))
    spent: dict[str, list[float]] = defaultdict(list)
    print(f"{'grader':8} {'answers':28} {'items':>6} {'mean us':>9} {'p50 us':>9} {'p99 us':>9}")
    for (grader, source), work in sorted(works.items()):
        seconds = plain(grader, work)
        spent[grader] += seconds
        told(grader, source, seconds)
    for grader, seconds in spent.items():
        told(grader, "all", seconds)


def told(grader: str, source: str, seconds: Sequence[float]) -> None:
    p50, p99 = percentiles(seconds)
    mean = statistics.mean(seconds) * 1e6
    print(f"{grader:8} {source:28} {len(seconds):6} {mean:9.0f} {p50:9.0f} {p99:9.0f}", flush=True)


def main() -> None:
    if paths := [name for name in sys.argv[1:] if name.endswith((".jsonl", ".jsonl.gz"))]:
        foreign(paths)
    else:
        conformance(sys.argv[1:] or corpus.names("process"))


def conformance(names: Sequence[str]) -> None:
    """Print the tables of docs/graders.md: plain calls and workers, and the lag of the event loop."""
    print(f"{'':30} {'plain call in this process':>29} {'one worker':>17} {f'{os.cpu_count()} workers':>17}")
    print(
        f"{'grader':14} {'items':>6} {'p50 us':>9} {'p99 us':>9} {'items/s':>9} {'items/s':>10} {'ratio':>6} {'items/s':>10} {'ratio':>6}"
    )
    for name in names:
        own = [(item.response, item.label, item.metadata) for item in corpus.load(name)]
        row(name, name, own * -(-LEAST_ITEMS // len(own)))
    solutions: Work = [(whole, whole.rsplit("####", 1)[1].strip(), {}) for whole in corpus.gsm8k_solutions()]
    for name in ("gsm8k", "math"):
        row(f"{name} (GSM8K)", name, solutions)
    print("\nlag of the event loop: largest delay of a 1 ms timer, and largest CPU time between two ticks, in ms")
    for do, timeout in ((idle, 60.0), (many_answers, 60.0), (long_answers, 60.0), (hanging_answers, 0.01)):
        wall, cpu = anyio.run(lags, do, timeout)
        print(f"{do.__name__.replace('_', ' '):20} {wall:8.1f} {cpu:8.1f}", flush=True)


if __name__ == "__main__":
    main()
