"""A run's report: one self-contained HTML page without network access or scripts. Model, tool and data text is escaped.
The page shows metrics, evaluations and trajectories: the first prompts of the first evaluation set before and after,
the best and worst trajectories of the newest step, and the newest failed ones."""

import json
import tomllib
from collections.abc import Mapping
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import ChoiceLoader, PackageLoader, StrictUndefined
from jinja2 import Environment as Jinja

from agentrl.buffer.store import first_words
from agentrl.errors import DataError, raised_as
from agentrl.observability.charts import Series, collect_series, layout, number
from agentrl.observability.metrics import read_metrics
from agentrl.observability.selection import first_and_last, own_trajectories
from agentrl.observability.trajectories import Trajectory, run_texts
from agentrl.observability.verdict import verdict_lines
from agentrl.runfolder import BELOW, EVALUATIONS, METRICS, SETTINGS

MAIN_CHARTS: Mapping[str, Mapping[str, str]] = tomllib.loads(
    (Path(__file__).parent / "charts.toml").read_text(encoding="utf-8")
)
_PAIRS = 6  # maximum number of prompts shown before and after
_HEADLINE_OF_EVAL = (("pass@1", "solved (pass@1)"), ("reward", "mean reward"), ("used_tool", "used a tool"))


class Headline(NamedTuple):
    """One before/after figure at the top."""

    label: str
    before: str
    after: str


class Pair(NamedTuple):
    """The same prompt before and after training."""

    number: int
    label: str
    before: Trajectory
    after: Trajectory


def write_report(run: str | Path, *, title: str | None = None) -> Path:
    """Write `report.html` into the run's folder `run`, and return the file's path. `title`: the page's headline;
    default: the folder's name. Raises DataError: there are no metrics, or a file is malformed."""
    run = Path(run)
    home, folders = _home(run), [*([] if (run / METRICS).is_file() else [run]), run / BELOW["eval"]]
    # Only evaluations that `agentrl eval` noted here or below: the curves show the evaluations of training.
    noted = [folder / EVALUATIONS for folder in folders]
    evaluations = [row for file in noted if file.is_file() for row in read_metrics(file)]
    rows = list(read_metrics(home / METRICS)) if (home / METRICS).is_file() else list(map(_as_metrics, evaluations))
    if not (series := collect_series(rows)):
        said = f"{run}: holds no metrics yet; expected the --output-dir of a run that has finished a step,"
        raise DataError(f"{said} or its folder rollouts or evaluation")
    texts = run_texts(home, settings := read_settings(home))
    pairs = [
        Pair(at, first_words(before.grading.get("label", "")), before, after)
        for at, (before, after) in enumerate(first_and_last(run, texts, _PAIRS), start=1)
    ]
    groups = chart_groups(series)
    shown = {one.name for _, members in groups for _, one in members}
    template, out = templates("observability").get_template("report.html"), run / "report.html"
    page = template.render(
        title=title or f"Run {run.resolve().name}",
        headlines=headlines(series),
        verdict=verdict_lines(rows),
        facts=_facts(rows, series, settings),
        charts=[layout(name, members) for name, members in groups],
        more=[layout(name, [(name, one)]) for name, one in sorted(series.items()) if name not in shown],
        pairs=pairs,
        own=own_trajectories(run, texts),
        evaluations=evaluations[-20:],
        settings=settings,
    )
    out.write_text(page, encoding="utf-8")
    return out


def run_verdict(run: Path) -> list[str]:
    """Return the lines of the verdict on the run in a folder; empty if nothing was trained."""
    file = _home(run) / METRICS
    return verdict_lines(read_metrics(file)) if file.is_file() else []


def headlines(series: Mapping[str, Series]) -> list[Headline]:
    """Return before/after figures: of evaluations if there are any, else rewards of the first and last rollout."""
    found = [
        Headline(f"{data}: {label}", number(one.first), number(one.last))
        for label, members in _evaluations(series)
        for data, one in members
        if len(one.finite) > 1
    ]
    if not found and (one := series.get("rollout/reward")) is not None and len(one.finite) > 1:
        found.append(Headline("training reward", number(one.first), number(one.last)))
    return found


def chart_groups(series: Mapping[str, Series]) -> list[tuple[str, list[tuple[str, Series]]]]:
    """Return the run's main curves: evaluations, then `MAIN_CHARTS`. A curve equal to its chart's first is left out."""
    groups = [(f"Evaluation: {label}", members) for label, members in _evaluations(series)]
    for title, wanted in MAIN_CHARTS.items():
        members = [(label, series[name]) for label, name in wanted.items() if name in series]
        if distinct := [m for i, m in enumerate(members) if i == 0 or m[1].points != members[0][1].points]:
            groups.append((title, distinct))
    return groups


def _evaluations(series: Mapping[str, Series]) -> list[tuple[str, list[tuple[str, Series]]]]:
    """Return evaluation figures by kind, each with its sets. A kind with the values of an earlier kind is left out."""
    found: list[tuple[str, list[tuple[str, Series]]]] = []
    for what, label in _HEADLINE_OF_EVAL:
        names = [name for name in series if name.startswith("eval/") and name.endswith(f"/{what}")]
        members = [(name.removeprefix("eval/").removesuffix(f"/{what}"), series[name]) for name in names]
        known = [[one.points for _, one in others] for _, others in found]
        if members and [one.points for _, one in members] not in known:
            found.append((label, members))
    return found


def _facts(rows: list[dict[str, Any]], series: Mapping[str, Series], settings: dict[str, Any]) -> list[tuple[str, str]]:
    facts = []
    if steps := [r["step"] for r in rows if "rollout/reward" in r or any(name.startswith("train/") for name in r)]:
        facts.append(("rollouts", number(max(steps) + 1)))
    if rollout := settings.get("rollout", {}):
        shape = f"{rollout.get('rollout_batch_size')} × {rollout.get('n_samples_per_prompt')}"
        facts.append(("prompts × samples a rollout", shape))
    if times := [row["time"] for row in rows if isinstance(row.get("time"), (int, float))]:
        first = max(float(rows[0].get(f"perf/{what}_seconds", 0.0)) for what in ("step", "rollout"))
        facts.append(("wall time, without starting", str(timedelta(seconds=round(times[-1] - times[0] + first)))))
    if speed := series.get("perf/rollout_tokens_per_second"):
        facts.append(("tokens/s, last rollout", number(speed.last)))
    if rollout.get("allow_truncated_sampling"):
        facts.append(("truncated sampling", "unknown to the trainer: biased gradients"))
    if checkpoint := settings.get("train", {}).get("hf_checkpoint"):
        facts.append(("started from", Path(checkpoint).name))
    return facts


def _home(run: Path) -> Path:
    """Return the folder of metrics and settings: the run's folder, or that of a command below it."""
    folders = [run / below for below in BELOW.values()]
    return next((folder for name in (METRICS, SETTINGS) for folder in folders if (folder / name).is_file()), run)


def _as_metrics(row: Mapping[str, Any]) -> dict[str, Any]:
    figures = {f"eval/{row['set']}/{name}": value for name, value in row["metrics"].items()}
    return {"step": row["step"], "time": row["time"], **figures}


def read_settings(folder: Path) -> dict[str, Any]:
    """Return the settings of a folder's run by section; empty if none. Raises DataError: the file is not valid JSON."""
    if not (file := folder / SETTINGS).is_file():
        return {}
    with raised_as(DataError, f"{file}: not valid JSON", ValueError):
        found = json.loads(file.read_text(encoding="utf-8"))
    return {name: part for name, part in found.items() if isinstance(part, dict)} if isinstance(found, dict) else {}


@cache
def templates(*packages: str) -> Jinja:
    """Return the templates of some packages. Inserted values are escaped; a missing value is an error."""
    loader = ChoiceLoader([PackageLoader(f"agentrl.{name}", "templates") for name in packages])
    jinja = Jinja(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    jinja.globals["show"] = number
    jinja.filters["colour"] = lambda value: "good" if (value or 0) > 0 else "bad" if (value or 0) < 0 else "muted"
    return jinja
