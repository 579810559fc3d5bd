"""Numbers about windows of calls: how many calls, which order, when to stop, what to believe. No clock and no GPU here.

A window is K calls between two readings of the examiner's clock. Windows of the student's file and of the baselines
alternate, so that drift and overheads meet both; the score is a ratio of medians.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

from grader.statistics import Interval, bootstrap_ratio

T = TypeVar("T")

WINDOW_MS = 110.0  # of the student's file at the headline size: long enough that what surrounds it is lost in it
SHORT_WINDOW_MS = 45.0  # of the naive baseline there
OTHER_WINDOW_MS = 30.0  # of both at other sizes
SPOT_WINDOW_MS = 25.0  # of the reference
MOST_OUTPUTS = 2048  # of a window: their addresses still fit one frame
# A window shorter than that part of what it should be had too few calls, if half as many again would fit. On an H200
# pilots of correct files with 0.15 to 1.6 ms a call led to windows of 0.93 to 1.04 of it.
SHORT = 0.5
LEAST_ROUNDS = 5
WANTED_HALF_WIDTH = 0.01  # of the 95 % interval, relative

# An idle GPU fills the inputs in a time of its own; one that runs somebody's kernel takes longer.
FILL_SLACK = 1.6
FILL_GRACE_MS = 1.0

# One call alone shows its launch, which a window hides: that much more than its share of a window is honest.
FIRST_CALL_SLACK = 1.25
FIRST_CALL_GRACE_MS = 0.5
EVENTS_BAND = 0.3
EVENTS_GRACE_MS = 0.02

BAND = 0.15  # how far a baseline's time may lie from its record on this GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Memory that each call of a window has to itself, and the room there is for all of them."""

    input_bytes: int
    input_room_bytes: int
    output_bytes: int
    output_room_bytes: int

    @property
    def most_calls(self) -> int:
        return min(
            self.input_room_bytes // max(1, self.input_bytes), self.output_room_bytes // max(1, self.output_bytes)
        )


def calls_in_window(*, pilot_ms: float, need: Need, n_outputs: int, window_ms: float = WINDOW_MS) -> int:
    """Choose K from a pilot, so that a window lasts `window_ms` where memory for K inputs and outputs allows.

    Args:
        pilot_ms: one call, roughly.
        n_outputs: tensors that one call gives.
    """
    by_time = math.ceil(window_ms / max(pilot_ms, 1e-4))
    return max(2, min(by_time, need.most_calls, MOST_OUTPUTS // n_outputs))


def more_calls(*, took_ms: float, n_calls: int, need: Need, n_outputs: int, window_ms: float) -> int | None:
    """K of windows to come, where one of `n_calls` was much shorter than `window_ms`; None where it was not.

    A file that dawdles in its pilot is not to be timed on two calls.
    """
    if took_ms >= SHORT * window_ms:
        return None
    found = calls_in_window(pilot_ms=took_ms / n_calls, need=need, n_outputs=n_outputs, window_ms=window_ms)
    return found if 2 * found >= 3 * n_calls else None


def window_ms(rival: str, *, headline: bool) -> float:
    """How long a window of that rival should be."""
    if rival == "reference":
        return SPOT_WINDOW_MS
    if not headline:
        return OTHER_WINDOW_MS
    return WINDOW_MS if rival == "student" else SHORT_WINDOW_MS


def per_call_ms(window_ms: float, n_calls: int, empty_ms: float) -> float:
    """Time of one call, from a window of them less an empty one.

    It is subtracted from every window, not only from short ones, so that windows of unlike length may be compared.
    """
    return max(window_ms - empty_ms, 0.0) / n_calls


def turn(names: Sequence[T], round_number: int) -> list[T]:
    """The order of one round; it rotates, so that nobody always comes after the same one."""
    first = round_number % len(names)
    return [*names[first:], *names[:first]]


def ratio(naive_ms: Sequence[float], student_ms: Sequence[float], *, seed: int) -> Interval:
    """How many times as fast as the naive baseline the student's file is, with its 95 % interval."""
    return bootstrap_ratio(naive_ms, student_ms, seed=seed)


def enough(naive_ms: Sequence[float], student_ms: Sequence[float], *, seed: int) -> bool:
    """Whether further rounds would tell little: the interval is within 1 % either way."""
    if min(len(naive_ms), len(student_ms)) < LEAST_ROUNDS:
        return False
    return ratio(naive_ms, student_ms, seed=seed).relative_width <= WANTED_HALF_WIDTH


def is_noisy(interval: Interval) -> bool:
    """Whether the interval is wider than a grade should rest on."""
    return not interval.relative_width <= WANTED_HALF_WIDTH


def fill_was_idle(fill_ms: float, *, idle_ms: float) -> bool:
    """Whether nobody else's kernel ran while the inputs were written."""
    return fill_ms <= FILL_SLACK * idle_ms + FILL_GRACE_MS


def first_call_agrees(*, first_ms: Sequence[float], empty_ms: Sequence[float], per_call: float) -> bool:
    """Whether one call alone takes what its share of a window says.

    It takes much more when a window's calls are answered together by the first one, or skipped by the later ones.
    """
    alone = median(first_ms) - median(empty_ms)
    return alone <= FIRST_CALL_SLACK * per_call + FIRST_CALL_GRACE_MS


def events_agree(*, events_ms: float, per_call: float) -> bool:
    """Whether CUDA events around a window tell what the clock outside tells.

    On an H200 the two differed by 0.3 % in windows of 110 ms, by 1.2 % in 30 ms and by 4.6 % in the shortest ones.
    """
    return abs(events_ms - per_call) <= EVENTS_BAND * per_call + EVENTS_GRACE_MS


def in_band(time_ms: float, recorded_ms: float) -> bool:
    """Whether a baseline ran as it did when this GPU's record was made."""
    return abs(time_ms / recorded_ms - 1) <= BAND
