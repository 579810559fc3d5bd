"""Comparisons with the oracle: a number that fails any comparison fails the student's case."""

import json
import math

import pytest
import torch

from workers import numerics


def _compare(got, want, limit=1e-3):
    return numerics.compare(
        "o",
        got,
        want,
        torch.float32,
        said_shape=tuple(got.shape),
        said_dtype="float32",
        baseline=want.to(torch.float32),
        limit_of=limit,
    )


WANT = torch.tensor([[1.0, -2.0], [0.5, 4.0]], dtype=torch.float64)


def test_the_error_is_relative_to_the_largest_expected_value():
    got = WANT.clone().float()
    got[0, 0] += 0.04
    assert numerics.relative_error(got, WANT) == pytest.approx(0.01)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_has_no_error_and_is_counted(bad):
    got = WANT.clone().float()
    got[1, 0] = bad
    run = _compare(got, WANT)
    assert run.rel_error is None
    assert (run.n_not_finite, run.n_wrong) == (1, 1)
    assert run.first_wrong is not None
    assert (run.first_wrong.index, run.first_wrong.got, run.first_wrong.want) == ((1, 0), None, 0.5)


def test_a_wrong_shape_has_no_error_and_every_element_is_wrong():
    run = _compare(torch.zeros(4), WANT)
    assert (run.rel_error, run.n_wrong, run.shape, run.want_shape) == (None, 4, (4,), (2, 2))


def test_the_first_wrong_element_is_named_and_its_rows_are_counted():
    got = WANT.clone()
    got[0, 1] += 0.1
    got[1, 1] += 0.4
    run = _compare(got, WANT)
    assert run.first_wrong is not None
    assert (run.first_wrong.index, run.first_wrong.got, run.first_wrong.want) == ((0, 1), -1.9, -2.0)
    assert (run.n_wrong, run.wrong_rows, run.n_wrong_rows, run.n_rows) == (2, (0, 1), 2, 2)


def test_rows_are_the_second_last_axis():
    want = torch.ones(3, 5, 2, dtype=torch.float64)
    got = want.clone()
    got[2, 4, 0] = 3
    assert _compare(got, want).wrong_rows == (4,)


def test_the_error_map_has_block_means_and_at_most_16_by_16_blocks():
    want = torch.ones(64, 48, dtype=torch.float64)
    got = want.clone()
    got[:4, :3] = 2
    error_map = _compare(got, want).error_map
    assert (len(error_map), len(error_map[0])) == (16, 16)
    assert error_map[0][0] == pytest.approx(1.0)
    assert error_map[1][1] == 0.0


def test_an_error_map_is_small_as_json():
    want = torch.ones(4, 256, 64, dtype=torch.float64)
    got = want + torch.rand(want.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64) / 3
    found = _compare(got, want).error_map
    assert found[0][0] == pytest.approx(1 / 6, rel=0.2)
    assert len(json.dumps(found)) < 3500


def test_no_error_map_is_kept_of_a_right_output():
    assert _compare(WANT.clone(), WANT).error_map == ()


def test_a_mistake_that_is_nan_where_the_student_is_agrees_with_him():
    student = {"o": torch.tensor([1.0, math.nan])}
    found = numerics.mistake_on_probe("p", student, {"o": torch.tensor([1.0, math.nan])}, {"o": torch.ones(2)})
    assert (found.distance, found.own_error) == (0.0, None)


def test_a_mistake_that_is_finite_where_the_student_is_nan_is_not_comparable():
    student = {"o": torch.tensor([1.0, math.nan])}
    found = numerics.mistake_on_probe("p", student, {"o": torch.tensor([1.0, 2.0])}, {"o": torch.ones(2)})
    assert (found.distance, found.own_error) == (None, 1.0)
