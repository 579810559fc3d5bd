"""A small school: one course, one assignment, a few people, and facts that an examination might find."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from grader import accounts, course, submissions
from grader.assignment import Assignment, load_assignment
from grader.db import Database
from grader.measurement import (
    Device,
    Evidence,
    Examination,
    Failure,
    FailureKind,
    Isolation,
    OutputRun,
    ProbeMeasured,
)
from grader.models import CourseAssignment, Role, User
from grader.settings import Settings
from grader.submissions import Accepted, Job

NOW = datetime(2027, 2, 1, 12, 0, tzinfo=UTC)
LEASE = timedelta(seconds=30)
SOURCE = b"def double(x):\n    return 2 * x\n"
SLUG = "doubling"

ASSIGNMENT_TOML = """
title = "Doubling"
summary = "Twice the input."
operation = "softmax.online"
entry = "double"
signature = "double(x) -> y"
deadline = 2027-03-01T23:59:00Z

[outputs]
y = {}

[points]
numerics = 80
structure = 20

[tolerance]
slack = 2.0
floor = { float32 = 2e-5, float16 = 1e-3, bfloat16 = 8e-3 }

[structure]
axes = { rows = 4, cols = 8 }
max_launches = 1
max_bytes_ratio = 1.6

[[cases]]
name = "random"
tries = "normal values"
axes = { rows = 4, cols = 8 }
points = 5
required = true

[[cases]]
name = "large"
tries = "large values"
axes = { rows = 4, cols = 8 }
points = 5
"""


@pytest.fixture(scope="session")
def assignments_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("assignments")
    folder = root / SLUG
    folder.mkdir()
    (folder / "assignment.toml").write_text(ASSIGNMENT_TOML)
    (folder / "handout.md").write_text("# Doubling\n\nDouble every element.\n")
    (folder / "starter.py").write_text("def double(x):\n    raise NotImplementedError\n")
    return root


@pytest.fixture(scope="session")
def assignment(assignments_dir: Path) -> Assignment:
    return load_assignment(assignments_dir / SLUG)


@pytest.fixture
def settings(tmp_path: Path, assignments_dir: Path) -> Settings:
    return Settings.from_env(
        {
            "TILEGRADE_DATA": str(tmp_path / "data"),
            "TILEGRADE_ASSIGNMENTS": str(assignments_dir),
            "TILEGRADE_BROKER_URL": "redis+socket:///nowhere.sock",
            "TILEGRADE_LOGIN_FAILURES": "2",
            "TILEGRADE_LOGIN_FAILURES_PER_ADDRESS": "10",
            # high enough that only the tests about them meet them
            "TILEGRADE_HAND_INS_PER_MINUTE": "1000",
            "TILEGRADE_HAND_INS_PER_HOUR": "1000",
            "TILEGRADE_MAX_WAITING_PER_STUDENT": "1000",
        }
    )


@dataclass
class School:
    """A course with one assignment; people are added by name."""

    database: Database
    assignment: Assignment
    settings: Settings
    entry: CourseAssignment
    people: dict[str, User] = field(default_factory=dict)

    def user(self, name: str, role: Role | None = Role.STUDENT) -> User:
        """That person, created and enrolled on first mention."""
        if name not in self.people:
            with self.database.write() as session:
                # hashing a password takes long and matters to no test that uses this
                user = User(name=name, password_hash="-", created_at=NOW)
                session.add(user)
                session.flush()
                if role is not None:
                    course.enrol(session, course_id=self.entry.course_id, user_id=user.id, role=role, now=NOW)
            self.people[name] = user
        return self.people[name]

    def hand_in(
        self, name: str = "ada", data: bytes = SOURCE, *, now: datetime = NOW, key: str | None = None
    ) -> Accepted:
        user = self.user(name)
        with self.database.write() as session:
            return submissions.hand_in(
                session,
                user=user,
                entry=self.entry,
                assignment=self.assignment,
                data=data,
                settings=self.settings,
                now=now,
                idempotency_key=key,
            )

    def claim(self, *, worker: str = "w1", now: datetime = NOW) -> Job | None:
        with self.database.write() as session:
            return submissions.claim_next(session, worker=worker, device="cpu", now=now, lease=LEASE)

    def record(self, job: Job, examination: Examination, *, now: datetime = NOW) -> bool:
        with self.database.write() as session:
            return submissions.record(session, job, examination, self.assignment, now=now)

    def graded(self, name: str, examination: Examination, *, now: datetime = NOW) -> int:
        """Hand in as that student, grade it, and return the submission's id."""
        handed_in = self.hand_in(name, now=now)
        job = self.claim(now=now)
        assert job is not None
        assert job.submission_id == handed_in.submission_id
        assert self.record(job, examination, now=now)
        return job.submission_id


@pytest.fixture
def school(database: Database, assignment: Assignment, settings: Settings) -> School:
    with database.write() as session:
        made = course.create_course(session, slug="gpu", title="GPU programming", now=NOW)
        entry = course.set_assignment(session, course_id=made.id, slug=SLUG, now=NOW)
    return School(database=database, assignment=assignment, settings=settings, entry=entry)


Facts = Callable[..., Examination]


@pytest.fixture
def facts(assignment: Assignment) -> Facts:
    """Makes examinations of which so many of the two probes passed."""

    def make(*, passed: int = 2, on: str = "interpreter", suspicious: bool = False) -> Examination:
        names = [case.name for case in assignment.cases]
        return Examination(
            assignment=assignment.slug,
            assignment_digest=assignment.digest,
            source_sha256="0" * 64,
            device=Device(kind=on, name="test"),
            isolation=Isolation(level="full"),
            versions={"triton": "3.6.0"},
            seed=1,
            entry="double",
            probes=tuple(_probe(name, right=i < passed) for i, name in enumerate(names)),
            evidence=(Evidence(kind="clock", message="the clock went back"),) if suspicious else (),
        )

    return make


@pytest.fixture
def broken_file(facts: Facts) -> Examination:
    """An examination of a file that does not parse; what it says is hostile."""
    failure = Failure(kind=FailureKind.SYNTAX_ERROR, message="line 1 \x00\x1b[31m<b>\ud7ff")
    return dataclasses.replace(facts(), probes=(), load_failure=failure)


def _probe(name: str, *, right: bool) -> ProbeMeasured:
    output = OutputRun(
        name="y",
        shape=(4, 8),
        want_shape=(4, 8),
        dtype="float32",
        want_dtype="float32",
        rel_error=1e-7 if right else 0.5,
        baseline_rel_error=1e-7,
        n_elements=32,
        n_not_finite=0,
        n_wrong=0 if right else 32,
        limit=2e-5,
    )
    return ProbeMeasured(name=name, outputs=(output,), largest_score=1.0)


@pytest.fixture
def staff(database: Database) -> User:
    with database.write() as session:
        return accounts.create_user(session, name="root", password="a long password", now=NOW, is_staff=True)
