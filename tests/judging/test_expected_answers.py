"""Every file of the corpus, as facts: what was observed when it was tried must lead to the answer written beside it.

The files themselves are examined in the sandbox elsewhere. Here the facts are built from `fails_on` and the label, so
that the judge's rules are held against the corpus without running anything.
"""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

import pytest
from judging_facts import (
    assignment_of,
    audit_of,
    examination_of,
    failed,
    measured,
    memory_points,
    mistake,
    output,
    right,
    with_probe,
    wrong,
)

from grader.assignment import Assignment
from grader.judging import grade_json, judge
from grader.measurement import (
    CompileReport,
    Examination,
    Failure,
    FailureKind,
    Finding,
    OutputWritten,
    ProbeMeasured,
    ProbeRun,
    Storage,
    TorchOp,
)

EXPECTED: dict[str, dict[str, Any]] = tomllib.loads(
    (Path(__file__).parent.parent / "corpus" / "expected.toml").read_text()
)
PLANTED = {path: want for path, want in EXPECTED.items() if not path.startswith("hostile/")}
AT_LOAD = {
    "import-error": FailureKind.IMPORT_ERROR,
    "memory-bomb": FailureKind.MEMORY_LIMIT,
    "syntax-error": FailureKind.SYNTAX_ERROR,
    "entry-missing": FailureKind.ENTRY_MISSING,
    "prints-flood": FailureKind.OUTPUT_LIMIT,
    "python-exit": FailureKind.PYTHON_EXIT,
}
IN_CALLS = {
    "compile-error": FailureKind.COMPILE_ERROR,
    "wrong-signature": FailureKind.WRONG_SIGNATURE,
    "raises": FailureKind.RAISES,
    "infinite-loop": FailureKind.TIME_LIMIT,
}
# found by what they do and not by their outputs
NEED_NO_BANK = {
    *AT_LOAD, *IN_CALLS, "ignores-strides", "library-attention", "low-precision-accumulator", "output-unwritten",
    "stored-scores", "saved-scores-for-backward", "input-mutated", "nondeterministic", "not-fused", "wrong-dtype",
    "no-triton-kernel", "out-of-bounds", "wrong-shape", "needs-bigger-shared-memory", "backward-race", "",
}  # fmt: skip


def facts_of(path: str, want: dict[str, Any], assignment: Assignment) -> Examination:
    label = want["fault"]
    examination = examination_of(assignment)
    if want.get("gpu_only"):
        failure = Failure(kind=FailureKind.COMPILE_ERROR, message="does not compile", line=3, stage="compile")
        report = CompileReport(target="sm_90", kernels=(), failures=(failure,))
        race = audit_of(assignment, findings=(Finding(kind="race-write-write", message="dq"),))
        return dataclasses.replace(examination, compile_report=report, audit=race)
    if label in AT_LOAD:
        failure = Failure(kind=AT_LOAD[label], message="as observed")
        return dataclasses.replace(examination, load_failure=failure, probes=(), memory=(), audit=None)
    failing = [one.name for one in assignment.cases if one.name in want.get("fails_on", want["probes"])]
    examination = with_probe(examination, *(wrong_run(name, label, assignment) for name in failing))
    examination = dataclasses.replace(examination, **other_facts(path, label, assignment))
    if label in NEED_NO_BANK:
        return examination
    names = [one.name for one in assignment.cases]
    return dataclasses.replace(
        examination,
        mistakes=(
            mistake("some-other-mistake", failing, names, distance=0.3),
            mistake(label, [name for name in failing if name != "repeat"], names, tile=32),
        ),
    )


def wrong_run(name: str, label: str, assignment: Assignment) -> ProbeRun:
    """A failing probe, the way this fault makes it fail."""
    good = right(name, assignment)
    if label in IN_CALLS:
        return failed(name, IN_CALLS[label])
    if label == "wrong-shape":
        return last_output(good, shape=(64, 1), want_shape=(64,), rel_error=None)
    if label == "wrong-dtype":
        return last_output(good, dtype="float32", want_dtype="float16")
    if label == "out-of-bounds":
        return dataclasses.replace(good, guards_intact=False)
    if label == "input-mutated":
        return dataclasses.replace(good, inputs_unchanged=False, repeat_equal=False if name == "repeat" else None)
    if label == "low-precision-accumulator":
        return wrong(name, assignment, error=5e-4)
    if label == "output-unwritten":
        trailing = {"n_not_finite": 160, "n_wrong": 160, "wrong_rows": tuple(range(59, 64)), "n_wrong_rows": 5}
        outputs = (output("o", None, **trailing), output("lse", None, n_not_finite=5, n_wrong=5, n_wrong_rows=1))
        return measured(name, {}, outputs=outputs)
    bad = wrong(name, assignment)
    # two runs that differ have a name of their own, which a file without one must not get
    return dataclasses.replace(bad, repeat_equal=False) if name == "repeat" and label else bad


def last_output(run: ProbeMeasured, **changes: Any) -> ProbeMeasured:
    return dataclasses.replace(run, outputs=(*run.outputs[:-1], dataclasses.replace(run.outputs[-1], **changes)))


def other_facts(path: str, label: str, assignment: Assignment) -> dict[str, Any]:
    if label == "stored-scores" and "dense-backward" in path:
        return {"memory": memory_points(backward=2.0)}
    if label == "stored-scores":
        return {"memory": memory_points(2.0), "audit": audit_of(assignment, n_launches=2)}
    if label == "saved-scores-for-backward":
        saved = (Storage(shape=(1, 192, 192), dtype="float32", size_bytes=147456),)
        return {"memory": memory_points(2.0, backward=2.0, kept=2.0), "audit": audit_of(assignment, saved=saved)}
    if label == "not-fused":
        return {"audit": audit_of(assignment, n_launches=2, unique_bytes=400_000)}
    if label == "no-triton-kernel":
        torch = tuple(OutputWritten(name=one.name, by_own_kernel=False) for one in assignment.outputs)
        return {"audit": audit_of(assignment, n_launches=0, launches=(), unique_bytes=0, outputs=torch)}
    if label == "library-attention":
        calls = (TorchOp(op="scaled_dot_product_attention", count=1, size_bytes=8, line=31),)
        mixed = (OutputWritten(name="o", by_own_kernel=False), OutputWritten(name="lse", by_own_kernel=True))
        return {"audit": audit_of(assignment, library_calls=calls, outputs=mixed)}
    if label == "output-unwritten":
        holes = tuple(
            OutputWritten(name=one.name, by_own_kernel=True, unwritten_elements=5) for one in assignment.outputs
        )
        return {"audit": audit_of(assignment, outputs=holes)}
    if label in ("out-of-bounds",):
        seen = (Finding(kind="out-of-bounds-store", message="y[64] of (64,)", line=12),)
        return {"audit": audit_of(assignment, findings=seen)}
    return {}


@pytest.mark.parametrize("path", PLANTED)
def test_the_facts_of_a_file_lead_to_the_answer_written_beside_it(path):
    want = PLANTED[path]
    assignment = assignment_of(want["assignment"])
    grade = judge(assignment, facts_of(path, want, assignment))
    found = grade_json(grade)
    finer = {"partial"} if want["verdict"] == "wrong" and want["numerics"] == "pass" else set()
    assert found["verdict"] in {want["verdict"], *want.get("accept", []), *finer}
    # what only a GPU shows is a note; a full file has no label
    assert found["fault"] == ("" if want.get("gpu_only") else want["fault"])
    assert found["axes"]["numerics"]["verdict"] == want["numerics"]
    assert found["axes"]["speed"]["verdict"] == "not_measured"
    if found["verdict"] in ("error", "limit"):
        return
    for axis in ("memory", "structure"):
        if want[axis] != "na":
            assert found["axes"][axis]["verdict"] == want[axis], axis


def test_the_corpus_is_all_here():
    assert len(PLANTED) >= 60
    labels = {want["fault"] for want in PLANTED.values()}
    assert labels > NEED_NO_BANK
