"""Real worker processes, a real broker, and the ways in which they die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
import redis

from grader import submissions
from grader.devices import KINDS
from grader.models import State, Submission
from grader.queue import GRADE, SWEEP, Doorbell, make_celery
from grader.settings import Settings

pytestmark = pytest.mark.slow
# what these are about does not depend on the database
on_sqlite = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SCRIPTED = HERE / "scripted_worker.py"


@pytest.fixture
def environ(tmp_path, database_url, broker, assignments_dir):
    """Everything in a hurry: a lease of a second and a half, a sweep every half second."""
    return {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(ROOT),
        "TILEGRADE_DATA": str(tmp_path / "data"),
        "TILEGRADE_ASSIGNMENTS": str(assignments_dir),
        "TILEGRADE_DATABASE_URL": database_url,
        "TILEGRADE_BROKER_URL": broker.url,
        "TILEGRADE_LEASE_S": "1.5",
        "TILEGRADE_HEARTBEAT_S": "0.3",
        "TILEGRADE_SWEEP_EVERY_S": "0.5",
    }


@pytest.fixture
def start(environ, tmp_path):
    """Starts processes of the service; those still running at the end are killed."""
    with ExitStack() as stack:
        counter = iter(range(100))

        def begin(*arguments: str, **extra: str) -> subprocess.Popen[bytes]:
            log = stack.enter_context((tmp_path / f"{next(counter)}.log").open("wb"))
            process = subprocess.Popen(
                [sys.executable, *arguments], env=environ | extra, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )

            def end() -> None:
                process.kill()
                process.wait()

            stack.callback(end)
            return process

        yield begin


@pytest.fixture
def start_worker(start):
    def begin(slot: int = 0) -> subprocess.Popen[bytes]:
        return start(str(SCRIPTED), TILEGRADE_SLOT=str(slot))

    return begin


@pytest.fixture
def start_beat(start):
    return lambda: start("-m", "grader.cli", "beat")


@pytest.fixture
def ring(environ):
    return Doorbell(make_celery(Settings.from_env(environ))).ring


@pytest.fixture
def messages(broker):
    """The broker's own view: lists by queue, and what was taken and not acknowledged."""
    with redis.Redis(unix_socket_path=str(broker.folder / "valkey.sock")) as client:
        yield client


@pytest.fixture
def real_time(school):
    """The school, whose clock is the wall's: workers of other processes look at that one."""
    school.assignment = replace(school.assignment, deadline=None)

    def hand_in(name: str, data: str) -> int:
        return school.hand_in(name, data.encode(), now=datetime.now(UTC)).submission_id

    return hand_in


@pytest.fixture
def look(school):
    def find(submission_id: int):
        with school.database.read() as session:
            return submissions.find(session, submission_id)

    return find


def test_killed_in_the_middle_the_next_worker_grades_it(
    school, real_time, look, ring, start_worker, start_beat, wait_until
):
    start_beat()
    doomed = start_worker(0)
    submission_id = real_time("ada", "sleep 60")
    ring("cpu")
    wait_until(lambda: "numerics" in submissions.stages_of(look(submission_id)), 20, "the first worker's progress")
    with school.database.write() as session:
        # the next one finds a file that is done at once
        session.get_one(Submission, submission_id).source = "sleep 0.1"
    doomed.send_signal(signal.SIGKILL)
    start_worker(1)
    wait_until(lambda: look(submission_id).state is State.DONE, 30, "the second worker's grade")
    row = look(submission_id)
    assert (row.attempt, row.result.attempt) == (2, 2)
    assert row.worker.endswith(":1")


@on_sqlite
def test_ten_bells_are_one_grading(real_time, look, ring, start_worker, wait_until, messages):
    submission_id = real_time("ada", "sleep 0.3")
    for _ in range(10):
        assert ring("cpu")
    for slot in range(2):
        start_worker(slot)
    wait_until(lambda: look(submission_id).state is State.DONE, 30, "a grade")
    wait_until(lambda: messages.llen("cpu") + messages.hlen("unacked") == 0, 30, "an answer to every bell")
    assert look(submission_id).attempt == 1


@on_sqlite
def test_hand_ins_during_an_outage_are_graded_after_it(
    real_time, look, ring, broker, start_worker, start_beat, wait_until, tmp_path
):
    start_beat()
    start_worker()
    first = real_time("ada", "sleep 0")
    ring("cpu")
    wait_until(lambda: look(first).state is State.DONE, 20, "a grade before the outage")
    broker.stop()
    started = time.monotonic()
    ids = [real_time(name, "sleep 0.1") for name in ("ada", "bob", "cy")]
    assert [ring("cpu") for _ in ids] == [False, False, False]
    assert time.monotonic() - started < 2  # pages do not wait for a dead broker
    time.sleep(1.0)
    assert {look(i).state for i in ids} == {State.QUEUED}
    broker.start()
    wait_until(lambda: {look(i).state for i in ids} == {State.DONE}, 40, "grades after the outage")
    assert [look(i).attempt for i in ids] == [1, 1, 1]
    # what a worker says of the outage is about the outage
    assert "DeprecationWarning" not in (tmp_path / "1.log").read_text()


@on_sqlite
def test_without_a_broker_the_sweep_says_so_in_a_line_each_time(broker, messages, start_beat, wait_until, tmp_path):
    start_beat()
    wait_until(lambda: messages.llen("sweep") > 0, 30, "a first bell")
    broker.stop()
    log = tmp_path / "0.log"
    wait_until(lambda: log.read_text().count("no bell for the sweep, trying again: ") >= 2, 30, "two lines")
    assert all("no bell for the sweep" in line for line in log.read_text().splitlines())


@on_sqlite
def test_a_worker_that_is_told_to_stop_loses_no_attempt(real_time, look, ring, start_worker, wait_until):
    worker = start_worker()
    submission_id = real_time("ada", "sleep 60")
    ring("cpu")
    wait_until(lambda: "numerics" in submissions.stages_of(look(submission_id)), 20, "progress")
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(15) == 0
    row = look(submission_id)
    assert (row.state, row.attempt, row.lost_attempts) == (State.QUEUED, 1, 0)


@on_sqlite
def test_a_worker_that_stood_still_hands_back_what_it_measured_meanwhile(
    real_time, look, ring, start, wait_until, tmp_path
):
    """A paused container: the limits of calls went on, so nothing may be told of the file. No attempt is lost."""
    hasty = "import runpy, workers.tasks; workers.tasks.STANDSTILL_S = 3.0; "
    hasty += f"runpy.run_path({str(SCRIPTED)!r}, None, '__main__')"
    worker = start("-c", hasty)
    submission_id = real_time("ada", "sleep 2")
    ring("cpu")
    wait_until(lambda: "numerics" in submissions.stages_of(look(submission_id)), 20, "progress")
    worker.send_signal(signal.SIGSTOP)
    time.sleep(5.0)
    assert look(submission_id).state is State.RUNNING
    worker.send_signal(signal.SIGCONT)
    wait_until(lambda: look(submission_id).attempt == 2, 20, "another attempt")
    ring("cpu")
    wait_until(lambda: look(submission_id).state is State.DONE, 40, "a grade")
    row = look(submission_id)
    assert (row.attempt, row.lost_attempts, row.fault_note) == (2, 0, None)
    assert "this worker stood still" in (tmp_path / "0.log").read_text()


@on_sqlite
def test_a_bell_for_one_device_rings_there_alone(ring, messages):
    assert ring("cuda")
    assert {name: messages.llen(name) for name in (*KINDS, "sweep")} == {"cpu": 0, "cuda": 1, "sweep": 0}


@on_sqlite
def test_messages_are_json_and_carry_no_work(messages, ring, real_time):
    real_time("ada", "sleep 0.1  # a secret of Ada's")
    ring("cpu")
    (message,) = messages.lrange("cpu", 0, -1)
    assert b'"content-type": "application/json"' in message
    assert b"secret" not in message


def test_celery_accepts_json_alone_and_acknowledges_late():
    conf = make_celery(Settings.from_env({})).conf
    assert (conf.accept_content, conf.task_serializer) == (["json"], "json")
    assert (conf.task_acks_late, conf.task_reject_on_worker_lost, conf.worker_prefetch_multiplier) == (True, True, 1)
    assert conf.task_ignore_result
    assert {GRADE, SWEEP} == {"tilegrade.grade", "tilegrade.sweep"}
