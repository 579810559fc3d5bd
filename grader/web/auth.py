"""Log in and out."""

from __future__ import annotations

from flask import Blueprint, flash, g, redirect, render_template, request, session, url_for
from werkzeug.wrappers import Response

from grader import accounts
from grader.web.house import house, utc_now
from grader.web.security import local_path, open_session
from grader.web.text import without_nul

bp = Blueprint("auth", __name__)


@bp.route("/log-in", methods=["GET", "POST"])
def log_in() -> str | Response | tuple[str, int]:
    """The form, and its answer. A wrong name and a wrong password read the same."""
    target = local_path(request.values.get("next"))
    if g.viewer is not None and request.method == "GET":
        return redirect(target or url_for("home.index"))
    if request.method == "GET":
        return render_template("log_in.html", next=target)

    name = without_nul(request.form.get("name", ""))
    g.on_user_error = lambda message: (render_template("log_in.html", next=target, name=name, error=message), 429)
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
        return render_template("log_in.html", next=target, name=name, error=message), 401
    open_session(user)
    return redirect(target or url_for("home.index"), code=303)


@bp.post("/log-out")
def log_out() -> Response:
    session.clear()
    flash("You are logged out.", "good")
    return redirect(url_for("auth.log_in"), code=303)
