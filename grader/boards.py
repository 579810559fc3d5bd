"""The leaderboard of an assignment and the gradebook of a course."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import and_, select
from sqlalchemy.orm import Session

from grader import standings
from grader.models import Course, CourseAssignment, Enrollment, Result, Role, State, Submission, User
from grader.statistics import Interval

_COLUMNS = (
    "user_id",
    "user_name",
    "nickname",
    "submission_id",
    "submitted_at",
    "verdict",
    "points",
    "out_of",
    "withheld",
    "provisional",
    "speedup",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """One student's best submission for one assignment."""

    user_id: int
    user_name: str  # staff only
    nickname: str
    submission_id: int
    submitted_at: datetime
    verdict: str
    points: float
    out_of: float
    withheld: float
    provisional: bool
    speedup: float | None
    rank: int  # 1, 1, 3
    shared: bool  # nothing measured tells it from another of this rank
    hand_ins: int  # graded ones


def best_of_each(session: Session, course_assignment_id: int, *, include_held: bool = False) -> list[Best]:
    """Every student's best graded submission, the best first. A later, worse one never replaces it.

    Ordered and ranked by grader.standings. Instructors are not ranked. What is `held` is left out until staff release
    it, unless `include_held` (for a gradebook).
    """
    rows = session.execute(
        select(
            User.id.label("user_id"),
            User.name.label("user_name"),
            Enrollment.nickname,
            Submission.id.label("submission_id"),
            Submission.submitted_at,
            Result.verdict,
            Result.points,
            Result.out_of,
            Result.withheld,
            Result.provisional,
            Result.speedup,
            Result.speedup_low,
            Result.speedup_high,
        )
        .select_from(Submission)
        .join(Result)
        .join(CourseAssignment, CourseAssignment.id == Submission.course_assignment_id)
        .join(User, User.id == Submission.user_id)
        .join(
            Enrollment,
            and_(Enrollment.user_id == Submission.user_id, Enrollment.course_id == CourseAssignment.course_id),
        )
        .where(
            Submission.course_assignment_id == course_assignment_id,
            Submission.state == State.DONE,
            Enrollment.role == Role.STUDENT,
            *(() if include_held else (Result.verdict != "held",)),
        )
    ).all()
    graded: dict[int, Any] = {row.submission_id: row for row in rows}
    return [
        Best(
            **{name: getattr(graded[one.entry.submission], name) for name in _COLUMNS},
            rank=one.rank,
            shared=one.shared,
            hand_ins=one.hand_ins,
        )
        for one in standings.rank(_entry(row) for row in graded.values())
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class GradebookRow:
    """One student and one assignment, as exported to a spreadsheet."""

    user_name: str
    assignment: str
    submission_id: int | None  # None: handed in nothing that was graded
    submitted_at: datetime | None
    verdict: str
    points: float
    out_of: float
    provisional: bool
    held: bool


def gradebook(session: Session, course_id: int) -> list[GradebookRow]:
    """Every student with every assignment of the course, by name and then in the course's order."""
    students = session.execute(
        select(User.id, User.name)
        .join(Enrollment, Enrollment.user_id == User.id)
        .where(Enrollment.course_id == course_id, Enrollment.role == Role.STUDENT)
        .order_by(User.name)
    ).all()
    entries = session.execute(
        select(CourseAssignment.id, CourseAssignment.slug)
        .join(Course)
        .where(Course.id == course_id)
        .order_by(CourseAssignment.position, CourseAssignment.id)
    ).all()
    best = {
        (one.user_id, entry.id): one for entry in entries for one in best_of_each(session, entry.id, include_held=True)
    }
    return [
        _gradebook_row(student.name, entry.slug, best.get((student.id, entry.id)))
        for student in students
        for entry in entries
    ]


def _gradebook_row(user_name: str, slug: str, best: Best | None) -> GradebookRow:
    if best is None:
        return GradebookRow(
            user_name=user_name,
            assignment=slug,
            submission_id=None,
            submitted_at=None,
            verdict="",
            points=0.0,
            out_of=0.0,
            provisional=False,
            held=False,
        )
    return GradebookRow(
        user_name=user_name,
        assignment=slug,
        submission_id=best.submission_id,
        submitted_at=best.submitted_at,
        verdict=best.verdict,
        points=best.points,
        out_of=best.out_of,
        provisional=best.provisional,
        held=best.verdict == "held",
    )


def _entry(row: Any) -> standings.Entry:
    measured = None not in (row.speedup, row.speedup_low, row.speedup_high)
    return standings.Entry(
        who=str(row.user_id),
        submission=row.submission_id,
        points=row.points,
        submitted_at=row.submitted_at,
        speedup=Interval(value=row.speedup, low=row.speedup_low, high=row.speedup_high) if measured else None,
        provisional=row.provisional,
    )
