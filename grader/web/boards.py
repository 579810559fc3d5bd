"""The leaderboard of an assignment."""

from __future__ import annotations

from flask import Blueprint, render_template, request

from grader import boards
from grader.web import lists
from grader.web.house import house
from grader.web.security import assignment_or_404, viewer

bp = Blueprint("boards", __name__)

PER_PAGE = 50


@bp.get("/c/<course_slug>/<slug>/leaderboard")
def show(course_slug: str, slug: str) -> str:
    """Nicknames only; instructors also see who is behind them."""
    with house().database.read() as db:
        entry = assignment_or_404(db, course_slug, slug)
        best = boards.best_of_each(db, entry, house().catalog.load(slug))
        return render_template(
            "leaderboard.html",
            entry=entry,
            assignment=house().catalog.load(slug),
            page=lists.cut(best, page=request.args.get("page", 1, int), per_page=PER_PAGE),
            teaches=viewer().teaches_in(entry.course_id),
            timed=any(one.speedup is not None for one in best),
        )
