"""Who is asking, and what they may see. Everything is closed unless this file opens it.

A page that one may not see answers 404, not 403: its existence is nobody's business.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from flask import Flask, Response, abort, current_app, g, redirect, request, session, url_for
from sqlalchemy import select
from sqlalchemy.orm import Session
from werkzeug.wrappers import Response as AnyResponse

from grader import course
from grader.models import CourseAssignment, Enrollment, Role, User
from grader.settings import Settings
from grader.web.house import house

OPEN_ENDPOINTS = frozenset({"static", "auth.log_in", "health"})
# asked by the script, which must not take a log-in page for an answer
SCRIPT_ENDPOINTS = frozenset({"submissions.status", "submissions.events", "submissions.report", "submissions.facts"})
MAX_ROW_ID = 2**31 - 1
IDLE_SHARE = 1 / 3  # of the session's whole life; without a request for so long it ends
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Viewer:
    """Who is looking at this page."""

    id: int
    name: str
    is_staff: bool
    roles: dict[int, Role] = field(default_factory=dict)  # by course id

    @property
    def teaches(self) -> bool:
        return self.is_staff or Role.INSTRUCTOR in self.roles.values()

    def role_in(self, course_id: int) -> Role | None:
        return Role.INSTRUCTOR if self.is_staff else self.roles.get(course_id)

    def teaches_in(self, course_id: int) -> bool:
        return self.role_in(course_id) is Role.INSTRUCTOR


def guard(app: Flask) -> None:
    """Ask every request but the open ones who it is, and give every answer its headers."""
    app.before_request(_refuse_what_no_row_holds)
    app.before_request(_demand_log_in)
    app.after_request(_add_headers)
    app.context_processor(lambda: {"viewer": g.get("viewer")})


def open_session(user: User) -> None:
    """Begin a fresh session: nothing that was set before log-in survives it, so a planted cookie gains nothing."""
    session.clear()
    now = int(time.time())
    session.update(user=user.id, epoch=user.session_epoch, since=now, seen=now, nonce=secrets.token_hex(8))
    session.permanent = True


def know_viewer() -> None:
    """Find out who is asking, from the session as it is now."""
    g.viewer = _find_viewer(house().settings)


def viewer() -> Viewer:
    """The person who is logged in. Only for pages behind the log-in, which is all but the open ones."""
    found: Viewer | None = g.get("viewer")
    if found is None:
        abort(401)
    return found


def assignment_or_404(db: Session, course_slug: str, slug: str) -> CourseAssignment:
    """The course's assignment, for people in that course."""
    found = course.assignment_in(db, course_slug=course_slug, slug=slug)
    if found is None or viewer().role_in(found.course_id) is None:
        abort(404)
    return found


def instructor_or_404(course_id: int) -> None:
    if not viewer().teaches_in(course_id):
        abort(404)


def teacher_or_404() -> None:
    """For pages about the whole service, which anybody who teaches a course may see."""
    if not viewer().teaches:
        abort(404)


def local_path(target: str | None) -> str | None:
    """`target` when it is a path on this service, else None: log-in must not send people elsewhere."""
    if not target or not target.startswith("/") or target.startswith(("//", "/\\")):
        return None
    if any(ord(char) < 33 or char == "\\" for char in target):
        return None
    parts = urlsplit(target)
    return None if parts.scheme or parts.netloc else target


def _refuse_what_no_row_holds() -> None:
    """A number beyond 32 bits, or a NUL, in an address: databases refuse them with an error that reads as ours."""
    for value in (*(request.view_args or {}).values(), *request.args.values()):
        if value > MAX_ROW_ID if isinstance(value, int) else "\0" in value:
            abort(404)


def _demand_log_in() -> AnyResponse | None:
    g.viewer = None
    if request.endpoint in ("static", "health"):
        return None
    know_viewer()
    if g.viewer is None and request.endpoint not in OPEN_ENDPOINTS:
        if request.method in ("GET", "HEAD") and request.endpoint not in SCRIPT_ENDPOINTS:
            return redirect(url_for("auth.log_in", next=request.full_path.rstrip("?")))
        abort(401)
    return None


def _find_viewer(settings: Settings) -> Viewer | None:
    if "user" not in session:
        return None
    now = time.time()
    whole_s = settings.session_hours * 3600
    if not (now - session["since"] < whole_s and now - session["seen"] < whole_s * IDLE_SHARE):
        session.clear()
        return None
    with house().database.peek() as db:
        rows = db.execute(
            select(User.name, User.is_staff, User.active, User.session_epoch, Enrollment.course_id, Enrollment.role)
            .outerjoin(Enrollment, Enrollment.user_id == User.id)
            .where(User.id == session["user"])
        ).all()
    if not rows or not rows[0].active or rows[0].session_epoch != session["epoch"]:
        session.clear()
        return None
    roles = {row.course_id: row.role for row in rows if row.course_id is not None}
    found = Viewer(id=session["user"], name=rows[0].name, is_staff=rows[0].is_staff, roles=roles)
    # once a minute is enough: every change sends the cookie again
    if now - session["seen"] > 60:
        session["seen"] = int(now)
    return found


def _add_headers(response: Response) -> Response:
    headers = response.headers
    headers["Content-Security-Policy"] = CONTENT_SECURITY_POLICY
    headers["X-Content-Type-Options"] = "nosniff"
    headers["Referrer-Policy"] = "same-origin"
    headers["Cross-Origin-Opener-Policy"] = "same-origin"
    headers["Cross-Origin-Resource-Policy"] = "same-origin"
    headers["Permissions-Policy"] = "camera=(), microphone=(), geolocation=()"
    if current_app.config["SESSION_COOKIE_SECURE"]:
        headers["Strict-Transport-Security"] = "max-age=31536000"
    if request.endpoint != "static" or response.status_code >= 400:
        headers["Cache-Control"] = "no-store"
    return response
