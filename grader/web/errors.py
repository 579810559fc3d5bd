"""The one place where an error becomes a page. Every page says what to do next."""

from __future__ import annotations

import logging

from flask import Flask, current_app, g, redirect, render_template, request, url_for
from flask.typing import ResponseReturnValue
from flask_wtf.csrf import CSRFError
from sqlalchemy import exc as sql
from werkzeug.exceptions import HTTPException, RequestEntityTooLarge

from grader.db import briefly, is_away
from grader.errors import AssignmentError, UserError
from grader.web.assignments import assignment_page
from grader.web.auth import where_they_were
from grader.web.house import house
from grader.wording import one_line

log = logging.getLogger(__name__)

# where a form is that is sent to an address of its own: after a refused one the browser stands there
_FORM_PAGES = {
    "auth.log_out": "home.index",
    "submissions.hand_in": "assignments.show",
    "submissions.cancel": "submissions.show",
    "boards.appear": "boards.show",
    "boards.freeze": "boards.show",
    "boards.withdraw": "boards.show",
    "courses.extend": "courses.show",
    "staff.rejudge": "submissions.show",
    "staff.run_again": "submissions.show",
    "staff.release": "submissions.show",
    "staff.confirm": "submissions.show",
}
_PAGES = {
    400: ("That request was not complete", "Go back, load the page again and try once more."),
    401: ("Please log in", "Your session has ended. Log in, then try again."),
    404: ("There is no such page", "It may have moved, or it is not yours to see. Start again from your assignments."),
    405: ("That cannot be done here", "Nothing was changed. Forms are sent from their page."),
    500: (
        "Something of ours broke",
        "It has been written down, and nothing you handed in is lost. Try again soon.",
    ),
    503: ("Busy just now", "Try again in a minute."),
}


def register(app: Flask) -> None:
    app.register_error_handler(UserError, _user_error)
    app.register_error_handler(AssignmentError, _assignment_error)
    app.register_error_handler(CSRFError, _csrf_error)
    app.register_error_handler(RequestEntityTooLarge, _too_large)
    app.register_error_handler(HTTPException, _http_error)
    app.register_error_handler(sql.SQLAlchemyError, _database_error)
    app.register_error_handler(Exception, _our_fault)


def handed_in_text() -> str:
    """What was pasted into the form that was sent, or the text of the file that was chosen in it."""
    pasted = request.form.get("source", "")
    upload = request.files.get("file")
    if upload is None or not upload.filename:
        return pasted
    try:
        return str(upload.read().decode("utf-8-sig"))
    except UnicodeDecodeError:
        return pasted  # no text, so there is nothing to put into a form


def _page(status: int, title: str, advice: str, *, form_page: str | None = None) -> ResponseReturnValue:
    # what somebody pasted is theirs: no error may cost them an hour's work
    kept = handed_in_text() if request.method == "POST" else ""
    page = render_template("error.html", title=title, advice=advice, status=status, kept=kept, form_page=form_page)
    return page, status


def _user_error(error: UserError) -> ResponseReturnValue:
    draw_again = g.get("on_user_error")
    if draw_again is not None:
        answer: ResponseReturnValue = draw_again(str(error))
        return answer
    return _page(400, "That cannot be done", str(error))


def _assignment_error(error: AssignmentError) -> ResponseReturnValue:
    log.error("assignment: %s", error)
    viewer = g.get("viewer")
    advice = "It is closed at the moment; your instructor can see why. Nothing you handed in is lost."
    if viewer is not None and viewer.teaches:
        advice = f"Students read that it is closed. What to mend: {error}"
    return _page(503, "This assignment cannot be loaded", advice)


def _csrf_error(_error: CSRFError) -> ResponseReturnValue:
    # the token of a page that was opened before the last log-in or log-out
    if g.viewer is not None and request.endpoint == "auth.log_in":
        return where_they_were()  # a second click, or a reload: the first one logged them in
    if g.viewer is not None and request.endpoint == "submissions.hand_in":
        view = request.view_args or {}
        notice = "This form is too old: it was opened before you logged in. Nothing is lost; hand it in once more."
        return assignment_page(
            **view, notice=notice, pasted=handed_in_text(), key=request.form.get("key", "")[:64]
        ), 400
    return _page(400, "This form is too old", "Load the page again and send it once more.")


def _too_large(_error: RequestEntityTooLarge) -> ResponseReturnValue:
    limit_kib = house().settings.max_source_bytes // 1024
    advice = (
        f"The limit is {limit_kib} KiB. Hand in the kernel file alone, without data or generated code. "
        "Go back to try another file."
    )
    # reading the form again would only meet the limit again
    return render_template("error.html", title="That file is too large", advice=advice, status=413, kept=""), 413


def _http_error(error: HTTPException) -> ResponseReturnValue:
    status = error.code or 500
    if error.response is not None or status < 400:
        return error
    if status == 401 and request.endpoint == "auth.log_out":
        return redirect(url_for("auth.log_in"), code=303)  # a second click
    if status == 401 and request.endpoint == "submissions.hand_in":
        return _log_in_and_go_on()
    title, advice = _PAGES.get(status, ("That did not work", "Go back and try again."))
    return _page(status, title, advice, form_page=_form_page() if status == 405 else None)


def _form_page() -> str | None:
    """The page whose form is sent to the address that was asked for; None where there is no such form."""
    try:
        endpoint, view = current_app.url_map.bind("").match(request.path, method="POST")
    except HTTPException:
        return None
    page = _FORM_PAGES.get(str(endpoint))
    if page is None:
        return None
    wanted = next(current_app.url_map.iter_rules(page)).arguments
    return url_for(page, **{name: value for name, value in view.items() if name in wanted})


def _log_in_and_go_on() -> ResponseReturnValue:
    """The log-in page with what was handed in on it; after the log-in it is back in the assignment's form."""
    page = render_template(
        "log_in.html",
        next=url_for("assignments.show", **(request.view_args or {})),
        kept=handed_in_text(),
        key=request.form.get("key", ""),
        error="Your session has ended, so nothing was handed in yet. Log in; what you gave is kept.",
    )
    return page, 401


def _database_error(error: sql.SQLAlchemyError) -> ResponseReturnValue:
    if not is_away(error):
        return _our_fault(error)
    # one line for each request of an outage: a stack would tell no more
    log.error("%s %s: the database is away: %s", request.method, one_line(request.path), briefly(error))
    advice = "Nothing that was stored is lost. Try again in a minute."
    if request.method == "POST":
        advice = "What you sent was not taken. Send it again in a minute; what did arrive is not taken twice."
    return _page(503, "The database cannot be reached just now", advice)


def _our_fault(error: Exception) -> ResponseReturnValue:
    # a path may hold line ends, which would write lines of a stranger's into the log
    log.exception("%s %s", request.method, one_line(request.path), exc_info=error)
    return _page(500, *_PAGES[500])
