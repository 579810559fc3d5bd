"""Who leads, and what goes into the gradebook."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import sqlalchemy as sa

from grader import boards, submissions
from grader.models import Result, Role

NOW = datetime(2027, 2, 1, 12, 0, tzinfo=UTC)


def leaders(school, **options):
    with school.database.read() as session:
        return boards.best_of_each(session, school.entry.id, **options)


def test_the_best_counts_and_a_worse_one_does_not_replace_it(school, facts):
    best = school.graded("ada", facts(passed=2))
    school.graded("ada", facts(passed=0), now=NOW + timedelta(minutes=1))
    (ada,) = leaders(school)
    assert (ada.submission_id, ada.rank, ada.hand_ins) == (best, 1, 2)
    assert ada.points > 0


def test_of_two_equal_ones_the_earlier_counts(school, facts):
    first = school.graded("ada", facts())
    school.graded("ada", facts(), now=NOW + timedelta(minutes=1))
    assert leaders(school)[0].submission_id == first


def test_equal_points_share_a_rank(school, facts):
    school.graded("ada", facts(passed=2))
    school.graded("bob", facts(passed=2), now=NOW + timedelta(minutes=1))
    school.graded("cy", facts(passed=1), now=NOW + timedelta(minutes=2))
    assert [(one.user_name, one.rank, one.shared) for one in leaders(school)] == [
        ("ada", 1, True),
        ("bob", 1, True),
        ("cy", 3, False),
    ]


def test_a_faster_kernel_leads_where_points_are_equal(school, facts):
    school.graded("ada", facts())
    fast = school.graded("bob", facts(), now=NOW + timedelta(minutes=1))
    with school.database.write() as session:
        for submission_id, speedup in ((fast, 9.0), (fast - 1, 3.0)):
            session.execute(
                sa.update(Result)
                .where(Result.submission_id == submission_id)
                .values(speedup=speedup, speedup_low=speedup - 0.1, speedup_high=speedup + 0.1)
            )
    assert [(one.user_name, one.speedup, one.rank) for one in leaders(school)] == [("bob", 9.0, 1), ("ada", 3.0, 2)]


def test_what_is_held_is_on_no_board_until_released(school, facts, staff):
    held = school.graded("ada", facts(suspicious=True))
    assert leaders(school) == []
    assert [one.submission_id for one in leaders(school, include_held=True)] == [held]
    with school.database.write() as session:
        submissions.release(session, held, actor_id=staff.id, now=NOW)
    assert [one.submission_id for one in leaders(school)] == [held]


def test_instructors_are_not_ranked(school, facts):
    school.user("ira", Role.INSTRUCTOR)
    school.graded("ira", facts())
    assert leaders(school) == []


def test_boards_know_people_by_nickname(school, facts):
    school.graded("ada", facts())
    (ada,) = leaders(school)
    assert ada.nickname != ada.user_name


def test_what_waits_for_new_measurements_is_off_the_board_meanwhile(school, facts):
    submission_id = school.graded("ada", facts())
    with school.database.write() as session:
        submissions.run_again(session, submission_id, actor_id=None, now=NOW)
    assert leaders(school) == []


def test_the_gradebook_has_every_student_with_every_assignment(school, facts):
    school.user("bob")
    best = school.graded("ada", facts(passed=2))
    school.graded("ada", facts(passed=1), now=NOW + timedelta(minutes=1))
    school.graded("cy", facts(suspicious=True), now=NOW + timedelta(minutes=2))
    with school.database.read() as session:
        rows = boards.gradebook(session, school.entry.course_id)
    assert [(row.user_name, row.assignment, row.submission_id is not None) for row in rows] == [
        ("ada", "doubling", True),
        ("bob", "doubling", False),
        ("cy", "doubling", True),
    ]
    assert (rows[0].submission_id, rows[0].provisional, rows[0].held) == (best, True, False)
    assert (rows[2].held, rows[1].points) == (True, 0.0)
