"""A real worker process whose examiner does what the handed-in file says, so that tests need neither torch nor seconds.

Lines of the file: `sleep S` examines for S seconds; `fault` fails like a broken host.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time

from grader.assignment import Assignment
from grader.errors import GraderFault
from grader.measurement import Device, Examination, Isolation
from grader.queue import log_to_stderr
from grader.settings import Settings
from workers.tasks import Progress, run_worker


def examine(assignment: Assignment, source: bytes, progress: Progress) -> Examination:
    """Follow the file line by line, reporting progress all the while."""
    for line in source.decode().splitlines():
        match line.split():
            case ["sleep", seconds]:
                end = time.monotonic() + float(seconds)
                while time.monotonic() < end:
                    progress("numerics", 0.5)
                    time.sleep(0.02)
            case ["fault"]:
                raise GraderFault("the sandbox did not start")
    return Examination(
        assignment=assignment.slug,
        assignment_digest=assignment.digest,
        source_sha256=hashlib.sha256(source).hexdigest(),
        device=Device(kind="interpreter", name="scripted"),
        isolation=Isolation(level="full"),
        versions={},
        seed=1,
    )


if __name__ == "__main__":
    log_to_stderr("worker")
    run_worker(Settings.from_env(os.environ), examine)
    sys.exit(0)
