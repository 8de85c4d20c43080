"""Display of a run on the terminal: a live display for people, plain lines for logs and pipes. `live` keeps one status
line at the bottom and prints each finished step above it. `plain` prints one line per step, and one per phase before
the first step. `off` prints nothing. `auto` is live if standard error is a terminal."""

import time
from collections.abc import Mapping
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

from agentrl.files import read_table
from agentrl.observability.settings import ObservabilitySettings

_SHOWN = read_table(__file__, "progress.tsv")
_BUSY = 0.9  # share of busy time from which an event loop delays requests
_NO_SPREAD = (
    "note: within each group all rewards were equal, so there was nothing to learn from (gradient 0); easier prompts, "
    "partial rewards or a higher --n-samples-per-prompt help (said once)"
)
_SHOWN_OF_EVAL = ("reward", "success", "pass@1", "used_tool")


class Progress:
    """Display of phases and of the finished steps of `total`; a context manager. `console`: default stderr."""

    def __init__(self, settings: ObservabilitySettings, *, total: int, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False, soft_wrap=True)
        looks = "live" if self._console.is_terminal else "plain"
        self._mode = looks if settings.progress == "auto" else settings.progress
        self._total, self._started = total, time.monotonic()
        self._told_no_spread = False
        text = TextColumn("{task.description}", markup=False)
        columns = (SpinnerColumn(), text, BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = RichProgress(*columns, console=self._console, transient=True, disable=self._mode != "live")
        self._task = self._bar.add_task("starting", total=total)

    def phase(self, text: str) -> None:
        self._bar.update(self._task, description=text)

    def plan(self, total: int) -> None:
        self._total = total
        self._bar.update(self._task, total=total)

    def resume(self, done: int) -> None:
        """Show the `done` rollouts of an earlier process as finished."""
        self._bar.update(self._task, completed=done)

    def begin(self, text: str) -> None:
        """Show a phase before the first step. Without a status line the phase is printed."""
        self.phase(text)
        if self._mode == "plain":
            self._line(text)

    def ready(self, text: str, since: float) -> None:
        """Report that something is ready, and how long it took since `since` (of `time.monotonic`)."""
        self.note(f"{text}  time {time.monotonic() - since:.1f}s")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show a finished step, or a finished evaluation."""
        if self._mode == "off":
            return
        if not any(name.startswith("eval/") for name in metrics):
            self._bar.update(self._task, completed=step + 1)
        self._line(describe_step(step, self._total, metrics))
        still = metrics.get("rollout/zero_std_groups") == 1.0 and metrics.get("train/grad_norm") == 0.0
        if still and not self._told_no_spread:
            self._told_no_spread = True
            self._line(_NO_SPREAD)

    def note(self, *texts: str) -> None:
        for text in texts if self._mode != "off" else ():
            self._line(text)

    def _line(self, text: str) -> None:
        self._console.print(f"[{time.monotonic() - self._started:7.1f}s] {text}", markup=False)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def counted(count: int, one: str, many: str | None = None) -> str:
    return f"{count} {one if count == 1 else many or one + 's'}"


def describe_step(step: int, total: int, metrics: Mapping[str, float]) -> str:
    """Return one line about a step: `rollout 3/100  reward 0.512  tokens/s 1,204`, or `eval after rollout 3  ...`."""
    if any(name.startswith("eval/") for name in metrics):
        when = f"eval after rollout {step + 1}" if step >= 0 else "eval before training"
        named = [(*name.partition("/")[2].rpartition("/"), value) for name, value in metrics.items()]
        shown = [f"{data} {what} {value:.3f}" for data, _, what, value in named if what in _SHOWN_OF_EVAL]
        return "  ".join([when, *shown])
    parts = [f"{label} {form.format(metrics[name])}" for name, label, form in _SHOWN if name in metrics]
    return "  ".join([f"rollout {step + 1}/{total}", *parts, *describe_bottleneck(metrics)])


def describe_bottleneck(metrics: Mapping[str, float]) -> list[str]:
    """Return the bottleneck of a step, as `["limited by ..."]`; empty if the metrics do not show it: the time of agent
    programs and generate functions outside engines and tools is not measured. It is the trainer
    if the rollouts were ready for most of the step, else the rollouts' event loop if it is nearly always busy.
    Otherwise it is the engines or the tools, whichever have more trajectories on average."""
    waited, engines = metrics.get("perf/wait_time_ratio"), metrics.get("engines/in_flight")
    busy, tools = metrics.get("loop/busy_share", 0.0), metrics.get("tools/in_flight", 0.0)
    if waited is not None and waited < 0.5:
        return [f"limited by the trainer ({1 - waited:.0%} of the time)"]
    if waited is None or engines is None:
        return []
    if busy >= _BUSY:
        remedy = "use more --rollout-workers, or compute in threads and processes"
        return [f"limited by the event loop of the rollouts ({busy:.0%} busy; {remedy})"]
    if max(tools, engines) < 1:
        return []
    if tools > engines:
        return [f"limited by tools and environments ({tools:.1f} trajectories in them, {engines:.1f} at the engines)"]
    return [f"limited by the engines ({engines:.1f} requests at once, {tools:.1f} trajectories in tools)"]
