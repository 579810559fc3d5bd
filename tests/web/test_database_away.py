"""A page that is asked for while the database is away says so, and loses nothing that was sent."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from postgres_server import PostgresCluster
from sqlalchemy import create_engine, func, select, text
from sqlalchemy.exc import SQLAlchemyError
from web_campus import COURSE, SLUG, Campus, field_of, make_campus

from grader import db
from grader.db import Database
from grader.models import Submission

PAGE = f"/c/{COURSE}/{SLUG}"


@pytest.fixture
def campus(cluster: PostgresCluster, tmp_path: Path) -> Iterator[Campus]:
    database = Database(cluster.create("campus"))
    db.upgrade(database)
    yield make_campus(database, tmp_path / "data")
    database.close()


@pytest.mark.postgres
def test_what_is_sent_meanwhile_is_given_back_and_taken_once_afterwards(
    campus: Campus, cluster: PostgresCluster, caplog: pytest.LogCaptureFixture
) -> None:
    ada = campus.client("ada")
    form = ada.get(PAGE).text
    sent = {name: field_of(form, name) for name in ("csrf_token", "key")} | {"source": "precious = 1\n"}
    cluster.stop()
    caplog.set_level(logging.ERROR)
    refused = ada.post(f"{PAGE}/submissions", data=sent)
    assert refused.status_code == 503
    assert "What you sent was not taken." in refused.text
    assert "precious = 1" in refused.text
    read = ada.get(PAGE)
    assert read.status_code == 503
    assert "Nothing that was stored is lost." in read.text
    said = [record for record in caplog.records if record.name == "grader.web.errors"]
    assert [(record.levelname, record.exc_info, record.message.count("\n")) for record in said] == [
        ("ERROR", None, 0),
        ("ERROR", None, 0),
    ]
    cluster.start()
    for _ in range(2):
        assert ada.post(f"{PAGE}/submissions", data=sent).status_code == 303
    with campus.database.read() as session:
        assert session.scalar(select(func.count()).select_from(Submission)) == 1


def test_a_mistake_of_ours_is_no_outage(sqlite_campus: Campus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grader.web.lists.home", lambda db, *_a, **_k: db.execute(text("SELECT * FROM nowhere")))
    answer = sqlite_campus.client("ada").get("/")
    assert answer.status_code == 500
    assert "Something of ours broke" in answer.text


def test_a_locked_file_is_an_outage(tmp_path: Path) -> None:
    holder = sqlite3.connect(tmp_path / "held.db", isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    engine = create_engine(f"sqlite:///{tmp_path / 'held.db'}", connect_args={"timeout": 0})
    with pytest.raises(SQLAlchemyError) as caught, engine.begin() as connection:
        connection.execute(text("CREATE TABLE late (id INTEGER)"))
    assert db.is_away(caught.value)
    assert db.briefly(caught.value) == "database is locked"
    holder.close()
