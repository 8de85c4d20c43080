"""Two evaluations side by side, paired by prompt: `agentrl eval --compare BEFORE AFTER`. Each prompt's two means are
subtracted, and the differences averaged, so that prompts of different difficulty do not add to the uncertainty.
Intervals are 95 % percentile bootstrap over prompts (Efron and Tibshirani 1993, chapter 13), if `_MIN_PROMPTS` have it."""

from collections.abc import Callable, Mapping
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np

from agentrl.buffer.reader import Filter, StoreReader, find_stores
from agentrl.buffer.store import TrajectoryRow
from agentrl.errors import DataError
from agentrl.groups import trajectories
from agentrl.observability.metrics import read_metrics
from agentrl.observability.stats import SOLVED
from agentrl.runfolder import EVALUATIONS
from agentrl.sample import Sample

_RESAMPLES, _MIN_PROMPTS = 2000, 5
Rows = list[TrajectoryRow]  # the rows of one trajectory: an agent's session has several
MEASURES: Mapping[str, Callable[[Rows], float | None]] = {
    "reward": lambda rows: rows[0].reward,
    "solved": lambda rows: None if rows[0].reward is None else float(rows[0].reward >= SOLVED),
    "response tokens": lambda rows: sum(row.response for row in rows),
    "turns": lambda rows: max(row.turns for row in rows),
    "used a tool": lambda rows: float(any(row.tools for row in rows)),
    "truncated": lambda rows: float(any(row.status == "truncated" for row in rows)),
    "failed": lambda rows: float(any(row.status == "failed" for row in rows)),
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
        both = [(groups, second[name].get(prompt, {})) for prompt, groups in first[name].items()]
        if not (pairs := [pair for one, two in both for pair in _paired(one, two)]):
            raise DataError(f"set {name}: {before.name} and {after.name} have no prompt in common")
        found[name] = len(pairs), [one for measure in MEASURES if (one := _difference(measure, pairs)) is not None]
    return found


def _by_prompt(evaluation: Evaluation) -> dict[str, dict[str, dict[int, list[Rows]]]]:
    """Return trajectories by set, prompt, and place of the prompt in the set's data."""
    found: dict[str, dict[str, dict[int, list[Rows]]]] = {}
    with StoreReader(evaluation.store) as reader:
        rows = reader.query(Filter(equal={"kind": "eval", "step": evaluation.step}), order="key")
        for key, of_key in groupby(rows, key=lambda row: row.key):
            held = list(of_key)
            group = reader.group(key) if len(held) > 1 else [Sample()]
            row_of = dict(zip(map(id, group), held, strict=True))
            groups = found.setdefault(held[0].name, {}).setdefault(held[0].prompt, {})
            at = len(groups) if held[0].group_index is None else held[0].group_index
            groups.setdefault(at, []).extend([row_of[id(sample)] for sample in path] for path in trajectories(group))
    return found


def _paired(one: dict[int, list[Rows]], two: dict[int, list[Rows]]) -> list[tuple[list[Rows], list[Rows]]]:
    """Pair a prompt's groups in their order. If one side has fewer, as a failed group is not stored, pair by place."""
    if len(one) == len(two):
        return [(one[a], two[b]) for a, b in zip(sorted(one), sorted(two), strict=True)]
    return [(one[at], two[at]) for at in one if at in two]


def _difference(measure: str, pairs: list[tuple[list[Rows], list[Rows]]]) -> Difference | None:
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


def _mean(measure: str, played: list[Rows]) -> float | None:
    values = [value for rows in played if (value := MEASURES[measure](rows)) is not None]
    return sum(values) / len(values) if values else None
