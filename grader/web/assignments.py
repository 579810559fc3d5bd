"""One assignment: its handout, the form to hand in, one's own history, and two of its files side by side."""

from __future__ import annotations

import secrets
from datetime import datetime

from flask import Blueprint, Response, abort, render_template, request
from sqlalchemy.orm import Session

from grader import boards, course, submissions
from grader.assignment import Assignment
from grader.deadlines import Phase
from grader.models import CourseAssignment, Submission
from grader.web import lists
from grader.web.compare import compare as compare_files
from grader.web.handout import render_handout
from grader.web.house import house, utc_now
from grader.web.security import MAX_ROW_ID, assignment_or_404, viewer

bp = Blueprint("assignments", __name__)

HISTORY_PER_PAGE = 8
OFFERED = 40  # of one's own files, in the choice of two


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


def assignment_page(
    course_slug: str, slug: str, *, error: str = "", notice: str = "", pasted: str = "", key: str = ""
) -> str:
    """The page, also as the answer to a hand-in that was not taken: it then keeps what was pasted."""
    now = utc_now()
    with house().database.read() as db:
        entry = assignment_or_404(db, course_slug, slug)
        assignment = house().catalog.load(slug)
        window = course.window(db, entry=entry, assignment=assignment, user_id=viewer().id)
        own = lists.own_submissions(db, entry_id=entry.id, user_id=viewer().id)
        counted = boards.counted(own, window)
        teaches = viewer().teaches_in(entry.course_id)
        closed = course.CLOSED if entry.closed_reason is not None else window.why_closed(now)
        return render_template(
            "assignment.html",
            entry=entry,
            assignment=assignment,
            handout=render_handout(assignment.handout, assignment.title),
            window=window,
            late=window.at(now).phase is Phase.LATE,
            closed=closed,
            may_hand_in=closed is None or (teaches and entry.closed_reason is None),
            teaches=teaches,
            history=lists.cut(own, page=request.args.get("page", 1, int), per_page=HISTORY_PER_PAGE),
            counted_id=counted.id if counted else None,
            late_text=lists.late_text,
            allowance=_allowance(db, entry, assignment, now),
            outlook=submissions.outlook(db, entry.device, now=now),
            max_kib=house().settings.max_source_bytes // 1024,
            key=key or secrets.token_urlsafe(16),
            error=error,
            notice=notice,
            pasted=pasted,
            now=now,
        )


def _allowance(db: Session, entry: CourseAssignment, assignment: Assignment, now: datetime) -> submissions.Allowance:
    return submissions.allowance(
        db, user_id=viewer().id, entry=entry, assignment=assignment, settings=house().settings, now=now
    )


@bp.get("/c/<course_slug>/<slug>/compare")
def compare(course_slug: str, slug: str) -> str:
    """Two files of one student, line by line. One that is picked alone is compared with the one before it.

    Without a choice the latest two. Instructors may take any two of the course.
    """
    picked = sorted({pick for pick in request.args.getlist("pick", int) if 0 < pick <= MAX_ROW_ID})[:2]
    with house().database.read() as db:
        entry = assignment_or_404(db, course_slug, slug)
        files = [_file_or_404(db, pick, entry) for pick in picked]
        owner = files[0].user_id if files else viewer().id
        own = lists.own_submissions(db, entry_id=entry.id, user_id=owner)
        if len(files) < 2:
            files = [_file_or_404(db, one, entry) for one in _pair([row.id for row in own], picked)]
        return render_template(
            "compare.html",
            entry=entry,
            title=lists.title_of(house().catalog, slug),
            files=files,
            own=own[:OFFERED],
            found=compare_files(files[0].source, files[1].source) if len(files) == 2 else None,
        )


def _pair(latest_first: list[int], picked: list[int]) -> list[int]:
    """That one with the one before it (after it, for the first), or the latest two; fewer where there are not two."""
    at = latest_first.index(picked[0]) if picked else 0
    start = max(0, min(at, len(latest_first) - 2))
    return latest_first[start : start + 2][::-1]


def _file_or_404(db: Session, submission_id: int, entry: CourseAssignment) -> Submission:
    row = lists.submission(db, submission_id, with_source=True)
    if row is None or row.course_assignment_id != entry.id:
        abort(404)
    if row.user_id != viewer().id and not viewer().teaches_in(entry.course_id):
        abort(404)
    return row
