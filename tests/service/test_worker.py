"""What one worker does, without a queue: it grades what waits, reports itself, and survives what goes wrong."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from sqlalchemy.orm import joinedload

from grader import submissions
from grader.course import Catalog
from grader.errors import AssignmentError, GraderFault
from grader.models import CourseAssignment, State, Submission, WorkerStatus
from workers.tasks import Grader

NOW = datetime(2027, 2, 1, 12, 0, tzinfo=UTC)


@pytest.fixture
def make_grader(school):
    made = []

    def make(examine, *, name="w", lanes=1, **settings):
        # a lease that a busy machine does not outlast: tests of a lapsed one say so
        quick = replace(school.settings, **({"heartbeat_s": 0.05, "lease_s": 30.0} | settings))
        catalog = Catalog(school.settings.assignments_dir)
        grader = Grader(
            database=school.database,
            catalog=catalog,
            settings=quick,
            name=name,
            examine=examine,
            note="scripted",
            lanes=lanes,
        )
        grader.start()
        made.append(grader)
        return grader

    yield make
    for grader in made:
        grader.close()


@pytest.fixture
def answers(facts):
    """An examiner that finds everything right at once."""
    return lambda _assignment, _source, _progress: facts()


def state_of(school, submission_id):
    with school.database.read() as session:
        return session.get_one(Submission, submission_id, options=[joinedload(Submission.result)])


def worker_of(school, name="w"):
    with school.database.read() as session:
        return next(worker for worker in submissions.workers(session) if worker.name == name)


def test_one_bell_grades_all_that_waits(school, make_grader, answers):
    ids = [school.hand_in(name).submission_id for name in ("ada", "bob", "cy")]
    grader = make_grader(answers)
    assert grader.grade_waiting() == 3
    assert grader.grade_waiting() == 0
    assert {state_of(school, i).state for i in ids} == {State.DONE}


def test_the_examiner_gets_the_bytes_that_were_handed_in(school, make_grader, facts):
    seen = []

    def examine(assignment, source, _progress):
        seen.append((assignment.slug, source))
        return facts()

    school.hand_in(data="# ✓\r\nx = 1\r\n".encode())
    make_grader(examine).grade_waiting()
    assert seen == [("doubling", "# ✓\r\nx = 1\r\n".encode())]


def test_no_database_session_is_held_while_it_examines(school, make_grader, facts):
    in_use = []

    def examine(*_):
        in_use.append(school.database.engine.pool.checkedout())
        return facts()

    school.hand_in()
    make_grader(examine, heartbeat_s=60.0, lease_s=120.0).grade_waiting()
    assert in_use == [0]


def test_ten_bells_at_once_are_one_grading(school, make_grader, facts):
    count = []

    def examine(*_):
        count.append(1)
        time.sleep(0.1)
        return facts()

    accepted = school.hand_in()
    graders = [make_grader(examine, name=f"w{i}") for i in range(10)]
    threads = [threading.Thread(target=grader.grade_waiting) for grader in graders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(count) == 1
    row = state_of(school, accepted.submission_id)
    assert (row.state, row.attempt) == (State.DONE, 1)


def test_a_long_examination_keeps_its_lease(school, make_grader, facts):
    stolen = []

    def examine(*_):
        time.sleep(4.5)  # three leases long
        with school.database.write() as session:
            stolen.append(
                submissions.claim_next(
                    session, worker="thief", device="cpu", now=datetime.now(UTC), lease=school.settings.lease
                )
            )
        return facts()

    accepted = school.hand_in()
    make_grader(examine, lease_s=1.5).grade_waiting()
    assert stolen == [None]
    assert state_of(school, accepted.submission_id).attempt == 1


def test_stages_that_go_on_side_by_side_are_all_told_and_none_goes_back(school, make_grader, facts, monkeypatch):
    seen = []

    def examine(_assignment, _source, progress):
        monkeypatch.setattr("workers.tasks.PROGRESS_EVERY_S", 60.0)
        for stage, fraction in (("numerics", 0.5), ("memory", 0.25), ("numerics", 0.25)):
            progress(stage, fraction)  # all but the first are held back
        monkeypatch.setattr("workers.tasks.PROGRESS_EVERY_S", 0.0)
        progress("memory", 0.5)
        seen.append(submissions.stages_of(state_of(school, accepted.submission_id)))
        return facts()

    accepted = school.hand_in()
    make_grader(examine).grade_waiting()
    assert seen == [{"numerics": 0.5, "memory": 0.5}]
    assert state_of(school, accepted.submission_id).stages is None


def test_progress_and_worker_are_seen_while_it_examines(school, make_grader, facts):
    seen = []

    def examine(_assignment, _source, progress):
        progress("memory", 0.25)
        row = state_of(school, accepted.submission_id)
        worker = worker_of(school)
        seen.append((submissions.stages_of(row), row.worker, worker.status, worker.submission_id))
        return facts()

    accepted = school.hand_in()
    make_grader(examine).grade_waiting()
    assert seen == [({"memory": 0.25}, "w", WorkerStatus.GRADING, accepted.submission_id)]
    assert (worker_of(school).status, worker_of(school).submission_id) == (WorkerStatus.IDLE, None)
    assert worker_of(school).note == "scripted"


@pytest.mark.parametrize("error", [GraderFault("no sandbox"), RuntimeError("a bug of ours"), MemoryError()], ids=repr)
def test_our_own_failure_costs_the_student_nothing(school, make_grader, error):
    def examine(*_):
        raise error

    accepted = school.hand_in()
    make_grader(examine).grade_waiting()
    row = state_of(school, accepted.submission_id)
    assert (row.state, row.lost_attempts) == (State.QUEUED, 1)
    assert type(error).__name__ in row.fault_note


def test_a_broken_worker_rests_instead_of_spoiling_the_queue(school, make_grader):
    tried = []

    def examine(*_):
        tried.append(1)
        raise GraderFault("no sandbox")

    for name in ("ada", "bob", "cy"):
        school.hand_in(name)
    grader = make_grader(examine)
    for _ in range(5):
        grader.grade_waiting()
    assert len(tried) == 1


def test_a_wrong_assignment_folder_closes_the_assignment_and_blames_nobody(school, make_grader, facts):
    def examine(*_):
        raise AssignmentError("assignment.toml: operation: 'softmax.onlin' is unknown")

    again = school.graded("bob", facts())
    with school.database.write() as session:
        submissions.run_again(session, again, actor_id=None, now=datetime.now(UTC))
    accepted = school.hand_in()
    make_grader(examine).grade_waiting()
    row = state_of(school, accepted.submission_id)
    assert (row.state, row.result) == (State.FAULTED, None)
    row = state_of(school, again)
    assert (row.state, row.result.attempt) == (State.DONE, 1)  # the grade of before
    assert "softmax.onlin" in row.fault_note
    with school.database.read() as session:
        assert "softmax.onlin" in session.get_one(CourseAssignment, school.entry.id).closed_reason


@pytest.mark.parametrize("how", ["cancelled", "claimed by another"])
def test_an_examination_that_is_no_longer_wanted_ends(school, make_grader, wait_until, how):
    ended = []

    def examine(_assignment, _source, progress):
        try:
            for _ in range(500):
                progress("numerics", 0.5)
                time.sleep(0.02)
        except Exception as exc:
            ended.append(type(exc).__name__)
            raise

    accepted = school.hand_in()
    grader = make_grader(examine)
    thread = threading.Thread(target=grader.grade_waiting)
    thread.start()
    wait_until(lambda: "numerics" in submissions.stages_of(state_of(school, accepted.submission_id)), 10, "progress")
    with school.database.write() as session:
        if how == "cancelled":
            submissions.cancel(session, accepted.submission_id, actor_id=None, now=NOW)
        else:
            session.get_one(Submission, accepted.submission_id).attempt += 1
    thread.join(10)
    assert ended == ["NoLongerOurs"]
    expected = State.CANCELLED if how == "cancelled" else State.RUNNING
    row = state_of(school, accepted.submission_id)
    assert (row.state, row.lost_attempts) == (expected, 0)


def test_a_worker_hears_of_another_one_of_its_name(make_grader, answers, wait_until, caplog):
    make_grader(answers, name="same")
    assert "TILEGRADE_SLOT" not in caplog.text
    make_grader(answers, name="same")
    said = "another worker reports as same too: give each its own TILEGRADE_SLOT"
    wait_until(lambda: said in caplog.text, 20, "a word about the name")


def test_a_worker_that_starts_again_is_no_other_one(school, make_grader, answers, caplog):
    make_grader(answers, name="same").close()
    school.hand_in()
    assert make_grader(answers, name="same").grade_waiting() == 1  # it reports before and after
    assert "TILEGRADE_SLOT" not in caplog.text


def test_stopping_hands_the_submission_back(school, make_grader, wait_until):
    def examine(_assignment, _source, progress):
        while True:
            progress("numerics", 0.5)
            time.sleep(0.02)

    accepted = school.hand_in()
    grader = make_grader(examine)
    thread = threading.Thread(target=grader.grade_waiting)
    thread.start()
    wait_until(lambda: "numerics" in submissions.stages_of(state_of(school, accepted.submission_id)), 10, "progress")
    grader.close()
    thread.join(10)
    row = state_of(school, accepted.submission_id)
    assert (row.state, row.attempt, row.lost_attempts) == (State.QUEUED, 1, 0)
    assert worker_of(school).status is WorkerStatus.STOPPED
    assert grader.grade_waiting() == 0


def test_a_late_result_is_dropped(school, make_grader, facts):
    def examine(*_):
        with school.database.write() as session:
            session.get_one(Submission, accepted.submission_id).attempt += 1
        return facts()

    accepted = school.hand_in()
    make_grader(examine).grade_waiting()
    with school.database.read() as session:
        found = submissions.find(session, accepted.submission_id)
        assert (found.state, found.result) == (State.RUNNING, None)


def test_lanes_grade_side_by_side_and_each_row_once(school, make_grader, facts):
    together = threading.Barrier(3, timeout=20)
    seen = []

    def examine(_assignment, source, _progress):
        seen.append(source)
        together.wait()  # passes only when three examinations run at once
        return facts()

    ids = [school.hand_in(name, data=f"# {name}\n".encode()).submission_id for name in ("ada", "bob", "cy")]
    assert make_grader(examine, lanes=3).grade_waiting() == 3
    assert sorted(seen) == [b"# ada\n", b"# bob\n", b"# cy\n"]
    assert {state_of(school, i).state for i in ids} == {State.DONE}


def test_a_free_lane_takes_what_comes_while_another_one_grades(school, make_grader, facts):
    second_began, first_began = threading.Event(), threading.Event()

    def examine(_assignment, source, _progress):
        if b"first" in source:
            first_began.set()
            assert second_began.wait(20), "the free lane did not take the second one"
        else:
            second_began.set()
        return facts()

    first = school.hand_in("ada", data=b"# first\n").submission_id
    grader = make_grader(examine, lanes=2)
    lanes = threading.Thread(target=grader.grade_waiting)
    lanes.start()
    assert first_began.wait(20)
    second = school.hand_in("bob", data=b"# second\n").submission_id
    lanes.join(30)
    assert not lanes.is_alive()
    assert {state_of(school, i).state for i in (first, second)} == {State.DONE}


def test_stopping_hands_back_what_every_lane_has(school, make_grader, wait_until):
    begun, over = threading.Barrier(3, timeout=20), threading.Event()

    def examine(_assignment, _source, progress):
        begun.wait()
        over.wait(20)
        progress("numerics", 0.5)
        raise AssertionError("an examination that was handed back went on")

    ids = [school.hand_in(name).submission_id for name in ("ada", "bob")]
    grader = make_grader(examine, lanes=2)
    lanes = threading.Thread(target=grader.grade_waiting)
    lanes.start()
    begun.wait()
    grader.close()
    over.set()
    lanes.join(20)
    assert {state_of(school, i).state for i in ids} == {State.QUEUED}
    assert worker_of(school).status is WorkerStatus.STOPPED
