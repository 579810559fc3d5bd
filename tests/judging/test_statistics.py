import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grader.statistics import (
    Interval,
    bootstrap_ratio,
    fit_exponent,
    last_exponent,
    predict,
    quantile,
    reach,
    tied,
)


@pytest.mark.parametrize("exponent", [0.0, 1.0, 1.5, 2.0])
def test_a_power_law_gives_its_exponent_back(exponent):
    sizes = [96, 192, 384, 768]
    assert fit_exponent(sizes, [3.0 * size**exponent for size in sizes]) == pytest.approx(exponent, abs=1e-12)
    assert last_exponent(sizes, [3.0 * size**exponent for size in sizes]) == pytest.approx(exponent, abs=1e-12)


def test_the_fit_is_the_least_squares_slope_in_log_space():
    # log2: (0, 0), (1, 1), (2, 4): slope of the best line is 2
    assert fit_exponent([1, 2, 4], [1, 2, 16]) == pytest.approx(2.0)


def test_the_last_step_is_not_biased_by_a_linear_part():
    sizes = [1024, 2048, 4096]
    values = [1000 * size + size * size for size in sizes]
    assert fit_exponent(sizes, values) < last_exponent(sizes, values) < 2


@pytest.mark.parametrize(
    ("sizes", "values"),
    [
        pytest.param([], [], id="nothing"),
        pytest.param([64], [3], id="one-size"),
        pytest.param([64, 64], [3, 4], id="one-size-twice"),
        pytest.param([64, 128], [0, 4], id="a-zero"),
    ],
)
def test_there_is_no_last_exponent_without_two_positive_points(sizes, values):
    assert last_exponent(sizes, values) is None


@pytest.mark.parametrize(
    ("sizes", "values"),
    [
        pytest.param([64], [1], id="one-size"),
        pytest.param([64, 128], [1], id="lengths-differ"),
        pytest.param([64, 128], [1, math.nan], id="nan"),
        pytest.param([64, 128], [0, 1], id="zero"),
    ],
)
def test_a_fit_refuses_what_has_no_slope(sizes, values):
    with pytest.raises(ValueError, match=r"."):
        fit_exponent(sizes, values)


def test_a_power_law_is_continued():
    assert predict([96, 192], [96**2, 192**2], 384) == pytest.approx(384**2)
    assert predict([96], [3], 384) is None


def test_the_bootstrap_is_exact_where_nothing_varies():
    found = bootstrap_ratio([6.0] * 5, [2.0] * 7, seed=1)
    assert (found.value, found.low, found.high) == (3.0, 3.0, 3.0)
    assert found.relative_width == 0.0


def test_the_bootstrap_repeats_itself_for_a_seed():
    rng = random.Random(5)
    naive, own = [rng.gauss(30, 1) for _ in range(12)], [rng.gauss(10, 0.2) for _ in range(12)]
    first, again = bootstrap_ratio(naive, own, seed=7), bootstrap_ratio(naive, own, seed=7)
    assert first == again
    assert bootstrap_ratio(naive, own, seed=8) != first
    assert first.low <= first.value <= first.high
    assert 2.8 < first.low < 3.0 < first.high < 3.2


def test_the_bootstrap_covers_the_true_ratio_about_as_often_as_it_says():
    rng = random.Random(11)
    hits = 0
    for i in range(100):
        naive, own = [rng.gauss(30, 1) for _ in range(25)], [rng.gauss(10, 0.3) for _ in range(25)]
        found = bootstrap_ratio(naive, own, seed=i, resamples=300)
        hits += found.low <= 3.0 <= found.high
    assert hits >= 88


@pytest.mark.parametrize("values", [[], [0.0], [math.nan], [-1.0], [math.inf]])
def test_a_ratio_needs_positive_times(values):
    with pytest.raises(ValueError, match=r"."):
        bootstrap_ratio(values, [1.0], seed=1)
    with pytest.raises(ValueError, match=r"."):
        bootstrap_ratio([1.0], values, seed=1)


def test_quantiles_lie_between_their_neighbours():
    assert quantile([1.0, 2.0, 4.0], 0.5) == 2.0
    assert quantile([1.0, 2.0, 4.0], 0.75) == 3.0
    assert quantile([1.0, 2.0, 4.0], 0.0) == 1.0
    assert quantile([1.0, 2.0, 4.0], 1.0) == 4.0
    assert quantile([5.0], 0.3) == 5.0


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        pytest.param((10, 9.9, 10.1), (10.05, 9.95, 10.15), True, id="within-noise"),
        pytest.param((10, 9.9, 10.1), (12, 11.9, 12.1), False, id="apart"),
        pytest.param((10, 5, 15), (12, 11.9, 12.1), True, id="one-is-noisy"),
        pytest.param((10, 10, 10), (10, 10, 10), True, id="equal"),
    ],
)
def test_noise_makes_ties(a, b, same):
    first, second = (Interval(value=value, low=low, high=high) for value, low, high in (a, b))
    assert tied(first, second) is same
    assert tied(second, first) is same


@given(
    values=st.lists(st.floats(0.1, 1e6), min_size=2, max_size=8, unique=True),
    scale=st.floats(0.01, 100),
)
def test_units_do_not_change_an_exponent(values, scale):
    sizes = [2**i for i in range(len(values))]
    assert last_exponent(sizes, values) == pytest.approx(last_exponent(sizes, [v * scale for v in values]), abs=1e-6)
    assert fit_exponent(sizes, values) == pytest.approx(fit_exponent(sizes, [v * scale for v in values]), abs=1e-6)


@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0])
def test_a_law_reaches_a_value_where_it_predicts_it(exponent):
    sizes = [64, 128]
    values = [10 * size**exponent for size in sizes]
    at = reach(sizes, values, 1e9)
    assert predict(sizes, values, at) == pytest.approx(1e9)


@pytest.mark.parametrize("values", [[5.0], [5.0, 5.0], [5.0, 4.0], [0.0, 5.0]], ids=["one", "flat", "falling", "zero"])
def test_what_does_not_grow_reaches_nothing(values):
    assert reach([64, 128][: len(values)], values, 1e9) is None
