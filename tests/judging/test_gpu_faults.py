"""What only a GPU shows: crashes with a line, shared memory, tuned kernels, races, and what is wrong at full size."""

import dataclasses

import pytest
from judging_facts import assignment_of, audit_of, examination_of, failed, measured, right, timing, with_probe, wrong

from grader.judging import grade_json, judge
from grader.measurement import (
    Device,
    DeviceFault,
    Evidence,
    Failure,
    FailureKind,
    Finding,
    LargeCall,
    Replay,
    ReplayOutcome,
    dumps,
    loads,
)
from grader.report import report

ASSIGNMENT = assignment_of()
SHARED = (
    "OutOfResources: out of resource: shared memory, Required: 294912, Hardware limit: 232448. Reducing block sizes or "
    "`num_stages` may help."
)
ILLEGAL = "AcceleratorError: CUDA error: an illegal memory access was encountered"
FAULT = DeviceFault(
    probe="tail",
    what="Invalid __global__ write of size 4 bytes",
    where="Access at 0x7f0000000c00 is out of bounds",
    kernel="flash_kernel",
    line=45,
)
LARGE = LargeCall(
    axes={"batch": 16, "queries": 8192, "keys": 8192, "head_dim": 64},
    dtype="bfloat16",
    output="o",
    rel_error=0.31,
    limit=6e-3,
    n_rows=16,
    n_wrong_rows=9,
)


def on_gpu(*runs, **changes):
    found = with_probe(examination_of(ASSIGNMENT), *runs)
    return dataclasses.replace(found, device=Device(kind="cuda", name="NVIDIA H200", arch="sm_90"), **changes)


def graded(examination):
    return grade_json(judge(ASSIGNMENT, examination))


def words(examination, **kwargs):
    found = report(ASSIGNMENT, examination, judge(ASSIGNMENT, examination), **kwargs)
    return " ".join(sentence for section in found.sections for sentence in section.sentences)


def test_a_launch_that_asks_for_too_much_shared_memory_hears_how_much_there_is():
    said = words(on_gpu(failed("head-dim-128", FailureKind.RAISES, SHARED)))
    assert "294,912 B of shared memory a block (288 KiB); this GPU has 232,448 B (227 KiB)" in said


def test_a_crash_names_the_line_where_the_sanitizer_stopped():
    examination = on_gpu(failed("tail", FailureKind.CRASHED, ILLEGAL), device_fault=FAULT)
    assert graded(examination)["verdict"] == "error"
    said = words(examination)
    assert "an illegal memory access was encountered" in said
    assert "names the place at line 45 in flash_kernel: Invalid __global__ write of size 4 bytes" in said


def test_what_the_sanitizer_saw_of_a_hidden_probe_is_not_told():
    cases = tuple(dataclasses.replace(case, hidden=case.name == "tail") for case in ASSIGNMENT.cases)
    assignment = dataclasses.replace(ASSIGNMENT, cases=cases)
    examination = on_gpu(failed("tail", FailureKind.CRASHED, ILLEGAL), device_fault=FAULT)
    said = report(assignment, examination, judge(assignment, examination))
    assert "flash_kernel" not in str(said)


def test_the_line_of_another_failure_is_not_blamed_on_the_sanitizer():
    examination = on_gpu(failed("tail", FailureKind.RAISES, "ValueError: boom"), device_fault=FAULT)
    assert "sanitizer" not in words(examination)


def test_a_file_that_is_wrong_at_full_size_alone_is_wrong_and_not_held():
    examination = on_gpu(large_calls=(LARGE,), timings=(timing(4.0),))
    grade = graded(examination)
    assert (grade["verdict"], grade["fault"]) == ("wrong", "wrong-when-large")
    assert grade["axes"]["numerics"]["verdict"] == "fail"
    assert grade["axes"]["speed"]["verdict"] == "not_run"
    assert grade["axes"]["speed"]["points"] == 0
    said = words(examination)
    assert "queries = 8,192" in said
    assert "off by 3.1e-01 of the largest value, where 6.0e-03 passes" in said


def test_a_file_that_fails_at_full_size_alone_is_an_error_with_its_message():
    failure = Failure(kind=FailureKind.RAISES, message=SHARED, line=31, stage="timing")
    examination = on_gpu(large_calls=(dataclasses.replace(LARGE, failure=failure, rel_error=None),))
    grade = graded(examination)
    assert (grade["verdict"], grade["fault"]) == ("error", "needs-bigger-shared-memory")
    assert "294,912 B" in words(examination)


def test_these_measurements_survive_being_stored():
    failure = Failure(kind=FailureKind.CRASHED, message=ILLEGAL)
    examination = on_gpu(large_calls=(LARGE, dataclasses.replace(LARGE, failure=failure)), device_fault=FAULT)
    assert loads(dumps(examination)) == examination


def tuned(name, errors):
    return measured(name, errors, tuned=True)


@pytest.mark.parametrize(
    ("tuned_names", "wrong_names", "label"),
    [
        pytest.param(("random", "long"), ("random", "long"), "autotune-in-place", id="wrong-just-there"),
        pytest.param(("random", "long"), ("random", "tail"), "", id="elsewhere-too"),
        pytest.param((), ("random", "long"), "", id="never-tuned"),
        pytest.param(("random", "long", "tail", "large", "strided"), ("long",), "", id="most-tuned-calls-are-right"),
    ],
)
def test_wrong_only_while_the_autotuner_tries_its_configurations(tuned_names, wrong_names, label):
    runs = []
    for name in {*tuned_names, *wrong_names}:
        run = wrong(name, ASSIGNMENT) if name in wrong_names else right(name, ASSIGNMENT)
        runs.append(dataclasses.replace(run, tuned=name in tuned_names))
    grade = graded(on_gpu(*runs))
    assert grade["verdict"] == "wrong"
    assert (grade["fault"] == "autotune-in-place") == (label == "autotune-in-place")


def test_a_race_is_named_on_a_gpu_where_results_are_wrong_though_two_runs_agree():
    race = Finding(kind="race-write-write", message="programs 0 and 1 store to element 0 of lse", line=33)
    audit = audit_of(ASSIGNMENT, findings=(race,))
    examination = on_gpu(wrong("random", ASSIGNMENT), audit=audit)
    assert graded(examination)["fault"] == "race"
    on_cpu = dataclasses.replace(examination, device=Device(kind="interpreter", name="a CPU"))
    assert graded(on_cpu)["fault"] != "race"


REPLAY = Replay(
    outcome=ReplayOutcome.AGREES, axes=dict(LARGE.axes), n_launches=1, torch_ops=("zeros",), time_ms=0.4549, ratio=37.03
)


def test_a_replay_is_told_to_staff_alone():
    examination = on_gpu(timings=(timing(4.0),), replay=REPLAY)
    said = "Replay: 1 launch of one call and torch's zeros, without the file's Python, give right outputs"
    assert said in words(examination, for_staff=True)
    assert "0.4549 ms a call, 37.03 times as fast as naive" in words(examination, for_staff=True)
    assert "Replay" not in words(examination)
    assert graded(examination)["verdict"] != "held"
    assert loads(dumps(examination)) == examination


def test_what_a_replay_says_of_a_file_stays_printable():
    hostile = dataclasses.replace(
        REPLAY, outcome=ReplayOutcome.DIFFERS, detail="\x1b[2J<script>\u202e", torch_ops=("\x1b[2J",), time_ms=None
    )
    sign = Evidence(kind="replay-differs", message=hostile.detail)
    examination = on_gpu(timings=(timing(4.0),), replay=hostile, evidence=(sign,))
    said = words(examination, for_staff=True)
    assert "\x1b" not in said
    assert "\u202e" not in said
    assert graded(examination)["verdict"] == "held"


def test_a_file_that_is_wrong_at_full_size_is_told_why_it_has_no_speed():
    assert "right at the sizes that are timed" in words(on_gpu(large_calls=(LARGE,), timings=(timing(4.0),)))
