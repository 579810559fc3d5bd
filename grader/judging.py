"""From facts to a grade. Pure: the same assignment and examination always give the same grade.

A number that fails any comparison fails the student's case, so every rule is written as `not error <= limit`; a NaN
that slipped through must fail. Rules and their reasons: docs/decisions/0003-scoring.md.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

from grader import devices
from grader.assignment import Assignment, Case, Speed, SpeedStep
from grader.diagnosis import diagnose
from grader.measurement import (
    LIMITS,
    Audit,
    Examination,
    Failure,
    FailureKind,
    Finding,
    MemoryPoint,
    OutputRun,
    ProbeFailed,
    ProbeMeasured,
    ProbeRun,
    Storage,
    Timing,
    TorchOp,
)
from grader.statistics import last_exponent
from grader.verdicts import (
    AxisGrade,
    AxisVerdict,
    CaseGrade,
    CaseVerdict,
    Check,
    Diagnosis,
    Fault,
    Grade,
    MemoryGrade,
    NumericsGrade,
    OutputGrade,
    Score,
    SpeedGrade,
    StructureGrade,
    Verdict,
    only_hidden,
)
from grader.wording import listed

OUT_OF_BOUNDS = ("out-of-bounds-store", "out-of-bounds-load")
COPIES_AND_FILLS = frozenset(
    {
        "copy",
        "copy_",
        "clone",
        "contiguous",
        "_to_copy",
        "fill",
        "fill_",
        "zero_",
        "zeros",
        "zeros_like",
        "ones",
        "full",
    }
)
# a number or two, made or moved on the host's behalf, is no computation
SCALAR_BYTES = 64
# a tile that doubles while the size doubles, from one size of the sweep to the next
TILE_GROWTH = 1.9


def judge(assignment: Assignment, examination: Examination) -> Grade:
    """Say what a hand-in earns.

    Args:
        assignment: the edition to judge by; its tolerances and thresholds need not be those in force when measured.
        examination: the facts. Probes that the assignment no longer has are left out; probes that it has and that
            were not run earn nothing.
    """
    device = examination.device
    cases = _cases(assignment, examination)
    loaded = examination.load_failure is None
    # where no required probe can run on this device, all of them are
    required = [case for case in cases if case.required] or list(cases)
    required_passed = loaded and bool(required) and all(case.passed for case in required)
    refusals = _refusals(assignment, examination, required_passed) if loaded else ()
    earning = required_passed and not refusals

    numerics = _numerics(assignment, cases, required_passed, earning)
    if examination.large_calls:
        numerics = dataclasses.replace(numerics, verdict=AxisVerdict.FAIL)
    memory = _memory(assignment, examination, earning)
    structure = _structure(assignment, examination, memory, refusals, earning)
    speed = _speed(assignment, examination, required_passed, earning)
    failure = _failure(examination, cases)
    measured = _headline(numerics, memory, structure, speed, failure)
    diagnosis = diagnose(
        assignment, examination, measured, numerics=numerics, memory=memory, structure=structure, failure=failure
    )
    held = bool(examination.evidence)
    return Grade(
        assignment=assignment.slug,
        verdict=Verdict.HELD if held else measured,
        released_verdict=measured,
        provisional=device.kind != "cuda" or bool(device.arch and device.arch != assignment.target_gpu),
        device_kind=device.kind,
        device_name=device.name,
        numerics=numerics,
        memory=memory,
        structure=structure,
        speed=speed,
        score=_score([numerics, memory, structure, speed]),
        diagnosis=diagnosis,
        failure=failure,
    )


def released(grade: Grade) -> Grade:
    """A held grade that a person published as it was measured."""
    return dataclasses.replace(grade, verdict=grade.released_verdict)


def not_counted(grade: Grade, reason: str) -> Grade:
    """A held grade of which a person decided that it does not count. What was measured stays to be seen."""
    return dataclasses.replace(
        grade,
        verdict=Verdict.NOT_COUNTED,
        numerics=dataclasses.replace(grade.numerics, points=0.0),
        memory=dataclasses.replace(grade.memory, points=0.0) if grade.memory else None,
        structure=dataclasses.replace(grade.structure, points=0.0),
        speed=dataclasses.replace(grade.speed, points=0.0) if grade.speed else None,
        score=dataclasses.replace(grade.score, points=0.0),
        diagnosis=Diagnosis(label="", sentence=reason),
    )


def _headline(
    numerics: NumericsGrade,
    memory: MemoryGrade | None,
    structure: StructureGrade,
    speed: SpeedGrade | None,
    failure: Failure | None,
) -> Verdict:
    if failure is not None:
        return Verdict.LIMIT if failure.kind in LIMITS else Verdict.ERROR
    # a broken rule is the news only where the answer is right; otherwise the answer is
    if structure.refusals and numerics.required_passed:
        return Verdict.REFUSED
    if numerics.verdict is not AxisVerdict.PASS:
        return Verdict.WRONG
    others = [axis.verdict for axis in (memory, structure, speed) if axis is not None]
    if all(verdict in (AxisVerdict.PASS, AxisVerdict.NOT_MEASURED) for verdict in others):
        return Verdict.FULL
    return Verdict.PARTIAL


def _failure(examination: Examination, cases: Sequence[CaseGrade]) -> Failure | None:
    """The failure that the headline is about: a limit before anything else, then the kind seen most often, first seen.

    A size of the memory sweep that did not fit is not a failure: it is the answer to what the sweep asks.
    """
    if examination.load_failure is not None:
        return examination.load_failure
    found = [case.failure for case in cases if case.failure is not None]
    if examination.audit_failure is not None:
        found.append(examination.audit_failure)
    found += [point.failure for point in examination.memory if point.failure and not _did_not_fit(point)]
    found += [call.failure for call in examination.large_calls if call.failure is not None]
    if not found:
        return None
    limits = [failure for failure in found if failure.kind in LIMITS]
    kinds = [failure.kind for failure in limits or found]
    most = kinds[0] if limits else max(kinds, key=kinds.count)
    same = [failure for failure in found if failure.kind is most]
    # the probe that students may read about is the better example
    return next((failure for failure in same if not only_hidden(cases, failure)), same[0])


# -- numerics ---------------------------------------------------------------------------------------------------------


def _cases(assignment: Assignment, examination: Examination) -> tuple[CaseGrade, ...]:
    runs = {run.name: run for run in examination.probes}
    findings = examination.audit.findings if examination.audit else ()
    return tuple(
        _case(assignment, case, runs.get(case.name), findings) for case in assignment.cases_on(examination.device.kind)
    )


def _case(assignment: Assignment, case: Case, run: ProbeRun | None, findings: Iterable[Finding]) -> CaseGrade:
    failure = None
    faults: tuple[Fault, ...] = ()
    outputs: tuple[OutputGrade, ...] = ()
    if run is None:
        verdict = CaseVerdict.NOT_RUN
    elif isinstance(run, ProbeFailed):
        failure = run.failure
        verdict = CaseVerdict.LIMIT if failure.kind in LIMITS else CaseVerdict.ERROR
    else:
        outputs = tuple(_output(assignment, case, run, output.name, output.gradient) for output in assignment.outputs)
        of_values = {output.fault for output in outputs if output.fault is not None}
        of_check = {fault for fault in [_check(case, run, findings)] if fault is not None}
        faults = tuple(fault for fault in Fault if fault in of_values | of_check)
        verdict = CaseVerdict.FAIL if faults else CaseVerdict.PASS
    return CaseGrade(
        name=case.name,
        verdict=verdict,
        points=case.points if verdict is CaseVerdict.PASS else 0.0,
        out_of=case.points,
        required=case.required,
        hidden=case.hidden,
        faults=faults,
        outputs=outputs,
        failure=failure,
    )


def _output(assignment: Assignment, case: Case, run: ProbeMeasured, name: str, gradient: bool) -> OutputGrade:
    found = next((output for output in run.outputs if output.name == name), None)
    limit = assignment.tolerance.limit(
        baseline_rel_error=found.baseline_rel_error if found else 0.0,
        dtype=case.dtype,
        largest_score=run.largest_score,
        gradient=gradient,
    )
    return OutputGrade(
        name=name,
        rel_error=found.rel_error if found and found.shape == found.want_shape else None,
        limit=limit,
        fault=_output_fault(found, limit),
    )


def _output_fault(found: OutputRun | None, limit: float) -> Fault | None:
    if found is None:
        return Fault.MISSING
    if found.shape != found.want_shape:
        return Fault.SHAPE
    if found.dtype != found.want_dtype:
        return Fault.DTYPE
    if found.n_not_finite or found.rel_error is None:
        return Fault.NOT_FINITE
    # `not <=`, and a finite limit: neither a NaN error nor a broken baseline lets anything pass
    if not (math.isfinite(limit) and 0 <= found.rel_error <= limit):
        return Fault.VALUES
    return None


def _check(case: Case, run: ProbeMeasured, findings: Iterable[Finding]) -> Fault | None:
    """What the probe asks beside right values. A fact that was not measured is not shown, so it does not pass."""
    if case.check == "repeat" and run.repeat_equal is not True:
        return Fault.REPEAT
    if case.check == "input-unchanged" and not run.inputs_unchanged:
        return Fault.INPUTS
    if case.check == "guard":
        seen = any(finding.kind in OUT_OF_BOUNDS for finding in (*run.findings, *findings))
        return Fault.GUARD if seen or not run.guards_intact else None
    if case.check == "fresh-inputs" and run.first_result_kept is not True:
        return Fault.STALE
    return None


def _numerics(
    assignment: Assignment, cases: tuple[CaseGrade, ...], required_passed: bool, earning: bool
) -> NumericsGrade:
    out_of = assignment.points["numerics"]
    possible = math.fsum(case.out_of for case in cases)
    share = math.fsum(case.points for case in cases) / possible if possible else float(required_passed)
    return NumericsGrade(
        verdict=AxisVerdict.PASS if cases and all(case.passed for case in cases) else AxisVerdict.FAIL,
        points=_points(out_of * share) if earning else 0.0,
        out_of=out_of,
        cases=cases,
        required_passed=required_passed,
    )


# -- memory -----------------------------------------------------------------------------------------------------------


def _memory(assignment: Assignment, examination: Examination, earning: bool) -> MemoryGrade | None:
    if assignment.memory is None:
        return None
    out_of = assignment.points["memory"]
    points = sorted(examination.memory, key=lambda point: point.size)
    measured = [point for point in points if point.failure is None]
    too_big = next((point.size for point in points if _did_not_fit(point)), None)
    sizes = [point.size for point in measured]
    forward = last_exponent(sizes, [max(1, point.peak_bytes) for point in measured])
    backward = _exponent_where_known(measured, "backward_peak_bytes")
    kept = last_exponent(sizes, [max(1, point.kept_bytes) for point in measured])
    known = [exponent for exponent in (forward, backward) if exponent is not None]
    limit = assignment.memory.pass_exponent
    asks_backward = any(output.gradient for output in assignment.outputs)
    tile_grows = _tile_grows(measured)
    if too_big is not None:
        verdict = AxisVerdict.FAIL
    elif forward is None or (asks_backward and backward is None) or _ended_in_the_sweep(examination):
        verdict = AxisVerdict.NOT_RUN
    elif len(measured) < len(points) or not all(exponent <= limit for exponent in known):
        verdict = AxisVerdict.FAIL
    else:
        verdict = AxisVerdict.PASS
    return MemoryGrade(
        verdict=verdict,
        points=out_of if earning and verdict is AxisVerdict.PASS else 0.0,
        out_of=out_of,
        pass_exponent=limit,
        exponent=max(known, default=None),
        forward_exponent=forward,
        backward_exponent=backward,
        kept_exponent=kept,
        naive_exponent=last_exponent(sizes, [point.naive_bytes for point in measured]),
        reference_exponent=last_exponent(sizes, [point.reference_bytes for point in measured]),
        failed_at=too_big,
        tile_grows=tile_grows,
    )


def _exponent_where_known(points: Sequence[MemoryPoint], field: str) -> float | None:
    known = [(point.size, getattr(point, field)) for point in points if getattr(point, field) is not None]
    return last_exponent([size for size, _ in known], [max(1, value) for _, value in known])


def _ended_in_the_sweep(examination: Examination) -> bool:
    """Its time was over before the largest size on a GPU, at which little memory is left: that proves nothing."""
    return examination.too_slow is not None and examination.too_slow.stage.startswith("memory")


def _did_not_fit(point: MemoryPoint) -> bool:
    failure = point.failure
    if failure is None:
        return False
    said = failure.message.lower()
    return failure.kind is FailureKind.MEMORY_LIMIT or "out of memory" in said or "can't allocate memory" in said


def _tile_grows(points: Sequence[MemoryPoint]) -> bool | None:
    """A tile as wide as the whole row hides T² on the chip: it grows with every step of the sweep."""
    tiles = [point.largest_tile_elements for point in points]
    if len(tiles) < 2 or not all(tiles):
        return None
    return tiles[-1] >= TILE_GROWTH * tiles[-2]


# -- structure --------------------------------------------------------------------------------------------------------


def _refusals(assignment: Assignment, examination: Examination, right: bool) -> tuple[Check, ...]:
    """Rules that were broken openly. What only a `right` answer makes telling is left out for any other."""
    audit = examination.audit
    found = []
    calls = {call.op for call in examination.library_calls}
    if calls:
        found.append(Check(name="library-attention", ok=False, found=", ".join(sorted(calls)), allowed="none"))
    by_torch = sorted({op.op for op in _computing(examination) if _short(op.op) in assignment.structure.forbidden_ops})
    if right and by_torch:
        found.append(Check(name="forbidden-op", ok=False, found=", ".join(by_torch), allowed="computed by a kernel"))
    if right and examination.right_without_launches:
        names = listed(examination.right_without_launches)
        found.append(
            Check(name="own-kernel", ok=False, found=f"{names} right with no kernel run", allowed="computed by one")
        )
    if audit is None:
        return tuple(found)
    unread = [name for name in audit.unread_inputs if name not in assignment.structure.unread_inputs]
    if right and unread and audit.n_launches:
        names = listed(unread)
        found.append(
            Check(name="own-kernel", ok=False, found=f"{names} read by no kernel of the file", allowed="all read")
        )
    if audit.n_launches == 0:
        found.append(Check(name="own-kernel", ok=False, found="0 Triton launches", allowed="at least 1"))
    own = {output.name for output in assignment.outputs if output.own_kernel}
    strange = [written.name for written in audit.outputs if written.name in own and not written.by_own_kernel]
    if strange:
        found.append(
            Check(
                name="own-kernel",
                ok=False,
                found=f"{listed(strange)} not written by a Triton kernel of the file",
                allowed="written by one",
            )
        )
    return tuple(found)


def _computing(examination: Examination) -> list[TorchOp]:
    """Torch operations of the audited call, of all probes and at measured sizes, but those on a number or two."""
    audited = examination.audit.torch_ops if examination.audit is not None else ()
    of_probes = [op for run in examination.probes if isinstance(run, ProbeMeasured) for op in run.torch_ops]
    return [op for op in (*audited, *of_probes, *examination.large_ops) if op.size_bytes > SCALAR_BYTES]


def _structure(
    assignment: Assignment,
    examination: Examination,
    memory: MemoryGrade | None,
    refusals: tuple[Check, ...],
    earning: bool,
) -> StructureGrade:
    out_of = assignment.points["structure"]
    audit = examination.audit
    if audit is None or examination.load_failure is not None or examination.audit_failure is not None:
        return StructureGrade(verdict=AxisVerdict.NOT_RUN, points=0.0, out_of=out_of, refusals=refusals)
    ratio = audit.unique_bytes / audit.least_bytes if audit.least_bytes else None
    checks = _structure_checks(assignment, audit, memory, ratio, _computing(examination))
    passed = not refusals and all(check.ok for check in checks)
    return StructureGrade(
        verdict=AxisVerdict.PASS if passed else AxisVerdict.FAIL,
        points=out_of if earning and passed else 0.0,
        out_of=out_of,
        checks=checks,
        refusals=refusals,
        launches=audit.n_launches,
        unique_bytes=audit.unique_bytes,
        bytes_ratio=ratio,
    )


def _structure_checks(
    assignment: Assignment, audit: Audit, memory: MemoryGrade | None, ratio: float | None, ops: Sequence[TorchOp]
) -> tuple[Check, ...]:
    asked = assignment.structure
    own = [output.name for output in assignment.outputs if output.own_kernel]
    seen = {written.name for written in audit.outputs}
    unseen = [name for name in own if name not in seen]
    foreign = sorted({op.op for op in ops if not allowed_op(op.op, asked.torch_ops)})
    checks = [
        Check(
            name="outputs-traced",
            ok=not unseen,
            found=f"{listed(unseen)} not seen" if unseen else f"{listed(own)} written by a Triton kernel of the file",
            allowed="every named output",
        ),
        Check(
            name="launches",
            ok=audit.n_launches <= asked.max_launches,
            found=str(audit.n_launches),
            allowed=f"at most {asked.max_launches}",
        ),
        Check(
            name="bytes",
            ok=ratio is not None and ratio <= asked.max_bytes_ratio,
            found=f"{ratio:.2f}×" if ratio is not None else "unknown",
            allowed=f"at most {asked.max_bytes_ratio:g}× the least possible",
        ),
        Check(
            name="torch-ops",
            ok=not foreign,
            found=", ".join(foreign) if foreign else "none",
            allowed=f"beside copies, fills and views these are allowed: {', '.join(asked.torch_ops)}"
            if asked.torch_ops
            else "none beside copies, fills and views",
        ),
    ]
    if asked.max_tile_elements is not None:
        checks.append(
            Check(
                name="tile",
                ok=audit.largest_tile_elements <= asked.max_tile_elements,
                found=f"{audit.largest_tile_elements:,} elements",
                allowed=f"at most {asked.max_tile_elements:,}",
            )
        )
    if any(output.gradient for output in assignment.outputs):
        checks.append(
            Check(
                name="backward-launches",
                ok=audit.backward_launches <= asked.max_backward_launches,
                found=str(audit.backward_launches),
                allowed=f"at most {asked.max_backward_launches}",
            )
        )
    if memory is not None:
        checks += _storage_checks(assignment, audit, memory)
    return tuple(checks)


def _storage_checks(assignment: Assignment, audit: Audit, memory: MemoryGrade) -> list[Check]:
    """Nothing of size T² may be stored by the forward. What a backward builds and drops is for the memory axis."""

    def grows(exponent: float | None) -> bool:
        return exponent is not None and not exponent <= memory.pass_exponent

    saved = quadratic_storages(assignment, audit)
    kept = bool(saved) or grows(memory.kept_exponent)
    largest = max(saved, key=lambda storage: storage.size_bytes, default=None)
    saved_text = f"{list(largest.shape)} {largest.dtype}" if largest else "grows faster than the outputs"
    stored = kept or grows(memory.forward_exponent)
    checks = [
        Check(
            name="stored",
            ok=not stored,
            found="grows with T²" if stored else "nothing of size T²",
            allowed="nothing of size T²",
        ),
        Check(
            name="saved",
            ok=not kept,
            found=saved_text if kept else "nothing of size T²",
            allowed="inputs, outputs and one number per row",
        ),
    ]
    if memory.tile_grows is not None:
        found = "grows with T" if memory.tile_grows else "constant"
        checks.append(Check(name="tile", ok=not memory.tile_grows, found=found, allowed="constant"))
    return checks


def quadratic_storages(assignment: Assignment, audit: Audit) -> list[Storage]:
    """Storages alive after the forward with one dimension for each swept axis, padded to a tile or not."""
    if assignment.memory is None:
        return []
    along = [audit.axes[axis] for axis in assignment.memory.along if axis in audit.axes]
    others = {size for axis, size in audit.axes.items() if axis not in assignment.memory.along}
    # where another axis has the same size, shapes cannot tell them apart; the exponent of kept bytes still can
    if not along or others & set(along):
        return []
    sides = along * 2 if len(along) == 1 else along

    def has_sides(shape: tuple[int, ...]) -> bool:
        left = sorted(shape)
        for side in sorted(sides):
            fitting = next((dim for dim in left if side <= dim < side + 128 and dim not in others), None)
            if fitting is None:
                return False
            left.remove(fitting)
        return True

    return [storage for storage in audit.saved if has_sides(storage.shape)]


def allowed_op(op: str, allowed: Sequence[str]) -> bool:
    """Whether a torch operation may stand beside the kernel: copies and fills always, others when listed."""
    short = _short(op)
    return short in COPIES_AND_FILLS or short in allowed or op in allowed


def _short(op: str) -> str:
    return op.removeprefix("aten::").removeprefix("aten.").split(".")[0]


# -- speed ------------------------------------------------------------------------------------------------------------


def _speed(assignment: Assignment, examination: Examination, required_passed: bool, earning: bool) -> SpeedGrade | None:
    if assignment.speed is None:
        return None
    full = assignment.points["speed"]
    if examination.device.kind != "cuda":
        return SpeedGrade(verdict=AxisVerdict.NOT_MEASURED, points=0.0, out_of=0.0, withheld=full)
    timing = headline_timing(assignment, examination)
    # a speed is never reported for a file that is not right
    if timing is None or not required_passed:
        return SpeedGrade(verdict=AxisVerdict.NOT_RUN, points=0.0, out_of=full)
    fraction = speed_fraction(speed_steps(assignment.speed, examination.device.name), timing.ratio)
    lost = AxisVerdict.PARTIAL if fraction > 0 else AxisVerdict.FAIL
    verdict = AxisVerdict.PASS if fraction >= 1 else lost
    return SpeedGrade(
        verdict=verdict,
        points=_points(full * fraction) if earning else 0.0,
        out_of=full,
        speedup=timing.ratio,
        low=timing.ratio_low,
        high=timing.ratio_high,
        fraction=fraction,
        noisy=timing.noisy,
    )


def headline_timing(assignment: Assignment, examination: Examination) -> Timing | None:
    """The timing of the size that speed is judged by; None too for a file that is wrong at some size that is timed."""
    if assignment.speed is None or examination.large_calls:
        return None
    wanted = dict(assignment.speed.sizes[0])
    return next((timing for timing in examination.timings if timing.axes == wanted), None)


def speed_steps(speed: Speed, gpu: str) -> tuple[SpeedStep, ...]:
    """The steps in force on the GPU of that full name."""
    return speed.gpu_steps.get(devices.model_of(gpu), speed.steps)


def speed_fraction(steps: Sequence[SpeedStep], speedup: float) -> float:
    """Share of the points at `speedup`: piecewise linear between steps, 0 below the first, 1 from the last on."""
    if not speedup >= steps[0].speedup:
        return 0.0
    for a, b in itertools.pairwise(steps):
        if speedup < b.speedup:
            return a.fraction + (b.fraction - a.fraction) * (speedup - a.speedup) / (b.speedup - a.speedup)
    return steps[-1].fraction


# -- the sum ----------------------------------------------------------------------------------------------------------


def _score(axes: Sequence[AxisGrade | None]) -> Score:
    known = [axis for axis in axes if axis is not None]
    return Score(
        points=_points(math.fsum(axis.points for axis in known)),
        out_of=_points(math.fsum(axis.out_of for axis in known)),
        withheld=_points(math.fsum(axis.withheld for axis in known if isinstance(axis, SpeedGrade))),
    )


def _points(value: float) -> float:
    """Points have two decimals, so that sums read as they add up."""
    return round(value, 2)


# -- JSON -------------------------------------------------------------------------------------------------------------


def grade_json(grade: Grade) -> dict[str, Any]:
    """The grade as one JSON object, for staff: hidden probes are in it."""
    diagnosis = grade.diagnosis
    return {
        "assignment": grade.assignment,
        "verdict": grade.verdict.value,
        "released_verdict": grade.released_verdict.value,
        "fault": diagnosis.label,
        "hint": " ".join(part for part in (diagnosis.sentence, diagnosis.hint) if part),
        "provisional": grade.provisional,
        "device": {"kind": grade.device_kind, "name": grade.device_name},
        "score": {
            "points": grade.score.points,
            "out_of": grade.score.out_of,
            "withheld": grade.score.withheld,
        },
        "axes": {name: _axis_json(axis) for name, axis in grade.axes.items()},
        "probes": [_probe_json(case) for case in grade.numerics.cases],
        "diagnosis": _diagnosis_json(diagnosis),
    }


def _axis_json(axis: AxisGrade) -> dict[str, Any]:
    found: dict[str, Any] = {"verdict": axis.verdict.value}
    if isinstance(axis, NumericsGrade):
        found["passed"] = sum(case.passed for case in axis.cases)
        found["of"] = len(axis.cases)
    elif isinstance(axis, MemoryGrade):
        found["exponent"] = _rounded(axis.exponent)
        found["forward_exponent"] = _rounded(axis.forward_exponent)
        found["backward_exponent"] = _rounded(axis.backward_exponent)
        found["pass_exponent"] = axis.pass_exponent
    elif isinstance(axis, StructureGrade):
        found["launches"] = axis.launches
        found["unique_bytes"] = axis.unique_bytes
        found["bytes_ratio"] = _rounded(axis.bytes_ratio)
        found["failed"] = sorted({check.name for check in (*axis.checks, *axis.refusals) if not check.ok})
    else:
        found["speedup"] = _rounded(axis.speedup)
        found["interval"] = [_rounded(axis.low), _rounded(axis.high)] if axis.speedup is not None else None
        found["noisy"] = axis.noisy
    return {**found, "points": axis.points, "out_of": axis.out_of}


def _probe_json(case: CaseGrade) -> dict[str, Any]:
    found: dict[str, Any] = {"name": case.name, "verdict": case.verdict.value}
    if case.hidden:
        found["hidden"] = True
    error = case.rel_error
    found["rel_error"] = error if error is not None and math.isfinite(error) else None
    if case.faults:
        found["faults"] = [fault.value for fault in case.faults]
    if case.failure is not None:
        found["faults"] = [case.failure.kind.value]
    return {**found, "points": case.points, "out_of": case.out_of, "required": case.required}


def _diagnosis_json(diagnosis: Diagnosis) -> dict[str, Any]:
    return {
        "label": diagnosis.label,
        "sentence": diagnosis.sentence,
        "hint": diagnosis.hint,
        "step": diagnosis.step,
        "evidence": list(diagnosis.evidence),
        "notes": list(diagnosis.notes),
        "runner_up": diagnosis.runner_up,
    }


def _rounded(value: float | None) -> float | None:
    return round(value, 4) if value is not None and math.isfinite(value) else None
