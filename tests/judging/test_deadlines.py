"""One function of a moment says what is taken, what the page warns of, and what being late costs."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grader.deadlines import DAY, Phase, Window

DUE = datetime(2027, 3, 1, 23, 59, tzinfo=UTC)
SECOND = timedelta(seconds=1)
LATE = Window(deadline=DUE, late_days=2, late_percent=10.0)


@pytest.mark.parametrize(
    ("moment", "phase", "days", "share"),
    [
        pytest.param(DUE - DAY, Phase.OPEN, 0, 1.0, id="the-day-before"),
        pytest.param(DUE, Phase.OPEN, 0, 1.0, id="on-the-dot"),
        pytest.param(DUE + timedelta(microseconds=1), Phase.LATE, 1, 0.9, id="a-moment-late"),
        pytest.param(DUE + DAY, Phase.LATE, 1, 0.9, id="a-whole-day"),
        pytest.param(DUE + DAY + SECOND, Phase.LATE, 2, 0.8, id="a-second-day-begins"),
        pytest.param(DUE + 2 * DAY, Phase.LATE, 2, 0.8, id="the-last-moment"),
        pytest.param(DUE + 2 * DAY + SECOND, Phase.CLOSED, 3, 0.7, id="too-late"),
    ],
)
def test_days_late_are_begun_days(moment, phase, days, share):
    standing = LATE.at(moment)
    assert (standing.phase, standing.days_late) == (phase, days)
    assert standing.share == pytest.approx(share)
    assert standing.counted(70.0) == pytest.approx(70 * share)


@settings(deadline=None)  # time is no property of a window, and machines are busy at times
@given(
    seconds=st.integers(-10 * 86400, 40 * 86400),
    late_days=st.integers(0, 30),
    percent=st.floats(0, 100, allow_nan=False),
    opens=st.one_of(st.none(), st.integers(-10 * 86400, 0)),
)
def test_form_banner_and_penalty_agree_at_every_moment(seconds, late_days, percent, opens):
    opens_at = None if opens is None else DUE + opens * SECOND
    window = Window(opens_at=opens_at, deadline=DUE, late_days=late_days, late_percent=percent)
    moment = DUE + seconds * SECOND
    standing = window.at(moment)
    assert (window.why_closed(moment) is None) == (standing.phase in (Phase.OPEN, Phase.LATE))
    assert bool(window.late_note(moment)) == (standing.days_late > 0)
    assert (standing.phase is Phase.LATE) <= (0 < standing.days_late <= late_days)
    assert 0 <= standing.counted(50.0) <= 50
    if standing.share < 1:
        assert standing.days_late > 0
        said = re.search(r"it counts ([0-9.]+) % of its points", window.late_note(moment))
        assert said is not None
        assert float(said[1]) == pytest.approx(100 * standing.share, abs=0.0051)
    assert window.closes_at is not None
    assert (moment > window.closes_at) == (standing.phase is Phase.CLOSED)


def test_a_penalty_never_takes_more_than_everything():
    assert Window(deadline=DUE, late_days=9, late_percent=40.0).at(DUE + 5 * DAY).counted(70.0) == 0.0


def test_what_a_late_hand_in_counts_is_said_with_its_reason():
    window = Window(deadline=DUE, late_days=2, late_percent=20.0)
    assert window.at(DUE).counted_text(70.0) == ""
    assert window.at(DUE + SECOND).counted_text(70.0) == "56 after 20 % for 1 late day"
    assert window.at(DUE + 2 * DAY).counted_text(70.0) == "42 after 40 % for 2 late days"
    assert Window(deadline=DUE, late_days=2).at(DUE + DAY).counted_text(70.0) == ""


def test_without_a_deadline_nothing_is_late():
    window = Window(late_days=2, late_percent=10.0)
    assert window.at(DUE + 99 * DAY).phase is Phase.OPEN
    assert window.late_rule() == ""
    assert window.closes_at is None


def test_before_it_opens_it_says_when():
    window = Window(opens_at=DUE)
    assert window.at(DUE - SECOND).phase is Phase.BEFORE
    assert window.why_closed(DUE - SECOND) == "This assignment opens on 01 March 2027 at 23:59 UTC."


def test_late_days_begin_after_ones_own_extension():
    own = Window(deadline=DUE + 3 * DAY, extended=True, late_days=2, late_percent=10.0)
    assert own.at(DUE + 3 * DAY).days_late == 0
    assert own.at(DUE + 4 * DAY).days_late == 1
    assert "Your extended deadline was" in str(own.why_closed(DUE + 6 * DAY))


def test_what_the_course_allows_is_said_in_one_clause():
    assert LATE.late_rule() == "2 late days: each begun day takes 10 % off the points."
    assert Window(deadline=DUE, late_days=1).late_rule() == "1 late day: at no cost."
    assert LATE.late_note(DUE + SECOND) == "1 day late: it counts 90 % of its points."
    eighth = Window(deadline=DUE, late_days=2, late_percent=12.5)
    assert eighth.late_note(DUE + SECOND) == "1 day late: it counts 87.5 % of its points."
