"""One assignment: its handout, the form to hand in, and one's own history."""

from __future__ import annotations

import secrets

from flask import Blueprint, Response, render_template, request

from grader import course, submissions
from grader.web import lists
from grader.web.handout import render_handout
from grader.web.house import house, utc_now
from grader.web.security import assignment_or_404, viewer

bp = Blueprint("assignments", __name__)


@bp.get("/c/<course_slug>/<slug>")
def show(course_slug: str, slug: str) -> str:
    return assignment_page(course_slug, slug)


@bp.get("/c/<course_slug>/<slug>/starter.py")
def starter(course_slug: str, slug: str) -> Response:
    with house().database.read() as db:
        assignment_or_404(db, course_slug, slug)
    text = house().catalog.load(slug).starter
    headers = {"Content-Disposition": f'attachment; filename="{slug}.py"'}
    return Response(text, mimetype="text/x-python", headers=headers)


def assignment_page(course_slug: str, slug: str, *, error: str = "", pasted: str = "", key: str = "") -> str:
    """The page, also as the answer to a hand-in that was refused: it then keeps what was pasted."""
    now = utc_now()
    with house().database.read() as db:
        entry = assignment_or_404(db, course_slug, slug)
        assignment = house().catalog.load(slug)
        person = viewer()
        teaches = person.teaches_in(entry.course_id)
        window = course.window(db, entry=entry, assignment=assignment, user_id=person.id)
        closed = window.why_closed(now)
        if entry.closed_reason is not None:
            closed = course.CLOSED
        history = lists.submissions(
            db, page=request.args.get("page", 1, int), entry_id=entry.id, user_id=person.id, per_page=8
        )
        allowed = assignment.limits.attempts
        used = (
            submissions.attempts_used(db, user_id=person.id, course_assignment_id=entry.id)
            if allowed
            else history.total
        )
        return render_template(
            "assignment.html",
            entry=entry,
            assignment=assignment,
            handout=render_handout(assignment.handout, assignment.title),
            window=window,
            closed=closed,
            may_hand_in=closed is None or (teaches and entry.closed_reason is None),
            teaches=teaches,
            history=history,
            attempts_used=used,
            attempts_allowed=allowed,
            max_kib=house().settings.max_source_bytes // 1024,
            key=key or secrets.token_urlsafe(16),
            error=error,
            pasted=pasted,
            now=now,
        )
