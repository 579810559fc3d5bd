"""One submission: handing it in, watching it on its way, and reading its report."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import datetime

from flask import (
    Blueprint,
    Response,
    abort,
    flash,
    g,
    redirect,
    render_template,
    request,
    stream_with_context,
    url_for,
)
from markupsafe import Markup
from sqlalchemy.orm import Session
from werkzeug.wrappers import Response as AnyResponse

from grader import accounts, submissions
from grader.errors import UserError
from grader.models import State, Submission, User
from grader.web import lists, words
from grader.web.assignments import assignment_page
from grader.web.house import House, house, utc_now
from grader.web.reports import DOWNLOAD_WAIT_S, SCRIPT_WAIT_S, report_html, report_of, source_html, style_sheet
from grader.web.security import Viewer, assignment_or_404, instructor_or_404, viewer
from grader.web.text import count_lines, source_lines, without_nul

bp = Blueprint("submissions", __name__)

STREAM_S = 25.0  # then the browser comes back for another; a forgotten tab must not hold a thread for ever
LOOK_EVERY_S = 0.5
KEEP_ALIVE_S = 5.0
MAX_TRAIL = 50  # acts on one submission that its page lists


@bp.post("/c/<course_slug>/<slug>/submissions")
def hand_in(course_slug: str, slug: str) -> AnyResponse:
    """Take one file, uploaded or pasted. A second click with the same form is the same submission."""
    pasted = request.form.get("source", "")
    key = request.form.get("key", "")[:64]
    g.on_user_error = lambda message: (
        assignment_page(course_slug, slug, error=message, pasted=pasted, key=key),
        400,
    )
    data, filename = _handed_in(pasted)
    with house().database.write() as db:
        entry = assignment_or_404(db, course_slug, slug)
        accepted = submissions.hand_in(
            db,
            user=db.get_one(User, viewer().id),
            entry=entry,
            assignment=house().catalog.load(slug),
            data=data,
            settings=house().settings,
            now=utc_now(),
            idempotency_key=key or None,
            filename=filename,
        )
    if accepted.new:
        house().ring(entry.device)
    else:
        flash("You handed in this very file a moment ago. Here it is.", "good")
    return redirect(url_for("submissions.show", submission_id=accepted.submission_id), code=303)


@bp.get("/submissions/<int:submission_id>")
def show(submission_id: int) -> str:
    now = utc_now()
    here = house()
    with here.database.read() as db:
        row = _visible_or_404(db, submission_id, viewer(), whole=False, with_source=True)
        teaches = viewer().teaches_in(row.course_assignment.course_id)
        under_way = row.state in (State.QUEUED, State.RUNNING)
        return render_template(
            "submission.html",
            submission=row,
            entry=row.course_assignment,
            teaches=teaches,
            own=row.user_id == viewer().id,
            news=_news(db, row, now=now),
            under_way=under_way,
            report=report_html(row, here.catalog, here.gallery, here.shelf, for_staff=teaches, late=_late(db, row))
            if row.result or not under_way
            else "",
            source=source_html(row.source, here.shelf),
            n_lines=count_lines(row.source),
            word=words.state_of(row, row.result),
            title=lists.title_of(here.catalog, row.course_assignment.slug),
            trail=accounts.trail(db, submission_id=row.id, limit=MAX_TRAIL) if teaches else (),
        )


@bp.get("/submissions/<int:submission_id>/report")
def report(submission_id: int) -> str:
    """The report alone, for the script that puts it into the page."""
    with house().database.read() as db:
        row = _visible_or_404(db, submission_id, viewer())
        late = _late(db, row)
    # charts are waited for, so no database connection is held here
    teaches = viewer().teaches_in(row.course_assignment.course_id)
    shown = report_of(row, house().catalog, house().gallery, for_staff=teaches, wait_s=SCRIPT_WAIT_S)
    return render_template("_report.html", submission=row, shown=shown, late=late)


@bp.get("/submissions/<int:submission_id>/report.html")
def report_file(submission_id: int) -> Response:
    """The report and the source as one file that needs no network."""
    with house().database.read() as db:
        row = _visible_or_404(db, submission_id, viewer())
        late = _late(db, row)
    teaches = viewer().teaches_in(row.course_assignment.course_id)
    shown = report_of(row, house().catalog, house().gallery, for_staff=teaches, wait_s=DOWNLOAD_WAIT_S)
    if shown.report is None:
        abort(404)
    page = render_template(
        "report_file.html",
        submission=row,
        entry=row.course_assignment,
        shown=shown,
        late=late,
        lines=source_lines(row.source),
        word=words.state_of(row, row.result),
        title=lists.title_of(house().catalog, row.course_assignment.slug),
        style=Markup(style_sheet()),  # noqa: S704  our own file
        now=utc_now(),
    )
    headers = {"Content-Disposition": f'attachment; filename="report-{submission_id}.html"'}
    return Response(page, mimetype="text/html", headers=headers)


@bp.get("/submissions/<int:submission_id>/facts")
def facts(submission_id: int) -> str:
    """How it was handled, for the script that puts it into the page of an instructor."""
    with house().database.read() as db:
        row = _visible_or_404(db, submission_id, viewer(), whole=False)
        instructor_or_404(row.course_assignment.course_id)
        under_way = row.state in (State.QUEUED, State.RUNNING)
        trail = accounts.trail(db, submission_id=row.id, limit=MAX_TRAIL)
        return render_template("_staff_facts.html", submission=row, under_way=under_way, trail=trail)


@bp.post("/submissions/<int:submission_id>/cancel")
def cancel(submission_id: int) -> AnyResponse:
    """Withdraw a submission that is not graded yet; or, as its instructor, stop measuring again one that is."""
    with house().database.write() as db:
        row = _visible_or_404(db, submission_id, viewer(), whole=False)
        teaches = viewer().teaches_in(row.course_assignment.course_id)
        before = row.state
        state = submissions.cancel(db, submission_id, for_staff=teaches, actor_id=viewer().id, now=utc_now())
    if State.CANCELLED in (state, before):  # before: a second click
        flash("Withdrawn. It does not count.", "good")
    elif state is State.DONE:
        flash("It is not measured again. Its grade stands.", "good")
    else:
        flash("Too late to withdraw it: it is graded, or no longer waiting.", "warn")
    return redirect(url_for("submissions.show", submission_id=submission_id), code=303)


@bp.get("/submissions/<int:submission_id>/source.py")
def source(submission_id: int) -> Response:
    """The file as it was handed in. Always a download: nothing of a student's is ever served as a page."""
    with house().database.read() as db:
        row = _visible_or_404(db, submission_id, viewer())
    headers = {"Content-Disposition": f'attachment; filename="submission-{row.id}.py"'}
    return Response(row.source.encode(), mimetype="text/x-python", headers=headers)


@bp.get("/submissions/<int:submission_id>/status")
def status(submission_id: int) -> AnyResponse:
    """Where it is, for browsers that poll."""
    with house().database.read() as db:
        row = _visible_or_404(db, submission_id, viewer(), whole=False)
        return Response(json.dumps(_news(db, row, now=utc_now())), mimetype="application/json")


@bp.get("/submissions/<int:submission_id>/events")
def events(submission_id: int) -> AnyResponse:
    """The same as a stream of server-sent events; 503 when no thread can be spared, so that the script polls."""
    with house().database.read() as db:
        _visible_or_404(db, submission_id, viewer(), whole=False)
    here = house()
    if not here.streams.acquire(blocking=False):
        abort(503)
    # the thread is given back when the server closes the response, whether or not the stream ever began
    answer = Response(
        stream_with_context(_stream(here, submission_id, viewer())),
        mimetype="text/event-stream",
        headers={"X-Accel-Buffering": "no"},
    )
    answer.call_on_close(here.streams.release)
    return answer


def _stream(here: House, submission_id: int, who: Viewer) -> Iterator[str]:
    """Tell what changes, for a while. No database connection is held while it waits."""
    # waitress knows when the browser has left, if it is started with SERVER_OPTIONS; others notice on writing
    has_left = request.environ.get("waitress.client_disconnected", lambda: False)
    ends = time.monotonic() + STREAM_S
    told, spoke_at = None, time.monotonic()
    yield "retry: 1000\n\n"
    while time.monotonic() < ends and not has_left():
        with here.database.read() as db:
            news = _news(db, _visible_or_404(db, submission_id, who, whole=False), now=utc_now())
        if news != told:
            yield f"event: status\ndata: {json.dumps(news)}\n\n"
            told, spoke_at = news, time.monotonic()
        elif time.monotonic() - spoke_at > KEEP_ALIVE_S:
            yield ": still here\n\n"  # a proxy drops a connection that says nothing
            spoke_at = time.monotonic()
        if news["done"]:
            return
        time.sleep(LOOK_EVERY_S)


def _news(db: Session, row: Submission, *, now: datetime) -> dict[str, object]:
    """What the page's script is told; the page itself is drawn from the same."""
    place = outlook = None
    if row.state is State.QUEUED:
        place = submissions.place_in_queue(db, row.id, now=now)
        outlook = submissions.outlook(db, row.device, now=now)
    assignment = house().catalog.find(row.course_assignment.slug)
    return {
        "line": words.live_line(row, place, outlook, assignment, now=now),
        "steps": render_template("_steps.html", steps=words.steps(row, assignment)),
        "headline": words.state_of(row, row.result).text,
        "stamp": f"{row.state} {row.attempt}",  # when it changes, what staff see of its handling has
        "done": row.state not in (State.QUEUED, State.RUNNING),
    }


def _late(db: Session, row: Submission) -> str:
    """What the points of a late hand-in count, in words."""
    return lists.late_texts(db, [row], house().catalog).get(row.id, "")


def _visible_or_404(
    db: Session, submission_id: int, who: Viewer, *, whole: bool = True, with_source: bool = False
) -> Submission:
    """One's own, or one of a course that one teaches. Not `whole`: without its long texts, or with the source alone."""
    row = submissions.find(db, submission_id) if whole else lists.submission(db, submission_id, with_source=with_source)
    if row is None or not (row.user_id == who.id or who.teaches_in(row.course_assignment.course_id)):
        abort(404)
    return row


def _handed_in(pasted: str) -> tuple[bytes, str | None]:
    """The bytes of the uploaded file, or of the pasted text, and the file's name."""
    upload = request.files.get("file")
    if upload is not None and upload.filename:
        return upload.read(), without_nul(upload.filename)
    if not pasted:
        raise UserError("You gave no file. Choose your Python file, or paste its text, then hand it in.")
    # a form sends every line end as CRLF, whatever was pasted; a lone surrogate cannot come out of UTF-8
    return pasted.replace("\r\n", "\n").encode("utf-8", "replace"), None
