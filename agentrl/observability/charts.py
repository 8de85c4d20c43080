"""Curves of metrics: series from rows, drawn as inline SVG for pages.

1. The x axis counts finished rollouts: a row of step s is at s + 1, an evaluation before training at 0.
2. A value that is not finite, or nearly too large for a float, is a gap in the line, never a point.
3. SVG takes its colours from the page's CSS classes, so it follows light and dark."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

Point = tuple[float, float]
Scale = Callable[[float], float]
_LARGEST = 1e300  # the difference of two such values is still finite


@dataclass(frozen=True, slots=True)
class Series:
    """One metric over the run."""

    name: str
    points: tuple[Point, ...]

    @property
    def finite(self) -> tuple[Point, ...]:
        return tuple(p for p in self.points if abs(p[1]) <= _LARGEST)

    @property
    def first(self) -> float:
        return self.finite[0][1]

    @property
    def last(self) -> float:
        return self.finite[-1][1]


def collect_series(rows: Iterable[Mapping[str, Any]]) -> dict[str, Series]:
    """Collect one series per metric from rows, in order of x. Metrics without any finite value are left out."""
    points: dict[str, dict[float, float]] = {}
    for row in rows:
        x = float(row["step"] + 1)
        for name, value in row.items():
            if name not in ("step", "time") and isinstance(value, (int, float)):
                points.setdefault(name, {})[x] = float(value)
    found = {name: Series(name, tuple(sorted(values.items()))) for name, values in points.items()}
    return {name: series for name, series in found.items() if series.finite}


@dataclass(frozen=True, slots=True)
class Chart:
    """Some series on common axes, laid out: everything that the page's template needs to draw it."""

    title: str
    lines: tuple["ChartLine", ...]
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]

    width, height, left, top = 460, 210, 52, 12
    right, floor = width - 14, height - 30


@dataclass(frozen=True, slots=True)
class ChartLine:
    """One drawn series: SVG path data, and dots with their tooltips (none if there would be too many)."""

    label: str
    path: str
    dots: tuple[tuple[float, float, str], ...]


def layout(title: str, series: Sequence[tuple[str, Series]]) -> Chart:
    xs, ys = zip(*(point for _, s in series for point in s.finite), strict=True)
    lowest, highest, first, last = min(ys), max(ys), min(xs), max(xs)
    if 0 < lowest < highest / 2:
        lowest = 0.0
    if lowest == highest == 0:
        highest = 1.0
    y_ticks = ticks(lowest, highest, 4)
    to_x = _scale(first, last, Chart.left, Chart.right)
    to_y = _scale(y_ticks[0], y_ticks[-1], Chart.floor, Chart.top)
    return Chart(
        title,
        tuple(_line(label, s, to_x, to_y) for label, s in series),
        tuple((to_x(t), number(t)) for t in ticks(first, last, 6, whole=True) if first <= t <= last),
        tuple(zip(map(to_y, y_ticks), distinct(y_ticks), strict=True)),
    )


def _line(label: str, series: Series, to_x: Scale, to_y: Scale) -> ChartLine:
    path, pen_down = [], False
    for x, y in series.points:
        if drawn := abs(y) <= _LARGEST:
            path.append(f"{'L' if pen_down else 'M'}{to_x(x):.1f} {to_y(y):.1f}")
        pen_down = drawn
    few = len(series.finite) <= 80
    dots = tuple((to_x(x), to_y(y), f"{label}, after {number(x)}: {number(y)}") for x, y in series.finite if few)
    return ChartLine(label, " ".join(path), dots)


def _scale(low: float, high: float, start: float, end: float) -> Scale:
    """Return the linear map of [low, high] onto [start, end]."""
    return lambda value: start + (value - low) / ((high - low) or 1.0) * (end - start)


def ticks(low: float, high: float, count: int, *, whole: bool = False) -> list[float]:
    """Return about `count` round numbers that enclose [low, high], in steps of 1, 2 or 5 times a power of ten."""
    if high <= low:
        low, high = (low - 0.5, high + 0.5) if abs(low) < 1e6 else (low - abs(low) / 10, high + abs(high) / 10)
    raw = (high - low) / max(count, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    step = max(1.0, round(step)) if whole else step
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def distinct(values: Sequence[float]) -> list[str]:
    """Format evenly spaced numbers with as few digits as keep the texts distinct."""
    close = min((abs(b - a) for a, b in pairwise(values)), default=1.0) / 20
    texts = [number(v) for v in values]
    for digits in range(4, 16):
        if all(abs(float(text.replace(",", "")) - v) <= close for text, v in zip(texts, values, strict=True)):
            break
        texts = [number(v, digits) for v in values]
    return texts


def number(value: float, digits: int = 3) -> str:
    """Format a number with `digits` significant digits, thousands separators, and no needless zeros."""
    if not math.isfinite(value):
        return str(value)
    if value == round(value) and abs(value) < 1e9:
        return f"{round(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.{digits - 3}f}"
    return f"{value:.{digits - 2}e}" if abs(value) < 1e-3 else f"{value:.{digits}g}"
