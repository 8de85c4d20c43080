"""The calculator demo from process start to end, beside TRL's GRPOTrainer on the same task.

    python -m benchmarks.time_to_reward --trl-venv DIR [--pairs 5] [--backend local --max-staleness 1]
    python -m benchmarks.time_to_reward --seeds 0 1 2 --max-staleness 1 2

1. A pair is one run of `python -m agentrl.demo` and one of `benchmarks/trl_calculator.py`, one after another, in
   alternating order. Both start from the shipped model and evaluate it equally often.
   A pair takes two to three minutes.
2. With `--backend`, `--max-staleness`, `--partial-rollout` or `--set` the demo's training runs with these settings
   instead of its own.
3. The start-up of the last run is printed line by line with its output times, up to the end of the first evaluation,
   beside Ray's own share: the time to start Ray and as many empty actors.
4. `--seeds` runs the demo alone, for each seed and each `--max-staleness`, and prints the held-out success.

TRL needs a venv of its own, made by `python -m venv DIR && DIR/bin/pip install torch==2.13.0 'trl==1.16.*' jmespath`.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.tiny import shipped
from tests.support.checkout import ROOT, import_path

RAY = """
import ray
ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level=40)
@ray.remote(num_cpus=1)
class Empty:
    def ready(self): pass
ray.get([Empty.remote().ready.remote() for _ in range(3)])
"""
Form = dict[str, object]


@dataclass(frozen=True, slots=True)
class Timed:
    """A finished process: its seconds, and its lines with the seconds after the start at which they came."""

    seconds: float
    lines: list[tuple[float, str]]

    def when(self, pattern: str) -> float:
        """Return the seconds until the first line that matches the pattern."""
        return next((at for at, line in self.lines if re.search(pattern, line)), float("nan"))

    def found(self, pattern: str) -> list[str]:
        """Return the pattern's first group in each line that matches."""
        return [match[1] for _, line in self.lines if (match := re.search(pattern, line))]


def timed(command: Sequence[str], environment: dict[str, str]) -> Timed:
    """Run a command to its end.

    Raises:
        SystemExit: it failed.
    """
    began = time.monotonic()
    lines: list[tuple[float, str]] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        lines += [(time.monotonic() - began, line.rstrip()) for line in process.stdout]
    seconds = time.monotonic() - began
    if process.returncode and not any("did not learn" in line for _, line in lines):  # which the table shows
        print("\n".join(line for _, line in lines[-30:]), file=sys.stderr)
        raise SystemExit(f"{' '.join(command[:4])} ... ended with status {process.returncode}")
    return Timed(seconds, lines)


def demo(options: argparse.Namespace, folder: Path, seed: int, form: Form) -> Timed:
    """Run the demo in a separate process: the demo itself, or its training with the settings of `form`."""
    command = [sys.executable, "-u", "-m"]
    if form:
        asked = {"folder": str(folder), "seed": seed, "steps": options.steps, "form": form}
        command += ["benchmarks.time_to_reward", "--one", json.dumps(asked)]
    else:
        command += ["agentrl.demo", "--seed", str(seed), "--num-rollout", str(options.steps)]
        command += ["--output-dir", str(folder)]
    return timed(command, {**os.environ, "PYTHONPATH": import_path(), "HF_HUB_OFFLINE": "1"})


def run_form(folder: str, seed: int, steps: int, form: Form) -> None:
    """Run the demo's training with the settings of `form`. A setting that is None in `form` is left out."""
    from agentrl.cluster.launch import train
    from agentrl.config import RunSettings
    from agentrl.demo.run import DEMO
    from agentrl.observability.report import write_report

    settings = RunSettings.from_cli(DEMO.argv(Path(folder), shipped("calculator"), seed))
    given = {name: value for name, value in settings.flat().items() if name in settings.given()}
    changed = {**given, "num_rollout": steps, **form}
    train(RunSettings.from_flat({name: value for name, value in changed.items() if value is not None}))
    write_report(Path(folder), title=f"Calculator demo, seed {seed}")


def trl(options: argparse.Namespace, model: Path, data: Path, folder: Path) -> Timed:
    script = ROOT / "benchmarks" / "trl_calculator.py"
    command = [str(options.trl_venv / "bin" / "python"), "-u", "-P", str(script), "--model", str(model)]
    command += ["--data", str(data), "--output", str(folder), "--steps", str(options.steps)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return timed(command, {**environment, "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"})


EVALUATED = r"^\[ *[\d.]+s\] eval .*?(?:reward|pass@1) ([\d.]+)"
"""A line of the demo about an evaluation; the group is the success."""


def pairs(options: argparse.Namespace, form: Form, work: Path) -> None:
    from agentrl.demo.data import write_train_and_test

    seed, model = 0, shipped("calculator")
    write_train_and_test(
        work / "data", train_count=options.steps * 16, seed=seed
    )  # prompts a rollout, as in calculator.yaml
    ours: list[Timed] = []
    theirs: list[Timed] = []
    print(f"\n{'pair':>4} {'agentrl s':>10} {'TRL s':>7} {'ratio':>6}  held-out success (agentrl; TRL)")
    for pair in range(options.pairs):
        for who in ("agentrl", "trl") if pair % 2 == 0 else ("trl", "agentrl"):
            if who == "trl":
                theirs.append(trl(options, model, work / "data", work / f"trl-{pair}"))
            else:
                ours.append(demo(options, work / f"agentrl-{pair}", seed, form))
        said = f"{' '.join(ours[-1].found(EVALUATED))}; {' '.join(theirs[-1].found(r'^evaluation ([0-9.]+)'))}"
        a, b = ours[-1].seconds, theirs[-1].seconds
        print(f"{pair + 1:>4} {a:>10.1f} {b:>7.1f} {a / b:>6.2f}  {said}", flush=True)
    a, b = statistics.median(t.seconds for t in ours), statistics.median(t.seconds for t in theirs)
    ratio = statistics.median(x.seconds / y.seconds for x, y in zip(ours, theirs, strict=True))
    print(f"median {a:.1f} s and {b:.1f} s: {a / b:.2f} times TRL's time (median of the pairs' ratios {ratio:.2f})")
    start_up(ours[-1])
    print(f"TRL: the first evaluation was over after {theirs[-1].when('^evaluation'):.1f} s")


def start_up(run: Timed) -> None:
    """Print the phases of a run's first seconds, by its own output lines."""
    print("\nstart-up of the last run:")
    last = 0.0
    for at, line in run.lines:
        text = re.sub(r"^\[ *[\d.]+s\] ", "", line)
        if not text or "%|" in text:  # a library's progress bar
            continue
        print(f"{at:>7.1f} s {at - last:>+6.1f}  {text[:100]}")
        last = at
        if re.search(EVALUATED, line):
            break
    first = run.when("evaluating before training")
    print(f"ready for the first evaluation after {first:.1f} s; it was over after {run.when(EVALUATED):.1f} s")
    if run.when("Ray is up") < first:
        bare = timed([sys.executable, "-c", RAY], dict(os.environ)).seconds
        print(f"bare Ray with three empty actors, start to end: {bare:.1f} s; the rest {first - bare:.1f} s")


def seeds(options: argparse.Namespace, forms: Sequence[Form], work: Path) -> None:
    print(f"\n{'seed':>4} {'form':<50} {'seconds':>8}  held-out success")
    for form in forms:
        for seed in options.seeds:
            name = " ".join(f"{key}={value}" for key, value in form.items())
            run = demo(options, work / f"{seed}-{name}".replace("/", "_"), seed, form)
            print(f"{seed:>4} {name:<50} {run.seconds:>8.1f}  {' '.join(run.found(EVALUATED))}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-venv", type=Path, help="the venv that has TRL")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--backend", choices=["ray", "local"])
    parser.add_argument("--max-staleness", type=int, nargs="+", help="several only with --seeds")
    parser.add_argument("--partial-rollout", action="store_true")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="other settings by flat name")
    parser.add_argument("--seeds", type=int, nargs="+", help="run the demo alone for these seeds")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        run_form(**json.loads(options.one))
        return
    given: Form = {} if options.backend is None else {"backend": options.backend}
    given |= {"partial_rollout": True} if options.partial_rollout else {}
    given |= {name: json.loads(value) for name, _, value in (text.partition("=") for text in options.set)}
    forms = [{**given, "max_staleness": bound} for bound in options.max_staleness or ()] or [given]
    with tempfile.TemporaryDirectory() as folder:
        if options.seeds:
            seeds(options, forms, Path(folder))
        elif options.trl_venv is None or len(forms) > 1:
            parser.error("pairs need --trl-venv and one --max-staleness at most; or give --seeds")
        else:
            pairs(options, forms[0], Path(folder))


if __name__ == "__main__":
    main()
