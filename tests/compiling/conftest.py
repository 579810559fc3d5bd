import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import reference
from grader.assignment import Assignment, Limits, load_assignment
from grader.measurement import CompileReport
from reference.operation import Operation
from workers import sandbox
from workers.compiling import ARENA_BYTES, compile_pool, compile_report
from workers.sandbox import SandboxPool

ASSIGNMENTS = Path(__file__).parents[2] / "assignments"
SCRIPTED = Path(__file__).with_name("scripted_candidate.py")

Compile = Callable[..., CompileReport]


@pytest.fixture(scope="session")
def assignment() -> Callable[..., Assignment]:
    """Loads an assignment that ships, with some of its timed workload changed where a test asks for it."""

    def load(slug: str, **speed: Any) -> Assignment:
        found = load_assignment(ASSIGNMENTS / slug)
        assert found.speed is not None
        return dataclasses.replace(found, speed=dataclasses.replace(found.speed, **speed))

    return load


@pytest.fixture(scope="session")
def compile_file(assignment: Callable[..., Assignment]) -> Iterator[Compile]:
    """Compiles a file in the sandbox, with time enough on a busy machine."""
    with compile_pool(Limits(), size=2) as pool:

        def run(
            slug: str, source: str, *, budget_s: float = 100.0, operation: Operation | None = None, **speed: Any
        ) -> CompileReport:
            task = assignment(slug, **speed)
            operation = operation or reference.load(task.operation)
            return compile_report(task, operation, source.encode(), pool=pool, budget_s=budget_s)

        yield run


@pytest.fixture
def hear(assignment: Callable[..., Assignment]) -> Iterator[Compile]:
    """Gives the report on a candidate that says what its script says."""
    limits = sandbox.Limits(output_total_bytes=1 << 20)
    pool = SandboxPool(argv_env={}, arena_bytes=ARENA_BYTES, limits=limits, size=1, program=SCRIPTED)

    def run(*say: dict[str, Any], then: str = "end", budget_s: float = 30.0, **script: Any) -> CompileReport:
        task = assignment("online-softmax")
        source = json.dumps({"say": say, "then": then, **script}).encode()
        return compile_report(task, reference.load(task.operation), source, pool=pool, budget_s=budget_s)

    yield run
    pool.close()
