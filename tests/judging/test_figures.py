import pytest

from grader.figures import Bar, BarChart, HeatMap, Level, LineChart, Series, Whose, amount, is_empty, place, says


def lines(*series, levels=()):
    return LineChart(title="", x_label="T", y_label="peak", y_unit="bytes", series=series, levels=levels)


def cells(*rows):
    return HeatMap(title="", row_label="rows", column_label="columns", values=rows)


@pytest.mark.parametrize(
    ("value", "unit", "said"),
    [
        (65536.0, "bytes", "64 KiB"),
        (1.5 * 2**30, "bytes", "1.50 GiB"),
        (776.6e12, "FLOP/s", "777 TFLOP/s"),
        (1e13, "FLOP/s", "10 TFLOP/s"),
        (6.104, "times", "6.1×"),
        (12_345.0, "launches", "12,345"),
    ],
)
def test_numbers_are_as_short_as_they_can_be_read(value, unit, said):
    assert amount(value, unit) == said


def test_places_along_an_axis():
    assert [place(x) for x in (0.52, 7.91, 183.2, 65536)] == ["0.52", "7.91", "183", "65,536"]


def test_a_line_chart_says_its_numbers_and_what_they_are_held_against():
    own = Series(name="yours", whose=Whose.OWN, points=((64.0, 65536.0), (128.0, 131072.0)))
    beyond = Series(name="as it grows", whose=Whose.OWN, points=((128.0, 1.0), (256.0, 2.0)), measured=False)
    said = says(lines(own, beyond, levels=(Level(name="memory", value=2.0**30),)))
    assert said == "peak against T. yours: 64 KiB at 64, 128 KiB at 128. Held against: memory 1 GiB."


def test_bars_say_their_intervals():
    bars = (
        Bar(name="yours", whose=Whose.OWN, value=6.0, low=5.9, high=6.1),
        Bar(name="naive", whose=Whose.NAIVE, value=1.0),
    )
    said = says(BarChart(title="", unit="times", bars=bars, levels=(Level(name="all points", value=12.0),)))
    assert said == "yours 6× (between 5.9× and 6.1×); naive 1×. Held against: all points 12×."


def test_an_error_map_says_where_it_is_worst_and_what_is_not_finite():
    said = says(cells((0.0, 0.01), (1.0, None)))
    assert "in block row 2, block column 1; 1 of 4 blocks are above a tenth of it" in said
    assert "1 of 4 blocks hold values that are not finite" in said


@pytest.mark.parametrize(
    "chart",
    [
        pytest.param(lines(), id="no-curve"),
        pytest.param(lines(Series(name="yours", whose=Whose.OWN, points=((64.0, 0.0),))), id="no-positive-point"),
        pytest.param(BarChart(title="", unit="bytes", bars=()), id="no-bar"),
        pytest.param(
            BarChart(title="", unit="bytes", bars=(Bar(name="a", whose=Whose.OWN, value=0.0),)), id="only-zeros"
        ),
        pytest.param(cells(), id="no-row"),
        pytest.param(cells(()), id="no-cell"),
    ],
)
def test_a_chart_without_anything_to_show_is_empty_and_still_says_so_in_words(chart):
    assert is_empty(chart)
    assert says(chart)
