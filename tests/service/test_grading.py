"""From the queue to the result: claims, leases, the fence, fairness and judging again."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st

from grader import course, measurement, submissions
from grader.errors import UserError
from grader.models import AuditEvent, CourseAssignment, Result, State, Submission, WorkerStatus
from grader.submissions import Outlook, fair_order

NOW = datetime(2027, 2, 1, 12, 0, tzinfo=UTC)
LEASE = timedelta(seconds=30)
LAPSED = NOW + LEASE + timedelta(seconds=1)


def find(school, submission_id):
    with school.database.read() as session:
        return submissions.find(session, submission_id)


def test_nothing_waits_at_first(school):
    assert school.claim() is None


def test_a_claim_takes_what_the_examiner_needs(school):
    accepted = school.hand_in(data=b"x = 1\r\n")
    job = school.claim(worker="w7")
    assert job is not None
    assert (job.submission_id, job.attempt, job.slug, job.source) == (
        accepted.submission_id,
        1,
        "doubling",
        "x = 1\r\n",
    )
    row = find(school, job.submission_id)
    assert (row.state, row.worker, row.lease_until) == (State.RUNNING, "w7", NOW + LEASE)
    assert school.claim() is None


@pytest.fixture
def moved_to(school):
    """Sets the school's assignment to be graded on something else, as `course assign --device` does."""

    def move(device):
        with school.database.write() as session:
            session.get_one(CourseAssignment, school.entry.id).device = device

    return move


def test_what_waits_follows_its_assignment_to_another_device(school, moved_to):
    """Nobody grades on cuda:h200 here. What was handed in for it may not wait for ever once that was changed."""
    school.entry.device = "cuda:h200"
    moved_to("cuda:h200")
    running, waiting = school.hand_in("ada").submission_id, school.hand_in("bob").submission_id
    with school.database.write() as session:
        job = submissions.claim_next(session, worker="g", device="cuda:h200", now=NOW, lease=LEASE)
        assert job.submission_id == running
    moved_to("cpu")
    with school.database.write() as session:
        assert submissions.sweep(session, now=NOW) == ["cpu"]
        devices = {row.id: row.device for row in session.scalars(sa.select(Submission))}
    assert devices == {waiting: "cpu", running: "cuda:h200"}  # what is being graded stays where it is
    assert school.claim().submission_id == waiting
    # its worker is gone with its GPU: it comes back to the queue, and follows too
    with school.database.write() as session:
        assert submissions.sweep(session, now=LAPSED) == ["cpu"]
    assert school.claim(now=LAPSED).submission_id == running


def test_what_is_measured_again_is_measured_where_its_assignment_is_graded_now(school, facts, moved_to):
    submission_id = school.graded("ada", facts())
    moved_to("cuda")
    with school.database.write() as session:
        assert submissions.run_again(session, submission_id, actor_id=None, now=NOW) == "cuda"
    assert school.claim() is None


def test_a_worker_takes_only_what_its_device_may_grade(school):
    with school.database.write() as session:
        session.add(school.entry)
        school.entry.device = "cuda"
    school.hand_in()
    assert school.claim() is None
    with school.database.write() as session:
        assert submissions.claim_next(session, worker="g", device="cuda", now=NOW, lease=LEASE) is not None


def test_eight_workers_claim_each_row_once(school):
    expected = {school.hand_in(name).submission_id for name in ("ada", "bob", "cy", "dee") for _ in range(6)}
    claimed, start = [], threading.Barrier(8)

    def work(worker: str) -> None:
        start.wait()
        while (job := school.claim(worker=worker)) is not None:
            claimed.append(job)

    threads = [threading.Thread(target=work, args=(f"w{i}",)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(job.submission_id for job in claimed) == sorted(expected)
    assert {job.attempt for job in claimed} == {1}


def test_who_had_fewer_gradings_of_late_goes_first(school):
    ada = [school.hand_in("ada", now=NOW + timedelta(seconds=i)).submission_id for i in range(3)]
    bob = school.hand_in("bob", now=NOW + timedelta(seconds=10)).submission_id
    later = NOW + timedelta(seconds=20)
    order = []
    while (job := school.claim(now=later)) is not None:
        order.append(job.submission_id)
    assert order == [ada[0], bob, ada[1], ada[2]]


def test_gradings_of_long_ago_are_forgiven(school, facts):
    school.graded("ada", facts())
    much_later = NOW + submissions.FAIRNESS_WINDOW + timedelta(minutes=1)
    ada = school.hand_in("ada", now=much_later).submission_id
    school.hand_in("bob", now=much_later + timedelta(seconds=1))
    job = school.claim(now=much_later + timedelta(seconds=2))
    assert job.submission_id == ada


def test_the_place_in_the_queue_is_the_order_of_claiming(school, facts):
    school.graded("ada", facts())
    ids = [school.hand_in(name, now=NOW + timedelta(seconds=i)).submission_id for i, name in enumerate("aabacb")]
    later = NOW + timedelta(seconds=30)
    with school.database.read() as session:
        places = {i: submissions.place_in_queue(session, i, now=later) for i in ids}
    claimed = [school.claim(now=later).submission_id for _ in ids]
    assert [places[i] for i in claimed] == [1, 2, 3, 4, 5, 6]
    with school.database.read() as session:
        assert submissions.place_in_queue(session, ids[0], now=later) is None


@given(rows=st.lists(st.integers(0, 4), max_size=30), loads=st.dictionaries(st.integers(0, 4), st.integers(0, 5)))
def test_the_fair_order_is_what_one_claim_after_another_gives(rows, loads):
    waiting, had, claimed = list(enumerate(rows)), dict(loads), []
    while waiting:
        row = min(waiting, key=lambda row: (had.get(row[1], 0), row[0]))
        waiting.remove(row)
        claimed.append(row[0])
        had[row[1]] = had.get(row[1], 0) + 1
    assert fair_order(list(enumerate(rows)), loads) == claimed


def test_progress_is_seen_while_it_runs(school):
    school.hand_in()
    job = school.claim()
    with school.database.write() as session:
        assert submissions.progress(session, job, {"numerics": 0.25})
    assert submissions.stages_of(find(school, job.submission_id)) == {"numerics": 0.25}


def test_a_grade_is_recorded_with_its_measurements(school, facts):
    found = facts(passed=1)
    submission_id = school.graded("ada", found, now=NOW + timedelta(seconds=5))
    row = find(school, submission_id)
    assert (row.state, row.lease_until, row.stages) == (State.DONE, None, None)
    assert measurement.loads(row.result.examination) == found
    grade = json.loads(row.result.grade)
    assert (row.result.verdict, row.result.points) == (grade["verdict"], grade["score"]["points"])
    assert (row.result.attempt, row.result.judged_at) == (1, NOW + timedelta(seconds=5))
    assert row.result.provisional


def test_hostile_text_in_a_measurement_is_stored_on_both_databases(school, broken_file):
    row = find(school, school.graded("ada", broken_file))
    assert row.result.verdict == "error"
    assert measurement.loads(row.result.examination) == broken_file


def test_a_note_that_quotes_hostile_text_is_stored_on_both_databases(school):
    school.hand_in()
    job = school.claim()
    with school.database.write() as session:
        assert submissions.give_up(session, job, note="it said \0\x1b[31m\ud800", now=NOW) is State.QUEUED
    assert find(school, job.submission_id).fault_note == "it said \\0\\x1b[31m\\ud800"


def test_a_lease_that_is_renewed_does_not_lapse(school):
    school.hand_in()
    job = school.claim()
    with school.database.write() as session:
        assert submissions.renew(session, job, now=NOW + timedelta(seconds=20), lease=LEASE)
    assert school.claim(worker="w2", now=LAPSED) is None


def test_a_dead_workers_submission_goes_to_the_next(school, facts):
    school.hand_in()
    dead = school.claim(worker="w1")
    alive = school.claim(worker="w2", now=LAPSED)
    assert (alive.submission_id, alive.attempt) == (dead.submission_id, 2)
    assert school.record(alive, facts(), now=LAPSED)
    row = find(school, alive.submission_id)
    assert (row.state, row.attempt, row.result.attempt, row.fault_note) == (State.DONE, 2, 2, None)


def test_a_late_worker_can_write_nothing(school, facts):
    school.hand_in()
    late = school.claim(worker="w1")
    current = school.claim(worker="w2", now=LAPSED)
    with school.database.write() as session:
        assert not submissions.renew(session, late, now=LAPSED, lease=LEASE)
        assert not submissions.progress(session, late, {"numerics": 1.0})
        assert not submissions.record(session, late, facts(), school.assignment, now=LAPSED)
        assert submissions.give_up(session, late, note="late", now=LAPSED) is None
        assert not submissions.hand_back(session, late)
    row = find(school, late.submission_id)
    assert (row.state, row.attempt, row.worker, row.stages, row.result) == (State.RUNNING, 2, "w2", None, None)
    assert school.record(current, facts(), now=LAPSED)
    assert not school.record(late, facts(passed=0), now=LAPSED)
    assert find(school, late.submission_id).result.attempt == 2


def test_three_lost_attempts_are_our_fault_and_count_for_nothing(school):
    accepted = school.hand_in()
    now = NOW
    for attempt in (1, 2, 3):
        assert school.claim(now=now).attempt == attempt
        now = now + LEASE + timedelta(seconds=1)
    assert school.claim(now=now) is None
    row = find(school, accepted.submission_id)
    assert (row.state, row.lost_attempts, row.result) == (State.FAULTED, 3, None)
    with school.database.read() as session:
        used = submissions.attempts_used(session, user_id=row.user_id, course_assignment_id=school.entry.id)
    assert used == 0


def test_giving_up_keeps_the_place_and_says_why(school):
    first = school.hand_in("ada")
    school.hand_in("ada", now=NOW + timedelta(seconds=1))
    job = school.claim()
    with school.database.write() as session:
        assert submissions.give_up(session, job, note="no sandbox on host x", now=NOW) is State.QUEUED
    row = find(school, first.submission_id)
    assert (row.state, row.lost_attempts, row.fault_note) == (State.QUEUED, 1, "no sandbox on host x")
    assert school.claim().submission_id == first.submission_id


def test_giving_up_three_times_faults(school):
    school.hand_in()
    states = []
    for _ in range(3):
        job = school.claim()
        with school.database.write() as session:
            states.append(submissions.give_up(session, job, note="boom", now=NOW))
    assert states == [State.QUEUED, State.QUEUED, State.FAULTED]


def test_handing_back_loses_no_attempt(school):
    school.hand_in()
    for attempt in (1, 2, 3, 4):
        job = school.claim()
        assert job.attempt == attempt
        with school.database.write() as session:
            assert submissions.hand_back(session, job)
    assert find(school, job.submission_id).lost_attempts == 0


def test_the_sweep_takes_back_and_says_where_to_ring(school):
    school.hand_in()
    with school.database.write() as session:
        assert submissions.sweep(session, now=NOW) == ["cpu"]
    job = school.claim()
    with school.database.write() as session:
        assert submissions.sweep(session, now=NOW) == []
        assert submissions.sweep(session, now=LAPSED) == ["cpu"]
    assert find(school, job.submission_id).state is State.QUEUED


@pytest.mark.parametrize("claimed", [False, True], ids=["waiting", "running"])
def test_what_is_cancelled_is_not_graded(school, facts, claimed):
    accepted = school.hand_in()
    job = school.claim() if claimed else None
    with school.database.write() as session:
        assert submissions.cancel(session, accepted.submission_id, actor_id=None, now=NOW)
        assert not submissions.cancel(session, accepted.submission_id, actor_id=None, now=NOW)
    if job is not None:
        assert not school.record(job, facts())
    assert school.claim(now=LAPSED) is None
    assert find(school, accepted.submission_id).state is State.CANCELLED


def test_a_faulted_submission_can_be_run_again(school, facts):
    school.hand_in()
    job = school.claim()
    with school.database.write() as session:
        assert submissions.give_up(session, job, note="bad folder", now=NOW, final=True) is State.FAULTED
        assert submissions.run_again(session, job.submission_id, actor_id=None, now=NOW)
        assert not submissions.run_again(session, job.submission_id, actor_id=None, now=NOW)
    again = school.claim()
    assert again.attempt == 2
    assert school.record(again, facts())
    assert find(school, again.submission_id).lost_attempts == 0


def test_new_measurements_replace_old_ones_only_when_they_are_there(school, facts):
    submission_id = school.graded("ada", facts(passed=0))
    with school.database.write() as session:
        submissions.run_again(session, submission_id, actor_id=None, now=NOW)
    assert find(school, submission_id).result.attempt == 1
    assert school.record(school.claim(), facts(passed=2))
    row = find(school, submission_id)
    assert (row.result.attempt, measurement.loads(row.result.examination)) == (2, facts(passed=2))


def test_a_rejudge_uses_the_stored_measurements_and_is_written_down(school, facts, staff):
    submission_id = school.graded("ada", facts(passed=1))
    before = find(school, submission_id).result
    # the failing probe is dropped from the assignment
    lenient = replace(school.assignment, cases=school.assignment.cases[:1], digest="f" * 64)
    with school.database.write() as session:
        outcome = submissions.rejudge(session, submission_id, lenient, actor_id=staff.id, now=LAPSED)
    after = find(school, submission_id).result
    assert outcome.changed
    assert (outcome.points_before, outcome.points) == (before.points, after.points)
    assert after.points > before.points
    assert (after.judged_at, after.measured_at) == (LAPSED, NOW)
    assert (after.assignment_digest, after.examination) == ("f" * 64, before.examination)
    with school.database.read() as session:
        event = session.scalars(sa.select(AuditEvent).where(AuditEvent.action == "rejudge")).one()
    assert (event.actor_id, event.submission_id, event.at) == (staff.id, submission_id, LAPSED)
    assert f"{before.points:g}" in event.detail


def test_judging_again_by_the_same_rules_changes_nothing(school, facts):
    submission_id = school.graded("ada", facts(passed=1))
    with school.database.write() as session:
        outcome = submissions.rejudge(session, submission_id, school.assignment, actor_id=None, now=LAPSED)
    assert not outcome.changed


def test_what_was_not_graded_cannot_be_judged_again(school):
    accepted = school.hand_in()
    with pytest.raises(UserError, match="not graded yet"), school.database.write() as session:
        submissions.rejudge(session, accepted.submission_id, school.assignment, actor_id=None, now=NOW)


def decide(school, submission_id, staff, *, release, reason="I read the file; the clock of that host was set."):
    with school.database.write() as session:
        return submissions.decide(
            session, submission_id, school.assignment, release=release, reason=reason, actor_id=staff.id, now=NOW
        )


def test_a_held_grade_is_published_by_a_person(school, facts, staff):
    submission_id = school.graded("ada", facts(suspicious=True))
    held = find(school, submission_id).result
    assert held.verdict == "held"
    assert decide(school, submission_id, staff, release=True)
    assert not decide(school, submission_id, staff, release=True)
    with school.database.write() as session:
        submissions.rejudge(session, submission_id, school.assignment, actor_id=staff.id, now=NOW)
    result = find(school, submission_id).result
    assert result.released
    assert result.verdict == result.released_verdict != "held"
    assert result.points == held.points


def test_points_are_taken_by_a_person_with_a_reason_and_judging_again_gives_none_back(school, facts, staff):
    submission_id = school.graded("ada", facts(suspicious=True))
    assert find(school, submission_id).result.points > 0
    assert decide(school, submission_id, staff, release=False, reason="The kernel copies a stored answer.")
    with school.database.write() as session:
        submissions.rejudge(session, submission_id, school.assignment, actor_id=staff.id, now=NOW)
    result = find(school, submission_id).result
    assert (result.verdict, result.points, result.out_of > 0) == ("not_counted", 0.0, True)
    assert all(axis["points"] == 0 for axis in json.loads(result.grade)["axes"].values())
    assert "The kernel copies a stored answer." in json.loads(result.grade)["diagnosis"]["sentence"]


def test_a_decision_can_be_changed_and_both_are_on_record(school, facts, staff):
    submission_id = school.graded("ada", facts(suspicious=True))
    before = find(school, submission_id).result.points
    assert decide(school, submission_id, staff, release=False, reason="first")
    assert decide(school, submission_id, staff, release=True, reason="second")
    assert find(school, submission_id).result.points == before
    with school.database.read() as session:
        events = session.scalars(sa.select(AuditEvent).where(AuditEvent.submission_id == submission_id)).all()
    told = [(one.action, one.detail, one.actor_id) for one in events if one.action in ("release", "confirm")]
    assert told == [("confirm", "first", staff.id), ("release", "second", staff.id)]


@pytest.mark.parametrize("reason", ["", "  \n"], ids=["none", "blank"])
def test_no_decision_without_a_reason(school, facts, staff, reason):
    submission_id = school.graded("ada", facts(suspicious=True))
    for release in (True, False):
        with pytest.raises(UserError, match="Say why"):
            decide(school, submission_id, staff, release=release, reason=reason)
    assert find(school, submission_id).result.verdict == "held"


def test_what_is_not_held_is_not_for_anybody_to_decide(school, facts, staff):
    submission_id = school.graded("ada", facts())
    for release in (True, False):
        assert not decide(school, submission_id, staff, release=release)
    assert find(school, submission_id).result.points > 0


def test_new_measurements_are_held_anew(school, facts, staff):
    submission_id = school.graded("ada", facts(suspicious=True))
    decide(school, submission_id, staff, release=True)
    with school.database.write() as session:
        submissions.run_again(session, submission_id, actor_id=staff.id, now=NOW)
    assert school.record(school.claim(), facts(suspicious=True))
    result = find(school, submission_id).result
    assert (result.verdict, result.released, result.decision_reason) == ("held", False, None)


def test_staff_see_what_runs_and_what_waits(school):
    ids = [school.hand_in(name, now=NOW + timedelta(seconds=i)).submission_id for i, name in enumerate("abc")]
    school.claim(now=NOW + timedelta(seconds=5))
    with school.database.read() as session:
        found = submissions.waiting(session)
        assert [(row.id, row.state) for row in found] == [
            (ids[0], State.RUNNING),
            (ids[1], State.QUEUED),
            (ids[2], State.QUEUED),
        ]
        assert found[0].user.name == "a"
        assert found[0].course_assignment.course.title == "GPU programming"


def test_staff_see_their_own_courses_however_much_waits_elsewhere(school):
    for i in range(5):
        school.hand_in("ada", f"x = {i}".encode(), now=NOW + timedelta(seconds=i))
    with school.database.write() as session:
        other = course.create_course(session, slug="other", title="Other", now=NOW)
        theirs = course.set_assignment(session, course_id=other.id, slug="doubling", now=NOW)
        course.enrol(session, course_id=other.id, user_id=school.user("ada").id, now=NOW)
    mine, school.entry = school.entry, theirs
    last = school.hand_in("ada", now=NOW + timedelta(minutes=1)).submission_id
    with school.database.read() as session:
        found = submissions.waiting(session, course_ids={other.id}, limit=3)
        assert [row.id for row in found] == [last]
        assert submissions.count_waiting(session, course_ids={other.id}) == 1
        assert submissions.count_waiting(session, course_ids={mine.course_id}) == 5
        assert submissions.count_waiting(session) == 6
        assert submissions.count_waiting(session, course_ids=set()) == 0
        assert len(submissions.waiting(session, limit=4, offset=4)) == 2


def test_an_estimate_comes_from_the_gradings_of_late(school, facts):
    def outlook() -> Outlook:
        with school.database.read() as session:
            return submissions.outlook(session, "cpu", now=NOW)

    with school.database.write() as session:
        submissions.report_worker(session, name="w", device="cpu", status=WorkerStatus.IDLE, now=NOW)
        submissions.report_worker(session, name="gpu", device="cuda", status=WorkerStatus.IDLE, now=NOW)
        submissions.report_worker(session, name="off", device="cpu", status=WorkerStatus.STOPPED, now=NOW)
    assert outlook() == Outlook(n_waiting=0, n_running=0, n_workers=1, typical_s=None)
    assert outlook().wait_s() is None
    for i, seconds in enumerate((10, 20, 90)):
        school.hand_in("ada", f"x = {i}".encode(), now=NOW)
        job = school.claim(now=NOW)
        school.record(job, facts(), now=NOW + timedelta(seconds=seconds))
    school.hand_in("ada", b"running", now=NOW)
    school.claim(now=NOW)
    for name in ("bob", "cy"):
        school.hand_in(name, now=NOW)
    found = outlook()
    assert found == Outlook(n_waiting=2, n_running=1, n_workers=1, typical_s=20.0)
    assert found.wait_s(0) == 20 * 1.5  # half of what runs, then this one
    assert found.wait_s() == 20 * 3.5
    assert replace(found, n_workers=2).wait_s() == 20 * 2.25
    assert replace(found, n_workers=0).wait_s() is None
    assert replace(found, n_running=3).wait_s() == 20 * (3.5 / 3 + 1)  # one worker that has three in hand


def test_an_outlook_counts_the_workers_that_serve_the_device_and_names_their_gpus(database):
    with database.write() as session:
        for name, device, status in (
            ("a", "cuda:h200", WorkerStatus.IDLE),
            ("b", "cuda:a100", WorkerStatus.GRADING),
            ("c", "cuda:l4", WorkerStatus.QUARANTINED),
            ("d", "cpu", WorkerStatus.IDLE),
        ):
            submissions.report_worker(session, name=name, device=device, status=status, now=NOW)
    with database.read() as session:
        found = {device: submissions.outlook(session, device, now=NOW) for device in ("cuda", "cuda:h200", "cpu")}
        later = submissions.outlook(session, "cuda", now=NOW + timedelta(minutes=5))
    assert (found["cuda"].n_workers, found["cuda"].models) == (2, ("a100", "h200"))
    assert (found["cuda:h200"].n_workers, found["cuda:h200"].models) == (1, ("h200",))
    assert (found["cpu"].n_workers, found["cpu"].models) == (1, ())
    assert later.n_workers == 0


def test_workers_report_themselves(database):
    with database.write() as session:
        submissions.report_worker(
            session, name="w", device="cpu", status=WorkerStatus.STARTING, now=NOW, note="reduced"
        )
        later = NOW + timedelta(seconds=50)
        submissions.report_worker(session, name="w", device="cpu", status=WorkerStatus.IDLE, now=later)
    with database.read() as session:
        (worker,) = submissions.workers(session)
    assert (worker.started_at, worker.seen_at, worker.note) == (NOW, later, "reduced")
    assert not submissions.is_gone(worker, later + timedelta(seconds=59))
    assert submissions.is_gone(worker, later + timedelta(seconds=61))


def test_workers_of_yesterday_are_forgotten(database):
    with database.write() as session:
        for name, seen in (("old", NOW), ("new", NOW + timedelta(hours=20))):
            submissions.report_worker(session, name=name, device="cpu", status=WorkerStatus.IDLE, now=seen)
    with database.write() as session:
        submissions.sweep(session, now=NOW + timedelta(hours=25))
        assert [worker.name for worker in submissions.workers(session)] == ["new"]


def test_no_measurement_is_kept_without_its_grade(school, facts):
    school.hand_in()
    job = school.claim()
    unserialisable = replace(facts(), stages=(measurement.Stage(name="numerics", seconds=float("nan")),))
    with pytest.raises(ValueError, match="JSON"):
        school.record(job, unserialisable)
    with school.database.read() as session:
        assert session.scalars(sa.select(Result.submission_id)).all() == []
        assert session.scalars(sa.select(Submission.state)).one() is State.RUNNING
