"""Charts as data: what a report shows as a picture, whoever draws it, and the sentence that says the same.

Nothing here knows how a chart is drawn: `grader.web.charts` makes SVG of these, `grader.terminal` makes characters.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from grader.wording import bytes_text, count, error_text, points_text, rate_text


class Whose(enum.StrEnum):
    """Whose numbers a mark shows. Decides its colour and shape everywhere, so that a reader learns them once."""

    OWN = "own"
    OWN_BACKWARD = "own-backward"
    NAIVE = "naive"
    REFERENCE = "reference"
    LIMIT = "limit"  # of the hardware


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """A value that others are held against: a capacity, a threshold."""

    name: str
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    name: str
    whose: Whose
    points: tuple[tuple[float, float], ...]
    joined: bool = True  # by a line
    measured: bool = True  # False: continued by its own law, drawn broken and without marks


@dataclass(frozen=True, slots=True, kw_only=True)
class LineChart:
    """Curves on log-log axes: a power law is a straight line, its exponent the slope."""

    title: str
    x_label: str
    y_label: str
    y_unit: str  # "bytes", counted in KiB and GiB; "B", in kB and GB; or "FLOP/s"
    series: tuple[Series, ...]  # the student's first
    levels: tuple[Level, ...] = ()  # of y


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    name: str
    whose: Whose
    value: float
    low: float | None = None  # of its 95 % interval
    high: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BarChart:
    title: str
    unit: str  # "bytes", "launches", "times" or "points"
    bars: tuple[Bar, ...]
    levels: tuple[Level, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatMap:
    """Block means of |got - want|; None where a block holds a value that is not finite."""

    title: str
    row_label: str
    column_label: str
    values: tuple[tuple[float | None, ...], ...]

    @property
    def has_not_finite(self) -> bool:
        return any(value is None for row in self.values for value in row)


Chart = LineChart | BarChart | HeatMap


def amount(value: float, unit: str) -> str:
    """A number of a chart with its unit, as short as it can be read."""
    if unit in ("bytes", "B", "FLOP/s"):
        said = bytes_text(value) if unit == "bytes" else rate_text(value, unit)
        return said.replace(".00 ", " ").replace(".0 ", " ")
    if unit == "times":
        return f"{value:.3g}×"
    if unit == "points":
        return points_text(value)
    return f"{value:,.0f}"


def place(x: float) -> str:
    """A number along the horizontal axis of a line chart."""
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def is_empty(chart: Chart) -> bool:
    """Whether there is nothing to draw: no value above zero, or no cell."""
    if isinstance(chart, LineChart):
        return not any(x > 0 and y > 0 for series in chart.series for x, y in series.points)
    if isinstance(chart, BarChart):
        return not any(bar.value > 0 for bar in chart.bars)
    return not (chart.values and chart.values[0])


def says(chart: Chart) -> str:
    """What the chart shows, in words, for people who do not see it."""
    if isinstance(chart, LineChart):
        return _curves(chart)
    if isinstance(chart, BarChart):
        return _bars(chart)
    return _blocks(chart.values)


def _curves(chart: LineChart) -> str:
    parts = [
        f"{series.name}: " + ", ".join(f"{amount(y, chart.y_unit)} at {place(x)}" for x, y in series.points)
        for series in chart.series
        if series.measured
    ]
    return f"{chart.y_label} against {chart.x_label}. {'; '.join(parts)}.{_held(chart.levels, chart.y_unit)}"


def _bars(chart: BarChart) -> str:
    parts = []
    for bar in chart.bars:
        part = f"{bar.name} {amount(bar.value, chart.unit)}"
        if bar.low is not None and bar.high is not None:
            part += f" (between {amount(bar.low, chart.unit)} and {amount(bar.high, chart.unit)})"
        parts.append(part)
    return f"{'; '.join(parts)}.{_held(chart.levels, chart.unit)}"


def _held(levels: Sequence[Level], unit: str) -> str:
    said = ", ".join(f"{level.name} {amount(level.value, unit)}" for level in levels)
    return f" Held against: {said}." if said else ""


def _blocks(grid: Sequence[Sequence[float | None]]) -> str:
    if not grid or not grid[0]:
        return "Nothing to see."
    finite = [(value, i, j) for i, row in enumerate(grid) for j, value in enumerate(row) if value is not None]
    top, worst_row, worst_column = max(finite, default=(0.0, 0, 0))
    n_cells = sum(len(row) for row in grid)
    n_nan = n_cells - len(finite)
    n_large = sum(value > top / 10 for value, _, _ in finite) if top > 0 else 0
    said = f"{len(grid)} by {count(len(grid[0]), 'block')}, rows downwards."
    if top > 0:
        said += (
            f" The largest mean error is {error_text(top)}, in block row {worst_row + 1}, block column"
            f" {worst_column + 1}; {n_large} of {n_cells} blocks are above a tenth of it."
        )
    if n_nan:
        said += f" {n_nan} of {n_cells} blocks hold values that are not finite."
    return said
