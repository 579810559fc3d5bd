"""The compile report: what Triton makes of a student's kernels for the target GPU, found without a GPU.

The examiner's side. The compiling itself happens in workers/compile_candidate.py, in a sandbox of its own; what comes
back are claims, checked and bounded here. The report decides no grade in the interpreter.

The candidate also holds what Triton compiled, in its cache folder. Nothing is taken from it here; workers/ahead.py
does that for the GPU candidates of the same hand-in.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from grader import assignment as assignments
from grader.assignment import Assignment
from grader.errors import AssignmentError
from grader.measurement import LIMITS, CompiledKernel, CompileReport, Failure, FailureKind
from reference.operation import Operation
from workers import claims
from workers.interview import CandidateFailedError, Interview, load_request
from workers.sandbox import Ending, Limits, Sandbox, SandboxPool, SandboxUnavailable

ARENA_BYTES = 1 << 20  # holds the source alone
MAX_KERNELS = 12
MAX_MESSAGES = 400  # of one workload; ours are at most two a kernel that the candidate compiles
MAX_SENTENCE = 400
# the interpreter meets these as well, and they belong where it reports them
_SEEN_WITHOUT_COMPILING = frozenset(
    {
        FailureKind.SYNTAX_ERROR,
        FailureKind.IMPORT_ERROR,
        FailureKind.ENTRY_MISSING,
        FailureKind.ENTRY_AMBIGUOUS,
        FailureKind.WRONG_SIGNATURE,
        FailureKind.PYTHON_EXIT,
    }
)
# A failing pass prints pages of MLIR on stderr, and that is no flood of the student's.
OUTPUT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What bounds the number of CTAs on one multiprocessor (SM). Source: CUDA C++ Programming Guide, table 27."""

    registers: int = 65536
    shared_bytes: int  # of one SM
    shared_limit_bytes: int  # most that one CTA may ask for
    warps: int
    ctas: int


TARGETS: Mapping[str, Target] = {
    "sm_80": Target(shared_bytes=167936, shared_limit_bytes=166912, warps=64, ctas=32),
    "sm_86": Target(shared_bytes=102400, shared_limit_bytes=101376, warps=48, ctas=16),
    "sm_89": Target(shared_bytes=102400, shared_limit_bytes=101376, warps=48, ctas=24),
    "sm_90": Target(shared_bytes=233472, shared_limit_bytes=232448, warps=64, ctas=32),
}
_SHARED_RESERVED_BYTES = 1024  # the system keeps so much for each CTA
_REGISTER_UNIT = 256  # registers are handed to a warp in such units
_SCHEDULERS = 4  # of an SM; each owns a quarter of the registers, so whole warps are counted for each


class Sandboxes(Protocol):
    """Where warm compile candidates come from."""

    def take(self, timeout_s: float) -> Sandbox: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One call of the entry point at a real size: shapes and options, no values."""

    title: str
    inputs: tuple[dict[str, Any], ...]  # name, shape, dtype
    upstream: dict[str, Any] | None
    options: tuple[Any, ...]


@contextlib.contextmanager
def compile_pool(
    limits: assignments.Limits, *, size: int, refill: bool = True, isolation: Literal["auto", "none"] = "auto"
) -> Iterator[SandboxPool]:
    """Warm candidates that compile. Raises SandboxUnavailable where none can be had."""
    pool = SandboxPool(
        argv_env={"CUDA_VISIBLE_DEVICES": ""},
        arena_bytes=ARENA_BYTES,
        limits=Limits(
            memory_bytes=limits.memory_bytes, output_total_bytes=OUTPUT_BYTES, cpu_s=max(1, int(limits.total_s))
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


def compile_report(
    assignment: Assignment, operation: Operation, source: bytes, *, pool: Sandboxes, budget_s: float
) -> CompileReport:
    """Compile every launch of `source` at the assignment's real sizes for its target GPU.

    Args:
        source: the student's file, UTF-8.
        budget_s: wall time from the call to the answer, waiting for a candidate included. Ending the candidate comes
            on top, some milliseconds. When it runs out the report holds what was compiled by then, `finished` False.

    Raises:
        AssignmentError: the assignment names a target that is not in TARGETS.
    """
    target = TARGETS.get(assignment.target_gpu)
    if target is None:
        raise AssignmentError(
            f"assignments/{assignment.slug}/assignment.toml: target_gpu: {assignment.target_gpu!r} is not one of "
            f"{', '.join(TARGETS)}"
        )
    deadline = time.monotonic() + budget_s
    gathered = Gathered(assignment.target_gpu, target)
    if len(source) > ARENA_BYTES:  # the service's limit on files is a setting
        gathered.stop("the file is larger than what the compiler is given")
        return gathered.report(finished=False)
    try:
        interview = Interview(pool.take(timeout_s=budget_s))
    except SandboxUnavailable:
        gathered.stop("no sandbox was free in time")
        return gathered.report(finished=False)
    finished = False
    try:
        loaded = _load(interview, assignment, operation, target, source, deadline)
        complete = loaded
        if not loaded:
            gathered.stop("loading the file beside the compiler ended in an error that may be ours")
        for workload in workloads(assignment, operation) if loaded else ():
            complete &= _compile(interview, workload, gathered, deadline)
            if gathered.does_not_compile():
                break  # Triton's state after an error is no witness for what other sizes would give
        finished = complete
    except CandidateFailedError as exc:
        gathered.fail(exc.failure, interview.ending)
    except claims.ClaimError as exc:
        gathered.fail(Failure(kind=FailureKind.NOT_OURS, message=f"the compile facts are not ours: {exc}"), None)
    finally:
        ending = interview.end()
    gathered.read_stderr(ending.stderr)
    return gathered.report(finished=finished)


def workloads(assignment: Assignment, operation: Operation) -> tuple[Workload, ...]:
    """The calls to compile: the sizes that are timed, or those of the audit where nothing is."""
    if assignment.speed is not None:
        sizes, dtype, options = assignment.speed.sizes, assignment.speed.dtype, assignment.speed.options
    else:
        structure = assignment.structure
        sizes, dtype, options = (structure.axes,), "float32", structure.options
    return tuple(_workload(operation, axes, dtype, options) for axes in sizes)


def ctas_per_sm(target: Target, *, registers: int, shared_bytes: int, num_warps: int) -> int:
    """How many CTAs of a kernel fit on one multiprocessor at once; 0 when not even one does.

    Source: the CUDA occupancy calculator's rules.
    """
    if shared_bytes > target.shared_limit_bytes or num_warps < 1:
        return 0
    warp_registers = -(-max(registers, 1) * 32 // _REGISTER_UNIT) * _REGISTER_UNIT
    by_registers = target.registers // _SCHEDULERS // warp_registers * _SCHEDULERS // num_warps
    by_shared = target.shared_bytes // (shared_bytes + _SHARED_RESERVED_BYTES)
    return min(by_registers, by_shared, target.warps // num_warps, target.ctas)


def plain_sentence(text: str) -> str:
    """What a compiler said, as one sentence a student can act on."""
    kernel, _, rest = text.partition(": ")
    if wrapped := re.fullmatch(r"(\w{1,60})\((['\"])(.*)\2\)", rest, re.DOTALL):
        # Triton quotes an error of its own compiler as Python would print it
        text, rest = f"{kernel}: {wrapped[3]}", wrapped[3]
    changed = re.search(r"Loop-carried variable (\w+) has initial type (.+?) but is re-assigned to (.+?) in loop", rest)
    if changed:
        name, before, after = changed.groups()
        return (
            f"{kernel}: {name} changes its type inside the loop: it starts as {_plain_type(before)} and becomes "
            f"{_plain_type(after)}; a compiled loop needs one type throughout."
        )[:MAX_SENTENCE]
    lines = [line.strip() for line in re.sub(r" at 0x[0-9a-f]+", "", text).splitlines()]
    telling = [line for line in lines if line and not line.startswith(("`ptxas`", "Repro command"))]
    first = telling[0] if telling else "the compiler gave no reason"
    # ptxas says what is wrong only after Triton's own heading
    errors = [line for line in telling if re.match(r"ptxas .*(error|fatal)", line)]
    return (f"{first}: {errors[0]}" if errors else first)[:MAX_SENTENCE]


class Gathered:
    """What was said so far about one hand-in."""

    def __init__(self, name: str, target: Target) -> None:
        self._name, self._target = name, target
        self._kernels: list[CompiledKernel] = []
        self._failures: list[Failure] = []
        self._compiling: tuple[str, int | None] | None = None
        self._unfinished = ""

    def hear(self, message: Mapping[str, Any], workload: Workload) -> None:
        """Take one message of a compilation in progress. Raises ClaimError when it is not of our form."""
        kernel, line = claims.text(message, "kernel", 200), claims.line(message)
        if message["op"] == "compiling":
            self._compiling = (kernel, line)
            return
        if message["op"] != "kernel":
            raise claims.ClaimError(f"{message['op'][:40]!r} is not about a kernel")
        self._compiling = None
        unit = claims.text(message, "matrix_unit", 20)
        if unit not in ("wgmma", "mma", "none"):
            raise claims.ClaimError("matrix_unit is none of ours")
        registers, shared_bytes = claims.count(message, "registers"), claims.count(message, "shared_bytes")
        num_warps = claims.count(message, "num_warps")
        fits = ctas_per_sm(self._target, registers=registers, shared_bytes=shared_bytes, num_warps=num_warps)
        found = CompiledKernel(
            kernel=kernel,
            registers=registers,
            spill_bytes=claims.count(message, "spill_bytes"),
            shared_bytes=shared_bytes,
            ctas_per_sm=fits,
            matrix_unit=unit,
            line=line,
            shapes=f"{workload.title}; {claims.text(message, 'configuration', 400)}",
        )
        if len(self._kernels) < MAX_KERNELS:
            self._kernels.append(found)

    def wants(self, message: Mapping[str, Any]) -> bool:
        """Whether a kernel belongs into the report whatever it is compiled for: it asks for more than there is."""
        return message["op"] == "kernel" and claims.count(message, "shared_bytes") > self._target.shared_limit_bytes

    def fail(self, failure: Failure, ending: Ending | None) -> None:
        """Keep a failure, unless it says no more than that a limit of ours was reached or what loading it says too."""
        if failure.kind in LIMITS:
            spent = failure.kind is FailureKind.TIME_LIMIT
            self.stop("the time for compiling was over" if spent else f"it ran into a limit ({failure.kind.value})")
            return
        if failure.kind in _SEEN_WITHOUT_COMPILING:
            self.stop("the file does not load")
            return
        if failure.kind is FailureKind.CRASHED and ending is not None and self._compiling is not None:
            kernel, line = self._compiling
            message = f"{kernel}: the compiler itself ended by signal {ending.signal}"
            failure = Failure(kind=FailureKind.COMPILE_ERROR, message=message, line=line)
        message = plain_sentence(failure.message) if failure.kind is FailureKind.COMPILE_ERROR else failure.message
        kept = Failure(
            kind=failure.kind,
            message=message[:2000],
            line=failure.line,
            traceback=failure.traceback[:2000],
            stage="load" if failure.stage == "load" and failure.kind is not FailureKind.COMPILE_ERROR else "compile",
        )
        # the same line fails again at the next size, in other words
        if all((one.kind, one.line) != (kept.kind, kept.line) for one in self._failures):
            self._failures.append(kept)

    def stop(self, why: str) -> None:
        """Say why not everything is compiled; the first reason stands."""
        self._unfinished = self._unfinished or why

    def does_not_compile(self) -> bool:
        return any(failure.kind is FailureKind.COMPILE_ERROR for failure in self._failures)

    def read_stderr(self, stderr: bytes) -> None:
        """Add what the compiler's passes printed: their exception says no more than that they failed."""
        said = _diagnostic(stderr)
        if said is None:
            return
        text, line = said
        for number, failure in enumerate(self._failures):
            if failure.kind is not FailureKind.COMPILE_ERROR or not re.search(
                r"PassManager::run failed|ended by signal", failure.message
            ):
                continue
            kernel = failure.message.partition(": ")[0]
            self._failures[number] = Failure(
                kind=failure.kind,
                message=f"{kernel}: {text}"[:MAX_SENTENCE],
                line=line or failure.line,
                traceback=failure.traceback,
                stage=failure.stage,
            )

    def take(self, other: Gathered) -> None:
        """Take in what was said to somebody else about the same hand-in."""
        self._kernels = (self._kernels + other._kernels)[:MAX_KERNELS]
        known = {(one.kind, one.line) for one in self._failures}
        self._failures += [one for one in other._failures if (one.kind, one.line) not in known]

    def report(self, *, finished: bool) -> CompileReport:
        finished = finished or bool(self._failures)
        return CompileReport(
            target=self._name,
            kernels=tuple(self._kernels),
            failures=tuple(self._failures),
            finished=finished,
            unfinished="" if finished else self._unfinished,
            shared_limit_bytes=self._target.shared_limit_bytes,
        )


def _load(
    interview: Interview,
    assignment: Assignment,
    operation: Operation,
    target: Target,
    source: bytes,
    deadline: float,
) -> bool:
    """Load the file. Returns False when it ended in an error that is as likely ours; raises when it is the file's."""
    interview.sandbox.arena[: len(source)] = source
    request = load_request(assignment, operation, len(source)) | {
        "arch": int(assignment.target_gpu.removeprefix("sm_")),
        "shared_limit_bytes": target.shared_limit_bytes,
    }
    interview.ask(request, stage="load")
    left_s = max(0.0, deadline - time.monotonic())
    return bool(interview.answer(min(left_s, assignment.limits.load_s))["op"] == "loaded")


def _compile(interview: Interview, workload: Workload, gathered: Gathered, deadline: float) -> bool:
    """Compile one workload. Returns whether all of it was compiled; raises when it failed and the rest is void."""
    request = {
        "op": "compile",
        "inputs": list(workload.inputs),
        "upstream": workload.upstream,
        "options": list(workload.options),
    }
    interview.ask(request, stage="compile")
    for _ in range(MAX_MESSAGES):
        try:
            message = interview.answer(max(0.0, deadline - time.monotonic()))
        except CandidateFailedError as exc:
            if exc.dead:
                raise
            gathered.fail(exc.failure, None)
            return True
        if message["op"] == "unknown":
            gathered.stop("the call ended in an error that the empty tensors it was compiled with may have caused")
            return False
        if message["op"] == "compiled":
            if message.get("complete") is not True:
                gathered.stop(f"it launches more kernels than are looked at in one call, or {MAX_KERNELS} in all")
                return False
            return True
        gathered.hear(message, workload)
    raise claims.ClaimError(f"more than {MAX_MESSAGES} messages about one call")


def _workload(operation: Operation, axes: Mapping[str, int], dtype: str, options: Mapping[str, Any]) -> Workload:
    specs = input_specs(operation, axes, dtype, options)
    sizes = " ".join(f"{axis}={size}" for axis, size in axes.items())
    return Workload(
        title=f"{sizes} {dtype}",
        inputs=tuple(specs[name] for name in operation.inputs),
        upstream=specs[operation.upstream] if operation.upstream else None,
        options=tuple(options.get(name) for name in operation.options),
    )


def input_specs(
    operation: Operation, axes: Mapping[str, int], dtype: str, options: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Name, shape and dtype of each of the operation's inputs at any size, without making them: nothing is allocated.

    Args:
        dtype: of the floating inputs; indices and flags have their own.
    """
    with torch.device("meta"):
        inputs = operation.make_inputs(axes, operation.fills[0], getattr(torch, dtype), options, torch.Generator())
    return {
        name: {"name": name, "shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
        for name, value in inputs.items()
    }


def _plain_type(text: str) -> str:
    """<['64'], fp32> as "a block [64] of fp32", fp32 as "a single fp32"."""
    block = re.fullmatch(r"<\[(.*)\], (\w+)>", text.strip())
    if block is None:
        return f"a single {text.strip()}"
    return f"a block [{block[1].replace(chr(39), '')}] of {block[2]}"


def _diagnostic(stderr: bytes) -> tuple[str, int | None] | None:
    """The first telling error that a compiler pass printed, with the student's line where it names one."""
    text = stderr.decode("utf-8", "replace")
    for line, said in re.findall(r"submission\.py:(\d{1,6}):\d+: error: ([^\n]{1,300})", text):
        if not said.startswith("Failures have been detected"):
            return said.strip(), int(line)
    if failed := re.search(r"submission\.py:(\d{1,6}):\d+: note: Pipeline failed while executing \[`(\w{1,60})`", text):
        return f"the compiler's pass {failed[2]} failed on this kernel", int(failed[1])
    if crashed := re.search(r"LLVM ERROR: [^\n]{1,300}|Assertion [^\n]{1,300} failed", text):
        return crashed[0].strip(), None
    return None
