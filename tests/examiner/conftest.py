"""One pool of warm sandboxes for all examinations of a test process."""

from pathlib import Path

import pytest

from grader.assignment import Limits, load_assignment

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def assignment_named():
    found = {}

    def load(slug):
        if slug not in found:
            found[slug] = load_assignment(ROOT / "assignments" / slug)
        return found[slug]

    return load


@pytest.fixture(scope="session")
def sandboxes():
    from workers.devices.cpu import interpreter_pool

    with interpreter_pool(Limits(), size=2) as pool:
        yield pool


@pytest.fixture(scope="session")
def grade_source(assignment_named, sandboxes):
    """Examine and judge one file as a worker does. Returns the examination and the grade's JSON."""
    from grader.judging import grade_json, judge
    from workers.examination import examine

    def grade(source, slug):
        assignment = assignment_named(slug)
        examination = examine(assignment, source, sandboxes=sandboxes)
        return examination, grade_json(judge(assignment, examination))

    return grade
