"""A learning example as one command: warm start, `agentrl train` with a settings file, before and after, report.

1. An `Example` names its parts; `command` is its command line: `--seed`, `--output-dir`, `--cache`, and whatever else is
   given goes to `agentrl train` and wins over the settings file.
2. The warm-started model is kept in the cache; training and evaluation are the ordinary run.
3. Success is the share of held-out prompts whose reward is at least 1 (`pass@1`), at the evaluation's temperature.
   The exit code is 1 if it did not rise above the goal.
"""

import shlex
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import click

from agentrl.errors import AgentRLError, DataError
from agentrl.tiny.warm_start import Lessons, Say, WarmStartSettings, in_own_process

EVAL_SET = "held_out"
LEAST_GAIN = 0.1

WriteData = Callable[[Path, int], tuple[Path, Path]]
"""`(folder, seed) -> (training file, held-out file)`; the latter is the same for every seed, or a YAML file of several sets."""


@dataclass(frozen=True, slots=True)
class Example:
    """What one example is made of.

    Attributes:
        name: of its folder in `runs/`.
        config: the settings file, from the working directory.
        lessons: what the tiny model is taught first.
        write_data: writes the prompts.
        warm_start: the recipe; its seed is replaced by the run's.
        goal: success on held-out prompts to end at.
        others: has the other models of the run ready, from the cache, for as long as it lasts; gives their flags.
    """

    name: str
    config: Path
    lessons: Lessons
    write_data: WriteData
    warm_start: WarmStartSettings = field(default_factory=WarmStartSettings)
    goal: float = 0.75
    others: Callable[[Path, Say], AbstractContextManager[Sequence[str]]] = lambda cache, say: nullcontext(())

    def main(self) -> None:
        """The example's command line; exits the process."""
        self.command()()

    def command(self) -> click.Command:
        """See the module's point 1."""

        @click.command(
            context_settings={"show_default": True, "ignore_unknown_options": True},
            help=f"Example {self.name}: random weights, warm start, GRPO, evaluation on unseen questions.",
            epilog="All other flags go to `agentrl train`, for example --num-rollout 40.",
        )
        @click.option("--seed", default=0, type=click.IntRange(0), help="Seed of weights, data and sampling.")
        @click.option("--output-dir", type=click.Path(path_type=Path), help="A new folder; default runs/NAME/...")
        @click.option("--cache", default="runs/cache", type=click.Path(path_type=Path), help="Warm-started models.")
        @click.argument("flags", nargs=-1, type=click.UNPROCESSED)
        def main(seed: int, output_dir: Path | None, cache: Path, flags: tuple[str, ...]) -> None:
            folder = output_dir or Path(f"runs/{self.name}/seed{seed}-{time.strftime('%Y%m%d-%H%M%S')}")
            try:
                success = run_example(self, folder.resolve(), cache.resolve(), seed=seed, flags=flags, say=click.echo)
            except AgentRLError as error:
                raise click.ClickException(str(error)) from error
            if not self.learned(success):
                goal = f"goal: {self.goal:.0%} on held-out questions"
                click.echo(f"the model did not learn as expected ({goal})", err=True)
                sys.exit(1)

        return main

    def argv(self, folder: Path, model: Path, seed: int) -> list[str]:
        """What `agentrl train` is given to train `model` in `folder`, where this writes the prompts."""
        train_file, test_file = self.write_data(folder / "data", seed)
        argv = ["--config", str(self.config), "--hf-checkpoint", str(model), "--prompt-data", str(train_file)]
        sets = ["--eval-config"] if test_file.suffix == ".yaml" else ["--eval-prompt-data", EVAL_SET]
        argv += [*sets, str(test_file), "--output-dir", str(folder)]
        return [*argv, "--seed", str(seed), "--rollout-seed", str(seed)]

    def learned(self, success: Sequence[float]) -> bool:
        """Whether the model ended at the goal and well above where it began."""
        return success[-1] >= self.goal and success[-1] > success[0] + LEAST_GAIN


def run_example(
    example: Example, folder: Path, cache: Path, *, seed: int = 0, flags: Sequence[str] = (), say: Say
) -> list[float]:
    """Run it.

    Args:
        example: what to run.
        folder: for everything this run writes; it must be new, as the same folder given again would resume.
        cache: where warm-started models are kept between runs.
        seed: of weights, data and sampling.
        flags: more flags of `agentrl train`; they win.
        say: where progress goes, one line a call; picklable.

    Returns:
        Success on held-out prompts, 0 to 1, at every evaluation in order.

    Raises:
        DataError: the folder is not empty.
    """
    must_be_new(folder)
    started = time.monotonic()
    model = in_own_process(cache, example.lessons, example.warm_start.model_copy(update={"seed": seed}), say)
    warm = time.monotonic()

    from agentrl.cluster.launch import train
    from agentrl.config import RunSettings
    from agentrl.observability.report import write_report

    with example.others(cache, say) as more:
        argv = [*example.argv(folder, model, seed), *more, *flags]
        say(f"agentrl train {shlex.join(argv)}")
        train(RunSettings.from_cli(argv))
    success = held_out(folder, "pass@1")
    page = write_report(folder, title=f"{example.name}, seed {seed}")
    say(f"held-out success: {_curve(success)}")
    say(f"used the tool:    {_curve(held_out(folder, 'used_tool'))}")
    say(f"seconds: warm start {warm - started:.0f}, training {time.monotonic() - warm:.0f}")
    say(f"report: {page}")
    say(f"every trajectory, token by token: agentrl view {folder}")
    return success


def must_be_new(folder: Path) -> None:
    """Refuse a folder with something in it; a run given the same folder again would resume.

    Raises:
        DataError: the folder is not empty.
    """
    if folder.is_dir() and any(folder.iterdir()):
        raise DataError(f"{folder} is not empty; give the run a new folder")


def held_out(folder: Path, name: str) -> list[float]:
    """A figure of the held-out set at every evaluation of a run, in order.

    Raises:
        DataError: the run did not evaluate at least twice.
    """
    from agentrl.observability.metrics import read_metrics
    from agentrl.runfolder import METRICS

    key = f"eval/{EVAL_SET}/{name}"
    values = [float(row[key]) for row in read_metrics(folder / METRICS) if key in row]
    if len(values) < 2:
        raise DataError(f"{folder / METRICS}: expected {key} before and after training, found it {len(values)} times")
    return values


def _curve(values: Sequence[float]) -> str:
    return " -> ".join(f"{value:.1%}" for value in values)
