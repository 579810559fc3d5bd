"""Banks of known mistakes: the cases catch each, and each planted fault of the corpus gives its mistake's numbers."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hand_in import inputs_of, limits_of, relative_error
from torch import Tensor

import reference
from grader.assignment import Assignment, Case, load_assignment
from grader.measurement import FailureKind
from grader.verdicts import Fault
from reference.operation import Mistake, Operation

ROOT = Path(__file__).parents[2]
CORPUS = ROOT / "tests" / "corpus"
EXPECTED: dict[str, dict[str, Any]] = tomllib.loads((CORPUS / "expected.toml").read_text(encoding="utf-8"))
ASSIGNMENTS = {
    path.parent.name: load_assignment(path.parent) for path in sorted((ROOT / "assignments").glob("*/assignment.toml"))
}
LEAST = {"attention.forward": 12, "attention.training": 8, "softmax.online": 6, "layer_norm.fused": 8}
BANKS = [
    pytest.param(assignment, mistake, id=f"{slug}-{nth}-{mistake.label}")
    for slug, assignment in ASSIGNMENTS.items()
    for nth, mistake in enumerate(reference.load(assignment.operation).mistakes)
]


def labels(assignment: Assignment) -> set[str]:
    return {mistake.label for mistake in reference.load(assignment.operation).mistakes}


def planted(slug: str) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Path below the corpus, label, and cases that should show it, of faults that a bank knows as numbers."""
    for path, entry in EXPECTED.items():
        if entry["assignment"] != slug or path.startswith("hostile/") or entry["numerics"] != "fail":
            continue
        if entry["fault"] in labels(ASSIGNMENTS[slug]):
            yield path, entry["fault"], tuple(entry["probes"])


def right(slug: str) -> list[str]:
    return [path for path, entry in EXPECTED.items() if entry["assignment"] == slug and Path(path).stem[:3] == "ok-"]


@pytest.mark.parametrize("assignment", ASSIGNMENTS.values(), ids=ASSIGNMENTS)
def test_the_handout_explains_every_mistake_that_a_report_may_name(assignment: Assignment) -> None:
    assert labels(assignment) - assignment.explained.keys() == set()
    # the other faults are those of every operation: what the corpus shows, and what judging itself names
    known = {entry["fault"] for entry in EXPECTED.values()} | {fault.value for fault in (*Fault, *FailureKind)}
    sources = "".join((ROOT / "grader" / name).read_text(encoding="utf-8") for name in ("diagnosis.py", "judging.py"))
    unknown = assignment.explained.keys() - labels(assignment) - known
    assert {fault for fault in unknown if f'"{fault}"' not in sources} == set()


# Uninitialised memory need not hold NaN outside the examiner, which sees to it that it does.
UNDEFINED = {"output-unwritten", "tail-skipped"}


@pytest.fixture(scope="module")
def hand_ins(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, dict[str, Tensor]]]:
    """{path: {case: {output: tensor}}} of the corpus files that this module is about, each run in a process apart."""
    found: dict[str, dict[str, dict[str, Tensor]]] = {}
    for slug in ASSIGNMENTS:
        names = {case.name for case in ASSIGNMENTS[slug].cases}
        files = {path: ",".join(case for case in cases if case in names) for path, _, cases in planted(slug)}
        arguments = [f"{CORPUS / path}::{cases}" for path, cases in files.items()]
        arguments += [str(CORPUS / path) for path in right(slug)]
        saved = tmp_path_factory.mktemp("hand-ins") / f"{slug}.pt"
        program = ROOT / "tests" / "reference" / "hand_in.py"
        subprocess.run(
            [sys.executable, str(program), slug, *arguments, "--save", str(saved)],
            check=True,
            capture_output=True,
            timeout=110,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        outputs = torch.load(saved, weights_only=True)
        found |= {str(Path(path).relative_to(CORPUS)): value for path, value in outputs.items()}
    return found


def tiles_of(mistake: Mistake, operation: Operation) -> tuple[int, ...]:
    return operation.tiles if mistake.tiled else (0,)


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Largest relative difference over outputs; values that are not finite agree with each other and with no other."""
    worst = 0.0
    for name, theirs in a.items():
        mine, other = b[name].double(), theirs.double()
        finite = torch.isfinite(mine)
        if not torch.equal(finite, torch.isfinite(other)):
            return float("inf")
        if finite.any():
            scale = other[finite].abs().max().item() or 1.0
            worst = max(worst, (mine[finite] - other[finite]).abs().max().item() / scale)
    return worst


def as_poisoned(student: dict[str, Tensor], wrong: dict[str, Tensor]) -> dict[str, Tensor]:
    """The student's outputs with NaN where the mistake says that nothing is written."""
    return {name: value.masked_fill(wrong[name].isnan(), float("nan")) for name, value in student.items()}


def case_of(assignment: Assignment, name: str) -> Case:
    case = assignment.case(name)
    assert case is not None
    return case


@pytest.mark.parametrize("slug", ASSIGNMENTS)
def test_banks_are_as_large_as_promised(slug):
    assignment = ASSIGNMENTS[slug]
    assert len(labels(assignment)) >= LEAST.get(assignment.operation, 1)


@pytest.mark.parametrize(("assignment", "mistake"), BANKS)
def test_a_mistake_tells_what_it_breaks(assignment: Assignment, mistake: Mistake):
    assert mistake.step.strip()
    assert mistake.hint.rstrip()[-1] in ".?"
    assert mistake.label == mistake.label.lower().replace(" ", "-")


@pytest.mark.parametrize(("assignment", "mistake"), BANKS)
def test_no_mistake_gets_past_the_cases(assignment: Assignment, mistake: Mistake):
    """For every tile width up to 128 at least one visible case is off by more than five limits."""
    operation = reference.load(assignment.operation)
    for tile in [tile for tile in tiles_of(mistake, operation) if tile <= 128]:
        assert any(beyond(assignment, operation, case, mistake, tile) for case in visible_cases(assignment)), tile


def visible_cases(assignment: Assignment) -> list[Case]:
    return [case for case in assignment.cases if not case.hidden and case.dtype == "float32"]


def beyond(assignment: Assignment, operation: Operation, case: Case, mistake: Mistake, tile: int) -> bool:
    inputs, options = inputs_of(operation, case), case.options or {}
    wrong, want = mistake.outputs(inputs, options, tile), operation.oracle(inputs, options)
    limits = limits_of(assignment, operation, case, inputs)
    return any(relative_error(wrong[name], want[name]) > 5 * limit for name, limit in limits.items())


PLANTED = [
    pytest.param(slug, path, label, cases, id=path) for slug in ASSIGNMENTS for path, label, cases in planted(slug)
]


@pytest.mark.parametrize(("slug", "path", "label", "cases"), PLANTED)
def test_a_planted_fault_gives_the_numbers_of_its_mistake_and_of_no_other(slug, path, label, cases, hand_ins):
    assignment = ASSIGNMENTS[slug]
    operation = reference.load(assignment.operation)
    near: dict[str, float] = {}
    for mistake in operation.mistakes:
        # a rival has to come near at any width; that none does is seen well enough at two of them
        for tile in tiles_of(mistake, operation) if mistake.label == label else tiles_of(mistake, operation)[1:4:2]:
            apart = 0.0
            for name in hand_ins[path]:
                case = case_of(assignment, name)
                inputs = inputs_of(operation, case)
                limit = max(limits_of(assignment, operation, case, inputs).values())
                wrong = mistake.outputs(inputs, case.options or {}, tile)
                student = hand_ins[path][name]
                if label in UNDEFINED and mistake.label == label:
                    student = as_poisoned(student, wrong)
                apart = max(apart, distance(student, wrong) / limit)
            near[mistake.label] = min(apart, near.get(mistake.label, float("inf")))
    assert near[label] < 1.0, near
    rivals = [other for other, apart in near.items() if other != label and apart < 3.0]
    assert not rivals, rivals


@pytest.mark.parametrize(("slug", "path", "label", "cases"), PLANTED)
def test_a_planted_fault_is_far_beyond_the_limit(slug, path, label, cases, hand_ins):
    assignment = ASSIGNMENTS[slug]
    operation = reference.load(assignment.operation)
    worst = 0.0
    for name, student in hand_ins[path].items():
        case = case_of(assignment, name)
        inputs = inputs_of(operation, case)
        want = operation.oracle(inputs, case.options or {})
        for output, limit in limits_of(assignment, operation, case, inputs).items():
            worst = max(worst, relative_error(student[output], want[output]) / limit)
    assert worst > 5


@pytest.mark.parametrize(
    ("slug", "path"), [pytest.param(slug, path, id=path) for slug in ASSIGNMENTS for path in right(slug)]
)
def test_a_correct_file_stays_below_a_quarter_of_every_limit(slug, path, hand_ins):
    assignment = ASSIGNMENTS[slug]
    operation = reference.load(assignment.operation)
    assert set(hand_ins[path]) == {case.name for case in assignment.cases}
    for name, student in hand_ins[path].items():
        case = case_of(assignment, name)
        inputs = inputs_of(operation, case)
        want = operation.oracle(inputs, case.options or {})
        for output, limit in limits_of(assignment, operation, case, inputs).items():
            assert relative_error(student[output], want[output]) <= limit / 4, (name, output)
