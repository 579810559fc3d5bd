"""What happens to a submission, from the form to its result. The only module that moves `Submission.state`.

    hand_in -> QUEUED --claim_next--> RUNNING --record--> DONE
                 ^                        |
                 '-- give_up, lapsed -----+--> FAULTED after three lost attempts

`attempt` is the fence: it goes up with every claim, and a worker writes only where it still equals the one it claimed.

What has a `Result` has a grade, whatever its state. The grade counts while the file is measured again, only `record`
replaces it, and where nothing comes of it (`give_up`, a lapsed lease, `cancel`) the submission is DONE as it was.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from datetime import datetime, timedelta
from statistics import median

from sqlalchemy import (
    ColumnElement,
    CursorResult,
    Select,
    Update,
    and_,
    case,
    delete,
    func,
    literal,
    null,
    or_,
    select,
    update,
)
from sqlalchemy.orm import Session, aliased, contains_eager, joinedload, undefer

from grader import accounts, course, devices, judging, measurement
from grader.assignment import Assignment
from grader.errors import UserError
from grader.measurement import Examination
from grader.models import CourseAssignment, Result, Role, State, Submission, User, Worker, WorkerStatus
from grader.roofline import share_of_limit
from grader.settings import Settings
from grader.verdicts import Grade
from grader.wording import one_line, plain

# a student who had many gradings within this window waits behind one who had few
FAIRNESS_WINDOW = timedelta(minutes=10)
# a worker that has not been seen for this long is gone
WORKER_GONE_AFTER = timedelta(seconds=60)
FORGET_WORKER_AFTER = timedelta(days=1)
GRADINGS_OF_LATE = 25  # that an estimate of the next one's time is made from

_ON_THEIR_WAY = (State.QUEUED, State.RUNNING)
_HAS_GRADE = select(Result.submission_id).where(Result.submission_id == Submission.id).correlate(Submission).exists()
_DEVICE_NOW = (
    select(CourseAssignment.device).where(CourseAssignment.id == Submission.course_assignment_id).scalar_subquery()
)
# with an outer join of Result: what staff have measured again is no burden of the student's
_NOT_GRADED_YET = and_(Submission.state.in_(_ON_THEIR_WAY), Result.submission_id.is_(None))
MAX_STAGES_TEXT = 240
MAX_REASON = 2000

_MAGIC = (
    (b"\x89PNG", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"%PDF", "a PDF document"),
    (b"PK\x03\x04", "a ZIP archive"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"\x7fELF", "a compiled program"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a worker needs to grade one submission, and the fence to write with."""

    submission_id: int
    attempt: int
    course_assignment_id: int
    slug: str
    source: str
    source_sha256: str
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """A hand-in that is in the database."""

    submission_id: int
    new: bool  # False: the same file came twice with one key, e.g. a double click


def decode_source(data: bytes, *, max_bytes: int) -> str:
    """The text of a handed-in file, line ends as they were.

    Raises:
        UserError: empty, too large, or not UTF-8 text; one sentence says what it is and what to do.
    """
    if not data.strip():
        raise UserError("Your file is empty. Hand in the Python file that defines the entry point.")
    if len(data) > max_bytes:
        raise UserError(
            f"Your file is {len(data) / 1024:.0f} KiB and the limit is {max_bytes // 1024} KiB. "
            f"Hand in the kernel file alone, without data or generated code."
        )
    for magic, what in _MAGIC:
        if data.startswith(magic):
            raise UserError(f"Your file is {what}, not Python text. Hand in the .py file itself.")
    try:
        # -sig: some editors put a byte order mark first, which Python does not accept inside a string
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        line = data.count(b"\n", 0, exc.start) + 1
        raise UserError(
            f"Your file is not UTF-8: line {line} holds the byte 0x{data[exc.start]:02x}. "
            f"Save it as UTF-8 and hand it in again."
        ) from None
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise UserError(f"Your file has a NUL byte on line {line}, so it is not Python text. Remove it.")
    return text


def hand_in(
    session: Session,
    *,
    user: User,
    entry: CourseAssignment,
    assignment: Assignment,
    data: bytes,
    settings: Settings,
    now: datetime,
    idempotency_key: str | None = None,
    filename: str | None = None,
) -> Accepted:
    """Put one file into the queue. Ring the doorbell after the commit.

    Args:
        entry: the assignment as the course sets it.
        assignment: the loaded folder of `entry.slug`.
        idempotency_key: from the form; the same file with the same key is one submission.

    Raises:
        UserError: the file, the moment or the quota forbids it; the message tells the student what to do.
    """
    source = decode_source(data, max_bytes=settings.max_source_bytes)
    # one student at a time: counting and inserting must not interleave (SQLite's writer lock does the same)
    session.execute(select(User.id).where(User.id == user.id).with_for_update())
    sha256 = hashlib.sha256(source.encode()).hexdigest()
    # the file is part of the key: a form sent again after an edit is another hand-in
    key = _digest(idempotency_key or secrets.token_hex(16), str(entry.id), sha256)
    known = session.scalar(
        select(Submission.id).where(Submission.user_id == user.id, Submission.idempotency_key == key)
    )
    if known is not None:
        return Accepted(submission_id=known, new=False)
    _refuse_when_closed(session, user=user, entry=entry, assignment=assignment, now=now)
    _refuse_when_too_many(session, user=user, entry=entry, assignment=assignment, settings=settings, now=now)
    row = Submission(
        user_id=user.id,
        course_assignment_id=entry.id,
        filename=filename[:200] if filename else None,
        source=source,
        source_sha256=sha256,
        source_bytes=len(source.encode()),
        assignment_digest=assignment.digest,
        idempotency_key=key,
        device=entry.device,
        submitted_at=now,
        queued_at=now,
    )
    session.add(row)
    session.flush()
    return Accepted(submission_id=row.id, new=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """How often one student may still hand in, beside the deadline."""

    attempts: int  # that the assignment allows; 0: as many as you like
    used: int
    refusal: str = ""  # why not now; empty: now
    next_at: datetime | None = None  # when the refusal ends by itself; None: it does not, or there is none


def allowance(
    session: Session,
    *,
    user_id: int,
    entry: CourseAssignment,
    assignment: Assignment,
    settings: Settings,
    now: datetime,
) -> Allowance:
    """What the form would say now. The page that shows it and the hand-in that refuses it ask the same function."""
    attempts = assignment.limits.attempts
    used = attempts_used(session, user_id=user_id, course_assignment_id=entry.id)
    refusal, next_at = "", None
    if attempts and used >= attempts:
        refusal = f"You have used all {attempts} attempts for this assignment. Ask your instructor for more."
    mine = select(func.count(Submission.id)).outerjoin(Result).where(Submission.user_id == user_id)
    on_their_way = session.scalar(mine.where(_NOT_GRADED_YET)) or 0
    if not refusal and on_their_way >= settings.max_waiting_per_student:
        refusal = (
            f"{on_their_way} of your submissions are not graded yet. Wait for one to finish, or withdraw one, "
            f"before you hand in another."
        )
    if not refusal:
        refusal, next_at = _too_fast(session, user_id, settings, now)
    return Allowance(attempts=attempts, used=used, refusal=refusal, next_at=next_at)


def _too_fast(session: Session, user_id: int, settings: Settings, now: datetime) -> tuple[str, datetime | None]:
    """What a student reads who handed in too often of late, and when the next one is taken."""
    hour = timedelta(hours=1)
    query = select(Submission.submitted_at).where(Submission.user_id == user_id, Submission.submitted_at > now - hour)
    of_late = sorted(session.scalars(query), reverse=True)
    refusal, next_at = "", now
    for limit, span, words in (
        (settings.hand_ins_per_minute, timedelta(minutes=1), "minute"),
        (settings.hand_ins_per_hour, hour, "hour"),
    ):
        within = [moment for moment in of_late if moment > now - span]
        # free again when the oldest of those that fill the limit has left the span
        if len(within) >= limit and (free_at := within[limit - 1] + span) > next_at:
            refusal = f"You have handed in {limit} files within the last {words}. Try again a little later."
            next_at = free_at
    return refusal, next_at if refusal else None


def attempts_used(session: Session, *, user_id: int, course_assignment_id: int) -> int:
    """Hand-ins that count against the assignment's limit: grades that are not provisional, and those on their way."""
    counts = or_(_NOT_GRADED_YET, Result.provisional.is_(False))
    return (
        session.scalar(
            select(func.count(Submission.id))
            .outerjoin(Result)
            .where(Submission.user_id == user_id, Submission.course_assignment_id == course_assignment_id, counts)
        )
        or 0
    )


def claim_next(
    session: Session, *, worker: str, device: str, now: datetime, lease: timedelta, max_lost_attempts: int = 3
) -> Job | None:
    """Take the fairest waiting submission for grading; None when nothing waits that this device may grade.

    First in line is the student who had the fewest gradings of late, then the oldest hand-in. A submission whose
    worker let its lease lapse waits again, or is FAULTED when that happened too often.
    """
    _take_back_lapsed(session, now=now, max_lost_attempts=max_lost_attempts)
    fairest = _in_line(device, now).limit(1)
    while session.scalar(fairest) is not None:
        claimed = session.execute(
            update(Submission)
            .where(Submission.id == fairest.scalar_subquery(), Submission.state == State.QUEUED)
            .values(
                state=State.RUNNING,
                attempt=Submission.attempt + 1,
                lease_until=now + lease,
                worker=worker,
                started_at=now,
                finished_at=None,
                stages=None,
            )
            .returning(
                Submission.id,
                Submission.attempt,
                Submission.course_assignment_id,
                Submission.source,
                Submission.source_sha256,
                Submission.device,
            )
            .execution_options(synchronize_session=False)
        ).one_or_none()
        if claimed is not None:
            slug = session.scalars(
                select(CourseAssignment.slug).where(CourseAssignment.id == claimed.course_assignment_id)
            ).one()
            return Job(
                submission_id=claimed.id,
                attempt=claimed.attempt,
                course_assignment_id=claimed.course_assignment_id,
                slug=slug,
                source=claimed.source,
                source_sha256=claimed.source_sha256,
                device=claimed.device,
            )
        # another worker took that one between the subquery and the row lock; look for the next
    return None


def renew(session: Session, job: Job, *, now: datetime, lease: timedelta) -> bool:
    """Extend the lease; False when the submission is no longer ours: stop grading it."""
    return _write(session, _ours(job).values(lease_until=now + lease))


def progress(session: Session, job: Job, stages: Mapping[str, float]) -> bool:
    """Say how much of every stage so far is done, 0 to 1; False when the submission is no longer ours."""
    text = " ".join(f"{name}={share:.0%}" for name, share in stages.items())
    return _write(session, _ours(job).values(stages=text[:MAX_STAGES_TEXT]))


def stages_of(submission: Submission) -> dict[str, float]:
    """How much of every stage is done, 0 to 1, while the submission is examined."""
    pairs = (pair.partition("=") for pair in (submission.stages or "").split())
    return {name: int(share[:-1]) / 100 for name, _, share in pairs if share.endswith("%")}


def record(session: Session, job: Job, examination: Examination, assignment: Assignment, *, now: datetime) -> bool:
    """Judge what was measured and write both; False, with nothing written, when the submission is no longer ours."""
    done = _ours(job).values(state=State.DONE, finished_at=now, lease_until=None, fault_note=None, stages=None)
    if not _write(session, done):
        return False
    row = session.get(Result, job.submission_id) or Result(submission_id=job.submission_id)
    row.attempt = job.attempt
    row.examination = measurement.dumps(examination)
    row.measured_at = now
    row.released = row.confirmed = False
    row.decision_reason = None
    _judge_into(row, examination, assignment, now)
    session.add(row)
    return True


def give_up(
    session: Session,
    job: Job,
    *,
    note: str,
    now: datetime,
    max_lost_attempts: int = 3,
    final: bool = False,
) -> State | None:
    """Return a submission that we could not grade; it never counts against the student.

    Args:
        note: why, for staff.
        final: trying again cannot help, e.g. because the assignment's folder is wrong.

    Returns:
        Where it went: QUEUED; after too many lost attempts FAULTED, or DONE with the grade that it had before. None
        when it was no longer ours.
    """
    most = 1 if final else max_lost_attempts
    return next(iter(_lose(session, _ours(job), note=note, now=now, max_lost_attempts=most)), None)


def hand_back(session: Session, job: Job) -> bool:
    """Return a submission because its worker is told to stop. Nobody failed, so no attempt is lost."""
    back = _ours(job).values(state=State.QUEUED, lease_until=None, stages=None)
    return _write(session, back)


def sweep(session: Session, *, now: datetime, max_lost_attempts: int = 3) -> list[str]:
    """Take back what lapsed. Returns the kinds of device that something waits for: ring for each.

    What waits follows its assignment to the device that it is set to be graded on by now. Workers that have not been
    seen for a day are forgotten: in containers every start has another name.
    """
    _take_back_lapsed(session, now=now, max_lost_attempts=max_lost_attempts)
    session.execute(
        update(Submission)
        .where(Submission.state == State.QUEUED, Submission.device != _DEVICE_NOW)
        .values(device=_DEVICE_NOW)
        .execution_options(synchronize_session=False)
    )
    session.execute(delete(Worker).where(Worker.seen_at < now - FORGET_WORKER_AFTER))
    return sorted(session.scalars(select(Submission.device).where(Submission.state == State.QUEUED).distinct()))


def cancel(
    session: Session, submission_id: int, *, for_staff: bool = False, actor_id: int | None, now: datetime
) -> State | None:
    """Withdraw a submission that is not graded yet, or stop measuring again one that is.

    Args:
        for_staff: may stop what is measured again; a student may not undo what staff look into.

    Returns:
        CANCELLED; DONE where it keeps the grade that it had; None when it is too late, or not for them to stop.
    """
    stopped = (
        update(Submission)
        .where(Submission.id == submission_id, Submission.state.in_(_ON_THEIR_WAY))
        .values(
            state=case((_HAS_GRADE, _state(State.DONE)), else_=_state(State.CANCELLED)),
            finished_at=now,
            lease_until=None,
            stages=None,
            fault_note=None,
        )
        .returning(Submission.state)
    )
    if not for_staff:
        stopped = stopped.where(~_HAS_GRADE)
    state = session.scalar(stopped.execution_options(synchronize_session="fetch"))
    if state is not None:
        accounts.audit(session, actor_id=actor_id, action="cancel", submission_id=submission_id, now=now)
    return state


def run_again(session: Session, submission_id: int, *, actor_id: int | None, now: datetime) -> str | None:
    """Queue a finished submission for new measurements, on the device that its assignment is graded on by now.

    The grade that it has counts until they are there.

    Returns:
        The kind of device that it waits for: ring for it. None when it is on its way already, or does not exist.
    """
    again = (
        update(Submission)
        .where(Submission.id == submission_id, Submission.state.not_in(_ON_THEIR_WAY))
        .values(
            state=State.QUEUED,
            device=_DEVICE_NOW,
            queued_at=now,
            lost_attempts=0,
            finished_at=None,
            fault_note=None,
        )
        .returning(Submission.device)
    )
    device = session.scalar(again.execution_options(synchronize_session="fetch"))
    if device is not None:
        accounts.audit(session, actor_id=actor_id, action="run-again", submission_id=submission_id, now=now)
    return device


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejudged:
    """What a re-judge changed."""

    submission_id: int
    verdict_before: str
    points_before: float
    verdict: str
    points: float

    @property
    def changed(self) -> bool:
        return (self.verdict_before, self.points_before) != (self.verdict, self.points)


def rejudge(
    session: Session, submission_id: int, assignment: Assignment, *, actor_id: int | None, now: datetime
) -> Rejudged:
    """Judge the stored measurements anew by `assignment` as it is now. Nothing is run.

    Raises:
        UserError: the submission has no measurements.
    """
    row = session.scalars(
        select(Result)
        .where(Result.submission_id == submission_id)
        .options(undefer(Result.examination), undefer(Result.grade))
    ).one_or_none()
    if row is None:
        raise UserError(f"Submission {submission_id} was not graded yet, so there is nothing to judge again.")
    before = (row.verdict, row.points)
    _judge_into(row, measurement.loads(row.examination), assignment, now)
    detail = f"{before[0]} {before[1]:g} -> {row.verdict} {row.points:g}"
    accounts.audit(session, actor_id=actor_id, action="rejudge", submission_id=submission_id, detail=detail, now=now)
    return Rejudged(
        submission_id=submission_id,
        verdict_before=before[0],
        points_before=before[1],
        verdict=row.verdict,
        points=row.points,
    )


def decide(
    session: Session,
    submission_id: int,
    assignment: Assignment,
    *,
    release: bool,
    reason: str,
    actor_id: int | None,
    now: datetime,
) -> bool:
    """Publish a `held` grade as it was measured, or decide that it does not count; a decision may be changed.

    Points are taken by no program: only this, with a person behind it and a reason that the student reads.

    Returns:
        False when the grade is neither held nor was, or is decided so already.

    Raises:
        UserError: there is no reason.
    """
    row = session.scalars(
        select(Result)
        .where(Result.submission_id == submission_id)
        .options(undefer(Result.examination), undefer(Result.grade))
    ).one_or_none()
    if row is None or not (row.verdict == "held" or row.released or row.confirmed):
        return False
    if row.released if release else row.confirmed:
        return False
    reason = plain(reason, MAX_REASON).strip()
    if not reason:
        raise UserError("Say why, in a sentence that the student reads.")
    row.released, row.confirmed, row.decision_reason = release, not release, reason
    _judge_into(row, measurement.loads(row.examination), assignment, now)
    action = "release" if release else "confirm"
    accounts.audit(session, actor_id=actor_id, action=action, submission_id=submission_id, detail=reason, now=now)
    return True


def find(session: Session, submission_id: int) -> Submission | None:
    """One submission with its source, student, assignment, course and result (report texts included)."""
    return session.scalars(
        select(Submission)
        .where(Submission.id == submission_id)
        .options(
            undefer(Submission.source),
            joinedload(Submission.user),
            joinedload(Submission.course_assignment).joinedload(CourseAssignment.course),
            joinedload(Submission.result).undefer(Result.examination),
            joinedload(Submission.result).undefer(Result.grade),
        )
    ).one_or_none()


def slug_of(session: Session, submission_id: int) -> str:
    """The assignment that a submission is for. Raises UserError when there is no such submission."""
    query = select(CourseAssignment.slug).join(Submission).where(Submission.id == submission_id)
    slug = session.scalar(query)
    if slug is None:
        raise UserError(f"There is no submission {submission_id}.")
    return slug


def graded(session: Session, *, slug: str) -> list[int]:
    """Ids of every submission with a result, for that assignment in any course, oldest first."""
    return list(
        session.scalars(
            select(Result.submission_id)
            .join(Submission)
            .join(CourseAssignment, CourseAssignment.id == Submission.course_assignment_id)
            .where(CourseAssignment.slug == slug)
            .order_by(Result.submission_id)
        )
    )


def place_in_queue(session: Session, submission_id: int, *, now: datetime) -> int | None:
    """1 for the next to be taken; None when it does not wait. An estimate: fairness moves with every new hand-in."""
    device = select(Submission.device).where(Submission.id == submission_id).scalar_subquery()
    waiting_rows = session.execute(
        select(Submission.id, Submission.user_id)
        .where(Submission.state == State.QUEUED, Submission.device == device)
        .order_by(Submission.queued_at, Submission.id)
    ).all()
    # asked of these rows, not before them: a worker may take it at any moment
    if all(row.id != submission_id for row in waiting_rows):
        return None
    loads: dict[int, int] = {}
    for user_id, count in session.execute(
        select(Submission.user_id, func.count(Submission.id))
        .where(Submission.started_at > now - FAIRNESS_WINDOW)
        .group_by(Submission.user_id)
    ):
        loads[user_id] = count
    order = fair_order([(row.id, row.user_id) for row in waiting_rows], loads)
    return order.index(submission_id) + 1


def fair_order(waiting_rows: Iterable[tuple[int, int]], loads: dict[int, int]) -> list[int]:
    """The order in which rows of (submission, student), oldest first, will be claimed.

    Args:
        loads: by student, gradings of late; one that is missing had none.
    """
    # a student's k-th waiting submission is claimed when they have had `load + k` gradings
    seen: dict[int, int] = {}
    keys = []
    for age, (submission_id, user_id) in enumerate(waiting_rows):
        k = seen.get(user_id, 0)
        seen[user_id] = k + 1
        keys.append((loads.get(user_id, 0) + k, age, submission_id))
    return [submission_id for _, _, submission_id in sorted(keys)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """How busy the workers of one kind of device are."""

    n_waiting: int
    n_running: int
    n_workers: int
    typical_s: float | None  # one grading of late, the median; None: nothing was graded yet
    models: tuple[str, ...] = ()  # of the GPUs that grade now, as `devices.model_of` says them

    def wait_s(self, n_ahead: int | None = None) -> float | None:
        """Seconds until a submission with so many ahead is graded, those running included; None: nobody can say.

        Args:
            n_ahead: that wait before it; None: all that wait.
        """
        if self.typical_s is None or not self.n_workers:
            return None
        ahead = self.n_waiting if n_ahead is None else n_ahead
        at_once = max(self.n_workers, self.n_running)  # a GPU's worker has several in hand
        # what runs is half done on average
        return self.typical_s * ((ahead + self.n_running / 2) / at_once + 1)


def outlook(session: Session, device: str, *, now: datetime) -> Outlook:
    """How long the queue of a device is, and how fast it moves. Three statements."""
    per_state = select(Submission.state, func.count(Submission.id)).where(
        Submission.device == device, Submission.state.in_(_ON_THEIR_WAY)
    )
    n_in = {row[0]: row[1] for row in session.execute(per_state.group_by(Submission.state))}
    # by queued_at, which has an index with state and device; the latest of all is near enough
    of_late = session.execute(
        select(Submission.started_at, Result.measured_at)
        .join(Submission.result)
        # an attempt that came to nothing says nothing of how long one takes
        .where(Submission.state == State.DONE, Submission.device == device, Submission.attempt == Result.attempt)
        .order_by(Submission.queued_at.desc())
        .limit(GRADINGS_OF_LATE)
    )
    took_s = [(row.measured_at - row.started_at).total_seconds() for row in of_late if row.started_at]
    serving = session.scalars(
        select(Worker.device).where(
            or_(Worker.device == device, Worker.device.startswith(f"{device}:")),
            Worker.status.not_in((WorkerStatus.STOPPED, WorkerStatus.QUARANTINED)),
            Worker.seen_at >= now - WORKER_GONE_AFTER,
        )
    ).all()
    return Outlook(
        n_waiting=n_in.get(State.QUEUED, 0),
        n_running=n_in.get(State.RUNNING, 0),
        n_workers=len(serving),
        models=tuple(sorted({one.partition(":")[2] for one in serving} - {""})),
        typical_s=median(took_s) if took_s else None,
    )


def waiting(
    session: Session, *, course_ids: Set[int] | None = None, limit: int = 200, offset: int = 0
) -> list[Submission]:
    """What is running and what waits, and what is faulted, for the staff's queue page: running first, then oldest.

    Args:
        course_ids: only of these courses; None: of all.
    """
    return list(
        session.scalars(
            select(Submission)
            .join(Submission.course_assignment)
            .where(*_on_their_way(course_ids))
            .options(
                joinedload(Submission.user),
                contains_eager(Submission.course_assignment).joinedload(CourseAssignment.course),
            )
            # descending happens to be running, queued, faulted
            .order_by(Submission.state.desc(), Submission.queued_at, Submission.id)
            .limit(limit)
            .offset(offset)
        )
    )


def count_waiting(session: Session, *, course_ids: Set[int] | None = None) -> int:
    """How many `waiting` would list without a limit."""
    query = select(func.count(Submission.id)).join(Submission.course_assignment).where(*_on_their_way(course_ids))
    return session.scalar(query) or 0


def _on_their_way(course_ids: Set[int] | None) -> list[ColumnElement[bool]]:
    mine = [] if course_ids is None else [CourseAssignment.course_id.in_(course_ids)]
    return [Submission.state.in_((State.RUNNING, State.QUEUED, State.FAULTED)), *mine]


def report_worker(
    session: Session,
    *,
    name: str,
    device: str,
    status: WorkerStatus,
    now: datetime,
    submission_id: int | None = None,
    note: str | None = None,
) -> datetime:
    """Say that a worker is there and what it does. Returns when the latest of that name started."""
    row = session.get(Worker, name)
    if row is None:
        row = Worker(name=name, device=device, started_at=now)
        session.add(row)
    if status is WorkerStatus.STARTING:
        row.started_at = now
    row.device, row.status, row.seen_at, row.submission_id = device, status, now, submission_id
    if note is not None:
        row.note = note
    return row.started_at


def workers(session: Session) -> list[Worker]:
    """Every worker that reported within the last day, the latest seen first."""
    return list(session.scalars(select(Worker).order_by(Worker.seen_at.desc(), Worker.name)))


def is_gone(worker: Worker, now: datetime) -> bool:
    """True when a worker stopped, or has not been seen for a minute."""
    return worker.status is WorkerStatus.STOPPED or now - worker.seen_at > WORKER_GONE_AFTER


def can_take(worker: Worker, device: str, now: datetime) -> bool:
    """True when a worker is there, well, and grades what is for that device."""
    return is_well(worker, now) and devices.serves(worker.device, device)


def is_well(worker: Worker, now: datetime) -> bool:
    """True when a worker is there and takes work."""
    return worker.status is not WorkerStatus.QUARANTINED and not is_gone(worker, now)


def unserved(session: Session, *, now: datetime) -> list[str]:
    """Devices that something waits for, and no worker that takes work grades on."""
    waiting = session.scalars(select(Submission.device).where(Submission.state == State.QUEUED).distinct())
    everybody = workers(session)
    return sorted(device for device in waiting if not any(can_take(one, device, now) for one in everybody))


def _refuse_when_closed(
    session: Session, *, user: User, entry: CourseAssignment, assignment: Assignment, now: datetime
) -> None:
    role = course.role_in(session, user=user, course_id=entry.course_id)
    if role is None:
        raise UserError("You are not enrolled in this course. Ask its instructor to add you.")
    if entry.closed_reason is not None:
        raise UserError(course.CLOSED)
    if role is Role.INSTRUCTOR:
        return  # they try their own assignments before they open and after they close
    reason = course.window(session, entry=entry, assignment=assignment, user_id=user.id).why_closed(now)
    if reason is not None:
        raise UserError(reason)


def _refuse_when_too_many(
    session: Session, *, user: User, entry: CourseAssignment, assignment: Assignment, settings: Settings, now: datetime
) -> None:
    found = allowance(session, user_id=user.id, entry=entry, assignment=assignment, settings=settings, now=now)
    if found.refusal:
        raise UserError(found.refusal)


def _in_line(device: str, now: datetime) -> Select[int]:
    """Ids of what waits for a device, the fairest first."""
    row, other = aliased(Submission), aliased(Submission)
    gradings_of_late = (
        select(func.count(other.id))
        .where(other.user_id == row.user_id, other.started_at > now - FAIRNESS_WINDOW)
        .scalar_subquery()
    )
    return (
        select(row.id)
        .where(row.state == State.QUEUED, row.device.in_(devices.served_by(device)))
        .order_by(gradings_of_late, row.queued_at, row.id)
    )


def _take_back_lapsed(session: Session, *, now: datetime, max_lost_attempts: int) -> None:
    lapsed = update(Submission).where(Submission.state == State.RUNNING, Submission.lease_until < now)
    _lose(session, lapsed, note="its worker stopped reporting", now=now, max_lost_attempts=max_lost_attempts)


def _lose(session: Session, which: Update, *, note: str, now: datetime, max_lost_attempts: int) -> list[State]:
    """Take these back from their worker; where each went. They keep `queued_at`: they do not wait at the end again."""
    note = plain(note, 2000)  # it may quote what a sandbox said, and no database takes a NUL or a surrogate
    again = Submission.lost_attempts + 1 < max_lost_attempts
    lost = which.values(
        state=case((again, _state(State.QUEUED)), (_HAS_GRADE, _state(State.DONE)), else_=_state(State.FAULTED)),
        lost_attempts=Submission.lost_attempts + 1,
        lease_until=None,
        finished_at=case((again, null()), else_=literal(now, Submission.finished_at.type)),
        stages=None,
        fault_note=note,
    ).returning(Submission.id, Submission.state)
    rows = session.execute(lost.execution_options(synchronize_session="fetch")).all()
    for row in rows:
        if row.state is not State.QUEUED:
            accounts.audit(session, actor_id=None, action="give-up", submission_id=row.id, detail=note, now=now)
    return [row.state for row in rows]


def _state(state: State) -> ColumnElement[State]:
    """The state as a value within an expression."""
    return literal(state, Submission.state.type)


def _ours(job: Job) -> Update:
    return update(Submission).where(
        Submission.id == job.submission_id,
        Submission.attempt == job.attempt,
        Submission.state == State.RUNNING,
    )


def _write(session: Session, statement: Update) -> bool:
    """Run it; True when it changed a row."""
    # what the session has loaded is refreshed on next use rather than guessed at
    found = session.execute(statement.execution_options(synchronize_session="fetch"))
    assert isinstance(found, CursorResult)
    return found.rowcount > 0


def decided(grade: Grade, row: Result) -> Grade:
    """The grade as a person decided on it, where one did."""
    if row.released:
        return judging.released(grade)
    return judging.not_counted(grade, row.decision_reason or "") if row.confirmed else grade


def _judge_into(row: Result, examination: Examination, assignment: Assignment, now: datetime) -> None:
    grade = decided(judging.judge(assignment, examination), row)
    row.grade = json.dumps(judging.grade_json(grade), allow_nan=False, separators=(",", ":"))
    row.released_verdict = grade.released_verdict.value
    row.verdict = grade.verdict.value
    row.fault = grade.diagnosis.label or None
    row.points, row.out_of, row.withheld = grade.score.points, grade.score.out_of, grade.score.withheld
    speed = grade.speed
    row.speedup = speed.speedup if speed else None
    row.speedup_low, row.speedup_high = (speed.low, speed.high) if speed else (None, None)
    row.gpu = one_line(examination.device.name, 120) if examination.device.kind == "cuda" else None
    row.limit_share = _limit_share(assignment, examination) if speed and speed.speedup is not None else None
    row.provisional = grade.provisional
    row.judged_at = now
    row.assignment_digest = assignment.digest


def _limit_share(assignment: Assignment, examination: Examination) -> float | None:
    timing = judging.headline_timing(assignment, examination)
    ceilings = examination.gpu.ceilings if examination.gpu else None
    return share_of_limit(timing, ceilings) if timing else None


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
