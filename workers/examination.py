"""The order of things in one examination. The examiner never imports the student's file.

Two candidate processes work side by side: one answers the numeric probes, the other is audited and measured for
memory. Inputs, expected outputs, deadlines and comparisons belong to this process. Before an output is read the
candidate's process tree is frozen, so that nothing can be written late.
"""

from __future__ import annotations

import dataclasses
import hashlib
import platform
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

import reference
from grader.assignment import Assignment, Case
from grader.errors import AssignmentError
from grader.measurement import (
    LIMITS,
    Audit,
    CompileReport,
    Device,
    Evidence,
    Examination,
    Failure,
    FailureKind,
    Isolation,
    MemoryPoint,
    MistakeMatch,
    MistakeOnProbe,
    OutputRun,
    ProbeFailed,
    ProbeMeasured,
    ProbeRun,
    Stage,
)
from reference.operation import Inputs, Mistake, Operation, Options, Specs
from workers import claims, numerics
from workers.compiling import compile_report
from workers.devices.cpu import Arena, ArenaFullError, Placed, Slot
from workers.interview import CandidateFailedError, Interview, load_request
from workers.sandbox import Sandbox

MAX_RESTARTS = 2  # of a candidate that died in a probe, so that the other probes still say something
MAX_OUTPUT_TEXT = 16 * 1024
COMPILE_BUDGET_S = 15.0
MIN_CALL_S = 0.5  # of a call that begins just before the deadline
MAX_MISTAKE_PROBES = 8  # failing probes that every mistake is held against
MAX_MISTAKES_TRIED = 16  # of its forms, on all of those
MAX_MISTAKES_KEPT = 6
FAR = 1e3  # a relative distance beyond which it does not matter how far

# the candidates need the other cores, and a thread team that waits for a busy core multiplies every small operation
torch.set_num_threads(1)

Progress = Callable[[str, float], None]


class Sandboxes(Protocol):
    """Where warm candidates come from."""

    isolation: Isolation

    def take(self, timeout_s: float) -> Sandbox: ...

    def hold(self) -> AbstractContextManager[None]: ...


@dataclass(slots=True)
class Numerics:
    """What the probes found."""

    load_failure: Failure | None = None
    entry: str | None = None
    probes: list[ProbeRun] = field(default_factory=list)
    answers: dict[str, Answer] = field(default_factory=dict)
    right_without_launches: tuple[str, ...] | None = None
    evidence: list[Evidence] = field(default_factory=list)
    stdout: bytes = b""
    stderr: bytes = b""
    output_bytes: int = 0


@dataclass(slots=True)
class Audited:
    """What the instrumented interpreter found."""

    audit: Audit | None = None
    failure: Failure | None = None
    memory: list[MemoryPoint] = field(default_factory=list)
    evidence: list[Evidence] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Answer:
    """What the student's file answered to one probe, and what it was asked."""

    case: Case
    inputs: Mapping[str, torch.Tensor]  # with the strides the student saw
    student: Mapping[str, torch.Tensor]
    oracle: Mapping[str, torch.Tensor]
    passed: bool


def examine(
    assignment: Assignment,
    source: bytes,
    *,
    sandboxes: Sandboxes,
    compilers: Sandboxes | None = None,
    progress: Progress = lambda _stage, _fraction: None,
    seed: int | None = None,
) -> Examination:
    """Examine one hand-in in the interpreter.

    Args:
        source: the student's file, UTF-8.
        sandboxes: gives warm candidates; two are used, and up to two more when one dies.
        compilers: gives a candidate that compiles for the target GPU; without it there is no compile report.
        progress: told the stage and how much of it is done, 0 to 1. Called from several threads.
        seed: makes the inputs of every probe; fresh and secret when None.

    Raises:
        AssignmentError: the assignment does not fit its reference or the arena.

    """
    exam = Examiner(assignment, source, sandboxes, progress, secrets.randbits(62) if seed is None else seed)
    with ThreadPoolExecutor(max_workers=2, thread_name_prefix="examination") as threads:
        audited_later = threads.submit(exam.audit)
        compiled_later = threads.submit(exam.compile, compilers) if compilers is not None else None
        numeric = exam.numerics()
        audited = audited_later.result()
        compiled = compiled_later.result() if compiled_later is not None else None
    device = Device(kind="interpreter", name=f"Triton interpreter on {_processor()}")
    found = exam.examination(numeric, audited, device, installed_versions())
    return dataclasses.replace(found, compile_report=compiled)


class Bench(Protocol):
    """The device that answers the probes."""

    kind: str  # "interpreter" or "cuda", as in assignment.DEVICES

    def arena(self, interview: Interview) -> Arena:
        """Memory that a fresh candidate shares with us."""

    def naive(self, operation: Operation, inputs: Inputs, options: Options) -> dict[str, torch.Tensor]:
        """The naive baseline's outputs, on the CPU, computed as this device computes."""

    def is_lost(self, failure: Failure) -> bool:
        """Whether a candidate that failed so cannot answer anything more."""


class _Interpreter:
    kind = "interpreter"

    def arena(self, interview: Interview) -> Arena:
        return Arena(interview.sandbox.arena)

    def naive(self, operation: Operation, inputs: Inputs, options: Options) -> dict[str, torch.Tensor]:
        return operation.naive(inputs, options)

    def is_lost(self, failure: Failure) -> bool:  # noqa: ARG002
        return False


class Examiner:
    """The parts of one examination. Probes are answered on `bench`; the audit is always the interpreter's."""

    def __init__(
        self,
        assignment: Assignment,
        source: bytes,
        sandboxes: Sandboxes,
        progress: Progress,
        seed: int,
        bench: Bench | None = None,
    ) -> None:
        self.assignment, self.source, self.sandboxes, self.progress, self.seed = (
            assignment,
            source,
            sandboxes,
            progress,
            seed,
        )
        self.bench: Bench = bench or _Interpreter()
        try:
            self.operation: Operation = reference.load(assignment.operation)
        except reference.ReferenceMissing as exc:
            raise AssignmentError(f"assignments/{assignment.slug}/assignment.toml: operation: {exc}") from None
        self.gradients = frozenset(output.name for output in assignment.outputs if output.gradient)
        self.stages: list[Stage] = []
        self.start_clock()

    def start_clock(self) -> None:
        """Count the time that all calls together may take from now on; what was waited for a GPU is not the file's."""
        self._deadline = time.monotonic() + self.assignment.limits.total_s

    def examination(self, numeric: Numerics, audited: Audited, device: Device, versions: dict[str, str]) -> Examination:
        """Put together what was found, and hold known mistakes against wrong answers."""
        with self.stage("diagnosis"):
            mistakes = self._mistakes(list(numeric.answers.values()))
        return Examination(
            assignment=self.assignment.slug,
            assignment_digest=self.assignment.digest,
            source_sha256=hashlib.sha256(self.source).hexdigest(),
            device=device,
            isolation=self.sandboxes.isolation,
            versions=versions,
            seed=self.seed,
            entry=numeric.entry,
            load_failure=numeric.load_failure,
            probes=tuple(numeric.probes),
            right_without_launches=numeric.right_without_launches,
            mistakes=mistakes,
            memory=tuple(audited.memory),
            audit=audited.audit,
            audit_failure=audited.failure,
            evidence=tuple(dict.fromkeys(numeric.evidence + audited.evidence)),
            stages=tuple(self.stages),
            stdout=numeric.stdout[:MAX_OUTPUT_TEXT].decode("utf-8", "backslashreplace"),
            stderr=numeric.stderr[:MAX_OUTPUT_TEXT].decode("utf-8", "backslashreplace"),
            output_bytes=numeric.output_bytes,
        )

    # -- numerics ------------------------------------------------------------------------------------------------

    def numerics(self) -> Numerics:
        """Put every probe to a candidate, and to another one when it dies."""
        found = Numerics()
        cases = list(self.assignment.cases_on(self.bench.kind))
        restarts = 0
        while cases and restarts <= MAX_RESTARTS and self._left_s() > 0:
            with self.stage("preflight"):
                interview, arena = self.begin()
            try:
                with self.stage("preflight"):
                    found.entry = self.load(interview)
                with self.stage("numerics"):
                    cases = self._probe_all(interview, arena, cases, found)
            except CandidateFailedError as exc:
                found.load_failure = exc.failure
                cases = []
            finally:
                self._close(interview, found)
            restarts += 1
        return found

    def _probe_all(self, interview: Interview, arena: Arena, cases: list[Case], found: Numerics) -> list[Case]:
        """Run cases in order. Returns those left when the candidate died, none when all ran or a limit was hit."""
        total = len(self.assignment.cases_on(self.bench.kind))
        for number, case in enumerate(cases):
            self.progress("numerics", 1 - (len(cases) - number) / total)
            started = time.monotonic()
            try:
                self._check_time(case.name)
                run, answer = self._probe(interview, arena, case)
            except claims.ClaimError as exc:
                failure = _unreadable(exc, case.name)
                found.evidence.append(Evidence(kind="broken-protocol", message=failure.message))
                found.probes.append(ProbeFailed(name=case.name, failure=failure))
                continue
            except CandidateFailedError as exc:
                failed = ProbeFailed(name=case.name, failure=exc.failure, seconds=time.monotonic() - started)
                found.probes.append(failed)
                if exc.failure.kind in LIMITS:
                    return []
                if exc.dead or self.bench.is_lost(exc.failure):
                    return cases[number + 1 :]
                continue
            found.probes.append(dataclasses.replace(run, seconds=time.monotonic() - started))
            if answer:
                found.answers[case.name] = answer
        self._look_without_launches(interview, arena, found)
        return []

    def _look_without_launches(self, interview: Interview, arena: Arena, found: Numerics) -> None:
        """Put one probe once more, with new values, while launches do nothing: a right answer is no kernel's then.

        After all other probes: a file may do anything with memory that no kernel wrote.
        """
        right = [
            case
            for case in self.assignment.cases_on(self.bench.kind)
            if case.required and (answer := found.answers.get(case.name)) is not None and answer.passed
        ]
        if not right or self._left_s() <= 0:
            return
        case = right[self.seed % len(right)]
        laid = self._lay_out(arena, case, nth=2)
        slots = [slot for slot in laid.slots if not slot.gradient]
        own = {output.name for output in self.assignment.outputs if output.own_kernel} - self.gradients
        specs = {name: laid.specs[name] for name in sorted(own)}
        request = laid.request | {"upstream": None, "outputs": [slot.spec() for slot in slots], "launches": "off"}
        try:
            interview.ask(request, stage=case.name)
            expected = _Expected(self.operation, self.bench, laid.inputs, case)
            student, said = self._read(interview, arena, slots, interview.answer(self._call_s()), expected.oracle)
            runs = list(self._compare(student, said, expected, specs, case))
        except claims.ClaimError as exc:
            found.evidence.append(Evidence(kind="broken-protocol", message=_unreadable(exc, case.name).message))
        except CandidateFailedError:
            found.right_without_launches = ()  # it needs what its kernels compute
        else:
            found.right_without_launches = tuple(
                run.name for run in runs if run.rel_error is not None and run.rel_error <= run.limit
            )

    def _probe(self, interview: Interview, arena: Arena, case: Case) -> tuple[ProbeMeasured, Answer | None]:
        laid = self._lay_out(arena, case)
        inputs, placed, specs, slots = laid.inputs, laid.placed, laid.specs, laid.slots
        request = laid.request | {"keep": "first" if case.check == "fresh-inputs" else None}
        interview.ask(request, stage=case.name)
        expected = _Expected(self.operation, self.bench, inputs, case)  # computed while the candidate works
        answer = interview.answer(self._call_s())
        student, said = self._read(interview, arena, slots, answer, expected.oracle)
        inputs_ok, guards_ok = arena.intact()
        parts = [_facts(answer, "forward"), _facts(answer, "backward")]
        tuned = any(facts.get("tuned") is True for facts in parts)
        repeat_equal = first_kept = None
        if case.check == "repeat":
            again = self._call_again(interview, arena, slots, request, case, expected.oracle)
            repeat_equal = _same_bits(student, again)
        if case.check == "fresh-inputs":
            first = student
            inputs = self._inputs(case, 1)
            placed = [arena.rewrite(old, inputs[old.name]) for old in placed]
            expected = _Expected(self.operation, self.bench, inputs, case)
            arena.poison(slots)
            interview.ask(request | {"keep": None}, stage=case.name)
            answer = interview.answer(self._call_s())
            student, said = self._read(interview, arena, slots, answer, expected.oracle)
            arena.poison(slots)
            interview.ask({"op": "again", "keep": "first", "outputs": [slot.spec() for slot in slots]}, stage=case.name)
            kept, _ = self._read(interview, arena, slots, interview.answer(self._call_s()), expected.oracle)
            first_kept = _same_bits(first, kept)
            interview.ask({"op": "forget", "keep": "first"}, stage=case.name)
            interview.answer(self._call_s())
        runs = tuple(self._compare(student, said, expected, specs, case))
        measured = ProbeMeasured(
            name=case.name,
            outputs=runs,
            largest_score=expected.largest_score,
            repeat_equal=repeat_equal,
            inputs_unchanged=inputs_ok,
            guards_intact=guards_ok,
            first_result_kept=first_kept,
            findings=tuple(one for facts in parts for one in claims.findings(facts, case.name)),
            torch_ops=tuple(one for facts in parts for one in claims.torch_ops(facts)),
            library_calls=tuple(one for facts in parts for one in claims.torch_ops(facts, "library_calls")),
            tuned=tuned,
        )
        passed = all(run.rel_error is not None and run.rel_error <= run.limit for run in runs)
        views = {item.name: item.value for item in placed}
        return measured, Answer(case, views, student, expected.oracle, passed)

    def _call_again(
        self,
        interview: Interview,
        arena: Arena,
        slots: list[Slot],
        request: dict[str, Any],
        case: Case,
        oracle: Mapping[str, torch.Tensor],
    ) -> Mapping[str, torch.Tensor]:
        arena.poison(slots)
        interview.ask(request, stage=case.name)
        student, _ = self._read(interview, arena, slots, interview.answer(self._call_s()), oracle)
        return student

    def _compare(
        self,
        student: Mapping[str, torch.Tensor],
        said: Mapping[str, Mapping[str, Any]],
        expected: _Expected,
        specs: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        case: Case,
    ) -> Iterator[OutputRun]:
        for name, (_, dtype) in specs.items():
            want = expected.oracle[name]
            baseline_error = max(
                numerics.relative_error(one[name], want) or 0.0 for one in (expected.naive, *expected.roundings)
            )
            limit = self.assignment.tolerance.limit(
                baseline_rel_error=baseline_error,
                dtype=case.dtype,
                largest_score=expected.largest_score,
                gradient=name in self.gradients,
            )
            yield numerics.compare(
                name,
                student.get(name),
                want,
                dtype,
                said_shape=claims.shape(said.get(name, {})),
                said_dtype=claims.text(said.get(name, {}), "dtype", 40),
                baseline=expected.naive[name],
                limit_of=limit,
                baseline_rel_error=baseline_error,
            )

    # -- audit and memory ----------------------------------------------------------------------------------------

    def audit(self, *, sweep: bool = True) -> Audited:
        """Watch one call in the instrumented interpreter, and with `sweep` its memory at growing sizes."""
        found = Audited()
        interview, arena = self.begin()
        try:
            self.load(interview)
            with self.stage("audit"):
                self._audit_call(interview, arena, found)
            if sweep and self.assignment.memory is not None:
                with self.stage("memory"):
                    self._sweep(interview, arena, found)
        except CandidateFailedError as exc:
            found.failure = exc.failure
        except claims.ClaimError as exc:
            found.failure = _unreadable(exc, "audit")
            found.evidence.append(Evidence(kind="broken-protocol", message=found.failure.message))
        finally:
            interview.end()
            found.evidence += interview.evidence
        return found

    def _audit_call(self, interview: Interview, arena: Arena, found: Audited) -> None:
        """Three calls. What the first one showed stands, also when the file fails in one of the others."""
        structure = self.assignment.structure
        case = Case(name="audit", axes=structure.axes, tries="", options=structure.options, dtype=structure.dtype)
        facts, outputs = self._watched(interview, arena, case, "full")
        forward, backward = facts["forward"], facts.get("backward", {})
        costs = self.operation.costs(structure.axes, getattr(torch, structure.dtype), structure.options)
        saved = claims.storages(forward, "saved")
        found.audit = Audit(
            axes=dict(structure.axes),
            n_launches=claims.count(forward, "n_launches"),
            launches=claims.launches(forward) + claims.launches(backward),
            torch_ops=claims.torch_ops(forward) + claims.torch_ops(backward),
            library_calls=claims.torch_ops(forward, "library_calls") + claims.torch_ops(backward, "library_calls"),
            outputs=claims.outputs_written(forward),
            requested_bytes=claims.count(forward, "requested_bytes"),
            unique_bytes=claims.count(forward, "unique_bytes"),
            dot_flops=claims.count(forward, "dot_flops"),
            largest_tile_elements=claims.count(forward, "largest_tile_elements"),
            least_bytes=costs.least_bytes,
            eager_launches=costs.eager_launches,
            eager_bytes=costs.eager_bytes,
            findings=claims.findings(forward, None) + claims.findings(backward, None),
            saved=saved,
            unread_inputs=claims.names(forward, "unread_inputs"),
            backward_launches=claims.count(backward, "n_launches"),
        )
        _, permuted = self._watched(interview, arena, case, "bounds", order="reverse")
        found.audit = dataclasses.replace(found.audit, order_dependent=not _same_bits(outputs, permuted))
        quadratic_bytes = self._quadratic_bytes(interview, arena, case, found.audit.unique_bytes)
        found.audit = dataclasses.replace(found.audit, quadratic_bytes=quadratic_bytes)

    def _quadratic_bytes(self, interview: Interview, arena: Arena, case: Case, at_one: int) -> float | None:
        """Coefficient of T² in unique bytes, solved from sizes T and 2T under bytes = a T² + b T."""
        sweep = self.assignment.memory
        if sweep is None:
            return None
        size = case.axes[sweep.along[0]]
        doubled = dataclasses.replace(case, axes=dict(case.axes) | dict.fromkeys(sweep.along, 2 * size))
        facts, _ = self._watched(interview, arena, doubled, "full")
        at_two = claims.count(facts["forward"], "unique_bytes")
        return (at_two - 2 * at_one) / (2 * size * size)

    def _sweep(self, interview: Interview, arena: Arena, found: Audited) -> None:
        sweep = self.assignment.memory
        assert sweep is not None
        for number, size in enumerate(sweep.sizes):
            self.progress("memory", number / len(sweep.sizes))
            axes = dict(sweep.axes) | dict.fromkeys(sweep.along, size)
            options = self.assignment.structure.options
            case = Case(name=f"memory-{size}", axes=axes, tries="", options=options, dtype=sweep.dtype)
            try:
                self._check_time(case.name)
                found.memory.append(self._memory_point(interview, arena, case, size))
            except CandidateFailedError as exc:
                if exc.failure.kind is FailureKind.TIME_LIMIT and len(found.memory) >= 2:
                    return  # the interpreter is slow, not the kernel: two sizes give an exponent
                found.memory.append(MemoryPoint(size=size, peak_bytes=0, failure=exc.failure))
                if exc.dead or self._left_s() <= 0:
                    return
            except claims.ClaimError as exc:
                # without this size the smaller ones would pass for the whole sweep
                failure = _unreadable(exc, case.name)
                found.evidence.append(Evidence(kind="broken-protocol", message=failure.message))
                found.memory.append(MemoryPoint(size=size, peak_bytes=0, failure=failure))
                return

    def _memory_point(self, interview: Interview, arena: Arena, case: Case, size: int) -> MemoryPoint:
        facts, _ = self._watched(interview, arena, case, "full")
        forward, backward = facts["forward"], facts.get("backward")
        costs = self.operation.costs(case.axes, getattr(torch, case.dtype), case.options or {})
        return MemoryPoint(
            size=size,
            peak_bytes=claims.count(forward, "peak_bytes"),
            backward_peak_bytes=claims.count(backward, "peak_bytes") if backward is not None else None,
            kept_bytes=claims.count(forward, "alive_after_bytes"),
            naive_bytes=costs.naive_peak_bytes,
            reference_bytes=costs.reference_peak_bytes,
            largest_tile_elements=claims.count(forward, "largest_tile_elements"),
        )

    def _watched(
        self, interview: Interview, arena: Arena, case: Case, level: str, order: str | None = None
    ) -> tuple[Mapping[str, Mapping[str, Any]], Mapping[str, torch.Tensor]]:
        """Facts and outputs of one call under the instrumented interpreter."""
        laid = self._lay_out(arena, case)
        interview.ask(laid.request | {"watch": level, "order": order}, stage=case.name)
        answer = interview.answer(self._call_s())
        want = {name: torch.empty(shape) for name, (shape, _) in laid.specs.items()}
        outputs, _ = self._read(interview, arena, laid.slots, answer, want)
        facts = {key: _facts(answer, key) for key in ("forward", "backward") if _facts(answer, key)}
        if "forward" not in facts:
            raise claims.ClaimError("no facts about the forward")
        return facts, outputs

    # -- the compile report --------------------------------------------------------------------------------------

    def compile(self, compilers: Sandboxes) -> CompileReport:
        """What the compiler makes of the file for the target GPU. It never delays the grade by more than its budget."""
        with self.stage("compile"):
            return compile_report(
                self.assignment, self.operation, self.source, pool=compilers, budget_s=COMPILE_BUDGET_S
            )

    # -- known mistakes ------------------------------------------------------------------------------------------

    def _mistakes(self, answers: list[Answer]) -> tuple[MistakeMatch, ...]:
        """Known mistakes nearest to the student's outputs, when some were wrong.

        A bank has dozens of mistakes, and one that depends on the tile width has a form for each. All of them are held
        against two wrong answers, a small and a middling one; the nearest against more; those kept against all.
        """
        failing = sorted((one for one in answers if not one.passed), key=_size)[:MAX_MISTAKE_PROBES]
        if not failing:
            return ()
        forms = [
            (mistake, tile)
            for mistake in self.operation.mistakes
            for tile in (self.operation.tiles if mistake.tiled else (None,))
        ]
        forms = self._nearest(forms, [failing[0], failing[len(failing) // 2]])[:MAX_MISTAKES_TRIED]
        forms = self._nearest(forms, failing)[:MAX_MISTAKES_KEPT]
        return tuple(
            MistakeMatch(
                label=mistake.label,
                tile=tile,
                step=mistake.step,
                hint=mistake.hint,
                probes=tuple(self._hold(mistake, tile, answer) for answer in answers),
            )
            for mistake, tile in forms
        )

    def _nearest(
        self, forms: list[tuple[Mistake, int | None]], answers: Sequence[Answer]
    ) -> list[tuple[Mistake, int | None]]:
        """Forms of mistakes, those nearest to the student's answers first; what cannot be compared is far."""

        def far(form: tuple[Mistake, int | None]) -> float:
            rows = [self._hold(*form, answer) for answer in answers]
            return sum(FAR if row.distance is None else min(row.distance, FAR) for row in rows)

        return sorted(forms, key=far)

    def _hold(self, mistake: Mistake, tile: int | None, answer: Answer) -> MistakeOnProbe:
        outputs = mistake.outputs(answer.inputs, answer.case.options or {}, tile or 0)
        return numerics.mistake_on_probe(answer.case.name, answer.student, outputs, answer.oracle)

    # -- shared --------------------------------------------------------------------------------------------------

    def begin(self) -> tuple[Interview, Arena]:
        """A fresh candidate, and the memory it shares with us."""
        interview = Interview(self.sandboxes.take(timeout_s=60.0))
        try:
            return interview, self.bench.arena(interview)
        except BaseException:
            interview.end()
            raise

    def load(self, interview: Interview) -> str:
        """Have the file imported; returns the name of the entry point. Raises CandidateFailedError."""
        arena = Arena(interview.sandbox.arena)  # also on a GPU: the source goes through the host's memory
        offset, length = arena.place_bytes(self.source)
        interview.ask(load_request(self.assignment, self.operation, length, offset), stage="load")
        answer = interview.answer(max(MIN_CALL_S, min(self.assignment.limits.load_s, self._left_s())))
        try:
            return claims.text(answer, "entry", 200)
        except claims.ClaimError as exc:
            raise interview.broke_protocol(str(exc)) from None

    def call_once(self, interview: Interview, arena: Arena, case: Case, timeout_s: float) -> None:
        """One call with the very inputs of that probe, and nothing around them. Its outputs are not looked at.

        Raises:
            CandidateFailedError: it failed again.
            AssignmentError: the inputs do not fit.
        """
        interview.ask(self._lay_out(arena, case).request | {"poison": False}, stage=case.name)
        interview.answer(timeout_s)

    def _lay_out(self, arena: Arena, case: Case, nth: int = 0) -> _Laid:
        """Put one probe's inputs and room for its outputs into the arena, and word the request."""
        arena.clear()
        inputs = self._inputs(case, nth)
        placed = self._place(arena, case, inputs)
        options = [(case.options or {}).get(name) for name in self.operation.options]
        specs = self.operation.output_specs(inputs, case.options or {})
        slots = arena.place_slots({name: shape for name, (shape, _) in specs.items()}, self.gradients)
        return _Laid(inputs, placed, specs, slots, self._request(placed, options, slots))

    def _close(self, interview: Interview, found: Numerics) -> None:
        ending = interview.end()
        found.evidence += interview.evidence
        found.stdout += ending.stdout
        found.stderr += ending.stderr
        found.output_bytes += ending.output_bytes_total

    def _inputs(self, case: Case, nth: int) -> dict[str, torch.Tensor]:
        digest = hashlib.sha256(f"{self.seed}/{case.name}/{nth}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        dtype = getattr(torch, case.dtype)
        return self.operation.make_inputs(case.axes, case.fill, dtype, case.options or {}, generator)

    def _place(self, arena: Arena, case: Case, inputs: Mapping[str, torch.Tensor]) -> list[Placed]:
        try:
            return [self._place_one(arena, case, name, value) for name, value in inputs.items()]
        except ArenaFullError as exc:
            raise AssignmentError(f"assignments/{self.assignment.slug}: case {case.name}: {exc}") from None

    def _place_one(self, arena: Arena, case: Case, name: str, value: torch.Tensor) -> Placed:
        layout = self.operation.layout(name, case_layout=case.layout, fill=case.fill)
        return arena.place_expanded(name, value) if layout == "expanded" else arena.place(name, value, layout)

    def _request(self, placed: Sequence[Placed], options: list[Any], slots: Sequence[Slot]) -> dict[str, Any]:
        upstream = [item.spec() for item in placed if item.name == self.operation.upstream]
        return {
            "op": "call",
            "inputs": [item.spec() for item in placed if item.name != self.operation.upstream],
            "upstream": upstream[0] if upstream else None,
            "options": options,
            "outputs": [slot.spec() for slot in slots],
            "watch": "bounds",
            "poison": True,
        }

    def _read(
        self,
        interview: Interview,
        arena: Arena,
        slots: Sequence[Slot],
        answer: Mapping[str, Any],
        want: Mapping[str, torch.Tensor],
    ) -> tuple[dict[str, torch.Tensor], dict[str, Mapping[str, Any]]]:
        """Outputs by name, read while the candidate is frozen. Of alternatives, the one nearest to `want` counts.

        Only what may stand among the saved tensors of an autograd.Function has alternatives, each read once.
        """
        said_of: dict[str, Mapping[str, Any]] = {}
        best: dict[str, tuple[float, torch.Tensor | None]] = {}
        by_name = {slot.name: slot for slot in slots}
        seen: set[tuple[str, int]] = set()
        interview.sandbox.freeze()
        try:
            for said in claims.rows(answer, "outputs"):
                slot = by_name.get(claims.text(said, "name", 60))
                checked = _checked(said)
                which = checked["alternative"]
                if slot is None or (slot.name, which) in seen or (which and (slot is slots[0] or slot.gradient)):
                    continue
                seen.add((slot.name, which))
                value = arena.read(slot, checked)
                error = None if value is None else numerics.relative_error(value, want[slot.name])
                rank = 1e30 if error is None else error
                if slot.name not in best or rank < best[slot.name][0]:
                    best[slot.name], said_of[slot.name] = (rank, value), said
        finally:
            interview.sandbox.thaw()
        return {name: value for name, (_, value) in best.items() if value is not None}, said_of

    def _left_s(self) -> float:
        return self._deadline - time.monotonic()

    def _call_s(self) -> float:
        """Seconds the next call may take; the whole examination has a limit too."""
        return max(MIN_CALL_S, min(self.assignment.limits.call_s, self._left_s()))

    def _check_time(self, stage: str) -> None:
        """Raise CandidateFailedError when the examination has used up its time: quick calls end it too."""
        if self._left_s() <= 0:
            message = f"the examination took {self.assignment.limits.total_s:.0f} s, the limit for all calls together"
            raise CandidateFailedError(Failure(kind=FailureKind.TIME_LIMIT, message=message, stage=stage), dead=False)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        self.progress(name, 0.0)
        try:
            yield
        finally:
            self.stages.append(Stage(name=name, seconds=round(time.monotonic() - started, 4)))
        self.progress(name, 1.0)


@dataclass(frozen=True, slots=True)
class _Laid:
    """One probe in the arena."""

    inputs: dict[str, torch.Tensor]
    placed: list[Placed]
    specs: Specs
    slots: list[Slot]
    request: dict[str, Any]


class _Expected:
    """Oracle, naive baseline, what rounding costs at least, and largest score of one probe's inputs."""

    def __init__(self, operation: Operation, bench: Bench, inputs: Inputs, case: Case) -> None:
        options = case.options or {}
        self.oracle = operation.oracle(inputs, options)
        self.naive = bench.naive(operation, inputs, options)
        self.roundings = operation.roundings(inputs, options) if operation.roundings is not None else []
        self.largest_score = operation.largest_score(inputs, options)


def _size(answer: Answer) -> int:
    return sum(value.numel() for value in (*answer.inputs.values(), *answer.oracle.values()))


def _unreadable(exc: claims.ClaimError, stage: str) -> Failure:
    return Failure(kind=FailureKind.NOT_OURS, message=f"the answer cannot be read: {exc}", stage=stage)


def _checked(said: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "shape": claims.shape(said),
        "dtype": claims.text(said, "dtype", 40),
        "copied": said.get("copied") is True,
        "alternative": claims.count(said, "alternative"),
    }


def _facts(answer: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    facts = answer.get("facts", {})
    found = facts.get(key, {}) if isinstance(facts, dict) else {}
    if not isinstance(found, dict):
        raise claims.ClaimError(f"facts.{key} is not an object")
    return found


def _same_bits(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[name].shape == b[name].shape
        and a[name].dtype == b[name].dtype
        and torch.equal(_bytes(a[name]), _bytes(b[name]))
        for name in a
    )


def _bytes(value: torch.Tensor) -> torch.Tensor:
    return value.reshape(-1).view(torch.uint8)  # a single number has no axis whose bytes could be seen


def installed_versions() -> dict[str, str]:
    """Versions of what an examination rests on."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for name in ("torch", "triton", "numpy", "tilegrade"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    return f"{platform.machine()} CPU"
