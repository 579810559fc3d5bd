"""Log in and out."""

from __future__ import annotations

from typing import Any

from flask import Blueprint, current_app, flash, g, redirect, render_template, request, session, url_for
from werkzeug.exceptions import HTTPException
from werkzeug.wrappers import Response

from grader import accounts
from grader.errors import UserError
from grader.web.assignments import assignment_page
from grader.web.house import house, utc_now
from grader.web.security import know_viewer, local_path, open_session, viewer
from grader.web.text import without_nul

bp = Blueprint("auth", __name__)


@bp.route("/log-in", methods=["GET", "POST"])
def log_in() -> str | Response | tuple[str, int]:
    """The form, and its answer. A wrong name and a wrong password read the same.

    A form that found the session ended brings what was handed in along; it is then back in the assignment's form.
    """
    target = local_path(request.values.get("next"))
    if g.viewer is not None and request.method == "GET":
        return redirect(target or url_for("home.index"))
    if request.method == "GET":
        return render_template("log_in.html", next=target)

    name = without_nul(request.form.get("name", ""))
    again = {"next": target, "name": name, "kept": request.form.get("source", ""), "key": request.form.get("key", "")}
    g.on_user_error = lambda message: (render_template("log_in.html", **again, error=message), 429)
    with house().database.write() as db:
        user = accounts.log_in(
            db,
            name=name,
            password=request.form.get("password", ""),
            address=request.remote_addr or "",
            settings=house().settings,
            now=utc_now(),
        )
    if user is None:
        message = "That name and password do not fit. Check both, then try again."
        return render_template("log_in.html", **again, error=message), 401
    open_session(user)
    know_viewer()
    return where_they_were()


def where_they_were() -> str | Response:
    """The page that somebody wanted who is logged in now, with what they had handed in back in its form."""
    target = local_path(request.form.get("next"))
    kept = request.form.get("source", "")
    form = _form_at(target) if kept else None
    if form is None:
        return redirect(target or url_for("home.index"), code=303)
    notice = "You are logged in again. What you gave is in the form below: hand it in now."
    return assignment_page(**form, notice=notice, pasted=kept, key=request.form.get("key", "")[:64])


@bp.route("/password", methods=["GET", "POST"])
def password() -> str | Response:
    """Choose another password. It asks for the current one too: an open browser alone must not be enough."""
    if request.method == "GET":
        return render_template("password.html")
    g.on_user_error = lambda message: (render_template("password.html", error=message), 400)
    new = request.form.get("new", "")
    if new != request.form.get("again", ""):
        raise UserError("The new password was not the same both times. Type it again.")
    if new == request.form.get("password", ""):
        raise UserError("The new password is the same as the current one. Choose another.")
    with house().database.write() as db:
        # as at a log-in, so that guesses are counted and braked here too
        user = accounts.log_in(
            db,
            name=viewer().name,
            password=request.form.get("password", ""),
            address=request.remote_addr or "",
            settings=house().settings,
            now=utc_now(),
        )
        if user is not None:
            accounts.set_password(db, user, new, actor_id=user.id, now=utc_now())
    if user is None:
        raise UserError("That is not your current password. Check it, then try again.")
    open_session(user)
    flash("Your password is changed. Wherever else you were logged in, you no longer are.", "good")
    return redirect(url_for("home.index"), code=303)


@bp.post("/log-out")
def log_out() -> Response:
    """Ends every session of that person: clearing the cookie here would leave a copy of it good for hours."""
    with house().database.write() as db:
        accounts.end_sessions(db, viewer().id)
    session.clear()
    flash("You are logged out, here and wherever else you were logged in.", "good")
    answer = redirect(url_for("auth.log_in"), code=303)
    answer.headers["Clear-Site-Data"] = '"storage"'  # drafts of pasted files; browsers do it over https alone
    return answer


def _form_at(target: str | None) -> dict[str, Any] | None:
    """Which assignment's page that path is; None for any other."""
    try:
        endpoint, arguments = current_app.url_map.bind("").match(target or "")
    except HTTPException:
        return None
    return dict(arguments) if endpoint == "assignments.show" else None
