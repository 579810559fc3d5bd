"""Numbers and sentences that the compile report derives, and the calls it compiles."""

import dataclasses
from collections.abc import Callable

import pytest

import reference
from grader.assignment import Assignment
from grader.errors import AssignmentError
from workers.compiling import TARGETS, compile_report, ctas_per_sm, plain_sentence, workloads


@pytest.mark.parametrize(
    ("registers", "shared_bytes", "num_warps", "ctas"),
    [
        pytest.param(128, 57 << 10, 4, 3, id="shared-memory-binds-by-one-KiB"),
        pytest.param(128, 56 << 10, 4, 4, id="registers-and-shared-memory-bind-alike"),
        pytest.param(255, 0, 4, 2, id="registers-bind"),
        pytest.param(84, 32 << 10, 4, 5, id="registers-come-in-units-a-warp"),
        pytest.param(32, 0, 8, 8, id="warps-bind"),
        pytest.param(16, 0, 1, 32, id="at-most-32-whatever-they-need"),
        pytest.param(128, 232448, 4, 1, id="all-the-shared-memory-there-is"),
        pytest.param(128, 232449, 4, 0, id="one-byte-more-fits-nowhere"),
        pytest.param(255, 0, 32, 0, id="too-many-registers-for-one"),
        pytest.param(255, 0, 0, 0, id="no-warps-is-no-kernel"),
    ],
)
def test_ctas_per_sm_of_an_h100(registers: int, shared_bytes: int, num_warps: int, ctas: int) -> None:
    found = ctas_per_sm(TARGETS["sm_90"], registers=registers, shared_bytes=shared_bytes, num_warps=num_warps)
    assert found == ctas


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        pytest.param(
            "fwd: Loop-carried variable m has initial type fp32 but is re-assigned to <['64'], fp32> in loop! Please "
            "make sure that the type stays consistent.",
            "fwd: m changes its type inside the loop: it starts as a single fp32 and becomes a block [64] of fp32; "
            "a compiled loop needs one type throughout.",
            id="loop-type",
        ),
        pytest.param(
            "fwd: AssertionError(\"Loop-carried variable l has initial type <['32'], fp16> but is re-assigned to "
            "<['32'], fp32> in loop! Please\")",
            "fwd: l changes its type inside the loop: it starts as a block [32] of fp16 and becomes a block [32] of "
            "fp32; a compiled loop needs one type throughout.",
            id="loop-type-in-a-callee",
        ),
        pytest.param("k: NameError('n is not defined')", "k: n is not defined", id="quoted-exception"),
        pytest.param("k: one\ntwo\nthree", "k: one", id="first-line-alone"),
        pytest.param("k: bad <function sum at 0x7f12ab>", "k: bad <function sum>", id="no-addresses"),
        pytest.param(
            "k: PTXAS error: no\n`ptxas` stderr:\nptxas a.ptx, line 7; error   : Not a name: 'x'\nRepro command: p",
            "k: PTXAS error: no: ptxas a.ptx, line 7; error   : Not a name: 'x'",
            id="what-ptxas-found",
        ),
        pytest.param("", "the compiler gave no reason", id="nothing-said"),
    ],
)
def test_a_compiler_error_becomes_one_sentence(said: str, sentence: str) -> None:
    assert plain_sentence(said) == sentence


def test_timed_sizes_are_what_is_compiled(assignment: Callable[..., Assignment]) -> None:
    task = assignment("flash-attention")
    first = workloads(task, reference.load(task.operation))[0]
    assert first.title == "batch=16 queries=4096 keys=4096 head_dim=64 bfloat16"
    assert [(spec["name"], spec["shape"], spec["dtype"]) for spec in first.inputs] == [
        (name, [16, 4096, 64], "bfloat16") for name in ("q", "k", "v")
    ]
    assert first.upstream == {"name": "do", "shape": [16, 4096, 64], "dtype": "bfloat16"}
    assert first.options == (True,)


def test_where_nothing_is_timed_the_sizes_of_the_audit_are_compiled(assignment: Callable[..., Assignment]) -> None:
    task = dataclasses.replace(assignment("online-softmax"), speed=None)
    (only,) = workloads(task, reference.load(task.operation))
    axes = task.structure.axes
    assert only.inputs == ({"name": "x", "shape": [axes["rows"], axes["cols"]], "dtype": "float32"},)
    assert only.upstream is None


def test_an_unknown_target_is_the_teachers_to_mend(assignment: Callable[..., Assignment]) -> None:
    task = dataclasses.replace(assignment("online-softmax"), target_gpu="sm_35")

    class Nobody:
        def take(self, timeout_s: float) -> None:
            raise AssertionError("no candidate is needed to see this")

    with pytest.raises(AssignmentError, match=r"online-softmax/assignment\.toml: target_gpu: 'sm_35'.*sm_90"):
        compile_report(task, reference.load(task.operation), b"", pool=Nobody(), budget_s=1.0)
