"""The commands of `tilegrade`."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import click
import pytest
import redis
from click.testing import CliRunner
from sqlalchemy import select, update

from grader import accounts, db, examining, submissions
from grader.cli import cli
from grader.db import Database
from grader.errors import AssignmentError, GraderFault, UserError
from grader.models import CourseAssignment, Result, State, Submission
from grader.settings import Settings

ROOT = Path(__file__).parents[2]
OK_FILE = ROOT / "tests" / "corpus" / "online-softmax" / "ok-row-block.py"


@pytest.fixture
def environ(tmp_path, new_sqlite_url, assignments_dir):
    return {
        "TILEGRADE_DATA": str(tmp_path / "data"),
        "TILEGRADE_ASSIGNMENTS": str(assignments_dir),
        "TILEGRADE_DATABASE_URL": new_sqlite_url(),
        "TILEGRADE_BROKER_URL": "redis+socket:///nowhere.sock",
    }


@pytest.fixture
def tilegrade(environ):
    """Runs a command in this process; what it raises is raised here."""

    def run(*arguments, stdin=None, status=0):
        done = CliRunner().invoke(cli, [str(one) for one in arguments], env=environ, input=stdin, catch_exceptions=True)
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        assert done.exit_code == status, done.output
        return done.output

    return run


@pytest.fixture
def course_of_ada(tilegrade):
    tilegrade("user", "add", "ada")
    assert tilegrade("course", "create", "gpu", "--title", "GPU programming") == "gpu: GPU programming\n"
    tilegrade("course", "assign", "gpu", "doubling")
    tilegrade("course", "enrol", "gpu", "ada")


@pytest.fixture
def hand_in(tilegrade, tmp_path, course_of_ada):
    def submit(data=b"x = 1"):
        file = tmp_path / "mine.py"
        file.write_bytes(data)
        return int(tilegrade("submit", file, "--user", "ada", "--course", "gpu", "--assignment", "doubling"))

    return submit


def in_process_of_its_own(*arguments, environ, **options):
    return subprocess.run(
        [sys.executable, "-m", "grader.cli", *map(str, arguments)],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], **environ},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        **options,
    )


def test_a_file_is_handed_in_and_waits(hand_in, environ):
    submission_id = hand_in()
    database = Database(environ["TILEGRADE_DATABASE_URL"])
    with database.read() as session:
        row = submissions.find(session, submission_id)
        assert (row.state, row.user.name, row.filename, row.source) == (State.QUEUED, "ada", "mine.py", "x = 1")
    database.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("submit", OK_FILE, "--user", "eve", "--course", "gpu", "--assignment", "doubling"), "no user 'eve'"),
        (("submit", OK_FILE, "--user", "ada", "--course", "cpu", "--assignment", "doubling"), "no course 'cpu'"),
        (("submit", OK_FILE, "--user", "ada", "--course", "gpu", "--assignment", "x"), "does not set 'x'"),
        (("submit", "gone.py", "--user", "ada", "--course", "gpu", "--assignment", "doubling"), "Cannot read gone.py"),
        (("course", "enrol", "gpu", "eve"), "tilegrade user add eve"),
        (("user", "add", "ada"), "already"),
        (("course", "create", "Not A Slug", "--title", "x"), "lower-case words"),
        (("grade", OK_FILE, "--assignment", "tripling"), "There is no assignment 'tripling'.*there are: doubling"),
        (("grade", OK_FILE, "--assignment", "doubling", "--device", "cuda"), "No GPU can be used"),
        (("grade", OK_FILE, "--assignment", "doubling", "--replay"), "A replay needs a GPU"),
    ],
    ids=lambda value: " ".join(str(one) for one in value[:2]) if isinstance(value, tuple) else "",
)
def test_a_mistake_is_answered_with_what_to_do(tilegrade, course_of_ada, arguments, message):
    with pytest.raises(UserError, match=message):
        tilegrade(*arguments)


def test_an_assignment_that_does_not_exist_cannot_be_set(tilegrade, course_of_ada):
    with pytest.raises(UserError, match=r"There is no assignment 'tripling'; there are: doubling\.$"):
        tilegrade("course", "assign", "gpu", "tripling")


def test_an_assignment_that_is_not_finished_cannot_be_set(tilegrade, course_of_ada, environ, tmp_path):
    shutil.copytree(environ["TILEGRADE_ASSIGNMENTS"], tmp_path / "assignments")
    environ["TILEGRADE_ASSIGNMENTS"] = str(tmp_path / "assignments")
    handout = tmp_path / "assignments" / "doubling" / "handout.md"
    handout.write_text(handout.read_text() + "\nWRITE: what is tried\n")
    with pytest.raises(UserError, match=r"(?s)'doubling' is not finished, .*handout\.md:5: what is tried"):
        tilegrade("course", "assign", "gpu", "doubling")
    handout.write_text("# Doubling\n\nDouble every element.\n")
    assert "open now" in tilegrade("course", "assign", "gpu", "doubling")


@pytest.mark.parametrize("given", ["tomorrow", "10.12.2026", "2026-12-10T18:00+01:00", "2026-13-01"])
def test_a_moment_that_is_none_is_answered_with_how_to_write_one(course_of_ada, environ, given):
    done = CliRunner().invoke(cli, ["course", "assign", "gpu", "doubling", "--deadline", given], env=environ)
    assert done.exit_code == 2
    assert f"'{given}' is no moment. Write 2026-12-10 or 2026-12-10T18:00, in UTC" in done.output


def test_a_password_is_printed_once_or_never(tilegrade):
    name, password = tilegrade("user", "add", "Bob").strip().split(": ")
    assert (name, len(password)) == ("bob", 23)
    assert password not in tilegrade("user", "list")
    assert tilegrade("user", "passwd", "bob", "--password-stdin", stdin="a better password\n") == "Done.\n"


def test_people_and_courses_are_listed(tilegrade, course_of_ada):
    tilegrade("user", "add", "root", "--staff")
    assert tilegrade("user", "list") == "ada: student in gpu\nroot (staff)\n"
    assert (
        tilegrade("course", "list")
        == "gpu: GPU programming\n    doubling: cpu, until 2027-03-01 23:59 UTC (the folder's)\n"
    )


def test_what_changes_a_course_says_what_holds_now(tilegrade, course_of_ada, environ):
    assert tilegrade("course", "enrol", "gpu", "Ada", "--role", "instructor") == "ada is an instructor in gpu\n"
    assign = ("course", "assign", "gpu", "doubling")
    assert tilegrade(*assign) == "doubling: cpu, until 2027-03-01 23:59 UTC (the folder's), open now\n"
    late = ("--deadline", "2999-12-10", "--late-days", "2", "--late-percent", "10")
    assert tilegrade(*assign, *late) == "doubling: cpu, until 2999-12-10 23:59:59 UTC, 2 late days at 10 %, open now\n"
    past = ("--deadline", "2020-12-10", "--late-days", "0")
    assert tilegrade(*assign, *past) == "doubling: cpu, until 2020-12-10 23:59:59 UTC, not open\n"
    later = ("--deadline", "2999-12-10", "--opens-at", "2998-01-02")
    assert tilegrade(*assign, *later).endswith(", opens 2998-01-02 00:00 UTC\n")
    tilegrade(*assign, "--opens-at", "none")
    closed = tilegrade("course", "close", "gpu", "doubling", "--reason", "broken")
    assert closed == "doubling: cpu, until 2999-12-10 23:59:59 UTC, closed: broken\n"
    assert tilegrade(*assign).endswith(", closed: broken, not open\n")
    assert tilegrade("course", "reopen", "gpu", "doubling").endswith("until 2999-12-10 23:59:59 UTC, open now\n")


def test_who_leaves_a_course_is_in_no_grades_and_may_come_back(tilegrade, hand_in):
    number = hand_in()
    assert tilegrade("course", "unenrol", "gpu", "Ada") == "ada is no longer in gpu\n"
    assert tilegrade("user", "list") == "ada\n"
    assert "ada" not in tilegrade("course", "grades", "gpu")
    with pytest.raises(UserError, match="ada is not in gpu"):
        tilegrade("course", "unenrol", "gpu", "ada")
    with pytest.raises(UserError, match="You are not enrolled in this course"):
        tilegrade("submit", OK_FILE, "--user", "ada", "--course", "gpu", "--assignment", "doubling")
    assert "unenrol: user ada, course gpu, who was student" in tilegrade("audit", "--limit", 1)
    tilegrade("course", "enrol", "gpu", "ada")
    assert tilegrade("course", "grades", "gpu").splitlines()[1].startswith("ada,doubling,")
    assert number == 1


def test_an_assignment_leaves_a_course_where_nothing_was_handed_in(tilegrade, course_of_ada, tmp_path):
    tilegrade("course", "extend", "gpu", "doubling", "ada", "--until", "2999-01-01")
    assert tilegrade("course", "unassign", "gpu", "doubling") == "gpu sets doubling no longer\n"
    assert tilegrade("course", "list") == "gpu: GPU programming\n"
    with pytest.raises(UserError, match="does not set 'doubling'"):
        tilegrade("course", "unassign", "gpu", "doubling")
    tilegrade("course", "assign", "gpu", "doubling")
    (tmp_path / "mine.py").write_text("x = 1")
    tilegrade("submit", tmp_path / "mine.py", "--user", "ada", "--course", "gpu", "--assignment", "doubling")
    with pytest.raises(UserError, match=r"1 submission for doubling would be lost .* `tilegrade course close gpu d"):
        tilegrade("course", "unassign", "gpu", "doubling")


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("course", "enrol", "gpu", "bob", "eve"), id="enrol"),
        pytest.param(("course", "unenrol", "gpu", "ada", "eve"), id="unenrol"),
        pytest.param(("course", "assign", "gpu", "doubling", "broken", "--deadline", "2027-01-05"), id="assign"),
    ],
)
def test_what_did_not_come_about_is_not_told(tilegrade, course_of_ada, environ, assignments_dir, tmp_path, arguments):
    """The second name is wrong, so the first is not done either."""
    own = tmp_path / "assignments"
    shutil.copytree(assignments_dir, own)
    shutil.copytree(own / "doubling", own / "broken")
    (own / "broken" / "assignment.toml").write_text("title = 1\n")
    environ["TILEGRADE_ASSIGNMENTS"] = str(own)
    tilegrade("user", "add", "bob")
    before = tilegrade("user", "list"), tilegrade("course", "list")
    done = CliRunner().invoke(cli, arguments, env=environ)
    assert isinstance(done.exception, UserError | AssignmentError)
    assert done.stdout == ""
    assert (tilegrade("user", "list"), tilegrade("course", "list")) == before


# -- a course from a spreadsheet -----------------------------------------------------------------------------------


@pytest.fixture
def roster(environ, course_of_ada, tmp_path):
    """Hands a file to `course roster`; what it printed on either side, and its status."""

    def put(text, *options, encoding="utf-8"):
        file = tmp_path / "students.csv"
        file.write_bytes(text.encode(encoding))
        done = CliRunner().invoke(cli, ["course", "roster", "gpu", str(file), *options], env=environ)
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return done.stdout, done.stderr, done.exit_code

    return put


@pytest.mark.parametrize(
    ("text", "options"),
    [
        pytest.param("name,mail\nbob,b@x\nAda,a@x\n", (), id="heading"),
        pytest.param('mail;NAME;note\nb@x;bob;"a;b\nc"\na@x;ada;\n;;\n', (), id="semicolons-and-another-order"),
        pytest.param("\ufeffname\r\nbob\r\nada\r\n", (), id="byte-order-mark"),
        pytest.param("bob\n\nada\n", (), id="names-alone"),
        pytest.param("name\tlogin\nBob B.\tbob\nAda L.\tada\n", ("--column", "login"), id="another-column"),
    ],
)
def test_a_course_is_filled_from_a_spreadsheet(roster, tilegrade, environ, text, options):
    said, summary, status = roster(text, *options)
    name, _, password = said.strip().partition(",")
    assert (name, status) == ("bob", 0)
    assert summary == "2 names: 1 put into gpu, 1 in it before, 0 not done; 1 new account.\n"
    assert tilegrade("user", "list") == "ada: student in gpu\nbob: student in gpu\n"
    database = Database(environ["TILEGRADE_DATABASE_URL"])
    with database.write() as session:
        settings = Settings.from_env(environ)
        known = accounts.log_in(
            session, name="bob", password=password, address="::1", settings=settings, now=datetime.now(UTC)
        )
        assert known is not None
    database.close()
    # the same file again changes nothing, and shows no password
    assert roster(text, *options) == ("", "2 names: 0 put into gpu, 2 in it before, 0 not done; 0 new accounts.\n", 0)


def test_a_line_that_cannot_be_done_is_named_and_the_others_are_done(roster, tilegrade):
    tilegrade("user", "add", "tina")
    tilegrade("course", "enrol", "gpu", "tina", "--role", "instructor")
    said, summary, status = roster("name\nbob\nno name\ntina\ncy\n")
    assert [line.partition(",")[0] for line in said.splitlines()] == ["bob", "cy"]
    assert "line 3: 'no name' cannot be a user name" in summary
    assert "2 put into gpu, 1 in it before, 1 not done" in summary
    assert status == 1
    # who teaches is not made a student by a list
    assert "tina: instructor in gpu" in tilegrade("user", "list")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("mail,group\nb@x,1\n", "no column 'name'; it has: mail, group", id="no-such-column"),
        pytest.param("", "no column 'name'; it has: nothing", id="empty"),
        pytest.param('name\n"bob\n', "line 2", id="open-quote"),
    ],
)
def test_a_spreadsheet_that_cannot_be_read_is_answered_with_what_to_do(roster, tilegrade, text, message):
    with pytest.raises(UserError, match=message):
        roster(text)
    assert tilegrade("user", "list") == "ada: student in gpu\n"


def test_a_spreadsheet_in_another_encoding_is_refused(roster):
    with pytest.raises(UserError, match="Save it as CSV in UTF-8"):
        roster("name\nj\xf6rg\n", encoding="latin-1")


def test_a_deadline_is_set_in_utc(tilegrade, course_of_ada):
    tilegrade("course", "assign", "gpu", "doubling", "--deadline", "2030-01-02 03:04:05")
    assert "until 2030-01-02 03:04:05 UTC" in tilegrade("course", "list")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param(("--device", "cuda"), "cuda, until 2030-01-02 03:04:05 UTC, 3 late days at 5 %", id="device"),
        pytest.param(
            ("--device", "cuda:H200"), "cuda:h200, until 2030-01-02 03:04:05 UTC, 3 late days at 5 %", id="model"
        ),
        pytest.param(("--late-percent", "20"), "cpu, until 2030-01-02 03:04:05 UTC, 3 late days at 20 %", id="price"),
        pytest.param(("--late-days", "0"), "cpu, until 2030-01-02 03:04:05 UTC", id="no-late-days"),
        pytest.param(
            ("--deadline", "none"),
            "cpu, until 2027-03-01 23:59 UTC (the folder's), 3 late days at 5 %",
            id="deadline-taken",
        ),
        pytest.param((), "cpu, until 2030-01-02 03:04:05 UTC, 3 late days at 5 %", id="nothing"),
    ],
)
def test_setting_an_assignment_again_changes_what_is_named_and_nothing_else(tilegrade, course_of_ada, arguments, said):
    first = ("--deadline", "2030-01-02 03:04:05", "--opens-at", "2029-01-01", "--late-days", "3", "--late-percent", "5")
    tilegrade("course", "assign", "gpu", "doubling", *first)
    tilegrade("course", "assign", "gpu", "doubling", *arguments)
    assert tilegrade("course", "list").splitlines()[-1] == f"    doubling: {said}"


def test_what_is_no_device_is_refused(tilegrade, course_of_ada):
    with pytest.raises(UserError, match="'gpu' is no device"):
        tilegrade("course", "assign", "gpu", "doubling", "--device", "gpu")


@pytest.mark.slow
def test_the_host_is_tried_on_demand(tilegrade):
    lines = tilegrade("worker", "check").splitlines()
    assert lines[0].startswith("ok   namespaces: compared ")
    assert any(line.startswith("ok   pool interpreter: ") for line in lines)
    found = json.loads(tilegrade("worker", "check", "--json"))
    assert found["ok"] is True
    assert [one["name"] for one in found["checks"]] == [
        line[5:].partition(":")[0] for line in lines if line[:5].strip()
    ]


def test_a_host_that_may_not_grade_says_what_to_do(tilegrade, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    said = tilegrade("worker", "check", status=1)
    assert said.startswith("FAIL sandbox: ")
    assert "\n     Grading needs bubblewrap 0.8 or newer: `apt-get install bubblewrap`." in said
    assert json.loads(tilegrade("worker", "check", "--json", status=1))["ok"] is False


def test_a_board_is_shown_frozen_listed_and_withdrawn(tilegrade, hand_in, environ, facts, assignment):
    with pytest.raises(UserError, match="Nobody is on this board yet"):
        tilegrade("board", "freeze", "gpu", "doubling", "--title", "Week 1")
    submission_id = hand_in()
    database = Database(environ["TILEGRADE_DATABASE_URL"])
    with database.write() as session:
        row = submissions.find(session, submission_id)
        job = submissions.claim_next(
            session, worker="w", device="cpu", now=row.submitted_at, lease=row.submitted_at - row.submitted_at
        )
        submissions.record(session, job, facts(passed=2), assignment, now=row.submitted_at)
    database.close()
    live = tilegrade("board", "show", "gpu", "doubling")
    assert live.startswith("rank,tied,name,points,")
    assert len(live.splitlines()) == 2
    assert ",ada," not in live
    assert tilegrade("board", "freeze", "gpu", "doubling", "--title", "Week 1") == "1\n"
    assert tilegrade("board", "list", "gpu", "doubling").startswith("1: Week 1, frozen ")
    assert tilegrade("board", "show", "gpu", "doubling", "--frozen", 1) == live
    early = tilegrade("board", "freeze", "gpu", "doubling", "--title", "All", "--until", "2100-01-01")
    assert early == "2\n"
    tilegrade("board", "withdraw", "gpu", "doubling", 1)
    assert tilegrade("board", "list", "gpu", "doubling").startswith("2: All, frozen ")
    with pytest.raises(UserError, match="no frozen board 1"):
        tilegrade("board", "show", "gpu", "doubling", "--frozen", 1)


def test_assignments_are_listed_and_a_broken_one_is_explained(tilegrade, environ, tmp_path, assignments_dir):
    assert tilegrade("assignment", "list") == "doubling: Doubling, 2 probes, until 2027-03-01 23:59 UTC\n"
    (tmp_path / "all" / "broken").mkdir(parents=True)
    (tmp_path / "all" / "broken" / "assignment.toml").write_text("")
    environ["TILEGRADE_ASSIGNMENTS"] = str(tmp_path / "all")
    assert "handout.md: missing" in tilegrade("assignment", "list", status=1)


def test_judging_again_says_what_changed(tilegrade, hand_in, environ, facts, assignment):
    submission_id = hand_in()
    database = Database(environ["TILEGRADE_DATABASE_URL"])
    with database.write() as session:
        row = submissions.find(session, submission_id)
        job = submissions.claim_next(
            session, worker="w", device="cpu", now=row.submitted_at, lease=row.submitted_at - row.submitted_at
        )
        submissions.record(session, job, facts(passed=1), assignment, now=row.submitted_at)
        session.get_one(Result, submission_id).points = 1.0  # as if it had been judged by other rules
    database.close()
    assert tilegrade("rejudge", submission_id) == f"{submission_id}: wrong 1 -> wrong 40\n1 judged again, 1 changed.\n"
    assert tilegrade("rejudge", "--assignment", "doubling") == "1 judged again, 0 changed.\n"


def test_what_cannot_be_judged_again_is_said_and_the_others_are(tilegrade, hand_in, environ, facts, assignment):
    first, never, last = hand_in(b"x = 1"), hand_in(b"x = 2"), hand_in(b"x = 3")
    database = Database(environ["TILEGRADE_DATABASE_URL"])
    with database.write() as session:
        for _ in range(3):
            now = submissions.find(session, first).submitted_at
            job = submissions.claim_next(session, worker="w", device="cpu", now=now, lease=timedelta(hours=1))
            if job.submission_id != never:
                submissions.record(session, job, facts(), assignment, now=now)
    database.close()
    assert tilegrade("rejudge", first, never, 99, last, status=1).splitlines() == [
        f"{never}: Submission {never} was not graded yet, so there is nothing to judge again.",
        "99: There is no submission 99.",
        "2 judged again, 0 changed.",
    ]
    assert tilegrade("rejudge", first, last) == "2 judged again, 0 changed.\n"


def test_what_is_measured_again_rings_for_its_own_device_alone(tilegrade, hand_in, environ, broker):
    """Through a real broker: one bell for each, and nobody else's lease is touched."""
    environ["TILEGRADE_BROKER_URL"] = broker.url
    first, second, busy = hand_in(b"x = 1"), hand_in(b"x = 2"), hand_in(b"x = 3")
    long_ago = datetime(2020, 1, 1, tzinfo=UTC)
    database = Database(environ["TILEGRADE_DATABASE_URL"])
    with database.write() as session:
        values = {"state": State.RUNNING, "lease_until": long_ago}
        session.execute(update(Submission).where(Submission.id == busy).values(**values))
        values = {"state": State.FAULTED, "device": "cuda"}
        session.execute(update(Submission).where(Submission.id.in_([first, second])).values(**values))
        session.execute(update(CourseAssignment).values(device="cuda"))
    valkey = redis.Redis.from_url(broker.url.replace("redis+socket", "unix"))
    waiting = valkey.llen("cpu")
    said = tilegrade("run-again", first, busy, 99, second, status=1)
    again, not_again = "in the queue again.", "it is on its way already, or does not exist."
    told = {first: again, busy: not_again, 99: not_again, second: again}
    assert said == "".join(f"{one}: {what}\n" for one, what in told.items())
    assert (valkey.llen("cuda"), valkey.llen("cpu")) == (2, waiting)
    with database.read() as session:
        states = {row.id: row.state for row in session.execute(select(Submission.id, Submission.state))}
    assert states == {first: State.QUEUED, second: State.QUEUED, busy: State.RUNNING}
    database.close()
    valkey.close()


def test_all_of_an_assignment_is_measured_again(tilegrade, hand_in, environ, broker, facts, assignment):
    environ["TILEGRADE_BROKER_URL"] = broker.url
    first, second, waiting = hand_in(b"x = 1"), hand_in(b"x = 2"), hand_in(b"x = 3")
    database = Database(environ["TILEGRADE_DATABASE_URL"])
    now = datetime.now(UTC)
    with database.write() as session:
        for _ in (first, second):
            job = submissions.claim_next(session, worker="w", device="cpu", now=now, lease=timedelta(seconds=30))
            submissions.record(session, job, facts(), assignment, now=now)
    said = tilegrade("run-again", "--assignment", "doubling")
    assert said == f"{first}: in the queue again.\n{second}: in the queue again.\n"
    with database.read() as session:
        states = {row.id: row.state for row in session.execute(select(Submission.id, Submission.state))}
    assert states == dict.fromkeys((first, second, waiting), State.QUEUED)
    database.close()


@pytest.mark.parametrize("command", ["rejudge", "run-again"])
def test_what_is_done_again_is_named(course_of_ada, environ, tilegrade, command):
    for arguments in ((command,), (command, "1", "--assignment", "doubling")):
        done = CliRunner().invoke(cli, arguments, env=environ)
        assert (done.exit_code, "Name submissions, or one --assignment." in done.output) == (2, True)
    with pytest.raises(UserError, match=r"There is no assignment 'tripling'; there are: doubling\.$"):
        tilegrade(command, "--assignment", "tripling")
    tilegrade(command, "--assignment", "doubling")  # nothing of it is graded yet, and that is no mistake


def test_who_did_what_is_shown_the_latest_first(tilegrade, hand_in, environ):
    submission_id = hand_in()
    assert tilegrade("user", "close", "Ada") == "ada is let in no longer.\n"
    assert tilegrade("user", "close", "ada") == "ada was closed before.\n"
    assert tilegrade("user", "list") == "ada (closed): student in gpu\n"
    assert tilegrade("user", "open", "ada") == "ada is let in again.\n"
    assert tilegrade("user", "open", "ada") == "ada is not closed.\n"
    database = Database(environ["TILEGRADE_DATABASE_URL"])
    with database.write() as session:
        ada, now = accounts.find_user(session, "ada"), datetime(2999, 1, 1, tzinfo=UTC)
        submissions.cancel(session, submission_id, actor_id=ada.id, now=now)
        accounts.audit(
            session, actor_id=None, action="give-up", submission_id=submission_id, detail="a\n\x1b[2Jb", now=now
        )
    database.close()
    lines = tilegrade("audit").splitlines()
    assert lines[:2] == [
        f"2999-01-01 00:00:00 UTC  -  give-up #{submission_id}: a \\x1b[2Jb",
        f"2999-01-01 00:00:00 UTC  ada  cancel #{submission_id}",
    ]
    assert [line.split("  ")[-1] for line in lines[2:]] == [
        "open-user: user ada",
        "close-user: user ada",
        "enrol: user ada, course gpu: student",
        "set-assignment: assignment 1 (doubling)",
        "create-course: course gpu",
        "add-user: user ada",
    ]
    assert tilegrade("audit", "--submission", submission_id).splitlines() == lines[:2]
    assert tilegrade("audit", "--by", "Ada").splitlines() == lines[1:2]
    assert tilegrade("audit", "--limit", 3).splitlines() == lines[:3]
    with pytest.raises(UserError, match="no user 'eve'"):
        tilegrade("audit", "--by", "eve")


def test_judging_again_needs_to_know_what(tilegrade):
    assert "Name submissions" in tilegrade("rejudge", status=2)


def test_nothing_is_written_to_a_database_of_another_edition(tilegrade, environ, tmp_path):
    environ["TILEGRADE_DATABASE_URL"] = f"sqlite:///{tmp_path / 'new.db'}"
    with pytest.raises(UserError, match="tilegrade db upgrade"):
        tilegrade("user", "add", "ada")
    assert tilegrade("db", "upgrade") == "The database is up to date.\n"
    assert tilegrade("db", "check") == "Models and tables agree.\n"
    tilegrade("user", "add", "ada")


def test_the_doctor_names_what_is_missing(tilegrade, environ, tmp_path):
    (tmp_path / "new.db").touch()
    environ["TILEGRADE_DATABASE_URL"] = f"sqlite:///{tmp_path / 'new.db'}"
    environ["TILEGRADE_PROT"] = "8000"
    said = tilegrade("doctor", status=1)
    assert "FAIL database: sqlite: The database is not up to date. Run `tilegrade db upgrade` first." in said
    assert "FAIL settings: nothing reads TILEGRADE_PROT" in said
    assert "ok   python: 3." in said


def test_the_doctor_misses_no_database_where_none_was_made_and_makes_none(environ, tmp_path):
    environ["TILEGRADE_DATABASE_URL"] = f"sqlite:///{tmp_path / 'new.db'}"
    said = CliRunner().invoke(cli, ["doctor"], env=environ).output
    assert "ok   database: sqlite: none yet; `tilegrade up` makes it" in said
    assert not (tmp_path / "new.db").exists()


def test_errors_end_with_one_sentence_and_status_2(environ):
    done = in_process_of_its_own("grade", "gone.py", "--assignment", "doubling", environ=environ)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "tilegrade: Cannot read gone.py: No such file or directory.\n"


def test_what_an_error_quotes_cannot_drive_the_terminal(environ):
    done = in_process_of_its_own("grade", "\x1b[2Jgone.py", "--assignment", "doubling", environ=environ)
    assert done.stderr == "tilegrade: Cannot read \\x1b[2Jgone.py: No such file or directory.\n"


def test_errors_are_json_where_json_was_asked_for(environ):
    done = in_process_of_its_own("grade", "gone.py", "--assignment", "doubling", "--json", environ=environ)
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["kind"] == "UserError"


def test_a_wrong_setting_ends_with_one_sentence(environ):
    done = in_process_of_its_own("web", environ=environ | {"TILEGRADE_PORT": "http"})
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "TILEGRADE_PORT is 'http'" in done.stderr


def test_the_web_server_does_not_start_before_the_migrations(environ, tmp_path):
    url = f"sqlite:///{tmp_path / 'new.db'}"
    done = in_process_of_its_own("web", environ=environ | {"TILEGRADE_DATABASE_URL": url})
    assert done.returncode == 2
    assert "tilegrade db upgrade" in done.stderr
    database = Database(url)
    assert not db.is_current(database)  # and it did not run them itself
    database.close()


@pytest.mark.parametrize(
    ("text", "status", "said", "error", "message"),
    [
        (b'{"error": {"kind": "UserError", "message": "no bwrap"}}', 2, "", UserError, "no bwrap"),
        (b'{"error": {"kind": "AssignmentError", "message": "bad"}}', 2, "", AssignmentError, "bad"),
        (b"", 1, "ModuleNotFoundError: No module named 'torch'", UserError, "`make setup`"),
        (b"", -9, "Traceback ...\nKeyError: 7", GraderFault, "status -9.*\n.*\nKeyError: 7"),
        (b"[1]", 0, "", GraderFault, "no answer"),
        (b'{"examination": ', 0, "", GraderFault, "no answer"),
    ],
)
def test_an_examiner_that_fails_says_who_must_act(text, status, said, error, message):
    with pytest.raises(error, match=message):
        examining._answer(text, status, said)


@pytest.mark.slow
def test_one_file_is_graded_without_the_service(tmp_path):
    environ = {"TILEGRADE_DATA": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = in_process_of_its_own("grade", OK_FILE, "--assignment", "online-softmax", "--json", environ=environ)
    assert done.returncode == 0, done.stderr
    grade = json.loads(done.stdout)
    assert (grade["assignment"], grade["verdict"]) == ("online-softmax", "full")
    assert list(tmp_path.iterdir()) == []


def test_a_database_that_does_not_answer_is_one_sentence(environ):
    url = "postgresql://ada:secret@127.0.0.1:1/nowhere"
    done = in_process_of_its_own("user", "list", environ={**environ, "TILEGRADE_DATABASE_URL": url})
    assert done.returncode == 2
    assert done.stderr.startswith("tilegrade: The database cannot be used: ")
    assert done.stderr.count("\n") == 1
    assert "secret" not in done.stderr


@pytest.fixture
def read_only_folder(tmp_path):
    """A folder in which nothing can be made, not even by root."""
    folder = tmp_path / "kept"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "ro,size=64k", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:  # no root, so the mode is enough
        folder.chmod(0o500)
    yield folder
    if not mounted.returncode:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("command", [("course", "list"), ("db", "upgrade"), ("web",), ("up",)], ids="-".join)
@pytest.mark.parametrize("within", ["", "data"])
def test_a_folder_that_cannot_be_written_to_is_named(environ, read_only_folder, command, within):
    data = read_only_folder / within
    env = environ | {"TILEGRADE_DATA": str(data), "TILEGRADE_DATABASE_URL": f"sqlite:///{data}/tilegrade.db"}
    done = in_process_of_its_own(*command, environ=env)
    assert done.returncode == 2
    assert done.stderr.startswith(f"tilegrade: The folder {data} cannot be {'made' if within else 'written to'}")
    assert done.stderr.count("\n") == 1


def test_every_command_that_operators_are_told_of_is_there():
    text = (ROOT / "docs" / "operating.md").read_text()
    told = set(re.findall(r"(?:`|^|exec \w+ )(tilegrade [a-z][a-z -]*)", text, re.MULTILINE))
    assert {"tilegrade db upgrade", "tilegrade course roster "} <= told
    for line in told:
        found = cli
        for word in line.split()[1:]:
            if not isinstance(found, click.Group):
                break
            assert word in found.commands, line
            found = found.commands[word]
        assert not isinstance(found, click.Group), line


def test_a_reader_that_goes_away_is_no_error(tmp_path):
    environ = {"PATH": os.environ["PATH"], "TILEGRADE_DATA": str(tmp_path), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "grader.cli", "assignment", "list"],
        cwd=ROOT,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.close()
    _, said = process.communicate(timeout=60)
    assert said == b""


def test_an_extension_moves_one_students_deadline_and_nobody_elses(tilegrade, course_of_ada, tmp_path):
    tilegrade("user", "add", "bob")
    tilegrade("course", "enrol", "gpu", "bob")
    tilegrade("course", "assign", "gpu", "doubling", "--deadline", "2020-01-02 03:04:05")
    said = tilegrade("course", "extend", "gpu", "doubling", "ada", "--until", "2999-01-02 03:04:05")
    assert said == "ada may hand in doubling until 2999-01-02 03:04:05 UTC\n"
    file = tmp_path / "mine.py"
    file.write_text("x = 1")
    hand_in = ("submit", file, "--course", "gpu", "--assignment", "doubling", "--user")
    assert int(tilegrade(*hand_in, "ada")) > 0
    with pytest.raises(UserError, match="Ask your instructor for an extension"):
        tilegrade(*hand_in, "bob")


def test_an_extension_that_would_change_nothing_is_refused(tilegrade, course_of_ada, environ, tmp_path):
    extend = ("course", "extend", "gpu", "doubling", "ada", "--until")
    tilegrade("course", "assign", "gpu", "doubling", "--deadline", "2030-12-10", "--late-days", "2")
    with pytest.raises(UserError, match="until 2030-12-10 23:59:59 UTC; an extension must end later"):
        tilegrade(*extend, "2030-12-01")
    assert tilegrade(*extend, "2030-12-10") == (
        "ada may hand in doubling until 2030-12-10 23:59:59 UTC; 2 late days: at no cost\n"
    )
    shutil.copytree(environ["TILEGRADE_ASSIGNMENTS"], tmp_path / "assignments")
    environ["TILEGRADE_ASSIGNMENTS"] = str(tmp_path / "assignments")
    rules = tmp_path / "assignments" / "doubling" / "assignment.toml"
    rules.write_text(rules.read_text().replace("deadline = ", "# deadline = "))
    tilegrade("course", "assign", "gpu", "doubling", "--deadline", "none")
    with pytest.raises(UserError, match="has no deadline in gpu, so there is nothing to extend"):
        tilegrade(*extend, "2030-12-20")


def test_a_date_alone_is_the_end_of_that_day_and_the_beginning_for_what_opens(tilegrade, course_of_ada, environ):
    tilegrade("course", "assign", "gpu", "doubling", "--deadline", "2030-12-10", "--opens-at", "2029-12-10")
    said = tilegrade("course", "extend", "gpu", "doubling", "ada", "--until", "2030-12-20")
    assert said == "ada may hand in doubling until 2030-12-20 23:59:59 UTC\n"
    assert "until 2030-12-10 23:59:59 UTC" in tilegrade("course", "list")
    assert "--until DATE[THH:MM[:SS]]" in tilegrade("course", "extend", "--help")
    database = Database(environ["TILEGRADE_DATABASE_URL"])
    with database.read() as session:
        opens_at = session.scalars(select(CourseAssignment.opens_at)).one()
    database.close()
    assert opens_at.isoformat() == "2029-12-10T00:00:00+00:00"


def test_an_extension_is_for_people_in_the_course(tilegrade, course_of_ada):
    tilegrade("user", "add", "eve")
    with pytest.raises(UserError, match="eve is not in gpu"):
        tilegrade("course", "extend", "gpu", "doubling", "eve", "--until", "2999-01-02 03:04:05")


def test_grades_come_as_a_spreadsheet_without_formulas(tilegrade, course_of_ada, hand_in):
    tilegrade("user", "add", "bob")
    tilegrade("course", "enrol", "gpu", "bob")
    hand_in()
    lines = tilegrade("course", "grades", "gpu").splitlines()
    columns = "user_name,assignment,submission_id,submitted_at,verdict,points,out_of,days_late,provisional,held"
    assert lines[0] == columns
    assert lines[1:] == ["ada,doubling,,,,,,,,", "bob,doubling,,,,,,,,"]
