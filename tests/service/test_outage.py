"""The database goes away while a worker has work, and comes back: nothing is lost or measured twice."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from grader import db
from grader.course import Catalog
from grader.db import Database
from grader.models import State, Submission
from workers.tasks import Grader

pytestmark = pytest.mark.postgres


@pytest.fixture
def database(cluster, request):
    found = Database(cluster.create(request.node.name.replace("[", "_").rstrip("]")))
    db.upgrade(found)
    yield found
    found.close()


@pytest.fixture
def run(school):
    """A worker of this process, which is told to stop at the end."""
    made = []

    def make(examine):
        grader = Grader(
            database=school.database,
            catalog=Catalog(school.settings.assignments_dir),
            settings=replace(school.settings, heartbeat_s=0.1),
            name="w",
            examine=examine,
        )
        grader.start()
        made.append(grader)
        return grader

    yield make
    for grader in made:
        grader.close()


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_what_was_measured_is_recorded_when_the_database_is_back(cluster, school, run, facts, wait_until, caplog, mode):
    def examine(*_):
        cluster.stop(mode)
        return facts()

    submission_id = school.hand_in().submission_id
    grader = run(examine)
    thread = threading.Thread(target=grader.grade_waiting)
    thread.start()
    try:
        # the result was tried and a heartbeat was missed
        wait_until(lambda: "the database is away" in caplog.text, 30, "a word about the database")
        wait_until(lambda: "no heartbeat could be written" in caplog.text, 30, "a word about the heartbeat")
    finally:
        cluster.start()
        thread.join(60)
    with school.database.read() as session:
        row = session.get_one(Submission, submission_id)
    assert (row.state, row.attempt, row.lost_attempts) == (State.DONE, 1, 0)
    # a line each, of what happened: a page of Python for every heartbeat would hide everything else
    assert not [record for record in caplog.records if record.exc_info]
