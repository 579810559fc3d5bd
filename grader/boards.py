"""The leaderboard of an assignment, its frozen editions, and the gradebook of a course."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Executable, case, func, literal, select
from sqlalchemy.orm import Session

from grader import accounts, course, standings
from grader.assignment import Assignment
from grader.course import ANONYMOUS, Catalog, WindowOf, shown_name
from grader.deadlines import Window
from grader.errors import UserError
from grader.models import (
    Board,
    BoardEntry,
    CourseAssignment,
    Enrollment,
    Result,
    Role,
    Submission,
    User,
)
from grader.statistics import Interval
from grader.wording import csv_table, one_line

MAX_TITLE_CHARACTERS = 100  # of a frozen board
# what two kinds of rows have in common: a live one, and a line of a frozen board
_SHARED = (
    *("user_id", "submission_id", "submitted_at", "verdict", "out_of", "provisional", "speedup", "gpu"),
    "limit_share",
)
_OF_SUBMISSION = {"user_id", "submitted_at"}  # of those, the columns of a live row that are not the result's
_AT_ONCE = 1000  # rows asked for by number in one statement; databases take some ten thousand
_KEPT = (*_SHARED, "points", "days_late", "rank", "shared")


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """One student's best submission for one assignment."""

    user_id: int
    user_name: str  # staff only
    name: str  # what boards show: the nickname, or that it is nobody's business
    submission_id: int
    submitted_at: datetime
    days_late: int
    verdict: str
    points: float  # after what being late took off
    out_of: float
    provisional: bool
    speedup: float | None
    gpu: str | None  # None: the interpreter
    limit_share: float | None
    rank: int  # 1, 1, 3
    shared: bool  # nothing measured tells it from another of this rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineup:
    """Who stands on a board, the best first. Lines are read when they are shown: a page has fifty of thousands."""

    total: int
    timed: bool  # the speed of any of them was measured
    limited: bool  # and how near it is to the GPU's limit
    lines: Callable[
        [int, int], list[Best]
    ]  # from this place, counted from 0, to before that; while its session is open

    def all_lines(self) -> list[Best]:
        return self.lines(0, self.total)


def live(
    session: Session,
    entry: CourseAssignment,
    assignment: Assignment | None,
    *,
    include_held: bool = False,
    gpu: str | None = None,
    until: datetime | None = None,
) -> Lineup:
    """Every student with their best graded submission. A later, worse one never replaces it.

    Ordered and ranked by grader.standings, by what is left after late days. Instructors are not ranked. What is
    measured again stands with the grade that it has, until the new one is there.

    Args:
        assignment: None where its folder does not load; a deadline that only the folder has is then not known.
        include_held: also what is `held`, for a gradebook; boards wait until staff release it.
        gpu: only what was measured on this one.
        until: only what was handed in by then.
    """
    graded = [Submission.course_assignment_id == entry.id]
    if not include_held:
        graded.append(Result.verdict != "held")
    if gpu is not None:
        graded.append(Result.gpu == gpu)
    if until is not None:
        graded.append(Submission.submitted_at <= until)
    window_of = course.windows_of(session, entry=entry, assignment=assignment)
    common = course.window_until(entry, assignment, None).deadline
    candidates = session.execute(_candidates(entry, graded, common)).all()
    ranked = standings.rank(
        _entry(row.user_id, row.id, row.submitted_at, row, window_of(row.user_id)) for row in candidates
    )
    limited = {row.id for row in candidates if row.limit_share is not None}
    return Lineup(
        total=len(ranked),
        timed=any(one.entry.speedup is not None for one in ranked),
        limited=any(one.entry.submission in limited for one in ranked),
        lines=lambda start, stop: _live_lines(session, entry, window_of, ranked[start:stop]),
    )


def best_of_each(session: Session, entry: CourseAssignment, assignment: Assignment | None, **which: Any) -> list[Best]:
    """Every line of the live board. Arguments as for `live`."""
    return live(session, entry, assignment, **which).all_lines()


def _candidates(
    entry: CourseAssignment, graded: Sequence[ColumnElement[bool]], deadline: datetime | None
) -> Executable:
    """Of each student's rows the only ones that can be the best: a board of thousands must not be ranked in Python.

    Among those in time by the common deadline the database picks, in the order of grader.standings. Each later one is
    kept, for what being late costs is a rule of grader.deadlines. Only what ranking needs is read of them.
    """
    in_time = literal(True) if deadline is None else Submission.submitted_at <= deadline
    rivals = (Submission.user_id, case((in_time, 0), else_=Submission.id))
    best_first = (
        func.round(Result.points * 100).desc(),
        func.coalesce(Result.speedup, 0.0).desc(),
        Submission.submitted_at,
        Submission.id,
    )
    students = select(Enrollment.user_id).where(
        Enrollment.course_id == entry.course_id, Enrollment.role == Role.STUDENT
    )
    ranked = (
        select(
            Submission.user_id,
            Submission.id,
            Submission.submitted_at,
            Result.points,
            Result.speedup,
            Result.speedup_low,
            Result.speedup_high,
            Result.limit_share,
            func.row_number().over(partition_by=rivals, order_by=best_first).label("nth"),
        )
        .join(Result)
        .where(*graded)
        .subquery()
    )
    # students are picked among the best: within, a planner takes every one of them to have handed in little
    return select(ranked).where(ranked.c.nth == 1, ranked.c.user_id.in_(students))


def counted(rows: Iterable[Submission], window: Window) -> Submission | None:
    """Of one student's submissions the one that counts, by the same rule as on the board. Held ones do not yet."""
    graded = {row.id: row for row in rows if row.result and row.result.verdict != "held"}
    best = standings.best(_entry(row.user_id, row.id, row.submitted_at, row.result, window) for row in graded.values())
    return graded[best.submission] if best else None


def gpus(session: Session, course_assignment_id: int) -> list[str]:
    """The GPUs that anything on this board was measured on."""
    query = (
        select(Result.gpu)
        .join(Submission)
        .where(Submission.course_assignment_id == course_assignment_id, Result.gpu.is_not(None))
        .distinct()
    )
    return sorted(gpu for gpu in session.scalars(query) if gpu)


BOARD_COLUMNS = (
    *("rank", "tied", "name", "points", "out_of", "days_late", "speedup", "share_of_limit", "gpu"),
    *("provisional", "handed_in"),
)


def board_csv(rows: Sequence[Best]) -> str:
    """A board for a spreadsheet, with no other names than the board itself shows."""
    return csv_table(
        BOARD_COLUMNS,
        (
            (
                one.rank,
                one.shared,
                one.name,
                one.points,
                one.out_of,
                one.days_late,
                one.speedup,
                one.limit_share,
                one.gpu,
                one.provisional,
                one.submitted_at,
            )
            for one in rows
        ),
    )


# -- frozen boards ----------------------------------------------------------------------------------------------------


def freeze(
    session: Session,
    entry: CourseAssignment,
    assignment: Assignment,
    *,
    title: str,
    actor_id: int | None,
    now: datetime,
    gpu: str | None = None,
    until: datetime | None = None,
    idempotency_key: str | None = None,
) -> Board:
    """Keep the board as it is now, and show it as official. Nothing that is judged later changes it.

    Args:
        until: leave out what was handed in later.
        idempotency_key: from the form; a second click is the same board.

    Raises:
        UserError: nobody is on the board yet, or it has no title.
    """
    key = idempotency_key or secrets.token_hex(16)
    query = select(Board).where(Board.course_assignment_id == entry.id, Board.idempotency_key == key)
    known = session.scalars(query).one_or_none()
    if known is not None:
        return known
    title = one_line(title, MAX_TITLE_CHARACTERS)
    if not title:
        raise UserError("Give the frozen board a title, e.g. “Week 3”.")
    rows = best_of_each(session, entry, assignment, gpu=gpu, until=until)
    if not rows:
        raise UserError("Nobody is on this board yet, so there is nothing to freeze.")
    board = Board(
        course_assignment_id=entry.id,
        title=title,
        gpu=gpu,
        until=until,
        frozen_at=now,
        frozen_by=actor_id,
        idempotency_key=key,
    )
    session.add(board)
    session.flush()
    for place, one in enumerate(rows, start=1):
        values = {name: getattr(one, name) for name in _KEPT}
        session.add(BoardEntry(board_id=board.id, place=place, **values))
    detail = f"board {board.id}, assignment {entry.id} ({entry.slug}), {len(rows)} entries: {title}"
    accounts.audit(session, actor_id=actor_id, action="freeze-board", detail=detail, now=now)
    session.flush()
    return board


def frozen(session: Session, course_assignment_id: int) -> list[Board]:
    """The official boards of an assignment, the latest first."""
    return list(
        session.scalars(
            select(Board)
            .where(Board.course_assignment_id == course_assignment_id, Board.withdrawn_at.is_(None))
            .order_by(Board.frozen_at.desc(), Board.id.desc())
        )
    )


def frozen_lineup(session: Session, board: Board, entry: CourseAssignment) -> Lineup:
    """A frozen board as it was; only names follow what each student chooses now."""
    counts = select(func.count(), func.count(BoardEntry.speedup), func.count(BoardEntry.limit_share))
    total, timed, limited = session.execute(counts.where(BoardEntry.board_id == board.id)).one()
    return Lineup(
        total=total,
        timed=timed > 0,
        limited=limited > 0,
        lines=lambda start, stop: _frozen_lines(session, board, entry, start, stop),
    )


def frozen_lines(session: Session, board: Board, entry: CourseAssignment) -> list[Best]:
    """Every line of a frozen board."""
    return frozen_lineup(session, board, entry).all_lines()


def withdraw(session: Session, board: Board, *, actor_id: int | None, now: datetime) -> bool:
    """Show a frozen board no longer; False when that was done before. Its lines are kept."""
    if board.withdrawn_at is not None:
        return False
    board.withdrawn_at = now
    detail = f"board {board.id}: {board.title}"
    accounts.audit(session, actor_id=actor_id, action="withdraw-board", detail=detail, now=now)
    return True


# -- the gradebook ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class GradebookRow:
    """One student and one assignment, as exported to a spreadsheet. What is None has nothing in its cell."""

    user_name: str
    assignment: str
    submission_id: int | None = None  # None: handed in nothing that was graded
    submitted_at: datetime | None = None
    verdict: str = ""
    points: float | None = None  # after what being late took off
    out_of: float | None = None
    days_late: int | None = None
    provisional: bool | None = None
    held: bool | None = None


def gradebook(session: Session, course_id: int, catalog: Catalog) -> list[GradebookRow]:
    """Every student with every assignment of the course, by name and then in the course's order."""
    students = session.execute(
        select(User.id, User.name)
        .join(Enrollment, Enrollment.user_id == User.id)
        .where(Enrollment.course_id == course_id, Enrollment.role == Role.STUDENT)
        .order_by(User.name)
    ).all()
    entries = course.assignments_of(session, course_id)
    best = {
        (one.user_id, entry.id): one
        for entry in entries
        for one in best_of_each(session, entry, catalog.find(entry.slug), include_held=True)
    }
    return [
        _gradebook_row(student.name, entry.slug, best.get((student.id, entry.id)))
        for student in students
        for entry in entries
    ]


def gradebook_csv(session: Session, course_id: int, catalog: Catalog) -> str:
    """The gradebook for a spreadsheet."""
    names = [field.name for field in fields(GradebookRow)]
    rows = gradebook(session, course_id, catalog)
    return csv_table(names, [[getattr(row, name) for name in names] for row in rows])


def _gradebook_row(user_name: str, slug: str, best: Best | None) -> GradebookRow:
    if best is None:
        return GradebookRow(user_name=user_name, assignment=slug)
    return GradebookRow(
        user_name=user_name,
        assignment=slug,
        submission_id=best.submission_id,
        submitted_at=best.submitted_at,
        verdict=best.verdict,
        points=best.points,
        out_of=best.out_of,
        days_late=best.days_late,
        provisional=best.provisional,
        held=best.verdict == "held",
    )


# -- helpers ----------------------------------------------------------------------------------------------------------


def _live_lines(
    session: Session, entry: CourseAssignment, window_of: WindowOf, ranked: Sequence[standings.Standing]
) -> list[Best]:
    found = []
    for start in range(0, len(ranked), _AT_ONCE):
        part = ranked[start : start + _AT_ONCE]
        query = (
            select(*(getattr(Submission if name in _OF_SUBMISSION else Result, name) for name in _SHARED))
            .join(Result)
            .where(Submission.id.in_([one.entry.submission for one in part]))
        )
        rows = {row.submission_id: row for row in session.execute(query)}
        people = _people(session, entry, [row.user_id for row in rows.values()])
        found += [_best(rows[one.entry.submission], one, people, window_of) for one in part]
    return found


def _frozen_lines(session: Session, board: Board, entry: CourseAssignment, start: int, stop: int) -> list[Best]:
    query = (
        select(BoardEntry)
        .where(BoardEntry.board_id == board.id, BoardEntry.place > start, BoardEntry.place <= stop)
        .order_by(BoardEntry.place)
    )
    lines = session.scalars(query).all()
    found = []
    for at in range(0, len(lines), _AT_ONCE):
        part = lines[at : at + _AT_ONCE]
        people = _people(session, entry, [line.user_id for line in part])
        for line in part:
            user_name, name = people.get(line.user_id, ("", ANONYMOUS))  # somebody who left the course
            values = {column: getattr(line, column) for column in _KEPT}
            found.append(Best(user_name=user_name, name=name, **values))
    return found


def _people(session: Session, entry: CourseAssignment, user_ids: Sequence[int]) -> dict[int, tuple[str, str]]:
    """Name and shown name of those among them who are in the course, by user id."""
    query = (
        select(Enrollment.user_id, User.name, Enrollment.nickname, Enrollment.anonymous)
        .join(User, User.id == Enrollment.user_id)
        .where(Enrollment.course_id == entry.course_id, Enrollment.user_id.in_(user_ids))
    )
    return {row.user_id: (row.name, shown_name(row.nickname, row.anonymous)) for row in session.execute(query)}


def _best(row: Any, standing: standings.Standing, people: dict[int, tuple[str, str]], window_of: WindowOf) -> Best:
    user_name, name = people[row.user_id]
    return Best(
        **{column: getattr(row, column) for column in _SHARED},
        user_name=user_name,
        name=name,
        days_late=window_of(row.user_id).at(row.submitted_at).days_late,
        points=standing.entry.points,
        rank=standing.rank,
        shared=standing.shared,
    )


def _entry(user_id: int, submission_id: int, submitted_at: datetime, result: Any, window: Window) -> standings.Entry:
    value, low, high = result.speedup, result.speedup_low, result.speedup_high
    return standings.Entry(
        who=str(user_id),
        submission=submission_id,
        points=window.at(submitted_at).counted(result.points),
        submitted_at=submitted_at,
        speedup=None if value is None or low is None or high is None else Interval(value=value, low=low, high=high),
    )
