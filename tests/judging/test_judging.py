import dataclasses
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from judging_facts import (
    assignment_of,
    audit_of,
    case,
    examination_of,
    failed,
    measured,
    memory_points,
    output,
    right,
    timing,
    with_probe,
    wrong,
)

from grader.assignment import Tolerance
from grader.judging import grade_json, judge, not_counted, speed_fraction
from grader.measurement import (
    Device,
    Evidence,
    Failure,
    FailureKind,
    Finding,
    OutputWritten,
    Storage,
    TorchOp,
    dumps,
    loads,
)
from grader.verdicts import AxisVerdict, CaseVerdict, Fault, Verdict

ASSIGNMENT = assignment_of()
EXAMINATION = examination_of(ASSIGNMENT)
BACKWARD = assignment_of("flash-attention")
LAYER_NORM = assignment_of("fused-bias-dropout-layernorm")
GPU = Device(kind="cuda", name="NVIDIA H200", arch="sm_90")


def judged(**changes):
    return judge(ASSIGNMENT, dataclasses.replace(EXAMINATION, **changes))


def verdict_of(name, grade):
    return next(one for one in grade.numerics.cases if one.name == name).verdict


# -- a right file ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "slug", ["flash-attention-forward", "flash-attention", "online-softmax", "fused-bias-dropout-layernorm"]
)
def test_a_right_file_gets_all_that_the_interpreter_can_measure(slug):
    assignment = assignment_of(slug)
    grade = judge(assignment, examination_of(assignment))
    assert grade.verdict is Verdict.FULL
    assert (grade.score.points, grade.score.out_of, grade.score.withheld) == (70.0, 70.0, 30.0)
    assert grade.diagnosis.label == ""
    assert grade.provisional
    assert {name: axis.verdict.value for name, axis in grade.axes.items()} == {
        "numerics": "pass",
        **({"memory": "pass"} if assignment.memory else {}),
        "structure": "pass",
        "speed": "not_measured",
    }


def test_the_json_has_the_form_that_was_agreed_on():
    found = grade_json(judged())
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert {key: found[key] for key in ("assignment", "verdict", "fault", "device", "score")} == {
        "assignment": "flash-attention-forward",
        "verdict": "full",
        "fault": "",
        "device": {"kind": "interpreter", "name": "Triton interpreter"},
        "score": {"points": 70.0, "out_of": 70.0, "withheld": 30.0},
    }
    axes = found["axes"]
    assert axes["numerics"] == {"verdict": "pass", "passed": 32, "of": 32, "points": 40.0, "out_of": 40.0}
    assert axes["memory"]["exponent"] == 1.0
    assert (axes["structure"]["launches"], axes["structure"]["unique_bytes"]) == (1, 100_000)
    assert (axes["speed"]["verdict"], axes["speed"]["points"], axes["speed"]["out_of"]) == ("not_measured", 0.0, 0.0)
    assert found["probes"][0] == {
        "name": "random",
        "verdict": "pass",
        "rel_error": 3e-7,
        "points": 1.0,
        "out_of": 1.0,
        "required": True,
    }


# -- numerics ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        pytest.param(0.0, True, id="exact"),
        # 2 x 2e-7 + 2e-5 + 3e-7 x 4
        pytest.param(2.159e-5, True, id="just-within"),
        pytest.param(2.161e-5, False, id="just-beyond"),
        pytest.param(math.nan, False, id="nan-is-never-right"),
        pytest.param(math.inf, False, id="infinity"),
        pytest.param(-1.0, False, id="no-such-error"),
        pytest.param(None, False, id="not-finite"),
    ],
)
def test_an_error_is_held_to_the_baselines_own_and_a_floor(error, passes):
    run = measured("late-jump", {"o": error, "lse": 1e-7})
    if error is None:
        run = measured("late-jump", {"o": None, "lse": 1e-7})
    grade = judge(ASSIGNMENT, with_probe(EXAMINATION, run))
    assert (verdict_of("late-jump", grade) is CaseVerdict.PASS) is passes
    assert (grade.verdict is Verdict.FULL) is passes
    json.dumps(grade_json(grade), allow_nan=False)


def test_the_floor_grows_with_the_scores_and_with_the_dtype_and_for_gradients():
    loud = measured("late-jump", {"o": 5e-5, "lse": 1e-7}, largest_score=130.0)
    assert judge(ASSIGNMENT, with_probe(EXAMINATION, loud)).verdict is Verdict.FULL
    half = measured("half", {"o": 1.9e-3, "lse": 1e-7})
    assert judge(ASSIGNMENT, with_probe(EXAMINATION, half)).verdict is Verdict.FULL
    gradient = measured("tail", {"o": 1e-7, "dq": 5.5e-5, "dk": 1e-7, "dv": 1e-7})
    assert judge(BACKWARD, with_probe(examination_of(BACKWARD), gradient)).verdict is Verdict.FULL
    forward = measured("tail", {"o": 5.5e-5, "dq": 1e-7, "dk": 1e-7, "dv": 1e-7})
    assert judge(BACKWARD, with_probe(examination_of(BACKWARD), forward)).verdict is Verdict.WRONG


def test_a_broken_baseline_lets_nothing_pass():
    run = measured("tail", {}, outputs=(output("o", 0.5, baseline_rel_error=math.inf), output("lse")))
    assert verdict_of("tail", judge(ASSIGNMENT, with_probe(EXAMINATION, run))) is CaseVerdict.FAIL


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        pytest.param({"shape": (1, 64, 32, 1)}, Fault.SHAPE, id="shape"),
        pytest.param({"dtype": "float64"}, Fault.DTYPE, id="dtype"),
        pytest.param({"n_not_finite": 1}, Fault.NOT_FINITE, id="one-nan"),
        pytest.param({"rel_error": None}, Fault.NOT_FINITE, id="no-error"),
    ],
)
def test_an_output_must_have_the_right_form(changes, fault):
    run = measured("tail", {}, outputs=(output("o", **changes), output("lse")))
    grade = judge(ASSIGNMENT, with_probe(EXAMINATION, run))
    found = next(one for one in grade.numerics.cases if one.name == "tail")
    assert (found.verdict, found.faults, found.points) == (CaseVerdict.FAIL, (fault,), 0.0)


def test_an_output_that_was_not_returned_fails():
    grade = judge(ASSIGNMENT, with_probe(EXAMINATION, measured("tail", {"o": 1e-7})))
    assert next(one for one in grade.numerics.cases if one.name == "tail").faults == (Fault.MISSING,)


@pytest.mark.parametrize(
    ("probe", "changes", "passes"),
    [
        pytest.param("repeat", {"repeat_equal": False}, False, id="bits-differ"),
        pytest.param("repeat", {"repeat_equal": None}, False, id="repeat-not-shown"),
        pytest.param("random", {"repeat_equal": False}, True, id="only-repeat-asks-for-it"),
        pytest.param("input-unchanged", {"inputs_unchanged": False}, False, id="input-changed"),
        pytest.param("random", {"inputs_unchanged": False}, True, id="only-input-unchanged-asks-for-it"),
        pytest.param("guard", {"guards_intact": False}, False, id="guard-touched"),
        pytest.param("random", {"guards_intact": False}, True, id="only-guard-asks-for-it"),
        pytest.param("guard", {"findings": (Finding(kind="out-of-bounds-store", message="m"),)}, False, id="store"),
        pytest.param("guard", {"findings": (Finding(kind="out-of-bounds-load", message="m"),)}, False, id="load"),
        pytest.param("guard", {"findings": (Finding(kind="race-write-write", message="m"),)}, True, id="race"),
        pytest.param("fresh-inputs", {"first_result_kept": False}, False, id="first-result-lost"),
        pytest.param("fresh-inputs", {"first_result_kept": None}, False, id="first-result-not-shown"),
    ],
)
def test_a_check_is_judged_where_it_is_asked(probe, changes, passes):
    run = dataclasses.replace(right(probe, ASSIGNMENT), **changes)
    grade = judge(ASSIGNMENT, with_probe(EXAMINATION, run))
    assert (verdict_of(probe, grade) is CaseVerdict.PASS) is passes
    assert (grade.verdict is Verdict.FULL) is passes


def test_an_out_of_bounds_access_of_the_audited_call_fails_the_guard():
    audit = audit_of(ASSIGNMENT, findings=(Finding(kind="out-of-bounds-store", message="m", line=3),))
    grade = judged(audit=audit)
    assert verdict_of("guard", grade) is CaseVerdict.FAIL
    assert grade.structure.verdict is AxisVerdict.PASS


def test_points_are_the_share_of_the_probes_that_pass():
    cases = (case("random", points=6), case("tail", points=3), case("half", points=1))
    assignment = assignment_of(cases=cases)
    grade = judge(assignment, with_probe(examination_of(assignment), wrong("tail", assignment)))
    assert (grade.numerics.points, grade.numerics.verdict) == (28.0, AxisVerdict.FAIL)
    assert (grade.memory.points, grade.structure.points) == (20.0, 10.0)
    assert grade.verdict is Verdict.WRONG


def test_nothing_is_earned_unless_every_required_probe_passes():
    grade = judge(ASSIGNMENT, with_probe(EXAMINATION, wrong("causal", ASSIGNMENT)))
    assert grade.score.points == 0.0
    assert grade.memory.verdict is AxisVerdict.PASS, "the fact stays a fact"
    assert grade.structure.verdict is AxisVerdict.PASS


def test_a_probe_that_did_not_run_earns_nothing():
    probes = tuple(run for run in EXAMINATION.probes if run.name != "causal")
    grade = judged(probes=probes)
    assert (verdict_of("causal", grade), grade.verdict, grade.score.points) == (CaseVerdict.NOT_RUN, Verdict.WRONG, 0.0)


def test_a_probe_that_the_assignment_dropped_is_left_out():
    grade = judged(probes=(*EXAMINATION.probes, failed("dropped", FailureKind.RAISES)))
    assert grade.verdict is Verdict.FULL


def test_probes_of_other_devices_are_not_asked_for():
    assignment = assignment_of(cases=(case("random"), case("big", devices=("cuda",))))
    examination = examination_of(assignment, probes=(right("random", assignment),))
    assert judge(assignment, examination).verdict is Verdict.FULL


def test_where_no_required_probe_runs_on_the_device_all_are_required():
    assignment = assignment_of(cases=(case("random", devices=("cuda",)), case("tail"), case("half")))
    examination = examination_of(assignment, probes=(right("tail", assignment), wrong("half", assignment)))
    assert judge(assignment, examination).score.points == 0.0


# -- files that give no result -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "verdict"),
    [
        (FailureKind.SYNTAX_ERROR, Verdict.ERROR),
        (FailureKind.IMPORT_ERROR, Verdict.ERROR),
        (FailureKind.PYTHON_EXIT, Verdict.ERROR),
        (FailureKind.NOT_OURS, Verdict.ERROR),
        (FailureKind.MEMORY_LIMIT, Verdict.LIMIT),
        (FailureKind.TIME_LIMIT, Verdict.LIMIT),
        (FailureKind.OUTPUT_LIMIT, Verdict.LIMIT),
        (FailureKind.PROCESS_LIMIT, Verdict.LIMIT),
        (FailureKind.SCRATCH_LIMIT, Verdict.LIMIT),
    ],
)
def test_a_file_that_does_not_load_gets_no_further(kind, verdict):
    grade = judged(load_failure=Failure(kind=kind, message="m"), probes=(), memory=(), audit=None)
    assert (grade.verdict, grade.score.points, grade.diagnosis.label) == (verdict, 0.0, kind.value)
    assert {name: axis.verdict.value for name, axis in grade.axes.items()} == {
        "numerics": "fail",
        "memory": "not_run",
        "structure": "not_run",
        "speed": "not_measured",
    }


def test_one_probe_without_a_result_makes_an_error():
    grade = judge(ASSIGNMENT, with_probe(EXAMINATION, failed("tail", FailureKind.RAISES)))
    assert (grade.verdict, verdict_of("tail", grade)) == (Verdict.ERROR, CaseVerdict.ERROR)
    assert grade.numerics.points == pytest.approx(40 * 31 / 32, abs=0.01)


def test_a_limit_is_the_news_beside_errors():
    runs = (failed("random", FailureKind.RAISES), failed("tail", FailureKind.TIME_LIMIT))
    grade = judge(ASSIGNMENT, with_probe(EXAMINATION, *runs))
    assert (grade.verdict, grade.failure.kind) == (Verdict.LIMIT, FailureKind.TIME_LIMIT)


def test_a_failure_of_a_visible_probe_is_shown_before_a_hidden_one():
    assignment = assignment_of(cases=(case("secret", hidden=True), case("random")))
    runs = (failed("secret", FailureKind.RAISES, "hidden words"), failed("random", FailureKind.RAISES, "open words"))
    assert judge(assignment, examination_of(assignment, probes=runs)).failure.message == "open words"


def test_a_file_whose_audit_fails_is_not_full():
    grade = judged(audit=None, audit_failure=Failure(kind=FailureKind.RAISES, message="m", stage="audit"))
    assert (grade.verdict, grade.structure.verdict) == (Verdict.ERROR, AxisVerdict.NOT_RUN)


def test_a_file_that_was_not_audited_is_not_full():
    grade = judged(audit=None)
    assert (grade.verdict, grade.structure.points) == (Verdict.PARTIAL, 0.0)


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("forward", "verdict"),
    [
        pytest.param(1.0, AxisVerdict.PASS, id="flash"),
        pytest.param(1.29, AxisVerdict.PASS, id="just-within"),
        pytest.param(1.31, AxisVerdict.FAIL, id="just-beyond"),
        pytest.param(2.0, AxisVerdict.FAIL, id="naive"),
        pytest.param(0.0, AxisVerdict.PASS, id="constant"),
    ],
)
def test_memory_passes_up_to_its_exponent(forward, verdict):
    grade = judged(memory=memory_points(forward))
    assert (grade.memory.verdict, grade.memory.points) == (verdict, 20.0 if verdict is AxisVerdict.PASS else 0.0)
    assert grade.memory.exponent == pytest.approx(forward, abs=1e-2)
    assert grade.verdict is (Verdict.FULL if verdict is AxisVerdict.PASS else Verdict.PARTIAL)


def test_a_forward_that_stores_scores_fails_memory_and_structure():
    grade = judged(memory=memory_points(2.0))
    assert (grade.memory.verdict, grade.structure.verdict) == (AxisVerdict.FAIL, AxisVerdict.FAIL)


def test_a_dense_backward_fails_memory_alone():
    grade = judge(BACKWARD, examination_of(BACKWARD, memory=memory_points(backward=2.0)))
    assert (grade.verdict, grade.memory.verdict) == (Verdict.PARTIAL, AxisVerdict.FAIL)
    assert grade.structure.verdict is AxisVerdict.PASS
    assert grade.score.points == 50.0


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"memory": memory_points(backward=1.0, kept=2.0)}, id="kept-bytes-grow"),
        pytest.param(
            {"audit": audit_of(BACKWARD, saved=(Storage(shape=(1, 192, 192), dtype="float32", size_bytes=147456),))},
            id="saved-matrix",
        ),
        pytest.param(
            {"audit": audit_of(BACKWARD, saved=(Storage(shape=(1, 192, 256), dtype="float16", size_bytes=98304),))},
            id="saved-padded-matrix",
        ),
    ],
)
def test_saved_scores_fail_structure(changes):
    grade = judge(BACKWARD, examination_of(BACKWARD, **changes))
    assert (grade.structure.verdict, grade.structure.failed("saved")) == (AxisVerdict.FAIL, True)


@pytest.mark.parametrize("shape", [(1, 192, 32), (192,), (1, 192), (3, 192, 64)])
def test_what_is_saved_per_row_is_fine(shape):
    audit = audit_of(BACKWARD, saved=(Storage(shape=shape, dtype="float32", size_bytes=1),))
    assert judge(BACKWARD, examination_of(BACKWARD, audit=audit)).verdict is Verdict.FULL


def test_a_size_that_does_not_fit_fails_memory_and_is_no_error():
    points = memory_points()
    last = dataclasses.replace(points[-1], failure=Failure(kind=FailureKind.MEMORY_LIMIT, message="m", stage="memory"))
    grade = judged(memory=(*points[:-1], last))
    assert (grade.verdict, grade.memory.verdict, grade.memory.failed_at) == (Verdict.PARTIAL, AxisVerdict.FAIL, 384)


def test_a_sweep_that_raises_is_an_error():
    points = memory_points()
    last = dataclasses.replace(points[-1], failure=Failure(kind=FailureKind.RAISES, message="m", stage="memory"))
    assert judged(memory=(*points[:-1], last)).verdict is Verdict.ERROR


def test_memory_that_was_not_measured_earns_nothing():
    grade = judged(memory=memory_points()[:1])
    assert (grade.verdict, grade.memory.verdict, grade.memory.points) == (Verdict.PARTIAL, AxisVerdict.NOT_RUN, 0.0)


@pytest.mark.parametrize(("stage", "verdict"), [("memory-384", AxisVerdict.NOT_RUN), ("timing", AxisVerdict.PASS)])
def test_a_sweep_whose_time_was_over_before_its_largest_size_earns_nothing(stage, verdict):
    slow = Failure(kind=FailureKind.TIME_LIMIT, message="m", stage=stage)
    points = memory_points()[:-1] if verdict is AxisVerdict.NOT_RUN else memory_points()
    assert len(points) >= 2
    grade = judged(memory=points, too_slow=slow)
    assert (grade.memory.verdict, grade.memory.points > 0) == (verdict, verdict is AxisVerdict.PASS)


@pytest.mark.parametrize(
    ("tiles", "passes"),
    [((4096, 4096, 4096), True), ((0, 0, 0), True), ((6144, 12288, 24576), False), ((2048, 4096, 4096), True)],
)
def test_a_tile_as_wide_as_the_row_fails_structure(tiles, passes):
    points = tuple(
        dataclasses.replace(point, largest_tile_elements=tile)
        for point, tile in zip(memory_points(), tiles, strict=True)
    )
    assert (judged(memory=points).structure.verdict is AxisVerdict.PASS) is passes


# -- structure and rules -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "check"),
    [
        pytest.param({"n_launches": 2}, "launches", id="two-launches"),
        pytest.param({"unique_bytes": 148_000}, "bytes", id="too-many-bytes"),
        pytest.param({"torch_ops": (TorchOp(op="aten::softmax", count=1, size_bytes=800),)}, "torch-ops", id="torch"),
        pytest.param({"outputs": (OutputWritten(name="o", by_own_kernel=True),)}, "outputs-traced", id="lse-unseen"),
    ],
)
def test_structure_is_held_against_the_audit(changes, check):
    grade = judged(audit=audit_of(ASSIGNMENT, **changes))
    assert (grade.verdict, grade.structure.verdict, grade.structure.points) == (Verdict.PARTIAL, AxisVerdict.FAIL, 0.0)
    assert [one.name for one in grade.structure.checks if not one.ok] == [check]


def test_what_torch_does_at_measured_sizes_alone_counts_as_anywhere():
    """A file may compute by itself where it is probed, and borrow where it is timed."""
    ops = (TorchOp(op="_softmax", count=1, size_bytes=1 << 30), TorchOp(op="mul", count=1, size_bytes=1 << 30))
    assert judged(large_ops=ops[1:]).structure.failed("torch-ops")
    assert judged(large_ops=ops[1:]).verdict is Verdict.PARTIAL
    forbidding = dataclasses.replace(ASSIGNMENT.structure, forbidden_ops=("_softmax",))
    asked = dataclasses.replace(ASSIGNMENT, structure=forbidding)
    assert judge(asked, examination_of(asked, large_ops=ops)).verdict is Verdict.REFUSED
    library = (TorchOp(op="_scaled_dot_product_flash_attention", count=1, size_bytes=8, line=12),)
    assert judged(large_library_calls=library).verdict is Verdict.REFUSED


@pytest.mark.parametrize("op", ["copy", "aten.clone.default", "aten::contiguous", "aten.fill_.Scalar"])
def test_copies_and_fills_are_always_allowed(op):
    audit = audit_of(ASSIGNMENT, torch_ops=(TorchOp(op=op, count=1, size_bytes=8),))
    assert judged(audit=audit).verdict is Verdict.FULL


def test_a_scalar_made_by_torch_is_no_computation():
    audit = audit_of(ASSIGNMENT, torch_ops=(TorchOp(op="randint", count=1, size_bytes=8),))
    assert judged(audit=audit).verdict is Verdict.FULL


@pytest.mark.parametrize(("elements", "ok"), [(8192, True), (8193, False)])
def test_a_tile_may_be_as_large_as_the_assignment_says(elements, ok):
    asked = dataclasses.replace(ASSIGNMENT, structure=dataclasses.replace(ASSIGNMENT.structure, max_tile_elements=8192))
    grade = judge(asked, examination_of(asked, audit=audit_of(asked, largest_tile_elements=elements)))
    assert grade.structure.failed("tile") is not ok
    assert (grade.verdict is Verdict.FULL) is ok
    assert grade.diagnosis.label == ("" if ok else "row-in-one-tile")


def test_a_backward_has_its_own_number_of_launches():
    assert judge(BACKWARD, examination_of(BACKWARD, audit=audit_of(BACKWARD, backward_launches=3))).verdict == "full"
    grade = judge(BACKWARD, examination_of(BACKWARD, audit=audit_of(BACKWARD, backward_launches=4)))
    assert grade.structure.failed("backward-launches")


LIBRARY = {
    "library_calls": (TorchOp(op="scaled_dot_product_attention", count=1, size_bytes=8, line=12),),
    "outputs": (OutputWritten(name="o", by_own_kernel=False), OutputWritten(name="lse", by_own_kernel=True)),
}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(LIBRARY, id="library-attention"),
        pytest.param({"library_calls": LIBRARY["library_calls"]}, id="library-behind-a-kernel"),
        pytest.param({"outputs": LIBRARY["outputs"]}, id="output-not-written"),
        pytest.param({"n_launches": 0, "launches": ()}, id="no-launch"),
    ],
)
def test_a_broken_rule_refuses_the_file_and_keeps_its_numbers(changes):
    grade = judged(audit=audit_of(ASSIGNMENT, **changes))
    assert grade.verdict is Verdict.REFUSED
    assert (grade.numerics.verdict, grade.structure.verdict) == (AxisVerdict.PASS, AxisVerdict.FAIL)
    assert grade.score.points == 0.0


def asking(**changes):
    return dataclasses.replace(ASSIGNMENT, structure=dataclasses.replace(ASSIGNMENT.structure, **changes))


COMPUTED = TorchOp(op="aten.bmm.default", count=1, size_bytes=1 << 20)
NOT_ITS_KERNELS = [
    pytest.param({"right_without_launches": ("o",)}, id="right-without-launches"),
    pytest.param({"audit": audit_of(ASSIGNMENT, unread_inputs=("q",))}, id="an-input-that-no-kernel-reads"),
    pytest.param({"audit": audit_of(ASSIGNMENT, torch_ops=(COMPUTED,))}, id="torch-does-the-work"),
]


@pytest.mark.parametrize("changes", NOT_ITS_KERNELS)
def test_a_right_answer_that_no_kernel_computes_is_refused(changes):
    grade = judge(asking(forbidden_ops=("bmm",)), dataclasses.replace(EXAMINATION, **changes))
    assert grade.verdict is Verdict.REFUSED
    assert grade.score.points == 0.0


@pytest.mark.parametrize("changes", NOT_ITS_KERNELS)
def test_of_a_wrong_answer_that_says_nothing(changes):
    examination = dataclasses.replace(EXAMINATION, **changes)
    grade = judge(asking(forbidden_ops=("bmm",)), with_probe(examination, wrong("random", ASSIGNMENT)))
    assert grade.verdict is Verdict.WRONG
    assert grade.structure.refusals == ()


def test_an_assignment_may_have_inputs_that_need_not_be_read():
    examination = dataclasses.replace(EXAMINATION, audit=audit_of(ASSIGNMENT, unread_inputs=("q",)))
    assert judge(asking(unread_inputs=("q",)), examination).verdict is Verdict.FULL


def test_what_a_probe_alone_called_counts_as_much_as_what_the_audit_saw():
    run = EXAMINATION.probes[-1]
    for changes, verdict in (
        (
            {"library_calls": (TorchOp(op="_scaled_dot_product_cudnn_attention", count=1, size_bytes=0),)},
            Verdict.REFUSED,
        ),
        ({"torch_ops": (COMPUTED,)}, Verdict.PARTIAL),
        ({"torch_ops": (dataclasses.replace(COMPUTED, size_bytes=8),)}, Verdict.FULL),
    ):
        probes = (*EXAMINATION.probes[:-1], dataclasses.replace(run, **changes))
        examination = dataclasses.replace(EXAMINATION, probes=probes)
        assert judge(asking(forbidden_ops=()), examination).verdict is verdict


def test_what_a_person_does_not_count_keeps_its_verdicts_and_loses_every_point():
    grade = not_counted(judge(ASSIGNMENT, EXAMINATION), "It hands out stored answers.")
    assert (grade.verdict, grade.score.points) == (Verdict.NOT_COUNTED, 0.0)
    assert {axis.points for axis in grade.axes.values()} == {0.0}
    assert grade.numerics.verdict is AxisVerdict.PASS
    assert (grade.diagnosis.sentence, grade.diagnosis.label) == ("It hands out stored answers.", "")


def test_gradients_may_come_from_torch():
    assert not any(one.by_own_kernel for one in examination_of(BACKWARD).audit.outputs if one.name != "o")
    assert judge(BACKWARD, examination_of(BACKWARD)).verdict is Verdict.FULL


def test_a_wrong_answer_is_the_news_before_a_broken_rule_and_earns_as_little():
    examination = dataclasses.replace(EXAMINATION, audit=audit_of(ASSIGNMENT, **LIBRARY))
    grade = judge(ASSIGNMENT, with_probe(examination, wrong("random", ASSIGNMENT)))
    assert (grade.verdict, grade.score.points) == (Verdict.WRONG, 0.0)
    grade = judge(ASSIGNMENT, with_probe(examination, wrong("half", ASSIGNMENT)))
    assert (grade.verdict, grade.score.points) == (Verdict.REFUSED, 0.0)


def test_evidence_holds_a_grade_and_changes_no_point():
    grade = judged(evidence=(Evidence(kind="clock", message="m"),))
    assert (grade.verdict, grade.released_verdict) == (Verdict.HELD, Verdict.FULL)
    assert dataclasses.replace(grade, verdict=Verdict.FULL) == judged()


def test_races_in_the_interpreter_change_no_verdict():
    findings = (Finding(kind="race-read-write", message="programs (0, 0) and (1, 0) meet at dq", line=40),)
    grade = judge(BACKWARD, examination_of(BACKWARD, audit=audit_of(BACKWARD, findings=findings)))
    assert (grade.verdict, grade.diagnosis.label) == (Verdict.FULL, "")
    assert any("line 40" in note for note in grade.diagnosis.notes)


# -- speed -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "verdict", "points"),
    [
        (0.5, AxisVerdict.FAIL, 0.0),
        (1.0, AxisVerdict.FAIL, 0.0),
        (2.5, AxisVerdict.PARTIAL, 7.5),
        (4.0, AxisVerdict.PARTIAL, 15.0),
        (6.0, AxisVerdict.PARTIAL, 22.5),
        (8.0, AxisVerdict.PASS, 30.0),
        (80.0, AxisVerdict.PASS, 30.0),
        (math.nan, AxisVerdict.FAIL, 0.0),
    ],
)
def test_speed_is_linear_between_steps(ratio, verdict, points):
    grade = judged(device=GPU, timings=(timing(ratio),))
    assert (grade.speed.verdict, grade.speed.points) == (verdict, points)
    assert grade.score.withheld == 0.0
    assert not grade.provisional
    json.dumps(grade_json(grade), allow_nan=False)


def test_speed_is_never_reported_for_a_file_that_is_not_right():
    examination = dataclasses.replace(EXAMINATION, device=GPU, timings=(timing(9.0),))
    grade = judge(ASSIGNMENT, with_probe(examination, wrong("random", ASSIGNMENT)))
    assert (grade.speed.verdict, grade.speed.speedup) == (AxisVerdict.NOT_RUN, None)


@pytest.mark.parametrize(
    ("model", "gpu"),
    [
        pytest.param("h200", "NVIDIA H200", id="its-own"),
        pytest.param("l4", "NVIDIA L4", id="its-own-short"),
        pytest.param("rtx4090", "NVIDIA GeForce RTX 4090", id="its-own-of-two-words"),
    ],
)
def test_a_gpu_may_have_steps_of_its_own(model, gpu):
    assert judged_with_easy_steps_for(model, gpu).speed.points == 30.0


@pytest.mark.parametrize(
    ("model", "gpu"),
    [
        pytest.param("l4", "NVIDIA L40S", id="a-longer-name"),
        pytest.param("h200", "NVIDIA GH200 480GB", id="within-a-name"),
        pytest.param("a100", "NVIDIA A10", id="a-shorter-name"),
    ],
)
def test_steps_of_one_gpu_are_no_others(model, gpu):
    assert judged_with_easy_steps_for(model, gpu).speed.points < 30.0


def judged_with_easy_steps_for(model, gpu):
    first, *_, last = ASSIGNMENT.speed.steps
    easy = {model: (first, dataclasses.replace(last, speedup=2.0))}
    speed = dataclasses.replace(ASSIGNMENT.speed, gpu_steps=easy)
    device = dataclasses.replace(GPU, name=gpu)
    return judge(assignment_of(speed=speed), dataclasses.replace(EXAMINATION, device=device, timings=(timing(2.0),)))


def test_another_gpu_than_asked_for_is_provisional():
    assert judged(device=dataclasses.replace(GPU, arch="sm_80"), timings=(timing(8.0),)).provisional


@settings(deadline=None)  # time is no property of judging, and machines are busy at times
@given(st.floats(0, 100), st.floats(0, 100))
def test_a_faster_file_never_earns_less(a, b):
    steps = ASSIGNMENT.speed.steps
    slow, fast = sorted((a, b))
    assert 0 <= speed_fraction(steps, slow) <= speed_fraction(steps, fast) <= 1


# -- properties --------------------------------------------------------------------------------------------------------

SMALL = assignment_of(
    cases=tuple(case(name, points=points) for name, points in (("random", 4), ("tail", 2), ("half", 1), ("large", 3)))
)
ERRORS = st.lists(st.one_of(st.floats(0, 1e-1), st.just(1e-6)), min_size=8, max_size=8)


def graded(errors):
    pairs = zip(errors[::2], errors[1::2], strict=True)
    runs = [measured(one.name, {"o": o, "lse": lse}) for one, (o, lse) in zip(SMALL.cases, pairs, strict=True)]
    return judge(SMALL, examination_of(SMALL, probes=tuple(runs)))


@settings(deadline=None)  # time is no property of judging, and machines are busy at times
@given(errors=ERRORS, at=st.integers(0, 7), share=st.floats(0, 1))
def test_a_smaller_error_never_loses_points(errors, at, share):
    better = [error * share if i == at else error for i, error in enumerate(errors)]
    before, after = graded(errors), graded(better)
    assert after.score.points >= before.score.points
    assert all(a.points >= b.points for a, b in zip(after.numerics.cases, before.numerics.cases, strict=True))


@settings(deadline=None)  # time is no property of judging, and machines are busy at times
@given(errors=ERRORS, at=st.integers(0, 7), bad=st.sampled_from([math.nan, math.inf, None]))
def test_a_nan_anywhere_never_passes(errors, at, bad):
    grade = graded([bad if i == at else error for i, error in enumerate(errors)])
    assert not grade.numerics.cases[at // 2].passed
    assert grade.verdict is not Verdict.FULL


@settings(deadline=None)  # time is no property of judging, and machines are busy at times
@given(errors=ERRORS)
def test_judging_again_gives_the_same_grade_also_from_stored_facts(errors):
    runs = [
        measured(one.name, {"o": o, "lse": lse}) for one, o, lse in zip(SMALL.cases, errors, errors[4:], strict=False)
    ]
    examination = examination_of(SMALL, probes=tuple(runs))
    assert judge(SMALL, examination) == judge(SMALL, loads(dumps(examination)))


@settings(deadline=None)  # time is no property of judging, and machines are busy at times
@given(floor=st.floats(1e-9, 1.0))
def test_another_tolerance_changes_the_judgement_and_not_the_facts(floor):
    examination = with_probe(EXAMINATION, wrong("tail", ASSIGNMENT, error=1e-3))
    facts = dumps(examination)
    tolerance = Tolerance(
        slack=0.0, floor=dict.fromkeys(("float32", "float16", "bfloat16"), floor), gradient_floor={}, score_slope=0.0
    )
    grade = judge(assignment_of(tolerance=tolerance), examination)
    assert (verdict_of("tail", grade) is CaseVerdict.PASS) is (floor >= 1e-3)
    assert dumps(examination) == facts


@settings(deadline=None)  # time is no property of judging, and machines are busy at times
@given(
    st.lists(st.sampled_from([one.name for one in SMALL.cases]), max_size=4),
    st.sampled_from(list(FailureKind)),
    st.booleans(),
)
def test_the_score_is_the_sum_of_its_axes_and_within_bounds(names, kind, on_gpu):
    examination = with_probe(examination_of(SMALL), *(failed(name, kind) for name in names))
    if on_gpu:
        examination = dataclasses.replace(examination, device=GPU)
    grade = judge(SMALL, examination)
    score = grade.score
    assert score.points == pytest.approx(sum(axis.points for axis in grade.axes.values()))
    assert score.out_of + score.withheld == 100.0
    assert all(0 <= axis.points <= axis.out_of for axis in grade.axes.values())
    json.dumps(grade_json(grade), allow_nan=False)
