"""Tables, migrations and sessions, the same on SQLite and PostgreSQL."""

from __future__ import annotations

import itertools
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta, timezone

import alembic.command
import pytest
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError, StatementError

from grader import db
from grader.db import Database
from grader.errors import UserError
from grader.models import Base, Course, CourseAssignment, Enrollment, Result, Role, Submission, User

NOW = datetime(2027, 2, 1, 12, 0, 0, 123456, tzinfo=UTC)


def test_models_and_migrations_agree(database):
    assert db.difference_from_models(database) == ""
    assert db.is_current(database)


def test_upgrading_again_changes_nothing(database):
    db.upgrade(database)
    assert db.difference_from_models(database) == ""


def test_upgrades_at_once_wait_for_each_other(database, database_url):
    with db._migrating(database) as config:
        alembic.command.downgrade(config, "0001")

    def upgrade(_):
        mine = Database(database_url)
        db.upgrade(mine)
        mine.close()

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(upgrade, range(3))) == [None] * 3  # what one raises is raised here
    assert db.difference_from_models(database) == ""


def test_a_difference_between_models_and_tables_is_seen(database):
    with database.engine.begin() as connection:
        connection.execute(sa.text("ALTER TABLE worker ADD COLUMN surplus INTEGER"))
    assert "surplus" in db.difference_from_models(database)
    with database.engine.begin() as connection:
        connection.execute(sa.text("ALTER TABLE worker DROP COLUMN surplus"))


def test_a_database_without_tables_is_not_current(tmp_path):
    empty = Database(f"sqlite:///{tmp_path / 'empty.db'}")
    assert not db.is_current(empty)
    empty.close()


def test_a_backup_while_others_write_is_of_one_moment_and_complete(sqlite_database, tmp_path):
    """Rows are written in pairs: a copy that holds one of a pair is of two moments."""
    done, stop = threading.Event(), threading.Event()

    def write():
        for number in itertools.count():
            with sqlite_database.write() as session:
                session.add_all(
                    User(name=f"{number}{one}", password_hash="-" * 200, created_at=NOW) for one in ("a", "b")
                )
            if number == 20:
                done.set()  # in the log by now, and not in the file
            if stop.is_set():
                return

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert done.wait(60)
        db.back_up(sqlite_database, tmp_path / "copy.db")
    finally:
        stop.set()
        writer.join()
    assert stat.S_IMODE((tmp_path / "copy.db").stat().st_mode) == 0o600
    copy = Database(f"sqlite:///{tmp_path / 'copy.db'}")
    assert db.difference_from_models(copy) == ""
    with copy.read() as session:
        assert session.scalar(sa.text("PRAGMA integrity_check")) == "ok"
        names = set(session.scalars(sa.select(User.name)))
    copy.close()
    assert {f"{number}{one}" for number in range(21) for one in ("a", "b")} <= names
    assert len(names) % 2 == 0


def test_a_backup_replaces_nothing(sqlite_database, tmp_path):
    file = tmp_path / "copy.db"
    file.write_text("the backup of last week")
    with pytest.raises(UserError, match=r"Cannot make .*copy\.db \(File exists\)"):
        db.back_up(sqlite_database, file)
    assert file.read_text() == "the backup of last week"


@pytest.mark.postgres
def test_a_backup_of_postgresql_is_pg_dumps(new_postgres_url, tmp_path):
    found = Database(new_postgres_url())
    with pytest.raises(UserError, match="pg_dump"):
        db.back_up(found, tmp_path / "copy")
    found.close()
    assert not (tmp_path / "copy").exists()


@pytest.fixture
def of_a_newer_edition(database):
    """A database that a newer program upgraded."""
    stamp = sa.text("UPDATE alembic_version SET version_num = :edition")
    with database.engine.begin() as connection:
        before = connection.scalar(sa.text("SELECT version_num FROM alembic_version"))
        connection.execute(stamp, {"edition": "9999"})
    yield database
    with database.engine.begin() as connection:
        connection.execute(stamp, {"edition": before})


@pytest.mark.parametrize("use", [db.demand_current, db.upgrade])
def test_a_database_of_a_newer_edition_is_left_alone(of_a_newer_edition, use):
    with pytest.raises(UserError, match=r"newer edition \(9999\) than this program \(\d{4}\)\. Install"):
        use(of_a_newer_edition)
    assert not db.is_current(of_a_newer_edition)


@pytest.mark.postgres
@pytest.mark.parametrize("ahead_s", [0, 90, -90])
def test_a_clock_is_compared_with_the_database_servers(new_postgres_url, ahead_s):
    found = Database(new_postgres_url())
    off_s = db.clock_ahead_s(found, lambda: datetime.now(UTC) + timedelta(seconds=ahead_s))
    found.close()
    # the same clock, so what is left is the time that the question took
    assert off_s == pytest.approx(ahead_s, abs=15)


def test_results_that_were_there_learn_their_gpu(database):
    """Revision 0002 reads it from what was measured."""
    with db._migrating(database) as config:
        alembic.command.downgrade(config, "0001")
    found = {1: '{"device": {"kind": "cuda", "name": "NVIDIA H200"}}', 2: '{"device": {"kind": "interpreter"}}'}
    with database.engine.begin() as connection:
        tables = sa.MetaData()
        tables.reflect(connection)
        for table, values in _rows_of_the_first_edition(found):
            connection.execute(sa.insert(tables.tables[table]), values)
    db.upgrade(database)
    assert db.difference_from_models(database) == ""
    with database.read() as session:
        gpus = session.execute(sa.select(Result.submission_id, Result.gpu).order_by(Result.submission_id)).all()
        assert [tuple(row) for row in gpus] == [(1, "NVIDIA H200"), (2, None)]
        entry = session.scalars(sa.select(CourseAssignment)).one()
        assert (entry.late_days, entry.late_percent) == (0, 0.0)


def test_grades_that_measuring_again_took_away_count_again(database):
    """Revision 0007; and a decision that was stored under the verdict of a broken rule is told apart."""
    with db._migrating(database) as config:
        alembic.command.downgrade(config, "0006")
    grade = '{{"assignment":"a","verdict":"{}","released_verdict":"full","hint":"{}"}}'
    said = r"\"verdict\":\"refused\",\"released"  # a file's own words
    with database.engine.begin() as connection:
        tables = sa.MetaData()
        tables.reflect(connection)
        for name, values in _rows_of_the_first_edition(dict.fromkeys(range(1, 6), "{}")):
            connection.execute(sa.insert(tables.tables[name]), values)
        row, result = tables.tables["submission"], tables.tables["result"]
        connection.execute(sa.delete(result).where(result.c.submission_id > 4))
        for number, state in ((1, "faulted"), (2, "cancelled"), (3, "queued"), (5, "faulted")):
            connection.execute(sa.update(row).where(row.c.id == number).values(state=state))
        for number, confirmed in ((1, True), (2, False)):
            values = {"verdict": "refused", "confirmed": confirmed, "grade": grade.format("refused", said)}
            connection.execute(sa.update(result).where(result.c.submission_id == number).values(**values))
    db.upgrade(database)
    with database.read() as session:
        states = session.scalars(sa.select(Submission.state).order_by(Submission.id)).all()
        assert states == ["done", "done", "queued", "done", "faulted"]
        found = session.execute(sa.select(Result.verdict, Result.grade).order_by(Result.submission_id)).all()
    assert [tuple(one) for one in found[:3]] == [
        ("not_counted", grade.format("not_counted", said)),
        ("refused", grade.format("refused", said)),
        ("full", "{}"),
    ]
    with db._migrating(database) as config:
        alembic.command.downgrade(config, "0006")
    with database.engine.connect() as connection:
        assert connection.scalar(sa.select(result.c.grade).where(result.c.submission_id == 1)) == grade.format(
            "refused", said
        )
    db.upgrade(database)


def _rows_of_the_first_edition(examinations):
    user = {"id": 1, "name": "ada", "password_hash": "-", "is_staff": False, "active": True, "session_epoch": 0}
    submission = {"user_id": 1, "course_assignment_id": 1, "source": "", "source_sha256": "-", "source_bytes": 0}
    submission |= {"assignment_digest": "-", "device": "cpu", "submitted_at": NOW, "queued_at": NOW, "state": "done"}
    result = {"attempt": 1, "measured_at": NOW, "grade": "{}", "verdict": "full", "points": 1.0, "out_of": 1.0}
    result |= {"withheld": 0.0, "provisional": True, "released": False, "released_verdict": "full", "judged_at": NOW}
    yield "user_account", [user | {"created_at": NOW}]
    yield "course", [{"id": 1, "slug": "a", "title": "A", "created_at": NOW}]
    yield "course_assignment", [{"id": 1, "course_id": 1, "slug": "b", "position": 0, "device": "cpu"}]
    rows = [submission | {"id": n, "idempotency_key": str(n), "attempt": 1, "lost_attempts": 0} for n in examinations]
    yield "submission", rows
    rows = [result | {"submission_id": n, "examination": t, "assignment_digest": "-"} for n, t in examinations.items()]
    yield "result", rows


def test_every_name_fits_postgresql():
    names = [
        one.name
        for table in Base.metadata.tables.values()
        for one in [*table.constraints, *table.indexes]
        if one.name is not None
    ]
    assert [name for name in names if len(name) > 63] == []


def test_moments_come_back_aware_and_in_utc(database):
    tokyo = timezone(timedelta(hours=9))
    with database.write() as session:
        session.add(Course(slug="a", title="A", created_at=NOW.astimezone(tokyo)))
    with database.read() as session:
        found = session.scalars(sa.select(Course)).one().created_at
    assert found == NOW
    assert found.utcoffset() == timedelta(0)


def test_a_moment_without_a_zone_is_refused(database):
    course = Course(slug="a", title="A", created_at=datetime(2027, 1, 1))  # noqa: DTZ001
    with pytest.raises(StatementError, match="no zone"), database.write() as session:
        session.add(course)


def test_moments_compare_in_queries_with_their_zone(database):
    with database.write() as session:
        session.add(Course(slug="a", title="A", created_at=NOW))
    later_elsewhere = (NOW + timedelta(minutes=1)).astimezone(timezone(timedelta(hours=-8)))
    with database.read() as session:
        assert session.scalar(sa.select(Course.slug).where(Course.created_at < later_elsewhere)) == "a"


def test_a_row_cannot_point_at_nothing(database):
    with pytest.raises(IntegrityError), database.write() as session:
        session.add(Enrollment(course_id=99, user_id=99, role=Role.STUDENT, nickname="x"))


def test_names_are_unique(database):
    def add() -> None:
        with database.write() as session:
            session.add(User(name="ada", password_hash="-", created_at=NOW))

    add()
    with pytest.raises(IntegrityError):
        add()


def test_a_failed_block_writes_nothing(database):
    def add_and_fail() -> None:
        with database.write() as session:
            session.add(Course(slug="a", title="A", created_at=NOW))
            session.flush()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        add_and_fail()
    with database.read() as session:
        assert session.scalars(sa.select(Course)).all() == []


def test_reading_changes_nothing(database):
    with database.read() as session:
        session.add(Course(slug="a", title="A", created_at=NOW))
        session.flush()
    with database.read() as session:
        assert session.scalars(sa.select(Course)).all() == []


def test_sqlite_reads_while_another_writes(sqlite_database):
    with sqlite_database.write() as writing:
        writing.add(Course(slug="a", title="A", created_at=NOW))
        writing.flush()
        with sqlite_database.read() as reading:
            assert reading.scalars(sa.select(Course)).all() == []


def test_a_reader_sees_one_state_whatever_others_commit(database):
    with database.read() as reading:
        assert reading.scalars(sa.select(Course)).all() == []
        with database.write() as writing:
            writing.add(Course(slug="a", title="A", created_at=NOW))
        assert reading.scalars(sa.select(Course)).all() == []
    with database.read() as reading:
        assert len(reading.scalars(sa.select(Course)).all()) == 1


@pytest.mark.postgres
@pytest.mark.parametrize("way", ["read", "peek", "write"])
def test_a_server_that_was_restarted_while_nobody_asked_is_found_again(new_postgres_url, postgres_cluster, way):
    database = Database(new_postgres_url())
    with database.read() as first, database.write() as second:
        for session in (first, second):
            session.execute(sa.text("SELECT 1"))
    with postgres_cluster.connect("postgres") as connection:
        connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = 'tilegrade'")
    time.sleep(db.PING_AFTER_S)
    for _ in range(3):
        with getattr(database, way)() as session:
            assert session.scalar(sa.text("SELECT 1")) == 1
    database.close()


def test_a_peek_sees_what_was_committed(database):
    with database.write() as session:
        session.add(Course(slug="c", title="C", created_at=NOW))
    with database.peek() as session:
        assert session.scalars(sa.select(Course.slug)).all() == ["c"]
