"""What the corpus benchmark of a GPU calls right: no GPU needed to say so."""

import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
sys.path.insert(0, str(PROJECT / "benchmarks"))

import gpu_corpus  # noqa: E402 (benchmarks are programs, not a package)

JOBS = {(job.name, job.dtype): job for job in gpu_corpus.jobs([], list(gpu_corpus.DTYPES))}


def grade(verdict, fault="", *, failed=(), points=70.0, **axes):
    return {
        "verdict": verdict,
        "fault": fault,
        "score": {"points": points, "out_of": 70.0},
        "axes": {name: {"verdict": said} for name, said in axes.items()},
        "probes": [
            {"name": name, "verdict": "fail" if name in failed else "pass"}
            for name in ("random", "tail", "large", "long")
        ],
    }


def test_correct_files_are_asked_in_three_dtypes_and_faulty_ones_in_one():
    correct = {name for name, _ in JOBS if "/ok-" in name}
    assert len(correct) >= 14
    assert all((name, dtype) in JOBS for name in correct for dtype in gpu_corpus.DTYPES)
    assert {dtype for name, dtype in JOBS if "/ok-" not in name} == {"float32"}


@pytest.mark.parametrize("dtype", gpu_corpus.DTYPES)
def test_everything_is_asked_in_the_dtype_of_the_job(dtype):
    assignment = JOBS["flash-attention-forward/ok-raw-strides.py", dtype].assignment()
    asked = {case.dtype for case in assignment.cases}
    assert asked == {dtype, "float16", "bfloat16"}
    assert (assignment.memory.dtype, assignment.structure.dtype, assignment.speed) == (dtype, dtype, None)


OK = JOBS["flash-attention-forward/ok-raw-strides.py", "float16"]
TAIL = JOBS["flash-attention-forward/tail-unmasked.py", "float32"]
STORED = JOBS["flash-attention-forward/stored-scores.py", "float32"]
RACE = JOBS["online-softmax/race-missing-barrier.py", "float32"]
RIGHT = {"numerics": "pass", "memory": "pass", "structure": "pass"}


@pytest.mark.parametrize(
    ("job", "graded"),
    [
        pytest.param(OK, grade("full", **RIGHT), id="correct"),
        pytest.param(
            TAIL, grade("wrong", "tail-unmasked", failed=("tail",), **(RIGHT | {"numerics": "fail"})), id="planted"
        ),
        pytest.param(RACE, grade("wrong", "race", failed=("random",), numerics="fail"), id="gpu-only"),
    ],
)
def test_expected_answers_bring_no_complaint(job, graded):
    assert gpu_corpus.complaints(job, graded) == []


@pytest.mark.parametrize(
    ("job", "graded"),
    [
        pytest.param(OK, grade("held", **RIGHT), id="correct-but-held"),
        pytest.param(OK, grade("full", points=69.0, **RIGHT), id="a-point-lost"),
        pytest.param(OK, grade("full", **(RIGHT | {"memory": "not_run"})), id="memory-not-measured"),
        pytest.param(OK, grade("full", failed=("large",), **RIGHT), id="a-probe-failed"),
        pytest.param(TAIL, grade("full", **RIGHT), id="fault-not-seen"),
        pytest.param(TAIL, grade("wrong", failed=("tail",), **(RIGHT | {"numerics": "fail"})), id="fault-not-named"),
        pytest.param(
            TAIL,
            grade("wrong", "tail-unmasked", failed=("large",), **(RIGHT | {"numerics": "fail"})),
            id="not-where-it-was-planted",
        ),
        pytest.param(STORED, grade("partial", "stored-scores", **RIGHT), id="on-another-axis"),
        pytest.param(RACE, grade("full", numerics="pass"), id="gpu-only-not-seen"),
    ],
)
def test_anything_else_does(job, graded):
    assert gpu_corpus.complaints(job, graded)


def test_in_brief_a_faulty_file_is_asked_where_it_must_fail():
    brief = {job.name: job for job in gpu_corpus.jobs([], ["float32"], brief=True)}
    asked = brief[TAIL.name].assignment()
    assert {case.name for case in asked.cases} == {case.name for case in asked.cases if case.required} | {
        name for name in TAIL.want["probes"] if TAIL.assignment().case(name)
    }
    assert asked.memory is None
    assert brief[STORED.name].assignment().memory is not None
    assert brief[RACE.name].needs_audit
    assert not brief[OK.name].brief
    assert gpu_corpus.complaints(brief[TAIL.name], grade("wrong", failed=("tail",), numerics="fail")) == []
    assert gpu_corpus.complaints(brief[TAIL.name], grade("wrong", failed=("large",), numerics="fail"))
