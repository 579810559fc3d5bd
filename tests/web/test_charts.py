"""Where the marks of a chart go, and what it says to those who do not see it."""

from __future__ import annotations

import itertools
import math

import pytest

from grader.report import BarChart, HeatMap, LineChart, Series
from grader.web.charts import LABEL_GAP, bar_plot, heat_plot, line_plot


def memory(*curves: tuple[str, list[tuple[float, float]]]) -> LineChart:
    return LineChart(
        title="Memory",
        x_label="T",
        y_label="peak",
        y_unit="bytes",
        series=tuple(Series(name=name, points=tuple(points)) for name, points in curves),
    )


def test_a_power_law_is_a_straight_line_and_its_exponent_the_slope() -> None:
    sizes = [64.0, 128.0, 256.0]
    plot = line_plot(memory(("yours", [(t, 8 * t) for t in sizes]), ("naive", [(t, 8 * t * t) for t in sizes])))
    assert plot is not None
    rises = [[a[1] - b[1] for a, b in itertools.pairwise(c.dots)] for c in plot.curves]
    for steps in rises:
        assert steps[0] == pytest.approx(steps[1], abs=0.2)
    assert rises[1][0] == pytest.approx(2 * rises[0][0], abs=0.3)


def test_every_mark_lies_inside_the_frame_and_labels_do_not_overlap() -> None:
    plot = line_plot(memory(*((f"curve {i}", [(64.0, 512.0), (128.0, 1000.0 + i)]) for i in range(4))))
    assert plot is not None
    for curve in plot.curves:
        for x, y in curve.dots:
            assert plot.left <= x <= plot.right
            assert plot.top <= y <= plot.bottom
    ys = sorted(curve.label_at[1] for curve in plot.curves)
    assert all(b - a >= LABEL_GAP - 0.2 for a, b in itertools.pairwise(ys))
    assert ys[-1] <= plot.bottom + 5


def test_a_single_point_is_drawn_and_points_that_are_not_positive_are_left_out() -> None:
    plot = line_plot(memory(("yours", [(64.0, 512.0), (128.0, 0.0)])))
    assert plot is not None
    assert len(plot.curves[0].dots) == 1
    assert line_plot(memory(("yours", [(64.0, 0.0)]))) is None
    assert line_plot(memory()) is None


def test_a_line_chart_says_its_numbers() -> None:
    plot = line_plot(memory(("yours", [(64.0, 65536.0)])))
    assert plot is not None
    assert plot.says == "peak against T. yours: 64 KiB at 64."


def test_bars_are_as_long_as_their_values() -> None:
    plot = bar_plot(BarChart(title="Bytes", unit="bytes", bars=(("yours, unique", 1024.0), ("naive", 4096.0))))
    assert plot.bars[1].length == pytest.approx(4 * plot.bars[0].length, abs=0.5)
    assert [bar.own for bar in plot.bars] == [True, False]
    assert plot.says == "yours, unique 1 KiB; naive 4 KiB"
    assert bar_plot(BarChart(title="None", unit="launches", bars=(("yours", 0.0),))).bars[0].length > 0


def test_an_error_map_marks_the_worst_block_and_what_is_not_finite() -> None:
    chart = HeatMap(title="Map", row_label="rows", column_label="columns", values=((0.0, 0.01), (1.0, None)))
    plot = heat_plot(chart)
    assert plot is not None
    assert [cell.kind for cell in plot.cells] == ["0", "1", "5", "nan"]
    assert "in block row 2, block column 1; 1 of 4 blocks are above a tenth of it" in plot.says
    assert "1 of 4 blocks hold values that are not finite" in plot.says


@pytest.mark.parametrize("values", [(), ((),)])
def test_an_empty_map_is_not_drawn(values: tuple[tuple[float, ...], ...]) -> None:
    assert heat_plot(HeatMap(title="", row_label="", column_label="", values=values)) is None


def test_a_map_of_zeros_is_blank_and_finite() -> None:
    plot = heat_plot(HeatMap(title="", row_label="", column_label="", values=((0.0, 0.0),)))
    assert plot is not None
    assert {cell.kind for cell in plot.cells} == {"0"}
    assert math.isfinite(plot.width)
