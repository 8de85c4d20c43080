"""Two evaluations side by side, paired by prompt: `agentrl eval --compare BEFORE AFTER`. Each prompt's two means are
subtracted, and the differences averaged, so that prompts of different difficulty do not add to the uncertainty.
Intervals are 95 % percentile bootstrap over prompts (Efron and Tibshirani 1993, chapter 13), if `_MIN_PROMPTS` have it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from agentrl.buffer.reader import Filter, StoreReader, find_stores
from agentrl.buffer.store import TrajectoryRow
from agentrl.errors import DataError
from agentrl.observability.metrics import read_metrics
from agentrl.observability.stats import SOLVED
from agentrl.runfolder import EVALUATIONS

_RESAMPLES, _MIN_PROMPTS = 2000, 5
MEASURES: Mapping[str, Callable[[TrajectoryRow], float | None]] = {
    "reward": lambda row: row.reward,
    "solved": lambda row: None if row.reward is None else float(row.reward >= SOLVED),
    "response tokens": lambda row: row.response,
    "turns": lambda row: row.turns,
    "used a tool": lambda row: float(bool(row.tools)),
    "truncated": lambda row: float(row.status == "truncated"),
    "failed": lambda row: float(row.status == "failed"),
}
"""The compared quantities: a number per trajectory, or None."""


class Evaluation(NamedTuple):
    """One evaluation: its store, its number there, and its checkpoint (None: `evaluations.jsonl` names none)."""

    store: Path
    step: int
    checkpoint: str | None

    @property
    def name(self) -> str:
        return f"{self.store.parent}@{self.step}"


class Difference(NamedTuple):
    """One measure on one set: means over prompts, their difference and its 95 % interval (None: too few prompts)."""

    measure: str
    before: float
    after: float
    interval: tuple[float, float] | None

    @property
    def difference(self) -> float:
        return self.after - self.before


def find_evaluation(given: str) -> Evaluation:
    """Find an evaluation by `FOLDER` (its last one) or `FOLDER@NUMBER`. Raises DataError: there is none."""
    name, _, number = given.rpartition("@") if given.rpartition("@")[2].isdecimal() else (given, "", "")
    for store in find_stores(Path(name).expanduser()).values():
        with StoreReader(store) as reader:
            sets = [part.name for part in reader.kinds() if part.kind == "eval"]
            steps = sorted({step for one in sets for step in reader.steps("eval", one)})
        if (steps and not number) or (number and int(number) in steps):
            step = int(number) if number else steps[-1]
            rows = list(read_metrics(file)) if (file := store.with_name(EVALUATIONS)).is_file() else []
            return Evaluation(store, step, next((row["checkpoint"] for row in rows if row["step"] == step), None))
        if steps:
            raise DataError(f"{given}: {store.parent} has the evaluations {', '.join(map(str, steps))}")
    said = f"{given}: no evaluation's trajectories here"
    raise DataError(f"{said}; give the --output-dir of `agentrl eval`, or of a run that evaluates")


def compare(before: Evaluation, after: Evaluation) -> dict[str, tuple[int, list[Difference]]]:
    """Compare common sets: prompt count and differences. Raises DataError: no set, or no prompt of a set, is common."""
    first, second = _by_prompt(before), _by_prompt(after)
    if not (common := [name for name in first if name in second]):
        raise DataError(f"{before.name} has sets {', '.join(first)}, {after.name} {', '.join(second)}: none in common")
    found = {}
    for name in common:
        if not (prompts := [prompt for prompt in first[name] if prompt in second[name]]):
            raise DataError(f"set {name}: {before.name} and {after.name} have no prompt in common")
        rows = [(first[name][prompt], second[name][prompt]) for prompt in prompts]
        found[name] = len(prompts), [one for measure in MEASURES if (one := _difference(measure, rows)) is not None]
    return found


def _by_prompt(evaluation: Evaluation) -> dict[str, dict[tuple[str, int], list[TrajectoryRow]]]:
    """Return trajectories by set, then by prompt. Repetitions of a prompt are numbered in their order."""
    found: dict[str, dict[tuple[str, int], list[TrajectoryRow]]] = {}
    seen: dict[tuple[str, str], dict[int, int]] = {}
    with StoreReader(evaluation.store) as reader:
        for row in reader.query(Filter(equal={"kind": "eval", "step": evaluation.step}), order="key"):
            keys = seen.setdefault((row.name, row.prompt), {})
            number = keys.setdefault(row.key, len(keys))
            found.setdefault(row.name, {}).setdefault((row.prompt, number), []).append(row)
    return found


def _difference(measure: str, pairs: list[tuple[list[TrajectoryRow], list[TrajectoryRow]]]) -> Difference | None:
    """Return the difference of a measure; None if no prompt has values on both sides."""
    means = [(_mean(measure, one), _mean(measure, two)) for one, two in pairs]
    both = np.array([pair for pair in means if None not in pair], np.float64)
    if not both.size:
        return None
    before, after = both.mean(axis=0)
    differences, draw, n = both[:, 1] - both[:, 0], np.random.default_rng(0), len(both)
    resampled = [differences[draw.integers(0, n, n)].mean() for _ in range(_RESAMPLES)]
    low, high = map(float, np.percentile(resampled, [2.5, 97.5]))
    return Difference(measure, float(before), float(after), (low, high) if n >= _MIN_PROMPTS else None)


def _mean(measure: str, rows: list[TrajectoryRow]) -> float | None:
    values = [value for row in rows if (value := MEASURES[measure](row)) is not None]
    return sum(values) / len(values) if values else None
