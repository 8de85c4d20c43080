"""Rollout workers in separate processes, beside one: CPU a model turn of workers and coordinator, and turns a second.

    python -m benchmarks.rollout_workers [--workers 1 2 1 2] [--rollouts 12] [--latency 0.08]
    python -m benchmarks.rollout_workers --workers 2 --latency 4 --concurrency 1024 --groups 512 --surplus 128 --rollouts 2

1. `agentrl rollout` plays groups of 8 samples with 3 turns each, with a tool that takes no time. The engine
   (`benchmarks.delay_engine`) answers after a delay and computes nearly nothing.
2. With one worker the process of the command plays too, and its row has no separate figures of the coordinator.
3. `bound` is the rate at which the CPU of all processes, the engine's included, would fill the machine's processors.
4. The first quarter of the rollouts is warm-up. Rows run one after another; compare them within one run.
5. The second command shows the requests in flight. Without a surplus they would fall at the end of each rollout.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from agentrl import Environment, Sample, Step, tool
from agentrl.envs import Turn
from benchmarks.delay_engine import LONGEST_ANSWER, delay_engine
from benchmarks.slow_tools import CALL_TOKENS, MAX_FILLER, TOKEN_SECONDS
from tests.support.tiny_models import make_tiny_model

GROUP, TURNS = 8, 3
"""Samples of a group, turns of a sample."""


class Light(Environment):
    """Three turns, each with a tool call that costs nothing."""

    max_turns = TURNS

    @tool
    async def search(self, query: str) -> str:
        """Search for something."""
        return "found"

    async def step(self, turn: Turn) -> Step:
        return replace(await super().step(turn), done=turn.index == TURNS)

    async def reward(self, sample: Sample) -> float:
        return float((sample.index or 0) % 2)


@dataclass(frozen=True, slots=True)
class Reading:
    """CPU seconds of the command, its workers and the engine at one moment, and the wall clock."""

    command: float
    workers: float
    engine: float
    wall: float

    def since(self, before: "Reading") -> "Reading":
        return Reading(
            self.command - before.command,
            self.workers - before.workers,
            self.engine - before.engine,
            self.wall - before.wall,
        )


def cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def reading(command: psutil.Process, engine: psutil.Process) -> Reading:
    workers = [p for p in psutil.process_iter(["name"]) if p.info["name"].startswith("ray::WorkerActo")]
    return Reading(cpu(command), sum(map(cpu, workers)), cpu(engine), time.monotonic())


@contextmanager
def rollout(
    folder: Path, url: str, workers: int, rollouts: int, groups: int, surplus: int, concurrency: int
) -> Iterator[subprocess.Popen[bytes]]:
    """Start the command, and wait for its end."""
    values: dict[str, object] = {
        "engine": "external",
        "rollout-external-engine-addrs": url,
        "env": "benchmarks.rollout_workers:Light",
        "hf-checkpoint": folder / "model",
        "prompt-data": folder / "prompts.jsonl",
        "num-rollout": rollouts,
        "rollout-batch-size": groups,
        "over-sampling-batch-size": groups + surplus,
        "n-samples-per-prompt": GROUP,
        "rollout-max-concurrency": concurrency,
        "sglang-server-concurrency": concurrency,
        "rollout-max-response-len": LONGEST_ANSWER,
        "engine-request-timeout": 60,
        "rollout-workers": workers,
        "progress": "plain",
        "output-dir": folder / "run",
    }
    flags = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "agentrl", "rollout", "--no-rollout-deterministic", *flags]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
        try:
            yield process
            if process.wait(60):
                raise SystemExit((folder / "log").read_text()[-4000:])
        finally:
            process.kill()
            process.wait()


def finished(folder: Path) -> list[dict[str, float]]:
    file = folder / "run" / "rollouts" / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def row(workers: int, rollouts: int, groups: int, surplus: int, latency: float, concurrency: int) -> str:
    scale = latency / (TOKEN_SECONDS * (CALL_TOKENS + MAX_FILLER / 2))
    with tempfile.TemporaryDirectory() as name, delay_engine(scale) as url:
        folder, warm = Path(name), max(1, rollouts // 4)
        make_tiny_model(folder / "model", layers=1, hidden_size=32)
        (folder / "prompts.jsonl").write_text(
            "".join(json.dumps({"input": f"Question {i}?"}) + "\n" for i in range(4000))
        )
        (engine,) = psutil.Process().children()
        with rollout(folder, url, workers, rollouts, groups, surplus, concurrency) as process:
            command, readings = psutil.Process(process.pid), list[Reading]()
            for count in (warm, rollouts):
                while len(finished(folder)) < count:
                    if process.poll() not in (None, 0):
                        raise SystemExit((folder / "log").read_text()[-4000:])
                    time.sleep(0.02)
                readings.append(reading(command, engine))
        flying = [row["engines/in_flight"] for row in finished(folder)[warm:]]
    spent, turns = readings[1].since(readings[0]), (rollouts - warm) * groups * GROUP * TURNS
    play = spent.workers or spent.command
    whole = spent.workers + spent.command + spent.engine
    possible = (os.cpu_count() or 1) / (whole / turns)
    own = f"{spent.command / turns * 1e3:.3f}" if spent.workers else "-"
    return (
        f"{workers:>7} {play / turns * 1e3:>12.3f} {own:>12} {spent.engine / turns * 1e3:>8.3f} {turns / spent.wall:>8.0f}"
        f" {possible:>7.0f} {turns / spent.wall / possible:>6.2f} {sum(flying) / len(flying):>10.0f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 1, 2], help="one row each")
    parser.add_argument("--rollouts", type=int, default=12)
    parser.add_argument("--groups", type=int, default=64, help="groups of a rollout")
    parser.add_argument("--surplus", type=int, default=0, help="groups under way beyond those of the rollout")
    parser.add_argument("--latency", type=float, default=0.08, help="mean seconds of an answer")
    parser.add_argument("--concurrency", type=int, default=256, help="most trajectories at once")
    options = parser.parse_args()
    print("CPU in ms a turn")
    print(
        f"{'workers':>7} {'workers CPU':>12} {'coordinator':>12} {'engine':>8} {'turns/s':>8} {'bound':>7} {'share':>6} "
        f"{'in flight':>10}"
    )
    for workers in options.workers:
        print(
            row(workers, options.rollouts, options.groups, options.surplus, options.latency, options.concurrency),
            flush=True,
        )


if __name__ == "__main__":
    main()
