"""What pages list: read-only queries with a bounded number of statements, whatever the number of rows."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import case, func, select
from sqlalchemy.orm import Session, contains_eager, joinedload, undefer

from grader import boards
from grader import submissions as submission_rows
from grader.assignment import Assignment
from grader.course import Catalog, courses_of, window_until
from grader.deadlines import Phase, Window
from grader.errors import AssignmentError
from grader.models import Course, CourseAssignment, Enrollment, Extension, Result, Role, State, Submission, User
from grader.verdicts import Verdict
from grader.web.security import Viewer

PER_PAGE = 25
HOME_DUE, HOME_REPORTS = 5, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Some rows of many."""

    rows: Sequence[Any]
    number: int  # from 1
    n_pages: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignmentTile:
    """One assignment on the home page, as one person sees it."""

    entry: CourseAssignment
    assignment: Assignment | None  # None: its folder is wrong
    trouble: str  # for instructors: why it is closed or does not load
    window: Window
    closed: str  # a sentence when nothing can be handed in now, else empty
    opens_at: datetime | None  # when that is all that keeps hand-ins out
    best: Result | None  # of this person, the one that counts
    counted: float  # points of the best, after late days
    on_its_way: bool
    n_submissions: int  # of this person; for an instructor, of the whole course

    @property
    def title(self) -> str:
        return self.assignment.title if self.assignment else self.entry.slug


@dataclass(frozen=True, slots=True, kw_only=True)
class CourseTiles:
    course: Course
    teaches: bool
    n_held: int  # grades that wait for a decision; 0 for who does not teach it
    tiles: tuple[AssignmentTile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    courses: tuple[CourseTiles, ...]
    due: tuple[tuple[Course, AssignmentTile], ...]  # what one may still hand in and has a deadline, the next first
    reports: tuple[tuple[Submission, str, str], ...]  # one's own latest graded ones: title, and what a late one counts


def home(db: Session, viewer: Viewer, catalog: Catalog, *, now: datetime) -> Home:
    """Every course of `viewer` with its assignments, what is due, and the latest reports. Seven statements at most."""
    user = db.get_one(User, viewer.id)
    courses = courses_of(db, user)
    entries = db.scalars(
        select(CourseAssignment)
        .where(CourseAssignment.course_id.in_([course.id for course in courses]))
        .order_by(CourseAssignment.position, CourseAssignment.id)
    ).all()
    ids = [entry.id for entry in entries]
    extensions = {
        row.course_assignment_id: row.until
        for row in db.execute(
            select(Extension.course_assignment_id, Extension.until).where(
                Extension.user_id == viewer.id, Extension.course_assignment_id.in_(ids)
            )
        )
    }
    mine = db.scalars(
        select(Submission)
        .where(Submission.user_id == viewer.id, Submission.course_assignment_id.in_(ids))
        .options(joinedload(Submission.result))
    ).all()
    counts: dict[int, int] = {}
    if viewer.teaches:
        counted = (
            select(Submission.course_assignment_id, func.count(Submission.id).label("n"))
            .where(Submission.course_assignment_id.in_(ids))
            .group_by(Submission.course_assignment_id)
        )
        counts = {row.course_assignment_id: row.n for row in db.execute(counted)}
    held = held_in(db, [course.id for course in courses if viewer.teaches_in(course.id)])

    def tile(entry: CourseAssignment, teaches: bool) -> AssignmentTile:
        own = [row for row in mine if row.course_assignment_id == entry.id]
        assignment, trouble = None, ""
        try:
            assignment = catalog.load(entry.slug)
        except AssignmentError as exc:
            trouble = str(exc)
        window = window_until(entry, assignment, extensions.get(entry.id))
        closed = "Closed at the moment." if trouble or entry.closed_reason else ""
        best = boards.counted(own, window)
        return AssignmentTile(
            entry=entry,
            assignment=assignment,
            trouble=trouble or entry.closed_reason or "",
            window=window,
            closed=closed or window.why_closed(now) or "",
            opens_at=window.opens_at if not closed and window.at(now).phase is Phase.BEFORE else None,
            best=best.result if best else None,
            counted=window.at(best.submitted_at).counted(best.result.points) if best and best.result else 0.0,
            on_its_way=any(row.state in (State.QUEUED, State.RUNNING) for row in own),
            n_submissions=counts.get(entry.id, 0) if teaches else len(own),
        )

    found = tuple(
        CourseTiles(
            course=course,
            teaches=viewer.teaches_in(course.id),
            n_held=held.get(course.id, 0),
            tiles=tuple(tile(entry, viewer.teaches_in(course.id)) for entry in entries if entry.course_id == course.id),
        )
        for course in courses
    )
    tiles = {tile.entry.id: tile for group in found for tile in group.tiles}
    graded = sorted((row for row in mine if row.result is not None), key=lambda row: -row.id)[:HOME_REPORTS]
    return Home(
        courses=found,
        due=_due(found),
        reports=tuple(
            (row, tiles[row.course_assignment_id].title, late_text(row, tiles[row.course_assignment_id].window))
            for row in graded
        ),
    )


def late_text(row: Submission, window: Window) -> str:
    """What the points of a late hand-in count, in words; empty for one in time, at no cost, or without a grade."""
    if row.result is None or row.result.verdict == "held":
        return ""
    return window.at(row.submitted_at).counted_text(row.result.points)


def late_texts(db: Session, rows: Sequence[Submission], catalog: Catalog) -> dict[int, str]:
    """`late_text` of submissions of any students, by id; in time ones are left out. One statement, or none."""
    priced = [row for row in rows if row.course_assignment.late_percent]
    if not priced:
        return {}
    query = select(Extension).where(
        Extension.course_assignment_id.in_({row.course_assignment_id for row in priced}),
        Extension.user_id.in_({row.user_id for row in priced}),
    )
    until = {(one.course_assignment_id, one.user_id): one.until for one in db.scalars(query)}
    found = {}
    for row in priced:
        entry = row.course_assignment
        own = until.get((entry.id, row.user_id))
        found[row.id] = late_text(row, window_until(entry, catalog.find(entry.slug), own))
    return {number: text for number, text in found.items() if text}


def _due(courses: Sequence[CourseTiles]) -> tuple[tuple[Course, AssignmentTile], ...]:
    open_ones = [
        (group.course, tile)
        for group in courses
        if not group.teaches
        for tile in group.tiles
        if not tile.closed and tile.window.deadline and not (tile.best and tile.best.verdict == "full")
    ]
    return tuple(sorted(open_ones, key=lambda one: (one[1].window.closes_at, one[1].entry.id))[:HOME_DUE])


def held_in(db: Session, course_ids: Sequence[int]) -> dict[int, int]:
    """How many grades of each course wait for a decision; courses without one are left out. One statement at most."""
    if not course_ids:
        return {}
    found = (
        select(CourseAssignment.course_id, func.count(Result.submission_id).label("n"))
        .join(Submission, Submission.course_assignment_id == CourseAssignment.id)
        .join(Result, Result.submission_id == Submission.id)
        .where(Result.verdict == Verdict.HELD, CourseAssignment.course_id.in_(course_ids))
        .group_by(CourseAssignment.course_id)
    )
    return {row.course_id: row.n for row in db.execute(found)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Turnout:
    """How many students of a course there are, and how many handed in, by assignment."""

    n_students: int
    handed_in: dict[int, int]


def turnout(db: Session, *, course_id: int) -> Turnout:
    """Two statements."""
    students = select(Enrollment.user_id).where(Enrollment.course_id == course_id, Enrollment.role == Role.STUDENT)
    entries = select(CourseAssignment.id).where(CourseAssignment.course_id == course_id)
    found = (
        select(Submission.course_assignment_id, func.count(Submission.user_id.distinct()).label("n"))
        .where(Submission.course_assignment_id.in_(entries), Submission.user_id.in_(students))
        .group_by(Submission.course_assignment_id)
    )
    n_students = db.scalar(select(func.count()).select_from(students.subquery())) or 0
    return Turnout(n_students=n_students, handed_in={row.course_assignment_id: row.n for row in db.execute(found)})


def own_submissions(db: Session, *, entry_id: int, user_id: int) -> list[Submission]:
    """Everything that one student handed in for one assignment, the latest first, with results. One statement."""
    return list(
        db.scalars(
            select(Submission)
            .where(Submission.course_assignment_id == entry_id, Submission.user_id == user_id)
            .options(joinedload(Submission.result))
            .order_by(Submission.submitted_at.desc(), Submission.id.desc())
        )
    )


def submissions(db: Session, *, course_id: int, page: int, slug: str = "", student: str = "", what: str = "") -> Page:
    """Submissions of a course, the latest first, with student, assignment and result. Two statements.

    Args:
        slug: of an assignment.
        student: part of a name.
        what: a state or a verdict; anything else finds nothing. What is measured again has both.
    """
    entries = select(CourseAssignment.id).where(CourseAssignment.course_id == course_id)
    if slug:
        entries = entries.where(CourseAssignment.slug == slug)
    wanted = select(Submission.id).where(Submission.course_assignment_id.in_(entries))
    if student:
        wanted = wanted.join(Submission.user).where(User.name.contains(student.strip().lower(), autoescape=True))
    if what in set(State) - {State.DONE}:
        wanted = wanted.where(Submission.state == State(what))
    elif what:
        wanted = wanted.join(Submission.result).where(Result.verdict == what)
    total = db.scalar(select(func.count()).select_from(wanted.subquery())) or 0
    n_pages = max(1, -(-total // PER_PAGE))
    number = min(max(1, page), n_pages)
    latest_first = (Submission.submitted_at.desc(), Submission.id.desc())
    # only the rows of this page are read whole: a source and its neighbours fill a disk page
    shown = wanted.order_by(*latest_first).limit(PER_PAGE).offset((number - 1) * PER_PAGE)
    rows = db.scalars(
        select(Submission)
        .where(Submission.id.in_(shown))
        .options(joinedload(Submission.user), joinedload(Submission.course_assignment), joinedload(Submission.result))
        .order_by(*latest_first)
    ).all()
    return Page(rows=rows, number=number, n_pages=n_pages, total=total)


def members(db: Session, *, course_id: int, page: int, extended: bool = False) -> Page:
    """Everybody in a course, those who teach first, then by name, each with their extensions. Three statements.

    Args:
        extended: only who has an extension.
    """
    given = select(Extension).join(Extension.course_assignment).where(CourseAssignment.course_id == course_id)
    wanted = select(Enrollment).join(Enrollment.user).where(Enrollment.course_id == course_id)
    if extended:
        wanted = wanted.where(Enrollment.user_id.in_(given.with_only_columns(Extension.user_id)))
    total = db.scalar(select(func.count()).select_from(wanted.with_only_columns(Enrollment.id).subquery())) or 0
    n_pages = max(1, -(-total // PER_PAGE))
    number = min(max(1, page), n_pages)
    teachers_first = case((Enrollment.role == Role.INSTRUCTOR, 0), else_=1)
    shown = wanted.options(contains_eager(Enrollment.user)).order_by(teachers_first, User.name)
    people = db.scalars(shown.limit(PER_PAGE).offset((number - 1) * PER_PAGE)).all()
    theirs: dict[int, list[Extension]] = {person.user_id: [] for person in people}
    with_slug = given.options(contains_eager(Extension.course_assignment))
    for one in db.scalars(with_slug.where(Extension.user_id.in_(theirs)).order_by(Extension.until)):
        theirs[one.user_id].append(one)
    return Page(
        rows=[(person, theirs[person.user_id]) for person in people], number=number, n_pages=n_pages, total=total
    )


def queue(db: Session, *, page: int, course_ids: Set[int] | None) -> Page:
    """What runs, waits or is stuck in these courses; None: in all. Two statements."""
    total = submission_rows.count_waiting(db, course_ids=course_ids)
    n_pages = max(1, -(-total // PER_PAGE))
    number = min(max(1, page), n_pages)
    rows = submission_rows.waiting(db, course_ids=course_ids, limit=PER_PAGE, offset=(number - 1) * PER_PAGE)
    return Page(rows=rows, number=number, n_pages=n_pages, total=total)


def submission(db: Session, submission_id: int, *, with_source: bool = False) -> Submission | None:
    """One submission with its assignment and result, without report: for looking at it twice a second."""
    wanted = [joinedload(Submission.course_assignment), joinedload(Submission.result)]
    if with_source:
        of_course = joinedload(Submission.course_assignment).joinedload(CourseAssignment.course)
        wanted += [undefer(Submission.source), joinedload(Submission.user), of_course]
    return db.scalars(select(Submission).where(Submission.id == submission_id).options(*wanted)).one_or_none()


def cut(rows: Sequence[Any], *, page: int, per_page: int = PER_PAGE) -> Page:
    """One page of rows that are in memory already."""
    n_pages = max(1, -(-len(rows) // per_page))
    number = min(max(1, page), n_pages)
    start = (number - 1) * per_page
    return Page(rows=rows[start : start + per_page], number=number, n_pages=n_pages, total=len(rows))


def title_of(catalog: Catalog, slug: str) -> str:
    """The assignment's title; its slug where the folder does not load."""
    found = catalog.find(slug)
    return found.title if found else slug
