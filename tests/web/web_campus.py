"""A small campus behind the real application: people, hand-ins in every state, and stored examinations."""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from html.parser import HTMLParser
from pathlib import Path

from flask import Flask, session, url_for
from flask.testing import FlaskClient
from jinja2.bccache import Bucket, BytecodeCache
from sqlalchemy import event

from grader import accounts, course, measurement, submissions
from grader.db import Database
from grader.measurement import Examination
from grader.models import Role, User
from grader.settings import Settings
from grader.web import create_app
from grader.web.security import open_session

ROOT = Path(__file__).resolve().parents[2]
COURSE = "demo"
SLUG = "flash-attention-forward"
PASSWORD = "correct horse battery"
LEASE = timedelta(minutes=5)


@lru_cache
def stored(name: str) -> Examination:
    """What a worker once found for tests/corpus/**/<name>.py: `python -m workers grade FILE --assignment FOLDER`."""
    with gzip.open(Path(__file__).parent / "examinations" / f"{name}.json.gz", "rt", encoding="utf-8") as file:
        return measurement.loads(file.read())


def corpus(name: str) -> str:
    """The source of a file of the corpus."""
    return next((ROOT / "tests" / "corpus").glob(f"*/{name}.py")).read_text(encoding="utf-8")


class Compiled(BytecodeCache):
    """Templates compiled once for all the applications of a test session; half of the time went into that."""

    def __init__(self) -> None:
        self._kept: dict[str, bytes] = {}

    def load_bytecode(self, bucket: Bucket) -> None:
        if bucket.key in self._kept:
            bucket.bytecode_from_string(self._kept[bucket.key])

    def dump_bytecode(self, bucket: Bucket) -> None:
        self._kept[bucket.key] = bucket.bytecode_to_string()


_COMPILED = Compiled()


@dataclass
class Campus:
    """One course with one assignment, and the application that serves it. People appear on first mention."""

    app: Flask
    database: Database
    settings: Settings
    catalog: course.Catalog
    rung: list[str]
    now: datetime = field(default_factory=lambda: datetime.now(UTC))
    people: dict[str, User] = field(default_factory=dict)

    def person(
        self, name: str, role: Role | None = Role.STUDENT, *, password: str | None = None, nickname: str | None = None
    ) -> User:
        if name not in self.people:
            with self.database.write() as db:
                if password:
                    user = accounts.create_user(db, name=name, password=password, now=self.now)
                else:
                    # hashing takes long, and most tests log nobody in by password
                    user = User(name=name, password_hash="-", created_at=self.now)
                    db.add(user)
                    db.flush()
                found = course.find_course(db, COURSE)
                assert found is not None
                if role is not None:
                    enrolled = course.enrol(db, course_id=found.id, user_id=user.id, role=role, now=self.now)
                    # as it is: some tests want one that nobody could have chosen
                    enrolled.nickname = nickname or enrolled.nickname
            self.people[name] = user
        return self.people[name]

    def client(self, name: str, role: Role | None = Role.STUDENT) -> FlaskClient:
        """A browser in which that person is logged in."""
        user = self.person(name, role)
        client = self.app.test_client()
        with self.app.test_request_context():
            open_session(user)
            opened = dict(session)
        with client.session_transaction() as stored_session:
            stored_session.update(opened)
        return client

    def hand_in(self, name: str, source: str = "import torch\n", *, filename: str | None = "kernel.py") -> int:
        """Through the use case; returns the submission's id."""
        user = self.person(name)
        with self.database.write() as db:
            entry = course.assignment_in(db, course_slug=COURSE, slug=SLUG)
            assert entry is not None
            return submissions.hand_in(
                db,
                user=user,
                entry=entry,
                assignment=self.catalog.load(SLUG),
                data=source.encode(),
                settings=self.settings,
                now=self.now,
                filename=filename,
            ).submission_id

    def claim(self) -> submissions.Job:
        with self.database.write() as db:
            job = submissions.claim_next(db, worker="host-1", device="cpu", now=self.now, lease=LEASE)
        assert job is not None
        return job

    def progress(self, job: submissions.Job, stages: Mapping[str, float]) -> None:
        with self.database.write() as db:
            assert submissions.progress(db, job, stages)

    def record(self, job: submissions.Job, examination: Examination) -> None:
        with self.database.write() as db:
            assert submissions.record(db, job, examination, self.catalog.load(SLUG), now=self.now)

    def graded(self, name: str, examination: Examination, source: str = "import torch\n") -> int:
        """Hand in as that person and record the examination; returns the submission's id."""
        submission_id = self.hand_in(name, source)
        job = self.claim()
        assert job.submission_id == submission_id
        self.record(job, examination)
        return submission_id

    def draw(self) -> None:
        """Returns once every chart that a page asked for so far is drawn, however busy the machine is."""
        # it draws one after the other
        self.app.extensions["tilegrade"].gallery._draughtsman.submit(lambda: None).result(60)

    @contextmanager
    def counted_queries(self) -> Iterator[list[str]]:
        """The statements that are sent to the database within the block."""
        sent: list[str] = []

        def note(_conn: object, _cursor: object, statement: str, *_rest: object) -> None:
            sent.append(statement)

        event.listen(self.database.engine, "before_cursor_execute", note)
        try:
            yield sent
        finally:
            event.remove(self.database.engine, "before_cursor_execute", note)


def make_campus(database: Database, data_dir: Path, **changes: str) -> Campus:
    """An application on that database, with the project's own assignments."""
    settings = Settings.from_env(
        {
            "TILEGRADE_DATA": str(data_dir),
            "TILEGRADE_BROKER_URL": "redis+socket:///nowhere.sock",
            "TILEGRADE_HAND_INS_PER_MINUTE": "1000",
            "TILEGRADE_HAND_INS_PER_HOUR": "1000",
            "TILEGRADE_MAX_WAITING_PER_STUDENT": "1000",
            **{f"TILEGRADE_{key}": value for key, value in changes.items()},
        }
    )
    rung: list[str] = []
    catalog = course.Catalog(ROOT / "assignments")
    app = create_app(settings, ring=rung.append, database=database, catalog=catalog)
    app.jinja_env.bytecode_cache = _COMPILED
    campus = Campus(app=app, database=database, settings=settings, catalog=catalog, rung=rung)
    with database.write() as db:
        made = course.create_course(db, slug=COURSE, title="Demo course", now=campus.now)
        course.set_assignment(db, course_id=made.id, slug=SLUG, now=campus.now)
    return campus


def addresses(app: Flask, method: str, **known: object) -> dict[str, str]:
    """One address of every route that takes that method, by its endpoint. A new route is in it from its first day."""
    found = {}
    with app.test_request_context():
        for rule in app.url_map.iter_rules():
            if method in (rule.methods or ()):
                unknown = rule.arguments - known.keys()
                assert not unknown, f"{rule}: say here what {unknown} may be"
                found[rule.endpoint] = url_for(rule.endpoint, **{name: known[name] for name in rule.arguments})
    return found


class Active(HTMLParser):
    """Collects what a browser would run, fetch or be sent to, beside what is our own."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        ours = any(name in ("src", "href") and (value or "").startswith("/static/") for name, value in attrs)
        if tag in ("script", "style", "iframe", "object", "embed", "img", "base", "link", "foreignobject") and not ours:
            self.found.append(f"<{tag}>")
        for name, value in attrs:
            value = (value or "").strip().lower()
            if name.startswith("on") or name in ("style", "srcdoc", "ping") or (name == "content" and "url=" in value):
                self.found.append(f"{name}={value}")
            outside = tag == "a" and name == "href" and value.startswith("https://")  # a teacher's, in a handout
            if name in ("href", "src", "action", "formaction", "xlink:href", "data") and not (
                outside or _leads_to_us(value)
            ):
                self.found.append(f"{name}={value}")


def _leads_to_us(target: str) -> bool:
    return target.startswith("#") or (target.startswith("/") and not target.startswith(("//", "/\\")))


def field_of(html: str, name: str) -> str:
    """The value of a hidden field."""
    found = re.search(rf'name="{name}" value="([^"]*)"', html)
    assert found is not None, f"no field {name}"
    return found[1]
