"""What windows of calls mean, as numbers."""

import pytest

from workers import timing


@pytest.mark.parametrize(
    ("pilot_ms", "input_bytes", "output_bytes", "n_calls"),
    [
        pytest.param(1.0, 1 << 20, 1 << 20, 110, id="time-decides"),
        pytest.param(0.001, 1 << 28, 1 << 20, 64, id="memory-for-inputs-decides"),
        pytest.param(0.001, 1 << 20, 1 << 28, 32, id="memory-for-outputs-decides"),
        pytest.param(0.001, 1 << 10, 1 << 10, 1024, id="the-frame-decides"),
        pytest.param(900.0, 1 << 20, 1 << 20, 2, id="never-one-alone"),
    ],
)
def test_a_window_is_as_long_as_time_memory_and_frame_allow(pilot_ms, input_bytes, output_bytes, n_calls):
    need = timing.Need(
        input_bytes=input_bytes, input_room_bytes=1 << 34, output_bytes=output_bytes, output_room_bytes=1 << 33
    )
    assert timing.calls_in_window(pilot_ms=pilot_ms, need=need, n_outputs=2) == n_calls


def test_an_empty_window_is_subtracted_from_a_full_one():
    assert timing.per_call_ms(101.0, 100, 1.0) == pytest.approx(1.0)


def test_a_window_shorter_than_an_empty_one_takes_nothing_rather_than_less():
    assert timing.per_call_ms(0.5, 10, 1.0) == 0.0


def test_nobody_always_comes_second():
    first = {timing.turn(["naive", "student"], number)[0] for number in range(4)}
    assert first == {"naive", "student"}


def test_equal_windows_are_enough_after_five_rounds_and_not_before():
    assert not timing.enough([10.0] * 4, [2.0] * 4, seed=1)
    assert timing.enough([10.0] * 5, [2.0] * 5, seed=1)


def test_scattered_windows_are_never_enough_and_noisy():
    naive, student = [10.0, 14.0, 9.0, 13.0, 8.0], [2.0, 3.0, 1.5, 2.5, 2.2]
    assert not timing.enough(naive, student, seed=1)
    assert timing.is_noisy(timing.ratio(naive, student, seed=1))


def test_the_same_windows_give_the_same_interval():
    naive, student = [10.0, 10.1, 9.9, 10.2, 9.8], [2.0, 2.01, 1.99, 2.02, 1.98]
    assert timing.ratio(naive, student, seed=7) == timing.ratio(naive, student, seed=7)


@pytest.mark.parametrize(
    ("fill_ms", "idle"),
    [
        pytest.param(3.0, True, id="as-ever"),
        pytest.param(5.7, True, id="within-the-slack"),
        pytest.param(11.4, False, id="somebody-s-kernel-runs"),
        pytest.param(float("nan"), False, id="nan-is-not-idle"),
    ],
)
def test_writing_the_inputs_takes_its_idle_time_or_somebody_runs(fill_ms, idle):
    assert timing.fill_was_idle(fill_ms, idle_ms=3.0) is idle


@pytest.mark.parametrize(
    ("first_ms", "agrees"),
    [
        pytest.param([3.9, 4.0, 3.8], True, id="a-call-and-its-launch"),
        pytest.param([120.0, 118.0, 121.0], False, id="the-first-does-the-work-of-all"),
    ],
)
def test_one_call_alone_takes_what_its_share_says(first_ms, agrees):
    assert timing.first_call_agrees(first_ms=first_ms, empty_ms=[1.0, 1.1], per_call=2.7) is agrees


def test_a_baseline_far_from_its_record_is_out_of_its_band():
    assert timing.in_band(10.5, 10.0)
    assert not timing.in_band(12.0, 10.0)


@pytest.mark.parametrize(
    ("took_ms", "n_calls", "room_calls", "more"),
    [
        pytest.param(103.0, 680, 4000, None, id="as-long-as-it-should-be"),
        pytest.param(56.0, 20, 4000, None, id="half-of-it-will-do"),
        pytest.param(4.0, 2, 4000, 55, id="two-calls-after-a-slow-pilot"),
        pytest.param(20.0, 50, 60, None, id="memory-allows-hardly-more"),
        pytest.param(20.0, 50, 90, 90, id="memory-allows-many-more"),
        pytest.param(30.0, 1024, 4000, None, id="a-frame-allows-no-more"),
    ],
)
def test_a_window_that_was_too_short_gets_more_calls_where_more_fit(took_ms, n_calls, room_calls, more):
    need = timing.Need(input_bytes=1, input_room_bytes=room_calls, output_bytes=1, output_room_bytes=room_calls)
    found = timing.more_calls(took_ms=took_ms, n_calls=n_calls, need=need, n_outputs=2, window_ms=110.0)
    assert found == more
