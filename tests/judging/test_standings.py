import itertools
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grader.standings import Entry, rank
from grader.statistics import Interval

START = datetime(2027, 3, 1, tzinfo=UTC)


def entry(who, points, speedup=None, minute=0, submission=0, noise=0.01):
    interval = None
    if speedup is not None:
        interval = Interval(value=speedup, low=speedup * (1 - noise), high=speedup * (1 + noise))
    return Entry(
        who=who,
        submission=submission or minute,
        points=points,
        submitted_at=START + timedelta(minutes=minute),
        speedup=interval,
    )


def places(entries):
    return [(one.rank, one.entry.who) for one in rank(entries)]


def test_more_points_stand_higher_and_speed_decides_between_equals():
    board = [entry("ada", 70, 3.0), entry("bob", 90, 2.0), entry("cy", 90, 5.0)]
    assert places(board) == [(1, "cy"), (2, "bob"), (3, "ada")]


def test_the_best_hand_in_counts_even_when_a_newer_one_is_worse():
    found = rank([entry("ada", 90, minute=1), entry("ada", 40, minute=2), entry("bob", 60, minute=3)])
    assert [(one.rank, one.entry.who, one.entry.points) for one in found] == [(1, "ada", 90), (2, "bob", 60)]


def test_of_two_equal_hand_ins_the_earlier_one_is_shown():
    (found,) = rank([entry("ada", 90, minute=5, submission=8), entry("ada", 90, minute=2, submission=3)])
    assert found.entry.submission == 3


def test_results_within_noise_share_a_rank_and_use_up_the_next_one():
    found = rank([entry("ada", 90, 5.00, 2), entry("bob", 90, 5.02, 1), entry("cy", 90, 4.0)])
    assert [(one.rank, one.shared, one.entry.who) for one in found] == [
        (1, True, "bob"),
        (1, True, "ada"),
        (3, False, "cy"),
    ]


def test_a_chain_of_near_ties_is_not_one_tie():
    board = [entry("a", 90, 5.00), entry("b", 90, 4.96), entry("c", 90, 4.92), entry("d", 90, 4.88)]
    assert places(board) == [(1, "a"), (1, "b"), (3, "c"), (3, "d")]


def test_without_speed_equal_points_are_a_tie():
    assert places([entry("a", 70, minute=2), entry("b", 70.001, minute=1), entry("c", 69.9)]) == [
        (1, "b"),
        (1, "a"),
        (3, "c"),
    ]


def test_a_measured_speed_stands_before_none():
    assert places([entry("a", 70), entry("b", 70, 1.5)]) == [(1, "b"), (2, "a")]


def test_nobody_is_no_board():
    assert rank([]) == ()


@given(
    st.lists(
        st.builds(
            entry,
            st.sampled_from("abcdef"),
            st.sampled_from([0.0, 40.0, 69.99, 70.0]),
            st.sampled_from([None, 1.0, 1.005, 2.0]),
            st.integers(0, 3),
            st.integers(1, 9),
        ),
        max_size=12,
    ),
    st.randoms(),
)
def test_a_board_does_not_depend_on_the_order_of_its_entries(entries, random):
    shuffled = list(entries)
    random.shuffle(shuffled)
    found = rank(entries)
    assert [(one.rank, one.entry.points) for one in found] == [(one.rank, one.entry.points) for one in rank(shuffled)]
    assert len({one.entry.who for one in found}) == len(found) == len({one.who for one in entries})
    assert all(a.rank <= b.rank for a, b in itertools.pairwise(found))
    assert not found or found[0].rank == 1


@pytest.mark.parametrize("points", [70.0, 70.004])
def test_points_that_read_alike_are_alike(points):
    assert {one.rank for one in rank([entry("a", 70.0), entry("b", points)])} == {1}
