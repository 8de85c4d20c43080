"""Measure the gain of staleness under heavy-tailed tools: groups trained a second, and the simulated bound of the load.

    python -m benchmarks.async_gain [--row-seconds 50] [--scale 1] [--backend local]

1. A batch has 16 groups of 8, a trajectory 6 turns. Tools take 50 ms to 6 s (`benchmarks.slow_tools`). The engine
   only delays (`benchmarks.delay_engine`). At most 128 trajectories are in flight in every row.
2. Driver, rollouts, ledger, weights and trainer are the run's own, on a tiny model. The trainer trains, then waits
   until 30 % (then 100 %) of the mean synchronous rollout of the simulation has passed. `trains` is the time without a
   wait. If the share of training is above the requested share, training itself took longer.
3. `bound` is `benchmarks.async_bound`: the same trajectories and steps by the same rules, without overhead of agentrl.
   Both are counted over the same steps, after a warm-up. The run stops at the last of these steps, in the middle of
   generation, so its last stragglers do not count.
4. `slots` is the mean number of the 128 slots in use, `trainer` the share of time in which it trains. Staleness is
   counted by tokens in the ledger. `trained/offered` compares trained trajectories with all finished ones: 1: no bias.

Each row is a separate process. Eight rows of the default length take about eight minutes.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import anyio

from agentrl.config import RunSettings
from agentrl.observability.metrics import MetricsLogger
from agentrl.observability.progress import Progress
from agentrl.run.driver import Driver, open_folder
from agentrl.run.protocols import Batch, Components, Trainer
from benchmarks.async_bound import Load, Played, Span, bound, share, synchronous_seconds, window
from benchmarks.delay_engine import LONGEST_ANSWER, delay_engine
from benchmarks.slow_tools import DRAWS, LOAD, RECORD
from tests.support.tiny_models import make_tiny_model
from tests.support.versions import staleness, trained_groups

ROWS = {"S = 0": (0, False), "S = 1, partial": (1, True), "S = 1": (1, False), "S = 4": (4, False)}
"""Staleness, and true if generation pauses while the trainer trains."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One row: what to run and how much of it to count."""

    load: Load
    steps: int
    warm: int
    backend: str


def plan(load: Load, seconds: float, backend: str) -> Plan:
    """Plan as many steps as the bound does in `seconds`. `staleness + 1` steps, at most a quarter, are warm-up."""
    ends = [end for _, end in bound(load, 200).trainings]
    steps = max(4, sum(end <= seconds for end in ends))
    return Plan(load, steps, max(1, min(load.staleness + 1, steps // 4)), backend)


# ---- the run --------------------------------------------------------------------------------------------------------


class Enough(Exception):
    """The end of the steps that count."""


class Stretched(Trainer):
    """Trains, then waits until the step has taken `seconds`. Records the spans in which it was busy.

    Raises:
        Enough: `steps` steps are done.
    """

    def __init__(self, real: Trainer, seconds: float, steps: int) -> None:
        self._real, self._seconds, self._steps = real, seconds, steps
        self.spans: list[Span] = []
        self.worked: list[float] = []

    async def train(self, batch: Batch, step: int) -> Mapping[str, float]:
        began = time.monotonic()
        metrics = await self._real.train(batch, step)
        self.worked.append(time.monotonic() - began)
        await anyio.sleep(max(0.0, self._seconds - self.worked[-1]))
        self.spans.append((began, time.monotonic()))
        if len(self.spans) == self._steps:
            raise Enough
        return metrics

    async def details(self) -> Any:
        return await self._real.details()

    async def offload(self) -> None:
        await self._real.offload()

    async def onload(self) -> None:
        await self._real.onload()

    async def save(self, path: Path, step: int) -> None:
        await self._real.save(path, step)

    async def saved(self, *, wait: bool) -> bool:
        return await self._real.saved(wait=wait)

    async def save_hf(self, path: Path, *, served: bool = False) -> None:
        await self._real.save_hf(path)


def row_settings(plan: Plan, folder: Path, url: str) -> RunSettings:
    """Return the run's settings; S = 0 is the default form."""
    load = plan.load
    asynchronous = {"max_staleness": load.staleness, "partial_rollout": load.partial} if load.staleness else {}
    return RunSettings.from_flat(
        {
            "backend": plan.backend,
            "engine": "external",
            "rollout_external_engine_addrs": (url,),
            "update_weight_mode": "disk",
            "env": "benchmarks.slow_tools:SlowTools",
            "hf_checkpoint": str(folder / "model"),
            "prompt_data": str(folder / "prompts.jsonl"),
            "num_rollout": 2 * plan.steps + load.staleness,
            "rollout_batch_size": load.batch,
            "n_samples_per_prompt": load.group,
            "rollout_max_concurrency": load.slots,
            "rollout_max_response_len": LONGEST_ANSWER,
            "rollout_deterministic": False,
            "engine_request_timeout": 60.0,
            "lr": 1e-4,
            "use_dynamic_batch_size": True,
            "max_tokens_per_gpu": 16_384,
            "ledger_retention": "always",
            "use_tensorboard": False,
            "train_threads": 1,
            "device": "cpu",
            "output_dir": str(folder / "run"),
            "progress": "plain",
            **asynchronous,
        }
    )


def run(plan: Plan, folder: Path, url: str) -> dict[str, Any]:
    """Run the row in this process, and return its measurements."""
    load = plan.load
    make_tiny_model(folder / "model", layers=1, hidden_size=32)
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"input": f"Question {i}?"}) + "\n" for i in range(4000)))
    output = folder / "run"
    output.mkdir()
    (output / LOAD).write_text(json.dumps({"scale": load.scale}))
    settings = row_settings(plan, folder, url)
    if plan.backend == "local":
        from agentrl.run.local import start
    else:
        from agentrl.cluster.placement import start
    trainers: list[Stretched] = []

    async def drive() -> None:
        with (
            Progress(settings.observability, total=plan.steps) as progress,
            open_folder(settings) as opened,
            MetricsLogger(settings.observability, opened.path, resume_step=0) as logger,
        ):
            async with start(settings, opened, None, progress) as parts:
                trainers.append(Stretched(parts.trainer, load.train_seconds, plan.steps))
                stretched = Components(parts.rollouts, trainers[0], parts.weights)
                await Driver(settings, stretched, opened, logger, progress).run()

    with suppress(Enough):
        anyio.run(drive, backend_options={"use_uvloop": True})
    record = json.loads((output / RECORD).read_text())
    ledger = output / "ledger.sqlite"
    trained = [sample.index or 0 for _, group in trained_groups(ledger) for sample in group]
    offered = [index for _, _, index, finished in record if finished]
    counts = staleness(ledger)
    return {
        "played": asdict(Played(trainers[0].spans, [(began, ended) for began, ended, _, _ in record])),
        "worked": statistics.median(trainers[0].worked),
        "staleness": (sum(s * n for s, n in counts.items()) / counts.total(), max(counts)),
        "compared": {
            name: statistics.fmean(map(draw, trained)) / statistics.fmean(map(draw, offered))
            for name, draw in DRAWS.items()
        },
    }


def run_apart(plan: Plan) -> dict[str, Any]:
    """Run `run` in a separate process with its own engine."""
    with tempfile.TemporaryDirectory() as folder, delay_engine(plan.load.scale) as url:
        command = [sys.executable, "-m", "benchmarks.async_gain", "--one", json.dumps([asdict(plan), folder, url])]
        log = Path(folder) / "log"
        with log.open("wb") as sink:
            process = subprocess.run(command, stdout=subprocess.PIPE, stderr=sink, timeout=300, check=False)
        if process.returncode:
            raise SystemExit(f"a row failed:\n{log.read_text()[-4000:]}")
        seen: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
        return seen


# ---- the table ------------------------------------------------------------------------------------------------------


def rate(plan: Plan, trainings: Sequence[Span]) -> float:
    """Return groups trained a second, from the end of the warm-up on."""
    begin, end = window(trainings, plan.warm)
    return plan.load.batch * (len(trainings) - plan.warm) / (end - begin)


def row(name: str, plan: Plan) -> str:
    best, seen = bound(plan.load, plan.steps), run_apart(plan)
    trainings, trajectories = seen["played"]["trainings"], seen["played"]["trajectories"]
    ours, possible = rate(plan, trainings), rate(plan, best.trainings)
    counted, simulated = window(trainings, plan.warm), window(best.trainings, plan.warm)
    slots, slots_of_bound = (
        share(trajectories, counted, plan.load.slots),
        share(best.trajectories, simulated, plan.load.slots),
    )
    trainer, trainer_of_bound = share(trainings, counted), share(best.trainings, simulated)
    mean, most = seen["staleness"]
    biases = "".join(f" {seen['compared'][key]:>9.2f}" for key in DRAWS)
    return (
        f"{name:>15} {plan.steps - plan.warm:>5} {ours:>9.2f} {possible:>6.2f} {ours / possible:>6.2f}"
        f" {slots:>6.0%} ({slots_of_bound:>3.0%}) {trainer:>6.0%} ({trainer_of_bound:>4.0%}) {seen['worked']:>6.2f} s"
        f" {mean:>5.2f} {most:>3}{biases}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row-seconds", type=float, default=50, help="seconds of a row in the simulation")
    parser.add_argument("--scale", type=float, default=1.0, help="all times of tools and engine are multiplied by it")
    parser.add_argument("--training", type=float, nargs="+", default=[0.3, 1.0], help="shares of a synchronous rollout")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--backend", choices=["local", "ray"], default="local")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        described, folder, url = json.loads(options.one)
        seen = run(Plan(**{**described, "load": Load(**described["load"])}), Path(folder), url)
        print(json.dumps(seen))
        return
    rollout = synchronous_seconds(Load(0, scale=options.scale))
    print(f"a synchronous rollout takes {rollout:.1f} s in the simulation; {options.backend} backend")
    for of_rollout in options.training:
        print(f"\ntraining takes {of_rollout:.0%} of it ({of_rollout * rollout:.1f} s); trained/offered at the right")
        heads = "".join(f" {name:>9}" for name in DRAWS)
        print(
            f"{'':>15} {'steps':>5} {'groups/s':>9} {'bound':>6} {'share':>6} {'slots (bound)':>13} {'trainer':>8} "
            f"{'(bound)':>5} {'trains':>6} {'staleness':>9}{heads}"
        )
        for name in options.rows:
            staleness, partial = ROWS[name]
            load = Load(staleness, partial, of_rollout * rollout, options.scale)
            print(row(name, plan(load, options.row_seconds, options.backend)), flush=True)


if __name__ == "__main__":
    main()
