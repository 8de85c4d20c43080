"""Kill a run whose trainer computes nothing, repeatedly: no group may be lost or trained twice.

    python -m benchmarks.null_kills --kills 1000

1. Everything but the trainer is real: driver, coordinator, worker, ledger, checkpoint folders, weight updates by disk.
   The engine is `benchmarks.delay_engine`. The whole run is one process, as with `--backend local`.
2. `SIGKILL` ends the process up to half a second after it has written a checkpoint. One process in five is killed while
   it starts. The same command resumes the run. A run writes a checkpoint every 1, 2, 3 or 5 steps.
3. After `--kills-in-a-run` kills the run continues to its planned end. The ledger must then prove that each group was
   trained at most once, and each step with the planned groups. Prints a line for each run.
"""

import argparse
import json
import multiprocessing
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, redirect_stderr, redirect_stdout
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

from agentrl.config import RunSettings
from agentrl.run.driver import train
from agentrl.run.protocols import Batch, Components, Found, Progress, Trainer
from agentrl.run.rollouts import LedgerRollouts
from agentrl.run.weights import DiskWeights
from agentrl.runfolder import LEDGER, RunFolder
from agentrl.train.checkpoints import latest, writing
from benchmarks.delay_engine import LONGEST_ANSWER, delay_engine
from benchmarks.slow_tools import CALL_TOKENS, MAX_FILLER, TOKEN_SECONDS
from tests.support.audit import audit_ledger
from tests.support.tiny_models import make_tiny_model

GROUPS, STALENESS = 4, 2
_LATENCY = 0.03  # mean seconds of an answer
_PATIENCE = 120.0  # seconds in which a process must write a checkpoint; the last one has ten times as many to end


class NullTrainer(Trainer):
    """Trains nothing, and writes an empty checkpoint."""

    async def train(self, batch: Batch, step: int) -> Mapping[str, float]:
        return {"loss": 0.0}

    async def details(self) -> Any:
        return None

    async def offload(self) -> None:
        pass

    async def onload(self) -> None:
        pass

    async def save(self, path: Path, step: int) -> None:
        manifest = {"step": step, "stepped": True, "layout": {}, "model": {}, "optimizer": {}}
        with writing(path, manifest, leader=True, barrier=lambda: None):
            pass

    async def saved(self, *, wait: bool) -> bool:
        return True

    async def save_hf(self, path: Path, *, served: bool = False) -> None:
        path.mkdir(parents=True, exist_ok=True)  # noqa: ASYNC240


@asynccontextmanager
async def start(
    settings: RunSettings, folder: RunFolder, resume: Found | None, progress: Progress
) -> AsyncIterator[Components]:
    """Start the parts of a run without a trainer."""
    urls, trainer = settings.engine.rollout_external_engine_addrs or (), NullTrainer()
    async with LedgerRollouts.open(settings, folder, urls, None if resume is None else resume.step) as rollouts:
        yield Components(rollouts, trainer, DiskWeights(folder, trainer, rollouts.engines))


def settings(folder: Path, url: str, steps: int, save_interval: int) -> dict[str, Any]:
    """Return the settings of the run by flat name."""
    return {
        "engine": "external",
        "rollout_external_engine_addrs": (url,),
        "env": "benchmarks.rollout_workers:Light",
        "hf_checkpoint": str(folder / "model"),
        "prompt_data": str(folder / "prompts.jsonl"),
        "num_rollout": steps,
        "rollout_batch_size": GROUPS,
        "over_sampling_batch_size": 2 * GROUPS,
        "n_samples_per_prompt": 2,
        "rollout_max_response_len": LONGEST_ANSWER,
        "rollout_deterministic": False,
        "max_staleness": STALENESS,
        "partial_rollout": True,
        "save_interval": save_interval,
        "keep_trajectories": 0,
        "device": "cpu",
        "progress": "plain",
        "output_dir": str(folder / "run"),
    }


def live(chosen: dict[str, Any], log: Path) -> None:
    """Run the command in this process until it ends or is killed."""
    with log.open("w", buffering=1) as file, redirect_stdout(file), redirect_stderr(file):
        sys.exit(train(RunSettings.from_flat(chosen), start))


class KilledRun:
    """A run that is killed `kills` times and then ends; `problems` lists the violations of the contract."""

    def __init__(self, number: int, kills: int, url: str, folder: Path) -> None:
        self._rng, self._folder, self._most = random.Random(number), folder, kills
        self._save_interval = self._rng.choice([1, 2, 3, 5])
        self._steps = kills * (self._save_interval + 2)
        self._chosen = settings(folder, url, self._steps, self._save_interval)
        self.kills, self.early, self.problems = 0, 0, list[str]()

    def kill(self) -> None:
        """Start and kill processes until `kills` are dead or the run ends by itself."""
        while self.kills < self._most and self._life(early=self._rng.random() < 0.2):
            self.kills += 1

    def end(self) -> str:
        """Let the run reach its end, and audit its ledger."""
        life = self._begin()
        life.join(10 * _PATIENCE)
        if life.exitcode != 0:
            self.problems.append(f"the last life ended with {life.exitcode}: {self._said()}")
            life.kill()
        audit = audit_ledger(
            self._folder / "run" / LEDGER,
            through_step=self._steps - 1,
            groups_per_step=GROUPS,
            max_staleness=STALENESS,
        )
        self.problems += audit.problems
        trained = sum(audit.trained_by_step.values())
        return (
            f"{self.kills} kills ({self.early} at the start), a checkpoint every {self._save_interval} steps: {trained} groups "
            f"trained, {audit.recoveries} resumes, {audit.undone} trainings undone: {'; '.join(self.problems) or 'sound'}"
        )

    def _life(self, *, early: bool) -> bool:
        """Start a process and kill it. Returns false if it ended before the kill."""
        life, before = self._begin(), self._newest()
        if early:
            time.sleep(self._rng.uniform(0, 2))  # the random moment is the injected fault
            self.early += 1
        else:
            until = time.monotonic() + _PATIENCE
            while life.is_alive() and self._newest() == before:
                if time.monotonic() > until:
                    self.problems.append(f"no checkpoint in {_PATIENCE:.0f} s: {self._said()}")
                    break
                time.sleep(0.01)
            time.sleep(self._rng.uniform(0, 0.5))
        if not life.is_alive():
            if life.exitcode:
                self.problems.append(f"it ended by itself with {life.exitcode}: {self._said()}")
            return False
        life.kill()
        life.join()
        return True

    def _begin(self) -> ForkProcess:
        process = multiprocessing.get_context("fork").Process(target=live, args=(self._chosen, self._folder / "log"))
        process.start()
        return process

    def _newest(self) -> int:
        found = latest(self._folder / "run" / "checkpoints")
        return -1 if found is None else found.step

    def _said(self) -> str:
        return (self._folder / "log").read_text(errors="replace")[-2000:]


def run(number: int, kills: int) -> KilledRun:
    """Kill run `number` `kills` times, and print its line."""
    scale = _LATENCY / (TOKEN_SECONDS * (CALL_TOKENS + MAX_FILLER / 2))
    with tempfile.TemporaryDirectory() as name, delay_engine(scale) as url:
        folder = Path(name)
        make_tiny_model(folder / "model", layers=1, hidden_size=32)
        rows = "".join(json.dumps({"input": f"Question {row}?"}) + "\n" for row in range(200))
        (folder / "prompts.jsonl").write_text(rows)
        killed = KilledRun(number, kills, url, folder)
        killed.kill()
        print(f"run {number}: {killed.end()}", flush=True)
    return killed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--kills-in-a-run", type=int, default=50)
    parser.add_argument("--first", type=int, default=0, help="number of the first run")
    options = parser.parse_args()
    began, done, number, wrong = time.monotonic(), 0, options.first, 0
    while done < options.kills:
        killed = run(number, min(options.kills_in_a_run, options.kills - done))
        done, number, wrong = done + killed.kills, number + 1, wrong + bool(killed.problems)
        if not killed.kills:
            break
    print(
        f"{done} kills in {number - options.first} runs and {time.monotonic() - began:.0f} s; {wrong} runs with problems"
    )
    if wrong or done < options.kills:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
