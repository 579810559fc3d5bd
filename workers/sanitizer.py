"""A second look at a call that broke the GPU's context: the same call under NVIDIA's compute-sanitizer.

A kernel that leaves its tensors on a GPU ends in "an illegal memory access", which names no line, if it ends in an
error at all. The sanitizer checks every access and knows the line that Triton compiled it from. It costs a quarter of a
minute, most of it imports, so it runs only after such a failure: in a sandbox of its own, with the probe's own inputs,
each in an allocation of its own. What it prints comes from the student's process too, so it is a claim; it decides no
grade.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from grader import assignment as assignments
from grader.assignment import Assignment, Case
from grader.errors import AssignmentError
from grader.measurement import DeviceFault, ProbeFailed, ProbeRun
from workers import claims
from workers.ahead import archives_into
from workers.devices.cpu import Arena
from workers.examination import Examiner, Sandboxes
from workers.interview import CandidateFailedError, Interview
from workers.isolation import Limits, SandboxUnavailable
from workers.sandbox import SandboxPool

READY_S = 90.0  # imports and a CUDA context under the sanitizer; 12 s were measured
CALL_S = 60.0
END_S = 20.0
_OPTIONS = ("--tool", "memcheck", "--target-processes", "all", "--print-limit", "4", "--report-api-errors", "no")
_MEMORY_BYTES = 24 << 30  # its shadow of what the candidate maps counts too
_PROCESSES = 256
_SCRATCH_BYTES = 512 << 20

_KINDS = re.compile(r"^========= ((?:Invalid|Out-of-bounds|Misaligned|Race|Uninitialized|Illegal)[^\n]{0,200})$", re.M)
_AT = re.compile(r"^=========\s+at (?P<at>[^\n]{0,400})$", re.M)
_NEAR = re.compile(r"^=========\s+(?P<how>(?:Address|Access|and is)[^\n]{0,200})$", re.M)


def find_sanitizer() -> str | None:
    """Path of compute-sanitizer, from PATH or the CUDA toolkits in their usual place; None where there is none."""
    toolkits = sorted(Path("/usr/local").glob("cuda*/bin/compute-sanitizer"), reverse=True)
    return shutil.which("compute-sanitizer") or next((str(path) for path in toolkits), None)


def look_closer(
    examiner: Examiner, case: Case, *, archives: Sequence[bytes], lock: Callable[[], AbstractContextManager[None]]
) -> DeviceFault | None:
    """Run one probe again under the sanitizer, on the GPU, and read what it says.

    Args:
        examiner: whose probe it was: the inputs are the same.
        archives: kernels of this hand-in, compiled ahead.
        lock: the GPU's; taken once the candidate needs it.

    Returns:
        None where there is no sanitizer, or where it saw nothing.
    """
    program = find_sanitizer()
    if program is None:
        return None
    isolated = examiner.sandboxes.isolation.level != "none"
    try:
        with sanitizer_pool(examiner.assignment.limits, program, isolated=isolated) as pool:
            again = Examiner(examiner.assignment, examiner.source, pool, examiner.progress, examiner.seed)
            with pool.hold():  # its imports under the sanitizer take longest, and need no GPU
                pool.await_gate(READY_S)
                with lock():
                    printed = _run(again, case, archives)
            return read_report(printed, case.name)
    except (SandboxUnavailable, AssignmentError):
        return None  # it is no more than a help


@contextlib.contextmanager
def sanitizer_pool(limits: assignments.Limits, program: str, *, isolated: bool) -> Iterator[SandboxPool]:
    """One candidate under compute-sanitizer, as locked in as any other."""
    from workers.devices.cuda import GPU_OPEN_FILES, cuda_environment

    pool = SandboxPool(
        argv_env=cuda_environment() | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        arena_bytes=64 << 20,
        limits=Limits(
            memory_bytes=max(_MEMORY_BYTES, limits.memory_bytes),
            processes=_PROCESSES,
            scratch_bytes=_SCRATCH_BYTES,
            file_bytes=_SCRATCH_BYTES,
            output_total_bytes=max(4 << 20, limits.output_bytes),
            cpu_s=int(READY_S + CALL_S),
            open_files=GPU_OPEN_FILES,
        ),
        size=1,
        refill=False,
        isolation="auto" if isolated else "none",
        gpu=True,
        under=(program, *_OPTIONS),
    )
    try:
        yield pool
    finally:
        pool.close()


def broken_probe(assignment: Assignment, probes: Sequence[ProbeRun], is_sticky: Callable[..., bool]) -> Case | None:
    """The probe to look at again: of those that broke the context, one that students may read about if there is one."""
    found = [
        case
        for run in probes
        if isinstance(run, ProbeFailed) and is_sticky(run.failure)
        for case in [assignment.case(run.name)]
        if case is not None
    ]
    return min(found, key=lambda case: case.hidden, default=None)


def read_report(report: bytes, probe: str) -> DeviceFault | None:
    """The first error in what compute-sanitizer printed."""
    text = report.decode("utf-8", "replace")
    said = _KINDS.search(text)
    if said is None:
        return None
    # what belongs to it ends where the next error begins
    after = _KINDS.search(text, said.end())
    block = text[said.end() : after.start() if after else said.end() + 4000]
    at = _AT.search(block)
    kernel, line = _place(at["at"]) if at else ("", None)
    near = [found["how"].strip() for found in _NEAR.finditer(block)]
    return DeviceFault(
        probe=probe, what=said[1].strip(), where=" ".join(near[:2])[:300], kernel=kernel[:200], line=line
    )


def _place(text: str) -> tuple[str, int | None]:
    """Kernel and line of the student's file. Two spellings: `name+0x10 in file:line`, `0x10 in file:line:name`."""
    line = re.search(r"submission\.py:(\d{1,7})", text)
    new = re.match(r"(?P<kernel>[\w$.]+)(?:\(.*\))?\+0x[0-9a-f]+", text)
    old = re.search(r":\d+:(?P<kernel>[\w$.]+)", text)
    named = new or old
    return named["kernel"] if named else "", int(line[1]) if line else None


def _run(examiner: Examiner, case: Case, archives: Sequence[bytes]) -> bytes:
    """What the sanitizer printed about one call."""
    sandboxes: Sandboxes = examiner.sandboxes
    interview = Interview(sandboxes.take(timeout_s=READY_S))
    try:
        with contextlib.suppress(CandidateFailedError, claims.ClaimError):
            examiner.start_clock()
            interview.ask({"op": "arena", "host": True}, stage="load")
            interview.answer(30.0)
            archives_into(interview, archives)
            examiner.load(interview)
            examiner.call_once(interview, Arena(interview.sandbox.arena), case, CALL_S)
        ending = interview.ending or interview.sandbox.finish(END_S)
    finally:
        interview.end()
    return ending.stdout + b"\n" + ending.stderr
