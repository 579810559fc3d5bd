"""Engine and sessions, for SQLite and PostgreSQL alike."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, make_url
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.orm import Session
from sqlalchemy.pool import ConnectionPoolEntry

SQLITE_BUSY_TIMEOUT_MS = 10_000
_BEGIN = "tilegrade_begin"


class Database:
    """One engine and the two ways to use it. Holds no session; safe to share between threads."""

    def __init__(self, url: str) -> None:
        self.engine = create_database_engine(url)
        self._writing = self.engine.execution_options(**{_BEGIN: "BEGIN IMMEDIATE"})

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A session that sees one consistent state and changes nothing: it rolls back at the end."""
        with Session(self.engine, expire_on_commit=False) as session:
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        """A session that commits at the end of the block, or rolls back when it raises.

        Keep the block short and do nothing slow in it. Ring the doorbell after it: a worker must never be told of a
        row that it cannot see yet. Rows stay readable afterwards.
        """
        with Session(self._writing, expire_on_commit=False) as session, session.begin():
            yield session

    def close(self) -> None:
        """Give every pooled connection back to the operating system."""
        self.engine.dispose()


def create_database_engine(url: str) -> Engine:
    """An engine with the pragmas that make SQLite behave like a server, or a PostgreSQL one that notices dead links."""
    parsed = make_url(url)
    if parsed.get_backend_name() != "sqlite":
        return create_engine(parsed, pool_pre_ping=True, connect_args={"connect_timeout": 10})
    if parsed.database:
        Path(parsed.database).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    engine = create_engine(parsed, connect_args={"timeout": SQLITE_BUSY_TIMEOUT_MS / 1000})
    event.listen(engine, "connect", _set_pragmas)
    event.listen(engine, "begin", _begin)
    return engine


def _set_pragmas(connection: DBAPIConnection, _record: ConnectionPoolEntry) -> None:
    # the driver must not open transactions on its own: it would begin too late, and never IMMEDIATE
    raw: Any = connection
    raw.isolation_level = None
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode = WAL")  # pages read while a worker writes
    # with WAL this survives a crash of ours; only a power cut may cost the last commit
    cursor.execute("PRAGMA synchronous = NORMAL")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.execute(f"PRAGMA busy_timeout = {SQLITE_BUSY_TIMEOUT_MS}")
    cursor.close()


def _begin(connection: Connection) -> None:
    # IMMEDIATE for writers: a transaction that reads first and writes later is refused at once when another wrote
    # in between, whatever the busy timeout; taking the lock first makes it wait instead
    connection.exec_driver_sql(connection.get_execution_options().get(_BEGIN, "BEGIN"))
