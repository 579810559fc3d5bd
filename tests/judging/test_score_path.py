"""The arithmetic of the lesson's widget, held to the lesson's own numbers and to what the grader measures."""

from __future__ import annotations

import dataclasses
import gzip
from pathlib import Path

import pytest

from grader import measurement
from grader.figures import amount
from grader.measurement import Examination
from grader.score_path import (
    ITEM_BYTES,
    Mode,
    Shape,
    at,
    flash_bytes,
    longest_flash,
    longest_naive,
    naive_bytes,
    said,
)

# the lesson's example: 8 sequences, 32 heads, bfloat16, on a GPU of 80 GB
LESSON = Shape(batch=8, heads=32, head_dim=128, dtype="bfloat16")
H100 = 80 * 10**9
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("t", "size", "text"),
    [
        pytest.param(1024, 536_870_912, "537 MB", id="1k"),
        pytest.param(2048, 2_147_483_648, "2.15 GB", id="2k"),
        pytest.param(8192, 34_359_738_368, "34.4 GB", id="8k"),
        pytest.param(16384, 137_438_953_472, "137 GB", id="16k"),
    ],
)
def test_the_score_matrix_is_batch_heads_t_squared(t: int, size: int, text: str) -> None:
    assert naive_bytes(LESSON, t, Mode.CAPACITY) == size
    assert amount(size, "B") == text


def test_naive_runs_out_of_80_gb_at_about_twelve_thousand_tokens_and_flash_does_not_notice() -> None:
    assert longest_naive(LESSON, H100) == 12_500
    assert naive_bytes(LESSON, 12_500, Mode.CAPACITY) <= H100 < naive_bytes(LESSON, 12_501, Mode.CAPACITY)
    assert flash_bytes(LESSON, 100_000, Mode.CAPACITY) < H100 / 10
    assert longest_flash(LESSON, H100) == H100 // (8 * 32 * (128 * 2 + 4))


@pytest.mark.parametrize("dtype", ITEM_BYTES)
@pytest.mark.parametrize("memory_bytes", [1, 10**9, 80 * 10**9, 141 * 10**9])
def test_the_crossing_point_is_the_last_t_that_fits(dtype: str, memory_bytes: int) -> None:
    shape = dataclasses.replace(LESSON, dtype=dtype)
    for longest, needs in ((longest_naive, naive_bytes), (longest_flash, flash_bytes)):
        t = longest(shape, memory_bytes)
        assert needs(shape, t, Mode.CAPACITY) <= memory_bytes < needs(shape, t + 1, Mode.CAPACITY)


@pytest.mark.parametrize("mode", Mode)
def test_twice_the_tokens_are_four_times_naive_and_twice_flash(mode: Mode) -> None:
    small, large = at(LESSON, 1 << 20, mode), at(LESSON, 1 << 21, mode)
    assert large.flash == 2 * small.flash
    assert large.naive == pytest.approx(4 * small.naive, rel=1e-4)


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("t", [1, 77, 4096])
def test_heads_and_sequences_are_alike_and_independent(t: int, mode: Mode) -> None:
    one = Shape(batch=1, heads=1, head_dim=64, dtype="float32")
    many = Shape(batch=6, heads=5, head_dim=64, dtype="float32")
    assert naive_bytes(many, t, mode) == 30 * naive_bytes(one, t, mode)
    assert flash_bytes(many, t, mode) == 30 * flash_bytes(one, t, mode)


def test_naive_moves_the_scores_four_times_and_never_less_than_flash() -> None:
    rows = 8 * 32 * 4096 * 128 * 2
    assert naive_bytes(LESSON, 4096, Mode.TRAFFIC) == 4 * naive_bytes(LESSON, 4096, Mode.CAPACITY) + 4 * rows
    assert all(at(LESSON, t, Mode.TRAFFIC).times >= 1 for t in (1, 2, 128, 4096))


def right_file() -> Examination:
    """What was measured of a right file: tests/corpus/flash-attention-forward/ok-block-pointers.py."""
    path = ROOT / "tests" / "web" / "examinations" / "ok-block-pointers.json.gz"
    return measurement.loads(gzip.decompress(path.read_bytes()).decode())


def test_a_right_kernel_is_measured_at_exactly_these_bytes() -> None:
    found = right_file()
    swept = Shape(batch=2, heads=1, head_dim=64, dtype="float32")
    assert [point.peak_bytes for point in found.memory] == [
        flash_bytes(swept, point.size, Mode.CAPACITY) for point in found.memory
    ]
    audit = found.audit
    assert audit is not None
    audited = Shape(batch=audit.axes["batch"], heads=1, head_dim=audit.axes["head_dim"], dtype="float32")
    assert audit.unique_bytes == flash_bytes(audited, audit.axes["keys"], Mode.TRAFFIC)


def test_the_crossing_point_is_said_in_words() -> None:
    crossing, here = said(LESSON, t=8192, memory_bytes=H100, mode=Mode.CAPACITY)
    assert crossing.startswith("Naive crosses the 80 GB line at T = 12,500: ")
    assert crossing.endswith("Flash crosses it at T = 1,201,923.")
    assert here == "At T = 8,192 the score matrix is 34.4 GB, 63 times the 545 MB that Flash writes."
    _, short = said(LESSON, t=64, memory_bytes=H100, mode=Mode.CAPACITY)
    assert short == "At T = 64 the score matrix is 2.10 MB, still less than the 4.26 MB that Flash writes."


def test_of_traffic_the_head_dim_is_the_crossing_point() -> None:
    crossing, here = said(LESSON, t=8192, memory_bytes=H100, mode=Mode.TRAFFIC)
    assert crossing.startswith("Above T = 128, the head dim, ")
    assert here == "At T = 8,192 naive moves 140 GB, 65 times the 2.16 GB that Flash moves."
    scores, rows = (naive_bytes(LESSON, 128, mode) for mode in (Mode.CAPACITY, Mode.TRAFFIC))
    assert 2 * 4 * scores == rows
