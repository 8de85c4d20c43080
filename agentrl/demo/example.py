"""A learning example as one command: `agentrl train` of a shipped model with a settings file, evaluations and a report.

1. An `Example` names its parts. `command` is its command line: `--seed` and `--output-dir`. All other flags go to
   `agentrl train` and override the settings file.
2. The run starts from a model that is shipped with the package. Training and evaluation are those of any run.
3. Success is the share of held-out prompts whose reward is at least 1 (`pass@1`), at the evaluation's temperature.
   The exit code is 1 if success misses the goal or hardly rose. The last lines then name failed phrases and mistakes."""

import shlex
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import click

from agentrl.errors import AgentRLError, DataError, SettingsError
from agentrl.sample import Sample
from agentrl.tiny import shipped

EVAL_SET = "held_out"
LEAST_GAIN = 0.1

Say = Callable[[str], None]  # takes one line of progress; picklable

WriteData = Callable[[Path, int], tuple[Path, Path]]
"""`(folder, seed) -> (training file, held-out file or YAML of sets)`. The seed does not change the held-out prompts."""

Explain = Callable[[Sample], tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Example:
    """Definition of one example. `others` is a context manager that provides the run's other models in the run's folder
    and yields their flags."""

    name: str  # name of its folder in `runs/`
    config: Path  # the settings file
    model: str  # name of the shipped model to start from
    write_data: WriteData  # writes the prompts
    goal: float = 0.75  # minimum success on held-out prompts at the end
    others: Callable[[Path, Say], AbstractContextManager[Sequence[str]]] = lambda folder, say: nullcontext(())
    explain: Explain | None = None  # the phrase of a failed trajectory's question, and the mistake

    def main(self) -> None:
        """Run the example's command line and exit the process."""
        self.command()()

    def command(self) -> click.Command:
        """Return the command line: `--seed` and `--output-dir`; all other flags go to `agentrl train`."""

        @click.command(
            context_settings={"show_default": True, "ignore_unknown_options": True},
            help=f"Example {self.name}: a tiny model, GRPO, evaluation on unseen questions.",
            epilog="All other flags go to `agentrl train`, for example --num-rollout 40.",
        )
        @click.option("--seed", default=0, type=click.IntRange(0), help="Seed of data and sampling.")
        @click.option("--output-dir", type=click.Path(path_type=Path), help="A new folder; default runs/NAME/...")
        @click.argument("flags", nargs=-1, type=click.UNPROCESSED)
        def main(seed: int, output_dir: Path | None, flags: tuple[str, ...]) -> None:
            folder = (output_dir or Path(f"runs/{self.name}/seed{seed}-{time.strftime('%Y%m%d-%H%M%S')}")).resolve()
            try:
                success = run_example(self, folder, seed=seed, flags=flags, say=click.echo)
            except AgentRLError as error:
                raise click.ClickException(str(error)) from error
            if not self.learned(success):
                said = f"the model did not learn as expected (goal: {self.goal:.0%} on held-out questions)"
                click.echo("\n".join([said, *self.mistakes(folder)]), err=True)
                sys.exit(1)

        return main

    def argv(self, folder: Path, model: Path, seed: int) -> list[str]:
        """Return the arguments of `agentrl train` that train `model` in `folder`, after writing the prompts there."""
        train_file, test_file = self.write_data(folder / "data", seed)
        argv = ["--config", str(self.config), "--hf-checkpoint", str(model), "--prompt-data", str(train_file)]
        sets = ["--eval-config"] if test_file.suffix == ".yaml" else ["--eval-prompt-data", EVAL_SET]
        argv += [*sets, str(test_file), "--output-dir", str(folder)]
        return [*argv, "--seed", str(seed), "--rollout-seed", str(seed)]

    def learned(self, success: Sequence[float]) -> bool:
        """Return true if the last success reaches the goal and exceeds the first success by more than `LEAST_GAIN`."""
        return success[-1] >= self.goal and success[-1] > success[0] + LEAST_GAIN

    def mistakes(self, folder: Path) -> list[str]:
        """Return lines that count the mistakes in the last evaluation's trajectories: one per phrase, worst first."""
        if self.explain is None:
            return []
        asked, failed = Counter[str](), defaultdict[str, Counter[str]](Counter)
        for sample in last_held_out(folder):
            phrase, mistake = self.explain(sample)
            asked[phrase] += 1
            if not isinstance(sample.reward, int | float) or sample.reward < 1:
                failed[phrase][mistake] += 1
        lines = [f"mistakes in the last evaluation, of {asked.total()} problems:"]
        for phrase, kinds in sorted(failed.items(), key=lambda item: -item[1].total() / asked[item[0]]):
            said = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
            lines.append(f"  {phrase!r}: {kinds.total()} of {asked[phrase]} failed: {said}")
        return lines


def run_example(example: Example, folder: Path, *, seed: int = 0, flags: Sequence[str] = (), say: Say) -> list[float]:
    """Run an example in a new folder; return its success on held-out prompts, 0 to 1, at every evaluation in order.
    `flags`: more flags of `agentrl train`, which override the others. `say`: picklable function that takes lines of
    progress. Raises DataError: the folder is not empty, so the run would resume. SettingsError: an evaluation is missing."""
    must_be_new(folder)
    started = time.monotonic()

    from agentrl.cluster.launch import train
    from agentrl.config import RunSettings
    from agentrl.observability.report import write_report

    base = example.argv(folder, shipped(example.model), seed)
    _check_evaluations([*base, *flags])
    with example.others(folder, say) as more:
        argv = [*base, *more, *flags]
        say(f"agentrl train {shlex.join(argv)}")
        train(RunSettings.from_cli(argv))
    success = held_out(folder, "pass@1")
    page = write_report(folder, title=f"{example.name}, seed {seed}")
    say(f"held-out success: {_curve(success)}")
    say(f"used the tool:    {_curve(held_out(folder, 'used_tool'))}")
    say(f"seconds: {time.monotonic() - started:.0f}")
    say(f"report: {page}")
    say(f"every trajectory, token by token: agentrl view {folder}")
    return success


def must_be_new(folder: Path) -> None:
    """Raise DataError if the folder is not empty: a run in a used folder would resume."""
    if folder.is_dir() and any(folder.iterdir()):
        raise DataError(f"{folder} is not empty; give the run a new folder")


def _check_evaluations(argv: Sequence[str]) -> None:
    from agentrl.config import RunSettings
    from agentrl.run.evalsets import eval_sets

    what, settings = "an example compares success before and after training", RunSettings.from_cli(argv)
    if EVAL_SET not in (names := [one.name for one in eval_sets(settings)]):
        raise SettingsError(f"{what}: call one of the evaluation sets {EVAL_SET}, got {', '.join(names) or 'none'}")
    if not settings.rollout.eval_before_train:
        raise SettingsError(f"{what}: leave out --no-eval-before-train (slime: --skip-eval-before-train)")
    if settings.rollout.eval_interval is None:
        raise SettingsError(f"{what}: give --eval-interval")


def held_out(folder: Path, name: str) -> list[float]:
    """Return a metric of the held-out set at every evaluation, in order. Raises DataError: there are fewer than two."""
    from agentrl.observability.metrics import read_metrics
    from agentrl.runfolder import METRICS

    key = f"eval/{EVAL_SET}/{name}"
    if len(values := [float(row[key]) for row in read_metrics(folder / METRICS) if key in row]) < 2:
        raise DataError(f"{folder / METRICS}: expected {key} before and after training, found it {len(values)} times")
    return values


def last_held_out(folder: Path) -> list[Sample]:
    """Return the trajectories of a run's last evaluation of the held-out set."""
    from agentrl.buffer.reader import Filter, StoreReader, find_stores

    with StoreReader(find_stores(folder)[""]) as reader:
        of: dict[str, str | int] = {"kind": "eval", "name": EVAL_SET}
        rows = reader.query(Filter(equal=of | {"step": reader.steps("eval", EVAL_SET)[-1]}))
        return [reader.group(row.key)[row.place] for row in rows]


def _curve(values: Sequence[float]) -> str:
    return " -> ".join(f"{value:.1%}" for value in values)
