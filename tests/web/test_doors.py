"""Who gets in and who sees what: log-in, sessions, and every route for every role."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from flask.testing import FlaskClient
from web_campus import COURSE, PASSWORD, SLUG, Campus, field_of, make_campus, stored

from grader import accounts, course
from grader.db import Database
from grader.models import Role
from grader.web.security import local_path


def log_in(client: FlaskClient, name: str, password: str, **fields: str):
    token = field_of(client.get("/log-in").text, "csrf_token")
    return client.post("/log-in", data={"csrf_token": token, "name": name, "password": password, **fields})


def test_log_in_leads_to_the_page_that_was_asked_for(campus: Campus) -> None:
    campus.person("ada", password=PASSWORD)
    client = campus.app.test_client()
    asked = client.get(f"/c/{COURSE}/{SLUG}?page=2")
    assert asked.status_code == 302
    assert asked.headers["Location"] == f"/log-in?next=/c/{COURSE}/{SLUG}?page%3D2"
    token = field_of(client.get(asked.headers["Location"]).text, "csrf_token")
    target = f"/c/{COURSE}/{SLUG}?page=2"
    answer = client.post("/log-in", data={"csrf_token": token, "name": " ADA ", "password": PASSWORD, "next": target})
    assert (answer.status_code, answer.headers["Location"]) == (303, target)
    assert client.get(target).status_code == 200


@pytest.mark.parametrize(
    ("target", "allowed"),
    [
        pytest.param("/queue", True, id="path"),
        pytest.param("/c/a/b?x=1", True, id="path-with-query"),
        pytest.param("https://evil.example/", False, id="other-host"),
        pytest.param("//evil.example/", False, id="no-scheme"),
        pytest.param("/\\evil.example", False, id="backslash"),
        pytest.param("/\t/evil.example", False, id="tab"),
        pytest.param("queue", False, id="relative"),
        pytest.param("", False, id="empty"),
        pytest.param(None, False, id="absent"),
    ],
)
def test_log_in_sends_nobody_to_another_host(target: str | None, allowed: bool) -> None:
    assert (local_path(target) is not None) is allowed


@pytest.mark.parametrize("name", ["ada", "nobody", "<script>", "x" * 500])
def test_a_wrong_password_and_an_unknown_name_read_the_same(sqlite_campus: Campus, name: str) -> None:
    sqlite_campus.person("ada", password=PASSWORD)
    answer = log_in(sqlite_campus.app.test_client(), name, "wrong password")
    assert answer.status_code == 401
    assert "That name and password do not fit" in answer.text
    assert "<script>" not in answer.text


def test_log_in_is_braked_and_says_how_long(sqlite_database: Database, tmp_path: Path) -> None:
    campus = make_campus(sqlite_database, tmp_path / "data", LOGIN_FAILURES="2")
    campus.person("ada", password=PASSWORD)
    client = campus.app.test_client()
    assert [log_in(client, "ada", "wrong").status_code for _ in range(3)] == [401, 401, 429]
    refused = log_in(client, "ada", PASSWORD)
    assert refused.status_code == 429
    assert "Wait 15 minutes" in refused.text
    assert client.get("/").status_code == 302


def test_nothing_that_was_in_the_session_before_log_in_survives_it(sqlite_campus: Campus) -> None:
    sqlite_campus.person("ada", password=PASSWORD)
    client = sqlite_campus.app.test_client()
    client.get("/log-in")
    with client.session_transaction() as session:
        session["planted"] = "by somebody else"
        before = session["csrf_token"]
    assert log_in(client, "ada", PASSWORD).status_code == 303
    with client.session_transaction() as session:
        assert "planted" not in session
        assert session.get("csrf_token") != before


def test_log_out_ends_the_session(sqlite_campus: Campus) -> None:
    client = sqlite_campus.client("ada")
    token = field_of(client.get("/").text, "csrf_token")
    assert client.post("/log-out", data={"csrf_token": token}).status_code == 303
    assert client.get("/").status_code == 302


@pytest.mark.parametrize(
    ("since_h", "seen_h", "lives"),
    [
        pytest.param(3.0, 3.0, True, id="lunch"),
        pytest.param(5.0, 5.0, False, id="idle"),
        pytest.param(13.0, 0.1, False, id="old"),
    ],
)
def test_a_session_ends_when_idle_and_when_old(
    sqlite_campus: Campus, since_h: float, seen_h: float, lives: bool
) -> None:
    client = sqlite_campus.client("ada")
    with client.session_transaction() as session:
        session["since"], session["seen"] = time.time() - since_h * 3600, time.time() - seen_h * 3600
    assert (client.get("/").status_code == 200) is lives


def test_a_new_password_and_a_closed_account_end_every_session(campus: Campus) -> None:
    first, second = campus.client("ada"), campus.client("ben")
    with campus.database.write() as db:
        ada, ben = accounts.find_user(db, "ada"), accounts.find_user(db, "ben")
        assert ada is not None
        assert ben is not None
        accounts.set_password(db, ada, "another long password", actor_id=None, now=campus.now)
        ben.active = False
    assert first.get("/").status_code == 302
    assert second.get("/").status_code == 302


def test_the_cookie_is_out_of_reach_of_scripts_and_other_sites(sqlite_database: Database, tmp_path: Path) -> None:
    campus = make_campus(sqlite_database, tmp_path / "data", SECURE_COOKIES="yes")
    campus.person("ada", password=PASSWORD)
    client = campus.app.test_client()
    cookie = client.get("/log-in", base_url="https://grader.example").headers["Set-Cookie"]
    assert cookie.startswith("__Host-tilegrade=")
    for wanted in ("Secure", "HttpOnly", "Path=/", "SameSite=Lax"):
        assert wanted in cookie
    assert "Domain" not in cookie


def paths(campus: Campus) -> dict[str, str]:
    done = campus.graded("ada", stored("ok-block-pointers"))
    return {
        "home": "/",
        "assignment": f"/c/{COURSE}/{SLUG}",
        "starter": f"/c/{COURSE}/{SLUG}/starter.py",
        "leaderboard": f"/c/{COURSE}/{SLUG}/leaderboard",
        "submission": f"/submissions/{done}",
        "report": f"/submissions/{done}/report",
        "source": f"/submissions/{done}/source.py",
        "status": f"/submissions/{done}/status",
        "events": f"/submissions/{done}/events",
        "all": f"/c/{COURSE}/submissions",
        "queue": "/queue",
        "workers": "/workers",
    }


OWN = {"submission", "report", "source", "status", "events"}
STAFF = {"all", "queue", "workers"}


@pytest.mark.parametrize(
    ("who", "closed"),
    [
        pytest.param("ada", STAFF, id="owner"),
        pytest.param("ben", STAFF | OWN, id="fellow-student"),
        pytest.param("grace", set(), id="instructor"),
        pytest.param("eve", STAFF | OWN | {"assignment", "starter", "leaderboard"}, id="not-enrolled"),
        pytest.param("alan", OWN | {"all", "assignment", "starter", "leaderboard"}, id="instructor-of-another-course"),
        pytest.param("root", set(), id="staff"),
    ],
)
def test_each_role_sees_its_pages_and_no_others(campus: Campus, who: str, closed: set[str]) -> None:
    of = paths(campus)
    campus.person("grace", Role.INSTRUCTOR)
    campus.person("eve", None)
    alan, root = campus.person("alan", None), campus.person("root", None)
    with campus.database.write() as db:
        other = course.create_course(db, slug="other", title="Other", now=campus.now)
        course.enrol(db, course_id=other.id, user_id=alan.id, role=Role.INSTRUCTOR)
        db.merge(root).is_staff = True
    client = campus.client(who)
    seen = {name: client.get(path).status_code for name, path in of.items()}
    assert seen == {name: 404 if name in closed else 200 for name in of}


def test_without_log_in_every_page_asks_for_it(sqlite_campus: Campus) -> None:
    client = sqlite_campus.app.test_client()
    asked_by_script = {"status", "events", "report"}
    for name, path in paths(sqlite_campus).items():
        answer = client.get(path)
        assert answer.status_code == (401 if name in asked_by_script else 302), name


ACTS: dict[str, str] = {
    "hand-in": f"/c/{COURSE}/{SLUG}/submissions",
    "re-judge": "/submissions/{done}/re-judge",
    "run-again": "/submissions/{done}/run-again",
    "release": "/submissions/{done}/release",
    "confirm": "/submissions/{done}/confirm",
    "cancel": "/submissions/{waiting}/cancel",
    "log-out": "/log-out",
}


def _acts(campus: Campus) -> dict[str, str]:
    done = campus.graded("ada", stored("ok-block-pointers"))
    waiting = campus.hand_in("ada")
    return {name: path.format(done=done, waiting=waiting) for name, path in ACTS.items()}


@pytest.mark.parametrize("act", ACTS)
def test_no_act_without_its_token(sqlite_campus: Campus, act: str) -> None:
    acts = _acts(sqlite_campus)
    client = sqlite_campus.client("grace", Role.INSTRUCTOR)
    for token in (None, "forged"):
        answer = client.post(acts[act], data={"source": "x = 1\n"} | ({"csrf_token": token} if token else {}))
        assert answer.status_code == 400
        assert "This form is too old" in answer.text
    assert sqlite_campus.rung == []


def test_no_act_by_following_a_link(sqlite_campus: Campus) -> None:
    client = sqlite_campus.client("grace", Role.INSTRUCTOR)
    assert {act: client.get(path).status_code for act, path in _acts(sqlite_campus).items()} == dict.fromkeys(ACTS, 405)


@pytest.mark.parametrize(
    ("who", "act", "status"),
    [
        pytest.param("ada", "cancel", 303, id="owner-withdraws"),
        pytest.param("ben", "cancel", 404, id="other-withdraws"),
        pytest.param("grace", "cancel", 303, id="instructor-withdraws"),
        *(pytest.param("ada", act, 404, id=f"owner-{act}") for act in ("re-judge", "run-again", "release", "confirm")),
        *(
            pytest.param("grace", act, 303, id=f"instructor-{act}")
            for act in ("re-judge", "run-again", "release", "confirm")
        ),
    ],
)
def test_each_act_is_for_those_who_may(
    campus: Campus, who: str, act: str, status: int, token_of: Callable[[FlaskClient], str]
) -> None:
    campus.person("grace", Role.INSTRUCTOR)
    acts = _acts(campus)
    client = campus.client(who)
    assert client.post(acts[act], data={"csrf_token": token_of(client)}).status_code == status


def test_every_answer_carries_the_headers_that_lock_the_page(sqlite_campus: Campus) -> None:
    client = sqlite_campus.client("ada")
    of = paths(sqlite_campus)
    for path in [*of.values(), "/nowhere", "/log-in", "/static/tilegrade.css"]:
        with client.get(path) as answer:
            headers = answer.headers
        assert headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert "unsafe" not in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "same-origin"
        assert ("no-store" in headers["Cache-Control"]) is not path.startswith("/static"), path


def test_no_page_has_inline_script_or_style(sqlite_campus: Campus) -> None:
    client = sqlite_campus.client("grace", Role.INSTRUCTOR)
    for name, path in paths(sqlite_campus).items():
        if name in ("source", "starter", "status", "events"):
            continue
        html = client.get(path).text
        assert " style=" not in html, name
        assert "<style" not in html, name
        assert "javascript:" not in html, name
        assert html.count("<script") == html.count('<script src="/static/'), name


@pytest.mark.parametrize("how", ["gzip", "br", "zstd"])
def test_pages_are_sent_compressed_and_streams_are_not(sqlite_campus: Campus, how: str) -> None:
    client = sqlite_campus.client("ada")
    of = paths(sqlite_campus)
    asked = {"Accept-Encoding": how}
    report = client.get(of["submission"], headers=asked)
    assert report.headers["Content-Encoding"] == how
    assert "Accept-Encoding" in report.headers["Vary"]
    assert len(report.data) < len(client.get(of["submission"]).data) / 4
    with client.get(of["events"], headers=asked) as stream:
        assert "Content-Encoding" not in stream.headers
