"""A grade is never lost by measuring its file again: it counts until the new one is there, and where none comes."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime, timedelta

import pytest
import sqlalchemy as sa

from grader import accounts, boards, course, submissions
from grader.course import Catalog
from grader.models import Result, State

NOW = datetime(2027, 2, 1, 12, 0, tzinfo=UTC)
LEASE = timedelta(seconds=30)
LATER = LEASE + timedelta(seconds=1)


@pytest.fixture
def graded(school, facts):
    """Hand-ins with every kind of grade that there is, all of which use up an attempt; by name of the student."""
    found = {
        "ada": school.graded("ada", facts(on="cuda")),
        "bob": school.graded("bob", facts(passed=1, on="cuda")),
        **{name: school.graded(name, facts(on="cuda", suspicious=True)) for name in ("held", "released", "refused")},
    }
    with school.database.write() as session:
        for name, release in (("released", True), ("refused", False)):
            submissions.decide(
                session, found[name], school.assignment, release=release, reason="r", actor_id=None, now=NOW
            )
    return found


def standing(school, graded):
    """All that anybody sees of these grades, and what they use up."""
    with school.database.read() as session:
        catalog = Catalog(school.settings.assignments_dir)
        rows = [submissions.find(session, one) for one in graded.values()]
        window = course.window_until(school.entry, school.assignment, None)
        counted = [boards.counted([row], window) for row in rows]
        which = {"course_assignment_id": school.entry.id}
        return {
            "board": boards.best_of_each(session, school.entry, school.assignment),
            "board of one GPU": boards.best_of_each(session, school.entry, school.assignment, gpu="test"),
            "gradebook": boards.gradebook(session, school.entry.course_id, catalog),
            "own pages": [row.id if row else None for row in counted],
            "attempts": [submissions.attempts_used(session, user_id=row.user_id, **which) for row in rows],
            "grades": [(row.result.grade, row.result.decision_reason, row.result.attempt) for row in rows],
        }


def claim_all(school, now=NOW):
    return list(iter(lambda: school.claim(now=now), None))


def give_up(school, *, times=3, final=False):
    for _ in range(times):
        for job in claim_all(school):
            with school.database.write() as session:
                submissions.give_up(session, job, note="the sandbox <b>broke", now=NOW, final=final)


def lapse(school, *, by_sweep):
    now = NOW
    for _ in range(3):
        assert len(claim_all(school, now)) == 5
        now += LATER
    with school.database.write() as session:
        if by_sweep:
            assert submissions.sweep(session, now=now) == []
        else:
            assert submissions.claim_next(session, worker="w", device="cpu", now=now, lease=LEASE) is None


def stop(school, graded):
    with school.database.write() as session:
        for one in graded.values():
            assert submissions.cancel(session, one, for_staff=True, actor_id=None, now=NOW) is State.DONE


def stop_while_it_runs(school, graded, facts):
    jobs = claim_all(school)
    stop(school, graded)
    assert not any(school.record(job, facts(passed=0)) for job in jobs)


def hand_back(school):
    for job in claim_all(school):
        with school.database.write() as session:
            assert submissions.hand_back(session, job)


@pytest.mark.parametrize(
    ("what_happens", "state"),
    [
        pytest.param(lambda *_: None, State.QUEUED, id="it-waits"),
        pytest.param(lambda school, *_: claim_all(school), State.RUNNING, id="it-runs"),
        pytest.param(lambda school, *_: hand_back(school), State.QUEUED, id="handed-back"),
        pytest.param(lambda school, *_: give_up(school, times=1), State.QUEUED, id="lost-once"),
        pytest.param(lambda school, *_: give_up(school), State.DONE, id="lost-three-times"),
        pytest.param(lambda school, *_: give_up(school, times=1, final=True), State.DONE, id="broken-folder"),
        pytest.param(lambda school, *_: lapse(school, by_sweep=True), State.DONE, id="lapsed-and-swept"),
        pytest.param(lambda school, *_: lapse(school, by_sweep=False), State.DONE, id="lapsed-and-claimed"),
        pytest.param(lambda school, graded, _: stop(school, graded), State.DONE, id="stopped-while-it-waits"),
        pytest.param(stop_while_it_runs, State.DONE, id="stopped-while-it-runs"),
    ],
)
def test_a_grade_stands_whatever_comes_of_measuring_again(school, facts, graded, what_happens, state):
    before = standing(school, graded)
    assert (len(before["board"]), len(before["board of one GPU"])) == (4, 4)
    assert before["attempts"] == [1] * 5
    with school.database.write() as session:
        for one in graded.values():
            assert submissions.run_again(session, one, actor_id=None, now=NOW) == "cpu"
    what_happens(school, graded, facts)
    with school.database.read() as session:
        assert {submissions.find(session, one).state for one in graded.values()} == {state}
    assert standing(school, graded) == before


@pytest.mark.parametrize("waits", [True, False], ids=["while-it-waits", "while-it-runs"])
def test_a_student_cannot_stop_what_staff_look_into(school, graded, waits):
    held = graded["held"]
    with school.database.write() as session:
        submissions.run_again(session, held, actor_id=None, now=NOW)
    if not waits:
        assert school.claim().submission_id == held
    with school.database.write() as session:
        assert submissions.cancel(session, held, for_staff=False, actor_id=None, now=NOW) is None
    with school.database.read() as session:
        assert submissions.find(session, held).state is (State.QUEUED if waits else State.RUNNING)


def test_staff_read_why_it_was_not_measured_again_and_what_was_never_graded_is_faulted(school, graded):
    new = school.hand_in("ada", b"x = 1").submission_id
    with school.database.write() as session:
        submissions.run_again(session, graded["ada"], actor_id=None, now=NOW)
    give_up(school)
    with school.database.read() as session:
        for one, state in ((graded["ada"], State.DONE), (new, State.FAULTED)):
            row = submissions.find(session, one)
            assert (row.state, row.fault_note, row.lost_attempts) == (state, "the sandbox <b>broke", 3)
            (latest, who), *_ = accounts.trail(session, submission_id=one)
            assert (latest.action, latest.detail, who) == ("give-up", "the sandbox <b>broke", None)


def test_after_a_vain_try_it_can_be_measured_again_and_the_new_grade_replaces_the_old(school, facts, graded):
    for _ in range(2):
        with school.database.write() as session:
            assert submissions.run_again(session, graded["ada"], actor_id=None, now=NOW) == "cpu"
            assert submissions.run_again(session, graded["ada"], actor_id=None, now=NOW) is None
        give_up(school)
    with school.database.write() as session:
        submissions.run_again(session, graded["ada"], actor_id=None, now=NOW)
    job = school.claim()
    assert school.record(job, facts(passed=0))
    with school.database.read() as session:
        row = submissions.find(session, job.submission_id)
        assert (row.state, row.fault_note, row.result.attempt, row.result.points) == (State.DONE, None, 8, 0.0)


def test_measuring_again_is_no_burden_of_the_students(school, graded):
    """It neither fills their places in the queue nor uses up attempts."""
    few = dataclasses.replace(school.settings, max_waiting_per_student=1)

    def refusal():
        with school.database.read() as session:
            return submissions.allowance(
                session,
                user_id=school.user("ada").id,
                entry=school.entry,
                assignment=school.assignment,
                settings=few,
                now=NOW,
            ).refusal

    with school.database.write() as session:
        submissions.run_again(session, graded["ada"], actor_id=None, now=NOW)
    assert refusal() == ""
    school.hand_in("ada", b"x = 1")
    assert refusal().startswith("1 of your submissions are not graded yet.")


def test_a_vain_try_says_nothing_of_how_long_a_grading_takes(school, facts):
    school.hand_in("ada")
    school.record(school.claim(), facts(), now=NOW + timedelta(seconds=20))
    with school.database.write() as session:
        submissions.run_again(session, 1, actor_id=None, now=NOW)
    job = school.claim()
    with school.database.write() as session:
        submissions.give_up(session, job, note="", now=NOW + timedelta(hours=1), final=True)
    with school.database.read() as session:
        assert submissions.outlook(session, "cpu", now=NOW).typical_s is None
    school.hand_in("ada", b"x = 1")
    school.record(school.claim(), facts(), now=NOW + timedelta(seconds=30))
    with school.database.read() as session:
        assert submissions.outlook(session, "cpu", now=NOW).typical_s == 30


def test_a_frozen_board_made_meanwhile_holds_them_too(school, graded):
    with school.database.write() as session:
        submissions.run_again(session, graded["ada"], actor_id=None, now=NOW)
        board = boards.freeze(session, school.entry, school.assignment, title="Week", actor_id=None, now=NOW)
        assert graded["ada"] in [line.submission_id for line in boards.frozen_lines(session, board, school.entry)]
        assert session.scalar(sa.select(sa.func.count(Result.submission_id))) == 5
