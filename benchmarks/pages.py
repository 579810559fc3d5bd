"""How long pages take, warm, on SQLite: `python benchmarks/pages.py`. Fails where a median is above its limit.

The pages are asked for through the WSGI application, without a network: what remains is ours to mend.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "web")]

from web_campus import COURSE, SLUG, corpus, make_campus, stored  # noqa: E402  the folder is put on the path above

from grader import db  # noqa: E402
from grader.db import Database  # noqa: E402
from grader.models import Role  # noqa: E402

LIMIT_MS = 100.0
ROUNDS = 30
STUDENTS = 40


def main() -> int:
    """Print a line a page. Returns the exit status."""
    with tempfile.TemporaryDirectory() as folder:
        database = Database(f"sqlite:///{folder}/pages.db")
        db.upgrade(database)
        campus = make_campus(database, Path(folder) / "data")
        for i in range(STUDENTS):
            for name in ("ok-block-pointers", "stored-scores", "no-rescale-output"):
                campus.graded(f"student-{i}", stored(name), corpus(name))
        wrong = campus.graded("student-0", stored("no-rescale-output"), corpus("no-rescale-output"))
        waiting = campus.hand_in("student-0")
        student, staff = campus.client("student-0"), campus.client("grace", Role.INSTRUCTOR)
        pages = [
            ("home", student, "/"),
            ("assignment", student, f"/c/{COURSE}/{SLUG}"),
            ("report of a wrong file", student, f"/submissions/{wrong}"),
            ("status of a waiting one", student, f"/submissions/{waiting}/status"),
            ("leaderboard", student, f"/c/{COURSE}/{SLUG}/leaderboard"),
            ("all submissions", staff, f"/c/{COURSE}/submissions"),
            ("queue", staff, "/queue"),
            ("report for staff", staff, f"/submissions/{wrong}"),
        ]
        print(f"{'page':26}{'median':>10}{'slowest':>10}{'size':>12}")
        slow = 0
        for name, client, path in pages:
            times_ms = []
            for _ in range(ROUNDS):
                started = time.perf_counter()
                answer = client.get(path)
                times_ms.append((time.perf_counter() - started) * 1e3)
                assert answer.status_code == 200, (path, answer.status_code)
            median = statistics.median(times_ms)
            slow += median > LIMIT_MS
            print(f"{name:26}{median:7.1f} ms{max(times_ms):7.1f} ms{len(answer.data) / 1024:8.0f} KiB")
        database.close()
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
