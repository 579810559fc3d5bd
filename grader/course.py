"""Courses: who is in them, which assignments they set, and until when."""

from __future__ import annotations

import enum
import secrets
import unicodedata
from collections.abc import Callable, Set
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session, joinedload

from grader import accounts, devices
from grader.assignment import SLUG, Assignment, load_assignment
from grader.deadlines import Window
from grader.errors import AssignmentError, UserError
from grader.models import Course, CourseAssignment, Enrollment, Extension, Role, Submission, User
from grader.wording import count, one_line

WindowOf = Callable[[int], Window]  # by user id

# what students read of an assignment that staff or a worker closed
CLOSED = "This assignment is closed at the moment. Your instructor has been told why."
# what boards call those who do not want to show even a nickname
ANONYMOUS = "Anonymous"
MAX_NICKNAME_CHARACTERS = 40
MAX_REASON_CHARACTERS = 400
# a letter, then what looks like it in lower case: enough that nobody passes for somebody else at a glance
_ALIKE = "aаαɑ bвβ cс dԁ eеεз3 gɡ hнһ jј kкκ liıіιӏ1|! mм nη oоοσ0 pрρ qԛ sѕ5 tтτ uυ vν wԝ xхχ yу"
_LOOKS_LIKE = {ord(other): group[0] for group in _ALIKE.split() for other in group[1:]}
_COLOURS = ("amber", "azure", "coral", "cyan", "green", "indigo", "ivory", "lilac", "olive", "ruby", "teal", "violet")
_BIRDS = ("auk", "crane", "egret", "finch", "heron", "ibis", "kite", "lark", "owl", "plover", "raven", "stork", "wren")


class Catalog:
    """The assignment folders, read again when a file in them changes. Safe to share between threads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._loaded: dict[str, tuple[tuple[int, ...], Assignment | AssignmentError]] = {}

    def load(self, slug: str) -> Assignment:
        """The assignment of that slug. Raises AssignmentError when its folder is wrong or not there."""
        if not SLUG.fullmatch(slug):  # it may come from a URL: never a way out of the folder
            raise AssignmentError(f"{slug!r} is not a slug; use lower-case words joined by hyphens")
        folder = self.folder / slug
        stamp = tuple(path.stat().st_mtime_ns for path in sorted(folder.glob("*")) if path.is_file())
        known = self._loaded.get(slug)
        if known is None or known[0] != stamp:
            try:
                known = (stamp, load_assignment(folder))
            except AssignmentError as exc:
                known = (stamp, exc)
            self._loaded[slug] = known
        if isinstance(known[1], AssignmentError):
            raise AssignmentError(str(known[1]))
        return known[1]

    def find(self, slug: str) -> Assignment | None:
        """The assignment of that slug; None where `load` raises. What was graded can still be shown."""
        try:
            return self.load(slug)
        except AssignmentError:
            return None

    def slugs(self) -> list[str]:
        """Every folder that holds an assignment.toml, whether it loads or not."""
        return sorted(path.parent.name for path in self.folder.glob("*/assignment.toml"))


def create_course(session: Session, *, slug: str, title: str, now: datetime) -> Course:
    """Add a course. Raises UserError when the slug is taken or not a slug."""
    if not SLUG.fullmatch(slug) or len(slug) > 64:
        raise UserError(f"{slug!r} cannot name a course; use lower-case words joined by hyphens, e.g. cs336-spring.")
    if find_course(session, slug) is not None:
        raise UserError(f"There is a course {slug!r} already.")
    course = Course(slug=slug, title=title.strip() or slug, created_at=now)
    session.add(course)
    session.flush()
    accounts.audit(session, actor_id=None, action="create-course", detail=f"course {slug}", now=now)
    return course


def find_course(session: Session, slug: str) -> Course | None:
    return session.scalars(select(Course).where(Course.slug == slug)).one_or_none()


def all_courses(session: Session) -> list[Course]:
    return list(session.scalars(select(Course).order_by(Course.title, Course.id)))


def has_courses(session: Session) -> bool:
    """False in a new installation, and only there: this decides whether the demo is made."""
    return session.scalar(select(Course.id).limit(1)) is not None


def courses_of(session: Session, user: User) -> list[Course]:
    """The courses that `user` is in; for staff, every course."""
    query = select(Course).order_by(Course.title, Course.id)
    if not user.is_staff:
        query = query.join(Enrollment, Enrollment.course_id == Course.id).where(Enrollment.user_id == user.id)
    return list(session.scalars(query))


def enrol(
    session: Session,
    *,
    course_id: int,
    user_id: int,
    role: Role = Role.STUDENT,
    actor_id: int | None = None,
    now: datetime,
) -> Enrollment:
    """Put somebody into a course, or change their role there. Boards show a random nickname until they choose one."""
    found = enrollment_of(session, course_id=course_id, user_id=user_id)
    before = found.role if found else None
    if found is None:
        taken = set(session.scalars(select(Enrollment.nickname).where(Enrollment.course_id == course_id)))
        found = Enrollment(course_id=course_id, user_id=user_id, role=role, nickname=_free_nickname(taken))
        session.add(found)
    found.role = role
    session.flush()
    if before is not role:
        was = f", who was {before.value}" if before else ""
        detail = f"user {found.user.name}, course {found.course.slug}: {role.value}{was}"
        accounts.audit(session, actor_id=actor_id, action="enrol", detail=detail, now=now)
    return found


def unenrol(session: Session, enrollment: Enrollment, *, actor_id: int | None, now: datetime) -> None:
    """Take somebody out of a course. What they handed in stays; boards, grades and counts are without them."""
    detail = f"user {enrollment.user.name}, course {enrollment.course.slug}, who was {enrollment.role.value}"
    accounts.audit(session, actor_id=actor_id, action="unenrol", detail=detail, now=now)
    session.delete(enrollment)
    session.flush()


def rename(session: Session, enrollment: Enrollment, nickname: str) -> None:
    """Change the name that boards show.

    Raises:
        UserError: it is taken, too long, not printable, or reads like the account of somebody else.
    """
    nickname = " ".join(nickname.split())
    if not 1 <= len(nickname) <= MAX_NICKNAME_CHARACTERS or not nickname.isprintable():
        raise UserError(f"A nickname has 1 to {MAX_NICKNAME_CHARACTERS} printable characters.")
    accounts_of_others = session.scalars(select(User.name).where(User.id != enrollment.user_id))
    if _at_a_glance(nickname) in {_at_a_glance(name) for name in accounts_of_others}:
        raise UserError(f"{nickname!r} reads like somebody else's account; choose another nickname.")
    other = session.scalar(
        select(Enrollment.id).where(
            Enrollment.course_id == enrollment.course_id,
            Enrollment.nickname == nickname,
            Enrollment.id != enrollment.id,
        )
    )
    if other is not None:
        raise UserError(f"{nickname!r} is taken in this course; choose another nickname.")
    enrollment.nickname = nickname


def _at_a_glance(name: str) -> str:
    """What is left of a name for somebody who does not look closely: equal for those that pass for one another."""
    folded = unicodedata.normalize("NFKD", name.casefold()).casefold().translate(_LOOKS_LIKE)
    return "".join(letter for letter in folded if letter.isalnum())


def appear_as(session: Session, enrollment: Enrollment, *, nickname: str, anonymous: bool) -> None:
    """How every board of the course shows somebody from now on. The anonymous may leave the nickname as it is.

    Raises:
        UserError: as `rename` does; there is neither; or the nickname is what boards call the anonymous.
    """
    if not nickname.strip() and not anonymous:
        raise UserError("Type a nickname, or tick “Show no name at all”.")
    if nickname.strip():
        if _at_a_glance(nickname) == _at_a_glance(ANONYMOUS):
            raise UserError(f"{ANONYMOUS!r} is what boards call those who show no name; tick that instead.")
        rename(session, enrollment, nickname)
    enrollment.anonymous = anonymous


def shown_name(nickname: str, anonymous: bool) -> str:
    """What a board calls somebody. No page or export of a board may use another name."""
    return ANONYMOUS if anonymous else nickname


def enrollment_of(session: Session, *, course_id: int, user_id: int) -> Enrollment | None:
    return session.scalars(
        select(Enrollment).where(Enrollment.course_id == course_id, Enrollment.user_id == user_id)
    ).one_or_none()


def member(session: Session, *, course_id: int, name: str) -> User | None:
    """Who is called that and in the course, as anything. Of others nothing is told, not even that they are there."""
    query = select(User).join(Enrollment, Enrollment.user_id == User.id)
    return session.scalars(query.where(Enrollment.course_id == course_id, User.name == name)).one_or_none()


def roles_of(session: Session, user_id: int) -> list[tuple[str, Role]]:
    """The courses that somebody is enrolled in, by slug, and as what."""
    query = select(Course.slug, Enrollment.role).join(Enrollment, Enrollment.course_id == Course.id)
    return [
        (slug, role) for slug, role in session.execute(query.where(Enrollment.user_id == user_id).order_by(Course.slug))
    ]


def role_in(session: Session, *, user: User, course_id: int) -> Role | None:
    """What `user` may do in the course; None: nothing. Staff are instructors everywhere."""
    if user.is_staff:
        return Role.INSTRUCTOR
    found = enrollment_of(session, course_id=course_id, user_id=user.id)
    return found.role if found else None


class Keep(enum.Enum):
    """Stands for an argument that nobody gave: what is there stays. None would mean "no deadline"."""

    AS_IT_IS = enum.auto()


def set_assignment(
    session: Session,
    *,
    course_id: int,
    slug: str,
    device: str | Keep = Keep.AS_IT_IS,
    opens_at: datetime | Keep | None = Keep.AS_IT_IS,
    deadline: datetime | Keep | None = Keep.AS_IT_IS,
    late_days: int | Keep = Keep.AS_IT_IS,
    late_percent: float | Keep = Keep.AS_IT_IS,
    actor_id: int | None = None,
    now: datetime,
) -> CourseAssignment:
    """Set an assignment in a course, or change when and where it is graded. A new one comes last among the course's.

    Args:
        deadline: overrides the folder's; None: the folder's stands.
        late_days: so many days after the deadline hand-ins are still taken.
        late_percent: of the points, taken off for each begun late day.
    """
    found = session.scalars(
        select(CourseAssignment).where(CourseAssignment.course_id == course_id, CourseAssignment.slug == slug)
    ).one_or_none()
    is_new = found is None
    if found is None:
        position = len(assignments_of(session, course_id))
        found = CourseAssignment(course_id=course_id, slug=slug, position=position)
        session.add(found)
        session.flush()
    given = {
        "device": device,
        "opens_at": opens_at,
        "deadline": deadline,
        "late_days": late_days,
        "late_percent": late_percent,
    }
    changes = []
    for name, value in given.items():
        if value is not Keep.AS_IT_IS and value != getattr(found, name):
            changes.append(f"{name} {getattr(found, name)} -> {value}")
            setattr(found, name, value)
    session.flush()
    if is_new or changes:
        detail = "; ".join((f"assignment {found.id} ({slug})", *changes))
        accounts.audit(session, actor_id=actor_id, action="set-assignment", detail=detail, now=now)
    return found


def unset_assignment(session: Session, entry: CourseAssignment, *, actor_id: int | None, now: datetime) -> None:
    """Take an assignment out of a course.

    Raises:
        UserError: something was handed in for it, and that stays.
    """
    handed_in = select(func.count(Submission.id)).where(Submission.course_assignment_id == entry.id)
    if n := session.scalar(handed_in):
        raise UserError(
            f"{count(n, 'submission')} for {entry.slug} would be lost with it. "
            f"`tilegrade course close {entry.course.slug} {entry.slug} --reason WHY` takes no more."
        )
    detail = f"assignment {entry.id} ({entry.slug}), course {entry.course.slug}"
    accounts.audit(session, actor_id=actor_id, action="unset-assignment", detail=detail, now=now)
    session.execute(delete(Extension).where(Extension.course_assignment_id == entry.id))
    session.delete(entry)
    session.flush()


def assignments_of(session: Session, course_id: int) -> list[CourseAssignment]:
    """The course's assignments in their order."""
    return list(
        session.scalars(
            select(CourseAssignment)
            .where(CourseAssignment.course_id == course_id)
            .order_by(CourseAssignment.position, CourseAssignment.id)
        )
    )


def graded_elsewhere(session: Session, device: str) -> dict[str, list[str]]:
    """Slugs of assignments set to be graded on something else than a device, by what that is."""
    found: dict[str, list[str]] = {}
    for wanted, slug in session.execute(
        select(CourseAssignment.device, CourseAssignment.slug).distinct().order_by(CourseAssignment.slug)
    ):
        if devices.kind_of(wanted) != device:
            found.setdefault(wanted, []).append(slug)
    return found


def assignment_in(session: Session, *, course_slug: str, slug: str) -> CourseAssignment | None:
    """The assignment of that slug in the course of that slug, with `course` loaded."""
    return session.scalars(
        select(CourseAssignment)
        .join(Course)
        .where(Course.slug == course_slug, CourseAssignment.slug == slug)
        .options(joinedload(CourseAssignment.course))
    ).one_or_none()


def window(session: Session, *, entry: CourseAssignment, assignment: Assignment, user_id: int) -> Window:
    """When `user_id` may hand in: their extension, else the course's deadline, else the folder's."""
    until = session.scalar(
        select(Extension.until).where(Extension.course_assignment_id == entry.id, Extension.user_id == user_id)
    )
    return window_until(entry, assignment, until)


def window_until(entry: CourseAssignment, assignment: Assignment | None, until: datetime | None) -> Window:
    """The same of a student whose extension is known: `until`, or None without one.

    Args:
        assignment: None where the folder does not load; the folder's deadline is then not known.
    """
    deadline = entry.deadline or (assignment.deadline if assignment else None)
    # an extension granted before the deadline moved later must not shorten it
    extended = until is not None and deadline is not None and until > deadline
    return Window(
        opens_at=entry.opens_at,
        deadline=until if extended else deadline,
        extended=extended,
        late_days=entry.late_days,
        late_percent=entry.late_percent,
    )


def windows_of(session: Session, *, entry: CourseAssignment, assignment: Assignment | None) -> WindowOf:
    """The window of any student of that assignment, from one statement."""
    query = select(Extension.user_id, Extension.until).where(Extension.course_assignment_id == entry.id)
    everybody = window_until(entry, assignment, None)
    own = {row.user_id: window_until(entry, assignment, row.until) for row in session.execute(query)}
    return lambda user_id: own.get(user_id, everybody)


def grant_extension(
    session: Session,
    *,
    entry: CourseAssignment,
    assignment: Assignment,
    user: User,
    until: datetime,
    reason: str = "",
    actor_id: int | None,
    now: datetime,
) -> None:
    """Give one student their own deadline for one assignment, or change it. The common one itself takes it back.

    Args:
        reason: for staff, in one line; the same extension again without one keeps what is there.

    Raises:
        UserError: they are not in the course, there is no deadline, or everybody may hand in for longer.
    """
    where = session.get_one(Course, entry.course_id).slug
    if enrollment_of(session, course_id=entry.course_id, user_id=user.id) is None:
        raise UserError(f"{user.name} is not in {where}; `tilegrade course enrol {where} {user.name}` first.")
    deadline = window_until(entry, assignment, None).deadline
    if deadline is None:
        raise UserError(
            f"{entry.slug} has no deadline in {where}, so there is nothing to extend. "
            f"`tilegrade course assign {where} {entry.slug} --deadline DATE` sets one."
        )
    if until < deadline:
        raise UserError(
            f"Everybody in {where} may hand in {entry.slug} until {deadline:%Y-%m-%d %H:%M:%S} UTC; "
            f"an extension must end later."
        )
    # one student at a time: looking and inserting must not interleave (SQLite's writer lock does the same)
    session.execute(select(User.id).where(User.id == user.id).with_for_update())
    found = session.scalars(
        select(Extension).where(Extension.course_assignment_id == entry.id, Extension.user_id == user.id)
    ).one_or_none()
    reason = one_line(reason, MAX_REASON_CHARACTERS)
    if until == deadline:  # no row is left, which would hold when the deadline is moved forward
        session.execute(
            delete(Extension).where(Extension.course_assignment_id == entry.id, Extension.user_id == user.id)
        )
    elif found is None:
        session.add(Extension(course_assignment_id=entry.id, user_id=user.id, until=until, reason=reason))
    else:
        found.until, found.reason = until, reason or found.reason
    detail = f"user {user.name}, assignment {entry.id} ({entry.slug}), until {until:%Y-%m-%d %H:%M:%S} UTC"
    detail += f": {reason}" if reason else ""
    accounts.audit(session, actor_id=actor_id, action="grant-extension", detail=detail, now=now)
    session.flush()


def close_assignment(
    session: Session, *, entry: CourseAssignment, reason: str, actor_id: int | None, now: datetime
) -> None:
    """Take no more hand-ins for it. Staff read the reason; students read that it is closed."""
    entry.closed_reason = reason
    detail = f"assignment {entry.id} ({entry.slug}): {reason}"
    accounts.audit(session, actor_id=actor_id, action="close-assignment", detail=detail, now=now)


def reopen_assignment(session: Session, *, entry: CourseAssignment, actor_id: int | None, now: datetime) -> None:
    entry.closed_reason = None
    detail = f"assignment {entry.id} ({entry.slug})"
    accounts.audit(session, actor_id=actor_id, action="reopen-assignment", detail=detail, now=now)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoLogin:
    """One demo account, with the password that is printed once and stored nowhere."""

    name: str
    password: str
    role: Role


_DEMO_ORDER = ("fused-bias-dropout-layernorm", "online-softmax", "flash-attention-forward", "flash-attention")


def seed_demo(session: Session, catalog: Catalog, *, device: str = "cpu", now: datetime) -> list[DemoLogin]:
    """Create the demo course with every assignment that loads, a student and an instructor. Empty when it is there."""
    if find_course(session, "demo") is not None:
        return []
    course = create_course(session, slug="demo", title="Demo course", now=now)
    # each builds on the one before; what a teacher has added comes last
    places = {slug: place for place, slug in enumerate(_DEMO_ORDER)}
    for slug in sorted(catalog.slugs(), key=lambda slug: places.get(slug, len(places))):
        if catalog.find(slug) is None:
            continue  # `tilegrade assignment check` and the staff pages say what is wrong with it
        set_assignment(session, course_id=course.id, slug=slug, device=device, now=now)
    logins = []
    for name, role in (("student", Role.STUDENT), ("instructor", Role.INSTRUCTOR)):
        password = accounts.random_password()
        user = accounts.create_user(session, name=name, password=password, now=now)
        enrol(session, course_id=course.id, user_id=user.id, role=role, now=now)
        logins.append(DemoLogin(name=name, password=password, role=role))
    return logins


def _free_nickname(taken: Set[str]) -> str:
    """A friendly name that says nothing about who it is."""
    while True:
        name = f"{secrets.choice(_COLOURS)}-{secrets.choice(_BIRDS)}-{secrets.randbelow(90) + 10}"
        if name not in taken:
            return name
