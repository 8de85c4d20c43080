"""Small real runs of `agentrl train` in a separate process, to be observed, killed and resumed.

`RunKit` makes a tiny random model, an environment file and prompts once. `RunKit.start` starts the command as a
user would. A run has real Ray, real Megatron, a real embedded engine.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from agentrl.buffer.reader import Filter, StoreReader
from tests.support.checkout import import_path
from tests.support.tiny_models import make_tiny_model
from tests.support.warm import python

ENV = '''
import random

import anyio

from agentrl import Environment, Sample, Step, tool


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


class AddEnv(Environment):
    tools = [add]
    max_turns = 2

    async def reward(self, sample: Sample) -> float:
        return sum(sample.tokens[sample.prompt_length:]) % 7 / 7


class WaitEnv(AddEnv):
    """Three turns, each answered after 50 ms to 1.5 s, most of them soon."""

    max_turns = 3

    async def step(self, turn):
        draw = random.Random(f"{turn.sample.index}/{turn.index}").paretovariate(1.1)
        await anyio.sleep(min(1.5, 0.05 * draw))
        return Step([{"role": "user", "content": "Go on."}], done=turn.index == self.max_turns)
'''

WAITING = {
    "env": "env.py:WaitEnv",
    # The model is random: it ends a turn only if one in sixteen of all tokens does so.
    "rollout_stop_token_ids": tuple(range(7, 512, 16)),
    "rollout_max_response_len": 96,
}
"""Settings for slow trajectories of several turns: some are always in flight."""


def check_looked_at(run: Run, steps: int, groups: int) -> None:
    """Check that the run's store has every step, and that engine and trainer agree on each trained token."""
    with StoreReader(run.folder / "trajectories.sqlite") as reader:
        assert reader.steps("train") == list(range(steps))
        rows = reader.query(Filter(equal={"kind": "train", "dropped": ""}))
        assert len({row.key for row in rows}) == steps * groups
        for key in {row.key for row in rows}:
            for sample, said in zip(reader.group(key), reader.details(key), strict=True):
                trained = np.asarray(sample.loss_mask) == 1
                assert np.isfinite(said["advantages"]).tolist() == trained.tolist()
                ours, theirs = said["log_probs"][trained], np.asarray(sample.rollout_log_probs)[trained]
                np.testing.assert_allclose(ours, theirs, atol=0.1)  # the second step is taken after the first


@dataclass(frozen=True)
class RunKit:
    """A folder with model, environment and prompts."""

    folder: Path

    @classmethod
    def make(cls, folder: Path, prompts: int = 400) -> RunKit:
        make_tiny_model(folder / "model")
        (folder / "env.py").write_text(ENV)
        rows = (json.dumps({"input": f"What is {i} plus {i}?", "label": str(2 * i)}) for i in range(prompts))
        (folder / "prompts.jsonl").write_text("\n".join(rows) + "\n")
        return cls(folder)

    def arguments(self, output: str = "run", **settings: object) -> list[str]:
        """Return command-line arguments of a quick run; `settings` override by flat name, None removes one."""
        values: dict[str, object] = {
            "env": "env.py:AddEnv",
            "hf_checkpoint": "model",
            "prompt_data": "prompts.jsonl",
            "label_key": "label",
            "num_rollout": 3,
            "rollout_batch_size": 4,
            "n_samples_per_prompt": 2,
            "rollout_max_response_len": 12,
            "lr": "1e-4",
            "output_dir": output,
            "progress": "plain",
            "train_threads": 1,
            "embedded_threads": 1,
            "embedded_slots": 16,
            "device": "cpu",
            **settings,
        }
        out = []
        for name, value in values.items():
            flag = "--" + name.replace("_", "-")
            if value is True:
                out.append(flag)
            elif value is not None and value is not False:
                out += [flag, *map(str, value if isinstance(value, tuple) else (value,))]
        return out

    def start(self, arguments: Sequence[str], command: str = "train", *, forked: bool = False, **variables: str) -> Run:
        """Start `agentrl <command>` from the source tree of these tests, even if another agentrl is installed.

        Args:
            forked: start it by `warm.python()`, for a run whose processes are not inspected.
            variables: additional environment variables.
        """
        log = self.folder / f"{command}-{time.monotonic_ns()}.log"
        with log.open("wb") as sink:
            process = subprocess.Popen(
                [python() if forked else sys.executable, "-m", "agentrl", command, *arguments],
                cwd=self.folder,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": import_path(), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
                | variables,
            )
        output = arguments[list(arguments).index("--output-dir") + 1]
        return Run(process, self.folder / output, log)


@dataclass
class Run:
    """One process of a run."""

    process: subprocess.Popen[bytes]
    folder: Path
    log: Path

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, timeout: float = 240) -> int:
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.end()
            raise AssertionError(f"the run did not end within {timeout} s:\n{self.output}") from None

    def processes(self) -> dict[str, list[int]]:
        """Return process ids by role, as this process wrote them; empty before."""
        file = self.folder / "processes.json"
        if not file.exists():
            return {}
        found: dict[str, list[int]] = json.loads(file.read_text())
        return found if found["driver"] == [self.process.pid] else {}

    def metrics(self) -> list[dict[str, float]]:
        file = self.folder / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def until(self, condition: Callable[[], object], timeout: float = 600) -> None:
        """Poll until `condition` holds; fails if the run ends first."""
        deadline = time.monotonic() + timeout
        while not condition():
            assert self.process.poll() is None, f"the run ended early:\n{self.output}"
            assert time.monotonic() < deadline, f"waited {timeout} s in vain:\n{self.output}"
            time.sleep(0.05)

    def kill(self, role: str) -> bool:
        """Kill the first process of `role`. Returns false if it has ended already, as at the end of the run."""
        try:
            os.kill(self.processes()[role][0], signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def still_running(processes: dict[str, list[int]], patience: float = 120) -> list[str]:
    """Return a run's processes that are alive after `patience` seconds."""
    alive = [psutil.Process(pid) for pids in processes.values() for pid in pids if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(alive, timeout=patience)
    return [f"{p.pid} {p.name()}" for p in alive if p.status() != psutil.STATUS_ZOMBIE]


def node_processes(node: Any) -> set[int]:
    """Return the ids of the processes that a simulated node of Ray has started."""
    (raylet,) = node.all_processes["raylet"]
    return {process.pid for process in psutil.Process(raylet.process.pid).children(recursive=True)}
