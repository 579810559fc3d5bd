"""Who leads, and what goes into the gradebook."""

from __future__ import annotations

import dataclasses
import random
from datetime import UTC, datetime, timedelta

import pytest
import sqlalchemy as sa

from grader import boards, course, standings, submissions
from grader.course import Catalog
from grader.errors import UserError
from grader.models import AuditEvent, Result, Role, Submission
from grader.statistics import Interval

NOW = datetime(2027, 2, 1, 12, 0, tzinfo=UTC)


def leaders(school, **options):
    with school.database.read() as session:
        return boards.best_of_each(session, school.entry, school.assignment, **options)


def test_the_best_counts_and_a_worse_one_does_not_replace_it(school, facts):
    best = school.graded("ada", facts(passed=2))
    school.graded("ada", facts(passed=0), now=NOW + timedelta(minutes=1))
    (ada,) = leaders(school)
    assert (ada.submission_id, ada.rank) == (best, 1)
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
        submissions.decide(session, held, school.assignment, release=True, reason="seen", actor_id=staff.id, now=NOW)
    assert [one.submission_id for one in leaders(school)] == [held]


def test_instructors_are_not_ranked(school, facts):
    school.user("ira", Role.INSTRUCTOR)
    school.graded("ira", facts())
    assert leaders(school) == []


def test_boards_know_people_by_nickname(school, facts):
    school.graded("ada", facts())
    (ada,) = leaders(school)
    assert ada.name != ada.user_name


def test_the_gradebook_has_every_student_with_every_assignment(school, facts):
    school.user("bob")
    best = school.graded("ada", facts(passed=2))
    school.graded("ada", facts(passed=1), now=NOW + timedelta(minutes=1))
    school.graded("cy", facts(suspicious=True), now=NOW + timedelta(minutes=2))
    with school.database.read() as session:
        rows = boards.gradebook(session, school.entry.course_id, Catalog(school.settings.assignments_dir))
    assert [(row.user_name, row.assignment, row.submission_id is not None) for row in rows] == [
        ("ada", "doubling", True),
        ("bob", "doubling", False),
        ("cy", "doubling", True),
    ]
    assert (rows[0].submission_id, rows[0].provisional, rows[0].held) == (best, True, False)
    assert (rows[2].held, rows[1].points) == (True, None)


def set_speed(school, submission_id, speedup, *, gpu="NVIDIA H200", share=0.5):
    with school.database.write() as session:
        values = {"speedup": speedup, "speedup_low": speedup - 0.1, "speedup_high": speedup + 0.1}
        values |= {"gpu": gpu, "limit_share": share}
        session.execute(sa.update(Result).where(Result.submission_id == submission_id).values(**values))


def enrolled(session, school, name):
    return course.enrollment_of(session, course_id=school.entry.course_id, user_id=school.user(name).id)


# -- late days --------------------------------------------------------------------------------------------------------


@pytest.fixture
def late_allowed(school):
    """Due at NOW; two late days at 25 % each."""
    with school.database.write() as session:
        changed = {"deadline": NOW, "late_days": 2, "late_percent": 25.0}
        school.entry = course.set_assignment(
            session, course_id=school.entry.course_id, slug="doubling", **changed, now=NOW
        )
    return school


def test_late_points_are_what_is_left_everywhere(late_allowed, facts):
    late = late_allowed.graded("ada", facts(passed=2), now=NOW + timedelta(hours=30))
    (ada,) = leaders(late_allowed)
    assert (ada.submission_id, ada.days_late) == (late, 2)
    with late_allowed.database.read() as session:
        judged = session.get_one(Result, late).points
        catalog = Catalog(late_allowed.settings.assignments_dir)
        (row,) = boards.gradebook(session, late_allowed.entry.course_id, catalog)
    assert ada.points == row.points == pytest.approx(judged / 2)
    assert row.days_late == 2


def test_an_earlier_one_in_time_counts_before_a_better_late_one_that_lost_more(late_allowed, facts):
    in_time = late_allowed.graded("ada", facts(passed=2), now=NOW)
    late_allowed.graded("ada", facts(passed=2), now=NOW + timedelta(hours=1))
    (ada,) = leaders(late_allowed)
    assert (ada.submission_id, ada.days_late) == (in_time, 0)


def test_an_extension_takes_the_lateness_back(late_allowed, facts):
    late_allowed.graded("ada", facts(passed=2), now=NOW + timedelta(hours=30))
    with late_allowed.database.write() as session:
        course.grant_extension(
            session,
            entry=late_allowed.entry,
            assignment=late_allowed.assignment,
            user=late_allowed.user("ada"),
            until=NOW + timedelta(days=3),
            actor_id=None,
            now=NOW,
        )
    assert leaders(late_allowed)[0].days_late == 0


def test_the_form_takes_what_is_late_and_refuses_what_is_too_late(late_allowed):
    late_allowed.hand_in("ada", now=NOW + timedelta(days=2))
    with pytest.raises(UserError, match="2 late days after it are over"):
        late_allowed.hand_in("ada", b"x = 1", now=NOW + timedelta(days=2, seconds=1))


# -- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("frozen", [False, True], ids=["live", "frozen"])
def test_an_anonymous_board_and_its_export_tell_no_name(school, facts, frozen):
    school.graded("ada", facts())
    school.graded("bob", facts(), now=NOW + timedelta(minutes=1))
    with school.database.write() as session:
        board = boards.freeze(session, school.entry, school.assignment, title="Week 1", actor_id=None, now=NOW)
        nickname = enrolled(session, school, "ada").nickname
        course.appear_as(session, enrolled(session, school, "ada"), nickname="", anonymous=True)
        course.appear_as(session, enrolled(session, school, "bob"), nickname="=cmd|x", anonymous=False)
    with school.database.read() as session:
        rows = boards.frozen_lines(session, board, school.entry) if frozen else leaders(school)
    table = boards.board_csv(rows)
    assert [one.name for one in rows] == ["Anonymous", "=cmd|x"]
    for secret in (nickname, "ada", "bob"):
        assert secret not in table
    assert ",'=cmd|x," in table


@pytest.mark.parametrize("nickname", ["x" * 41, "a\u202eb", "Anonymous", " Anonymous ", "anonymous", "Аnonymous"])
def test_a_nickname_that_cannot_be_is_refused(school, nickname):
    with pytest.raises(UserError), school.database.write() as session:
        course.appear_as(session, enrolled(session, school, "ada"), nickname=nickname, anonymous=False)


def test_a_nickname_that_is_taken_is_refused(school):
    with school.database.write() as session:
        course.appear_as(session, enrolled(session, school, "ada"), nickname="blue  heron", anonymous=False)
    with pytest.raises(UserError, match="'blue heron' is taken"), school.database.write() as session:
        course.appear_as(session, enrolled(session, school, "bob"), nickname="blue heron", anonymous=True)


@pytest.mark.parametrize(
    "nickname", ["bob", "BOB", "b o b", "b0b", "b.o.b", "bоb", "bób", "ｂｏｂ", "Alice-2", "aIice-2", "al1ce2"]
)
def test_nobody_takes_the_account_name_of_somebody_else(school, nickname):
    for name in ("ada", "bob", "alice-2"):
        school.user(name)
    with pytest.raises(UserError, match="reads like somebody else's account"), school.database.write() as session:
        course.appear_as(session, enrolled(session, school, "ada"), nickname=nickname, anonymous=False)


@pytest.mark.parametrize("nickname", ["ada", "Ada", "bobby", "blue-heron-12", "=cmd|x", "蓝鹭"])
def test_ones_own_account_name_and_any_other_word_are_nicknames(school, nickname):
    for name in ("ada", "bob"):
        school.user(name)
    with school.database.write() as session:
        own = enrolled(session, school, "ada")
        course.appear_as(session, own, nickname=nickname, anonymous=False)
        assert own.nickname == nickname


# -- GPUs and frozen boards -------------------------------------------------------------------------------------------


def test_a_board_of_one_gpu_ranks_what_ran_there(school, facts):
    old, new = school.graded("ada", facts()), school.graded("ada", facts(), now=NOW + timedelta(minutes=1))
    other = school.graded("bob", facts(), now=NOW + timedelta(minutes=2))
    set_speed(school, old, 3.0, gpu="NVIDIA A100")
    set_speed(school, new, 9.0)
    set_speed(school, other, 5.0, gpu="NVIDIA A100", share=0.7)
    with school.database.read() as session:
        assert boards.gpus(session, school.entry.id) == ["NVIDIA A100", "NVIDIA H200"]
    assert [one.submission_id for one in leaders(school)] == [new, other]
    on_one = leaders(school, gpu="NVIDIA A100")
    assert [(one.user_name, one.rank, one.limit_share) for one in on_one] == [("bob", 1, 0.7), ("ada", 2, 0.5)]


def test_any_part_of_a_board_is_that_part_of_the_whole(school, facts, assignment, monkeypatch):
    for minute, (who, passed) in enumerate([("ada", 1), ("bob", 2), ("cy", 2), ("dee", 0), ("eve", 1)]):
        school.graded(who, facts(passed=passed), now=NOW + timedelta(minutes=minute))
    with school.database.write() as session:
        board = boards.freeze(session, school.entry, assignment, title="A", actor_id=None, now=NOW)
    whole = leaders(school)
    assert [one.user_name for one in whole] == ["bob", "cy", "ada", "eve", "dee"]
    monkeypatch.setattr(boards, "_AT_ONCE", 2)  # rows of one statement
    with school.database.read() as session:
        live = boards.live(session, school.entry, assignment)
        for lineup in (live, boards.frozen_lineup(session, board, school.entry)):
            assert (lineup.total, lineup.timed, lineup.limited) == (5, False, False)
            for start in range(6):
                for stop in range(start, 8):
                    assert lineup.lines(start, stop) == whole[start:stop]


def test_a_frozen_board_stays_as_it_was(school, facts, assignment):
    first = school.graded("ada", facts(passed=1))
    with school.database.write() as session:
        board = boards.freeze(session, school.entry, assignment, title=" Week  1 ", actor_id=None, now=NOW)
        before = boards.frozen_lines(session, board, school.entry)
    school.graded("ada", facts(passed=2), now=NOW + timedelta(minutes=1))
    school.graded("bob", facts(passed=2), now=NOW + timedelta(minutes=2))
    stricter = dataclasses.replace(assignment, points={"numerics": 8.0, "structure": 2.0})
    with school.database.write() as session:
        assert submissions.rejudge(session, first, stricter, actor_id=None, now=NOW).changed
    with school.database.read() as session:
        assert boards.frozen_lines(session, board, school.entry) == before
        assert [one.title for one in boards.frozen(session, school.entry.id)] == ["Week 1"]
        (event,) = session.scalars(sa.select(AuditEvent).where(AuditEvent.action == "freeze-board"))
    assert f"board {board.id}, assignment {school.entry.id} (doubling), 1 entries: Week 1" in event.detail
    assert [(one.user_name, one.submission_id != first) for one in leaders(school)] == [("ada", True), ("bob", True)]


def test_freezing_twice_with_one_form_is_one_board(school, facts, assignment):
    school.graded("ada", facts())
    with school.database.write() as session:
        ids = {
            boards.freeze(session, school.entry, assignment, title="A", actor_id=None, now=NOW, idempotency_key="k").id
            for _ in range(2)
        }
    assert len(ids) == 1


def test_a_board_frozen_at_the_deadline_leaves_later_ones_out(school, facts, assignment):
    early = school.graded("ada", facts(passed=1))
    school.graded("ada", facts(passed=2), now=NOW + timedelta(minutes=5))
    with school.database.write() as session:
        board = boards.freeze(
            session, school.entry, assignment, title="Due", actor_id=None, now=NOW + timedelta(days=1), until=NOW
        )
        assert [one.submission_id for one in boards.frozen_lines(session, board, school.entry)] == [early]


@pytest.mark.parametrize(("title", "said"), [("Week 1", "Nobody is on this board"), (" ", "Give the frozen board")])
def test_what_cannot_be_frozen_says_why(school, assignment, title, said):
    with pytest.raises(UserError, match=said), school.database.write() as session:
        boards.freeze(session, school.entry, assignment, title=title, actor_id=None, now=NOW)


def test_a_withdrawn_board_is_shown_no_longer_and_kept(school, facts, assignment, staff):
    school.graded("ada", facts())
    with school.database.write() as session:
        board = boards.freeze(session, school.entry, assignment, title="A", actor_id=staff.id, now=NOW)
        assert boards.withdraw(session, board, actor_id=staff.id, now=NOW)
        assert not boards.withdraw(session, board, actor_id=staff.id, now=NOW)
        assert boards.frozen(session, school.entry.id) == []
        assert len(boards.frozen_lines(session, board, school.entry)) == 1


def test_who_left_the_course_stands_on_a_frozen_board_without_a_name(school, facts, assignment):
    school.graded("ada", facts())
    with school.database.write() as session:
        board = boards.freeze(session, school.entry, assignment, title="A", actor_id=None, now=NOW)
        session.delete(enrolled(session, school, "ada"))
        session.flush()
        (line,) = boards.frozen_lines(session, board, school.entry)
    assert (line.name, line.user_name) == ("Anonymous", "")


# -- what the database picks ------------------------------------------------------------------------------------------


def exactly(speedup):
    return None if speedup is None else Interval(value=speedup, low=speedup, high=speedup)


@pytest.mark.parametrize("seed", range(4))
def test_the_database_picks_whom_the_rule_would_pick_of_everything(late_allowed, facts, seed):
    """The board reads a few rows of each student; ranking every row must give the same."""
    rng = random.Random(seed)
    school = late_allowed
    extended = NOW + timedelta(days=1)
    for name in ("ada", "bob", "cy"):
        for _ in range(rng.randrange(3, 9)):
            school.graded(name, facts(), now=NOW + timedelta(hours=rng.choice((-48, -3, -3, 0, 5, 30, 47))))
    with school.database.write() as session:
        course.grant_extension(
            session,
            entry=school.entry,
            assignment=school.assignment,
            user=school.user("bob"),
            until=extended,
            actor_id=None,
            now=NOW,
        )
        for row in session.scalars(sa.select(Result)):
            row.points = rng.choice((10.0, 10.0, 39.99, 40.0))
            row.speedup = rng.choice((None, 2.0, 2.0, 3.5))
            row.speedup_low, row.speedup_high = (row.speedup, row.speedup) if row.speedup else (None, None)
    with school.database.read() as session:
        window_of = course.windows_of(session, entry=school.entry, assignment=school.assignment)
        whole = standings.rank(
            standings.Entry(
                who=str(row.user_id),
                submission=row.id,
                points=window_of(row.user_id).at(row.submitted_at).counted(row.result.points),
                submitted_at=row.submitted_at,
                speedup=exactly(row.result.speedup),
            )
            for row in session.scalars(sa.select(Submission))
        )
    found = leaders(school)
    assert [(str(one.user_id), one.submission_id, one.rank, one.shared) for one in found] == [
        (one.entry.who, one.entry.submission, one.rank, one.shared) for one in whole
    ]
