"""The one place where an error becomes a page. Every page says what to do next."""

from __future__ import annotations

import logging

from flask import Flask, g, render_template, request
from flask.typing import ResponseReturnValue
from flask_wtf.csrf import CSRFError
from werkzeug.exceptions import HTTPException, RequestEntityTooLarge

from grader.errors import AssignmentError, UserError
from grader.web.house import house

log = logging.getLogger(__name__)

_PAGES = {
    400: ("That request was not complete", "Go back, load the page again and try once more."),
    401: ("Please log in", "Your session has ended. Log in, then try again."),
    404: ("There is no such page", "It may have moved, or it is not yours to see. Start again from your assignments."),
    405: ("That cannot be done here", "Go back and use the buttons of the page."),
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
    app.register_error_handler(Exception, _our_fault)


def _page(status: int, title: str, advice: str, *, keep: bool = False) -> ResponseReturnValue:
    # what somebody pasted is theirs: an ended session must not cost them an hour's work
    kept = request.form.get("source", "") if keep and request.method == "POST" else ""
    return render_template("error.html", title=title, advice=advice, status=status, kept=kept), status


def _user_error(error: UserError) -> ResponseReturnValue:
    draw_again = g.get("on_user_error")
    if draw_again is not None:
        answer: ResponseReturnValue = draw_again(str(error))
        return answer
    return _page(400, "That cannot be done", str(error), keep=True)


def _assignment_error(error: AssignmentError) -> ResponseReturnValue:
    log.error("assignment: %s", error)
    viewer = g.get("viewer")
    advice = "It is closed at the moment; your instructor can see why. Nothing you handed in is lost."
    if viewer is not None and viewer.teaches:
        advice = f"Students read that it is closed. What to mend: {error}"
    return _page(503, "This assignment cannot be loaded", advice, keep=True)


def _csrf_error(_error: CSRFError) -> ResponseReturnValue:
    return _page(400, "This form is too old", "Load the page again and send it once more.", keep=True)


def _too_large(_error: RequestEntityTooLarge) -> ResponseReturnValue:
    limit_kib = house().settings.max_source_bytes // 1024
    advice = (
        f"The limit is {limit_kib} KiB. Hand in the kernel file alone, without data or generated code. "
        "Go back to try another file."
    )
    return _page(413, "That file is too large", advice)


def _http_error(error: HTTPException) -> ResponseReturnValue:
    status = error.code or 500
    if error.response is not None or status < 400:
        return error
    title, advice = _PAGES.get(status, ("That did not work", "Go back and try again."))
    return _page(status, title, advice, keep=status == 401)


def _our_fault(error: Exception) -> ResponseReturnValue:
    log.exception("%s %s", request.method, request.path, exc_info=error)
    return _page(500, *_PAGES[500])
