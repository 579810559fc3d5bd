"""Charts of a report as SVG, drawn on the server by Vega-Lite. docs/decisions/0006-charts.md has the reasons.

Colours are variables of the style sheet, so one drawing serves light and dark, the page and the print; text stays text.
A drawing holds no script, no style sheet and no style attribute, so the strictest content policy allows it.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import logging
import math
import os
import re
import threading
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from markupsafe import Markup

from grader.figures import Bar, BarChart, Chart, HeatMap, LineChart, Whose, amount, is_empty, place
from grader.web.drawing import Engine, NoDrawingError
from grader.wording import error_text

WIDTH = 310  # of a drawing with its labels: a telephone's column, so that text is never scaled down by much
HEIGHT = 210
BAR_STEP = 40
CELL_STEP = 16
HEAT_STEPS = 6  # --heat-0 to --heat-5 of the style sheet
MOST_TICKS = 5
KEPT_IN_MEMORY = 512

# colour, broken line, shape and its size: no reader depends on one of them alone. The student's marks lie on top, and
# those below are larger, so that equal numbers are seen to be equal. The page's key shows the same shapes
_LOOKS: dict[Whose, tuple[str, list[int], str, int]] = {
    Whose.OWN: ("var(--chart-own)", [1, 0], "circle", 70),
    Whose.OWN_BACKWARD: ("var(--chart-own-backward)", [7, 3], "diamond", 120),
    Whose.NAIVE: ("var(--chart-naive)", [5, 3], "square", 110),
    Whose.REFERENCE: ("var(--chart-reference)", [2, 3], "triangle-up", 360),
    Whose.LIMIT: ("var(--chart-limit)", [1, 0], "circle", 70),
}
_SIGNS = {Whose.OWN: "●", Whose.OWN_BACKWARD: "◆", Whose.NAIVE: "■", Whose.REFERENCE: "▲", Whose.LIMIT: "━"}
_LEVEL_RULE = {"type": "rule", "stroke": "var(--chart-limit)", "strokeDash": [4, 3], "strokeWidth": 1.5}
_CONTINUED_DASH = [1, 4]
_ONE_ROW: dict[str, Any] = {"values": [{}]}
_FIT = {"type": "fit", "contains": "padding"}
_CONFIG = {
    "aria": False,  # the page says what the whole drawing shows; see `grader.figures.says`
    "font": "sans-serif",
    "padding": {"left": 8, "right": 8, "top": 4, "bottom": 4},  # the reader's font may be wider than ours
    "view": {"stroke": None},
    "axis": {
        "labelColor": "var(--soft)",
        "labelFontSize": 12,
        "gridColor": "var(--line)",
        "domainColor": "var(--strong-line)",
        "ticks": False,
        "labelPadding": 5,
    },
    "text": {"fontSize": 12, "fill": "var(--ink)"},
}
_OPENING = re.compile(r'<svg [^>]*viewBox="0 0 ([0-9.]+) ([0-9.]+)">')
_ENGINE = Engine()
_log = logging.getLogger(__name__)


class Gallery:
    """Draws each chart once and keeps it: in memory, and on disk for after a restart.

    Drawing takes some ten milliseconds of a processor, and the first one of a process a second. So another process
    draws (`grader.web.drawing`), one chart after the other, and a page waits no longer than it wants to.
    """

    def __init__(self, folder: Path) -> None:
        """`folder` is made when the first drawing is kept; several processes may share it."""
        self._folder = folder
        self._memory: OrderedDict[str, str] = OrderedDict()
        self._lock = threading.Lock()
        self._draughtsman = ThreadPoolExecutor(max_workers=1, thread_name_prefix="charts")
        self._on_the_table: dict[str, Future[str | None]] = {}

    def drawn(self, charts: Sequence[Chart], *, wait_s: float, keep: bool = True) -> dict[Chart, Markup]:
        """SVG of every chart that is ready in time; the others are drawn all the same, for whoever asks next.

        It is empty where there never will be a drawing. A chart with nothing to show is left out.

        Args:
            keep: on disk, too. Not what a reader may ask for in a million ways.
        """
        # Vega escapes every text that it puts into a drawing
        found: dict[Chart, Markup] = {}
        pending: dict[Chart, Future[str | None]] = {}
        for chart in charts:
            if not is_empty(chart):
                asked = json.dumps(_specification(chart), sort_keys=True)
                digest = hashlib.sha256(f"{_engine()} {asked}".encode()).hexdigest()
                svg = self._kept(digest)
                if svg is None and _ENGINE.unable:
                    svg = ""
                if svg is not None:
                    found[chart] = Markup(svg)  # noqa: S704
                else:
                    pending[chart] = self._ask_for(asked, digest, keep)
        wait(pending.values(), timeout=wait_s)
        drawn = {chart: future.result() for chart, future in pending.items() if future.done()}
        return found | {chart: Markup(svg) for chart, svg in drawn.items() if svg is not None}  # noqa: S704

    def _kept(self, digest: str) -> str | None:
        with self._lock:
            if digest in self._memory:
                self._memory.move_to_end(digest)
                return self._memory[digest]
        try:
            svg = gzip.decompress(self._path(digest).read_bytes()).decode()
        except (OSError, EOFError, zlib.error):  # never drawn, or half written when the host stopped
            return None
        self._remember(digest, svg)
        return svg

    def _ask_for(self, asked: str, digest: str, keep: bool) -> Future[str | None]:
        with self._lock:
            if digest in self._memory:  # finished since it was looked for
                ready: Future[str | None] = Future()
                ready.set_result(self._memory[digest])
                return ready
            if digest not in self._on_the_table:
                self._on_the_table[digest] = self._draughtsman.submit(self._draw_and_keep, asked, digest, keep)
            return self._on_the_table[digest]

    def _draw_and_keep(self, asked: str, digest: str, keep: bool) -> str | None:
        """The drawing; empty when the engine refuses, None when it may do better the next time."""
        try:
            svg = _draw(asked)
            self._remember(digest, svg)
            if keep:
                with contextlib.suppress(OSError):  # a full disk costs time, not the chart
                    self._write(digest, svg)
        except NoDrawingError as exc:
            self._remember(digest, "")
            if not _ENGINE.unable:  # which has been said
                _log.warning("a chart cannot be drawn: %s", exc)
            return ""
        except ValueError as exc:
            _log.warning("a chart was not drawn: %s", exc)
            return None
        finally:
            with self._lock:
                self._on_the_table.pop(digest, None)
        return svg

    def _write(self, digest: str, svg: str) -> None:
        path = self._path(digest)
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(f".{os.getpid()}")
        aside.write_bytes(gzip.compress(svg.encode(), mtime=0))
        aside.replace(path)  # whole or not at all, whoever reads meanwhile

    def _remember(self, digest: str, svg: str) -> None:
        with self._lock:
            self._memory[digest] = svg
            while len(self._memory) > KEPT_IN_MEMORY:
                self._memory.popitem(last=False)

    def _path(self, digest: str) -> Path:
        return self._folder / digest[:2] / f"{digest}.svgz"


@cache
def _engine() -> str:
    """What would draw: another version's drawings are other drawings."""
    try:
        return version("vl-convert-python")
    except PackageNotFoundError:  # the engine says so, and what to do
        return "none"


def warm_up() -> None:
    """Start the drawing engine, which takes a second, so that nobody has to wait for it.

    Where it cannot draw, a line in the log says why, and pages are shown without drawings.
    """
    try:
        draw(BarChart(title="", unit="", bars=(Bar(name="", whose=Whose.OWN, value=1.0),)))
    except ValueError as exc:
        if not _ENGINE.unable:  # which has been said
            _log.warning("charts cannot be drawn just now: %s", exc)


def draw(chart: Chart) -> str:
    """The chart as an SVG element without a title, in colours that the style sheet defines.

    Raises:
        ValueError: the chart has nothing to show, or the engine refuses it.
    """
    if is_empty(chart):
        raise ValueError("there is nothing to draw")
    return _draw(json.dumps(_specification(chart)))


def key(chart: LineChart | BarChart) -> list[tuple[str, str, str]]:
    """(class of the colour, sign, name) of everything that a drawing does not name itself."""
    found: list[tuple[str, str, str]] = []
    if isinstance(chart, LineChart):
        found = [(s.whose.value, _SIGNS[s.whose] if s.measured else "┈", s.name) for s in chart.series]
    else:
        if any(bar.low is not None for bar in chart.bars):
            found.append(("interval", "├┤", "95 % interval"))
    unit = chart.y_unit if isinstance(chart, LineChart) else chart.unit
    sign = "┅" if isinstance(chart, LineChart) else "┃"
    return found + [("limit", sign, f"{level.name}: {amount(level.value, unit)}") for level in chart.levels]


def axes(chart: Chart) -> str:
    """What goes up and what goes along, in words: a drawing has no room for them on a telephone."""
    if isinstance(chart, LineChart):
        return f"{chart.y_label} against {chart.x_label}, both axes logarithmic"
    if isinstance(chart, HeatMap):
        return f"down: {chart.row_label}" + (f"; across: {chart.column_label}" if chart.column_label else "")
    return ""


def largest(chart: HeatMap) -> str:
    """What the darkest colour stands for."""
    return error_text(max((value for row in chart.values for value in row if value is not None), default=0.0))


def _draw(asked: str) -> str:
    svg = _ENGINE.draw(asked)
    opening = _OPENING.match(svg)
    if opening is None:
        raise ValueError("the engine's SVG does not begin as it used to")
    # the page gives it a width; the namespaces are those of the page
    return f'<svg viewBox="0 0 {opening[1]} {opening[2]}" aria-hidden="true">{svg[opening.end() :]}'


def _specification(chart: Chart) -> dict[str, Any]:
    if isinstance(chart, LineChart):
        found = _lines(chart)
    elif isinstance(chart, BarChart):
        found = _bars(chart)
    else:
        found = _cells(chart)
    return {"$schema": "https://vega.github.io/schema/vega-lite/v6.json", "background": None, "config": _CONFIG} | found


def _lines(chart: LineChart) -> dict[str, Any]:
    """Both axes logarithmic: T and T² are straight lines of slope one and two."""
    base = 2 if chart.y_unit == "bytes" else 10
    curves = [(series, [(x, y) for x, y in series.points if x > 0 and y > 0]) for series in chart.series]
    x_ends = _ends([x for _, points in curves for x, _ in points])
    y_ends = _ends([*(y for _, points in curves for _, y in points), *(level.value for level in chart.levels)])
    x_ticks = _ticks(x_ends, base)
    if base == 2:  # the sizes that were measured
        x_ticks = _thinned(sorted({x for series, points in curves if series.measured for x, _ in points}))
    y_ticks = _ticks(y_ends, base)
    in_x = _log_axis(x_ends, _axis(x_ticks, [place(tick) for tick in x_ticks]))
    in_y = _log_axis(y_ends, _axis(y_ticks, [amount(tick, chart.y_unit) for tick in y_ticks]))
    layers: list[dict[str, Any]] = []
    for level in chart.levels:
        across = {"x": {"value": 0}, "x2": {"value": "width"}, "y": {"datum": level.value, **in_y}}
        layers.append({"data": _ONE_ROW, "mark": _LEVEL_RULE, "encoding": across})
    for series, points in reversed(curves):
        colour, dash, shape, size = _LOOKS[series.whose]
        shared = {
            "data": {"values": [{"x": x, "y": y} for x, y in points]},
            "encoding": {"x": {"field": "x", **in_x}, "y": {"field": "y", **in_y}},
        }
        if series.joined:
            broken = dash if series.measured else _CONTINUED_DASH
            layers.append(
                {"mark": {"type": "line", "stroke": colour, "strokeDash": broken, "strokeWidth": 2}, **shared}
            )
        if series.measured and series.whose is not Whose.LIMIT:
            filled = {"fill": colour, "stroke": "var(--card)", "opacity": 1}
            layers.append({"mark": {"type": "point", "shape": shape, "size": size, **filled}, **shared})
    return {"width": WIDTH, "height": HEIGHT, "autosize": _FIT, "layer": layers}


def _bars(chart: BarChart) -> dict[str, Any]:
    """Horizontal bars from zero, each under its name and value, so that no name is too long."""
    end = max([bar.high or bar.value for bar in chart.bars] + [level.value for level in chart.levels]) * 1.03
    rows = [
        {
            "row": number,
            "value": bar.value,
            "low": bar.low,
            "high": bar.high,
            "said": f"{bar.name}: {amount(bar.value, chart.unit)}",
            "colour": _LOOKS[bar.whose][0],
        }
        for number, bar in enumerate(chart.bars)
    ]
    colours = [row["colour"] for row in rows]
    fill = {"field": "colour", "type": "nominal", "scale": {"domain": colours, "range": colours}, "legend": None}
    y = {"field": "row", "type": "ordinal", "axis": None}
    length: dict[str, Any] = {"type": "quantitative", "scale": {"domain": [0, end], "nice": False}, "axis": None}
    if chart.levels:
        values = [level.value for level in chart.levels]
        length["axis"] = {**_axis(values, [amount(value, chart.unit) for value in values]), "grid": False}
    bar_of = {"x": {"field": "value", **length}, "y": y, "fill": fill}
    layers: list[dict[str, Any]] = [{"mark": {"type": "bar", "height": 13, "yOffset": 9}, "encoding": bar_of}]
    # across every bar and no further, for above each stand its words; outlined, to be seen upon a bar as well
    across = {"type": "tick", "thickness": 4, "size": 17, "yOffset": 9, "stroke": "var(--card)", "strokeWidth": 1}
    layers += [
        {"mark": across | {"color": "var(--chart-limit)"}, "encoding": {"x": {"datum": level.value, **length}, "y": y}}
        for level in chart.levels
    ]
    words = {"type": "text", "align": "left", "baseline": "bottom", "x": 0}
    layers.append({"mark": words, "encoding": {"y": y, "text": {"field": "said", "type": "nominal"}}})
    if any(bar.low is not None for bar in chart.bars):
        ink = {"color": "var(--ink)", "yOffset": 9}
        ends = {"x": {"field": "low", **length}, "x2": {"field": "high"}, "y": y}
        layers.append({"mark": {"type": "rule", "strokeWidth": 2, **ink}, "encoding": ends})
        for which in ("low", "high"):
            cap = {"type": "tick", "thickness": 2, "size": 9, **ink}
            layers.append({"mark": cap, "encoding": {"x": {"field": which, **length}, "y": y}})
    height = BAR_STEP * len(rows) + (24 if chart.levels else 4)
    return {"width": WIDTH, "height": height, "autosize": _FIT, "data": {"values": rows}, "layer": layers}


def _cells(chart: HeatMap) -> dict[str, Any]:
    """Block means as coloured cells, rows downwards; what is not finite is crossed out."""
    top = max((value for row in chart.values for value in row if value is not None), default=0.0)
    rows = [
        {"x": j, "y": i, "k": _heat(value, top)} for i, row in enumerate(chart.values) for j, value in enumerate(row)
    ]
    kinds = [str(step) for step in range(HEAT_STEPS)]
    fill = {
        "field": "k",
        "type": "nominal",
        "scale": {"domain": [*kinds, "nan"], "range": [*(f"var(--heat-{kind})" for kind in kinds), "var(--card)"]},
        "legend": None,
    }
    layers: list[dict[str, Any]] = [
        {"mark": {"type": "rect", "stroke": "var(--card)", "strokeWidth": 1}, "encoding": {"fill": fill}}
    ]
    if any(row["k"] == "nan" for row in rows):
        cross = {"type": "text", "text": "×", "fill": "var(--bad)", "fontSize": 13}
        layers.append({"transform": [{"filter": "datum.k === 'nan'"}], "mark": cross})
    return {
        "width": {"step": CELL_STEP},
        "height": {"step": CELL_STEP},
        "data": {"values": rows},
        "encoding": {
            "x": {"field": "x", "type": "ordinal", "axis": None},
            "y": {"field": "y", "type": "ordinal", "axis": None},
        },
        "layer": layers,
    }


def _heat(value: float | None, top: float) -> str:
    if value is None:
        return "nan"
    # the square root lets small errors be seen beside large ones
    return str(min(HEAT_STEPS - 1, math.ceil((HEAT_STEPS - 1) * math.sqrt(value / top)))) if top > 0 else "0"


def _ends(values: Sequence[float]) -> list[float]:
    """A logarithmic axis with a little room on both sides."""
    low, high = min(values), max(values)
    room = max(1.15, (high / low) ** 0.04)
    return [low / room, high * room]


def _ticks(ends: Sequence[float], base: int) -> list[float]:
    """Ticks of a logarithmic axis: evenly spaced powers of the base, or 1, 2 and 5 of each ten where tens are few."""
    first = math.ceil(math.log(ends[0], base) - 1e-9)
    last = math.floor(math.log(ends[1], base) + 1e-9)
    if base == 10 and last - first < 2:
        steps = [digit * 10.0**power for power in range(first - 1, last + 1) for digit in (1, 2, 5)]
        return [step for step in steps if ends[0] <= step <= ends[1]]
    return [float(base) ** i for i in range(first, last + 1, max(1, math.ceil((last - first + 1) / MOST_TICKS)))]


def _thinned(values: Sequence[float]) -> list[float]:
    """At most so many of the values, the last one among them."""
    step = math.ceil(len(values) / MOST_TICKS)
    return sorted(values[::-1][::step])


def _log_axis(ends: Sequence[float], axis: dict[str, Any]) -> dict[str, Any]:
    return {"type": "quantitative", "scale": {"type": "log", "domain": list(ends), "nice": False}, "axis": axis}


def _axis(values: Sequence[float], labels: Sequence[str]) -> dict[str, Any]:
    """An axis with these ticks and words; Vega's own formats know neither KiB nor times."""
    words = [
        f"abs(datum.value / {value!r} - 1) < 1e-6 ? {json.dumps(label)}"
        for value, label in zip(values, labels, strict=True)
    ]
    return {"title": None, "values": list(values), "labelExpr": " : ".join([*words, "''"])}
