"""The leaderboard of an assignment: live or frozen, the name one shows on it, and how one's own hand-ins went."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from flask import Blueprint, Response, abort, flash, g, redirect, render_template, request, url_for
from sqlalchemy.orm import Session
from werkzeug.wrappers import Response as AnyResponse

from grader import boards, course
from grader.boards import Lineup
from grader.deadlines import Lateness
from grader.figures import Bar, BarChart, Level, Whose
from grader.models import Board, CourseAssignment, Enrollment, Role, Submission
from grader.web import lists
from grader.web.house import house, utc_now
from grader.web.security import assignment_or_404, instructor_or_404, viewer
from grader.web.text import without_nul

bp = Blueprint("boards", __name__)

PER_PAGE = 50
OFFICIAL = 3  # frozen boards that the page names
DRAWING_WAIT_S = 0.0  # drawing takes longer than this page may; the table below says the same
TREND = 12  # hand-ins in the charts of one's own


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """Which board somebody asked for."""

    entry: CourseAssignment
    frozen: list[Board]
    board: Board | None  # None: the live one
    gpu: str | None
    lineup: Lineup


@bp.get("/c/<course_slug>/<slug>/leaderboard")
def show(course_slug: str, slug: str) -> str:
    return _page(course_slug, slug)


@bp.get("/c/<course_slug>/<slug>/leaderboard.csv")
def export(course_slug: str, slug: str) -> Response:
    """The same board for a spreadsheet. Whoever asks, it holds the names that the board shows, and no others."""
    with house().database.read() as db:
        shown = _asked_for(db, course_slug, slug)
        text = boards.board_csv(shown.lineup.all_lines())
    headers = {"Content-Disposition": f'attachment; filename="{slug}-leaderboard.csv"'}
    return Response(text, mimetype="text/csv", headers=headers)


@bp.get("/c/<course_slug>/<slug>/leaderboard/official")
def official(course_slug: str, slug: str) -> str:
    """Every frozen board, for the page itself names only the latest."""
    with house().database.read() as db:
        entry = assignment_or_404(db, course_slug, slug)
        page = lists.cut(boards.frozen(db, entry.id), page=request.args.get("page", 1, int), per_page=8)
        return render_template(
            "official_boards.html", entry=entry, title=lists.title_of(house().catalog, slug), page=page
        )


@bp.post("/c/<course_slug>/<slug>/leaderboard/name")
def appear(course_slug: str, slug: str) -> AnyResponse:
    """Choose the nickname that boards show, or none. Every board of the course follows at once."""
    nickname = without_nul(request.form.get("nickname", ""))
    anonymous = "anonymous" in request.form
    g.on_user_error = lambda message: (_page(course_slug, slug, error=message, nickname=nickname), 400)
    with house().database.write() as db:
        entry = assignment_or_404(db, course_slug, slug)
        own = _enrolled(db, entry)
        if own is None:
            abort(404)
        before = own.nickname
        course.appear_as(db, own, nickname=nickname, anonymous=anonymous)
        name = course.shown_name(own.nickname, own.anonymous)
        unseen = own.nickname if own.anonymous and own.nickname != before else ""
    flash(f"Every board of this course now shows you as “{name}”.", "good")
    if unseen:
        flash(f"“{unseen}” is saved and not shown: untick “Show no name at all” to show it.", "warn")
    return redirect(url_for("boards.show", course_slug=course_slug, slug=slug), code=303)


@bp.post("/c/<course_slug>/<slug>/leaderboard/freeze")
def freeze(course_slug: str, slug: str) -> AnyResponse:
    """Keep the board as it is now, as an official one."""
    title = without_nul(request.form.get("title", ""))
    g.on_user_error = lambda message: (_page(course_slug, slug, error=message, title=title), 400)
    with house().database.write() as db:
        entry = assignment_or_404(db, course_slug, slug)
        instructor_or_404(entry.course_id)
        board = boards.freeze(
            db,
            entry,
            house().catalog.load(slug),
            title=title,
            gpu=without_nul(request.form.get("gpu", ""))[:120] or None,
            actor_id=viewer().id,
            now=utc_now(),
            idempotency_key=without_nul(request.form.get("key", ""))[:64] or None,
        )
        board_id = board.id
    flash("The board is frozen. What is graded or judged from now on does not change it.", "good")
    return redirect(url_for("boards.show", course_slug=course_slug, slug=slug, frozen=board_id), code=303)


@bp.post("/c/<course_slug>/<slug>/leaderboard/<int:board_id>/withdraw")
def withdraw(course_slug: str, slug: str, board_id: int) -> AnyResponse:
    """Show a frozen board no longer."""
    with house().database.write() as db:
        entry = assignment_or_404(db, course_slug, slug)
        instructor_or_404(entry.course_id)
        board = db.get(Board, board_id)
        if board is None or board.course_assignment_id != entry.id:
            abort(404)
        done = boards.withdraw(db, board, actor_id=viewer().id, now=utc_now())
    flash("That board is no longer shown." if done else "That board was withdrawn before.", "good" if done else "warn")
    return redirect(url_for("boards.show", course_slug=course_slug, slug=slug), code=303)


def _page(course_slug: str, slug: str, *, error: str = "", nickname: str = "", title: str = "") -> str:
    """Names are those that students chose; instructors see who is behind them when they ask for it."""
    with house().database.read() as db:
        shown = _asked_for(db, course_slug, slug)
        entry, assignment = shown.entry, house().catalog.load(slug)
        teaches = viewer().teaches_in(entry.course_id)
        window = course.window(db, entry=entry, assignment=assignment, user_id=viewer().id)
        own = lists.own_submissions(db, entry_id=entry.id, user_id=viewer().id)
        counted = boards.counted(own, window)
        graded = [row for row in own if row.result and row.result.verdict != "held"]
        trend = [(row, window.at(row.submitted_at)) for row in graded[:TREND]]
        charts = _trend_charts(trend)
        enrolled = _enrolled(db, entry)
        page = lists.cut(range(shown.lineup.total), page=request.args.get("page", 1, int), per_page=PER_PAGE)
        return render_template(
            "leaderboard.html",
            entry=entry,
            assignment=assignment,
            shown=shown,
            latest=_latest(shown),
            gpus=boards.gpus(db, entry.id),
            page=page,
            lines=shown.lineup.lines((page.number - 1) * PER_PAGE, page.number * PER_PAGE),
            teaches=teaches,
            who=teaches and "who" in request.args,
            timed=shown.lineup.timed,
            limited=shown.lineup.limited,
            enrolled=enrolled,
            own_name=course.shown_name(enrolled.nickname, enrolled.anonymous) if enrolled else "",
            trend=trend,
            counted_id=counted.id if counted else None,
            charts=charts,
            drawn=house().gallery.drawn(charts, wait_s=DRAWING_WAIT_S),
            asked={"course_slug": entry.course.slug, "slug": entry.slug} | _query(shown),
            key=secrets.token_urlsafe(16),
            error=error,
            nickname=nickname,
            title=title,
        )


def _asked_for(db: Session, course_slug: str, slug: str) -> Shown:
    entry = assignment_or_404(db, course_slug, slug)
    frozen = boards.frozen(db, entry.id)
    wanted = request.args.get("frozen", 0, int)
    board = next((one for one in frozen if one.id == wanted), None)
    if wanted and board is None:
        abort(404)
    gpu = request.args.get("gpu", "")[:120] or None
    if board is not None:
        lineup = boards.frozen_lineup(db, board, entry)
        gpu = board.gpu
    else:
        lineup = boards.live(db, entry, house().catalog.load(slug), gpu=gpu)
    return Shown(entry=entry, frozen=frozen, board=board, gpu=gpu, lineup=lineup)


def _latest(shown: Shown) -> list[Board]:
    """The frozen boards that the page names: the latest, and the one that is shown."""
    latest = shown.frozen[:OFFICIAL]
    return latest if shown.board is None or shown.board in latest else [*latest[:-1], shown.board]


def _query(shown: Shown) -> dict[str, str | int]:
    """The part of the address that says which board it is."""
    if shown.board is not None:
        return {"frozen": shown.board.id}
    return {"gpu": shown.gpu} if shown.gpu else {}


def _enrolled(db: Session, entry: CourseAssignment) -> Enrollment | None:
    """The enrolment of a student who looks at the board; staff and instructors stand on none."""
    found = course.enrollment_of(db, course_id=entry.course_id, user_id=viewer().id)
    return found if found is not None and found.role is Role.STUDENT else None


def _trend_charts(trend: list[tuple[Submission, Lateness]]) -> list[BarChart]:
    """One's own graded hand-ins, oldest first: points, and speed-up where it was measured. None for a single one."""
    graded = [(f"#{row.id}", row.result, at) for row, at in reversed(trend) if row.result]
    if len(graded) < 2:
        return []
    points = tuple(Bar(name=name, whose=Whose.OWN, value=at.counted(result.points)) for name, result, at in graded)
    most = max(result.out_of for _, result, _ in graded)
    level = Level(name="the most", value=most)
    charts = [BarChart(title="My points, hand-in by hand-in", unit="points", bars=points, levels=(level,))]
    timed = tuple(
        Bar(name=name, whose=Whose.OWN, value=result.speedup, low=result.speedup_low, high=result.speedup_high)
        for name, result, _ in graded
        if result.speedup is not None
    )
    if len(timed) > 1:
        charts.append(BarChart(title="My speed-up over naive, hand-in by hand-in", unit="times", bars=timed))
    return charts
