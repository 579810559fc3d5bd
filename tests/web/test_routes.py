"""Every route for every role, in one table: who is let in, who is turned away, and that nothing else happens."""

from __future__ import annotations

import dataclasses
import json
import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest
from flask import Response
from flask.testing import FlaskClient
from web_campus import COURSE, PASSWORD, SLUG, Active, Campus, addresses, field_of, make_campus, stored

from grader import boards, course
from grader.db import Database
from grader.measurement import Evidence
from grader.models import Role

# of ada's things: she herself, a fellow student, somebody who is in no course, the instructor of another course that
# sets the same assignment, the instructor of the course, and staff
ROLES = ("nobody", "owner", "fellow", "stranger", "other-instructor", "instructor", "staff")
PEOPLE = dict(zip(ROLES[1:], ("ada", "ben", "eve", "alan", "grace", "root"), strict=True))

# statuses in the order of ROLES; `log-in` is a redirect to that page, `home` one to the first page
TABLE = """
static                      GET   200     200  200  200  200  200  200
health                      GET   200     200  200  200  200  200  200
auth.log_in                 GET   200     home home home home home home
auth.log_in                 POST  303     303  303  303  303  303  303
auth.log_out                POST  log-in  303  303  303  303  303  303
auth.password               GET   log-in  200  200  200  200  200  200
auth.password               POST  401     303  303  303  303  303  303
home.index                  GET   log-in  200  200  200  200  200  200
lesson.memory               GET   log-in  200  200  200  200  200  200
assignments.show            GET   log-in  200  200  404  404  200  200
assignments.starter         GET   log-in  200  200  404  404  200  200
assignments.compare         GET   log-in  200  404  404  404  200  200
boards.show                 GET   log-in  200  200  404  404  200  200
boards.export               GET   log-in  200  200  404  404  200  200
boards.official             GET   log-in  200  200  404  404  200  200
boards.appear               POST  401     303  303  404  404  404  404
boards.freeze               POST  401     404  404  404  404  303  303
boards.withdraw             POST  401     404  404  404  404  303  303
submissions.hand_in         POST  401     303  303  404  404  303  303
submissions.show            GET   log-in  200  404  404  404  200  200
submissions.report          GET   401     200  404  404  404  200  200
submissions.report_file     GET   log-in  200  404  404  404  200  200
submissions.facts           GET   401     404  404  404  404  200  200
submissions.source          GET   log-in  200  404  404  404  200  200
submissions.status          GET   401     200  404  404  404  200  200
submissions.events          GET   401     200  404  404  404  200  200
submissions.cancel          POST  401     303  404  404  404  303  303
courses.show                GET   log-in  404  404  404  404  200  200
courses.grades              GET   log-in  404  404  404  404  200  200
courses.extend              POST  401     404  404  404  404  303  303
staff.all_submissions       GET   log-in  404  404  404  404  200  200
staff.queue                 GET   log-in  404  404  404  200  200  200
staff.workers               GET   log-in  404  404  404  200  200  200
staff.rejudge               POST  401     404  404  404  404  303  303
staff.run_again             POST  401     404  404  404  404  303  303
staff.release               POST  401     404  404  404  404  303  303
staff.confirm               POST  401     404  404  404  404  303  303
"""
ROWS = {(endpoint, method): tuple(told) for endpoint, method, *told in map(str.split, TABLE.split("\n")[1:-1])}
ACTS = [endpoint for endpoint, method in ROWS if method == "POST"]
FORMS: dict[str, dict[str, str]] = {
    "auth.log_in": {"name": "eve", "password": PASSWORD},
    "auth.password": {"password": PASSWORD, "new": "four words of mine", "again": "four words of mine"},
    "boards.appear": {"nickname": "violet heron"},
    "boards.freeze": {"title": "Week 3"},
    "submissions.hand_in": {"source": "x = 1\n"},
    "courses.extend": {"student": "ada", "assignment": SLUG, "until": "2030-03-09T12:00", "reason": "ill"},
    "staff.release": {"reason": "I read it."},
    "staff.confirm": {"reason": "I read it."},
}
CHANGES_NOTHING = {"auth.log_in"}
DOWNLOADS = {
    "assignments.starter": f"{SLUG}.py", "courses.grades": f"{COURSE}-grades.csv",
    "boards.export": f"{SLUG}-leaderboard.csv",
    "submissions.report_file": "report-1.html", "submissions.source": "submission-1.py",
}  # fmt: skip
TYPES = {
    "static": "text/css; charset=utf-8", "health": "application/json",
    "assignments.starter": "text/x-python; charset=utf-8", "boards.export": "text/csv; charset=utf-8",
    "courses.grades": "text/csv; charset=utf-8",
    "submissions.source": "text/x-python; charset=utf-8", "submissions.status": "application/json",
    "submissions.events": "text/event-stream; charset=utf-8",
}  # fmt: skip
MARK = "zebra_7341"  # in ada's file, so in nothing that is not for her or her teachers


@dataclass
class World:
    """A campus in which everything that has an address is there; each test finds it as it was."""

    campus: Campus
    kept: Path
    held: int = 1
    judged: int = 2
    waiting: int = 3
    board: int = 1

    @property
    def path(self) -> str:
        return str(self.campus.database.engine.url.database)

    def restore(self) -> None:
        with closing(sqlite3.connect(self.kept)) as kept, closing(sqlite3.connect(self.path)) as used:
            kept.backup(used)
        self.campus.rung.clear()

    def rows(self) -> list[str]:
        """All that the database holds."""
        with closing(sqlite3.connect(self.path)) as used:
            return list(used.iterdump())

    def address(self, endpoint: str, method: str) -> str:
        submission = {"submissions.cancel": self.waiting, "staff.rejudge": self.judged}.get(endpoint, self.held)
        known = {"course_slug": COURSE, "slug": SLUG, "submission_id": submission, "board_id": self.board}
        found = addresses(self.campus.app, method, filename="tilegrade.css", **known)[endpoint]
        return f"{found}?pick={self.held}" if endpoint == "assignments.compare" else found

    def client(self, role: str) -> FlaskClient:
        return self.campus.app.test_client() if role == "nobody" else self.campus.client(PEOPLE[role])


@pytest.fixture(scope="module")
def built(new_sqlite_url: Callable[[], str], tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("routes")
    campus = make_campus(Database(new_sqlite_url()), folder / "data")
    for name, role in (("ada", Role.STUDENT), ("ben", Role.STUDENT), ("eve", None), ("grace", Role.INSTRUCTOR)):
        campus.person(name, role, password=PASSWORD)
    alan, root = (campus.person(name, None, password=PASSWORD) for name in ("alan", "root"))
    sign = Evidence(kind="clock", message="odd")
    found = stored("ok-block-pointers")
    campus.graded("ada", dataclasses.replace(found, evidence=(sign,)), f"{MARK} = 1\n")
    judged = campus.graded("ada", found, f"{MARK} = 2\n")
    campus.hand_in("ada", f"{MARK} = 3\n")
    with campus.database.write() as db:
        other = course.create_course(db, slug="other", title="Other", now=campus.now)
        course.set_assignment(db, course_id=other.id, slug=SLUG, now=campus.now)
        course.enrol(db, course_id=other.id, user_id=alan.id, role=Role.INSTRUCTOR, now=campus.now)
        db.merge(root).is_staff = True
        db.execute(course.CourseAssignment.__table__.update().values(deadline=datetime(2030, 3, 8, tzinfo=UTC)))
        entry = course.assignment_in(db, course_slug=COURSE, slug=SLUG)
        assert entry is not None
        boards.freeze(db, entry, campus.catalog.load(SLUG), title="Week 1", actor_id=None, now=campus.now)
        # what judging again would change
        db.execute(boards.Result.__table__.update().where(boards.Result.submission_id == judged).values(points=1.0))
    world = World(campus, folder / "kept.db")
    for role in ROLES:
        world.client(role)
    with closing(sqlite3.connect(world.path)) as used, closing(sqlite3.connect(world.kept)) as kept:
        used.backup(kept)
    return world


@pytest.fixture
def world(built: World) -> Iterator[World]:
    built.restore()
    yield built
    built.restore()


def token(client: FlaskClient) -> str:
    """What a form of that browser's pages carries."""
    return field_of(client.get("/log-in", follow_redirects=True).text, "csrf_token")


def told(answer: Response) -> str:
    """A status as the table has it."""
    where = answer.headers.get("Location", "")
    if answer.status_code in (302, 303) and where.partition("?")[0] == "/log-in" and "Set-Cookie" not in answer.headers:
        return "log-in"
    return "home" if (answer.status_code, where) == (302, "/") else str(answer.status_code)


def inspect(endpoint: str, answer: Response) -> None:
    """What holds of every answer, whoever asked: its headers lock it, and it holds nothing that a browser would run."""
    headers = answer.headers
    policy = dict(part.strip().partition(" ")[::2] for part in headers["Content-Security-Policy"].split(";"))
    assert policy == {
        "default-src": "'none'", "script-src": "'self'", "style-src": "'self'", "img-src": "'self'",
        "connect-src": "'self'", "form-action": "'self'", "base-uri": "'none'", "frame-ancestors": "'none'",
    }  # fmt: skip
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "same-origin"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert headers["Cross-Origin-Opener-Policy"] == "same-origin"
    assert "Access-Control-Allow-Origin" not in headers
    assert ("no-store" in headers["Cache-Control"]) is (endpoint != "static")
    good = answer.status_code == 200
    assert headers["Content-Type"] == TYPES.get(endpoint if good else "", "text/html; charset=utf-8")
    name = DOWNLOADS.get(endpoint) if good else None
    shown = "inline; filename=tilegrade.css" if endpoint == "static" else None
    assert headers.get("Content-Disposition") == (f'attachment; filename="{name}"' if name else shown)
    if answer.mimetype == "text/html" and endpoint != "submissions.report_file":
        assert Active(answer.text).found == []
    for cookie in headers.getlist("Set-Cookie"):
        assert "HttpOnly" in cookie
        assert "SameSite=Lax" in cookie


def test_the_table_has_every_route(world: World) -> None:
    rules = world.campus.app.url_map.iter_rules()
    routes = {(rule.endpoint, method) for rule in rules for method in (rule.methods or set()) - {"HEAD", "OPTIONS"}}
    assert set(ROWS) == routes, "say in TABLE who may go there"
    assert {len(told) for told in ROWS.values()} == {len(ROLES)}


@pytest.mark.parametrize(("endpoint", "method"), ROWS, ids=[" ".join(row) for row in ROWS])
def test_each_route_is_for_those_who_may(world: World, endpoint: str, method: str) -> None:
    address = world.address(endpoint, method)
    found = []
    for role in ROLES:
        client = world.client(role)
        form = {"csrf_token": token(client), **FORMS.get(endpoint, {})} if method == "POST" else None
        before = world.rows()
        answer = client.open(address, method=method, data=form)
        answer.get_data()  # a stream has to end before the next request begins
        answer.close()
        found.append(told(answer))
        inspect(endpoint, answer)
        acted = method == "POST" and found[-1] == "303" and endpoint not in CHANGES_NOTHING
        assert (world.rows() != before) is acted, role
        if not acted:
            assert world.campus.rung == [], role
        if found[-1] not in ("200", "303"):
            assert MARK not in answer.text, role
        if acted:
            world.restore()
    assert tuple(found) == ROWS[endpoint, method]


@pytest.mark.parametrize("endpoint", ACTS)
def test_no_act_without_its_own_token(world: World, endpoint: str) -> None:
    """Not without one, not with a made-up one, and not with that of somebody else's form."""
    allowed = [role for role, told in zip(ROLES, ROWS[endpoint, "POST"], strict=True) if told == "303"]
    role = "nobody" if endpoint == "auth.log_in" else allowed[0]
    address, client = world.address(endpoint, "POST"), world.client(role)
    client.get("/log-in")
    before = world.rows()
    for forged in (None, "", "forged", token(world.client("fellow"))):
        form = FORMS.get(endpoint, {}) | ({} if forged is None else {"csrf_token": forged})
        # a header names no form of ours either, and a text body is what another site can send without asking
        for sent in ({"data": form}, {"data": json.dumps(form), "content_type": "text/plain"}):
            answer = client.post(address, **sent, headers={"Origin": "https://evil.example"})
            assert answer.status_code == 400
            assert "This form is too old" in answer.text
            inspect(endpoint, answer)
    assert world.rows() == before
    assert world.campus.rung == []
    assert client.get("/").status_code == (302 if role == "nobody" else 200)


@pytest.mark.parametrize("endpoint", ACTS)
def test_no_act_by_following_a_link(world: World, endpoint: str) -> None:
    before = world.rows()
    client = world.client("instructor")
    answer = client.get(world.address(endpoint, "POST"), query_string=FORMS.get(endpoint, {}))
    assert answer.status_code in ((200, 302) if (endpoint, "GET") in ROWS else (405,))
    inspect(endpoint, answer)
    assert world.rows() == before
    if answer.status_code == 405:  # after a refused form the browser stands there: the way back is on the page
        links = re.findall(r'<a class="button main" href="([^"]+)">To the page with that form', answer.text)
        assert [client.get(link).status_code for link in links] == [200]
        assert re.search(r'<p class="head-acts">\s*<a ', answer.text), "what keeps buttons apart"


@pytest.mark.parametrize(
    "address",
    [
        pytest.param("GET /c/other/{slug}/compare?pick={held}", id="file"),
        pytest.param("GET /c/other/{slug}/compare?pick={held}&pick={judged}", id="files"),
        pytest.param("GET /c/other/{slug}/leaderboard?frozen={board}", id="board"),
        pytest.param("GET /c/other/{slug}/leaderboard.csv?frozen={board}", id="board-as-csv"),
        pytest.param("POST /c/other/{slug}/leaderboard/{board}/withdraw", id="withdraw"),
    ],
)
def test_an_address_of_ones_own_course_opens_nothing_of_another(world: World, address: str) -> None:
    method, path = address.format(slug=SLUG, **vars(world)).split()
    client = world.client("other-instructor")
    form = {"csrf_token": token(client)} if method == "POST" else None
    before = world.rows()
    answer = client.open(path, method=method, data=form)
    assert answer.status_code == 404
    assert MARK not in answer.text
    assert world.rows() == before


def test_lists_of_ones_own_course_hold_nobody_of_another(world: World) -> None:
    client = world.client("other-instructor")
    for path in ("/c/other/submissions", f"/c/other/{SLUG}/leaderboard?who=1", "/queue", "/"):
        page = client.get(path)
        assert page.status_code == 200
        assert ">ada<" not in page.text, path
        assert f"/submissions/{world.waiting}" not in page.text, path


@pytest.mark.parametrize(
    ("status", "method", "path"),
    [(404, "GET", "/nowhere"), (405, "DELETE", "/"), (405, "TRACE", "/"), (400, "POST", "/log-in"), (413, "POST", "/")],
)
def test_errors_are_locked_as_pages_are(world: World, status: int, method: str, path: str) -> None:
    client = world.client("owner" if path == "/" else "nobody" if status == 400 else "fellow")
    if status == 413:
        path = world.address("submissions.hand_in", "POST")
    answer = client.open(path, method=method, data={"source": "x" * (2 << 20)} if status == 413 else None)
    assert answer.status_code == status
    inspect("errors", answer)


@pytest.mark.parametrize(
    "path",
    [
        "/.git/config", "/static/", "/static/../security.py", "/static/%2e%2e/security.py", "/static/..%2fsecurity.py",
        "/static//etc/passwd", "/static/%2fetc%2fpasswd", "/templates/base.html", "/tilegrade.db", "/secret_key",
    ],
)  # fmt: skip
def test_only_our_own_files_are_served(world: World, path: str) -> None:
    nobodys, staffs = (world.client(role).get(path) for role in ("nobody", "staff"))
    assert nobodys.status_code == 404 or told(nobodys) == "log-in"
    assert staffs.status_code == 404
    inspect("errors", nobodys)
    inspect("errors", staffs)


@pytest.mark.parametrize("path", ["/queue//", "/static//tilegrade.css", "/submissions//1", "/c//demo/submissions"])
def test_no_redirect_names_a_host(world: World, path: str) -> None:
    """It would be whatever host the request said it was for."""
    for role in ("nobody", "staff"):
        answer = world.client(role).get(path)
        assert answer.headers.get("Location", "/").startswith("/")
        inspect("errors", answer)


def test_over_https_every_answer_says_to_stay_there(sqlite_database: Database, tmp_path: Path) -> None:
    campus = make_campus(sqlite_database, tmp_path / "data", SECURE_COOKIES="yes")
    for path in ("/log-in", "/", "/nowhere", "/static/tilegrade.css", "/health"):
        with campus.app.test_client().get(path, base_url="https://grader.example") as answer:
            assert answer.headers["Strict-Transport-Security"] == "max-age=31536000"
            assert all(cookie.startswith("__Host-") for cookie in answer.headers.getlist("Set-Cookie"))
