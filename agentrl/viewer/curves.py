"""Runs side by side: their metrics in a table, and their curves in common charts."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from agentrl.errors import DataError
from agentrl.observability.charts import Series, collect_series
from agentrl.observability.report import chart_groups, headlines
from agentrl.viewer.library import Library
from agentrl.viewer.query import macro

_COLOURS = ("#4a6fe3", "#d9772b", "#2f9e63", "#a34fc4", "#c44f6b", "#3a9db8", "#8c8c3a", "#7a6a5a")
_GREY = "#888"
_POINTS = 80  # a line with more points has no markers


class Curve(NamedTuple):
    """One curve of run number `run`; `place` is its index among the run's curves in a chart."""

    label: str
    run: int
    place: int
    series: Series


def overview(library: Library) -> str:
    rows = []
    for run in library.runs:
        try:
            series, trouble = collect_series(run.metrics()), ""
        except (DataError, OSError) as error:
            series, trouble = {}, str(error)
        figures = [f"{h.label} {h.before} → {h.after}" for h in headlines(series) if h.label != "training reward"]
        last = {name: one.last for name, one in series.items()}
        stores = [one for one in library.sources if run.folder in one.path.parents]
        steps = int(max((one.points[-1][0] for one in series.values()), default=0))
        row: dict[str, Any] = {"name": run.name, "steps": steps, "evaluation": trouble or ", ".join(figures)}
        row |= {"reward": last.get("rollout/reward"), "speed": last.get("perf/rollout_tokens_per_second")}
        row["sources"] = [(one.number, one.name, one.reader.count() if one.opens else None) for one in stores]
        rows.append(row)
    return macro("page.html", "runs")(rows)


def charts(library: Library, everything: bool) -> dict[str, dict[str, Any]]:
    """Return the charts' options by title: the main charts of all runs, or, with `everything`, one chart per metric."""
    lines: dict[str, list[Curve]] = {}
    for at, run in enumerate(library.runs):
        with suppress(DataError, OSError):  # `overview` shows the error
            series = collect_series(run.metrics())
            single = [(name, [(name, one)]) for name, one in sorted(series.items())]
            for title, members in single if everything else chart_groups(series):
                for place, (label, one) in enumerate(members):
                    lines.setdefault(title, []).append(Curve(label, at, place, one))
    return {title: _options(members, [run.name for run in library.runs]) for title, members in lines.items()}


def _options(lines: list[Curve], runs: list[str]) -> dict[str, Any]:
    axis = {"axisLabel": {"color": _GREY}, "splitLine": {"lineStyle": {"color": "#8883"}}}
    return {
        "animation": False,
        "grid": {"left": 8, "right": 16, "top": 12, "bottom": 40 if len(lines) > 1 else 24, "containLabel": True},
        "tooltip": {"trigger": "axis", "renderMode": "richText", "confine": True},
        "legend": {"show": len(lines) > 1, "type": "scroll", "bottom": 0, "textStyle": {"color": _GREY}},
        "xAxis": {"type": "value", "min": "dataMin", "max": "dataMax", "minInterval": 1, **axis},
        "yAxis": {"type": "value", "scale": True, **axis},
        "series": [_drawn(line, runs, len(lines)) for line in lines],
    }


def _drawn(line: Curve, runs: list[str], count: int) -> Mapping[str, Any]:
    several = len(runs) > 1
    parts = [runs[line.run]] * several + [line.label] * (not several or count > len(runs))
    finite = set(line.series.finite)
    style = {"showSymbol": len(line.series.points) <= _POINTS, "symbolSize": 5, "sampling": "lttb"}
    return {
        "type": "line",
        "name": " ".join(parts),
        "data": [[x, y if (x, y) in finite else None] for x, y in line.series.points],
        "color": _COLOURS[(line.run if several else line.place) % len(_COLOURS)],
        "lineStyle": {"width": 2, "type": "dashed" if several and line.place else "solid"},
        **style,
    }
