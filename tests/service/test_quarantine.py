"""A worker whose host or GPU is unfit takes no work, says why, and returns by itself; nobody's hand-in suffers."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from grader import submissions
from grader.course import Catalog
from grader.errors import GraderFault
from grader.models import CourseAssignment, State, Submission, WorkerStatus
from grader.queue import Doorbell, make_celery
from grader.settings import Settings
from workers.health import SickGpuError
from workers.tasks import Grader

ROOT = Path(__file__).parents[2]
NOW = datetime(2027, 2, 1, 12, 0, tzinfo=UTC)
LEASE = timedelta(seconds=30)


@pytest.fixture
def make_grader(school):
    made = []

    def make(examine, *, name="w", device="cpu", **more):
        grader = Grader(
            database=school.database,
            catalog=Catalog(school.settings.assignments_dir),
            settings=replace(school.settings, heartbeat_s=0.05, device=device),
            name=name,
            examine=examine,
            note="well",
            **more,
        )
        grader.start()
        made.append(grader)
        return grader

    yield make
    for grader in made:
        grader.close()


def row_of(school, name="w"):
    with school.database.read() as session:
        return next(one for one in submissions.workers(session) if one.name == name)


def state_of(school, submission_id):
    with school.database.read() as session:
        return session.get_one(Submission, submission_id)


def graded_on(school, device):
    """The school's assignment, from now on graded on that device."""
    with school.database.write() as session:
        session.get_one(CourseAssignment, school.entry.id).device = device
    school.entry.device = device


def fail(*_):
    raise GraderFault("no sandbox")


# -- after a fault ------------------------------------------------------------------------------------------------


def test_a_host_that_fails_its_check_after_a_fault_takes_no_more_work(school, make_grader, facts):
    broken, over = [True], []

    def examine(*_):
        if broken:
            raise SickGpuError("the driver reported Xid 79")
        return facts()

    ids = [school.hand_in(name).submission_id for name in ("ada", "bob")]
    sick = make_grader(examine, check_again=lambda: "gpu: it is lost. Reset it.", start_over=lambda: over.append(1))
    sick.grade_waiting()
    sick._rest_until = 0.0
    assert sick.grade_waiting() == 0
    assert over == [1]
    row = row_of(school)
    assert (row.status, row.note, row.submission_id) == (
        WorkerStatus.QUARANTINED,
        "gpu: it is lost. Reset it.",
        None,
    )
    first = state_of(school, ids[0])
    assert (first.state, first.lost_attempts) == (State.QUEUED, 1)
    assert "Xid 79" in first.fault_note
    assert state_of(school, ids[1]).attempt == 0
    broken.clear()
    assert make_grader(examine, name="other").grade_waiting() == 2
    assert {state_of(school, i).state for i in ids} == {State.DONE}


def test_quarantine_outlasts_heartbeats(school, make_grader, wait_until):
    school.hand_in()
    make_grader(fail, check_again=lambda: "memory: nothing stopped it").grade_waiting()
    first = row_of(school).seen_at
    wait_until(lambda: row_of(school).seen_at > first, 10, "a heartbeat")
    assert row_of(school).status is WorkerStatus.QUARANTINED


def test_a_host_that_passes_its_check_after_a_fault_goes_on(school, make_grader, facts):
    asked, faults = [], [1]

    def examine(*_):
        if faults:
            faults.pop()
            raise GraderFault("a candidate did not start")
        return facts()

    submission_id = school.hand_in().submission_id
    grader = make_grader(examine, check_again=lambda: asked.append(1) or "", start_over=lambda: pytest.fail("fine"))
    grader.grade_waiting()
    grader._rest_until = 0.0
    assert grader.grade_waiting() == 1
    assert asked == [1]
    assert state_of(school, submission_id).state is State.DONE


def test_lanes_finish_before_the_host_is_looked_at(school, make_grader, facts):
    second_began, checked = threading.Event(), []

    def examine(_assignment, source, _progress):
        if b"bad" in source:
            assert second_began.wait(20)
            raise GraderFault("a candidate did not start")
        second_began.set()
        time.sleep(0.3)
        assert not checked, "the check disturbed a grading"
        return facts()

    school.hand_in("ada", b"# bad\n")
    good = school.hand_in("bob", b"# good\n").submission_id
    make_grader(examine, lanes=2, check_again=lambda: checked.append(1) or "").grade_waiting()
    assert checked == [1]
    assert state_of(school, good).state is State.DONE


def test_others_are_told_of_what_one_could_not_grade(school, make_grader):
    rung = []
    graded_on(school, "cuda:h200")
    school.hand_in()
    make_grader(fail, device="cuda:h200", ring=rung.append).grade_waiting()
    assert rung == ["cuda:h200"]


# -- who takes what -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("worker", "wanted", "takes"),
    [
        ("cpu", "cpu", True),
        ("cpu", "cuda", False),
        ("cuda", "cuda", True),
        ("cuda:h200", "cuda", True),
        ("cuda:h200", "cuda:h200", True),
        ("cuda:h200", "cuda:a100", False),
        ("cuda", "cuda:h200", False),
        ("cuda:h200", "cpu", False),
    ],
)
def test_work_for_a_model_of_gpu_goes_to_that_model(school, worker, wanted, takes):
    graded_on(school, wanted)
    school.hand_in()
    with school.database.write() as session:
        submissions.report_worker(session, name="w", device=worker, status=WorkerStatus.IDLE, now=NOW)
        assert submissions.unserved(session, now=NOW) == ([] if takes else [wanted])
        assert submissions.outlook(session, wanted, now=NOW).n_workers == takes
        claimed = submissions.claim_next(session, worker="w", device=worker, now=NOW, lease=LEASE)
        assert (claimed is not None) is takes


def test_a_worker_in_quarantine_counts_for_nobody(school):
    school.hand_in()
    with school.database.write() as session:
        submissions.report_worker(session, name="w", device="cpu", status=WorkerStatus.QUARANTINED, now=NOW)
        assert submissions.unserved(session, now=NOW) == ["cpu"]
        assert submissions.outlook(session, "cpu", now=NOW).n_workers == 0
        (row,) = submissions.workers(session)
        assert not submissions.is_gone(row, NOW)
        assert not submissions.can_take(row, "cpu", NOW)


# -- real processes -----------------------------------------------------------------------------------------------


@pytest.fixture
def tools():
    """A folder that is the worker's whole path; what is put there it finds."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)  # candidates' users look there too
        yield folder


@pytest.fixture
def start_worker(school, broker, tools, tmp_path):
    started = []

    def start():
        env = {
            "PATH": str(tools),
            "PYTHONPATH": str(ROOT),
            "TILEGRADE_DATA": str(tmp_path / "data"),
            "TILEGRADE_ASSIGNMENTS": str(school.settings.assignments_dir),
            "TILEGRADE_DATABASE_URL": school.database.engine.url.render_as_string(hide_password=False),
            "TILEGRADE_BROKER_URL": broker.url,
            "TILEGRADE_RECHECK_S": "1",
            "TILEGRADE_HEARTBEAT_S": "0.5",
            "TILEGRADE_ALLOW_REDUCED_SANDBOX": "1",
        }
        log = (tmp_path / "worker.log").open("wb")
        started.append(subprocess.Popen([sys.executable, "-m", "workers.tasks"], env=env, stdout=log, stderr=log))
        log.close()
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def status(school):
    with school.database.read() as session:
        return {one.status for one in submissions.workers(session)}


def note(school):
    with school.database.read() as session:
        return next(one.note for one in submissions.workers(session))


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_worker_on_an_unfit_host_says_why_and_returns_when_it_is_mended(school, tools, start_worker, wait_until):
    worker = start_worker()
    wait_until(lambda: status(school) == {WorkerStatus.QUARANTINED}, 60, "quarantine")
    assert "apt-get install bubblewrap" in note(school)
    (tools / "bwrap").symlink_to(shutil.which("bwrap"))
    wait_until(lambda: status(school) == {WorkerStatus.IDLE}, 120, "the worker back at work")
    assert "bubblewrap" not in note(school)
    assert worker.poll() is None


@pytest.mark.slow
def test_a_worker_in_quarantine_stops_when_told(school, start_worker, wait_until):
    worker = start_worker()
    wait_until(lambda: status(school) == {WorkerStatus.QUARANTINED}, 60, "quarantine")
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(30) in (0, -signal.SIGTERM)  # by our handler, or in the middle of a check


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_gpu_that_is_lost_is_never_the_files_fault(school, broker, tmp_path, wait_until):
    """The whole life: a worker on GPU 1 grades, loses it, is in quarantine, returns, and grades what it could not."""
    env = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(ROOT),
        "TILEGRADE_DATA": str(tmp_path / "data"),
        "TILEGRADE_ASSIGNMENTS": str(school.settings.assignments_dir),
        "TILEGRADE_DATABASE_URL": school.database.engine.url.render_as_string(hide_password=False),
        "TILEGRADE_BROKER_URL": broker.url,
        "TILEGRADE_HEARTBEAT_S": "0.3",
        "TILEGRADE_RECHECK_S": "0.5",
    }
    graded_on(school, "cuda:h200")
    fine = school.hand_in("ada", b"x = 1\n").submission_id
    script = str(Path(__file__).with_name("scripted_gpu_worker.py"))
    with (tmp_path / "log").open("wb") as log:
        worker = subprocess.Popen(
            [sys.executable, script, str(tmp_path), "--device", "cuda", "--slot", "1"], env=env, stdout=log, stderr=log
        )
    try:
        wait_until(lambda: state_of(school, fine).state is State.DONE, 60, "a grade")
        (row,) = rows(school)
        assert row.name.endswith(":cuda:1")
        assert row.device == "cuda:h200"
        assert "NVIDIA H200, GPU-b" in row.note
        lost = school.hand_in("bob", b"lose\n").submission_id
        Doorbell(make_celery(Settings.from_env(env))).ring("cuda:h200")
        wait_until(lambda: status(school) == {WorkerStatus.QUARANTINED}, 60, "quarantine")
        held = state_of(school, lost)
        assert (held.state, held.lost_attempts) == (State.QUEUED, 1)
        assert "the GPU no longer answers" in held.fault_note
        wait_until(lambda: "gpu: it is lost. Reset it." in note(school), 60, "the reason")
        (tmp_path / "sick").unlink()
        wait_until(lambda: state_of(school, lost).state is State.DONE, 90, "a grade after all")
        assert state_of(school, lost).attempt == 2
        with school.database.read() as session:
            assert "CUDA error" not in submissions.find(session, lost).result.examination
        assert worker.poll() is None  # it started over in the same process
    finally:
        worker.kill()
        worker.wait()


PLAYED_NVML = """
import sys
from nvml_fakes import FakeCard, FakeNvml
sys.modules[__name__] = FakeNvml(FakeCard(uuid="GPU-a"), FakeCard(name="NVIDIA A100-SXM4-80GB", uuid="GPU-b"))
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_one_command_starts_a_worker_for_each_gpu_and_each_says_what_its_gpu_lacks(
    school, broker, tmp_path, wait_until
):
    (tmp_path / "pynvml.py").write_text(PLAYED_NVML)
    env = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": f"{tmp_path}:{ROOT}:{ROOT}/tests/gpu",
        "TILEGRADE_DATA": str(tmp_path / "data"),
        "TILEGRADE_ASSIGNMENTS": str(school.settings.assignments_dir),
        "TILEGRADE_DATABASE_URL": school.database.engine.url.render_as_string(hide_password=False),
        "TILEGRADE_BROKER_URL": broker.url,
        "TILEGRADE_HEARTBEAT_S": "0.5",
        "TILEGRADE_ALLOW_REDUCED_SANDBOX": "1",
    }
    command = [sys.executable, "-m", "grader.cli", "worker", "--device", "cuda"]
    with (tmp_path / "log").open("wb") as log:
        parent = subprocess.Popen(command, env=env, stdout=log, stderr=log)
    try:
        wait_until(lambda: status(school) == {WorkerStatus.QUARANTINED} and len(rows(school)) == 2, 120, "two workers")
        found = {one.name.rpartition(":")[2]: one.note for one in rows(school)}
        assert set(found) == {"0", "1"}
        # this machine has neither of those cards: the time of a kernel cannot be had
        assert all("gpu kernels" in text for text in found.values()), found
        alive = subprocess.run([*command, "--alive"], env=env, check=False)
        assert alive.returncode == 0
        parent.terminate()
        parent.wait(60)
    finally:
        parent.kill()
        parent.wait()


def rows(school):
    with school.database.read() as session:
        return submissions.workers(session)


ANEW = """
import os, sys
from workers.tasks import _become_anew
print(os.getpid(), sys.argv[1:], os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
if "AGAIN" not in os.environ:
    before = dict(os.environ)
    os.environ["CUDA_VISIBLE_DEVICES"] = "GPU-narrowed"
    _become_anew(before | {"AGAIN": "1"})
"""


def test_starting_over_is_the_same_command_with_the_environment_from_before():
    done = subprocess.run(
        [sys.executable, "-c", ANEW, "--slot", "1"],
        env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    first, second = done.stdout.splitlines()
    assert first == second
    assert first.endswith("['--slot', '1'] None")
