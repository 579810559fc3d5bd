"""Every page that answers a GET, whatever it is: its statements are few, and neither they nor it grow with the rows.

Addresses are made from the routes, so a new page is walked from the day it is written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
from flask.testing import FlaskClient
from sqlalchemy import select, update
from web_campus import COURSE, SLUG, Campus, addresses, make_campus, stored

from grader import accounts, boards, course, submissions
from grader.db import Database
from grader.models import Enrollment, Extension, Result, Role, State, Submission, User, WorkerStatus

MOST_STATEMENTS = 12
MOST_LINES = 120  # of every table and list of a page together; no list has more than 50, a report has the most
FEW, SOME, MANY = 10, 70, 300  # no list shows more than 50 rows, so from SOME on pages stay as long as they are
STREAMS = {"submissions.events"}  # never ends; what it asks is what submissions.status asks
NOT_OURS = {"static"}
PEOPLE = {"ada": Role.STUDENT, "grace": Role.INSTRUCTOR}


@dataclass
class Term:
    """A course in which everything that can be listed is there `n` times."""

    campus: Campus
    n: int = 0

    def grow(self, n: int) -> None:
        """Until there are `n` of everything: of this student's, of others', waiting, faulted, kept."""
        campus = self.campus
        if not self.n:
            campus.person("grace", Role.INSTRUCTOR)
            campus.graded("ada", stored("no-rescale-output"))
            campus.graded("ada", stored("stored-scores"))
        with campus.database.write() as db:
            entry = course.assignment_in(db, course_slug=COURSE, slug=SLUG)
            assert entry is not None
            originals = db.execute(select(Submission, Result).join(Submission.result).limit(2)).all()
            for i in range(self.n, n):
                other = User(name=f"student-{i}", password_hash="-", created_at=campus.now)
                db.add(other)
                db.flush()
                db.add(Enrollment(course_id=entry.course_id, user_id=other.id, role=Role.STUDENT, nickname=f"owl-{i}"))
                for who in (campus.people["ada"].id, other.id):
                    for state in (State.DONE, State.QUEUED, State.FAULTED, State.RUNNING):
                        _copy(db, originals[i % 2], user_id=who, state=state, number=i, now=campus.now)
                db.add(Extension(course_assignment_id=entry.id, user_id=other.id, until=campus.now))
                # none is gone before the last page was asked, however long that takes
                seen = campus.now + timedelta(hours=1)
                submissions.report_worker(db, name=f"cpu-{i}@host", device="cpu", status=WorkerStatus.IDLE, now=seen)
                accounts.audit(db, actor_id=None, action="test", submission_id=1, detail=f"{i}", now=campus.now)
            for i in range(self.n // 10, n // 10):
                boards.freeze(
                    db,
                    entry,
                    campus.catalog.load(SLUG),
                    title=f"Week {i}",
                    actor_id=None,
                    now=campus.now + timedelta(seconds=i),
                )
        self.n = n

    def addresses(self) -> dict[str, str]:
        """One address of every page, by its endpoint."""
        with self.campus.database.read() as db:
            ada = self.campus.people["ada"].id
            newest = db.scalars(
                select(Submission.id)
                .where(Submission.user_id == ada, Submission.state == State.DONE)
                .order_by(Submission.id.desc())
                .limit(2)
            ).all()
            board = db.scalar(select(boards.Board.id).limit(1))
        known = {
            "course_slug": COURSE, "slug": SLUG, "submission_id": newest[0], "other_id": newest[1], "board_id": board,
        }  # fmt: skip
        found = addresses(self.campus.app, "GET", filename="tilegrade.css", **known)
        return {endpoint: address for endpoint, address in found.items() if endpoint not in STREAMS | NOT_OURS}


def _copy(db, original, *, user_id: int, state: State, number: int, now) -> None:
    """One more submission like that one, in any state; its result beside it where it has one."""
    submission, result = original
    values = {column.name: getattr(submission, column.name) for column in Submission.__table__.columns}
    at = now - timedelta(minutes=number)
    values |= {
        "id": None, "user_id": user_id, "idempotency_key": f"{state}-{number}", "state": state, "submitted_at": at,
        "queued_at": at, "lease_until": now + timedelta(days=1) if state is State.RUNNING else None,
    }  # fmt: skip
    row = Submission(**values)
    db.add(row)
    db.flush()
    if state is State.DONE:
        of_result = {column.name: getattr(result, column.name) for column in Result.__table__.columns}
        db.add(Result(**of_result | {"submission_id": row.id}))


@pytest.fixture(scope="module", params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def term(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Term]:
    """One course for the whole file, for filling it takes seconds; tests only read it, and grow it in one order."""
    make_url: Callable[[], str] = request.getfixturevalue(f"new_{request.param}_url")
    database = Database(make_url())
    yield Term(make_campus(database, Path(tmp_path_factory.mktemp("term"))))
    database.close()


@dataclass(frozen=True)
class Asked:
    status: int
    statements: int
    html: str


def _walk(term: Term) -> dict[tuple[str, str], Asked]:
    """Every page as each person sees it, by person and endpoint. The second walk counts: the first fills memories."""
    _have_charts_drawn(term)
    found = {}
    for _ in range(2):
        for person, role in PEOPLE.items():
            client = term.campus.client(person, role)
            for endpoint, address in term.addresses().items():
                found[person, endpoint] = _get(term, client, address)
    return found


def _have_charts_drawn(term: Term) -> None:
    """No page waits for its charts for long, and a report is remembered when all of them are there."""
    for person, role in PEOPLE.items():
        term.campus.client(person, role).get(term.addresses()["submissions.show"])
    term.campus.draw()


def _get(term: Term, client: FlaskClient, address: str) -> Asked:
    with term.campus.counted_queries() as sent:
        answer = client.get(address)
        html = answer.text if answer.mimetype == "text/html" else ""
    return Asked(answer.status_code, len([one for one in sent if one.startswith(("SELECT", "WITH"))]), html)


@pytest.mark.timeout(300)
def test_no_page_asks_more_or_grows_when_the_rows_do(term: Term) -> None:
    term.grow(FEW)
    few = _walk(term)
    term.grow(SOME)
    some = _walk(term)
    term.grow(MANY)
    many = _walk(term)
    broken = {key: asked.status for key, asked in many.items() if asked.status >= 500}
    assert broken == {}
    more = {
        key: (few[key].statements, many[key].statements) for key in many if few[key].statements != many[key].statements
    }
    assert more == {}, "pages that send more statements when there are more rows"
    too_many = {key: asked.statements for key, asked in many.items() if asked.statements > MOST_STATEMENTS}
    assert too_many == {}, f"pages that send more than {MOST_STATEMENTS} statements"
    long = {key: n for key, asked in many.items() if (n := len(re.findall("<tr|<li", asked.html))) > MOST_LINES}
    assert long == {}, f"pages with more than {MOST_LINES} rows and items"
    longer = {
        key: (len(some[key].html), len(many[key].html))
        for key in many
        if len(many[key].html) > 1.05 * len(some[key].html) + 500
    }
    assert longer == {}, "pages that grow with the rows: their lists want pages"


@pytest.mark.timeout(300)
def test_every_page_of_a_long_list_can_be_turned_to(term: Term) -> None:
    """Following 'older' from the first page ends at the last, and every row was on exactly one of them."""
    term.grow(MANY)
    client = term.campus.client("grace", Role.INSTRUCTOR)
    turned = 0
    for endpoint, address in term.addresses().items():
        html = client.get(address).text
        if 'rel="next"' not in html:
            continue
        pages = [html]
        while (found := re.search(r'rel="next" href="([^"]+)"', pages[-1])) and len(pages) < 200:
            pages.append(client.get(found[1].replace("&amp;", "&")).text)
        assert 'rel="next"' not in pages[-1], endpoint
        rows = [row for page in pages for row in re.findall(r'<tr class="link">.*?</tr>', page, re.S)]
        assert len(rows) == len(set(rows)), f"{endpoint}: a row stands on two pages"
        turned += len(pages) > 2
    assert turned >= 3


def test_held_grades_can_be_listed(term: Term) -> None:
    """Staff must find what waits for them among thousands."""
    term.grow(MANY)
    with term.campus.database.write() as db:
        db.execute(update(Result).where(Result.submission_id == 1).values(verdict="held"))
    client = term.campus.client("grace", Role.INSTRUCTOR)
    html = client.get(f"/c/{COURSE}/submissions?what=held").text
    assert re.findall(r">#(\d+)</a></th>", html) == ["1"]
