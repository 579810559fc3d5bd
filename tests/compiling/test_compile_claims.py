"""What the examiner makes of what a compile candidate says, however it says it."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from grader.measurement import CompileReport, FailureKind

Hear = Callable[..., CompileReport]

COMPILING = {"op": "compiling", "kernel": "softmax_kernel", "line": 7}
KERNEL: dict[str, Any] = {
    "op": "kernel",
    "kernel": "softmax_kernel",
    "line": 7,
    "registers": 40,
    "spill_bytes": 0,
    "shared_bytes": 16,
    "num_warps": 4,
    "matrix_unit": "none",
    "configuration": "BLOCK=1024 num_warps=4 num_stages=3",
}


def test_a_kernel_is_reported_with_the_size_it_was_compiled_for(hear: Hear) -> None:
    report = hear(COMPILING, KERNEL)
    assert report.finished
    assert report.failures == ()
    assert [kernel.shapes for kernel in report.kernels] == [
        "rows=16384 cols=8192 bfloat16; BLOCK=1024 num_warps=4 num_stages=3",
        "rows=8192 cols=32768 bfloat16; BLOCK=1024 num_warps=4 num_stages=3",
    ]


def test_no_more_than_twelve_kernels_are_kept(hear: Hear) -> None:
    assert len(hear(COMPILING, KERNEL, times=50).kernels) == 12


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(KERNEL | {"registers": -1}, id="negative-count"),
        pytest.param(KERNEL | {"shared_bytes": 2**60}, id="count-too-large"),
        pytest.param(KERNEL | {"matrix_unit": "tensor cores, trust me"}, id="unknown-unit"),
        pytest.param(KERNEL | {"kernel": ["a", "list"]}, id="name-no-text"),
        pytest.param({"op": "grade", "points": 100}, id="another-message"),
    ],
)
def test_what_is_not_of_our_form_ends_the_report(hear: Hear, message: dict[str, Any]) -> None:
    report = hear(KERNEL, message)
    assert [failure.kind for failure in report.failures] == [FailureKind.NOT_OURS]
    assert len(report.kernels) == 1


def test_endless_messages_end_the_report(hear: Hear) -> None:
    report = hear(COMPILING, times=10_000)
    assert [failure.kind for failure in report.failures] == [FailureKind.NOT_OURS]


def test_texts_are_cut_to_length(hear: Hear) -> None:
    failed = {
        "op": "failed",
        "kind": "compile-error",
        "message": "k: " + "x" * 9000,
        "line": 3,
        "traceback": "y" * 9000,
    }
    (failure,) = hear(failed).failures
    assert len(failure.message) <= 400
    assert len(failure.traceback) <= 2000


def test_when_the_budget_ends_what_was_compiled_is_kept(hear: Hear) -> None:
    hear()  # a candidate is ready from here on
    started = time.monotonic()
    report = hear(COMPILING, KERNEL, then="sleep", budget_s=3.0)
    assert time.monotonic() - started < 3.0 + 2.0
    assert not report.finished
    assert report.unfinished == "the time for compiling was over"
    assert len(report.kernels) == 1
    assert report.failures == ()


def test_no_candidate_in_time_is_an_unfinished_report(hear: Hear) -> None:
    report = hear(KERNEL, budget_s=0.0)
    assert not report.finished
    assert report.unfinished == "no sandbox was free in time"
    assert report.kernels == report.failures == ()


def test_a_flood_of_output_leaves_the_report_unfinished_and_blames_nobody(hear: Hear) -> None:
    report = hear(KERNEL, then="print")
    assert not report.finished
    assert report.unfinished == "it ran into a limit (prints-flood)"
    assert report.failures == ()


def test_a_compiler_that_aborts_is_a_compile_error_of_the_kernel_it_was_at(hear: Hear) -> None:
    report = hear(COMPILING, then="abort", stderr="LLVM ERROR: cannot select this instruction")
    (failure,) = report.failures
    assert failure.kind is FailureKind.COMPILE_ERROR
    assert failure.message == "softmax_kernel: LLVM ERROR: cannot select this instruction"
    assert failure.line == 7


def test_an_abort_between_kernels_is_no_compile_error(hear: Hear) -> None:
    assert [failure.kind for failure in hear(KERNEL, then="abort").failures] == [FailureKind.CRASHED]


def test_a_failed_pass_is_explained_by_what_it_printed(hear: Hear) -> None:
    failed = {"op": "failed", "kind": "compile-error", "message": "k: PassManager::run failed", "line": 20}
    printed = "noise\n/w/submission.py:31:9: error: operand types must match\nmodule { pages }"
    (failure,) = hear(COMPILING, failed, stderr=printed).failures
    assert (failure.message, failure.line) == ("k: operand types must match", 31)


def test_a_file_larger_than_the_shared_memory_is_not_compiled(hear: Hear) -> None:
    report = hear(KERNEL, padding="x" * (1 << 20))
    assert (report.finished, report.kernels, report.failures) == (False, (), ())
    assert report.unfinished == "the file is larger than what the compiler is given"
