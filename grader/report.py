"""From a grade to what people read: sections of sentences, tables and chart data. No HTML, no terminal codes.

Every `str` in a report is printable as it is (`wording.plain`); what a student's file said stands in `Hostile`. Without
`for_staff` a hidden probe is one line with its verdict, and what the file printed or raised there is left out.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

from grader import diagnosis
from grader.assignment import Assignment, Case
from grader.figures import Bar, BarChart, HeatMap, Level, LineChart, Series, Whose
from grader.measurement import (
    Audit,
    Examination,
    Failure,
    GpuFacts,
    GpuState,
    MemoryPoint,
    OutputRun,
    ProbeMeasured,
    Replay,
    ReplayOutcome,
)
from grader.report_speed import speed_section
from grader.sections import (
    LINE,
    VERDICT,
    Block,
    Cell,
    Column,
    Command,
    Kind,
    Report,
    Section,
    Table,
    TextBlock,
    axis_section,
    numbers,
    words,
)
from grader.statistics import predict, reach
from grader.verdicts import (
    AxisVerdict,
    CaseGrade,
    CaseVerdict,
    Fault,
    Grade,
    MemoryGrade,
    NumericsGrade,
    StructureGrade,
    Verdict,
    only_hidden,
)
from grader.wording import (
    Hostile,
    apart,
    bytes_text,
    count,
    error_text,
    in_words,
    listed,
    one_line,
    plain,
    points_text,
    rate_text,
)

MOST_ERROR_MAPS = 3
MOST_FINDINGS = 8
MOST_RESEMBLANCES = 5
SOME_GPU_BYTES = 80 << 30  # for comparison, where no GPU was measured on: a common size for this work


def report(assignment: Assignment, examination: Examination, grade: Grade, *, for_staff: bool = False) -> Report:
    """Everything a reader may see of one grade.

    Args:
        for_staff: also hidden probes, the seed, evidence, and what was printed while hidden probes ran.
    """
    sections = [
        _diagnosis(assignment, grade, for_staff),
        _numerics(assignment, examination, grade.numerics, for_staff),
    ]
    if grade.memory is not None:
        sections.append(_memory(assignment, examination, grade.memory))
    sections.append(_structure(assignment, examination, grade, for_staff))
    if grade.speed is not None:
        sections.append(speed_section(assignment, examination, grade.speed, within_reach=_within_reach(grade)))
    if not grade.numerics.required_passed:
        sections = [_unearned(section) for section in sections]
    compiled = _compiled(examination)
    if compiled is not None:
        sections.append(compiled)
    sections += _printed(grade, examination, for_staff)
    sections.append(_provenance(assignment, examination))
    if for_staff:
        sections.append(_staff(examination, grade))
    return Report(
        assignment=assignment.slug,
        title=assignment.title,
        verdict=grade.verdict.value,
        provisional=grade.provisional,
        headline=_headline(grade),
        remarks=_remarks(grade),
        points=grade.score.points,
        out_of=grade.score.out_of,
        withheld=grade.score.withheld,
        fault=grade.diagnosis.label,
        sections=tuple(sections),
    )


UNEARNED = "Nothing is earned before the required probes pass"


def _unearned(section: Section) -> Section:
    """Where a required probe fails: the same section, which says why what is as asked earns nothing."""
    if section.key == "numerics":  # a sentence names the probes already
        return dataclasses.replace(section, unearned=f"{UNEARNED}.")
    if section.verdict in (AxisVerdict.PASS, AxisVerdict.PARTIAL):
        return dataclasses.replace(section, unearned=f"{UNEARNED}.", sentences=(*section.sentences, f"{UNEARNED}."))
    return section


def seed_commitment(seed: int) -> str:
    """SHA-256 of the seed in decimal: it can be shown at once, and checked when the seed is."""
    return hashlib.sha256(str(seed).encode()).hexdigest()


_HEADLINES = {
    Verdict.FULL: "Everything that was asked is there.",
    Verdict.PARTIAL: "The numbers are right; points were lost elsewhere.",
    Verdict.WRONG: "The file runs, but some results are not right.",
    Verdict.ERROR: "The file does not give a result everywhere.",
    Verdict.LIMIT: "The file was stopped at a limit.",
    Verdict.REFUSED: "A rule of the assignment is broken, so the file earns no points.",
    Verdict.HELD: "A person looks at this grade before it counts. Nothing for you to do.",
    Verdict.NOT_COUNTED: "A person looked at this grade and decided that it does not count.",
}


def _headline(grade: Grade) -> str:
    gave = any(case.verdict in (CaseVerdict.PASS, CaseVerdict.FAIL) for case in grade.numerics.cases)
    return _HEADLINES[grade.verdict] if gave or grade.verdict is not Verdict.ERROR else "The file gives no result."


def _remarks(grade: Grade) -> tuple[str, ...]:
    found = []
    if grade.score.withheld and _within_reach(grade):
        found.append(f"{points_text(grade.score.withheld)} more points wait for a device that can measure them.")
    if grade.provisional:
        found.append(f"Provisional: measured on {_device(grade)}.")
    return tuple(found)


def _within_reach(grade: Grade) -> bool:
    """Whether this very file can earn what a device withholds: no device gives points to one that earns none."""
    refused = Verdict.REFUSED in (grade.verdict, grade.released_verdict) or grade.verdict is Verdict.NOT_COUNTED
    return grade.numerics.required_passed and not refused


def _device(grade: Grade) -> str:
    if grade.device_kind == "interpreter":
        return "the Triton interpreter on a CPU"
    return one_line(grade.device_name, 80)


# -- what is wrong ----------------------------------------------------------------------------------------------------


def _diagnosis(assignment: Assignment, grade: Grade, for_staff: bool) -> Section:
    found = grade.diagnosis
    sentences = [found.sentence, *found.evidence, *(f"Note: {note}" for note in found.notes)]
    blocks: list[Block] = []
    failure = grade.failure
    if failure is not None and (for_staff or not only_hidden(grade.numerics.cases, failure)):
        blocks = _failure_blocks(failure)
    right = grade.released_verdict is Verdict.FULL or (grade.released_verdict is Verdict.PARTIAL and not found.label)
    title = "What we see" if right else "What is wrong"
    if grade.verdict is Verdict.NOT_COUNTED:
        title = "Why it does not count"
    return Section(
        key="diagnosis",
        title=title,
        sentences=tuple(sentences),
        hint=plain(found.hint, 600),
        step=plain(found.step, 400),
        explained=assignment.explained.get(found.label, ""),
        blocks=tuple(blocks),
    )


def _failure_blocks(failure: Failure) -> list[Block]:
    blocks: list[Block] = []
    if failure.message.strip():
        blocks.append(TextBlock(title="Message", text=Hostile(failure.message, 2000), line=failure.line))
    if failure.traceback.strip():
        blocks.append(TextBlock(title="Where it happened", text=Hostile(failure.traceback, 4000)))
    return blocks


# -- numerics ---------------------------------------------------------------------------------------------------------

_FAULTS = {
    Fault.MISSING: "not returned",
    Fault.SHAPE: "wrong shape",
    Fault.DTYPE: "wrong dtype",
    Fault.NOT_FINITE: "not finite",
    Fault.VALUES: "wrong values",
    Fault.REPEAT: "two runs differ",
    Fault.INPUTS: "an input was changed",
    Fault.GUARD: "memory outside was touched",
    Fault.STALE: "the first result was lost",
}


def _numerics(assignment: Assignment, examination: Examination, axis: NumericsGrade, for_staff: bool) -> Section:
    passed = sum(case.passed for case in axis.cases)
    sentences = [
        f"{passed} of {count(len(axis.cases), 'probe')} pass. Each output is held against a float64 oracle: "
        "its largest error, relative to the largest value, may be a small multiple of the naive baseline's own, "
        "plus a floor."
    ]
    required = [case for case in axis.cases if case.required and not case.passed]
    if required:
        names = [case.name for case in required if for_staff or not case.hidden]
        names += ["a hidden one"] * (len(names) < len(required))
        sentences.append(f"{UNEARNED}; {listed(names)} did not.")
    sentences.append(f"The weights of the probes share out the {points_text(axis.out_of)} points of this axis.")
    blocks: list[Block] = [_probe_table(assignment, examination, axis, for_staff)]
    blocks += _error_maps(examination, axis, for_staff)
    n_required = sum(case.required for case in axis.cases)
    return axis_section(
        "numerics",
        "Numerics",
        axis,
        sentences,
        blocks,
        measured=f"{passed} of {count(len(axis.cases), 'probe')} right",
        asked="all of them"
        + (f"; the {n_required} required ones before anything counts" if n_required > 1 else "")
        + ("; the required one before anything counts" if n_required == 1 else ""),
    )


def _probe_table(assignment: Assignment, examination: Examination, axis: NumericsGrade, for_staff: bool) -> Table:
    runs = {run.name: run for run in examination.probes if isinstance(run, ProbeMeasured)}
    rows: list[tuple[Cell, ...]] = []
    n_hidden = 0
    for case in axis.cases:
        if case.hidden and not for_staff:
            n_hidden += 1
            rows.append((f"hidden {n_hidden}", "", in_words(case.verdict), "", "", "", ""))
            continue
        asked = assignment.case(case.name)
        rows.append(
            (
                plain(case.name) + (" (hidden)" if case.hidden else ""),
                _tries(asked),
                in_words(case.verdict) + (f": {_why(case)}" if _why(case) else ""),
                _errors(case),
                _limits(case),
                _first_wrong(case, runs.get(case.name)),
                (f"{points_text(case.points)} of {points_text(case.out_of)}", *(["required"] if case.required else [])),
            )
        )
    return Table(
        title="Probes",
        columns=(
            Column("probe"),
            Column("what it tries", Kind.ASIDE),
            VERDICT,
            Column("error", Kind.PARTS),
            Column("limit", Kind.PARTS),
            Column("first wrong element", Kind.LONG),
            Column("weight", Kind.PARTS),
        ),
        rows=tuple(rows),
        marks=tuple(case.verdict.value for case in axis.cases),
    )


def _tries(asked: Case | None) -> str:
    return plain(asked.tries, 200) if asked is not None else ""


def _why(case: CaseGrade) -> str:
    if case.failure is not None:
        return case.failure.kind.value
    return listed([_FAULTS[fault] for fault in case.faults])


def _errors(case: CaseGrade) -> tuple[str, ...]:
    return tuple(f"{output.name} {error_text(output.rel_error)}" for output in case.outputs)


def _limits(case: CaseGrade) -> tuple[str, ...]:
    limits = {f"{output.limit:.1e}" for output in case.outputs}
    if len(limits) <= 1:
        return tuple(limits)
    return tuple(f"{output.name} {output.limit:.1e}" for output in case.outputs)


def _first_wrong(case: CaseGrade, run: ProbeMeasured | None) -> str:
    """The lowest index that is beyond the limit, what is there and what should be."""
    wrong = {output.name for output in case.outputs if output.fault is not None}
    for output in run.outputs if run is not None else ():
        at = output.first_wrong
        if at is not None and output.name in wrong:
            got, want = ("not finite", f"{at.want:.4g}") if at.got is None else apart(at.got, at.want)
            return f"{output.name}{list(at.index)}: {got}, not {want}"
    return ""


def _error_maps(examination: Examination, axis: NumericsGrade, for_staff: bool) -> list[Block]:
    runs = {run.name: run for run in examination.probes if isinstance(run, ProbeMeasured)}
    found: list[Block] = []
    for case in axis.cases:
        if case.verdict is not CaseVerdict.FAIL or (case.hidden and not for_staff) or case.name not in runs:
            continue
        wrong = {output.name for output in case.outputs if output.fault is not None}
        for output in runs[case.name].outputs:
            if output.name in wrong and output.error_map:
                found.append(_error_map(case.name, output))
                break
    return found[:MOST_ERROR_MAPS]


def _error_map(probe: str, output: OutputRun) -> HeatMap:
    return HeatMap(
        title=f"Where {output.name} is wrong in {probe} (mean |error| of blocks)",
        row_label=f"rows, 0 to {output.n_rows - 1}" if output.n_rows else "rows",
        column_label=f"columns, 0 to {output.want_shape[-1] - 1}" if len(output.want_shape) > 1 else "",
        values=output.error_map,
    )


# -- memory -----------------------------------------------------------------------------------------------------------


def _memory(assignment: Assignment, examination: Examination, axis: MemoryGrade) -> Section:
    points = sorted(examination.memory, key=lambda point: point.size)
    measured = [point for point in points if point.failure is None]
    sentences = _memory_sentences(axis, measured)
    blocks: list[Block] = []
    if measured:
        capacity = examination.gpu.memory_bytes if examination.gpu is not None else None
        sentences += _capacity_sentences(measured, capacity)
        blocks = [_memory_chart(assignment, points, axis, capacity), _memory_table(points, axis.failed_at)]
    grows = f"grows like T^{axis.exponent:.2f}" if axis.exponent is not None else ""
    if axis.failed_at is not None:
        grows = listed([one for one in (grows, f"T = {axis.failed_at:,} does not fit") if one])
    return axis_section(
        "memory",
        "Memory",
        axis,
        sentences,
        blocks,
        measured=grows,
        asked=f"at most T^{axis.pass_exponent:g}, and every size fits",
    )


def _memory_sentences(axis: MemoryGrade, measured: Sequence[MemoryPoint]) -> list[str]:
    if axis.verdict is AxisVerdict.NOT_RUN:
        return ["Memory was not measured at every size that it takes, so nothing is earned here."]
    found = []
    if axis.forward_exponent is not None and len(measured) > 1:
        a, b = measured[-2:]
        found.append(
            f"From T = {a.size:,} to {b.size:,} the forward's peak above its inputs went from "
            f"{bytes_text(a.peak_bytes)} to {bytes_text(b.peak_bytes)}: like T^{axis.forward_exponent:.2f}. "
            f"At most T^{axis.pass_exponent:g} passes."
        )
    if axis.backward_exponent is not None:
        found.append(f"With the backward it grows like T^{axis.backward_exponent:.2f}.")
    if measured and measured[-1].naive_bytes:
        last = measured[-1]
        found.append(
            f"At T = {last.size:,} yours needs {bytes_text(last.peak_bytes)}, the naive baseline "
            f"{bytes_text(last.naive_bytes)}, the reference {bytes_text(last.reference_bytes)}."
        )
    if axis.failed_at is not None:
        need = predict([p.size for p in measured], [max(1, p.peak_bytes) for p in measured], axis.failed_at)
        would = f"; it would need about {bytes_text(need)}" if need is not None else ""
        found.append(f"T = {axis.failed_at:,} did not fit into the memory that the reference gets along with{would}.")
    if axis.tile_grows:
        found.append("The largest tile on the chip grows with T, so longer sequences will not fit.")
    return found


def _capacity_sentences(measured: Sequence[MemoryPoint], capacity: int | None) -> list[str]:
    """Where the naive baseline stops fitting, and where this file would, by the growth that was seen."""
    sizes = [point.size for point in measured]
    whole = capacity or SOME_GPU_BYTES
    naive = reach(sizes, [point.naive_bytes for point in measured], whole)
    if naive is None:
        return []
    which = f"this GPU's {bytes_text(whole)}" if capacity else f"a GPU of {bytes_text(whole)}"
    said = f"The naive baseline would fill {which} at about T = {_about(naive)}"
    own = reach(sizes, [max(point.peak_bytes, point.backward_peak_bytes or 0) for point in measured], whole)
    if own is not None:
        said += f", yours at about T = {_about(own)}"
    return [f"{said}, with as many batches and heads as here."]


def _about(size: float) -> str:
    """Two significant digits: it comes from a law, not from a measurement."""
    rounded = float(f"{size:.2g}")
    for whole, word in ((1e9, "billion"), (1e6, "million")):
        if rounded >= whole:
            return f"{rounded / whole:,.3g} {word}"
    return f"{rounded:,.0f}"


def _memory_chart(
    assignment: Assignment, points: Sequence[MemoryPoint], axis: MemoryGrade, capacity: int | None
) -> LineChart:
    measured = [point for point in points if point.failure is None]
    backward = [(p.size, p.backward_peak_bytes) for p in measured if p.backward_peak_bytes is not None]
    own: list[tuple[float, float]] = [(p.size, p.peak_bytes) for p in measured]
    naive: list[tuple[float, float]] = [(p.size, p.naive_bytes) for p in points]
    curves: list[tuple[str, Whose, Sequence[tuple[float, float]], bool]] = [
        (_like("yours", axis.forward_exponent), Whose.OWN, own, True),
        (_like("yours with backward", axis.backward_exponent), Whose.OWN_BACKWARD, backward, True),
        (_like("naive", axis.naive_exponent), Whose.NAIVE, naive, True),
        (
            _like("reference", axis.reference_exponent),
            Whose.REFERENCE,
            [(p.size, p.reference_bytes) for p in points],
            True,
        ),
    ]
    if axis.failed_at is not None:
        need = predict([p.size for p in measured], [max(1, p.peak_bytes) for p in measured], axis.failed_at)
        curves.append(("yours, as it would grow", Whose.OWN, [own[-1], (axis.failed_at, need or 0)], False))
    if capacity is not None:
        full_at = reach([x for x, _ in naive], [y for _, y in naive], capacity)
        if full_at is not None and full_at > naive[-1][0]:
            curves.append(("naive, as it grows", Whose.NAIVE, [naive[-1], (full_at, capacity)], False))
    shown = [
        Series(name=name, whose=whose, points=_positive(places), measured=is_measured)
        for name, whose, places, is_measured in curves
    ]
    return LineChart(
        title="Memory against sequence length",
        x_label=assignment.memory.axis if assignment.memory else "T",
        y_label="peak above the inputs",
        y_unit="bytes",
        series=tuple(series for series in shown if series.points),
        levels=(Level(name="this GPU's memory", value=float(capacity)),) if capacity else (),
    )


def _like(name: str, exponent: float | None) -> str:
    return name if exponent is None else f"{name}, like T^{exponent:.2f}"


def _positive(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    return tuple((float(x), float(y)) for x, y in points if x > 0 and y > 0)


def _memory_table(points: Sequence[MemoryPoint], failed_at: int | None) -> Table:
    backward = any(point.backward_peak_bytes is not None for point in points)
    columns = ["T", "forward", *(["with backward"] if backward else []), "kept", "naive", "reference"]
    rows: list[tuple[Cell, ...]] = []
    for point in points:
        if point.failure is not None:
            why = "did not fit" if point.size == failed_at else one_line(point.failure.kind.value)
            own = [why] + [""] * (1 + backward)
        else:
            own = [bytes_text(point.peak_bytes)]
            own += [bytes_text(point.backward_peak_bytes or 0)] if backward else []
            own.append(bytes_text(point.kept_bytes))
        rows.append((f"{point.size:,}", *own, bytes_text(point.naive_bytes), bytes_text(point.reference_bytes)))
    return Table(
        title="Peak memory above the inputs",
        columns=numbers(*columns),
        rows=tuple(rows),
    )


# -- structure --------------------------------------------------------------------------------------------------------

_CHECKS = {
    "library-attention": "no library kernel",
    "own-kernel": "own Triton kernel",
    "forbidden-op": "computed by a kernel",
    "outputs-traced": "outputs from a kernel of the file",
    "launches": "launches",
    "backward-launches": "launches of the backward",
    "bytes": "unique bytes",
    "torch-ops": "torch operations",
    "stored": "stored by the forward",
    "saved": "kept after the forward",
    "tile": "largest tile on the chip",
}


WHOLE_STEP = (
    "Counted of yours is the forward alone. The least possible and the naive chain are of a whole step, forward and "
    "backward: the limit keeps the forward from moving more than the step needs, and a good forward lies below the "
    "least."
)


def _structure(assignment: Assignment, examination: Examination, grade: Grade, for_staff: bool) -> Section:
    asked = assignment.structure
    limits = (
        f"at most {count(asked.max_launches, 'launch', 'launches')} and {asked.max_bytes_ratio:g} times the least bytes"
    )
    axis, audit = grade.structure, examination.audit
    if audit is None or axis.verdict is AxisVerdict.NOT_RUN:
        said = ["The structure was not examined, so nothing is earned here."]
        blocks: list[Block] = []
        if examination.audit_failure is not None:
            said.append("It is counted while a call runs to its end, and none did.")
            blocks = _failure_blocks(examination.audit_failure)
        return axis_section("structure", "Structure", axis, said, blocks, asked=limits)
    blocks = [_check_table(axis)]
    if audit.launches:
        blocks.append(_launch_table(audit))
    if any(launch.args for launch in audit.launches):
        blocks.append(_argument_table(audit))
    both = any(output.gradient for output in assignment.outputs)
    blocks += [_bytes_bars(audit, "least of a whole step" if both else "least possible"), _launch_bars(audit)]
    blocks += _torch_tables(audit)
    findings = _finding_table(examination, grade, for_staff)
    if findings is not None:
        blocks.append(findings)
    found = count(audit.n_launches, "launch", "launches")
    if both:
        found += " in the forward"
        limits += " of a whole step, forward and backward"
    if axis.bytes_ratio is not None:
        found += f" and {axis.bytes_ratio:.2f} times the least bytes" + (" of a whole step" if both else "")
    failed = [_CHECKS[check.name] for check in (*axis.refusals, *axis.checks) if not check.ok]
    if set(failed) - {"launches", "unique bytes"}:
        found += f"; not as asked: {listed(failed)}"
    said = _structure_sentences(audit, axis)
    if both:
        said.insert(1, WHOLE_STEP)
    return axis_section("structure", "Structure", axis, said, blocks, measured=found, asked=limits)


def _structure_sentences(audit: Audit, axis: StructureGrade) -> list[str]:
    sizes = ", ".join(f"{one_line(name, 20)} = {size:,}" for name, size in audit.axes.items())
    found = [
        f"Counted exactly in the Triton interpreter, at {sizes}: {count(audit.n_launches, 'launch', 'launches')} and "
        f"{bytes_text(audit.unique_bytes)} of unique bytes"
        + (f", {axis.bytes_ratio:.2f} times the least possible." if axis.bytes_ratio is not None else ".")
    ]
    found.append(
        f"The naive chain in eager torch takes {count(audit.eager_launches, 'launch', 'launches')} and "
        f"{bytes_text(audit.eager_bytes)}."
    )
    if audit.unique_bytes and audit.requested_bytes > audit.unique_bytes:
        found.append(
            f"Programs asked for {bytes_text(audit.requested_bytes)} in all; what is asked for more than once "
            f"({audit.requested_bytes / audit.unique_bytes:.1f} times) is served by caches at best."
        )
    if audit.quadratic_bytes is not None:
        found.append(f"Unique bytes hold {audit.quadratic_bytes:.2f} T² beside what grows with T.")
    return found


def _check_table(axis: StructureGrade) -> Table:
    checks = (*axis.refusals, *axis.checks)
    return Table(
        title="Requirements",
        columns=(Column("requirement"), Column("found", Kind.LONG), Column("asked", Kind.LONG), VERDICT),
        rows=tuple(
            (_CHECKS[check.name], one_line(check.found), one_line(check.allowed), "pass" if check.ok else "fail")
            for check in checks
        ),
        marks=tuple("pass" if check.ok else "fail" for check in checks),
    )


def _launch_table(audit: Audit) -> Table:
    return Table(
        title="Launches",
        columns=(
            *words("kernel"),
            LINE,
            *words("grid"),
            *numbers("unique bytes", "requested bytes", "dot FLOPs", "largest tile"),
        ),
        rows=tuple(
            (
                Hostile(launch.kernel, 80),
                "" if launch.line is None else str(launch.line),
                " × ".join(str(size) for size in launch.grid),
                bytes_text(launch.unique_bytes),
                bytes_text(launch.requested_bytes),
                f"{launch.dot_flops:,}",
                count(launch.largest_tile_elements, "element"),
            )
            for launch in audit.launches
        ),
    )


def _argument_table(audit: Audit) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for launch in audit.launches:
        for arg in launch.args:
            times = arg.requested_load_bytes / arg.unique_load_bytes if arg.unique_load_bytes else 0.0
            rows.append(
                (
                    Hostile(launch.kernel, 80),
                    Hostile(arg.name, 60),
                    f"{' × '.join(str(size) for size in arg.shape)} {one_line(arg.dtype, 20)}",
                    bytes_text(arg.unique_load_bytes),
                    f"{times:.1f}" if times else "",
                    bytes_text(arg.unique_store_bytes),
                )
            )
    return Table(
        title="Bytes of each argument",
        columns=words("kernel", "argument", "tensor") + numbers("read once", "times read", "written once"),
        rows=tuple(rows),
    )


def _bytes_bars(audit: Audit, least: str) -> BarChart:
    bars = (
        ("yours, unique", Whose.OWN, audit.unique_bytes),
        ("yours, requested", Whose.OWN_BACKWARD, audit.requested_bytes),
        ("naive in eager torch", Whose.NAIVE, audit.eager_bytes),
    )
    return BarChart(
        title="Bytes through global memory",
        unit="bytes",
        bars=tuple(Bar(name=name, whose=whose, value=float(size)) for name, whose, size in bars),
        levels=(Level(name=least, value=float(audit.least_bytes)),),
    )


def _launch_bars(audit: Audit) -> BarChart:
    bars = [Bar(name="yours", whose=Whose.OWN, value=float(audit.n_launches))]
    if audit.backward_launches:
        bars.append(Bar(name="yours, backward", whose=Whose.OWN_BACKWARD, value=float(audit.backward_launches)))
    bars.append(Bar(name="naive in eager torch", whose=Whose.NAIVE, value=float(audit.eager_launches)))
    return BarChart(title="Launches", unit="launches", bars=tuple(bars))


def _torch_tables(audit: Audit) -> list[Block]:
    found: list[Block] = []
    ops = [*((op, "library") for op in audit.library_calls), *((op, "torch") for op in audit.torch_ops)]
    if ops:
        found.append(
            Table(
                title="Operations beside the kernels",
                columns=(*words("operation", "kind"), *numbers("calls", "bytes"), LINE),
                rows=tuple(
                    (Hostile(op.op, 80), kind, str(op.count), bytes_text(op.size_bytes), _line(op.line))
                    for op, kind in ops
                ),
            )
        )
    if audit.saved:
        found.append(
            Table(
                title="Kept after the forward, beside inputs and outputs",
                columns=(*words("shape", "dtype"), *numbers("bytes"), LINE),
                rows=tuple(
                    (
                        " × ".join(str(size) for size in storage.shape),
                        one_line(storage.dtype, 20),
                        bytes_text(storage.size_bytes),
                        _line(storage.line),
                    )
                    for storage in audit.saved
                ),
            )
        )
    return found


def _finding_table(examination: Examination, grade: Grade, for_staff: bool) -> Table | None:
    hidden = {case.name for case in grade.numerics.cases if case.hidden}
    found = list(examination.audit.findings) if examination.audit else []
    for run in examination.probes:
        if isinstance(run, ProbeMeasured) and (for_staff or run.name not in hidden):
            found += run.findings
    if not for_staff:
        # where a tensor's memory comes from is for staff to judge; that of an incoming gradient is ours
        found = [one for one in found if one.probe not in hidden and one.kind != "foreign-memory"]
    if not found:
        return None
    return Table(
        title="What the audit saw",
        columns=(*words("kind", "what"), LINE, *words("probe")),
        rows=tuple(
            (
                one_line(finding.kind, 60),
                Hostile(finding.message, 300),
                _line(finding.line),
                one_line(finding.probe or "audit", 60),
            )
            for finding in found[:MOST_FINDINGS]
        ),
    )


def _line(line: int | None) -> str:
    return "" if line is None else str(line)


# -- compilation ------------------------------------------------------------------------------------------------------


def _compiled(examination: Examination) -> Section | None:
    found = examination.compile_report
    if found is None:
        return None
    said = [f"Compiled for {one_line(found.target, 20)} without a GPU, at the sizes that speed is measured at."]
    if not found.finished:
        why = f": {one_line(found.unfinished, 200)}" if found.unfinished else ""
        said.append(f"Not everything could be compiled{why}. It changes no points.")
    if found.kernels:
        limit = bytes_text(found.shared_limit_bytes)
        said.append(f"A block of threads may use {limit} of shared memory there; what asks for more does not start.")
    if any(kernel.spill_bytes for kernel in found.kernels):
        said.append("Spilled registers go through memory: smaller tiles or more warps may help.")
    blocks: list[Block] = [
        Table(
            title="Kernels",
            columns=(
                *words("kernel"),
                LINE,
                *words("shapes"),
                *numbers("registers", "spilled", "shared memory", "CTAs per SM"),
                *words("matrix unit"),
            ),
            rows=tuple(
                (
                    Hostile(kernel.kernel, 80),
                    _line(kernel.line),
                    one_line(kernel.shapes, 120),
                    str(kernel.registers),
                    bytes_text(kernel.spill_bytes),
                    bytes_text(kernel.shared_bytes),
                    str(kernel.ctas_per_sm),
                    one_line(kernel.matrix_unit, 20),
                )
                for kernel in found.kernels
            ),
        )
    ]
    for failure in found.failures[:3]:
        blocks += _failure_blocks(failure)
    return Section(key="compile", title="Compiled for the GPU", sentences=tuple(said), blocks=tuple(blocks))


# -- prints, provenance, staff ----------------------------------------------------------------------------------------


def _printed(grade: Grade, examination: Examination, for_staff: bool) -> list[Section]:
    if not (examination.stdout or examination.stderr or examination.output_bytes):
        return []
    said = [f"The file printed {bytes_text(examination.output_bytes)}."] if examination.output_bytes else []
    ran_hidden = any(case.hidden and case.verdict is not CaseVerdict.NOT_RUN for case in grade.numerics.cases)
    blocks: list[Block] = []
    if ran_hidden and not for_staff:
        said.append("Prints are shown to staff only, because hidden probes ran; the command below shows them to you.")
    else:
        streams = (("Printed", examination.stdout), ("Printed to stderr", examination.stderr))
        blocks = [TextBlock(title=title, text=Hostile(text)) for title, text in streams if text.strip()]
    return [Section(key="output", title="What the file printed", sentences=tuple(said), blocks=tuple(blocks))]


_ISOLATION = {
    "full": "The file ran in a sandbox with every protection on.",
    "reduced": "The file ran in a sandbox with fewer protections than a grading host has (reduced isolation).",
    "none": "The file ran without a sandbox, with the rights of the user who started it.",
}


def _provenance(assignment: Assignment, examination: Examination) -> Section:
    device, isolation = examination.device, examination.isolation
    level = _ISOLATION.get(isolation.level, f"Isolation: {one_line(isolation.level, 40)}.")
    said = [level, *(plain(note, 300) for note in isolation.notes)]
    if examination.assignment_digest != assignment.digest:
        said.append("The assignment has changed since this was measured; the grade is by its present thresholds.")
    flag = " --device cuda" if device.kind == "cuda" else ""
    command = Command(
        title="Run this on your own machine",
        text=f"tilegrade grade YOUR_FILE.py --assignment {assignment.slug}{flag}",
    )
    rows: list[tuple[Cell, ...]] = [
        ("device", f"{one_line(device.name, 80)} ({device.kind}{f', {device.arch}' if device.arch else ''})"),
        *(_gpu_rows(examination.gpu) if examination.gpu is not None else ()),
        ("entry point", Hostile(examination.entry or "none found", 120)),
        ("file, SHA-256", examination.source_sha256),
        ("assignment, SHA-256", examination.assignment_digest),
        ("seed, SHA-256", seed_commitment(examination.seed)),
        *((one_line(name, 40), one_line(version, 80)) for name, version in sorted(examination.versions.items())),
    ]
    facts = Table(title="Measured with", columns=words("what", "value"), rows=tuple(rows))
    seconds: dict[str, float] = {}
    for stage in examination.stages:  # one that was gone through in parts is there more than once
        seconds[stage.name] = seconds.get(stage.name, 0.0) + stage.seconds
    stages = Table(
        title="Stages",
        columns=words("stage") + numbers("seconds"),
        rows=tuple((one_line(name, 60), f"{spent:.2f}") for name, spent in seconds.items()),
    )
    blocks: tuple[Block, ...] = (command, facts, stages) if examination.stages else (command, facts)
    return Section(key="provenance", title="Where this comes from", sentences=tuple(said), blocks=blocks)


def _gpu_rows(gpu: GpuFacts) -> list[tuple[Cell, ...]]:
    rows: list[tuple[Cell, ...]] = [("GPU memory", bytes_text(gpu.memory_bytes))]
    if gpu.ceilings is not None:
        rates = [f"{one_line(name, 20)} {rate_text(rate, 'FLOP/s')}" for name, rate in gpu.ceilings.flops_per_s.items()]
        copied = f"copies at {rate_text(gpu.ceilings.copy_bytes_per_s, 'B/s')}"
        rows.append(("measured ceilings", "; ".join([copied, f"matrix products: {', '.join(rates)}"])))
    for name, state in (("GPU before", gpu.before), ("GPU after", gpu.after)):
        if state is not None:
            rows.append((name, _state_text(state)))
    return rows


# of NVML; 1 is an idle GPU, 2 clocks that the operator set
_THROTTLING = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "synchronised boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
    0x100: "display clocks",
}


def _state_text(state: GpuState) -> str:
    reasons = [name for bit, name in _THROTTLING.items() if state.throttle_reasons & bit]
    slowed = f", slowed by {listed(reasons)}" if reasons else ", not slowed"
    return (
        f"{state.sm_clock_mhz:,} MHz, memory {state.memory_clock_mhz:,} MHz, {state.temperature_c} °C, "
        f"{state.power_w:.0f} W{slowed}"
    )


_REPLAYED = {
    ReplayOutcome.AGREES: "give right outputs on fresh inputs, in the time that was graded",
    ReplayOutcome.DIFFERS: "do not give the outputs that the file gives",
    ReplayOutcome.SLOWER: "give right outputs, and take longer than the time that was graded",
    ReplayOutcome.NOT_REPLAYABLE: "could not be run alone, from which nothing follows",
}


def _replayed(found: Replay) -> str:
    """What came of the compiled kernels without the file's Python."""
    ops = f" and torch's {listed([one_line(op, 40) for op in found.torch_ops])}" if found.torch_ops else ""
    timed = found.time_ms is not None and found.ratio is not None
    time = f" ({found.time_ms:.4f} ms a call, {found.ratio:.2f} times as fast as naive)" if timed else ""
    why = f": {one_line(found.detail, 300)}" if found.detail else ""
    launches = count(found.n_launches, "launch", "launches")
    return f"Replay: {launches} of one call{ops}, without the file's Python, {_REPLAYED[found.outcome]}{time}{why}."


def _staff(examination: Examination, grade: Grade) -> Section:
    said = [f"Seed {examination.seed} makes every probe's inputs again."]
    if grade.diagnosis.runner_up:
        said.append(f"The next best name for the fault: {plain(grade.diagnosis.runner_up, 80)}.")
    blocks: list[Block] = []
    if examination.evidence:
        said.append(
            f"Held: {count(len(examination.evidence), 'sign')} that measurements may have been interfered with. "
            f"Released, the verdict is {grade.released_verdict.value}."
        )
        blocks.append(
            Table(
                title="Evidence",
                columns=words("kind", "what"),
                rows=tuple((one_line(sign.kind, 60), Hostile(sign.message, 400)) for sign in examination.evidence),
            )
        )
    if examination.replay is not None:
        said.append(_replayed(examination.replay))
    blocks += _resembled(examination, grade)
    return Section(key="staff", title="For staff", sentences=tuple(said), blocks=tuple(blocks), staff=True)


def _resembled(examination: Examination, grade: Grade) -> list[Block]:
    """Which known mistakes the wrong outputs are like, and how near, in words."""
    found = diagnosis.resemblances(examination, grade.numerics)[:MOST_RESEMBLANCES]
    if not found:
        return []
    rows = []
    for one in found:
        probes = count(one.compared, "wrong probe")
        near = [f"the same outputs in {one.same} of {probes}"] if one.same else []
        if one.nearer:
            near.append(f"nearer than the right answer in {one.nearer}" + ("" if one.same else f" of {probes}"))
        tile = f", with a tile of {one.tile}" if one.tile is not None else ""
        rows.append((plain(one.label, 80) + tile, "; ".join(near)))
    return [Table(title="Known mistakes that it resembles", columns=words("mistake", "how near"), rows=tuple(rows))]
