"""How long a hand-in takes, stage by stage, on a warm worker: `python benchmarks/grading.py`.

Starts the service as `tilegrade up` does, with data of its own, hands in right files of every assignment, and measures:
hand-in to the first line of the student's file, hand-in to report, the examination's stages, and how fast pages answer
meanwhile. Exits 1 when a figure is above its limit.
"""

from __future__ import annotations

import contextlib
import http.cookiejar
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from grader import course, measurement, submissions  # noqa: E402  the folder is put on the path above
from grader.db import Database  # noqa: E402
from grader.models import State, Submission, User  # noqa: E402
from grader.queue import Doorbell, make_celery  # noqa: E402
from grader.settings import Settings  # noqa: E402

ROUNDS = 3
FIRST_LINE_LIMIT_MS = 50.0
PAGE_LIMIT_MS = 100.0
FILES = {  # file of the corpus: seconds from hand-in to report
    "flash-attention-forward/ok-raw-strides.py": 10.0,
    "flash-attention-forward/ok-block-pointers.py": 10.0,
    "online-softmax/ok-row-block.py": 10.0,
    "fused-bias-dropout-layernorm/ok-tiled-heuristics.py": 10.0,
    "flash-attention/ok-three-kernels.py": 20.0,
}
STAMP = 'import time as _t; print("FIRST", _t.time())\n'


def main() -> int:
    """Print a line a file. Returns the exit status."""
    with _service() as (settings, passwords):
        database = Database(settings.database_url)
        doorbell = Doorbell(make_celery(settings))
        pages = _Pages(f"http://127.0.0.1:{settings.port}", "student", passwords["student"])
        _grade(database, settings, doorbell, next(iter(FILES)))  # warms the worker's own imports
        print(f"{'file':56}{'first line':>12}{'report':>10}{'page':>9}  stages")
        slow = False
        for name, limit_s in FILES.items():
            rows = []
            for _ in range(ROUNDS):
                time.sleep(6)  # the next sandboxes get warm
                with pages.asking() as times_ms:
                    rows.append(_grade(database, settings, doorbell, name))
            first_ms = statistics.median(row[0] for row in rows) * 1e3
            report_s = statistics.median(row[1] for row in rows)
            page_ms = statistics.median(times_ms)
            slow |= first_ms > FIRST_LINE_LIMIT_MS or report_s > limit_s or page_ms > PAGE_LIMIT_MS
            print(f"{name:56}{first_ms:9.1f} ms{report_s:8.2f} s{page_ms:6.1f} ms  {rows[-1][2]}", flush=True)
        return int(slow)


def _grade(database: Database, settings: Settings, doorbell: Doorbell, name: str) -> tuple[float, float, str]:
    """Hand in one file and wait. Seconds to its first line, seconds to its report, and the stages in words."""
    source = STAMP.encode() + (ROOT / "tests" / "corpus" / name).read_bytes()
    slug = name.partition("/")[0]
    assignment = course.Catalog(settings.assignments_dir).load(slug)
    handed_in = time.time()
    with database.write() as session:
        user = session.query(User).filter_by(name="student").one()
        entry = course.assignment_in(session, course_slug="demo", slug=slug)
        accepted = submissions.hand_in(
            session, user=user, entry=entry, assignment=assignment, data=source, settings=settings,
            now=datetime.now(UTC),
        )  # fmt: skip
    doorbell.ring("cpu")
    while True:
        with database.read() as session:
            row = session.get_one(Submission, accepted.submission_id)
            if row.state is State.DONE:
                report_s = time.time() - handed_in
                found = measurement.loads(row.result.examination)
                break
            assert row.state in (State.QUEUED, State.RUNNING), row.state
        time.sleep(0.01)
    first = float(re.search(r"FIRST (\S+)", found.stdout).group(1))
    stages = ", ".join(f"{stage.name} {stage.seconds:.2f}" for stage in found.stages)
    return first - handed_in, report_s, stages


class _Pages:
    """A logged-in student who keeps asking for the home page."""

    def __init__(self, base: str, name: str, password: str) -> None:
        self._base = base
        self._open = urllib.request.build_opener(
            urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar()), urllib.request.ProxyHandler({})
        ).open
        page = self._open(f"{base}/log-in").read().decode()
        token = re.search(r'name="csrf_token"[^>]*value="([^"]+)"', page).group(1)
        form = urllib.parse.urlencode({"name": name, "password": password, "csrf_token": token})
        self._open(f"{base}/log-in", form.encode())

    @contextlib.contextmanager
    def asking(self) -> Iterator[list[float]]:
        times_ms: list[float] = []
        stop = threading.Event()

        def ask() -> None:
            while not stop.wait(0.1):
                started = time.perf_counter()
                self._open(f"{self._base}/").read()
                times_ms.append((time.perf_counter() - started) * 1e3)

        thread = threading.Thread(target=ask)
        thread.start()
        try:
            yield times_ms
        finally:
            stop.set()
            thread.join()


@contextlib.contextmanager
def _service() -> Iterator[tuple[Settings, dict[str, str]]]:
    with tempfile.TemporaryDirectory(prefix="tg", dir="/tmp") as folder:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        environment = {
            "PATH": os.environ["PATH"],
            "TILEGRADE_DATA": f"{folder}/data",
            "TILEGRADE_PORT": str(port),
            "TILEGRADE_HAND_INS_PER_MINUTE": "100",
            "TILEGRADE_HAND_INS_PER_HOUR": "1000",
        }
        log = Path(folder) / "up.out"
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "grader.cli", "up"],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            while "runs at http" not in log.read_text():
                assert process.poll() is None, log.read_text()
                time.sleep(0.1)
            passwords = dict(re.findall(r"user (\w+), password (\S+)", log.read_text()))
            yield Settings.from_env(environment), passwords
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(60)


if __name__ == "__main__":
    sys.exit(main())
