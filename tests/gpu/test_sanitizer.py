"""Reading what compute-sanitizer prints, and which call is made again under it. No GPU needed."""

import dataclasses
from pathlib import Path

import pytest

from grader.assignment import load_assignment
from grader.measurement import Failure, FailureKind, ProbeFailed
from workers import sanitizer
from workers.examination import Examiner
from workers.gpu_examination import is_sticky
from workers.sandbox import Limits, SandboxPool

ASSIGNMENT = load_assignment(Path(__file__).parents[2] / "assignments" / "flash-attention-forward")
NEW = b"""========= COMPUTE-SANITIZER
a print of the student's
========= Invalid __global__ write of size 4 bytes
=========     at flash_kernel+0x1c90 in submission.py:45
=========     by thread (0,0,0) in block (1,0,0)
=========     Access to 0x7f2d5be00a60 is out of bounds
=========     and is 97 bytes after the nearest allocation at 0x7f2d5be00800 of size 512 bytes
=========     Saved host backtrace up to driver entry point at kernel launch time
=========         Host Frame: launch [0x1d2f] in __triton_launcher.so
=========
========= Invalid __global__ read of size 2 bytes
=========     at other_kernel+0x10 in submission.py:99
========= ERROR SUMMARY: 128 errors
"""
OLD = b"""========= Invalid __global__ read of size 16 bytes
=========     at 0x2b0 in /w/submission.py:12:copy_kernel
=========     by thread (32,0,0) in block (0,0,0)
=========     Address 0x7f1200000200 is out of bounds
"""
ELSEWHERE = b"""========= Invalid __shared__ write of size 4 bytes
=========     at reduce+0x40 in standard.py:290
"""


@pytest.mark.parametrize(
    ("report", "what", "kernel", "line"),
    [
        pytest.param(NEW, "Invalid __global__ write of size 4 bytes", "flash_kernel", 45, id="the-first-of-two"),
        pytest.param(OLD, "Invalid __global__ read of size 16 bytes", "copy_kernel", 12, id="old-spelling"),
        pytest.param(ELSEWHERE, "Invalid __shared__ write of size 4 bytes", "reduce", None, id="a-line-of-tritons"),
    ],
)
def test_kernel_and_line_are_read(report, what, kernel, line):
    found = sanitizer.read_report(report, "tail")
    assert (found.probe, found.what, found.kernel, found.line) == ("tail", what, kernel, line)


def test_how_far_from_which_allocation_is_kept():
    found = sanitizer.read_report(NEW, "tail")
    assert "is out of bounds" in found.where
    assert "97 bytes after the nearest allocation" in found.where


@pytest.mark.parametrize(
    "report",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n", id="no-error"),
        pytest.param(b"\xff\xfe" * 1000, id="bytes"),
        pytest.param(b"Invalid __global__ write", id="a-print-that-looks-like-it"),
    ],
)
def test_nothing_is_made_up(report):
    assert sanitizer.read_report(report, "tail") is None


def test_what_a_hostile_file_prints_stays_bounded():
    flood = b"========= Invalid " + b"x" * 10**6 + b"\n=========     at " + b"y" * 10**6 + b"\n"
    assert sanitizer.read_report(flood, "tail") is None
    many = NEW.replace(b"flash_kernel", b"k" * 390)
    found = sanitizer.read_report(many * 100, "tail")
    assert len(found.kernel) <= 200
    assert len(found.where) <= 300
    assert len(found.what) <= 250


def failed(name, message):
    return ProbeFailed(name=name, failure=Failure(kind=FailureKind.CRASHED, message=message))


ILLEGAL = "AcceleratorError: CUDA error: an illegal memory access was encountered"


def test_a_probe_that_students_may_read_about_is_looked_at_first():
    hidden = next(case.name for case in ASSIGNMENT.cases if case.hidden)
    probes = [failed(hidden, ILLEGAL), failed("random", "ValueError: boom"), failed("tail", ILLEGAL)]
    assert sanitizer.broken_probe(ASSIGNMENT, probes, is_sticky).name == "tail"
    assert sanitizer.broken_probe(ASSIGNMENT, probes[:1], is_sticky).name == hidden


def test_other_failures_are_not_looked_at_again():
    probes = [failed("random", "ValueError: boom"), failed("tail", "CUDA error: out of memory")]
    assert sanitizer.broken_probe(ASSIGNMENT, probes, is_sticky) is None


def test_where_there_is_no_sanitizer_nothing_is_started(monkeypatch):
    monkeypatch.setattr(sanitizer, "find_sanitizer", lambda: None)
    examiner = Examiner(ASSIGNMENT, b"", None, lambda *_: None, 1)
    assert sanitizer.look_closer(examiner, ASSIGNMENT.case("tail"), archives=[], lock=None) is None


def test_the_candidate_runs_under_the_command_it_is_given(tmp_path):
    """A script in the sanitizer's place: it is started with our options, and starts the candidate."""
    wrapper = tmp_path / "wrapper"
    wrapper.write_text(
        '#!/bin/sh\necho "under $1"\nshift\n"$@"\necho "after $?"\n'
        "mkfifo /tmp/f && echo fifo\nmknod /tmp/n c 1 3 || echo none\n"
    )
    wrapper.chmod(0o755)
    tmp_path.chmod(0o755)
    with_it = SandboxPool(
        argv_env={"TRITON_INTERPRET": "1"},
        arena_bytes=1 << 20,
        limits=dataclasses.replace(Limits(), memory_bytes=1 << 30),
        size=1,
        refill=False,
        under=(str(wrapper), "--option"),
    )
    try:
        ending = with_it.take(60.0).finish(20.0)
    finally:
        with_it.close()
    assert ending.stdout == b"under --option\nafter 0\nfifo\nnone\n"  # named pipes, and no other nodes
    assert ending.exit_code == 0
