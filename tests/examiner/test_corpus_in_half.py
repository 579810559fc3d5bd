"""Every correct file of the corpus with everything asked in float16 and in bfloat16, in the interpreter."""

import tomllib
from pathlib import Path

import pytest
from in_dtype import in_dtype

from grader.judging import grade_json, judge
from workers.examination import examine

CORPUS = Path(__file__).resolve().parents[1] / "corpus"
CORRECT = {
    name: row["assignment"]
    for name, row in sorted(tomllib.loads((CORPUS / "expected.toml").read_text()).items())
    if "/ok-" in name
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", CORRECT, ids=lambda name: name.removesuffix(".py"))
def test_a_correct_file_is_right_in_half_precision_too(name, dtype, assignment_named, sandboxes):
    assignment = in_dtype(assignment_named(CORRECT[name]), dtype)
    assert {case.dtype for case in assignment.cases} == {"float16", "bfloat16", dtype}
    examination = examine(assignment, (CORPUS / name).read_bytes(), sandboxes=sandboxes)
    grade = grade_json(judge(assignment, examination))
    failed = {probe["name"]: probe["rel_error"] for probe in grade["probes"] if probe["verdict"] != "pass"}
    assert failed == {}
    assert grade["verdict"] == "full"
    assert grade["score"]["points"] == grade["score"]["out_of"]
