"""Charts of a report, laid out for SVG: attributes and classes only, so that the strictest content policy allows them.

Positions are computed here; a template puts numbers and texts in, with autoescaping on. Each chart also says in a
sentence what it shows, for people who do not see it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from grader.report import BarChart, HeatMap, LineChart
from grader.wording import bytes_text, error_text

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 74, 150, 14, 46
LABEL_GAP = 16.0
HEAT_STEPS = 6  # classes heat-0 to heat-5 of the style sheet
CELL = 18.0
BAR_HEIGHT, BAR_LEFT, BAR_RIGHT = 30, 170, 90


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    at: float
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One series. `number` picks colour, dash and marker, so that no reader depends on colour."""

    name: str
    number: int
    path: str
    dots: tuple[tuple[float, float], ...]
    label_at: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinePlot:
    says: str
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    curves: tuple[Curve, ...]
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    right: int = WIDTH - RIGHT
    top: int = TOP
    bottom: int = HEIGHT - BOTTOM


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    name: str
    label: str
    y: int
    length: float
    own: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BarPlot:
    says: str
    bars: tuple[Bar, ...]
    height: int
    width: int = WIDTH
    left: int = BAR_LEFT


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatCell:
    x: float
    y: float
    kind: str  # "0" to "5", or "nan"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatPlot:
    says: str
    cells: tuple[HeatCell, ...]
    cell: float
    width: float
    height: float
    largest: str
    has_nan: bool


def line_plot(chart: LineChart) -> LinePlot | None:
    """Both axes logarithmic: T and T² are straight lines of slope one and two. None when nothing is positive."""
    series = [(one.name, [(x, y) for x, y in one.points if x > 0 and y > 0]) for one in chart.series]
    series = [(name, points) for name, points in series if points]
    if not series:
        return None
    xs = sorted({x for _, points in series for x, _ in points})
    ys = [y for _, points in series for _, y in points]
    low, high = 2.0 ** math.floor(math.log2(min(ys))), 2.0 ** math.ceil(math.log2(max(ys)))
    if low == high:
        high *= 2

    def place(point: tuple[float, float]) -> tuple[float, float]:
        x_share = math.log(point[0] / xs[0]) / (math.log(xs[-1] / xs[0]) or 1.0)
        y_share = math.log(point[1] / low) / math.log(high / low)
        x = LEFT + (WIDTH - LEFT - RIGHT) * x_share
        return round(x, 1), round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * y_share, 1)

    octaves = round(math.log2(high / low))
    y_values = [low * 2.0**i for i in range(0, octaves + 1, max(1, math.ceil(octaves / 5)))]
    label_ys = _apart([place(points[-1])[1] for _, points in series], LABEL_GAP)
    curves = []
    for number, (name, points) in enumerate(series):
        dots = tuple(place(point) for point in points)
        path = "M" + "L".join(f"{x} {y}" for x, y in dots)
        label_at = (dots[-1][0] + 12, round(label_ys[number] + 4, 1))
        curves.append(Curve(name=name, number=number % 4, path=path, dots=dots, label_at=label_at))
    return LinePlot(
        says=_curves_said(chart, series),
        x_ticks=tuple(Tick(at=place((x, low))[0], label=f"{x:,.0f}") for x in _thinned(xs, 7)),
        y_ticks=tuple(Tick(at=place((xs[0], y))[1], label=_amount(y, chart.y_unit)) for y in y_values),
        curves=tuple(curves),
    )


def bar_plot(chart: BarChart) -> BarPlot:
    """Horizontal bars from zero, with their values written beside them."""
    most = max((value for _, value in chart.bars), default=0.0)
    room = WIDTH - BAR_LEFT - BAR_RIGHT
    bars = tuple(
        Bar(
            name=name,
            label=_amount(value, chart.unit),
            y=4 + i * BAR_HEIGHT,
            length=round(max(2.0, room * value / most), 1) if most > 0 else 2.0,
            own=name.startswith("yours"),
        )
        for i, (name, value) in enumerate(chart.bars)
    )
    says = "; ".join(f"{bar.name} {bar.label}" for bar in bars)
    return BarPlot(says=says, bars=bars, height=8 + BAR_HEIGHT * len(bars))


def heat_plot(chart: HeatMap) -> HeatPlot | None:
    """Block means as coloured cells, rows downwards. None when there is no cell."""
    grid = chart.values
    if not grid or not grid[0]:
        return None
    finite = [(value, i, j) for i, row in enumerate(grid) for j, value in enumerate(row) if value is not None]
    top, worst_row, worst_column = max(finite, default=(0.0, 0, 0))
    n_cells = sum(len(row) for row in grid)
    n_nan = n_cells - len(finite)
    n_large = sum(value > top / 10 for value, _, _ in finite) if top > 0 else 0
    says = f"{len(grid)} by {len(grid[0])} blocks, rows downwards."
    if top > 0:
        says += (
            f" The largest mean error is {error_text(top)}, in block row {worst_row + 1}, block column"
            f" {worst_column + 1}; {n_large} of {n_cells} blocks are above a tenth of it."
        )
    if n_nan:
        says += f" {n_nan} of {n_cells} blocks hold values that are not finite."
    cells = tuple(
        HeatCell(x=j * CELL, y=i * CELL, kind=_heat(value, top))
        for i, row in enumerate(grid)
        for j, value in enumerate(row)
    )
    return HeatPlot(
        says=says,
        cells=cells,
        cell=CELL - 1,
        width=max(len(row) for row in grid) * CELL - 1,
        height=len(grid) * CELL - 1,
        largest=error_text(top),
        has_nan=n_nan > 0,
    )


def _heat(value: float | None, top: float) -> str:
    if value is None:
        return "nan"
    # the square root lets small errors be seen beside large ones
    return str(min(HEAT_STEPS - 1, math.ceil((HEAT_STEPS - 1) * math.sqrt(value / top)))) if top > 0 else "0"


def _curves_said(chart: LineChart, series: Sequence[tuple[str, Sequence[tuple[float, float]]]]) -> str:
    parts = [
        f"{name}: " + ", ".join(f"{_amount(y, chart.y_unit)} at {x:,.0f}" for x, y in points) for name, points in series
    ]
    return f"{chart.y_label} against {chart.x_label}. " + "; ".join(parts) + "."


def _amount(value: float, unit: str) -> str:
    if unit == "bytes":
        return bytes_text(value).replace(".00 ", " ").replace(".0 ", " ")
    return f"{value:.3g} ms" if unit == "ms" else f"{value:,.0f}"


def _thinned(values: Sequence[float], most: int) -> list[float]:
    """At most so many of the values, the last one among them."""
    step = math.ceil(len(values) / most)
    return sorted(values[::-1][::step])


def _apart(wanted: Sequence[float], gap: float) -> list[float]:
    """Places at least `gap` apart, in the order of `wanted` and near it."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    found = list(wanted)
    for above, below in itertools.pairwise(order):
        found[below] = max(found[below], found[above] + gap)
    # a crowd at the bottom moves up together rather than over the axis
    over = max(0.0, max(found, default=0.0) - (HEIGHT - BOTTOM))
    for above in reversed(order):
        found[above] -= over
        over = max(0.0, over - gap)
    return found
