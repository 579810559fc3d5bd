"""The web pages. `create_app` builds the Flask application; each subject has its own blueprint."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from threading import BoundedSemaphore

from flask import Flask, url_for
from flask.sessions import SecureCookieSessionInterface
from flask.typing import ResponseReturnValue
from flask_compress import Compress
from flask_wtf.csrf import CSRFProtect
from sqlalchemy import text as sql
from werkzeug.middleware.proxy_fix import ProxyFix

from grader import __version__, accounts, course, figures
from grader.boards import MAX_TITLE_CHARACTERS
from grader.course import Catalog
from grader.db import Database
from grader.settings import Settings
from grader.submissions import MAX_REASON
from grader.web import (
    assignments,
    auth,
    boards,
    charts,
    courses,
    errors,
    handout,
    home,
    lesson,
    security,
    staff,
    submissions,
    text,
    words,
)
from grader.web.house import EXTENSION, House, house
from grader.web.shelf import Shelf
from grader.wording import Hostile, about, bytes_text, count, one_line, plain, points_text

# what a form may add to the largest file: field names, boundaries, and the pasted text's line ends
FORM_OVERHEAD_BYTES = 144 * 1024
# live status streams at once in one process; each holds a thread, so the rest are asked to poll
MAX_STREAMS = 8
DRAWING_WAIT_S = 1.0  # of a page whose subject is one chart
# for waitress
SERVER_OPTIONS: dict[str, int] = {
    "threads": 16,  # twice the streams, so that pages never wait for one
    "channel_request_lookahead": 1,  # without it waitress does not see that a browser has left
    "max_request_body_size": 16 << 20,  # what is larger is cut off; what is smaller gets our own page
}

__all__ = ["SERVER_OPTIONS", "House", "create_app", "warm_up"]


def create_app(
    settings: Settings,
    *,
    ring: Callable[[str], object],
    database: Database | None = None,
    catalog: Catalog | None = None,
    max_streams: int = MAX_STREAMS,
) -> Flask:
    """The application. It neither migrates the database nor starts anything.

    Args:
        ring: tells the workers of a device that a submission waits, as `Doorbell.ring` does. Called after the
            commit; it must not raise when the broker is away, for the sweep rings again.
        max_streams: keep it well below the number of threads that the web server has.
    """
    app = Flask(__name__)
    app.session_interface = _Sessions()
    app.url_map.merge_slashes = False  # the router's own redirects name whatever host the request says it is for
    whole = timedelta(hours=settings.session_hours)
    app.config.update(
        SECRET_KEY=settings.read_secret_key(),
        MAX_CONTENT_LENGTH=settings.max_source_bytes + FORM_OVERHEAD_BYTES,
        MAX_FORM_MEMORY_SIZE=settings.max_source_bytes + FORM_OVERHEAD_BYTES,
        MAX_FORM_PARTS=20,
        SESSION_COOKIE_NAME="__Host-tilegrade" if settings.secure_cookies else "tilegrade",
        SESSION_COOKIE_HTTPONLY=True,
        SESSION_COOKIE_SAMESITE="Lax",
        SESSION_COOKIE_SECURE=settings.secure_cookies,
        PERMANENT_SESSION_LIFETIME=whole,
        SESSION_REFRESH_EACH_REQUEST=False,
        SEND_FILE_MAX_AGE_DEFAULT=timedelta(days=30),
        WTF_CSRF_TIME_LIMIT=None,  # as long as the session; a form left open over lunch still works
        WTF_CSRF_SSL_STRICT=False,  # the referrer is not ours to demand; the token and SameSite suffice
    )
    if settings.proxies:
        app.wsgi_app = ProxyFix(  # type: ignore[method-assign]
            app.wsgi_app, x_for=settings.proxies, x_proto=settings.proxies, x_host=settings.proxies
        )
    app.extensions[EXTENSION] = House(
        settings=settings,
        database=database or Database(settings.database_url),
        catalog=catalog or Catalog(settings.assignments_dir),
        ring=ring,
        streams=BoundedSemaphore(max_streams),
        gallery=charts.Gallery(settings.data_dir / "charts"),
        shelf=Shelf(),
    )
    security.guard(app)
    CSRFProtect(app)
    # pages hold a token that must not be guessed from their size (BREACH): SameSite cookies keep other sites from
    # asking for them over and over
    Compress(app)
    errors.register(app)
    for blueprint in (auth.bp, home.bp, assignments.bp, submissions.bp, boards.bp, lesson.bp, courses.bp, staff.bp):
        app.register_blueprint(blueprint)
    app.add_url_rule("/health", "health", _health)
    _equip_templates(app)
    return app


def warm_up(app: Flask) -> None:
    """Do now what the first visitors of a page would wait for. Call it once a process, before it serves."""
    charts.warm_up()
    for name in app.jinja_env.list_templates(extensions=["html"]):
        app.jinja_env.get_template(name)
    # what is there by now stays; looking through all of it for garbage would halt every page for a tenth of a second
    gc.collect()
    gc.freeze()


class _Sessions(SecureCookieSessionInterface):
    digest_method = staticmethod(hashlib.sha256)  # Flask's own is still SHA-1


def _health() -> ResponseReturnValue:
    """For a supervisor: 200 when pages can be answered."""
    with house().database.read() as db:
        db.execute(sql("select 1"))
    return {"status": "ok", "version": __version__}


def _equip_templates(app: Flask) -> None:
    app.jinja_env.trim_blocks = app.jinja_env.lstrip_blocks = True
    app.jinja_env.filters.update(
        visible=plain,
        line=one_line,
        iso=text.iso,
        utc=text.utc,
        with_times=text.with_times,
        points=points_text,
        size=bytes_text,
        decimal=lambda size_bytes: figures.amount(size_bytes, "B"),
        count=count,
        about=about,
        printed=text.printed,
        handout_anchor=handout.anchor,
        with_lines_linked=text.with_lines_linked,
        says=figures.says,
        axes=charts.axes,
        key=charts.key,
        largest=charts.largest,
    )
    app.jinja_env.tests.update(
        hostile=lambda value: isinstance(value, Hostile),
        several=lambda value: isinstance(value, tuple),
        chart=lambda block: isinstance(block, figures.LineChart | figures.BarChart | figures.HeatMap),
        drawable=lambda chart: not figures.is_empty(chart),
        heat_map=lambda chart: isinstance(chart, figures.HeatMap),
    )
    folder = Path(app.static_folder or "")
    stamps = {path.name: hashlib.sha256(path.read_bytes()).hexdigest()[:12] for path in folder.iterdir()}

    def static_url(name: str) -> str:
        # the digest makes a changed file a new address, so that browsers may keep the old one for weeks
        return url_for("static", filename=name, v=stamps[name])

    app.jinja_env.globals.update(
        static_url=static_url,
        # characters of what is typed in, for fields and the words beside them
        least={"password": accounts.MIN_PASSWORD_CHARACTERS},
        most={
            "name": accounts.MAX_NAME_CHARACTERS,
            "why_extended": course.MAX_REASON_CHARACTERS,
            "password": accounts.MAX_PASSWORD_CHARACTERS,
            "nickname": course.MAX_NICKNAME_CHARACTERS,
            "title": MAX_TITLE_CHARACTERS,
            "reason": MAX_REASON,
        },
        version=__version__,
        state_of=words.state_of,
        ungraded_of=words.ungraded_of,
        act_of=words.act_of,
        stages_now=words.under_way,
        verdict_of=words.verdict_of,
        axis_of=words.axis_of,
        sketch=lambda chart: house().gallery.drawn([chart], wait_s=DRAWING_WAIT_S, keep=False).get(chart),
    )
