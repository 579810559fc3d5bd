"""The page of a course, for those who teach it: what is set, who is in it, and granting extensions."""

from __future__ import annotations

import csv
import io
import re
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest
from flask.testing import FlaskClient
from sqlalchemy import select
from web_campus import COURSE, SLUG, Campus, field_of, stored

from grader import course
from grader.models import AuditEvent, Extension, Role

PAGE = f"/c/{COURSE}"
DEADLINE = datetime(2030, 3, 8, 23, 59, tzinfo=UTC)
LATER = "2030-03-10T12:00"


@pytest.fixture
def grace(campus: Campus) -> FlaskClient:
    """She teaches the course, whose only assignment is due in 2030."""
    with campus.database.write() as db:
        found = course.find_course(db, COURSE)
        assert found is not None
        course.set_assignment(db, course_id=found.id, slug=SLUG, deadline=DEADLINE, now=campus.now)
    campus.person("ada", nickname="teal-owl-12")
    return campus.client("grace", Role.INSTRUCTOR)


def grant(client: FlaskClient, **changed: str):
    form = {"student": "ada", "assignment": SLUG, "until": LATER, "reason": "in hospital"} | changed
    token = field_of(client.get(PAGE).text, "csrf_token")
    return client.post(f"{PAGE}/extensions/grant", data=form | {"csrf_token": token})


def granted(campus: Campus) -> list[Extension]:
    with campus.database.read() as db:
        return list(db.scalars(select(Extension)))


def test_it_shows_what_is_set_and_who_is_there(campus: Campus, grace: FlaskClient) -> None:
    html = grace.get(PAGE).text
    for wanted in (
        "FlashAttention, forward",
        "8 Mar 2030, 23:59 UTC",
        "<code>cpu</code>",
        "teal-owl-12",
        ">instructor<",
    ):
        assert wanted in html
    assert re.findall(r'<tr class="link">\s*<th scope="row"><a [^>]*>(\w+)</a>', html) == ["grace", "ada"]


def test_it_says_how_many_students_handed_in(campus: Campus, grace: FlaskClient) -> None:
    campus.person("ben")
    for name in ("grace", "ada", "ada"):
        campus.hand_in(name)
    assert re.findall(r">(\d+ of \d+ students?)</td>", grace.get(PAGE).text) == ["1 of 2 students"]


def test_an_extension_is_granted_and_changed_and_taken_back(campus: Campus, grace: FlaskClient) -> None:
    answer = grant(grace)
    assert (answer.status_code, answer.headers["Location"]) == (303, PAGE)
    html = grace.get(PAGE).text
    assert "ada may hand in flash-attention-forward until 10 Mar 2030, 12:00 UTC." in html
    assert "in hospital" in html
    assert "your own extension" in campus.client("ada").get(f"{PAGE}/{SLUG}").text
    grant(grace, until="2030-03-12T08:30", reason="")
    grant(grace, until="2030-03-12T08:30", reason="")  # a second click
    (one,) = granted(campus)
    assert (one.until, one.reason) == (datetime(2030, 3, 12, 8, 30, tzinfo=UTC), "in hospital")
    with campus.database.read() as db:
        acts = db.scalars(select(AuditEvent).where(AuditEvent.action == "grant-extension")).all()
    assert {act.actor_id for act in acts} == {campus.people["grace"].id}
    grant(grace, until="2030-03-08T23:59")
    assert granted(campus) == [], "so that nothing of it holds when the deadline is moved forward"
    assert "your own extension" not in campus.client("ada").get(f"{PAGE}/{SLUG}").text


def test_two_clicks_at_once_grant_one_extension(campus: Campus, grace: FlaskClient) -> None:
    clients = [campus.client("grace", Role.INSTRUCTOR) for _ in range(4)]
    with ThreadPoolExecutor(len(clients)) as pool:
        answers = list(pool.map(grant, clients))
    assert [answer.status_code for answer in answers] == [303] * len(clients)
    assert len(granted(campus)) == 1


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        pytest.param({"student": "nobody"}, "Nobody in this course has that name.", id="no-such-account"),
        pytest.param({"student": "stranger"}, "Nobody in this course has that name.", id="not-in-the-course"),
        pytest.param({"until": "2030-03-08T23:00"}, "an extension must end later", id="before-the-deadline"),
        pytest.param({"until": "soon"}, "Say until when", id="no-moment"),
        pytest.param({"until": ""}, "Say until when", id="nothing"),
        pytest.param({"assignment": "online-softmax"}, "Choose an assignment of this course.", id="not-set"),
    ],
)
def test_what_cannot_be_granted_says_why_and_keeps_what_was_typed(
    campus: Campus, grace: FlaskClient, changed: dict[str, str], said: str
) -> None:
    campus.person("stranger", None)
    answer = grant(grace, **changed)
    assert answer.status_code == 400
    assert said in answer.text
    assert f'value="{changed.get("student", "ada")}"' in answer.text
    assert 'value="in hospital"' in answer.text
    assert granted(campus) == []


def test_who_has_an_extension_can_be_listed_alone(campus: Campus, grace: FlaskClient) -> None:
    campus.person("ben")
    grant(grace)
    html = grace.get(f"{PAGE}?extended=1").text
    assert re.findall(r'<tr class="link">\s*<th scope="row"><a [^>]*>(\w+)</a>', html) == ["ada"]


def test_the_gradebook_is_that_of_the_command(campus: Campus, grace: FlaskClient) -> None:
    number = campus.graded("ada", stored("stored-scores"))
    campus.person("ben")
    rows = list(csv.DictReader(io.StringIO(grace.get(f"{PAGE}/grades.csv").text)))
    assert [(row["user_name"], row["submission_id"], row["points"]) for row in rows] == [
        ("ada", str(number), "40.0"),
        ("ben", "", ""),
    ]


def test_a_closed_and_an_over_assignment_are_called_so(campus: Campus, grace: FlaskClient) -> None:
    with campus.database.write() as db:
        entry = course.assignment_in(db, course_slug=COURSE, slug=SLUG)
        assert entry is not None
        entry.deadline = campus.now - timedelta(days=1)
    assert "Over</span>" in grace.get(PAGE).text
    with campus.database.write() as db:
        entry = course.assignment_in(db, course_slug=COURSE, slug=SLUG)
        assert entry is not None
        course.close_assignment(db, entry=entry, reason="a <b>wrong</b> probe", actor_id=None, now=campus.now)
    html = grace.get(PAGE).text
    assert "Closed</span>" in html
    assert "a &lt;b&gt;wrong&lt;/b&gt; probe" in html
