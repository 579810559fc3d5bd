import dataclasses
import hashlib
import io

import pytest
from judging_facts import (
    SEED,
    assignment_of,
    audit_of,
    case,
    examination_of,
    failed,
    memory_points,
    mistake,
    right,
    timing,
    with_probe,
    wrong,
)
from rich.console import Console

from grader.judging import judge
from grader.measurement import (
    CompiledKernel,
    CompileReport,
    Device,
    Evidence,
    Failure,
    FailureKind,
    Finding,
    Isolation,
    KernelArgument,
    Launch,
    Stage,
    Storage,
    TorchOp,
)
from grader.report import BarChart, HeatMap, Hostile, LineChart, Series, Table, TextBlock, report
from grader.terminal import bar_plot, heat_plot, line_plot, print_report

ASSIGNMENT = assignment_of()
EVIL = "\x1b[2J\x1b]0;owned\x07[bold red]<script>alert(1)</script>\u202e{{ 7 * 7 }}\0"


def report_of(assignment=ASSIGNMENT, *runs, for_staff=False, **changes):
    examination = with_probe(examination_of(assignment, **changes), *runs)
    return report(assignment, examination, judge(assignment, examination), for_staff=for_staff)


def printed(found, width=100):
    stream = io.StringIO()
    print_report(found, Console(file=stream, width=width, force_terminal=False, color_system=None))
    return stream.getvalue()


def texts_of(found):
    """Every `str` in a report that claims to be printable."""
    yield from (found.title, found.headline, found.fault)
    for section in found.sections:
        yield section.title
        yield from section.sentences
        for block in section.blocks:
            yield block.title
            if isinstance(block, Table):
                yield from block.columns
                yield from (cell for row in block.rows for cell in row if isinstance(cell, str))
            if isinstance(block, LineChart):
                yield from (series.name for series in block.series)
            if isinstance(block, BarChart):
                yield from (name for name, _ in block.bars)


def block_of(found, key, kind, title=""):
    section = found.section(key)
    return next(block for block in section.blocks if isinstance(block, kind) and block.title.startswith(title))


# -- what it says ------------------------------------------------------------------------------------------------------


def test_a_right_file_reads_what_was_asked_and_what_is_withheld():
    found = report_of()
    assert found.headline == (
        "Everything that was asked is there. 70 of 70 points. 30 more wait for a device that can measure them. "
        "Provisional: measured on the Triton interpreter on a CPU."
    )
    assert [(section.key, section.verdict, section.points) for section in found.sections if section.verdict] == [
        ("numerics", "pass", "40 of 40"),
        ("memory", "pass", "20 of 20"),
        ("structure", "pass", "10 of 10"),
        ("speed", "not_measured", "30 withheld"),
    ]


def test_memory_is_told_with_sizes_units_and_the_limit():
    found = report_of(memory=memory_points(2.0))
    assert found.section("memory").sentences[0] == (
        "From T = 192 to 384 the forward's peak above its inputs went from 35.2 MiB to 141 MiB: like T^2.00. "
        "At most T^1.3 passes."
    )
    chart = block_of(found, "memory", LineChart)
    assert [series.name for series in chart.series] == ["yours", "naive", "reference"]
    assert chart.series[1] == Series(name="naive", points=((96.0, 73728.0), (192.0, 294912.0), (384.0, 1179648.0)))


def test_a_size_that_did_not_fit_says_what_it_would_need():
    points = memory_points(2.0)
    last = dataclasses.replace(points[-1], failure=Failure(kind=FailureKind.MEMORY_LIMIT, message="m"))
    assert "it would need about 141 MiB" in " ".join(report_of(memory=(*points[:-1], last)).section("memory").sentences)


def test_a_failing_probe_shows_error_limit_and_map():
    found = report_of(ASSIGNMENT, wrong("tail", ASSIGNMENT))
    row = next(row for row in block_of(found, "numerics", Table).rows if row[0] == "tail")
    assert row[1:] == ("what tail tries", "fail: wrong values", "o 4.0e-01, lse 3.0e-07", "2.2e-05", "0 of 1")
    assert block_of(found, "numerics", HeatMap).values == ((0.25, None), (0.0, 1e-3))


def test_the_diagnosis_comes_with_hint_step_and_evidence():
    bad = ["tail", "key-tail"]
    bank = (mistake("tail-unmasked", bad, [one.name for one in ASSIGNMENT.cases]),)
    found = report_of(ASSIGNMENT, *(wrong(name, ASSIGNMENT) for name in bad), mistakes=bank)
    said = found.section("diagnosis").sentences
    assert found.fault == "tail-unmasked"
    assert said[1:3] == ("Hint: look at tail-unmasked", "The step to look at: the step of tail-unmasked")


def test_bytes_and_launches_are_drawn_beside_the_naive_chain():
    found = report_of()
    assert block_of(found, "structure", BarChart, "Bytes").bars == (
        ("least possible", 98_000.0),
        ("yours, unique", 100_000.0),
        ("yours, requested", 400_000.0),
        ("naive in eager torch", 900_000.0),
    )
    assert block_of(found, "structure", BarChart, "Launches").bars == (("yours", 1.0), ("naive in eager torch", 5.0))


def test_speed_is_told_with_its_interval():
    found = report_of(device=Device(kind="cuda", name="NVIDIA H200", arch="sm_90"), timings=(timing(6.0, noisy=True),))
    said = found.section("speed").sentences
    assert said[0] == ("6.00 times as fast as the naive baseline (95 % of resampled windows between 5.94 and 6.06).")
    assert "noisy" in said[1]
    assert not found.provisional


def test_times_are_medians():
    measured = timing(2.0, student_times_ms=(3.0, 1.0, 2.0, 10.0))
    found = report_of(device=Device(kind="cuda", name="NVIDIA H200", arch="sm_90"), timings=(measured,))
    assert block_of(found, "speed", Table, "Times").rows[0][1] == "2.500 ms"


def test_a_held_grade_is_told_in_neutral_words():
    found = report_of(evidence=(Evidence(kind="clock", message="time.perf_counter was replaced"),))
    assert found.headline.startswith("A person looks at this grade before it counts.")
    assert "perf_counter" not in printed(found)
    staff = report_of(evidence=(Evidence(kind="clock", message="time.perf_counter was replaced"),), for_staff=True)
    assert "perf_counter" in printed(staff)
    assert "Released, the verdict is full." in " ".join(staff.section("staff").sentences)


@pytest.mark.parametrize(
    ("level", "said"),
    [("full", "every protection"), ("reduced", "reduced isolation"), ("none", "without a sandbox")],
)
def test_provenance_says_how_well_the_file_was_locked_in(level, said):
    found = report_of(isolation=Isolation(level=level, notes=("no cgroup",)))
    sentences = found.section("provenance").sentences
    assert said in sentences[0]
    assert "no cgroup" in sentences


def test_provenance_commits_to_the_seed_and_gives_the_command():
    found = report_of(stages=(Stage(name="numerics", seconds=1.25),))
    table = block_of(found, "provenance", Table)
    assert ("seed, SHA-256", hashlib.sha256(str(SEED).encode()).hexdigest()) in table.rows
    assert ("triton", "3.6.0") in table.rows
    assert str(SEED) not in printed(found)
    assert "tilegrade grade FILE --assignment flash-attention-forward" in found.section("provenance").sentences[-1]
    assert str(SEED) in printed(report_of(for_staff=True))


def test_an_assignment_that_changed_since_is_told():
    assert any("has changed" in line for line in report_of(assignment_digest="e" * 64).section("provenance").sentences)


# -- what students do not see ------------------------------------------------------------------------------------------

HIDDEN = assignment_of(cases=(case("random"), case("secret", hidden=True, tries="a secret thing")))


@pytest.mark.parametrize(
    ("run", "verdict"),
    [
        pytest.param(wrong("secret", HIDDEN, error=0.123), "fail", id="wrong"),
        pytest.param(failed("secret", FailureKind.RAISES, "secret words"), "error", id="raises"),
        pytest.param(
            dataclasses.replace(
                right("secret", HIDDEN), findings=(Finding(kind="secret-kind", message="secret words", probe="secret"),)
            ),
            "pass",
            id="finding",
        ),
    ],
)
def test_a_hidden_probe_is_one_line_with_its_verdict(run, verdict):
    found = report_of(HIDDEN, run, stdout="printed in secret", output_bytes=17)
    shown = printed(found)
    assert "secret" not in shown
    assert "0.123" not in shown
    assert block_of(found, "numerics", Table).rows[1] == ("hidden 1", "", verdict, "", "", "")
    staff = printed(report_of(HIDDEN, run, stdout="printed in secret", output_bytes=17, for_staff=True))
    assert "secret (hidden)" in staff
    assert "printed in secret" in staff


def test_prints_are_shown_where_no_hidden_probe_ran():
    found = report_of(stdout="hello", output_bytes=5)
    assert block_of(found, "output", TextBlock).text.plain == "hello"
    failure = Failure(kind=FailureKind.IMPORT_ERROR, message="No module named 'x'")
    found = report_of(HIDDEN, load_failure=failure, probes=(), audit=None, stdout="hello", output_bytes=5)
    assert block_of(found, "output", TextBlock).text.plain == "hello"


# -- strangers' text ---------------------------------------------------------------------------------------------------


def hostile_report():
    launch = Launch(
        kernel=EVIL,
        line=3,
        grid=(1,),
        requested_bytes=1,
        unique_bytes=1,
        dot_flops=0,
        largest_tile_elements=1,
        args=(
            KernelArgument(
                name=EVIL,
                shape=(2,),
                dtype=EVIL,
                requested_load_bytes=8,
                unique_load_bytes=4,
                requested_store_bytes=0,
                unique_store_bytes=0,
            ),
        ),
    )
    op = TorchOp(op=EVIL, count=1, size_bytes=8, line=4)
    audit = audit_of(
        ASSIGNMENT,
        n_launches=2,
        launches=(launch, launch),
        torch_ops=(op,),
        library_calls=(op,),
        findings=(Finding(kind=EVIL, message=EVIL),),
        saved=(Storage(shape=(1, 192, 192), dtype=EVIL, size_bytes=4),),
    )
    kernel = CompiledKernel(
        kernel=EVIL, registers=1, spill_bytes=4, shared_bytes=0, ctas_per_sm=1, matrix_unit=EVIL, shapes=EVIL
    )
    failure = Failure(kind=FailureKind.RAISES, message=EVIL * 100, traceback=EVIL * 1000, line=3, stage="random")
    return report_of(
        ASSIGNMENT,
        dataclasses.replace(failed("random", FailureKind.RAISES), failure=failure),
        audit=audit,
        compile_report=CompileReport(target="sm_90", kernels=(kernel,), failures=(failure,)),
        entry=EVIL,
        stdout=EVIL * 1000,
        stderr=EVIL,
        output_bytes=10**6,
        evidence=(Evidence(kind=EVIL, message=EVIL),),
        for_staff=True,
    )


def test_strangers_text_cannot_drive_a_terminal():
    found = hostile_report()
    for text in [*texts_of(found), printed(found)]:
        assert not set(text) & {"\x1b", "\x07", "\0", "\u202e"}
    shown = printed(found, width=400)
    assert "[bold red]<script>" in shown, "markup is shown as it was written"
    assert len(shown) < 10**6


def test_strangers_text_stands_in_hostile_cells():
    found = hostile_report()
    assert all(isinstance(row[0], Hostile) for row in block_of(found, "structure", Table, "Launches").rows)
    assert block_of(found, "diagnosis", TextBlock, "Where").text.text.startswith("\x1b")


# -- a terminal --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slug", ["flash-attention-forward", "flash-attention", "online-softmax"])
@pytest.mark.parametrize("width", [60, 100, 200])
def test_a_report_prints_at_any_width(slug, width):
    assignment = assignment_of(slug)
    shown = printed(report_of(assignment, wrong("random", assignment), for_staff=True), width)
    assert max(len(line) for line in shown.splitlines()) <= width
    assert "Where this comes from" in shown


@pytest.mark.parametrize("slug", ["flash-attention-forward", "fused-bias-dropout-layernorm"])
@pytest.mark.parametrize("width", [80, 100])
def test_the_probe_table_breaks_no_name_and_loses_no_points(slug, width):
    assignment = assignment_of(slug)
    shown = printed(report_of(assignment, wrong("random", assignment), for_staff=True), width)
    table = shown[shown.index("\nProbes") :]
    for probe in assignment.cases:
        row = next(line for line in table.splitlines() if line.startswith(f" {probe.name} "))
        assert f"of {probe.points:g}" in row
    assert ("what it tries" in table) is (width == 100)


def test_a_power_law_is_a_straight_line():
    chart = LineChart(
        title="",
        x_label="T",
        y_label="",
        y_unit="bytes",
        series=(
            Series(name="yours", points=((64, 1024), (128, 2048), (256, 4096))),
            Series(name="naive", points=((64, 4096), (128, 16384), (256, 65536))),
        ),
    )
    lines = line_plot(chart)
    yours = [(x, y) for y, line in enumerate(lines[:12]) for x, char in enumerate(line) if char == "●"]
    (x1, y1), (x2, y2), (x3, y3) = sorted(yours)
    assert abs((x2 - x1) - (x3 - x2)) <= 1
    assert abs((y1 - y2) - (y2 - y3)) <= 1
    assert lines[0].startswith("64.0 KiB")
    assert lines[11].startswith("1.00 KiB")
    assert "● yours  ○ naive" in lines[-1]


@pytest.mark.parametrize("series", [(), (Series(name="yours", points=((64, 0),)),)], ids=["none", "zero"])
def test_an_empty_chart_says_so(series):
    chart = LineChart(title="", x_label="", y_label="", y_unit="ms", series=series)
    assert line_plot(chart) == ["nothing was measured"]


def test_bars_are_as_long_as_their_numbers():
    lines = bar_plot(BarChart(title="", unit="launches", bars=(("a", 3.0), ("bb", 1.0), ("c", 0.0))))
    assert [line.count("█") for line in lines] == [32, 11, 0]
    assert lines[0].endswith(" 3")


def test_a_map_is_darkest_where_it_is_worst():
    lines = heat_plot(HeatMap(title="", row_label="rows", column_label="columns", values=((1.0, 0.05), (0.0, None))))
    assert lines[:2] == ["██▓▓", "··!!"]
