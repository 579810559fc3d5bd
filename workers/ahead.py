"""Compiling a hand-in for the GPU before it gets one: on CPU cores, in sandboxes, several at a time.

Every call that the GPU examination will make is compiled by workers/compile_candidate.py. What Triton put in its cache
comes out as archives that only candidates of the same hand-in unpack: their first launches then take milliseconds.
The archives are untrusted bytes; nothing here looks into them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from grader import assignment as assignments
from grader.assignment import Assignment
from grader.measurement import CompileReport
from reference.operation import Operation
from workers import claims
from workers.compiling import OUTPUT_BYTES, TARGETS, Gathered, Sandboxes, Workload, input_specs
from workers.devices.cpu import strided
from workers.interview import CandidateFailedError, Interview, load_request
from workers.isolation import BACKGROUND_NICE, Limits
from workers.sandbox import SandboxPool, SandboxUnavailable

ARENA_BYTES = 48 << 20  # the source on the way in, the archive on the way out
MOST_ARCHIVE_BYTES = 32 << 20
MOST_KERNELS = 512
MAX_MESSAGES = 4000  # of one call: two for every kernel


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the entry point, by shapes, strides and dtype; calls of one kind share most of their kernels."""

    request: Mapping[str, Any]
    kind: tuple[Any, ...]
    title: str  # sizes and dtype
    timed: bool = False


@dataclass(frozen=True, slots=True)
class Compiled:
    """What came of compiling a hand-in for the GPU."""

    archives: list[bytes]  # of Triton's cache; untrusted
    # of the sizes that are timed, and of kernels that ask for too much wherever they are launched
    report: CompileReport


@contextlib.contextmanager
def ahead_pool(
    limits: assignments.Limits, *, size: int, refill: bool = True, isolation: Literal["auto", "none"] = "auto"
) -> Iterator[SandboxPool]:
    """Warm candidates that compile for a GPU. Raises SandboxUnavailable where none can be had."""
    env = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    pool = SandboxPool(
        argv_env=env | {"CUDA_VISIBLE_DEVICES": ""},
        arena_bytes=ARENA_BYTES,
        limits=Limits(
            memory_bytes=limits.memory_bytes,
            output_total_bytes=OUTPUT_BYTES,
            cpu_s=int(limits.total_s),
            scratch_bytes=256 << 20,
            nice=BACKGROUND_NICE,
        ),
        size=size,
        refill=refill,
        isolation=isolation,
        program=Path(__file__).with_name("compile_candidate.py"),
    )
    try:
        yield pool
    finally:
        pool.close()


def compile_ahead(
    assignment: Assignment, operation: Operation, source: bytes, *, pool: Sandboxes, n_candidates: int, budget_s: float
) -> Compiled:
    """Compile what the GPU examination will launch, on `n_candidates` at a time.

    A file that fails here fails again on the GPU, where it is reported; what is not compiled in `budget_s` is compiled
    there too.
    """
    deadline = time.monotonic() + budget_s
    groups: dict[tuple[Any, ...], list[Call]] = {}
    for call in calls(assignment, operation):
        groups.setdefault(call.kind, []).append(call)
    # what is timed first: a kernel is described where it is compiled for the first time
    waiting = deque(
        sorted(groups.values(), key=lambda group: (any(call.timed for call in group), len(group)), reverse=True)
    )
    taking = threading.Lock()
    target = TARGETS[assignment.target_gpu]
    everything = Gathered(assignment.target_gpu, target)

    def next_group() -> list[Call] | None:
        with taking:
            return waiting.popleft() if waiting else None

    def work(_number: int) -> bytes:
        with contextlib.suppress(SandboxUnavailable):
            interview = Interview(pool.take(timeout_s=max(0.1, deadline - time.monotonic())))
            heard = Gathered(assignment.target_gpu, target)
            archive = b""
            try:
                # each holds the one before: what was compiled ahead of a call that never ends is not lost with it
                for newest in _compile(interview, assignment, operation, source, next_group, deadline, heard):
                    archive = newest
            except CandidateFailedError as exc:
                heard.fail(exc.failure, interview.ending)
            except claims.ClaimError:
                pass
            finally:
                heard.read_stderr(interview.end().stderr)
                with taking:
                    everything.take(heard)
            return archive
        return b""

    n_candidates = min(n_candidates, len(groups))
    with ThreadPoolExecutor(max_workers=max(1, n_candidates), thread_name_prefix="ahead") as threads:
        archives = [archive for archive in threads.map(work, range(n_candidates)) if archive]
    return Compiled(archives, everything.report(finished=not waiting and time.monotonic() < deadline))


def calls(assignment: Assignment, operation: Operation) -> list[Call]:
    """Every call of a GPU examination: probes, the memory sweep, the timed sizes. Equal ones once."""
    found: dict[str, Call] = {}

    def add(axes: Mapping[str, int], dtype: str, options: Mapping[str, Any], layout: str, timed: bool = False) -> None:
        call = dataclasses.replace(_call(operation, axes, dtype, options, layout), timed=timed)
        known = found.setdefault(repr(call.request), call)
        if timed and not known.timed:
            found[repr(call.request)] = call

    for case in assignment.cases_on("cuda"):
        add(case.axes, case.dtype, case.options or {}, case.layout)
    if assignment.memory is not None:
        for size in assignment.memory.cuda_sizes:
            swept = dict(assignment.memory.axes_on("cuda")) | dict.fromkeys(assignment.memory.along, size)
            add(swept, assignment.memory.dtype, assignment.structure.options, "contiguous")
    if assignment.speed is not None:
        for axes in assignment.speed.sizes:
            add(axes, assignment.speed.dtype, assignment.speed.options, "contiguous", timed=True)
    return list(found.values())


def _call(operation: Operation, axes: Mapping[str, int], dtype: str, options: Mapping[str, Any], layout: str) -> Call:
    specs = input_specs(operation, axes, dtype, options)
    shapes = [spec["shape"] for spec in specs.values()]
    if layout == "strided":
        for spec in specs.values():
            spec["strides"] = list(strided(torch.empty(spec["shape"])).stride())
    request = {
        "op": "compile",
        "inputs": [specs[name] for name in operation.inputs],
        "upstream": specs[operation.upstream] if operation.upstream else None,
        "options": [options.get(name) for name in operation.options],
    }
    # Triton compiles a kernel anew where a number is 1 or a multiple of 16, or where it was not
    sizes = tuple((size == 1, size % 16 == 0) for shape in shapes for size in shape)
    last = tuple(shape[-1] for shape in shapes)
    title = f"{' '.join(f'{axis}={size}' for axis, size in axes.items())} {dtype}"
    return Call(request, (dtype, layout, sizes, last, tuple(sorted(options.items(), key=str))), title)


def _compile(
    interview: Interview,
    assignment: Assignment,
    operation: Operation,
    source: bytes,
    next_group: Any,
    deadline: float,
    heard: Gathered,
) -> Iterator[bytes]:
    """Load the file and compile groups of calls until there are none. Gives the whole archive after each of them."""
    target = TARGETS[assignment.target_gpu]
    interview.sandbox.arena[: len(source)] = source
    interview.ask(
        load_request(assignment, operation, len(source))
        | {
            "arch": int(assignment.target_gpu.removeprefix("sm_")),
            "shared_limit_bytes": target.shared_limit_bytes,
            "most_kernels": MOST_KERNELS,
            "launchers": True,
        },
        stage="load",
    )
    interview.answer(assignment.limits.load_s)
    while time.monotonic() < deadline and (group := next_group()) is not None:
        for call in group:
            _one(interview, call, deadline, heard)
        interview.ask({"op": "cache", "most_bytes": MOST_ARCHIVE_BYTES}, stage="compile")
        length = claims.count(interview.answer(10.0), "length")
        if 0 < length <= MOST_ARCHIVE_BYTES:
            yield bytes(interview.sandbox.arena[:length])


def _one(interview: Interview, call: Call, deadline: float, heard: Gathered) -> None:
    workload = Workload(title=call.title, inputs=(), upstream=None, options=())
    interview.ask(dict(call.request), stage="compile")
    for _ in range(MAX_MESSAGES):
        try:
            message = interview.answer(max(0.0, deadline - time.monotonic()))
        except CandidateFailedError as exc:
            if exc.dead:
                raise
            if call.timed:
                heard.fail(exc.failure, None)
            return
        if message["op"] in ("compiled", "unknown"):
            return
        if call.timed or heard.wants(message):
            heard.hear(message, workload)


def archives_into(interview: Interview, archives: Sequence[bytes]) -> None:
    """Have a GPU candidate of the same hand-in unpack them, before it loads the file."""
    for archive in archives:
        interview.sandbox.arena[: len(archive)] = archive
        interview.ask({"op": "cache", "length": len(archive)}, stage="load")
        interview.answer(20.0)
