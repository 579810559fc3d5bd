"""Engine and sessions, for SQLite and PostgreSQL alike."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import alembic.command
import alembic.util
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, create_engine, event, func, make_url, select
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import DBAPIError, DisconnectionError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as NoConnectionLeft
from sqlalchemy.orm import Session
from sqlalchemy.pool import ConnectionPoolEntry, PoolProxiedConnection

from grader.errors import UserError
from grader.settings import make_private_dir
from grader.wording import one_line

SQLITE_BUSY_TIMEOUT_MS = 10_000
POOL_SIZE = 16
PING_AFTER_S = 1.0  # SQLAlchemy's own `pool_pre_ping` asks every time, which is as dear as a small page's statement
MIGRATIONS = Path(__file__).resolve().parent.parent / "migrations"
_BEGIN = "tilegrade_begin"
_MIGRATION_LOCK = 0x71_1E_64_AD  # any number that nobody else of this database takes


class Database:
    """One engine and the ways to use it. Holds no session; safe to share between threads."""

    def __init__(self, url: str) -> None:
        self.engine = create_database_engine(url)
        self._reading = self._peeking = self.engine
        if self.engine.dialect.name != "sqlite":
            # SQLite shows a transaction one state anyhow; PostgreSQL, unasked, shows each statement its own
            self._reading = self.engine.execution_options(isolation_level="REPEATABLE READ")
            self._peeking = self.engine.execution_options(isolation_level="AUTOCOMMIT")
        self._writing = self.engine.execution_options(**{_BEGIN: "BEGIN IMMEDIATE"})

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A session that sees one consistent state and changes nothing: it rolls back at the end."""
        with Session(self._reading, expire_on_commit=False) as session:
            yield session

    @contextmanager
    def peek(self) -> Iterator[Session]:
        """A session for one statement that only reads: without a transaction around it, it is one way to the server."""
        with Session(self._peeking, expire_on_commit=False) as session:
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
    """An engine with the pragmas that make SQLite behave like a server, or a PostgreSQL one that notices dead links.

    Raises:
        UserError: SQLite's folder cannot be made or written to.
    """
    parsed = make_url(url)
    if parsed.get_backend_name() != "sqlite":
        # as many as a web server has threads: opening one takes longer than most pages
        engine = create_engine(parsed, pool_size=POOL_SIZE, pool_use_lifo=True, connect_args={"connect_timeout": 10})
        event.listen(engine, "checkin", _note_use)
        event.listen(engine, "checkout", functools.partial(_ping_after_a_rest, engine))
        return engine
    if parsed.database:
        folder = Path(parsed.database).absolute().parent
        make_private_dir(folder)
        if not os.access(folder, os.W_OK):  # SQLite alone would say that it cannot open a file
            raise UserError(f"The folder {folder} cannot be written to, and the database lies in it.")
    engine = create_engine(parsed, connect_args={"timeout": SQLITE_BUSY_TIMEOUT_MS / 1000})
    event.listen(engine, "connect", _set_pragmas)
    event.listen(engine, "begin", _begin)
    return engine


def _note_use(_connection: DBAPIConnection | None, record: ConnectionPoolEntry) -> None:
    record.info["used_at"] = time.monotonic()


def _ping_after_a_rest(
    engine: Engine, connection: DBAPIConnection, record: ConnectionPoolEntry, _proxy: PoolProxiedConnection
) -> None:
    """Ask whether a connection that lay idle still lives; the pool opens another when it does not."""
    used_at = record.info.get("used_at")
    if used_at is None or time.monotonic() - used_at < PING_AFTER_S:
        return
    try:
        engine.dialect.do_ping(connection)
    except engine.dialect.loaded_dbapi.Error as exc:
        raise DisconnectionError(str(exc)) from exc


def is_away(error: SQLAlchemyError) -> bool:
    """True when the database cannot be reached or used just now: stopped, restarting, overrun, locked, its disk full.

    False for what would go wrong the next time as well, such as a table that is not there.
    """
    if isinstance(error, NoConnectionLeft):
        return True
    if not isinstance(error, OperationalError):
        return isinstance(error, DBAPIError) and error.connection_invalidated
    # SQLite has this one kind for both
    return getattr(error.orig, "sqlite_errorcode", None) != sqlite3.SQLITE_ERROR


def briefly(error: SQLAlchemyError) -> str:
    """What the database said, in one line."""
    return one_line(str(error.orig if isinstance(error, DBAPIError) else error), 300)


def upgrade(database: Database) -> None:
    """Bring the tables to the newest edition. Run by a person or a deploy step; safe to run again.

    Raises:
        UserError: they are of a newer edition than this program's.
    """
    _demand_known(_edition(database))
    with _migrating(database) as config:
        alembic.command.upgrade(config, "head")


def back_up(database: Database, to: Path) -> None:
    """Write all of a SQLite database as it is at one moment into a new file, while the service runs.

    A copy of the file alone would lack what is still in its log, or be of two moments.

    Raises:
        UserError: the file is there already or cannot be made, or the database is no SQLite file.
    """
    if database.engine.dialect.name != "sqlite":
        raise UserError("`pg_dump` backs a PostgreSQL database up, also while the service runs; see docs/operating.md.")
    try:
        # made first: it is its owner's alone from the beginning
        os.close(os.open(to, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except OSError as exc:
        raise UserError(f"Cannot make {to} ({exc.strerror}).") from None
    try:
        with database.engine.connect() as connection, contextlib.closing(sqlite3.connect(to)) as copy:
            source: Any = connection.connection.driver_connection
            source.backup(copy)
    except BaseException:
        to.unlink()  # half a backup is none
        raise


def write_migration(database: Database, message: str) -> None:
    """Write a new migration file from what differs between models and database. For developers."""
    with _migrating(database) as config:
        alembic.command.revision(config, message, autogenerate=True)


def difference_from_models(database: Database) -> str:
    """What a migration would have to change; empty when tables and models agree."""
    with _migrating(database) as config:
        try:
            alembic.command.check(config)
        except alembic.util.AutogenerateDiffsDetected as exc:
            return str(exc)
    return ""


def why_unfit(database: Database) -> str:
    """Why this program must leave the tables alone as they are, and what to do; empty when they fit."""
    try:
        edition = _edition(database)
        _demand_known(edition)
    except UserError as exc:
        return str(exc)
    return "" if edition == _editions()[0] else "The database is not up to date. Run `tilegrade db upgrade` first."


def is_current(database: Database) -> bool:
    """True when every migration has been run."""
    return not why_unfit(database)


def demand_current(database: Database) -> None:
    """Raises UserError while the tables are not those that this program knows."""
    why = why_unfit(database)
    if why:
        raise UserError(why)


def clock_ahead_s(database: Database, now: Callable[[], datetime]) -> float:
    """Seconds that this host's clock is ahead of the database server's, below 0 when behind; SQLite has ours."""
    if database.engine.dialect.name == "sqlite":
        return 0.0
    with database.peek() as session:
        session.connection()  # opening it is not part of the question
        asked_at = now()
        there: datetime = session.scalars(select(func.clock_timestamp())).one()
        answered_at = now()
    # the server looked at its clock somewhere between: what that explains is no difference
    if asked_at <= there <= answered_at:
        return 0.0
    return ((asked_at if there < asked_at else answered_at) - there).total_seconds()


@functools.cache
def _editions() -> tuple[str, ...]:
    """Every revision that this program has, the newest first; as they were when it started."""
    return tuple(one.revision for one in ScriptDirectory(str(MIGRATIONS)).walk_revisions())


def _edition(database: Database) -> str | None:
    """The revision of the tables; None where there are none."""
    with database.engine.connect() as connection:
        return MigrationContext.configure(connection).get_current_revision()


def _demand_known(edition: str | None) -> None:
    if edition is not None and edition not in _editions():
        raise UserError(
            f"The database is of a newer edition ({edition}) than this program ({_editions()[0]}). Install the "
            f"program that made it, or restore a backup from before it was upgraded."
        )


@contextmanager
def _migrating(database: Database) -> Iterator[Config]:
    """An Alembic configuration whose commands run in one transaction."""
    config = Config(stdout=io.StringIO())
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    engine = database.engine.execution_options(**{_BEGIN: "BEGIN IMMEDIATE"})
    with engine.connect() as connection:
        raw: Any = connection.connection.driver_connection
        if engine.dialect.name == "sqlite":
            # a batch migration copies a table and drops the old one; rows that point there must not stop it.
            # Said to the driver, because inside a transaction the pragma does nothing
            raw.execute("PRAGMA foreign_keys = OFF")
        try:
            with connection.begin():
                if engine.dialect.name == "postgresql":
                    # one at a time, as SQLite's writers are anyway; the next one finds nothing left to do
                    connection.execute(select(func.pg_advisory_xact_lock(_MIGRATION_LOCK)))
                config.attributes["connection"] = connection
                yield config
        finally:
            if engine.dialect.name == "sqlite":
                raw.execute("PRAGMA foreign_keys = ON")


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
