"""A worker takes work only from a database that answers, is of the worker's edition and tells the same time."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa

from grader import db, submissions
from grader.course import Catalog
from grader.db import Database
from grader.models import State, Submission, WorkerStatus
from workers.tasks import Grader

ROOT = Path(__file__).parents[2]
NOBODY = "postgresql://nobody@127.0.0.1:1/nothing"  # no server listens there


@pytest.fixture
def run(school):
    """A worker of this process, which is told to stop at the end."""
    made = []

    def make(examine, **more):
        grader = Grader(
            database=school.database,
            catalog=Catalog(school.settings.assignments_dir),
            settings=replace(school.settings, heartbeat_s=0.1),
            name="w",
            examine=examine,
            **more,
        )
        grader.start()
        made.append(grader)
        return grader

    yield make
    for grader in made:
        grader.close()


def row_of(school, submission_id):
    with school.database.read() as session:
        return session.get_one(Submission, submission_id)


def worker_of(school):
    with school.database.read() as session:
        (found,) = submissions.workers(session)
        return found


def run_worker(*arguments, url, tmp_path):
    env = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(ROOT),
        "TILEGRADE_DATA": str(tmp_path / "data"),
        "TILEGRADE_DATABASE_URL": url,
        "TILEGRADE_BROKER_URL": f"redis+socket://{tmp_path}/nowhere.sock",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "workers.tasks", *arguments],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_whether_a_worker_lives_is_answered_in_one_line_while_the_database_is_away(tmp_path):
    asked = run_worker("--alive", url=NOBODY, tmp_path=tmp_path)
    said, _ = asked.communicate(timeout=60)
    assert asked.returncode == 1
    assert said.startswith("tilegrade worker: The database cannot be used: ")
    assert said.count("\n") == 1


def test_a_worker_waits_for_a_database_that_is_away_and_says_so(tmp_path):
    worker = run_worker(url=NOBODY, tmp_path=tmp_path)
    try:
        assert "waiting: The database cannot be used: " in worker.stdout.readline()
        assert worker.poll() is None
    finally:
        worker.kill()
        worker.communicate()


def test_a_worker_waits_for_the_upgrade_and_goes_on_after_it(tmp_path, wait_until):
    url = f"sqlite:///{tmp_path / 'empty.db'}"
    database = Database(url)

    def reported():
        with database.read() as session:
            return submissions.workers(session)

    worker = run_worker(url=url, tmp_path=tmp_path)
    try:
        said = "waiting: The database is not up to date. Run `tilegrade db upgrade` first."
        assert said in worker.stdout.readline()
        db.upgrade(database)
        wait_until(lambda: reported() != [], 60, "a word of the worker's in the database")
    finally:
        worker.kill()
        worker.communicate()
        database.close()


# -- it is not the one that this program knows ---------------------------------------------------------------------


@pytest.fixture
def stamp(database):
    """Makes the database one of another edition; at the end it is as it was."""
    change = sa.text("UPDATE alembic_version SET version_num = :edition")
    with database.read() as session:
        before = session.scalar(sa.text("SELECT version_num FROM alembic_version"))

    def write(edition):
        with database.write() as session:
            session.execute(change, {"edition": edition})

    yield write
    write(before)


@pytest.mark.parametrize(
    ("edition", "said"),
    [
        pytest.param("0001", "The database is not up to date. Run `tilegrade db upgrade` first.", id="older"),
        pytest.param("9999", "The database is of a newer edition (9999) than this program", id="newer"),
    ],
)
def test_a_worker_takes_nothing_from_a_database_of_another_edition(school, run, stamp, edition, said):
    submission_id = school.hand_in().submission_id
    over = []
    grader = run(lambda *_: pytest.fail("it was graded"), start_over=lambda: over.append(1))
    stamp(edition)
    assert grader.grade_waiting() == 0
    row = row_of(school, submission_id)
    assert (row.state, row.attempt, row.lost_attempts) == (State.QUEUED, 0, 0)
    worker = worker_of(school)
    assert worker.status is WorkerStatus.QUARANTINED
    assert worker.note.startswith(said)
    assert over == [1]  # as a process that begins anew, with the program that is installed by then


def test_what_is_being_graded_when_the_tables_are_upgraded_is_recorded(school, run, stamp, facts):
    """An upgrade that only adds must not cost minutes of measuring."""

    def examine(*_):
        stamp("9999")
        return facts()

    ids = [school.hand_in(name).submission_id for name in ("ada", "bob")]
    assert run(examine).grade_waiting() == 1
    assert [row_of(school, one).state for one in ids] == [State.DONE, State.QUEUED]


# -- clocks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("database_url", [pytest.param("postgres", marks=pytest.mark.postgres)], indirect=True)
@pytest.mark.parametrize(("ahead_s", "said"), [(90, "90 s ahead of"), (-90, "90 s behind")])
def test_a_worker_whose_clock_is_off_takes_nothing(school, run, ahead_s, said):
    """It would take what others are grading, or hold what it has for ever."""
    submission_id = school.hand_in().submission_id
    grader = run(lambda *_: pytest.fail("it was graded"), now=lambda: datetime.now(UTC) + timedelta(seconds=ahead_s))
    assert grader.grade_waiting() == 0
    assert row_of(school, submission_id).state is State.QUEUED
    assert f"The clock of this host is {said} the database server's." in worker_of(school).note
