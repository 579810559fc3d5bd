"""The first page: my courses, what is due, and my last reports."""

from __future__ import annotations

from flask import Blueprint, render_template

from grader.web import lists
from grader.web.house import house, utc_now
from grader.web.security import viewer

bp = Blueprint("home", __name__)


@bp.get("/")
def index() -> str:
    now = utc_now()
    with house().database.read() as db:
        found = lists.home(db, viewer(), house().catalog, now=now)
        return render_template("home.html", home=found, now=now)
