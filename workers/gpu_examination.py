"""One examination on a GPU: probes, memory and speed there, the audit in the interpreter beside it.

The order: the audit starts on the CPU; under the GPU's lock a candidate answers the probes; a fresh one is measured for
memory by NVML and then timed against the naive baseline and the reference. docs/decisions/0005-gpu.md has the reasons.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import secrets
import sys
import threading
import time
import typing
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

import torch

import reference
from grader.assignment import Assignment, Limits
from grader.errors import GraderFault
from grader.measurement import (
    Ceilings,
    Device,
    Evidence,
    Examination,
    Failure,
    FailureKind,
    GpuFacts,
    GpuState,
    LargeCall,
    MemoryPoint,
    ProbeFailed,
    Replay,
    ReplayOutcome,
    Timing,
)
from grader.roofline import is_too_fast, roofline
from reference import timed as timed_operations
from reference.operation import Inputs, Operation, Options
from workers import claims, processes
from workers.ahead import Compiled, ahead_pool, archives_into, compile_ahead
from workers.ceilings import measure as measure_ceilings
from workers.devices.cpu import Arena, interpreter_pool
from workers.devices.gpu import Shown, SmallArena
from workers.examination import Audited, Examiner, Progress, Sandboxes, installed_versions
from workers.gpu_timing import (
    SCRUBBED,
    BaselineFailedError,
    Field,
    Operations,
    Race,
    Rival,
    ShowCost,
    Size,
    Stopwatch,
    VoidError,
    WrongRows,
    WrongRowsError,
    input_bytes,
    learn_show_cost,
    window_seeds,
)
from workers.interview import Allowance, CandidateFailedError, Interview
from workers.isolation import BACKGROUND_NICE
from workers.large_calls import plain_call
from workers.replay import conclude, is_wanted, replay
from workers.sanitizer import broken_probe, look_closer

if TYPE_CHECKING:
    # at run time only where a GPU is opened: it needs a driver, and this module has parts that do not
    from workers.devices.cuda import Gpu

PROBE_BYTES = 1 << 30  # of the arena, for one probe's tensors
HEADLINE_S = 2.5
OTHER_S = 0.8
BALLAST_FACTOR = 4  # times what the reference needs is left to the student at the largest size,
BALLAST_LEAST_BYTES = 1 << 30  # and at least this, for modules, local memory and rounding
# What a file holds on the GPU before a call, beyond this, is memory that it needs. The rest is modules, and the local
# memory of kernels that spill: 1 KiB for each of an H200's 2048 x 132 threads are 264 MiB.
MODULES_BYTES = 1 << 30
# Memory of the host's that a call may take beyond what the process had. To compile attention in between, with tiles of
# 128, took 0.4 GiB with the assembler's; scratch files, up to 0.5 GiB, count there too. A byte for each score is 4 GiB.
HOST_BYTES = 2 << 30
MOST_FAILURES = 3  # of a reference, before this worker goes on without it
LANES = 4  # one holds the GPU, one is ready for it, two are compiled and audited
SWITCH_S = 1e-4
_POLL_S = 0.001

log = logging.getLogger("tilegrade.gpu")


@dataclass(slots=True)
class GpuRecord:
    """What one examination noted beside the measurements: for staff, benchmarks and the health of the GPU."""

    races: list[tuple[Size, Race]] = field(default_factory=list)
    looks_for_late: bool = False
    compiled_late: tuple[str, ...] = ()  # kernels that the GPU's candidate compiled anew, where it is looked for them
    seconds: dict[str, float] = field(default_factory=dict)  # by stage


class CudaBench:
    """Probes answered on a GPU: the arena is the examiner's device memory, float32 products may use tf32."""

    kind = "cuda"

    def __init__(self, gpu: Gpu, archives: Sequence[bytes]) -> None:
        self._gpu, self._archives = gpu, archives

    def arena(self, interview: Interview) -> Arena:
        """Memory that a fresh candidate shares with us: opens it there, and hands over what was compiled ahead."""
        self.ready(interview, self._gpu)
        return Arena(self._gpu.arena[:PROBE_BYTES])

    def ready(self, interview: Interview, shown: Shown) -> None:
        """Have a fresh candidate open this memory of ours, and hand over what was compiled ahead."""
        open_arena(interview, shown)
        archives_into(interview, self._archives)

    def naive(self, operation: Operation, inputs: Inputs, options: Options) -> dict[str, torch.Tensor]:
        """The naive baseline's outputs, on the CPU, computed as this GPU computes."""
        found = operation.naive({name: tensor.cuda() for name, tensor in inputs.items()}, options)
        return {name: tensor.cpu() for name, tensor in found.items()}

    def is_lost(self, failure: Failure) -> bool:
        """A CUDA error stays: every later call of that process gives it again."""
        return is_sticky(failure)


class Rivals:
    """The naive baseline and the reference of each operation, in candidates that outlive many gradings.

    One such for a GPU: only who knows all baselines there can have those that wait give their memory back.

    Args:
        sandboxes: their candidates, without a limit on processor time: waiting for a GPU spins, grading after grading.
    """

    def __init__(self, gpu: Gpu, sandboxes: Sandboxes) -> None:
        self._gpu, self._sandboxes = gpu, sandboxes
        self._running: dict[tuple[str, str], Rival] = {}
        self._records_ms: dict[tuple[str, str], dict[str, float]] = {}  # these outlive a rival too
        self._n_failed: Counter[tuple[str, str]] = Counter()
        self.show_cost: ShowCost | None = None  # of this GPU, once it is learnt

    def of(
        self,
        assignment: Assignment,
        operation: Operation,
        timed: timed_operations.Timed,
        prove: Callable[[Rival], None],
    ) -> list[Rival]:
        """Both rivals of an operation, loaded; started when they are not there yet. Call while no student's code runs.

        Those of other operations give back the memory of their windows: all of them together do not fit beside a
        student's. A reference that failed too often is left out for as long as this process lives.

        Args:
            prove: runs one alone; raises BaselineFailedError or VoidError.

        Raises:
            GraderFault: the naive baseline does not run here.
        """
        for (name, _), rival in list(self._running.items()):
            if name != operation.name:
                try:
                    rival.trim()
                except BaselineFailedError as exc:
                    log.warning("%s gave no memory back and is started anew when it is needed: %s", name, exc)
                    self.end(rival)

        def start(name: str, file: Path, entry: str, kind: str) -> Rival:
            named = dataclasses.replace(assignment, entry=entry, entry_kind=kind)
            return self._proven((operation.name, name), lambda: self._start(name, named, file), prove)

        try:
            naive = start("naive", timed.baseline_file, timed.baseline_entry, "function")
        except (BaselineFailedError, VoidError) as exc:
            raise GraderFault(f"{operation.name}: {exc}") from exc
        key = (operation.name, "reference")
        if self._n_failed[key] >= MOST_FAILURES:
            return [naive]
        try:
            return [naive, start("reference", operation.kernel_file, assignment.entry, assignment.entry_kind)]
        except (BaselineFailedError, VoidError):
            self._n_failed[key] += 1
            log.exception("the reference kernel of %s does not run here", operation.name)
            return [naive]

    def failed(self, rival: Rival) -> None:
        """End one that failed beside a student's file. The file may be why, so it gets more than one chance."""
        self._n_failed.update(key for key, one in self._running.items() if one is rival)
        self.end(rival)

    def end(self, rival: Rival) -> None:
        """End one; another is started when it is asked for."""
        self._running = {key: one for key, one in self._running.items() if one is not rival}
        rival.interview.end()
        rival.close()

    def hold(self) -> AbstractContextManager[None]:
        """Keep those that get ready off the GPU meanwhile."""
        return self._sandboxes.hold()

    def freeze(self) -> None:
        """Stop all of them, so that nothing of theirs runs beside a measurement."""
        for rival in self._running.values():
            rival.interview.sandbox.freeze()

    def close(self) -> None:
        """End them."""
        for rival in list(self._running.values()):
            self.end(rival)

    def _proven(self, key: tuple[str, str], start: Callable[[], Rival], prove: Callable[[Rival], None]) -> Rival:
        """The one that runs, if it still does, or a new one."""
        before = self._running.get(key)
        if before is not None:
            try:
                before.release()
                prove(before)
            except (BaselineFailedError, VoidError) as exc:
                log.warning("%s is started anew: %s", key[0], exc)
                self.end(before)
            else:
                return before
        rival = start()
        rival.records_ms = self._records_ms.setdefault(key, rival.records_ms)
        self._running[key] = rival
        try:
            prove(rival)
        except BaseException:
            self.end(rival)
            raise
        return rival

    def _start(self, name: str, assignment: Assignment, file: Path) -> Rival:
        interview = Interview(self._sandboxes.take(timeout_s=120.0))
        rival = Rival(name, interview, self._gpu)
        examiner = Examiner(assignment, file.read_bytes(), self._sandboxes, lambda _stage, _fraction: None, 0)
        try:
            examiner.load(interview)
            rival.open()
        except BaseException as exc:
            interview.end()
            if isinstance(exc, CandidateFailedError):
                raise BaselineFailedError(rival, str(exc)) from exc
            raise
        return rival


class Ahead:
    """CPU cores on which hand-ins are compiled before they get a GPU. Lanes that compile at a time share them.

    Args:
        n_candidates: how many work at a time.
    """

    def __init__(self, *, sandboxes: Sandboxes, n_candidates: int, budget_s: float = 60.0) -> None:
        self._sandboxes, self._n_candidates, self._budget_s = sandboxes, n_candidates, budget_s
        self._counting = threading.Lock()
        self._n_inside = 0

    def compile(self, assignment: Assignment, source: bytes) -> Compiled:
        """Compile every call of the examination."""
        with self._counting:
            self._n_inside += 1
            # alone it takes all; in a full queue time matters less than what starting one more costs
            share = self._n_candidates if self._n_inside == 1 else max(1, self._n_candidates // 4)
        try:
            return compile_ahead(
                assignment,
                reference.load(assignment.operation),
                source,
                pool=self._sandboxes,
                n_candidates=share,
                budget_s=self._budget_s,
            )
        finally:
            with self._counting:
                self._n_inside -= 1


def examine_on_gpu(
    assignment: Assignment,
    source: bytes,
    *,
    gpu: Gpu,
    sandboxes: Sandboxes,
    interpreter: Sandboxes | None,
    rivals: Rivals,
    quiet: Callable[[], AbstractContextManager[None]] | None = None,
    ahead: Ahead | None = None,
    ceilings: Ceilings | None = None,
    progress: Progress = lambda _stage, _fraction: None,
    seed: int | None = None,
    versions: Mapping[str, str] | None = None,
    record: GpuRecord | None = None,
) -> Examination:
    """Examine one hand-in on a GPU.

    Args:
        sandboxes: warm candidates with a CUDA context; two are used, and more when one dies.
        interpreter: candidates for the audit; None leaves it out, and structure is then not measured.
        ahead: where to compile before the GPU is asked for; None leaves compiling to the GPU candidates.
        ceilings: what this GPU can do at best; a time below it is shown to staff.
        rivals: keeps the baselines from one grading to the next.
        quiet: keeps candidates that get ready off the GPU; those of `sandboxes` and `rivals` when None.
        record: filled with what was noted beside the measurements.

    Raises:
        AssignmentError: the assignment does not fit its reference or the arena.
        GpuError: the driver refused something of ours.
    """
    exam_seed = secrets.randbits(62) if seed is None else seed
    noted = record if record is not None else GpuRecord()
    with contextlib.ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(max_workers=1, thread_name_prefix="audit"))
        on_cpu = Examiner(assignment, source, interpreter, progress, exam_seed) if interpreter is not None else None
        audited_later = threads.submit(on_cpu.audit, sweep=False) if on_cpu is not None else None
        began = time.monotonic()
        progress("compile", 0.0)
        compiled = ahead.compile(assignment, source) if ahead is not None else None
        archives = compiled.archives if compiled is not None else []
        progress("compile", 1.0)
        noted.seconds["compile-ahead"] = time.monotonic() - began
        on_gpu = Examiner(assignment, source, sandboxes, progress, exam_seed, CudaBench(gpu, archives))
        hold = quiet or (lambda: _holding([sandboxes, rivals]))
        course = _Course(assignment, on_gpu, gpu, rivals, noted, exam_seed, ceilings, hold)
        course.run()
        began = time.monotonic()
        fault = None
        if (broken := broken_probe(assignment, course.numeric.probes, is_sticky)) is not None:
            with on_gpu.stage("second-look"):
                fault = look_closer(on_gpu, broken, archives=archives, lock=gpu.lock)
        noted.seconds["second-look"] = time.monotonic() - began
        audited = audited_later.result() if audited_later is not None else Audited()
        audited = dataclasses.replace(audited, memory=course.memory)
        replayed, signs = conclude(course.replay, audited.audit) if course.replay is not None else (None, [])
        if on_cpu is not None:
            on_gpu.stages += on_cpu.stages
    examination = on_gpu.examination(
        course.numeric,
        audited,
        Device(kind="cuda", name=gpu.name, arch=gpu.arch),
        dict(versions or {}) | installed_versions(),
    )
    return dataclasses.replace(
        examination,
        timings=tuple(course.timings),
        gpu=GpuFacts(
            memory_bytes=gpu.total_bytes,
            ceilings=ceilings,
            before=course.before,
            after=course.after,
            held_s=course.held_s,
            idle_s=course.idle_s,
        ),
        device_fault=fault,
        compile_report=compiled.report if compiled is not None else None,
        large_calls=tuple(course.large_calls),
        large_ops=course.operations.torch_ops(),
        large_library_calls=course.operations.library_calls(),
        too_slow=course.too_slow,
        replay=replayed,
        evidence=tuple(dict.fromkeys((*examination.evidence, *course.evidence, *signs))),
    )


def examine_once(
    assignment: Assignment,
    source: bytes,
    *,
    isolation: Literal["auto", "none"] = "auto",
    progress: Progress = lambda _stage, _fraction: None,
    seed: int | None = None,
) -> Examination:
    """Examine one hand-in on this host's GPU, with everything started for it alone.

    Raises:
        SandboxUnavailable: no candidate can be had.
        GpuError: there is no GPU that works.
    """
    from workers.devices.cuda import Gpu, baselines_pool, cuda_pool

    n_compilers = _compilers()
    limits = assignment.limits
    with contextlib.ExitStack() as stack:
        compilers = stack.enter_context(ahead_pool(limits, size=n_compilers, refill=False, isolation=isolation))
        baselines = stack.enter_context(baselines_pool(refill=False, isolation=isolation))
        # one for the probes, one to be measured
        candidates = stack.enter_context(cuda_pool(limits, size=2, refill=False, isolation=isolation))
        interpreter = stack.enter_context(interpreter_pool(limits, size=1, refill=False, isolation=isolation))
        gpu = Gpu()
        stack.callback(gpu.close)
        rivals = Rivals(gpu, baselines)
        stack.callback(rivals.close)
        return examine_on_gpu(
            assignment,
            source,
            gpu=gpu,
            sandboxes=candidates,
            interpreter=interpreter,
            rivals=rivals,
            ahead=Ahead(sandboxes=compilers, n_candidates=n_compilers),
            ceilings=measure_ceilings(),
            progress=progress,
            seed=seed,
        )


class WarmGpu:
    """What a GPU's worker keeps from one hand-in to the next: the arena, the baselines, and candidates of each kind.

    Args:
        lanes: threads that may call it at a time. One holds the GPU, the others audit and compile on CPU cores.
    """

    def __init__(self, *, lanes: int = LANES) -> None:
        from workers.devices.cuda import Gpu, baselines_pool

        # whoever reads the clock must not wait five milliseconds until another lane lets go of the interpreter
        sys.setswitchinterval(SWITCH_S)
        self.lanes = lanes
        self.compiled_late: tuple[str, ...] = ()  # at the last warm-up: kernels whose cache keys differ on the GPU
        self._starting = threading.Lock()
        self._stack = contextlib.ExitStack()
        self._gpu = Gpu()
        self._stack.callback(self._gpu.close)
        self._ceilings = measure_ceilings()
        self._rivals = Rivals(self._gpu, self._stack.enter_context(baselines_pool()))
        self._stack.callback(self._rivals.close)
        self._warm: dict[Limits, _Warm] = {}
        self._holds: list[contextlib.ExitStack] = []  # of those who keep candidates off the GPU just now

    def __call__(
        self, assignment: Assignment, source: bytes, progress: Progress, record: GpuRecord | None = None
    ) -> Examination:
        warm = self.pools(assignment.limits)
        return examine_on_gpu(
            assignment,
            source,
            gpu=self._gpu,
            sandboxes=warm.candidates,
            interpreter=warm.interpreter,
            rivals=self._rivals,
            quiet=self._quiet,
            ahead=warm.ahead,
            ceilings=self._ceilings,
            progress=progress,
            record=record,
        )

    def warm_up(self, assignment: Assignment) -> Examination:
        """Examine the reference kernel: what is started or compiled at its first use is then ready for a hand-in."""
        operation = reference.load(assignment.operation)
        record = GpuRecord(looks_for_late=True)
        found = self(assignment, operation.kernel_file.read_bytes(), lambda _stage, _fraction: None, record)
        self.compiled_late = record.compiled_late
        return found

    def pools(self, limits: Limits) -> _Warm:
        """Warm candidates with those limits; started now where there are none yet."""
        from workers.devices.cuda import cuda_pool

        with self._starting:
            if limits not in self._warm:
                n_compilers = _compilers()
                compilers = self._stack.enter_context(ahead_pool(limits, size=n_compilers))
                # one is asked and one is timed, and the next two get ready meanwhile
                candidates = self._stack.enter_context(cuda_pool(limits, size=2 * self.lanes))
                interpreter = self._stack.enter_context(interpreter_pool(limits, size=self.lanes, nice=BACKGROUND_NICE))
                for holds in self._holds:
                    holds.enter_context(candidates.hold())
                ahead = Ahead(sandboxes=compilers, n_candidates=n_compilers)
                self._warm[limits] = _Warm(candidates, interpreter, ahead)
            return self._warm[limits]

    @contextlib.contextmanager
    def _quiet(self) -> Iterator[None]:
        """All of them keep off, whatever assignment they are for: a context takes memory that a ballast left.

        So do those that another lane starts meanwhile.
        """
        with contextlib.ExitStack() as holds:
            with self._starting:
                pools: list[Rivals | Sandboxes] = [self._rivals, *(warm.candidates for warm in self._warm.values())]
                self._holds.append(holds)
            try:
                holds.enter_context(_holding(pools))
                yield
            finally:
                with self._starting:
                    self._holds.remove(holds)

    def close(self) -> None:
        """End every candidate and give the GPU's memory back."""
        self._warm.clear()
        self._stack.close()


@dataclass(frozen=True, slots=True)
class _Warm:
    candidates: Sandboxes
    interpreter: Sandboxes
    ahead: Ahead


@contextlib.contextmanager
def _holding(pools: Sequence[Sandboxes | Rivals]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for pool in pools:
            stack.enter_context(pool.hold())
        yield


def _compilers() -> int:
    """Half of the cores, at most eight: the other half starts the next candidates meanwhile."""
    return max(1, min(8, (os.cpu_count() or 2) // 2))


def open_arena(interview: Interview, gpu: Shown) -> None:
    """Have a candidate map the examiner's memory."""
    interview.ask({"op": "arena", "handle": gpu.handle, "bytes": len(gpu.arena)}, stage="load")
    interview.answer(30.0)


def is_sticky(failure: Failure) -> bool:
    """Whether the message is that of a CUDA context that is broken for good."""
    said = failure.message
    return "CUDA error" in said and "out of memory" not in said


class _Course:
    """What happens under the lock, in order."""

    def __init__(
        self,
        assignment: Assignment,
        examiner: Examiner,
        gpu: Gpu,
        rivals: Rivals,
        record: GpuRecord,
        seed: int,
        ceilings: Ceilings | None,
        hold: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._assignment, self._examiner, self._gpu, self._rivals, self._hold = assignment, examiner, gpu, rivals, hold
        self._record, self._seed, self._ceilings = record, seed, ceilings
        self._waits = Allowance(assignment.limits.total_s)  # for memory and speed: those who wait for the GPU wait too
        self.memory: list[MemoryPoint] = []
        self.timings: list[Timing] = []
        self.large_calls: list[LargeCall] = []
        self.operations = Operations()
        self.too_slow: Failure | None = None
        self._small: SmallArena | None = None  # for the memory sweep
        self._bare_bytes: int | None = None  # of the process that is measured, on the GPU, before it loads the file
        self.replay: Replay | None = None
        self.evidence: list[Evidence] = []
        self.before: GpuState | None = None
        self.after: GpuState | None = None
        self.held_s = self.idle_s = 0.0

    def run(self) -> None:
        waited = time.monotonic()
        with self._gpu.lock():
            began = time.monotonic()
            self._record.seconds["waiting"] = began - waited
            self.idle_s = began - self._gpu.free_since
            self.before = self._gpu.state()
            try:
                stopwatch, others = self._prepare_rivals()
                with self._timed("numerics"):
                    self._examiner.start_clock()
                    self.numeric = self._examiner.numerics()
                if self._may_go_on():
                    self._measure(stopwatch, others)
            finally:  # also after a fault of ours: the next one maps this very memory
                with self._timed("scrub"):
                    self._gpu.arena.fill_(SCRUBBED)
                    self._gpu.settle()
            self.after = self._gpu.state()
            self.held_s = time.monotonic() - began

    def _prepare_rivals(self) -> tuple[Stopwatch | None, list[Rival]]:
        """Rivals loaded and the idle GPU measured, before any of the student's code runs."""
        timed = timed_operations.load(self._assignment.operation)
        if self._assignment.speed is None or timed is None:
            return None, []
        with self._timed("rivals"):
            show_cost = self._show_cost()
            stopwatch = Stopwatch(
                self._assignment, self._examiner.operation, timed, self._gpu, seed=self._seed, show_cost=show_cost
            )
            for size in self._sizes():
                stopwatch.calibrate(size)
            others = self._others(stopwatch, timed)
        return stopwatch, others

    def _show_cost(self) -> ShowCost:
        """Learnt in a worker's first grading, before any file is loaded there: the same is subtracted for everybody."""
        if self._rivals.show_cost is None:
            with self._quiet():
                self._rivals.show_cost = learn_show_cost(self._gpu)
        return self._rivals.show_cost

    def _others(self, stopwatch: Stopwatch, timed: timed_operations.Timed) -> list[Rival]:
        """The rivals, each with a time of its own at every size, made alone; frozen."""

        def prove(rival: Rival) -> None:
            lacking = [(number, size) for number, size in enumerate(self._sizes()) if not rival.has_record(size)]
            with self._quiet() if lacking else contextlib.nullcontext():
                for number, size in lacking:
                    try:
                        stopwatch.record(rival, size, headline=number == 0)
                    except VoidError as exc:  # a moment says little; without a record nobody can be graded
                        log.warning("%s is recorded once more: %s", rival.name, exc)
                        stopwatch.record(rival, size, headline=number == 0)

        found = self._rivals.of(self._assignment, self._examiner.operation, timed, prove)
        self._rivals.freeze()
        return found

    @contextlib.contextmanager
    def _quiet(self) -> Iterator[None]:
        """Candidates that get ready keep off the GPU meanwhile."""
        began = time.monotonic()
        with self._hold():
            seconds = self._record.seconds
            seconds["gate"] = seconds.get("gate", 0.0) + time.monotonic() - began
            yield

    def _may_go_on(self) -> bool:
        """Memory and speed are measured only for a file that loads and answers what is required."""
        required = {case.name for case in self._assignment.cases_on("cuda") if case.required}
        failed = {run.name for run in self.numeric.probes if isinstance(run, ProbeFailed)}
        wrong = {name for name, answer in self.numeric.answers.items() if not answer.passed}
        return self.numeric.load_failure is None and not required & (failed | wrong)

    def _measure(self, stopwatch: Stopwatch | None, others: list[Rival]) -> None:
        if self._assignment.memory is None and stopwatch is None:
            return
        interview = Interview(self._examiner.sandboxes.take(timeout_s=60.0), self._waits)
        student = Rival("student", interview, self._gpu)
        student.operations = self.operations
        small = contextlib.ExitStack()  # what is in it is freed when the candidate is gone
        try:
            with self._timed("load"):
                if self._sweeps:
                    self._small = small.enter_context(self._gpu.small_arena(self._sweep_bytes()))
                self._load(interview, self._small)
            right = all(answer.passed for answer in self.numeric.answers.values())
            with self._quiet():
                with self._timed("memory"):
                    self._sweep(interview)
                if (
                    stopwatch is not None
                    and right
                    and len(self.numeric.answers) == len(self._assignment.cases_on("cuda"))
                ):
                    with self._timed("timing"):
                        if self._sweeps:
                            open_arena(interview, self._gpu)
                        self._race(stopwatch, student, others)
            if self._record.looks_for_late and interview.ending is None:
                interview.ask({"op": "late"}, stage="timing")
                self._record.compiled_late = claims.names(interview.answer(10.0), "names")
        except CandidateFailedError as exc:
            # too slow at full size is no sign of anything else: there is no speed then, and that is all
            if exc.failure.kind is FailureKind.TIME_LIMIT:
                self.too_slow = exc.failure
            elif not self._reported(exc.failure):
                message = f"{exc.failure.stage}: {exc.failure.message[:500]}"
                self.evidence.append(Evidence(kind="failed-when-measured", message=message))
        except claims.ClaimError as exc:
            self.evidence.append(Evidence(kind="broken-protocol", message=str(exc)))
        finally:
            interview.end()
            student.close()
            small.close()
            self.evidence += interview.evidence

    # -- speed ---------------------------------------------------------------------------------------------------

    def _sizes(self) -> list[Size]:
        speed = self._assignment.speed
        assert speed is not None
        return [Size(axes=axes, dtype=getattr(torch, speed.dtype), options=dict(speed.options)) for axes in speed.sizes]

    def _race(self, stopwatch: Stopwatch, student: Rival, others: list[Rival]) -> None:
        for number, size in enumerate(self._sizes()):
            self._examiner.progress("speed", number / len(self._sizes()))
            headline = number == 0
            try:
                race, timing = self._race_once_or_twice(stopwatch, student, others, size, headline)
            except WrongRowsError as exc:
                if exc.wrong is None or not self._is_wrong_alone(stopwatch, size, student, exc.wrong):
                    self.evidence.append(exc.evidence)
                return
            except CandidateFailedError as exc:
                if exc.failure.kind is FailureKind.TIME_LIMIT or not self._is_wrong_alone(
                    stopwatch, size, student, None
                ):
                    raise
                return
            except VoidError as exc:
                self.evidence.append(Evidence(kind="timing-void", message=str(exc)))
                return
            self._record.races.append((size, race))
            self.evidence += race.evidence
            self.timings.append(timing)
            if headline and is_wanted(self._assignment, timing, self._gpu.name):
                with self._timed("replay"):
                    self.replay = self._replay(stopwatch, size, timing, student, others)
            if self._ceilings is not None:
                self._hold_to_roof(timing, self._ceilings)
            if student.interview.ending is not None:
                return  # in its replay; the size that counts is measured

    def _replay(self, stopwatch: Stopwatch, size: Size, timing: Timing, student: Rival, others: list[Rival]) -> Replay:
        """What a replay says; nothing where a baseline fails in it, for the grading itself is made by then."""
        try:
            return replay(
                stopwatch, size, timing, student, others,
                begin=self._begin_empty, gpu=self._gpu, assignment=self._assignment,
            )  # fmt: skip
        except BaselineFailedError as exc:
            log.warning("a replay said nothing: %s", exc)
            self._rivals.failed(exc.rival)
            others.remove(exc.rival)
            if exc.rival.name == "naive":
                timed = timed_operations.load(self._assignment.operation)
                assert timed is not None
                others[:] = self._others(stopwatch, timed)
                # the file's process is frozen, but not what it may have left on the GPU
                others[0].doubt()
            return Replay(
                outcome=ReplayOutcome.NOT_REPLAYABLE, axes=dict(size.axes), detail=f"the replay said nothing: {exc}"
            )

    def _load(self, interview: Interview, shown: SmallArena | None = None) -> None:
        """Have a fresh candidate open an arena, the usual one if no small one is given, and load the file."""
        bench = typing.cast(CudaBench, self._examiner.bench)
        bench.ready(interview, shown if shown is not None else self._gpu)
        if shown is not None:
            self._bare_bytes = self._named_bytes(interview)
        self._examiner.start_clock()  # probes before it may have taken all the time that they had
        self._examiner.load(interview)

    def _begin_empty(self) -> Interview:
        """A candidate that has the arena open and loads no file."""
        interview = Interview(self._examiner.sandboxes.take(timeout_s=60.0), self._waits)
        try:
            open_arena(interview, self._gpu)
        except BaseException:
            interview.end()
            raise
        return interview

    def _is_wrong_alone(self, stopwatch: Stopwatch, size: Size, student: Rival, wrong: WrongRows | None) -> bool:
        """Whether a plain call at this size, by a process that saw no window, fails or is wrong too; noted then."""

        def begin() -> Interview:
            # one of its own: what is wrong in a window must not be held because the windows took all the time
            waits = Allowance(self._assignment.limits.total_s)
            interview = Interview(self._examiner.sandboxes.take(timeout_s=60.0), waits)
            try:
                self._load(interview)
            except BaseException:
                interview.end()
                raise
            return interview

        # it may hold all of the memory, and has nothing more to say; what is mapped here is free when it is unmapped
        student.interview.end()
        student.close()
        with self._timed("plain-calls"):
            found = plain_call(begin, self._gpu, size, wrong, wrong.inputs if wrong else stopwatch.one_call(size))
        self.large_calls += [found] if found is not None else []
        return found is not None

    def _reported(self, failure: Failure) -> bool:
        """Whether a failure is among the measurements, so that it is no evidence of anything else."""
        return any(point.failure is failure for point in self.memory)

    def _race_once_or_twice(
        self, stopwatch: Stopwatch, student: Rival, others: list[Rival], size: Size, headline: bool
    ) -> tuple[Race, Timing]:
        """A race, without the reference where that fails: a file's speed is held against the naive baseline."""
        try:
            return self._race_again_when_noisy(stopwatch, student, others, size, headline)
        except BaselineFailedError as exc:
            self._rivals.failed(exc.rival)
            if exc.rival.name != "reference":
                raise GraderFault(str(exc)) from exc
            log.warning("graded without the reference: %s", exc)
            others.remove(exc.rival)
            return self._race_again_when_noisy(stopwatch, student, others, size, headline)

    def _race_again_when_noisy(
        self, stopwatch: Stopwatch, student: Rival, others: Sequence[Rival], size: Size, headline: bool
    ) -> tuple[Race, Timing]:
        """A race, and another one when the first was void, or noisy where points hang on it."""
        budget_s = HEADLINE_S if headline else OTHER_S

        def once() -> tuple[Race, Timing]:
            race = stopwatch.race(size, student, others, budget_s=budget_s, headline=headline)
            return race, stopwatch.timing(size, race)

        with contextlib.suppress(VoidError):
            race, timing = once()
            if not (timing.noisy and headline):
                return race, timing
        return once()

    def _hold_to_roof(self, timing: Timing, ceilings: Ceilings) -> None:
        roof = roofline(
            time_ms=median(timing.student_times_ms),
            flops=timing.flops,
            traffic_bytes=timing.least_bytes,
            dtype=timing.dtype,
            ceilings=ceilings,
        )
        if is_too_fast(median(timing.student_times_ms), roof.floor_ms):
            message = (
                f"{median(timing.student_times_ms):.4f} ms a call; this GPU needs {roof.floor_ms:.4f} for the work"
            )
            self.evidence.append(Evidence(kind="faster-than-possible", message=message))

    # -- memory --------------------------------------------------------------------------------------------------

    @property
    def _sweeps(self) -> bool:
        sweep = self._assignment.memory
        timed = timed_operations.load(self._assignment.operation)
        return sweep is not None and timed is not None and bool(sweep.cuda_sizes)

    def _sweep_size(self, length: int) -> Size:
        """The call that is measured, with that length of the axes that grow."""
        sweep = self._assignment.memory
        assert sweep is not None
        return Size(
            axes=dict(sweep.axes_on("cuda")) | dict.fromkeys(sweep.along, length),
            dtype=getattr(torch, sweep.dtype),
            options=dict(self._assignment.structure.options),
        )

    def _sweep_bytes(self) -> int:
        """What the inputs of the largest call take."""
        sweep = self._assignment.memory
        timed = timed_operations.load(self._assignment.operation)
        assert sweep is not None
        assert timed is not None
        return input_bytes(timed, self._sweep_size(sweep.cuda_sizes[-1]), 1)

    def _sweep(self, interview: Interview) -> None:
        sweep = self._assignment.memory
        timed = timed_operations.load(self._assignment.operation)
        if sweep is None or timed is None or not self._sweeps:
            return
        largest = sweep.cuda_sizes[-1]
        idle = 0
        for number, size in enumerate(sweep.cuda_sizes):
            self._examiner.progress("memory", number / len(sweep.cuda_sizes))
            try:
                if number == 0:
                    # the first call loads modules and compiles: it is made once before anything is read
                    self._point(interview, timed, size, idle=0, ballast=False)
                    # what it holds by now beyond modules is memory that it needs
                    idle = self._bytes_of(interview)
                    if self._bare_bytes is not None:
                        idle = min(idle, self._bare_bytes + MODULES_BYTES)
                point = self._point(interview, timed, size, idle=idle, ballast=size == largest)
            except CandidateFailedError as exc:
                if exc.failure.kind is not FailureKind.TIME_LIMIT:
                    self.memory.append(MemoryPoint(size=size, peak_bytes=0, failure=exc.failure))
                raise
            self.memory.append(point)
            if point.failure is not None:
                return

    def _point(
        self,
        interview: Interview,
        timed: timed_operations.Timed,
        size: int,
        *,
        idle: int,
        ballast: bool,
    ) -> MemoryPoint:
        """Memory at one size: the device's above `idle` by NVML, and what of the host's is more than compiling takes.

        Ballast leaves free little beyond the reference's need.
        """
        assert self._small is not None
        operation, call = self._examiner.operation, self._sweep_size(size)
        costs = operation.costs(call.axes, call.dtype, call.options)
        inputs = Field(self._small, operation, timed, call, 1, seeds=window_seeds(self._seed, f"memory-{size}"))
        inputs.fill(time.perf_counter)
        inputs.show()
        self._small.settle()
        request = inputs.request(1) | {"op": "measure"}
        leave = max(BALLAST_LEAST_BYTES, BALLAST_FACTOR * costs.reference_peak_bytes)
        peak = kept = 0
        backward: int | None = None
        failure: Failure | None = None
        with self._gpu.ballast(leave) if ballast else contextlib.nullcontext():
            try:
                if ballast:
                    self._hold_to_little(interview, size, costs.n_scores, leave)
                peak = self._watched(interview, request, size) - idle
                interview.ask({"op": "trim", "drop": False}, stage=f"memory-{size}")
                interview.answer(self._call_s())
                kept = self._bytes_of(interview) - idle
                if request["upstream"] is not None:
                    backward = self._watched(interview, {"op": "backward"}, size) - idle
            except CandidateFailedError as exc:
                if exc.dead or is_sticky(exc.failure):
                    raise
                failure = self._needs(exc.failure, costs.naive_peak_bytes, leave if ballast else None)
                peak = max(peak, self._bytes_of(interview) - idle)
            interview.ask({"op": "trim", "drop": True}, stage=f"memory-{size}")
            interview.answer(self._call_s())
        return MemoryPoint(
            size=size,
            peak_bytes=max(0, peak),
            backward_peak_bytes=None if backward is None else max(0, backward),
            kept_bytes=max(0, kept),
            naive_bytes=costs.naive_peak_bytes,
            reference_bytes=costs.reference_peak_bytes,
            failure=failure,
        )

    def _hold_to_little(self, interview: Interview, size: int, n_scores: int, leave: int) -> None:
        """What is held before a call, and what is left to it, must not have room for all scores, a byte for each."""
        now = self._named_bytes(interview)
        if now is None or self._bare_bytes is None or not n_scores:
            return
        held = now - self._bare_bytes
        if held > max(MODULES_BYTES, n_scores - leave):
            message = (
                f"{held / 2**30:.1f} GiB of the GPU were held before the call at {size}: with the "
                f"{leave / 2**30:.1f} GiB left to it there is room for all scores"
            )
            self.evidence.append(Evidence(kind="memory-held", message=message))

    def _needs(self, failure: Failure, naive_bytes: int, left_bytes: int | None) -> Failure:
        """The failure, with what was left and what a whole score matrix would need."""
        if "out of memory" not in failure.message.lower():
            return failure
        left = f"{left_bytes / 2**30:.1f} GiB were left, " if left_bytes is not None else ""
        needs = f"{left}a file that stores all scores would need {naive_bytes / 2**30:.1f} GiB"
        return dataclasses.replace(
            failure, kind=FailureKind.MEMORY_LIMIT, message=f"CUDA out of memory: {needs}. {failure.message[:300]}"
        )

    def _watched(self, interview: Interview, request: dict[str, Any], size: int) -> int:
        """Most bytes that NVML saw from the request to just after its answer, while nothing was freed yet.

        The control group sees what of the host's memory was taken meanwhile, where it counts that.
        """
        sandbox = interview.sandbox
        sandbox.reset_memory_peak()
        before = sandbox.memory_peak_bytes()
        interview.ask(request, stage=f"memory-{size}")
        pids = processes.tree(sandbox.pid)
        with _polling(lambda: self._gpu.process_bytes(pids) or 0) as most:
            self.operations.add(interview.answer(self._call_s()))
        after = sandbox.memory_peak_bytes()
        host = after - before if before is not None and after is not None else 0
        return max(most(), self._bytes_of(interview)) + max(0, host - HOST_BYTES)

    def _named_bytes(self, interview: Interview) -> int | None:
        return self._gpu.process_bytes(processes.tree(interview.sandbox.pid))

    def _bytes_of(self, interview: Interview) -> int:
        found = self._named_bytes(interview)
        # where NVML names no processes, everything on the card counts: the lock is ours and the others are frozen
        return found if found is not None else self._gpu.used_bytes()

    def _call_s(self) -> float:
        return max(1.0, self._assignment.limits.call_s)

    @contextlib.contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            with self._examiner.stage(stage) if stage != "numerics" else contextlib.nullcontext():
                yield
        finally:
            self._record.seconds[stage] = self._record.seconds.get(stage, 0.0) + time.monotonic() - began


@contextlib.contextmanager
def _polling(read: Callable[[], int]) -> Iterator[Callable[[], int]]:
    """Read a number again and again meanwhile; gives a function that tells the largest so far."""
    most = [0]
    over = threading.Event()

    def poll() -> None:
        while not over.wait(_POLL_S):
            most[0] = max(most[0], read())

    thread = threading.Thread(target=poll, name="memory-meter", daemon=True)
    thread.start()
    try:
        yield lambda: most[0]
    finally:
        over.set()
        thread.join()
