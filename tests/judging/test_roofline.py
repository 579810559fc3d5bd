import dataclasses

import pytest

from grader.measurement import Ceilings, Timing
from grader.roofline import is_too_fast, roofline, share_of_limit

CEILINGS = Ceilings(copy_bytes_per_s=4e12, flops_per_s={"bfloat16": 800e12})


def test_little_work_on_many_bytes_is_bound_by_memory():
    roof = roofline(time_ms=1.0, flops=10**9, traffic_bytes=2 * 10**9, dtype="bfloat16", ceilings=CEILINGS)
    assert roof.bound == "memory"
    assert roof.floor_ms == pytest.approx(0.5)
    assert roof.fraction == pytest.approx(0.5)
    assert roof.bytes_per_s == pytest.approx(2e12)


def test_much_work_on_few_bytes_is_bound_by_arithmetic():
    roof = roofline(time_ms=2.0, flops=8 * 10**11, traffic_bytes=10**7, dtype="bfloat16", ceilings=CEILINGS)
    assert roof.bound == "compute"
    assert roof.flops_per_s == pytest.approx(400e12)
    assert roof.intensity == pytest.approx(80_000)


def test_a_time_below_the_floor_is_too_fast_and_one_at_it_is_not():
    assert is_too_fast(0.3, 0.5)
    assert not is_too_fast(0.5, 0.5)


def test_the_ceilings_meet_where_both_floors_are_equal():
    flops, traffic = 2 * 10**12, 10**10  # 200 FLOP a byte, as 800 TFLOP/s to 4 TB/s
    roof = roofline(time_ms=5.0, flops=flops, traffic_bytes=traffic, dtype="bfloat16", ceilings=CEILINGS)
    assert roof.intensity == roof.ridge == 200
    assert roof.floor_ms == pytest.approx(2.5)
    assert roof.fraction == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("changes", "ceilings", "share"),
    [
        pytest.param({}, CEILINGS, 0.25, id="of-the-median-time"),
        pytest.param({}, None, None, id="ceilings-not-measured"),
        pytest.param({"dtype": "float8"}, CEILINGS, None, id="no-ceiling-for-this-dtype"),
        pytest.param({"least_bytes": 0}, CEILINGS, None, id="work-not-counted"),
        pytest.param({"student_times_ms": ()}, CEILINGS, None, id="not-timed"),
    ],
)
def test_the_share_of_the_limit_is_told_where_it_is_known(changes, ceilings, share):
    timing = Timing(
        axes={},
        student_times_ms=(1.0, 2.0, 9.0),
        naive_times_ms=(9.0,),
        reference_times_ms=(1.0,),
        ratio=4.5,
        ratio_low=4.4,
        ratio_high=4.6,
        noisy=False,
        dtype="bfloat16",
        flops=10**9,
        least_bytes=2 * 10**9,
    )
    assert share_of_limit(dataclasses.replace(timing, **changes), ceilings) == share
