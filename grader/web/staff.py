"""What instructors see and do: every submission of their courses, the queue, the workers."""

from __future__ import annotations

from flask import Blueprint, abort, flash, redirect, render_template, request, url_for
from sqlalchemy.orm import Session
from werkzeug.wrappers import Response

from grader import course, submissions
from grader.models import Role, Submission
from grader.web import lists
from grader.web.house import house, utc_now
from grader.web.security import instructor_or_404, teacher_or_404, viewer
from grader.wording import points_text as points

bp = Blueprint("staff", __name__)


@bp.get("/c/<course_slug>/submissions")
def all_submissions(course_slug: str) -> str:
    """Every submission of one course, filtered by assignment, student and outcome."""
    with house().database.read() as db:
        found = course.find_course(db, course_slug)
        if found is None:
            abort(404)
        instructor_or_404(found.id)
        entries = course.assignments_of(db, found.id)
        wanted = {name: request.args.get(name, "")[:64] for name in ("assignment", "student", "what")}
        page = lists.submissions(
            db,
            page=request.args.get("page", 1, int),
            course_id=found.id,
            slug=wanted["assignment"],
            student=wanted["student"],
            what=wanted["what"],
        )
        titles = {entry.slug: lists.title_of(house().catalog, entry.slug) for entry in entries}
        return render_template(
            "all_submissions.html",
            course=found,
            entries=entries,
            wanted=wanted,
            page=page,
            titles=titles,
            late=lists.late_texts(db, page.rows, house().catalog),
        )


@bp.get("/queue")
def queue() -> str:
    """What runs and what waits. Of courses that one does not teach, only how many."""
    teacher_or_404()
    now = utc_now()
    own = None if viewer().is_staff else {one for one, role in viewer().roles.items() if role is Role.INSTRUCTOR}
    with house().database.read() as db:
        page = lists.queue(db, page=request.args.get("page", 1, int), course_ids=own)
        n_others = submissions.count_waiting(db) - page.total if own is not None else 0
        workers = [row for row in submissions.workers(db) if submissions.is_well(row, now)]
        unserved = submissions.unserved(db, now=now) if workers else []
        return render_template(
            "queue.html", page=page, n_others=n_others, n_workers=len(workers), unserved=unserved, now=now
        )


@bp.get("/workers")
def workers() -> str:
    teacher_or_404()
    now = utc_now()
    with house().database.read() as db:
        rows = [(row, submissions.is_gone(row, now)) for row in submissions.workers(db)]
        return render_template("workers.html", page=lists.cut(rows, page=request.args.get("page", 1, int)), now=now)


@bp.post("/submissions/<int:submission_id>/re-judge")
def rejudge(submission_id: int) -> Response:
    """Judge the stored measurements by the assignment as it is now. Nothing is run."""
    with house().database.write() as db:
        row = _taught_or_404(db, submission_id)
        assignment = house().catalog.load(row.course_assignment.slug)
        outcome = submissions.rejudge(db, submission_id, assignment, actor_id=viewer().id, now=utc_now())
    before = f"{outcome.verdict_before}, {points(outcome.points_before)} points"
    after = f"{outcome.verdict}, {points(outcome.points)} points"
    flash(f"Judged again: {before} became {after}." if outcome.changed else f"Judged again: still {after}.", "good")
    return _back(submission_id)


@bp.post("/submissions/<int:submission_id>/run-again")
def run_again(submission_id: int) -> Response:
    """Queue it for new measurements."""
    with house().database.write() as db:
        _taught_or_404(db, submission_id)
        device = submissions.run_again(db, submission_id, actor_id=viewer().id, now=utc_now())
    if device:
        house().ring(device)
    flash("It is in the queue again." if device else "It is on its way already.", "good" if device else "warn")
    return _back(submission_id)


@bp.post("/submissions/<int:submission_id>/release")
def release(submission_id: int) -> Response:
    """Publish a held grade."""
    return _decide(submission_id, release=True, done="The grade is published.")


@bp.post("/submissions/<int:submission_id>/confirm")
def confirm(submission_id: int) -> Response:
    """Decide that a held grade does not count."""
    return _decide(submission_id, release=False, done="The grade does not count. The student reads why.")


def _decide(submission_id: int, *, release: bool, done: str) -> Response:
    with house().database.write() as db:
        row = _taught_or_404(db, submission_id)
        changed = submissions.decide(
            db,
            submission_id,
            house().catalog.load(row.course_assignment.slug),
            release=release,
            reason=request.form.get("reason", ""),
            actor_id=viewer().id,
            now=utc_now(),
        )
    flash(done if changed else "There is nothing to decide here.", "good" if changed else "warn")
    return _back(submission_id)


def _taught_or_404(db: Session, submission_id: int) -> Submission:
    row = lists.submission(db, submission_id)
    if row is None:
        abort(404)
    instructor_or_404(row.course_assignment.course_id)
    return row


def _back(submission_id: int) -> Response:
    return redirect(url_for("submissions.show", submission_id=submission_id), code=303)
