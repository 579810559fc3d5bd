"""The leaderboard of an assignment and the gradebook of a course."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import and_, select
from sqlalchemy.orm import Session

from grader.models import Course, CourseAssignment, Enrollment, Result, Role, State, Submission, User


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


def best_of_each(session: Session, course_assignment_id: int, *, include_held: bool = False) -> list[Best]:
    """Every student's best graded submission, the best first. A later, worse one never replaces it.

    Best is most points; then the faster, then the earlier. Instructors are not ranked. What is `held` is left out
    until staff release it, unless `include_held` (for a gradebook).
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
    found: dict[int, Best] = {}
    for best in sorted((Best(**row._mapping) for row in rows), key=_best_first):
        found.setdefault(best.user_id, best)
    return list(found.values())


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


def _best_first(best: Best) -> tuple[float, float, datetime, int]:
    return (-best.points, -(best.speedup or 0.0), best.submitted_at, best.submission_id)
