"""The Celery door: a bell rings, the worker claims what waits, examines it and records what it found.

`python -m workers.tasks` runs one worker process. On CPUs it grades one submission at a time: start more for more. On a
GPU it grades in a few lanes: while one submission holds the GPU, the next ones are audited and compiled on CPU cores.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import itertools
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from celery import Celery, signals
from sqlalchemy.exc import DBAPIError, OperationalError

from grader import accounts, course, db, devices, submissions
from grader.assignment import Assignment, Limits
from grader.course import Catalog
from grader.db import Database
from grader.errors import AssignmentError, UserError
from grader.measurement import Examination
from grader.models import CourseAssignment, State, WorkerStatus
from grader.queue import GRADE, SWEEP, Doorbell, heard_by, log_to_stderr, make_celery
from grader.settings import Settings, check_flags
from grader.submissions import Job
from grader.wording import one_line, plain
from workers import selfcheck
from workers.sandbox import sweep_leftovers

if TYPE_CHECKING:
    from workers.sandbox import SandboxPool

Progress = Callable[[str, float], None]
Examine = Callable[[Assignment, bytes, Progress], Examination]
T = TypeVar("T")

PROGRESS_EVERY_S = 0.25
MAX_REST_S = 60.0  # of a worker that fails again and again
EXIT_GRACE_S = 5.0
CLOSE_GRACE_S = 60.0
EXIT_HANGS = 4  # exit status: what was open could not be closed
READY_WITHIN_S = 120.0  # a candidate, on a busy host
FIRST_RECHECK_S = 5.0
LOOK_AGAIN_S = 0.25  # of a lane that found nothing waiting while another one still grades
WARM_POOLS = 2
DATABASE_RETRY_DELAYS_S = (0.2, 1.0, 3.0, 9.0)  # and then the last one again and again
DATABASE_PATIENCE_S = 600.0  # without a database there is nothing else to do, and minutes of measuring hang on it
LOOK_FOR_DATABASE_S = 2.0
STANDSTILL_S = 10.0  # no busy host keeps a thread waiting for so long; half of what one call of a file's may take
NAP_S = 1.0

log = logging.getLogger("tilegrade.worker")


class NoLongerOurs(Exception):  # noqa: N818 - says a state, not a mistake
    """The submission was cancelled, claimed by another worker or handed back: drop it."""


@dataclass(slots=True, eq=False)
class _Grading:
    """One submission of this worker's, until it is recorded."""

    job: Job
    lost: bool = False
    void: bool = False  # what was measured must not count, though nobody is to blame
    progressed_at: float = 0.0
    stages: dict[str, float] = dataclasses.field(default_factory=dict)  # how much of each is done, 0 to 1


class Grader:
    """Grades what waits, and tells the database that it lives.

    Args:
        name: of this worker, unique among all.
        examine: runs the student's file; with several lanes it is called in several threads.
        lanes: submissions in hand at a time.
        check_again: why this host may grade no more, or nothing; asked after every fault of ours.
        start_over: called when it may grade no more. The worker is in quarantine by then.
        ring: tells other workers of a device that something waits.
        now: the wall clock, aware.
    """

    def __init__(
        self,
        *,
        database: Database,
        catalog: Catalog,
        settings: Settings,
        name: str,
        examine: Examine,
        note: str = "",
        lanes: int = 1,
        check_again: Callable[[], str] = lambda: "",
        start_over: Callable[[], None] = lambda: None,
        ring: Callable[[str], object] = lambda _device: None,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._database, self._catalog, self._settings = database, catalog, settings
        self._name, self._examine, self._note, self._now = name, examine, note, now
        self._lanes = lanes
        self._check_again, self._start_over, self._ring = check_again, start_over, ring
        self._suspect = False  # a fault of ours may be this host's or its GPU's
        self._quarantined = ""  # why
        self._lock = threading.Lock()  # guards the gradings and what is known of them
        self._claiming = threading.Lock()
        self._reporting = threading.Lock()
        self._said_goodbye = False
        self._started_at: datetime | None = None  # as the database has it, while nobody else has our name
        self._gradings: list[_Grading] = []  # the oldest first
        self._faults_in_a_row = 0
        self._rest_until = 0.0
        self._stopping = threading.Event()
        self._wakes_at: float | None = None  # monotonic, while the heartbeat naps
        self._heart: threading.Thread | None = None

    def start(self) -> None:
        """Report this worker and keep reporting it until `stop`."""
        self._patiently(lambda: self._report(WorkerStatus.STARTING))
        self._patiently(self._report)
        self._heart = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._heart.start()

    def request_stop(self) -> None:
        """Claim nothing more and hand back what is being graded. Safe in a signal handler."""
        self._stopping.set()

    def close(self) -> None:
        """Stop, and wait until the database knows it."""
        self.request_stop()
        if self._heart is not None:
            self._heart.join(EXIT_GRACE_S)

    def grade_waiting(self) -> int:
        """Grade until nothing waits for this worker; returns how many. Safe to call twice for one bell."""
        before = self._quarantined
        if self._lanes == 1:
            count = self._grade_in_lane()
        else:
            with ThreadPoolExecutor(self._lanes, thread_name_prefix="lane") as threads:
                count = sum(threads.map(lambda _: self._grade_in_lane(), range(self._lanes)))
        if self._stopping.is_set():
            return count
        if self._suspect:
            self._look_at_host()
        if self._quarantined and not before:
            self._start_over()
        return count

    def _look_at_host(self) -> None:
        """Check the host again after a fault."""
        why = self._check_again()
        self._suspect = False
        if why:
            self._quarantine(why)

    def _quarantine(self, why: str) -> None:
        """Take no more work, until it was started over."""
        log.error("quarantined: %s", why)
        self._quarantined = why
        self._report()

    def _grade_in_lane(self) -> int:
        count = 0
        # after a fault of ours it rests: a broken host must not use up every submission's attempts
        while self._may_claim():
            grading = self._claim()
            if grading is not None:
                self._grade(grading)
                count += 1
            elif self._gradings:
                # no bell is heard before all lanes are done: what comes meanwhile is looked for
                self._stopping.wait(LOOK_AGAIN_S)
            else:
                break
        return count

    def _may_claim(self) -> bool:
        unfit = self._suspect or self._quarantined
        return not (unfit or self._stopping.is_set()) and time.monotonic() >= self._rest_until

    def _claim(self) -> _Grading | None:
        # one lane at a time, so that one that finds nothing sees what the others have in hand
        with self._claiming:
            # asked each time: tables are upgraded, and clocks drift, while workers run
            why = "" if self._quarantined else database_trouble(self._database, self._settings, self._now)
            if why:
                self._quarantine(why)
            if self._quarantined:
                return None
            with self._database.write() as session:
                job = submissions.claim_next(
                    session,
                    worker=self._name,
                    device=self._settings.device,
                    now=self._now(),
                    lease=self._settings.lease,
                    max_lost_attempts=self._settings.max_lost_attempts,
                )
            if job is None:
                return None
            grading = _Grading(job)
            with self._lock:
                self._gradings.append(grading)
            return grading

    def _grade(self, grading: _Grading) -> None:
        job = grading.job
        log.info("submission %d, attempt %d: %s", job.submission_id, job.attempt, job.slug)
        try:
            self._report()
            assignment = self._catalog.load(job.slug)

            def progress(stage: str, fraction: float) -> None:
                self._progress(grading, stage, fraction)

            # minutes long, so no database session is held here
            examination = self._examine(assignment, job.source.encode(), progress)
            ours = not self._is_void(grading) and self._patiently(lambda: self._record(job, examination, assignment))
            self._faults_in_a_row = 0
            log.info("submission %d: %s", job.submission_id, "graded" if ours else "graded too late, dropped")
        except NoLongerOurs:
            log.info("submission %d is no longer ours", job.submission_id)
        except AssignmentError as exc:
            self._close_assignment(job, str(exc))
        except Exception as exc:
            if self._is_void(grading):
                log.warning("submission %d: dropped: %s", job.submission_id, one_line(str(exc), 300))
                return
            # a bug of ours must cost neither the student an attempt nor this worker its life
            log.exception("submission %d could not be graded", job.submission_id)
            self._give_up(job, exc)
        finally:
            with self._lock:
                self._gradings.remove(grading)
            self._report()

    def _record(self, job: Job, examination: Examination, assignment: Assignment) -> bool:
        with self._database.write() as session:
            return submissions.record(session, job, examination, assignment, now=self._now())

    def _give_up(self, job: Job, exc: Exception) -> None:
        note = f"{self._name}: {''.join(traceback.format_exception(exc, limit=-6))[-1800:]}"

        def write() -> State | None:
            with self._database.write() as session:
                return submissions.give_up(
                    session,
                    job,
                    note=note,
                    now=self._now(),
                    max_lost_attempts=self._settings.max_lost_attempts,
                )

        self._suspect = True
        state = self._patiently(write)
        if state is State.QUEUED:
            self._ring(job.device)  # we rest now: another worker is the first to take it
        if state is not None:
            self._faults_in_a_row += 1
            self._rest_until = time.monotonic() + min(2.0**self._faults_in_a_row, MAX_REST_S)

    def _close_assignment(self, job: Job, reason: str) -> None:
        """The folder is wrong, which its instructor must mend: take no more of it, and blame nobody's file."""
        log.error("submission %d: %s", job.submission_id, reason)
        now = self._now()
        with self._database.write() as session:
            entry = session.get_one(CourseAssignment, job.course_assignment_id)
            if entry.closed_reason is None:
                course.close_assignment(session, entry=entry, reason=reason, actor_id=None, now=now)
            submissions.give_up(session, job, note=reason, now=now, final=True)

    def _progress(self, grading: _Grading, stage: str, fraction: float) -> None:
        """Write where the examination is; called by it from any of its threads. Raises NoLongerOurs to end it."""
        with self._lock:
            if grading not in self._gradings or grading.lost:
                raise NoLongerOurs
            # what is not written now is written with the next one; a stage that begins anew does not go back
            grading.stages[stage] = max(fraction, grading.stages.get(stage, 0.0))
            stages = dict(grading.stages)
            if time.monotonic() - grading.progressed_at < PROGRESS_EVERY_S:
                return
            grading.progressed_at = time.monotonic()
        with contextlib.suppress(OperationalError), self._database.write() as session:
            if not submissions.progress(session, grading.job, stages):
                raise NoLongerOurs

    def _beat(self) -> None:
        while not self._sleep():
            try:
                self._renew()
            except OperationalError as exc:
                # the lease outlasts several of these
                log.warning("no heartbeat could be written: %s", db.briefly(exc))
            except Exception:
                log.exception("no heartbeat could be written")
        try:
            self._hand_back()
            self._report(WorkerStatus.STOPPED)
        except OperationalError as exc:
            log.warning("could not say goodbye, the lease will lapse: %s", db.briefly(exc))

    def _sleep(self) -> bool:
        """Wait until the next heartbeat is due; True when this worker is to stop. Notices when it was halted."""
        until = time.monotonic() + self._settings.heartbeat_s
        while (left_s := until - time.monotonic()) > 0 and not self._stopping.is_set():
            nap_s = min(left_s, NAP_S)
            self._wakes_at = time.monotonic() + nap_s
            self._stopping.wait(nap_s)
            if self._stood_still():
                self._hand_back(void=True)
            self._wakes_at = None
        return self._stopping.is_set()

    def _stood_still(self) -> bool:
        """True when this process, or its whole host, was halted for a while, and woke just now.

        A paused container, a suspended machine. The limits of calls went on meanwhile, and a candidate that answered
        in time would be told that it was too slow.
        """
        wakes_at = self._wakes_at
        return wakes_at is not None and time.monotonic() - wakes_at > STANDSTILL_S

    def _is_void(self, grading: _Grading) -> bool:
        """True when nothing that was measured may count, because this worker stood still. It is handed back by then."""
        if not grading.void and self._stood_still():
            self._hand_back(void=True)
        return grading.void

    def _hand_back(self, *, void: bool = False) -> None:
        """Return all that is being graded, and end it. Nobody failed, so no attempt is lost."""
        with self._lock:
            gradings = [grading for grading in self._gradings if not grading.void]
            for grading in gradings:
                grading.lost, grading.void = True, void
        for grading in gradings:
            if void:
                log.warning("submission %d: this worker stood still, so it is handed back", grading.job.submission_id)
            self._patiently(functools.partial(self._return, grading.job))

    def _return(self, job: Job) -> None:
        with self._database.write() as session:
            submissions.hand_back(session, job)

    def _patiently(self, write: Callable[[], T]) -> T:
        """Do it again while the database is away."""
        until = time.monotonic() + DATABASE_PATIENCE_S
        for delay_s in itertools.chain(DATABASE_RETRY_DELAYS_S, itertools.repeat(DATABASE_RETRY_DELAYS_S[-1])):
            try:
                return write()
            except OperationalError as exc:
                if self._stopping.is_set() or time.monotonic() > until:
                    raise
                log.warning("the database is away, trying again in %.1f s: %s", delay_s, db.briefly(exc))
                self._stopping.wait(delay_s)
        raise AssertionError("unreachable")

    def _renew(self) -> None:
        with self._lock:
            gradings = list(self._gradings)
        for grading in gradings:
            with self._database.write() as session:
                ours = submissions.renew(session, grading.job, now=self._now(), lease=self._settings.lease)
            with self._lock:
                grading.lost = grading.lost or not ours
        self._report()

    def _report(self, status: WorkerStatus | None = None) -> None:
        """Tell the database what this worker does; `status` where that is not just grading or idling."""
        # one at a time: a heartbeat must not write what was true a moment ago over what is true now
        with self._reporting:
            if self._said_goodbye:
                return
            self._said_goodbye = status is WorkerStatus.STOPPED
            with self._lock:
                job = self._gradings[0].job if self._gradings and status is None else None
            with self._database.write() as session:
                started_at = submissions.report_worker(
                    session,
                    name=self._name,
                    device=self._settings.device,
                    status=status or (WorkerStatus.GRADING if job else self._when_free()),
                    submission_id=job.submission_id if job else None,
                    note=self._quarantined or self._note,
                    now=self._now(),
                )
            if status is WorkerStatus.STARTING:
                self._started_at = started_at
            elif self._started_at not in (None, started_at):
                self._started_at = None  # said once
                log.warning("another worker reports as %s too: give each its own TILEGRADE_SLOT", self._name)

    def _when_free(self) -> WorkerStatus:
        return WorkerStatus.QUARANTINED if self._quarantined else WorkerStatus.IDLE


class SandboxedExaminer:
    """Examines in warm sandboxes. Keeps one pool for each set of limits, the most recently used ones."""

    lanes = 1

    def __init__(self) -> None:
        self._pools: OrderedDict[Limits, tuple[SandboxPool, SandboxPool, contextlib.ExitStack]] = OrderedDict()

    def __call__(self, assignment: Assignment, source: bytes, progress: Progress) -> Examination:
        from workers.examination import examine

        sandboxes, compilers = self.pools(assignment.limits)
        return examine(assignment, source, sandboxes=sandboxes, compilers=compilers, progress=progress)

    def pools(self, limits: Limits) -> tuple[SandboxPool, SandboxPool]:
        """Warm candidates with those limits, to run files and to compile them; started now where there are none yet."""
        from workers.compiling import compile_pool
        from workers.devices.cpu import interpreter_pool

        if limits not in self._pools:
            while len(self._pools) >= WARM_POOLS:
                _, (_, _, oldest) = self._pools.popitem(last=False)
                oldest.close()
            stack = contextlib.ExitStack()
            sandboxes = stack.enter_context(interpreter_pool(limits, size=2))
            compilers = stack.enter_context(compile_pool(limits, size=1))
            self._pools[limits] = (sandboxes, compilers, stack)
        self._pools.move_to_end(limits)
        return self._pools[limits][:2]

    def close(self) -> None:
        """End every candidate."""
        while self._pools:
            _, (_, _, stack) = self._pools.popitem()
            stack.close()


def add_tasks(app: Celery, grader: Grader, database: Database, settings: Settings) -> None:
    """Give the application its two tasks."""
    doorbell = Doorbell(app)

    def grade() -> None:
        """Grade what waits. Safe to deliver twice: the second delivery claims nothing."""
        with _while_database_is_there():
            grader.grade_waiting()

    def sweep() -> None:
        """Take back what dead workers hold, ring for what waits, forget what no longer counts."""
        now, devices = datetime.now(UTC), []
        with _while_database_is_there():
            if database_trouble(database, settings, lambda: datetime.now(UTC)):
                return  # said where work is taken
            with database.write() as session:
                devices = submissions.sweep(session, now=now, max_lost_attempts=settings.max_lost_attempts)
                accounts.forget_old_failures(session, settings=settings, now=now)
        for device in devices:
            doorbell.ring(device)

    app.task(name=GRADE)(grade)
    app.task(name=SWEEP)(sweep)


@contextlib.contextmanager
def _while_database_is_there() -> Iterator[None]:
    """End the block where the database goes away: nothing is lost, for the sweep rings again."""
    try:
        yield
    except OperationalError as exc:
        log.warning("the database is away: %s", db.briefly(exc))


def worker_name(settings: Settings) -> str:
    """One name for each slot of each host, the same after a restart."""
    return f"{socket.gethostname()}:{devices.kind_of(settings.device)}:{settings.slot or 0}"[:120]


def run_worker(
    settings: Settings,
    examine: Examine,
    *,
    note: str = "",
    lanes: int = 1,
    check_again: Callable[[], str] = lambda: "",
    start_over: Callable[[], None] = lambda: None,
) -> None:
    """Serve until a signal ends it: TERM and INT hand the current submission back."""
    database = Database(settings.database_url)
    name = worker_name(settings)
    app = make_celery(settings)
    grader = Grader(
        database=database,
        catalog=Catalog(settings.assignments_dir),
        settings=settings,
        name=name,
        examine=examine,
        note=note,
        lanes=lanes,
        check_again=check_again,
        start_over=start_over,
        ring=Doorbell(app).ring,
    )
    add_tasks(app, grader, database, settings)

    def on_ready(**_: Any) -> None:
        log.info("%s is ready", name)
        Doorbell(app).ring(settings.device)  # what waited for a worker need not wait for the sweep

    def on_stop(**_: Any) -> None:
        grader.request_stop()
        # an examination in the middle of a call cannot be asked to end; its sandboxes die with this process
        timer = threading.Timer(EXIT_GRACE_S, os._exit, (0,))
        timer.daemon = True
        timer.start()

    signals.worker_ready.connect(on_ready, weak=False)
    signals.worker_shutting_down.connect(on_stop, weak=False)
    grader.start()
    try:
        app.worker_main(
            [
                "--quiet",
                "worker",
                "--pool=solo",  # one process, one task; no fork of a process that has threads
                f"--queues={','.join(heard_by(settings))}",
                f"--hostname={name}",
                "--without-gossip",
                "--without-mingle",
                "--without-heartbeat",
            ]
        )
    finally:
        grader.close()
        database.close()


def main(argv: list[str] | None = None) -> int:
    """Run one worker process; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m workers.tasks", description=__doc__)
    parser.add_argument("--device", choices=devices.KINDS, help="what to grade with; TILEGRADE_DEVICE otherwise")
    parser.add_argument("--slot", type=int, help="number of this worker on this host, with cuda of its GPU")
    parser.add_argument("--alive", action="store_true", help="exit 0 when this host's worker reported itself of late")
    arguments = parser.parse_args(argv)
    log_to_stderr("worker")
    # root is what lets us give every candidate a user of its own; messages are JSON, never code
    warnings.filterwarnings("ignore", message="You're running the worker with superuser privileges")
    try:
        settings = Settings.from_env(os.environ)
    except UserError as exc:
        print(f"tilegrade worker: {exc}", file=sys.stderr)
        return 2
    settings = dataclasses.replace(
        settings,
        device=settings.device if arguments.device is None else arguments.device,
        slot=settings.slot if arguments.slot is None else arguments.slot,
    )
    if arguments.alive:
        try:
            return 0 if _is_alive(settings) else 1
        except DBAPIError as exc:
            print(f"tilegrade worker: The database cannot be used: {db.briefly(exc)}", file=sys.stderr)
            return 1
    _await_database(settings)
    environ_before = dict(os.environ)  # what follows narrows what CUDA sees
    for what in sweep_leftovers():
        log.info("cleared away: %s", what)
    note = _await_fit_host(settings, environ_before)
    try:
        host = _Host(settings, environ_before)
    except Exception as exc:
        # whatever a GPU, its driver or a sandbox raises: nothing can be graded, and a new process may do better
        log.exception("the worker cannot start")
        _stay_in_quarantine(settings, f"{type(exc).__name__}: {plain(str(exc), 1500)}", settings.recheck_s)
        _become_anew(environ_before)

    def start_over() -> None:
        host.close()
        _become_anew(environ_before)

    try:
        run_worker(
            host.settings,
            host.examine,
            note=f"{host.note}\n{note}".strip(),
            lanes=host.lanes,
            check_again=host.check_again,
            start_over=start_over,
        )
    finally:
        host.close()
    return 0


class _Host:
    """A host that passed its check, with everything warm that grading needs. Closes what it opened when it fails."""

    def __init__(self, settings: Settings, environ: Mapping[str, str]) -> None:
        """`environ`: as it was at the start, which showed all of this host's GPUs."""
        self.settings, self.note, self.lanes = settings, "", 1
        self._environ = environ
        self._stack = contextlib.ExitStack()
        self._trouble: Callable[[], str] = lambda: ""
        self.examine: Examine
        try:
            if settings.device == "cpu":
                self._open_cpu()
            else:
                self._open_gpu()
        except BaseException:
            self.close()
            raise

    def check_again(self) -> str:
        """Why this host may grade no more; empty when it may."""
        return self._trouble() or _check(self.settings, self._environ, in_use=True).why_not

    def close(self) -> None:
        """End everything; a GPU that hangs is left alone after a while, and the process ends instead."""
        timer = threading.Timer(CLOSE_GRACE_S, os._exit, (EXIT_HANGS,))
        timer.daemon = True
        timer.start()
        self._stack.close()
        timer.cancel()

    def _open_cpu(self) -> None:
        examiner = SandboxedExaminer()
        self._stack.callback(examiner.close)
        self.lanes, self.examine = examiner.lanes, examiner
        assignment = _cheapest(self.settings)
        if assignment is not None:
            for pool in examiner.pools(assignment.limits):
                pool.take(READY_WITHIN_S).kill()  # says why when none gets ready

    def _open_gpu(self) -> None:
        from workers import health
        from workers.devices import nvml

        card = health.choose(self.settings.slot or 0, nvml.visible_devices())
        nvml.show_only(card)
        from workers.gpu_examination import WarmGpu

        examiner = WarmGpu()
        self._stack.callback(examiner.close)
        xids = nvml.XidWatch(card)
        self._stack.callback(xids.close)
        watched = health.Watched(
            examiner, read=lambda: nvml.read(card), xids=xids.heard, still_works=health.use_context
        )
        self.lanes, self.examine, self._trouble = examiner.lanes, watched, watched.trouble_after_fault
        self.settings = dataclasses.replace(self.settings, device=devices.on_gpu(card.name))
        self.note = f"{card.name}, {card.uuid}."
        assignment = _cheapest(self.settings)
        if assignment is not None:
            trouble = health.reference_trouble(assignment, examiner.warm_up(assignment))
            self.note += f"\n{trouble}" if trouble else ""
            if examiner.compiled_late:
                self.note += (
                    f" Compiled ahead and again on the GPU: {', '.join(examiner.compiled_late)}. Gradings are slower"
                    " than they need be; do all processes of this host use one triton?"
                )


def _cheapest(settings: Settings) -> Assignment | None:
    """The assignment with the fewest probes, to warm up with; None where none loads."""
    catalog = Catalog(settings.assignments_dir)
    found = []
    for slug in catalog.slugs():
        with contextlib.suppress(AssignmentError):  # said to staff when somebody hands in
            found.append(catalog.load(slug))
    return min(found, key=lambda one: len(one.cases), default=None)


def _check(settings: Settings, environ: Mapping[str, str], *, in_use: bool = False) -> selfcheck.Outcome:
    return selfcheck.in_a_process(*check_flags(settings), *(["--in-use"] if in_use else []), environ=environ)


def _await_fit_host(settings: Settings, environ: Mapping[str, str]) -> str:
    """Check this host until it may grade, in quarantine meanwhile. Returns what it lacks all the same, for staff."""
    wait_s = FIRST_RECHECK_S
    while True:
        _report_myself(settings, WorkerStatus.STARTING, "Checking this host.")
        outcome = _check(settings, environ)
        if not outcome.why_not:
            return outcome.note
        log.error("quarantined: %s", outcome.why_not)
        wait_s = min(wait_s, settings.recheck_s)
        _stay_in_quarantine(settings, outcome.why_not, wait_s)
        wait_s *= 2


def _stay_in_quarantine(settings: Settings, why: str, seconds: float) -> None:
    """Say why nothing is graded here, again and again, for so long."""

    def leave(_number: int, _frame: FrameType | None) -> NoReturn:
        sys.exit(0)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGINT)}
    until = time.monotonic() + seconds
    try:
        while (left_s := until - time.monotonic()) > 0:
            _report_myself(settings, WorkerStatus.QUARANTINED, why)
            time.sleep(min(left_s, settings.heartbeat_s))
    except SystemExit:
        _report_myself(settings, WorkerStatus.STOPPED, why)
        raise
    for number, handler in before.items():
        signal.signal(number, handler)


def _report_myself(settings: Settings, status: WorkerStatus, note: str) -> None:
    database = Database(settings.database_url)
    try:
        with database.write() as session:
            submissions.report_worker(
                session,
                name=worker_name(settings),
                device=settings.device,
                status=status,
                note=plain(note, 4000),
                now=datetime.now(UTC),
            )
    except OperationalError:
        log.warning("the database is away; nobody hears that this worker is %s", status.value)
    finally:
        database.close()


def _become_anew(environ: Mapping[str, str]) -> NoReturn:
    """Begin again as a process that holds nothing: a CUDA context that broke cannot be mended within its process."""
    log.info("starting over")
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environ)  # noqa: S606 - ourselves


def _is_alive(settings: Settings) -> bool:
    """Whether this worker, or with cuda and no slot any of this host's, has reported itself of late."""
    name = worker_name(settings)
    any_slot = settings.slot is None and settings.device != "cpu"
    host = name.rpartition(":")[0]
    database = Database(settings.database_url)
    with database.read() as session:
        rows = submissions.workers(session)
    database.close()
    mine = [one for one in rows if one.name == name or (any_slot and one.name.rpartition(":")[0] == host)]
    return any(not submissions.is_gone(one, datetime.now(UTC)) for one in mine)


def database_trouble(database: Database, settings: Settings, now: Callable[[], datetime]) -> str:
    """Why a worker must take nothing from this database, and what to do; empty when it may.

    Leases are moments: a worker whose clock is ahead by a lease would take what others are grading.
    """
    why = db.why_unfit(database)
    if why:
        return why
    ahead_s = db.clock_ahead_s(database, now)
    # two workers that are off to different sides are still one heartbeat away from each other's leases
    if abs(ahead_s) <= (settings.lease_s - settings.heartbeat_s) / 2:
        return ""
    side = "ahead of" if ahead_s > 0 else "behind"
    return (
        f"The clock of this host is {abs(ahead_s):.0f} s {side} the database server's. Have both set theirs by NTP; "
        f"workers would take each other's submissions."
    )


def _await_database(settings: Settings) -> None:
    """Wait until the database answers and is one that this program may work with; say what is in the way."""
    said = ""
    while True:
        database = Database(settings.database_url)
        try:
            why = database_trouble(database, settings, lambda: datetime.now(UTC))
        except DBAPIError as exc:
            why = f"The database cannot be used: {db.briefly(exc)}"
        finally:
            database.close()
        if not why:
            return
        if why != said:
            log.warning("waiting: %s", why)
            said = why
        time.sleep(LOOK_FOR_DATABASE_S)


if __name__ == "__main__":
    sys.exit(main())
