"""What may be handed in, when, and how often."""

from __future__ import annotations

import hashlib
import threading
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
import sqlalchemy as sa

from grader import course, submissions
from grader.errors import UserError
from grader.models import Extension, Role, State, Submission
from grader.submissions import Allowance, decode_source

NOW = datetime(2027, 2, 1, 12, 0, tzinfo=UTC)
AFTER_DEADLINE = datetime(2027, 3, 2, tzinfo=UTC)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        pytest.param(b"", "is empty", id="nothing"),
        pytest.param(b" \r\n\t", "is empty", id="blanks"),
        pytest.param(b"x" * (300 * 1024), "is 300 KiB and the limit is 256 KiB", id="300-kib"),
        pytest.param(b"x" * (256 * 1024 + 1), "the limit is 256 KiB", id="one-byte-too-many"),
        pytest.param(b"\x89PNG\r\n\x1a\n\0\0", "is a PNG image, not Python text", id="png"),
        pytest.param(b"PK\x03\x04\0\0", "is a ZIP archive", id="zip"),
        pytest.param("x = 1\n# café".encode("latin-1"), "line 2 holds the byte 0xe9", id="latin-1"),
        pytest.param("x = 1".encode("utf-16"), "is not UTF-8", id="utf-16"),
        pytest.param(b"# \xed\xa0\x80", "is not UTF-8", id="surrogate"),
        pytest.param(b"x = 1\ny = '\0'", "NUL byte on line 2", id="nul"),
    ],
)
def test_what_is_not_a_python_file_gets_one_clear_sentence(data, message):
    with pytest.raises(UserError) as refused:
        decode_source(data, max_bytes=256 * 1024)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        pytest.param(b"x", "x", id="one-byte"),
        pytest.param(b"a = 1\r\nb = 2\r\n", "a = 1\r\nb = 2\r\n", id="crlf-is-kept"),
        pytest.param(b"a = 1\rb = 2", "a = 1\rb = 2", id="cr-is-kept"),
        pytest.param(b"\xef\xbb\xbfa = 1", "a = 1", id="byte-order-mark-is-dropped"),
        pytest.param("# 行".encode(), "# 行", id="any-script"),
        pytest.param(b"x" * (256 * 1024), "x" * (256 * 1024), id="exactly-256-kib"),
        pytest.param(b"\x1b[31m", "\x1b[31m", id="control-characters-are-the-pages-business"),
    ],
)
def test_text_is_taken_as_it_is(data, text):
    assert decode_source(data, max_bytes=256 * 1024) == text


def test_a_hand_in_waits_with_what_it_needs(school):
    source = b"def double(x):\r\n    return 2 * x  # \xe2\x9c\x93\r\n"
    accepted = school.hand_in("ada", source)
    assert accepted.new
    with school.database.read() as session:
        row = submissions.find(session, accepted.submission_id)
        assert row is not None
        assert row.state is State.QUEUED
        assert row.source.encode() == source
        assert row.source_sha256 == hashlib.sha256(source).hexdigest()
        assert row.source_bytes == len(source)
        assert row.assignment_digest == school.assignment.digest
        assert (row.user.name, row.course_assignment.slug, row.result) == ("ada", "doubling", None)


def test_a_double_click_is_one_submission(school):
    first, second = school.hand_in(key="form-1"), school.hand_in(key="form-1")
    assert second.submission_id == first.submission_id
    assert (first.new, second.new) == (True, False)


def test_the_same_form_with_another_file_is_another_submission(school):
    first, second = school.hand_in(key="form-1"), school.hand_in(key="form-1", data=b"x = 2")
    assert second.submission_id != first.submission_id


def test_the_same_file_from_a_new_form_is_another_submission(school):
    assert school.hand_in(key="form-1").submission_id != school.hand_in(key="form-2").submission_id


def test_two_students_may_use_the_same_key(school):
    assert school.hand_in("ada", key="k").submission_id != school.hand_in("bob", key="k").submission_id


def test_one_form_sent_eight_times_at_once_is_one_submission(school):
    school.user("ada")
    found, start = [], threading.Barrier(8)

    def send() -> None:
        start.wait()
        found.append(school.hand_in("ada", key="form-1").submission_id)

    threads = [threading.Thread(target=send) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1


def test_nothing_is_taken_after_the_deadline(school):
    school.hand_in(now=datetime(2027, 3, 1, 23, 59, tzinfo=UTC))
    with pytest.raises(UserError, match="deadline was 01 March 2027 at 23:59 UTC"):
        school.hand_in(now=AFTER_DEADLINE)


def test_a_double_click_across_the_deadline_still_finds_its_submission(school):
    first = school.hand_in(key="form-1", now=datetime(2027, 3, 1, 23, 59, tzinfo=UTC))
    assert school.hand_in(key="form-1", now=AFTER_DEADLINE).submission_id == first.submission_id


def test_an_extension_is_one_students_own(school):
    ada = school.user("ada")
    with school.database.write() as session:
        course.grant_extension(
            session,
            entry=school.entry,
            assignment=school.assignment,
            user=ada,
            until=AFTER_DEADLINE + timedelta(days=1),
            actor_id=None,
            now=NOW,
        )
    school.hand_in("ada", now=AFTER_DEADLINE)
    with pytest.raises(UserError, match="The deadline was"):
        school.hand_in("bob", now=AFTER_DEADLINE)
    with pytest.raises(UserError, match="Your extended deadline was"):
        school.hand_in("ada", now=AFTER_DEADLINE + timedelta(days=2))


def test_an_extension_never_shortens(school):
    ada = school.user("ada")
    with school.database.write() as session:
        session.add(Extension(course_assignment_id=school.entry.id, user_id=ada.id, until=NOW))
    assert school.hand_in("ada", now=NOW + timedelta(days=1)).new


def test_the_courses_deadline_stands_over_the_folders(school):
    with school.database.write() as session:
        session.add(school.entry)
        school.entry.deadline = NOW
    with pytest.raises(UserError, match="01 February 2027"):
        school.hand_in(now=NOW + timedelta(seconds=1))


def test_an_assignment_opens_when_it_says(school):
    with school.database.write() as session:
        session.add(school.entry)
        school.entry.opens_at = NOW
    with pytest.raises(UserError, match="opens on 01 February 2027 at 12:00 UTC"):
        school.hand_in(now=NOW - timedelta(seconds=1))
    school.hand_in(now=NOW)


def test_instructors_may_try_an_assignment_at_any_time(school):
    school.user("ira", Role.INSTRUCTOR)
    assert school.hand_in("ira", now=AFTER_DEADLINE).new


def test_a_closed_assignment_takes_nothing_and_keeps_the_reason_for_staff(school):
    with school.database.write() as session:
        session.add(school.entry)
        course.close_assignment(session, entry=school.entry, reason="case 'wide' is broken", actor_id=None, now=NOW)
    with pytest.raises(UserError, match="closed at the moment") as refused:
        school.hand_in()
    assert "wide" not in str(refused.value)


def test_strangers_may_not_hand_in(school):
    school.user("eve", role=None)
    with pytest.raises(UserError, match="not enrolled"):
        school.hand_in("eve")


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        pytest.param({"hand_ins_per_minute": 2}, "2 files within the last minute", id="minute"),
        pytest.param({"hand_ins_per_hour": 2}, "2 files within the last hour", id="hour"),
        pytest.param({"max_waiting_per_student": 2}, "2 of your submissions are not graded yet", id="waiting"),
    ],
)
def test_hand_ins_are_rationed(school, limit, message):
    school.settings = replace(school.settings, **limit)
    school.hand_in("ada")
    school.hand_in("ada")
    with pytest.raises(UserError, match=message):
        school.hand_in("ada")
    assert school.hand_in("bob").new


def test_a_ration_comes_back_with_time(school):
    school.settings = replace(school.settings, hand_ins_per_minute=1)
    school.hand_in()
    assert school.hand_in(now=NOW + timedelta(seconds=61)).new


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        pytest.param({"hand_ins_per_minute": 2}, 60, id="minute"),
        pytest.param({"hand_ins_per_hour": 2}, 3600, id="hour"),
        pytest.param({"hand_ins_per_minute": 2, "hand_ins_per_hour": 2}, 3600, id="the-longer-one-counts"),
    ],
)
def test_the_page_says_when_the_next_is_taken_and_then_it_is(school, limit, seconds):
    school.settings = replace(school.settings, **limit)

    def allowed(now: datetime) -> Allowance:
        with school.database.read() as session:
            return submissions.allowance(
                session,
                user_id=school.user("ada").id,
                entry=school.entry,
                assignment=school.assignment,
                settings=school.settings,
                now=now,
            )

    assert allowed(NOW).refusal == ""
    school.hand_in("ada", now=NOW)
    school.hand_in("ada", b"x = 1", now=NOW + timedelta(seconds=7))
    found = allowed(NOW + timedelta(seconds=9))
    assert found.next_at == NOW + timedelta(seconds=seconds)
    with pytest.raises(UserError, match=found.refusal):
        school.hand_in("ada", b"x = 2", now=found.next_at - timedelta(seconds=1))
    assert allowed(found.next_at).refusal == ""
    assert school.hand_in("ada", b"x = 2", now=found.next_at).new


def test_only_verdicts_of_the_students_making_use_up_attempts(school, facts):
    school.assignment = replace(school.assignment, limits=replace(school.assignment.limits, attempts=2))

    def used() -> int:
        with school.database.read() as session:
            return submissions.attempts_used(
                session, user_id=school.user("ada").id, course_assignment_id=school.entry.id
            )

    school.graded("ada", facts(passed=0))  # provisional: not on the device that the assignment asks for
    assert used() == 0
    cancelled = school.hand_in("ada")
    assert used() == 1  # on its way
    with school.database.write() as session:
        assert submissions.cancel(session, cancelled.submission_id, actor_id=None, now=NOW)
    assert used() == 0
    school.graded("ada", facts(passed=0, on="cuda"))
    school.graded("ada", facts(passed=1, on="cuda"))
    assert used() == 2
    with pytest.raises(UserError, match="all 2 attempts"):
        school.hand_in("ada")


def test_a_refused_file_leaves_no_trace(school):
    with pytest.raises(UserError):
        school.hand_in("ada", b"")
    with school.database.read() as session:
        assert session.scalars(sa.select(Submission.id)).all() == []
