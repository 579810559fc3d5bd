"""The section of a report about speed: times and thresholds, and where they lie under the GPU's ceilings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from grader.assignment import Assignment
from grader.figures import Bar, BarChart, Level, LineChart, Series, Whose, place
from grader.judging import headline_timing, speed_steps
from grader.measurement import Ceilings, Examination, Timing
from grader.roofline import Roofline, roofline
from grader.sections import Block, Cell, Section, Table, axis_section, numbers, words
from grader.verdicts import AxisVerdict, SpeedGrade
from grader.wording import one_line, points_text, rate_text


def speed_section(assignment: Assignment, examination: Examination, axis: SpeedGrade, *, within_reach: bool) -> Section:
    asked = _asked_speed(assignment, examination)
    if axis.verdict is AxisVerdict.NOT_MEASURED:
        said = ["Speed is not measured in the interpreter; it is never guessed from anything else."]
        if within_reach:
            said.append(f"{points_text(axis.withheld)} points wait for a GPU.")
        return axis_section("speed", "Speed", axis, said, (), asked=asked)
    if axis.verdict is AxisVerdict.NOT_RUN:
        said = ["Speed is reported only for files whose required probes pass."]
        if examination.large_calls:
            said = ["Speed is reported only for files that are right at the sizes that are timed."]
        elif examination.too_slow is not None:
            said = [f"Your file took too long while it was measured: {one_line(examination.too_slow.message, 200)}."]
        return axis_section("speed", "Speed", axis, said, (), asked=asked)
    said = [
        f"{axis.speedup:.2f} times as fast as the naive baseline "
        f"(95 % of resampled windows between {axis.low:.2f} and {axis.high:.2f})."
    ]
    if axis.noisy:
        said.append("The measurement is noisy: the interval is wider than asked, after a second try.")
    blocks: list[Block] = [*_speed_bars(assignment, examination), _times_table(examination.timings)]
    placed = _placed(examination)
    if placed:
        said += _roofline_sentences(placed)
        blocks += _roofline_blocks(placed, examination)
    return axis_section("speed", "Speed", axis, said, blocks, measured=f"{axis.speedup:.2f} times naive", asked=asked)


def _asked_speed(assignment: Assignment, examination: Examination) -> str:
    if assignment.speed is None:
        return ""
    last = speed_steps(assignment.speed, examination.device.name)[-1]
    return f"{last.speedup:g} times naive for {'all' if last.fraction >= 1 else f'{last.fraction:.0%} of the'} points"


def _size_text(timing: Timing) -> str:
    """The axes, those of one size together: "batch = 16, queries = keys = 8,192"."""
    names: dict[int, list[str]] = {}
    for name, size in timing.axes.items():
        names.setdefault(size, []).append(one_line(name, 20))
    return ", ".join(f"{' = '.join(same)} = {size:,}" for size, same in names.items())


def _speed_bars(assignment: Assignment, examination: Examination) -> list[BarChart]:
    """A chart a size; the size that is judged also shows what its speed-up is held against."""
    judged = headline_timing(assignment, examination)
    found = []
    for timing in examination.timings:
        levels: tuple[Level, ...] = ()
        if timing is judged and assignment.speed is not None:
            steps = speed_steps(assignment.speed, examination.device.name)
            levels = tuple(Level(name=f"{s.fraction:.0%} of the points", value=s.speedup) for s in steps if s.fraction)
        own = Bar(name="yours", whose=Whose.OWN, value=timing.ratio, low=timing.ratio_low, high=timing.ratio_high)
        bars = [own, Bar(name="naive", whose=Whose.NAIVE, value=1.0)]
        if timing.reference_times_ms and timing.naive_times_ms:
            ratio = median(timing.naive_times_ms) / median(timing.reference_times_ms)
            bars.append(Bar(name="reference", whose=Whose.REFERENCE, value=ratio))
        title = f"Speed-up over naive at {_size_text(timing)}"
        found.append(BarChart(title=title, unit="times", bars=tuple(bars), levels=levels))
    return found


def _times_table(timings: Sequence[Timing]) -> Table:
    events = any(timing.student_events_ms for timing in timings)
    rows: list[tuple[Cell, ...]] = [
        (
            _size_text(timing),
            _ms(timing.student_times_ms),
            *([_ms(timing.student_events_ms)] if events else []),
            _ms(timing.naive_times_ms),
            _ms(timing.reference_times_ms),
            f"{timing.ratio:.2f}×",
            f"{timing.ratio_low:.2f} to {timing.ratio_high:.2f}",
        )
        for timing in timings
    ]
    events_column = ("your CUDA events",) if events else ()
    measured = numbers("yours, median", *events_column, "naive", "reference", "speed-up", "95 % interval")
    return Table(title="Times", columns=words("size") + measured, rows=tuple(rows))


def _ms(times_ms: Sequence[float]) -> str:
    return f"{median(times_ms):.3f} ms" if times_ms else ""


# -- roofline ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Placed:
    """One measured time under the GPU's ceilings."""

    timing: Timing
    name: str
    whose: Whose
    roof: Roofline


def _placed(examination: Examination) -> list[_Placed]:
    """Yours, the reference and naive at every size whose work was counted, where the ceilings are known."""
    ceilings = examination.gpu.ceilings if examination.gpu is not None else None
    if ceilings is None:
        return []
    found = []
    for timing in examination.timings:
        times = (
            ("yours", Whose.OWN, timing.student_times_ms, timing.least_bytes),
            ("reference", Whose.REFERENCE, timing.reference_times_ms, timing.least_bytes),
            # it has no choice but to move the scores, so that is the work it is held to
            ("naive", Whose.NAIVE, timing.naive_times_ms, timing.eager_bytes),
        )
        for name, whose, times_ms, traffic in times:
            if times_ms and traffic and timing.flops and timing.dtype in ceilings.flops_per_s:
                roof = roofline(
                    time_ms=median(times_ms),
                    flops=timing.flops,
                    traffic_bytes=traffic,
                    dtype=timing.dtype,
                    ceilings=ceilings,
                )
                found.append(_Placed(timing=timing, name=name, whose=whose, roof=roof))
    return found


def _roofline_sentences(placed: Sequence[_Placed]) -> list[str]:
    own = next(one for one in placed if one.whose is Whose.OWN)
    roof = own.roof
    bound = "arithmetic" if roof.bound == "compute" else "memory traffic"
    flops, traffic = rate_text(roof.flops_per_s, "FLOP/s"), rate_text(roof.bytes_per_s, "B/s")
    return [
        f"At {_size_text(own.timing)} you reach {flops} and, counting every byte once, {traffic}. The work is "
        f"{place(roof.intensity)} FLOP a byte; on this GPU arithmetic is the limit from {place(roof.ridge)} on. So it "
        f"is bound by {bound}, and you reach {roof.fraction:.0%} of that ceiling.",
        "Yours and the reference are held to the least traffic there can be, naive to what its chain of kernels moves.",
    ]


def _roofline_blocks(placed: Sequence[_Placed], examination: Examination) -> list[Block]:
    assert examination.gpu is not None
    assert examination.gpu.ceilings is not None
    charts = [
        _roofline_chart(dtype, [one for one in placed if one.timing.dtype == dtype], examination.gpu.ceilings)
        for dtype in dict.fromkeys(one.timing.dtype for one in placed)
    ]
    table = Table(
        title="Under the GPU's ceilings",
        columns=(
            *words("whose", "size"),
            *numbers("arithmetic", "traffic", "FLOP a byte"),
            *words("bound by"),
            *numbers("of the ceiling"),
        ),
        rows=tuple(
            (
                one.name,
                _size_text(one.timing),
                rate_text(one.roof.flops_per_s, "FLOP/s"),
                rate_text(one.roof.bytes_per_s, "B/s"),
                place(one.roof.intensity),
                one.roof.bound,
                f"{one.roof.fraction:.0%}",
            )
            for one in placed
        ),
    )
    return [*charts, table]


def _roofline_chart(dtype: str, placed: Sequence[_Placed], ceilings: Ceilings) -> LineChart:
    peak, copy = ceilings.flops_per_s[dtype], ceilings.copy_bytes_per_s
    ridge = peak / copy
    least = min(ridge, *(one.roof.intensity for one in placed)) / 2
    most = max(ridge, *(one.roof.intensity for one in placed)) * 2
    roof = ((least, least * copy), (ridge, peak), (most, peak))
    series = [
        Series(
            name=name,
            whose=whose,
            points=tuple((p.roof.intensity, p.roof.flops_per_s) for p in placed if p.whose is whose),
            joined=False,
        )
        for name, whose in dict.fromkeys((one.name, one.whose) for one in placed)
    ]
    series.append(Series(name="ceiling", whose=Whose.LIMIT, points=roof))
    return LineChart(
        title=f"Roofline, {one_line(dtype, 20)}",
        x_label="FLOP a byte",
        y_label="FLOP/s reached",
        y_unit="FLOP/s",
        series=tuple(series),
    )
