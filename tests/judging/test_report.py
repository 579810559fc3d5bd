import dataclasses
import hashlib
import io
import re

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

from grader.figures import Bar, BarChart, HeatMap, Level, LineChart, Series, Whose
from grader.judging import judge, not_counted
from grader.measurement import (
    Ceilings,
    CompiledKernel,
    CompileReport,
    Device,
    Evidence,
    Failure,
    FailureKind,
    Finding,
    GpuFacts,
    GpuState,
    Isolation,
    KernelArgument,
    Launch,
    Stage,
    Storage,
    TorchOp,
)
from grader.report import report
from grader.sections import Command, Kind, Table, TextBlock
from grader.terminal import LONGEST_WORD, bar_plot, heat_plot, line_plot, print_report
from grader.wording import Hostile, points_text

ASSIGNMENT = assignment_of()
EVIL = "\x1b[2J\x1b]0;owned\x07[bold red]<script>alert(1)</script>\u202e{{ 7 * 7 }}\0"


def report_of(assignment=ASSIGNMENT, *runs, for_staff=False, **changes):
    examination = with_probe(examination_of(assignment, **changes), *runs)
    return report(assignment, examination, judge(assignment, examination), for_staff=for_staff)


def printed(found, width=100, *, whole=True):
    stream = io.StringIO()
    console = Console(file=stream, width=width, force_terminal=False, color_system=None)
    print_report(found, console, whole=whole)
    return stream.getvalue()


def texts_of(found):
    """Every `str` in a report that claims to be printable."""
    yield from (found.title, found.headline, found.fault, *found.remarks)
    for section in found.sections:
        yield from (section.title, section.measured, section.asked)
        yield from section.sentences
        for block in section.blocks:
            yield block.title
            if isinstance(block, Table):
                yield from names_of(block)
                yield from (part for row in block.rows for cell in row for part in parts_of(cell))
            if isinstance(block, LineChart):
                yield from (series.name for series in block.series)
            if isinstance(block, BarChart):
                yield from (bar.name for bar in block.bars)
            if isinstance(block, Command):
                yield block.text


def names_of(table):
    return [column.name for column in table.columns]


def parts_of(cell):
    """The texts of a cell that are ours."""
    return () if isinstance(cell, Hostile) else (cell,) if isinstance(cell, str) else cell


def block_of(found, key, kind, title=""):
    section = found.section(key)
    return next(block for block in section.blocks if isinstance(block, kind) and block.title.startswith(title))


# -- what it says ------------------------------------------------------------------------------------------------------


def test_a_right_file_reads_what_was_asked_and_what_is_withheld():
    found = report_of()
    assert found.headline == "Everything that was asked is there."
    assert found.remarks == (
        "30 more points wait for a device that can measure them.",
        "Provisional: measured on the Triton interpreter on a CPU.",
    )
    assert "Everything that was asked is there. 70 of 70 points. 30 more points wait" in printed(found)
    assert [(section.key, section.verdict, section.points) for section in found.sections if section.verdict] == [
        ("numerics", "pass", "40 of 40"),
        ("memory", "pass", "20 of 20"),
        ("structure", "pass", "10 of 10"),
        ("speed", "not_measured", "30 withheld"),
    ]


@pytest.mark.parametrize(
    "hopeless",
    [
        pytest.param({"runs": (wrong("random", ASSIGNMENT),)}, id="a-required-probe-is-wrong"),
        pytest.param(
            {"load_failure": Failure(kind=FailureKind.SYNTAX_ERROR, message="line 1"), "probes": ()}, id="error"
        ),
        pytest.param(
            {"audit": audit_of(ASSIGNMENT, library_calls=(TorchOp(op="sdpa", count=1, size_bytes=1),))}, id="refused"
        ),
    ],
)
def test_nothing_waits_for_a_file_that_no_device_would_give_points(hopeless):
    found = report_of(ASSIGNMENT, *hopeless.pop("runs", ()), **hopeless)
    assert found.points == 0
    assert "wait" not in printed(found)


@pytest.mark.parametrize(
    ("compiled", "said"),
    [
        ({"finished": False, "unfinished": "the time for compiling was over"}, ": the time for compiling was over."),
        ({"finished": False}, "Not everything could be compiled. It changes no points."),
        ({}, None),
    ],
)
def test_what_was_not_compiled_is_said_with_its_reason(compiled, said):
    found = report_of(compile_report=CompileReport(target="sm_90", kernels=(), **compiled))
    sentences = " ".join(found.section("compile").sentences)
    assert (said in sentences) if said else ("Not everything" not in sentences)


@pytest.mark.parametrize("width", [20, 80, 200])
def test_a_file_of_which_nothing_compiled_has_a_report_without_an_empty_table(width):
    found = report_of(compile_report=CompileReport(target="sm_90", kernels=(), finished=False))
    lines = printed(found, width).splitlines()
    assert "Compiled for the GPU" in lines
    assert "Kernels" not in lines


def test_one_score_reads_the_same_everywhere():
    steps = dataclasses.replace(ASSIGNMENT, points=dict(ASSIGNMENT.points) | {"numerics": 38.17})
    found = report_of(steps)
    assert f"{points_text(found.points)} of {points_text(found.out_of)} points" in printed(found)
    assert points_text(found.points) == "68.17"
    assert found.section("numerics").points == "38.17 of 38.17"


def test_memory_is_told_with_sizes_units_and_the_limit():
    found = report_of(memory=memory_points(2.0))
    assert found.section("memory").sentences[0] == (
        "From T = 192 to 384 the forward's peak above its inputs went from 35.2 MiB to 141 MiB: like T^2.00. "
        "At most T^1.3 passes."
    )
    chart = block_of(found, "memory", LineChart)
    assert [series.name for series in chart.series] == [
        "yours, like T^2.00",
        "naive, like T^2.00",
        "reference, like T^1.00",
    ]
    assert chart.series[1] == Series(
        name="naive, like T^2.00", whose=Whose.NAIVE, points=((96.0, 73728.0), (192.0, 294912.0), (384.0, 1179648.0))
    )


def test_a_size_that_did_not_fit_says_what_it_would_need():
    points = memory_points(2.0)
    last = dataclasses.replace(points[-1], failure=Failure(kind=FailureKind.MEMORY_LIMIT, message="m"))
    assert "it would need about 141 MiB" in " ".join(report_of(memory=(*points[:-1], last)).section("memory").sentences)


def test_a_failing_probe_shows_error_limit_and_map():
    found = report_of(ASSIGNMENT, wrong("tail", ASSIGNMENT))
    row = next(row for row in block_of(found, "numerics", Table).rows if row[0] == "tail")
    assert row[1:] == (
        "what tail tries",
        "fail: wrong values",
        ("o 4.0e-01", "lse 3.0e-07"),
        ("2.2e-05",),
        "o[0, 3, 5]: 0.25, not 0.125",
        ("0 of 1",),
    )
    assert block_of(found, "numerics", HeatMap).values == ((0.25, None), (0.0, 1e-3))


def test_the_diagnosis_comes_with_hint_step_and_evidence():
    bad = ["tail", "key-tail"]
    bank = (mistake("tail-unmasked", bad, [one.name for one in ASSIGNMENT.cases]),)
    found = report_of(ASSIGNMENT, *(wrong(name, ASSIGNMENT) for name in bad), mistakes=bank)
    said = found.section("diagnosis")
    assert found.fault == "tail-unmasked"
    assert (said.hint, said.step) == ("look at tail-unmasked", "the step of tail-unmasked")
    assert "Hint: look at tail-unmasked\nThe step to look at: the step of tail-unmasked\n" in printed(found)


@pytest.mark.parametrize("slug", ["flash-attention-forward", "flash-attention", "online-softmax"])
def test_a_named_fault_leads_to_the_heading_of_the_handout_that_explains_it(slug):
    assignment = assignment_of(slug)
    for fault, heading in assignment.explained.items():
        assert f"\n## {heading}\n" in assignment.handout, fault
    name = assignment.cases[0].name
    bank = (mistake("wrong-logsumexp", [name], [one.name for one in assignment.cases]),)
    found = report_of(assignment, wrong(name, assignment), mistakes=bank)
    assert found.section("diagnosis").explained == assignment.explained.get("wrong-logsumexp", "")
    said = f"The handout explains it under “{found.section('diagnosis').explained}”."
    assert (said in printed(found)) is ("wrong-logsumexp" in assignment.explained)


def test_bytes_and_launches_are_drawn_beside_the_naive_chain():
    found = report_of()
    chart = block_of(found, "structure", BarChart, "Bytes")
    assert [(bar.name, bar.value) for bar in chart.bars] == [
        ("yours, unique", 100_000.0),
        ("yours, requested", 400_000.0),
        ("naive in eager torch", 900_000.0),
    ]
    assert chart.levels == (Level(name="least possible", value=98_000.0),)
    launches = block_of(found, "structure", BarChart, "Launches").bars
    assert [(bar.name, bar.value) for bar in launches] == [("yours", 1.0), ("naive in eager torch", 5.0)]


def test_every_axis_says_what_was_measured_and_what_was_asked():
    found = report_of(**ON_GPU)
    assert {section.key: (section.measured, section.asked) for section in found.sections if section.verdict} == {
        "numerics": (
            f"{len(ASSIGNMENT.cases)} of {len(ASSIGNMENT.cases)} probes right",
            "all of them; the 2 required ones before anything counts",
        ),
        "memory": ("grows like T^1.00", "at most T^1.3, and every size fits"),
        "structure": (
            "1 launch and 1.02 times the least bytes",
            "at most 1 launch and 1.5 times the least bytes",
        ),
        "speed": ("6.00 times naive", "8 times naive for all points"),
    }


@pytest.mark.parametrize(
    ("required", "asked"),
    [
        pytest.param((), "all of them", id="none"),
        pytest.param(("random",), "all of them; the required one before anything counts", id="one"),
    ],
)
def test_how_many_probes_are_required_is_said_in_good_english(required, asked):
    cases = tuple(dataclasses.replace(one, required=one.name in required) for one in ASSIGNMENT.cases)
    assert report_of(dataclasses.replace(ASSIGNMENT, cases=cases)).section("numerics").asked == asked


@pytest.mark.parametrize("for_staff", [False, True])
def test_where_a_tensors_memory_comes_from_is_for_staff(for_staff):
    findings = tuple(
        Finding(kind=kind, message=f"Line 7: {kind} of dO.", line=7)
        for kind in ("foreign-memory", "out-of-bounds-load")
    )
    found = report_of(ASSIGNMENT, audit=audit_of(ASSIGNMENT, findings=findings), for_staff=for_staff)
    rows = block_of(found, "structure", Table, "What the audit saw").rows
    assert [row[0] for row in rows] == ["foreign-memory"] * for_staff + ["out-of-bounds-load"]


def test_an_axis_that_earns_nothing_for_a_required_probe_says_so():
    said = "Nothing is earned before the required probes pass"
    found = report_of(ASSIGNMENT, wrong("random", ASSIGNMENT))
    axes = [section for section in found.sections if section.points.startswith("0 of")]
    assert [section.key for section in axes] == ["numerics", "memory", "structure"]
    for section in axes:
        assert section.unearned == f"{said}."
        assert sum(said in sentence for sentence in section.sentences) == 1
    assert not any(section.unearned for section in report_of().sections)
    # one that is not as asked earns nothing for that
    grows = report_of(ASSIGNMENT, wrong("random", ASSIGNMENT), memory=memory_points(forward=2.0))
    assert (grows.section("memory").verdict, grows.section("memory").unearned) == ("fail", "")


@pytest.mark.parametrize("slug", ["flash-attention", "flash-attention-forward"])
def test_bytes_of_a_forward_beside_the_least_of_both_ways_are_told_as_that(slug):
    assignment = assignment_of(slug)
    both = any(output.gradient for output in assignment.outputs)
    structure = report_of(assignment).section("structure")
    assert structure.asked.endswith(" of a whole step, forward and backward") is both
    how = "1 launch in the forward and 1.02 times the least bytes of a whole step"
    assert structure.measured == (how if both else "1 launch and 1.02 times the least bytes")
    assert ("the limit keeps the forward from moving more than the step needs" in " ".join(structure.sentences)) is both


@pytest.mark.parametrize("slug", ["flash-attention", "flash-attention-forward", "fused-bias-dropout-layernorm"])
def test_operations_that_are_allowed_are_called_so(slug):
    assignment = assignment_of(slug)
    table = block_of(report_of(assignment), "structure", Table, "Requirements")
    asked = next(row[2] for row in table.rows if row[0] == "torch operations")
    allowed = ", ".join(assignment.structure.torch_ops)
    if allowed:
        assert asked == f"beside copies, fills and views these are allowed: {allowed}"
    else:
        assert asked == "none beside copies, fills and views"


@pytest.mark.parametrize("slug", ["flash-attention", "fused-bias-dropout-layernorm"])
def test_what_a_probe_weighs_is_not_called_points_of_the_axis(slug):
    assignment = assignment_of(slug)
    found = report_of(assignment)
    table = block_of(found, "numerics", Table, "Probes")
    assert table.columns[-1].name == "weight"
    said = f"share out the {points_text(assignment.points['numerics'])} points of this axis."
    assert sum(said in sentence for sentence in found.section("numerics").sentences) == 1


def test_what_is_not_as_asked_is_named_beside_the_numbers():
    many = audit_of(ASSIGNMENT, n_launches=3, torch_ops=(TorchOp(op="aten.bmm.default", count=1, size_bytes=10**6),))
    assert report_of(audit=many).section("structure").measured == (
        "3 launches and 1.02 times the least bytes; not as asked: launches and torch operations"
    )


# -- what a GPU adds ---------------------------------------------------------------------------------------------------

H200 = Device(kind="cuda", name="NVIDIA H200", arch="sm_90")
HEADLINE = {
    "dtype": "bfloat16",
    "flops": 8 * 10**11,  # 1 ms of the ceiling below
    "least_bytes": 10**9,
    "eager_bytes": 4 * 10**10,
}
STATE = GpuState(
    sm_clock_mhz=1980, memory_clock_mhz=3201, temperature_c=34, power_w=121.3, throttle_reasons=1, processes=()
)
GPU = GpuFacts(
    memory_bytes=1 << 30,
    ceilings=Ceilings(copy_bytes_per_s=4e12, flops_per_s={"bfloat16": 800e12}),
    before=STATE,
    after=dataclasses.replace(STATE, temperature_c=41, throttle_reasons=0x24),
)
ON_GPU = {
    "device": H200,
    "gpu": GPU,
    "timings": (
        timing(6.0, student_times_ms=(2.0,), naive_times_ms=(12.0,), ratio_low=5.94, ratio_high=6.06, **HEADLINE),
    ),
}


def test_the_speed_up_stands_beside_the_reference_and_its_thresholds():
    chart = block_of(report_of(**ON_GPU), "speed", BarChart)
    assert chart.title == "Speed-up over naive at queries = keys = 8,192"
    assert chart.bars == (
        Bar(name="yours", whose=Whose.OWN, value=6.0, low=5.94, high=6.06),
        Bar(name="naive", whose=Whose.NAIVE, value=1.0),
        Bar(name="reference", whose=Whose.REFERENCE, value=24.0),
    )
    assert chart.levels[-1] == Level(name="100% of the points", value=8.0)


def test_only_the_size_that_is_judged_shows_thresholds():
    other = timing(3.0, axes={"queries": 4096, "keys": 4096})
    charts = [
        block
        for block in report_of(**{**ON_GPU, "timings": (*ON_GPU["timings"], other)}).section("speed").blocks
        if isinstance(block, BarChart)
    ]
    assert [bool(chart.levels) for chart in charts] == [True, False]


def test_the_roofline_says_what_bounds_the_work_and_how_near_it_is():
    found = report_of(**ON_GPU)
    said = found.section("speed").sentences[1]
    assert "you reach 400 TFLOP/s and, counting every byte once, 500 GB/s" in said
    assert "800 FLOP a byte; on this GPU arithmetic is the limit from 200 on" in said
    assert said.endswith("So it is bound by arithmetic, and you reach 50% of that ceiling.")
    chart = block_of(found, "speed", LineChart, "Roofline")
    own, reference, naive, roof = chart.series
    assert own.points == ((800.0, 400e12),)
    assert reference.points == ((800.0, 1600e12),)
    assert naive.points[0][0] == pytest.approx(20.0), "naive is held to what its own chain moves"
    assert roof.points[1] == (200.0, 800e12), "the ridge"
    assert not own.joined
    table = block_of(found, "speed", Table, "Under")
    assert table.rows[0] == ("yours", "queries = keys = 8,192", "400 TFLOP/s", "500 GB/s", "800", "compute", "50%")
    assert [row[5] for row in table.rows] == ["compute", "compute", "memory"]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"gpu": None}, id="an-older-examination"),
        pytest.param({"gpu": dataclasses.replace(GPU, ceilings=None)}, id="no-ceilings"),
        pytest.param({"timings": (timing(6.0),)}, id="work-not-counted"),
        pytest.param({"timings": (timing(6.0, **{**HEADLINE, "dtype": "float8"}),)}, id="no-ceiling-of-that-dtype"),
    ],
)
def test_without_ceilings_there_is_no_roofline_and_nothing_is_guessed(changes):
    found = report_of(**{**ON_GPU, **changes})
    assert not [block for block in found.section("speed").blocks if block.title.startswith(("Roofline", "Under"))]
    assert "ceiling" not in printed(found).split("Where this comes from")[0]


def test_the_gpus_memory_is_drawn_and_said_where_naive_reaches_it():
    found = report_of(**ON_GPU)
    # 8 T² bytes fill 2**30 at T = 11,585; 1000 T at about a million
    said = " ".join(found.section("memory").sentences)
    assert (
        "The naive baseline would fill this GPU's 1.00 GiB at about T = 12,000, yours at about T = 1.1 million" in said
    )
    chart = block_of(found, "memory", LineChart)
    assert chart.levels == (Level(name="this GPU's memory", value=float(1 << 30)),)
    continued = next(series for series in chart.series if not series.measured)
    assert (continued.name, continued.whose) == ("naive, as it grows", Whose.NAIVE)
    assert continued.points[0] == (384.0, 8.0 * 384**2)
    assert continued.points[1] == pytest.approx((2.0**13.5, 2.0**30))


def test_without_a_gpu_no_capacity_is_drawn_and_a_common_one_is_named():
    found = report_of()
    assert block_of(found, "memory", LineChart).levels == ()
    assert "a GPU of 80.0 GiB at about T = 100,000" in " ".join(found.section("memory").sentences)


def test_a_size_that_did_not_fit_is_drawn_where_it_would_lie():
    points = memory_points(2.0)
    last = dataclasses.replace(points[-1], failure=Failure(kind=FailureKind.MEMORY_LIMIT, message="m"))
    found = report_of(memory=(*points[:-1], last))
    beyond = block_of(found, "memory", LineChart).series[-1]
    assert (beyond.name, beyond.measured) == ("yours, as it would grow", False)
    assert beyond.points[1] == pytest.approx((384.0, 1000.0 * 384**2))
    assert "T = 384 does not fit" in found.section("memory").measured
    naive = block_of(found, "memory", LineChart).series[1]
    assert (384.0, 8.0 * 384**2) in naive.points, "which is counted, and so known where nothing fits"
    assert block_of(found, "memory", Table).rows[-1][:2] == ("384", "did not fit")


def test_provenance_tells_the_gpus_clocks_and_what_slowed_it():
    rows = dict(block_of(report_of(**ON_GPU), "provenance", Table).rows)
    assert rows["GPU memory"] == "1.00 GiB"
    assert rows["measured ceilings"] == "copies at 4.00 TB/s; matrix products: bfloat16 800 TFLOP/s"
    assert rows["GPU before"] == "1,980 MHz, memory 3,201 MHz, 34 °C, 121 W, not slowed"
    assert rows["GPU after"].endswith("slowed by power cap and software thermal slowdown")


def test_times_by_the_files_own_events_stand_beside_ours():
    seen = timing(6.0, student_events_ms=(1.98, 1.99, 2.0), **HEADLINE)
    table = block_of(report_of(**{**ON_GPU, "timings": (seen,)}), "speed", Table, "Times")
    assert table.rows[0][names_of(table).index("your CUDA events")] == "1.990 ms"
    assert "your CUDA events" not in names_of(block_of(report_of(**ON_GPU), "speed", Table, "Times"))


@pytest.mark.parametrize("limit", [
    "still running after 20 s, the limit for one call", "its calls took 120 s, the limit for all of them together"
])  # fmt: skip
def test_a_file_without_a_speed_because_it_was_too_slow_says_so_and_names_the_limit(limit):
    slow = Failure(kind=FailureKind.TIME_LIMIT, message=limit, stage="timing")
    found = report_of(**{**ON_GPU, "timings": (), "too_slow": slow})
    assert found.section("speed").sentences == (f"Your file took too long while it was measured: {limit}.",)


def test_speed_is_told_with_its_interval():
    found = report_of(device=Device(kind="cuda", name="NVIDIA H200", arch="sm_90"), timings=(timing(6.0, noisy=True),))
    said = found.section("speed").sentences
    assert said[0] == ("6.00 times as fast as the naive baseline (95 % of resampled windows between 5.94 and 6.06).")
    assert "noisy" in said[1]
    assert not found.provisional


def test_the_compile_report_tells_registers_spills_and_what_would_not_start():
    kernel = CompiledKernel(
        kernel="fwd",
        registers=128,
        spill_bytes=104,
        shared_bytes=58_368,
        ctas_per_sm=4,
        matrix_unit="wgmma",
        line=17,
        shapes="64 x 64",
    )
    found = report_of(compile_report=CompileReport(target="sm_90", kernels=(kernel,)))
    said = " ".join(found.section("compile").sentences)
    assert "227 KiB of shared memory" in said
    assert "Spilled registers" in said
    row = block_of(found, "compile", Table).rows[0]
    assert row == (Hostile("fwd", 80), "17", "64 x 64", "128", "104 B", "57.0 KiB", "4", "wgmma")


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


@pytest.mark.parametrize("runs", [(), (wrong("random", ASSIGNMENT),)], ids=["right", "wrong"])
def test_a_grade_that_a_person_does_not_count_accuses_nobody_and_gives_the_reason(runs):
    """Staff wrote why; no word of ours stands beside it."""
    examination = with_probe(examination_of(ASSIGNMENT, evidence=(Evidence(kind="clock", message="odd"),)), *runs)
    grade = not_counted(judge(ASSIGNMENT, examination), "Handed in under two names.")
    found = report(ASSIGNMENT, examination, grade)
    assert (found.verdict, found.points, found.remarks[0][:11]) == ("not_counted", 0, "Provisional")
    assert found.headline == "A person looked at this grade and decided that it does not count."
    diagnosis = found.section("diagnosis")
    assert (diagnosis.title, diagnosis.sentences) == ("Why it does not count", ("Handed in under two names.",))
    said = printed(found)
    assert not [word for word in ("rule", "broken", "What is wrong", "points wait") if word in said]


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
    command = block_of(found, "provenance", Command)
    assert command.text == "tilegrade grade YOUR_FILE.py --assignment flash-attention-forward"
    assert command.text in printed(found, width=40), "not broken, so that it can be copied"
    on_gpu = block_of(report_of(**ON_GPU), "provenance", Command)
    assert on_gpu.text.endswith(" --device cuda")
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
    assert [part for part in block_of(found, "numerics", Table).rows[1] if part] == ["hidden 1", verdict]
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


@pytest.mark.parametrize("for_staff", [False, True], ids=["student", "staff"])
def test_a_terminal_says_all_that_the_page_says(for_staff):
    found = report_of(
        ASSIGNMENT,
        wrong("tail", ASSIGNMENT),
        **ON_GPU,
        stages=(Stage(name="numerics", seconds=1.25),),
        stdout="hello",
        output_bytes=5,
        for_staff=for_staff,
    )
    shown = " ".join(printed(found, width=1000).split())
    for section in found.sections:
        cells = [cell for block in section.blocks if isinstance(block, Table) for row in block.rows for cell in row]
        words = [section.title, section.points, section.measured, section.asked, *section.sentences]
        words += [section.hint, section.step, section.explained, *(block.title for block in section.blocks)]
        words += [cell.plain for cell in cells if isinstance(cell, Hostile)]
        for text in [*words, *(part for cell in cells for part in parts_of(cell))]:
            assert " ".join(text.split()) in shown


@pytest.mark.parametrize("slug", ["flash-attention-forward", "flash-attention", "online-softmax"])
@pytest.mark.parametrize("width", [60, 100, 200])
def test_a_report_prints_at_any_width(slug, width):
    assignment = assignment_of(slug)
    shown = printed(report_of(assignment, wrong("random", assignment), for_staff=True), width)
    # a command is one line, so that it can be copied
    assert max(len(line) for line in shown.splitlines() if "tilegrade grade" not in line) <= width
    assert "Where this comes from" in shown


@pytest.mark.parametrize("slug", ["flash-attention-forward", "fused-bias-dropout-layernorm"])
@pytest.mark.parametrize("width", [80, 100, 150])
def test_the_probe_table_breaks_no_name_and_loses_no_points(slug, width):
    assignment = assignment_of(slug)
    shown = printed(report_of(assignment, wrong("random", assignment), for_staff=True), width)
    table = shown[shown.index("\nProbes") :]
    for probe in assignment.cases:
        row = next(line for line in table.splitlines() if line.startswith(f"{probe.name} "))
        assert f"of {probe.points:g}" in row
    assert ("what it tries" in table) is (width == 150)


def test_in_short_there_is_what_to_act_on_and_nothing_else():
    bad = [case.name for case in ASSIGNMENT.cases if not case.required][:7]
    found = report_of(ASSIGNMENT, *(wrong(name, ASSIGNMENT) for name in bad), **ON_GPU, for_staff=True)
    shown, whole = printed(found, 80, whole=False), printed(found, 80)
    assert len(shown.splitlines()) < 60 < len(whole.splitlines())
    for said in (
        found.section("diagnosis").sentences[0],
        f"Probes: 7 of {len(ASSIGNMENT.cases)} do not pass; the first 5",
    ):
        assert said in " ".join(shown.split())
    assert [bool(re.search(rf"^{name} +fail", shown, re.MULTILINE)) for name in bad] == [True] * 5 + [False] * 2
    for title in ("Where this comes from", "Launches", "Memory against sequence length"):
        assert (title in shown, title in whole) == (False, True)


@pytest.mark.parametrize("width", [60, 80, 100])
def test_no_word_of_a_table_is_broken(width):
    found = report_of(ASSIGNMENT, wrong("random", ASSIGNMENT), **ON_GPU, for_staff=True)
    shown = set(printed(found, width).replace(",", " ").replace(";", " ").split())
    tables = [block for section in found.sections for block in section.blocks if isinstance(block, Table)]
    pairs = [pair for table in tables for row in table.rows for pair in zip(table.columns, row, strict=True)]
    cells = [part for column, cell in pairs if column.kind is not Kind.ASIDE for part in parts_of(cell)]
    words = {word for cell in cells for word in cell.replace(",", " ").replace(";", " ").split()}
    assert len(words) > 100
    assert {word for word in words if len(word) <= LONGEST_WORD} <= shown


def test_a_stage_that_was_gone_through_in_parts_is_one_row():
    parts = tuple(
        Stage(name=name, seconds=seconds) for name, seconds in (("load", 1.5), ("audit", 1.0), ("load", 0.25))
    )
    stages = block_of(report_of(stages=parts), "provenance", Table, "Stages")
    assert stages.rows == (("load", "1.75"), ("audit", "1.00"))


def test_staff_read_which_known_mistakes_the_outputs_resemble_and_how_near():
    bad, right = ["tail", "key-tail"], [one.name for one in ASSIGNMENT.cases]
    same = mistake("tail-unmasked", bad, right)
    far = dataclasses.replace(
        same, label="far", probes=tuple(dataclasses.replace(p, distance=9.0) for p in same.probes)
    )
    near = dataclasses.replace(
        same,
        label="near",
        tile=32,
        probes=tuple(dataclasses.replace(p, distance=0.3, own_error=0.5) for p in same.probes),
    )
    runs = [wrong(name, ASSIGNMENT) for name in bad]
    found = report_of(ASSIGNMENT, *runs, mistakes=(far, near, same), for_staff=True)
    assert block_of(found, "staff", Table, "Known mistakes").rows == (
        ("tail-unmasked", "the same outputs in 2 of 2 wrong probes"),
        ("near, with a tile of 32", "nearer than the right answer in 2 of 2 wrong probes"),
    )


def test_a_power_law_is_a_straight_line():
    chart = LineChart(
        title="",
        x_label="T",
        y_label="",
        y_unit="bytes",
        series=(
            Series(name="yours", whose=Whose.OWN, points=((64, 1024), (128, 2048), (256, 4096))),
            Series(name="naive", whose=Whose.NAIVE, points=((64, 4096), (128, 16384), (256, 65536))),
        ),
    )
    lines = line_plot(chart)
    yours = [(x, y) for y, line in enumerate(lines[:12]) for x, char in enumerate(line) if char == "●"]
    (x1, y1), (x2, y2), (x3, y3) = sorted(yours)
    assert abs((x2 - x1) - (x3 - x2)) <= 1
    assert abs((y1 - y2) - (y2 - y3)) <= 1
    assert lines[0].startswith("64 KiB")
    assert lines[11].startswith(" 1 KiB")
    assert "● yours  ■ naive" in lines[-1]


def test_a_level_is_drawn_across_and_named_with_its_value():
    yours = Series(name="yours", whose=Whose.OWN, points=((64, 1024), (256, 4096)))
    full = Level(name="all of it", value=65536.0)
    lines = line_plot(LineChart(title="", x_label="T", y_label="", y_unit="bytes", series=(yours,), levels=(full,)))
    assert lines[0].endswith("┄" * 48)
    assert lines[-1].endswith("┄ all of it 64 KiB")


def test_a_key_that_is_long_takes_more_lines_and_loses_nothing():
    assignment = assignment_of("flash-attention")
    shown = printed(report_of(assignment), width=70)
    for name in (
        "yours, like T^1.00",
        "yours with backward, like T^1.00",
        "naive, like T^2.00",
        "reference, like T^1.00",
    ):
        assert name in shown


NOTHING = Series(name="yours", whose=Whose.OWN, points=((64, 0),))


@pytest.mark.parametrize("series", [(), (NOTHING,)], ids=["none", "zero"])
def test_an_empty_chart_says_so(series):
    chart = LineChart(title="", x_label="", y_label="", y_unit="ms", series=series)
    assert line_plot(chart) == ["nothing was measured"]


def test_bars_are_as_long_as_their_numbers():
    bars = tuple(Bar(name=name, whose=Whose.OWN, value=value) for name, value in (("a", 3.0), ("bb", 1.0), ("c", 0.0)))
    lines = bar_plot(BarChart(title="", unit="launches", bars=bars))
    assert [line.count("█") for line in lines] == [32, 11, 0]
    assert lines[0].endswith(" 3")


def test_a_bar_tells_its_interval_and_a_chart_its_levels():
    bar = Bar(name="yours", whose=Whose.OWN, value=6.0, low=5.9, high=6.1)
    lines = bar_plot(BarChart(title="", unit="times", bars=(bar,), levels=(Level(name="all points", value=12.0),)))
    assert lines[0].endswith("6× (5.9× to 6.1×)")
    assert lines[1] == "┄ all points 12×"


def test_a_map_is_darkest_where_it_is_worst():
    lines = heat_plot(HeatMap(title="", row_label="rows", column_label="columns", values=((1.0, 0.05), (0.0, None))))
    assert lines[:2] == ["██▓▓", "··!!"]
