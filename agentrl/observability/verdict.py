"""A verdict on a run: did it learn, and if not, the likeliest cause with settings to try. A pure function of metrics.

1. The mean reward of the first fifth of the rollouts is compared with that of the last fifth, dropped groups included.
   The noise comes from the larger of two variances: between rollouts, and within groups.
2. If the outcome is "got worse" or "did not learn", the verdict names the first of `CAUSES` that holds. In this list, a
   cause comes before its consequences.
3. A missing `rollout/` metric counts as 0. For any other metric, rollouts that lack it are left out. If all rollouts
   lack the metric, the trend is NaN, and every comparison with it is false."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from agentrl.files import read_table
from agentrl.observability.charts import number

Outcome = Literal["learned", "stayed high", "got worse", "did not learn", "too short to say"]
_MIN_ROLLOUTS, _WINDOW = 6, 3
_MOVES = ("rollout/reward", "rollout/model_tokens", "train/entropy")
_SURE, _HIGH = 2.5, 0.8
"""A change above `_SURE` standard errors is not noise. A share of solved trajectories of at least `_HIGH` is high."""


class RunVerdict(NamedTuple):
    """The judgement of a run. `cause`, `evidence` and `remedy` are empty if no cause is named."""

    outcome: Outcome
    figures: str
    cause: str = ""
    evidence: str = ""
    remedy: str = ""

    @property
    def lines(self) -> list[str]:
        lines = [f"verdict: {self.outcome}: {self.figures}"]
        if self.cause:
            lines.append(f"likeliest cause: {self.cause}: {self.evidence}; try {self.remedy}")
        elif self.outcome in ("got worse", "did not learn"):
            lines.append("no cause stands out in the metrics; read some trajectories (agentrl view)")
        return lines


class Trend(NamedTuple):
    """One metric over the run."""

    start: float  # mean over the first window of rollouts
    end: float  # mean over the last window
    top: float  # highest mean over a window
    mean: float  # over all rollouts
    peak: float  # largest absolute value
    noise: float  # standard error of the difference of two windows

    @property
    def steady(self) -> float:
        """The lower of `start` and `mean`: high only if the metric was high at the start and stayed high."""
        return min(self.start, self.mean)

    @property
    def moved(self) -> float:
        """The change from start to end in standard errors; 0 if the metric is constant."""
        return (self.end - self.start) / (self.noise or math.inf)

    @property
    def fell(self) -> bool:
        """True if the metric ended below its start or lost more than half of its rise, by more than noise."""
        below = self.end < (self.start + self.top) / 2 and self.top - self.end > 1.5 * _SURE * self.noise
        return below or self.moved < -_SURE

    @property
    def growth(self) -> float:
        return self.end / (self.start or math.nan)

    def __str__(self) -> str:
        return f"{number(self.start)} → {number(self.end)}"


class Figures:
    """Metrics of the rollouts that were trained; `figures[name]` is the trend of the metric `name`."""

    def __init__(self, rows: Iterable[Mapping[str, Any]]) -> None:
        self.rows = [row for row in rows if "rollout/reward" in row and "train/steps" in row]

    def __getitem__(self, name: str) -> Trend:
        values, window = self._values(name), max(_WINDOW, len(self.rows) // 5)
        between = _mean([(b - a) ** 2 / 2 for a, b in pairwise(values)] or [0.0])
        errors = self._values("rollout/reward_standard_error") if name.endswith("/reward") else [0.0]
        noise = math.sqrt(2 / window * max(between, _mean([error**2 for error in errors])))
        means = [_mean(values[at : at + window]) for at in range(max(1, len(values) - window + 1))]
        return Trend(means[0], means[-1], max(means), _mean(values), max(map(abs, values)), noise)

    def _values(self, name: str) -> list[float]:
        absent = 0.0 if name.startswith("rollout/") else math.nan
        found = [float(row.get(name, absent)) for row in self.rows]
        return [value for value in found if math.isfinite(value)] or [math.nan]

    @property
    def lost_groups(self) -> float:
        """The share of groups that were dropped for failures. Groups that a filter dropped are not counted."""
        failures = {name.removeprefix("failures/") for row in self.rows for name in row if name.startswith("failures/")}
        lost = sum(float(row.get(f"dropped/{kind}", 0)) for row in self.rows for kind in failures)
        return lost / (lost + sum(self._values("rollout/groups")) or math.inf)

    @property
    def useless_calls(self) -> float:
        """The share of tool calls that failed: the lower of the shares at the start and over the run."""
        calls, worked = self["rollout/tool_calls"], self["rollout/tool_ok"]
        return 1 - max(worked.start / calls.start, worked.mean / calls.mean) if calls.steady > 0.1 else 0.0


_SIGNS: Mapping[str, Callable[[Figures], bool]] = {
    "failed trajectories": lambda f: max(f.lost_groups, f["rollout/failed"].steady) >= 0.2,
    "tools fail": lambda f: f.useless_calls >= 0.5,
    "engine and trainer differ": (
        lambda f: f["train/mismatch_numerics_abs_diff"].mean >= 0.1 or f["train/mismatch_numerics_ess"].mean <= 0.9
    ),
    "stale samples": lambda f: f["staleness/mean"].mean >= 1.2 and f["train/mismatch_staleness_ess"].mean <= 0.9,
    "learning rate too high": lambda f: f["train/ppo_kl"].peak >= 0.1 or f["train/pg_clipfrac"].peak >= 0.3,
    "length": lambda f: f["rollout/stop/length"].steady >= 0.3,
    "context": lambda f: f["rollout/stop/context"].steady >= 0.3,
    "max_turns": lambda f: f["rollout/stop/max_turns"].steady >= 0.3,
    "no reward": lambda f: f["rollout/zero_std_groups"].steady >= 0.9 and abs(f["rollout/reward"].mean) < 0.05,
    "equal rewards": lambda f: f["rollout/zero_std_groups"].steady >= 0.9,
    "entropy grows": lambda f: f["train/entropy"].growth >= 2 and f["train/entropy"].moved > _SURE,
    "entropy collapse": lambda f: f["train/entropy"].growth <= 0.1,
    "length drift": (
        lambda f: not 0.75 <= f["rollout/model_tokens"].growth <= 1.3 and abs(f["rollout/model_tokens"].moved) > _SURE
    ),
    "learning rate too low": (
        lambda f: f["train/grad_norm"].mean > 0 and all(abs(f[name].moved) <= _SURE for name in _MOVES)
    ),
}
"""The conditions of the causes, by their names in causes.tsv."""


class Cause(NamedTuple):
    """A reason why a run may not learn: its condition, the figures that show it, and settings to try."""

    holds: Callable[[Figures], bool]
    name: str
    evidence: str
    remedy: str


CAUSES = tuple(Cause(_SIGNS[sign], *texts) for sign, *texts in read_table(__file__, "causes.tsv"))


def judge(rows: Iterable[Mapping[str, Any]]) -> RunVerdict | None:
    """Judge a run by the rows of its metrics. Return None if the run has no rewards or learns from a teacher."""
    f = Figures(rows)
    if not f.rows or "train/opd_reverse_kl" in f.rows[0]:
        return None
    # A group filter may drop the best and the worst groups; `offered/` includes them.
    reward = f["offered/reward" if all("offered/reward" in row for row in f.rows) else "rollout/reward"]
    solved = f["rollout/pass@1"]
    noise = f"{f'at best {number(reward.top)}, ' if reward.fell else ''}standard error {number(reward.noise)}"
    played, logged = f.rows[-1]["step"] + 1, len(f.rows)
    figures = f"mean reward {reward} ({noise}) over {played} rollouts"
    figures += f", {logged} of them logged" if logged < played else ""
    if len(f.rows) < _MIN_ROLLOUTS:
        return RunVerdict("too short to say", figures)
    if reward.moved > _SURE and not reward.fell:
        return RunVerdict("learned", figures)
    if min(solved.start, solved.end) >= _HIGH and not reward.fell and f["rollout/zero_std_groups"].steady < 0.9:
        return RunVerdict("stayed high", figures)
    outcome: Outcome = "got worse" if reward.fell else "did not learn"
    for cause in CAUSES:
        if cause.holds(f):
            return RunVerdict(outcome, figures, cause.name, cause.evidence.format(f=f), cause.remedy)
    return RunVerdict(outcome, figures)


def verdict_lines(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    return verdict.lines if (verdict := judge(rows)) else []


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
