"""The application on a database of the test's own. What a campus is and does: web_campus.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from flask.testing import FlaskClient
from web_campus import Campus, field_of, make_campus

from grader.db import Database


@pytest.fixture
def campus(database: Database, tmp_path: Path) -> Campus:
    """Runs the test on SQLite and on PostgreSQL."""
    return make_campus(database, tmp_path / "data")


@pytest.fixture
def sqlite_campus(sqlite_database: Database, tmp_path: Path) -> Campus:
    """For tests whose subject is not the database."""
    return make_campus(sqlite_database, tmp_path / "data")


@pytest.fixture
def token_of() -> Callable[[FlaskClient], str]:
    """Reads the token that every form of that person's pages carries."""
    return lambda client: field_of(client.get("/").text, "csrf_token")
