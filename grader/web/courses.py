"""One course for those who teach it: who is in it, what it sets, and extensions, which can be granted here."""

from __future__ import annotations

from datetime import UTC, datetime

from flask import Blueprint, Response, abort, flash, g, redirect, render_template, request, url_for
from sqlalchemy.orm import Session
from werkzeug.wrappers import Response as AnyResponse

from grader import accounts, boards, course
from grader.errors import UserError
from grader.models import Course
from grader.web import lists
from grader.web.house import house, utc_now
from grader.web.security import instructor_or_404, viewer
from grader.web.text import utc, without_nul

bp = Blueprint("courses", __name__)


@bp.get("/c/<course_slug>")
def show(course_slug: str) -> str:
    return _page(course_slug)


@bp.get("/c/<course_slug>/grades.csv")
def grades(course_slug: str) -> Response:
    """Each student's best hand-in for each assignment, for a spreadsheet."""
    with house().database.read() as db:
        text = boards.gradebook_csv(db, _taught_or_404(db, course_slug).id, house().catalog)
    headers = {"Content-Disposition": f'attachment; filename="{course_slug}-grades.csv"'}
    return Response(text, mimetype="text/csv", headers=headers)


@bp.post("/c/<course_slug>/extensions/grant")
def extend(course_slug: str) -> AnyResponse:
    """Give one student a later deadline for one assignment. Sent twice it is the same extension."""
    given = {name: without_nul(request.form.get(name, "")) for name in ("student", "assignment", "until", "reason")}
    g.on_user_error = lambda message: (_page(course_slug, error=message, given=given), 400)
    with house().database.write() as db:
        found = _taught_or_404(db, course_slug)
        entry = course.assignment_in(db, course_slug=course_slug, slug=given["assignment"])
        if entry is None:
            raise UserError("Choose an assignment of this course.")
        student = course.member(db, course_id=found.id, name=accounts.normal_name(given["student"]))
        if student is None:
            raise UserError("Nobody in this course has that name. The list below has everybody's.")
        until = _moment(given["until"])
        course.grant_extension(
            db,
            entry=entry,
            assignment=house().catalog.load(entry.slug),
            user=student,
            until=until,
            reason=given["reason"],
            actor_id=viewer().id,
            now=utc_now(),
        )
        name = student.name
    flash(f"{name} may hand in {given['assignment']} until {utc(until)}.", "good")
    return redirect(url_for("courses.show", course_slug=course_slug), code=303)


def _page(course_slug: str, *, error: str = "", given: dict[str, str] | None = None) -> str:
    extended = "extended" in request.args
    with house().database.read() as db:
        found = _taught_or_404(db, course_slug)
        entries = course.assignments_of(db, found.id)
        loaded = {entry.slug: house().catalog.find(entry.slug) for entry in entries}
        return render_template(
            "course.html",
            course=found,
            entries=[(entry, course.window_until(entry, loaded[entry.slug], None)) for entry in entries],
            titles={slug: one.title if one else slug for slug, one in loaded.items()},
            broken={slug for slug, one in loaded.items() if one is None},
            members=lists.members(db, course_id=found.id, page=request.args.get("page", 1, int), extended=extended),
            extended=extended,
            turnout=lists.turnout(db, course_id=found.id),
            n_held=lists.held_in(db, [found.id]).get(found.id, 0),
            now=utc_now(),
            error=error,
            given=given or {},
        )


def _taught_or_404(db: Session, course_slug: str) -> Course:
    found = course.find_course(db, course_slug)
    if found is None:
        abort(404)
    instructor_or_404(found.id)
    return found


def _moment(text: str) -> datetime:
    """What a browser sends for a day and a time, which the page says is UTC."""
    try:
        return datetime.fromisoformat(text).replace(tzinfo=UTC)
    except ValueError:
        raise UserError("Say until when, as day and time in UTC: 2030-03-08 23:59.") from None
