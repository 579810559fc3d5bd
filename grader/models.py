"""Every table. Typed columns and no behaviour; use cases live in submissions, course, accounts and boards."""

from __future__ import annotations

import enum
from datetime import UTC, datetime

from sqlalchemy import (
    DateTime,
    Dialect,
    Double,
    Enum,
    ForeignKey,
    Index,
    MetaData,
    String,
    Text,
    TypeDecorator,
    UniqueConstraint,
    false,
    text,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column, relationship

NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}


class UtcDateTime(TypeDecorator[datetime]):
    """A moment, aware and in UTC on both databases. SQLite keeps no zone, so it is put back on the way out."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:  # noqa: ARG002
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"{value!r} has no zone; pass an aware datetime")
        return value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:  # noqa: ARG002
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class Role(enum.StrEnum):
    """What somebody may do in one course."""

    STUDENT = "student"
    INSTRUCTOR = "instructor"


class State(enum.StrEnum):
    """Where a submission is. Only grader.submissions moves it."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAULTED = "faulted"  # we failed three times; staff see it, nothing counts
    CANCELLED = "cancelled"


class WorkerStatus(enum.StrEnum):
    STARTING = "starting"
    IDLE = "idle"
    GRADING = "grading"
    QUARANTINED = "quarantined"  # its host or its GPU failed the check: it takes no work, and looks again by itself
    STOPPED = "stopped"


def _enum(kind: type[enum.Enum]) -> Enum:
    # values, not names, and no native type: adding a member must not need ALTER TYPE
    return Enum(kind, native_enum=False, length=16, values_callable=lambda e: [one.value for one in e])


class Base(DeclarativeBase):
    metadata = MetaData(naming_convention=NAMING)
    type_annotation_map = {  # noqa: RUF012  SQLAlchemy reads it from the class
        datetime: UtcDateTime,
        float: Double(),
        Role: _enum(Role),
        State: _enum(State),
        WorkerStatus: _enum(WorkerStatus),
    }


class User(Base):
    """Somebody who can log in. `is_staff` sees and administers every course."""

    __tablename__ = "user_account"

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String(64), unique=True)
    password_hash: Mapped[str] = mapped_column(String(255))
    is_staff: Mapped[bool] = mapped_column(default=False)
    active: Mapped[bool] = mapped_column(default=True)  # False: the account is closed
    session_epoch: Mapped[int] = mapped_column(default=0)  # when it goes up, older cookies end
    created_at: Mapped[datetime]


class LoginFailure(Base):
    """One wrong password. Rows older than the window are swept."""

    __tablename__ = "login_failure"
    __table_args__ = (Index(None, "name", "address", "at"), Index(None, "address", "at"))

    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(String(64))
    address: Mapped[str] = mapped_column(String(64))
    at: Mapped[datetime]


class Course(Base):
    __tablename__ = "course"

    id: Mapped[int] = mapped_column(primary_key=True)
    slug: Mapped[str] = mapped_column(String(64), unique=True)
    title: Mapped[str] = mapped_column(String(200))
    created_at: Mapped[datetime]


class Enrollment(Base):
    __tablename__ = "enrollment"
    __table_args__ = (UniqueConstraint("course_id", "user_id"), UniqueConstraint("course_id", "nickname"))

    id: Mapped[int] = mapped_column(primary_key=True)
    course_id: Mapped[int] = mapped_column(ForeignKey("course.id"))
    user_id: Mapped[int] = mapped_column(ForeignKey("user_account.id"), index=True)
    role: Mapped[Role]
    nickname: Mapped[str] = mapped_column(String(64))  # the only name that boards show to students
    anonymous: Mapped[bool] = mapped_column(
        default=False, server_default=false()
    )  # boards do not even show the nickname

    course: Mapped[Course] = relationship()
    user: Mapped[User] = relationship()


class CourseAssignment(Base):
    """An assignment folder, set in one course. What it asks is in the folder; here is when and whether."""

    __tablename__ = "course_assignment"
    __table_args__ = (UniqueConstraint("course_id", "slug"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    course_id: Mapped[int] = mapped_column(ForeignKey("course.id"))
    slug: Mapped[str] = mapped_column(String(64), index=True)
    position: Mapped[int] = mapped_column(default=0)
    device: Mapped[str] = mapped_column(String(16), default="cpu")  # what grades it: cpu or cuda
    opens_at: Mapped[datetime | None]
    deadline: Mapped[datetime | None]  # overrides the folder's
    # columns that came later have a default in the database, for the rows that were there
    late_days: Mapped[int] = mapped_column(
        default=0, server_default="0"
    )  # so many days after the deadline hand-ins are still taken
    late_percent: Mapped[float] = mapped_column(
        default=0.0, server_default="0"
    )  # taken off the points for each begun one
    closed_reason: Mapped[str | None] = mapped_column(Text)  # for staff; closed while it is set

    course: Mapped[Course] = relationship()


class Extension(Base):
    """One student's own deadline for one assignment."""

    __tablename__ = "extension"
    __table_args__ = (UniqueConstraint("course_assignment_id", "user_id"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    course_assignment_id: Mapped[int] = mapped_column(ForeignKey("course_assignment.id"))
    user_id: Mapped[int] = mapped_column(ForeignKey("user_account.id"), index=True)
    until: Mapped[datetime]
    reason: Mapped[str] = mapped_column(String(400), default="", server_default=text("''"))  # for staff

    course_assignment: Mapped[CourseAssignment] = relationship()


class Submission(Base):
    """One file, handed in once. Only grader.submissions moves `state`."""

    __tablename__ = "submission"
    __table_args__ = (
        UniqueConstraint("user_id", "idempotency_key"),
        Index(None, "state", "device", "queued_at"),
        Index(None, "user_id", "started_at"),
        Index(None, "user_id", "course_assignment_id", "submitted_at"),
        Index(None, "course_assignment_id", "submitted_at"),
        Index(None, "submitted_at", "id"),  # the latest of many, page by page
        # all that ranking a board of thousands reads, so that rows with whole files stay where they are
        Index("ix_submission_ranking", "course_assignment_id", "user_id", "submitted_at", "id"),
    )

    id: Mapped[int] = mapped_column(primary_key=True)
    user_id: Mapped[int] = mapped_column(ForeignKey("user_account.id"))
    course_assignment_id: Mapped[int] = mapped_column(ForeignKey("course_assignment.id"))
    filename: Mapped[str | None] = mapped_column(String(200))  # as the browser gave it; hostile text
    source: Mapped[str] = mapped_column(Text, deferred=True)  # hostile text, with its line ends as they were
    source_sha256: Mapped[str] = mapped_column(String(64))
    source_bytes: Mapped[int]
    assignment_digest: Mapped[str] = mapped_column(String(64))  # the folder as it was at hand-in
    idempotency_key: Mapped[str] = mapped_column(String(64))
    device: Mapped[str] = mapped_column(String(16), default="cpu")  # which kind of worker takes it
    submitted_at: Mapped[datetime]
    queued_at: Mapped[datetime]  # when it last entered the queue

    state: Mapped[State] = mapped_column(default=State.QUEUED)
    attempt: Mapped[int] = mapped_column(default=0)  # goes up by one with every claim, never down: the fence
    lost_attempts: Mapped[int] = mapped_column(default=0)  # since it last entered the queue by a person's act
    lease_until: Mapped[datetime | None]  # while RUNNING; later, anyone may claim
    worker: Mapped[str | None] = mapped_column(String(120))
    started_at: Mapped[datetime | None]  # of the latest attempt
    finished_at: Mapped[datetime | None]
    stages: Mapped[str | None] = mapped_column(
        String(240)
    )  # of the examination, and how far: "numerics=40% memory=20%"
    fault_note: Mapped[str | None] = mapped_column(Text)  # why the last attempt was lost; for staff

    user: Mapped[User] = relationship()
    course_assignment: Mapped[CourseAssignment] = relationship()
    result: Mapped[Result | None] = relationship(back_populates="submission")


class Result(Base):
    """What was measured (a fact, written once an attempt) and what it earns (an opinion, replaced by a re-judge)."""

    __tablename__ = "result"
    __table_args__ = (
        Index(None, "verdict"),
        Index(None, "gpu", "submission_id"),
        Index(
            "ix_result_ranking",
            *("submission_id", "verdict", "points", "speedup", "speedup_low", "speedup_high", "limit_share", "gpu"),
        ),
    )

    submission_id: Mapped[int] = mapped_column(ForeignKey("submission.id"), primary_key=True)
    attempt: Mapped[int]  # whose measurements these are
    examination: Mapped[str] = mapped_column(Text, deferred=True)  # JSON of grader.measurement.Examination
    measured_at: Mapped[datetime]
    grade: Mapped[str] = mapped_column(Text, deferred=True)  # JSON object of `tilegrade grade --json`
    verdict: Mapped[str] = mapped_column(String(16))
    points: Mapped[float]
    out_of: Mapped[float]
    withheld: Mapped[float]
    fault: Mapped[str | None] = mapped_column(String(64))
    speedup: Mapped[float | None]  # over naive, at the headline size; None: not measured
    speedup_low: Mapped[float | None]  # 95 % interval
    speedup_high: Mapped[float | None]
    gpu: Mapped[str | None] = mapped_column(String(120))  # what it was measured on; None: the interpreter
    limit_share: Mapped[float | None]  # of what that GPU could do at best, at the headline size; 1.0 is the limit
    provisional: Mapped[bool]  # the device could not measure everything
    released: Mapped[bool] = mapped_column(default=False)  # staff looked at a `held` grade and published it,
    confirmed: Mapped[bool] = mapped_column(default=False, server_default=false())  # or decided that it does not count
    decision_reason: Mapped[str | None] = mapped_column(Text)  # why; the student reads it
    released_verdict: Mapped[str] = mapped_column(String(16))  # what `verdict` is, or becomes by releasing it
    judged_at: Mapped[datetime]
    assignment_digest: Mapped[str] = mapped_column(String(64))  # the folder it was judged by

    submission: Mapped[Submission] = relationship(back_populates="result")


class Board(Base):
    """A leaderboard as it was at one moment, kept and shown as official. Only `withdrawn_at` is ever changed."""

    __tablename__ = "board"
    __table_args__ = (UniqueConstraint("course_assignment_id", "idempotency_key"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    course_assignment_id: Mapped[int] = mapped_column(ForeignKey("course_assignment.id"))
    title: Mapped[str] = mapped_column(String(100))
    gpu: Mapped[str | None] = mapped_column(String(120))  # the board of one GPU alone; None: of everything
    until: Mapped[datetime | None]  # later hand-ins were left out
    frozen_at: Mapped[datetime]
    frozen_by: Mapped[int | None] = mapped_column(ForeignKey("user_account.id"))  # None: a command
    withdrawn_at: Mapped[datetime | None]  # no longer shown
    idempotency_key: Mapped[str] = mapped_column(String(64))


class BoardEntry(Base):
    """One line of a frozen board: what stood there then. Names are not kept: boards show what the student chooses."""

    __tablename__ = "board_entry"
    __table_args__ = (UniqueConstraint("board_id", "place"),)

    id: Mapped[int] = mapped_column(primary_key=True)
    board_id: Mapped[int] = mapped_column(ForeignKey("board.id"))
    place: Mapped[int]  # from 1, the order of the lines
    rank: Mapped[int]
    shared: Mapped[bool]
    user_id: Mapped[int] = mapped_column(ForeignKey("user_account.id"), index=True)
    submission_id: Mapped[int] = mapped_column(ForeignKey("submission.id"), index=True)
    submitted_at: Mapped[datetime]
    days_late: Mapped[int]
    verdict: Mapped[str] = mapped_column(String(16))
    points: Mapped[float]  # after what being late took off
    out_of: Mapped[float]
    provisional: Mapped[bool]
    speedup: Mapped[float | None]
    gpu: Mapped[str | None] = mapped_column(String(120))
    limit_share: Mapped[float | None]


class Worker(Base):
    """A worker process as it last reported. One that has not been seen for a while is gone."""

    __tablename__ = "worker"

    name: Mapped[str] = mapped_column(String(120), primary_key=True)
    device: Mapped[str] = mapped_column(String(16))
    status: Mapped[WorkerStatus]
    started_at: Mapped[datetime]
    seen_at: Mapped[datetime]
    submission_id: Mapped[int | None] = mapped_column(ForeignKey("submission.id"))
    note: Mapped[str | None] = mapped_column(Text)  # e.g. how the sandbox is reduced


class AuditEvent(Base):
    """Who did what to whom, and when. Written, never changed."""

    __tablename__ = "audit_event"
    __table_args__ = (Index(None, "submission_id", "at"), Index(None, "at"))

    id: Mapped[int] = mapped_column(primary_key=True)
    at: Mapped[datetime]
    actor_id: Mapped[int | None] = mapped_column(ForeignKey("user_account.id"))  # None: a command or the service
    action: Mapped[str] = mapped_column(String(40))
    submission_id: Mapped[int | None] = mapped_column(ForeignKey("submission.id"))
    detail: Mapped[str] = mapped_column(Text, default="")
