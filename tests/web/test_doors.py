"""Who gets in and how long: log-in and sessions. What each role then sees: test_routes.py."""

from __future__ import annotations

import hashlib
import re
import time
from base64 import urlsafe_b64decode
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import pytest
from flask.testing import FlaskClient
from web_campus import COURSE, PASSWORD, SLUG, Campus, field_of, make_campus, stored

from grader import accounts
from grader.db import Database
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
        pytest.param("/\r\nSet-Cookie: x=1", False, id="line-ends"),
        pytest.param("\\\\evil.example", False, id="two-backslashes"),
        pytest.param("/queue\\..\\\\evil.example", False, id="backslash-within"),
        pytest.param("https:evil.example", False, id="scheme-without-slashes"),
        pytest.param("javascript:alert(1)", False, id="script"),
        pytest.param(" //evil.example", False, id="blank-before"),
        pytest.param("%2f%2fevil.example", False, id="encoded"),
        pytest.param("///evil.example", False, id="three-slashes"),
        pytest.param("queue", False, id="relative"),
        pytest.param("", False, id="empty"),
        pytest.param(None, False, id="absent"),
    ],
)
def test_log_in_sends_nobody_to_another_host(target: str | None, allowed: bool) -> None:
    assert (local_path(target) is not None) is allowed


EVIL_TARGETS = ["//evil.example", "/\\evil.example", "https://evil.example", "%2f%2fevil.example", "/%2f/evil.example"]


@pytest.mark.parametrize("target", EVIL_TARGETS)
def test_no_way_through_the_log_in_leaves_this_host(sqlite_campus: Campus, target: str) -> None:
    """Before the log-in, by it, after it, and by a second click on it; whatever host the request says it is for."""
    sqlite_campus.person("ada", password=PASSWORD)
    client = sqlite_campus.app.test_client()
    here = {"Host": "evil.example"}
    asked = client.get("/queue", query_string={"next": target}, headers=here)
    token = field_of(client.get("/log-in", query_string={"next": target}, headers=here).text, "csrf_token")
    form = {"csrf_token": token, "name": "ada", "password": PASSWORD, "next": target}
    answers = [
        asked,
        client.post("/log-in", data=form, headers=here),
        client.post("/log-in", data=form, headers=here),
        client.get("/log-in", query_string={"next": target}, headers=here),
    ]
    assert [answer.status_code for answer in answers] == [302, 303, 303, 302]
    for answer in answers:
        where = urlsplit(urljoin("http://grader.example/", answer.headers["Location"]))
        assert (where.scheme, where.hostname) == ("http", "grader.example")


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


def failures(campus: Campus, n: int, **environ: str) -> list[int]:
    client = campus.app.test_client()
    client.environ_base.update(environ)
    return [log_in(client, "ada", "wrong").status_code for _ in range(n)]


@pytest.mark.parametrize(
    ("proxies", "forwarded", "braked"),
    [
        pytest.param("0", "203.0.113.{i}", True, id="nobody-is-believed"),
        pytest.param("1", "203.0.113.{i}, 198.51.100.7", True, id="only-what-our-proxy-saw"),
        pytest.param("1", "198.51.100.7, 203.0.113.{i}", False, id="other-people-behind-our-proxy"),
    ],
)
def test_no_header_of_a_browsers_own_gives_more_tries(
    sqlite_database: Database, tmp_path: Path, proxies: str, forwarded: str, braked: bool
) -> None:
    campus = make_campus(sqlite_database, tmp_path / "data", LOGIN_FAILURES="2", PROXIES=proxies)
    campus.person("ada", password=PASSWORD)
    found = [failures(campus, 1, HTTP_X_FORWARDED_FOR=forwarded.format(i=i))[0] for i in range(3)]
    assert found == [401, 401, 429 if braked else 401]


def test_a_host_with_many_addresses_has_no_more_tries_and_others_are_not_locked_out(
    sqlite_database: Database, tmp_path: Path
) -> None:
    """An IPv6 host has 2**64 of its own. Wrong passwords from elsewhere keep nobody from logging in."""
    campus = make_campus(sqlite_database, tmp_path / "data", LOGIN_FAILURES="2")
    campus.person("ada", password=PASSWORD)
    assert [failures(campus, 1, REMOTE_ADDR=f"2001:db8::{i:x}")[0] for i in range(3)] == [401, 401, 429]
    elsewhere = campus.app.test_client()
    elsewhere.environ_base.update(REMOTE_ADDR="2001:db8:0:1::1")
    assert log_in(elsewhere, "ada", PASSWORD).status_code == 303


@pytest.mark.parametrize("name", ["ADA", " ada ", "Ada\t"])
def test_one_name_written_otherwise_gives_no_more_tries(sqlite_database: Database, tmp_path: Path, name: str) -> None:
    campus = make_campus(sqlite_database, tmp_path / "data", LOGIN_FAILURES="2")
    campus.person("ada", password=PASSWORD)
    assert failures(campus, 2) == [401, 401]
    assert log_in(campus.app.test_client(), name, PASSWORD).status_code == 429


def test_no_password_is_written_into_the_log(sqlite_campus: Campus, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(0)
    sqlite_campus.person("ada", password=PASSWORD)
    client = sqlite_campus.app.test_client()
    assert log_in(client, "ada", "wrong and secret").status_code == 401
    assert log_in(client, "ada", PASSWORD).status_code == 303
    assert PASSWORD not in caplog.text
    assert "wrong and secret" not in caplog.text


def change_password(client: FlaskClient, present: str, new: str, again: str | None = None):
    token = field_of(client.get("/password").text, "csrf_token")
    form = {"csrf_token": token, "password": present, "new": new, "again": new if again is None else again}
    return client.post("/password", data=form)


def test_a_password_is_changed_by_who_knows_the_present_one(campus: Campus) -> None:
    campus.person("ada", password=PASSWORD)
    client, elsewhere = campus.client("ada"), campus.client("ada")
    before = cookie_of(client)
    assert change_password(client, PASSWORD, "four words of mine").status_code == 303
    assert "Your password is changed" in client.get("/").text
    assert elsewhere.get("/").status_code == 302
    assert with_cookie(campus, before).get("/").status_code == 302
    assert log_in(campus.app.test_client(), "ada", PASSWORD).status_code == 401
    assert log_in(campus.app.test_client(), "ada", "four words of mine").status_code == 303
    with campus.database.read() as db:
        ((event, who),) = accounts.trail(db, limit=1)
    assert (event.action, who) == ("set-password", "ada")


@pytest.mark.parametrize(
    ("present", "new", "again", "said"),
    [
        pytest.param("wrong password", "four words of mine", None, "not your current password", id="current-wrong"),
        pytest.param("", "four words of mine", None, "not your current password", id="current-left-out"),
        pytest.param(PASSWORD, "four words of mine", "for words of mine", "not the same both times", id="typo"),
        pytest.param(PASSWORD, PASSWORD, None, "the same as the current one", id="unchanged"),
        pytest.param(PASSWORD, "too short", None, "10 to 512 characters", id="short"),
        pytest.param(PASSWORD, "password123", None, "among the first that anybody tries", id="common"),
    ],
)
def test_a_password_that_cannot_be_taken_says_why(
    sqlite_campus: Campus, present: str, new: str, again: str | None, said: str
) -> None:
    sqlite_campus.person("ada", password=PASSWORD)
    client = sqlite_campus.client("ada")
    answer = change_password(client, present, new, again)
    assert answer.status_code == 400
    assert said in answer.text
    assert new not in answer.text
    assert client.get("/").status_code == 200
    assert log_in(sqlite_campus.app.test_client(), "ada", PASSWORD).status_code == 303


def test_the_present_password_is_not_guessed_in_an_open_browser(sqlite_database: Database, tmp_path: Path) -> None:
    campus = make_campus(sqlite_database, tmp_path / "data", LOGIN_FAILURES="2")
    campus.person("ada", password=PASSWORD)
    client = campus.client("ada")
    for _ in range(2):
        assert "not your current password" in change_password(client, "wrong", "four words of mine").text
    assert "Too many wrong passwords" in change_password(client, PASSWORD, "four words of mine").text


@pytest.mark.parametrize(
    "typed", [PASSWORD.upper(), PASSWORD + " ", " " + PASSWORD, PASSWORD[:-1], PASSWORD + "\0", PASSWORD * 30]
)
def test_a_password_is_taken_exactly_as_it_was_typed(sqlite_campus: Campus, typed: str) -> None:
    sqlite_campus.person("ada", password=PASSWORD)
    assert log_in(sqlite_campus.app.test_client(), "ada", typed).status_code == 401


@pytest.mark.parametrize("page", ["/log-in", "/password"])
def test_password_fields_hide_what_is_typed_and_let_managers_help(sqlite_campus: Campus, page: str) -> None:
    client = sqlite_campus.app.test_client() if page == "/log-in" else sqlite_campus.client("ada")
    html = client.get(page).text
    fields = re.findall(r'<input [^>]*name="(?:password|new|again)"[^>]*>', html)
    assert len(fields) == (1 if page == "/log-in" else 3)
    for field in fields:
        assert 'type="password"' in field
        assert re.search(r'autocomplete="(current|new)-password"', field)
        assert "value=" not in field
    assert f'<form method="post" action="{page}">' in html, "a password is in no address"
    assert "onpaste" not in html


def cookie_of(client: FlaskClient) -> str:
    cookie = client.get_cookie("tilegrade")
    assert cookie is not None
    return cookie.value


def with_cookie(campus: Campus, value: str) -> FlaskClient:
    """Another browser, with a copy of that cookie."""
    client = campus.app.test_client()
    client.set_cookie("tilegrade", value)
    return client


def test_a_cookie_from_before_the_log_in_is_nobody_after_it(sqlite_campus: Campus) -> None:
    """Whoever planted it, or read it, has nothing of it."""
    sqlite_campus.person("ada", password=PASSWORD)
    client = sqlite_campus.app.test_client()
    client.get("/log-in")
    planted = cookie_of(client)
    assert log_in(client, "ada", PASSWORD).status_code == 303
    assert cookie_of(client) != planted
    assert with_cookie(sqlite_campus, planted).get("/").status_code == 302
    again = sqlite_campus.app.test_client()
    assert log_in(again, "ada", PASSWORD).status_code == 303
    assert cookie_of(again) != cookie_of(client)


def test_a_session_is_signed_with_sha_256(sqlite_campus: Campus) -> None:
    signature = cookie_of(sqlite_campus.client("ada")).rpartition(".")[2]
    assert len(urlsafe_b64decode(signature + "=" * (-len(signature) % 4))) == hashlib.sha256().digest_size


@pytest.mark.parametrize(
    "forge",
    [
        pytest.param(lambda value: value[:-2] + ("AA" if value[-2:] != "AA" else "BB"), id="signature"),
        pytest.param(lambda value: "x" + value[1:], id="contents"),
        pytest.param(lambda value: value.rpartition(".")[0] + ".", id="unsigned"),
        pytest.param(lambda value: value.split(".")[0], id="contents-alone"),
    ],
)
def test_a_session_that_we_did_not_sign_is_nobodys(sqlite_campus: Campus, forge: Callable[[str], str]) -> None:
    value = cookie_of(sqlite_campus.client("ada"))
    assert with_cookie(sqlite_campus, value).get("/lesson/memory").status_code == 200
    assert with_cookie(sqlite_campus, forge(value)).get("/lesson/memory").status_code == 302


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
    copied, elsewhere, ben = cookie_of(client), sqlite_campus.client("ada"), sqlite_campus.client("ben")
    token = field_of(client.get("/").text, "csrf_token")
    answer = client.post("/log-out", data={"csrf_token": token})
    assert answer.status_code == 303
    assert answer.headers["Clear-Site-Data"] == '"storage"'
    assert client.get("/").status_code == 302
    # a session is a signed cookie, so a copy of it must be refused by what we know of the person
    assert with_cookie(sqlite_campus, copied).get("/").status_code == 302
    assert elsewhere.get("/").status_code == 302
    assert ben.get("/").status_code == 200


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
    second.get("/")
    copy = cookie_of(second)
    assert with_cookie(campus, copy).get("/").status_code == 200
    with campus.database.write() as db:
        ada, ben = accounts.find_user(db, "ada"), accounts.find_user(db, "ben")
        assert ada is not None
        assert ben is not None
        accounts.set_password(db, ada, "another long password", actor_id=None, now=campus.now)
        accounts.close(db, ben, actor_id=None, now=campus.now)
    assert first.get("/").status_code == 302
    assert second.get("/").status_code == 302
    with campus.database.write() as db:
        accounts.reopen(db, db.merge(ben), actor_id=None, now=campus.now)
    assert with_cookie(campus, copy).get("/").status_code == 302  # nor is a copy good once the account is open again


def test_the_cookie_is_out_of_reach_of_scripts_and_other_sites(sqlite_database: Database, tmp_path: Path) -> None:
    campus = make_campus(sqlite_database, tmp_path / "data", SECURE_COOKIES="yes")
    campus.person("ada", password=PASSWORD)
    client = campus.app.test_client()
    cookie = client.get("/log-in", base_url="https://grader.example").headers["Set-Cookie"]
    assert cookie.startswith("__Host-tilegrade=")
    for wanted in ("Secure", "HttpOnly", "Path=/", "SameSite=Lax"):
        assert wanted in cookie
    assert "Domain" not in cookie


@pytest.mark.parametrize("how", ["gzip", "br", "zstd"])
def test_pages_are_sent_compressed_and_streams_are_not(sqlite_campus: Campus, how: str) -> None:
    client = sqlite_campus.client("ada")
    path = f"/submissions/{sqlite_campus.graded('ada', stored('ok-block-pointers'))}"
    asked = {"Accept-Encoding": how}
    report = client.get(path, headers=asked)
    assert report.headers["Content-Encoding"] == how
    assert "Accept-Encoding" in report.headers["Vary"]
    assert len(report.data) < len(client.get(path).data) / 4
    with client.get(f"{path}/events", headers=asked) as stream:
        assert "Content-Encoding" not in stream.headers
