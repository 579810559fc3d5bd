"""Warm sandboxes for hostile hand-ins, and what the honest file that they are built on gets."""

from collections.abc import Iterator
from typing import Any

import pytest
from hostile_cases import BASE, SLUG, Hostile, assignment_for, assignment_named

from grader.assignment import Limits
from grader.judging import grade_json, judge
from grader.measurement import Examination
from workers.sandbox import SandboxPool


@pytest.fixture(scope="session")
def sandboxes() -> Iterator[SandboxPool]:
    from workers.devices.cpu import interpreter_pool

    with interpreter_pool(Limits(), size=2) as pool:
        yield pool


@pytest.fixture(scope="session")
def compilers() -> Iterator[SandboxPool]:
    from workers.compiling import compile_pool

    with compile_pool(Limits(), size=1, refill=False) as pool:
        yield pool


@pytest.fixture
def grade(sandboxes, request):
    """Examine and judge one case as a worker does."""
    from workers.examination import examine

    def run(case: Hostile) -> tuple[Examination, dict[str, Any]]:
        assignment = assignment_for(case)
        compilers = request.getfixturevalue("compilers") if case.compiles else None
        found = examine(assignment, case.source(), sandboxes=sandboxes, compilers=compilers)
        return found, grade_json(judge(assignment, found))

    return run


@pytest.fixture(scope="session")
def honest_points(sandboxes) -> float:
    """What the file gets that the hostile ones are built on."""
    from workers.examination import examine

    assignment = assignment_named(SLUG)
    graded = judge(assignment, examine(assignment, BASE.read_bytes(), sandboxes=sandboxes))
    assert graded.verdict == "full"
    return graded.score.points
