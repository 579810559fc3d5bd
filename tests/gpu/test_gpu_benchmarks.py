"""The benchmarks of a GPU, with its part played: what is printed and kept when all goes well, and when it does not."""

import argparse
import contextlib
import dataclasses
import functools
import gzip
import inspect
import json
import multiprocessing
import re
import shlex
import sys
import time
import types
from pathlib import Path

import pytest
import torch

from grader import measurement
from workers import __main__ as workers_program
from workers import gpu_examination
from workers.gpu_timing import Race, Size

PROJECT = Path(__file__).parents[2]
sys.path[:0] = [str(PROJECT / "benchmarks"), str(PROJECT / "tests" / "hostile")]

import gpu  # noqa: E402 (benchmarks are programs, not a package)
import gpu_bench  # noqa: E402
import gpu_corpus  # noqa: E402
import references  # noqa: E402
import serve_on_gpu  # noqa: E402

LANES = 2


def options(out, **changed):
    """What the command line gives where nothing is said."""
    plain = {"files": [], "times": 3, "alone": 2, "stop_s": 3600.0, "brief": False, "dtypes": ["float32"]}
    plain |= {"isolation": "auto"}
    return argparse.Namespace(out=out, **(plain | changed))


def run(out, *names, **changed):
    """Sections by name; returns the rows that are on disk afterwards, by section."""
    gpu_bench.run_sections({name: gpu.SECTIONS[name] for name in names}, options(out, **changed))
    rows = {}
    for line in (out / "rows.jsonl").read_text().splitlines():
        row = json.loads(line)
        rows.setdefault(row.pop("section"), []).append(row)
    return rows


# -- what is played ----------------------------------------------------------------------------------------------------

# measured on an H200
MEASURED = measurement.loads(
    gzip.decompress((PROJECT / "tests" / "web" / "examinations" / "ok-raw-strides.json.gz").read_bytes()).decode()
)


def race(timing):
    windows = len(timing.student_times_ms)
    whose = ("student", "naive", "reference")
    return Race(
        n_calls=dict.fromkeys(whose, 40),
        empty_ms=[0.9] * windows,
        times_ms={name: [100.0] * windows for name in whose},
        events_ms={"student": list(timing.student_events_ms or timing.student_times_ms)},
        fill_ms=[1.3],
        first_ms=[3.5],
        anatomy_ms={name: [(0.1, 0.2, 114.0)] for name in whose},
        row_errors={"o": 2e-3},
        n_checked_rows=4032,
    )


class Play:
    """Answers in the place of an examination on a GPU, which it counts; `fails` says which of them raise."""

    def __init__(self):
        self.fails = lambda number: False
        self.has_reference = True
        self.asked = []
        self.headline_s = set()

    def examine(self, assignment, source, record):
        self.asked.append(assignment)
        self.headline_s.add(gpu_examination.HEADLINE_S)
        if self.fails(len(self.asked)):
            raise RuntimeError("CUDA error: unspecified launch failure")
        names = {case.name for case in assignment.cases}
        timings = MEASURED.timings[: len(assignment.speed.sizes)] if assignment.speed else ()
        if not self.has_reference:
            timings = [dataclasses.replace(timing, reference_times_ms=()) for timing in timings]
        if record is not None:
            record.seconds["numerics"] = 0.5
            record.races += [
                (Size(axes=timing.axes, dtype=torch.bfloat16, options={}), race(timing)) for timing in timings
            ]
        return dataclasses.replace(
            MEASURED,
            assignment=assignment.slug,
            probes=tuple(run for run in MEASURED.probes if run.name in names),
            timings=tuple(timings),
            memory=MEASURED.memory if assignment.memory else (),
            gpu=dataclasses.replace(MEASURED.gpu, held_s=3.7, idle_s=0.0001),
            replay=measurement.Replay(outcome=measurement.ReplayOutcome.AGREES, axes={}, time_ms=2.7, ratio=6.2),
        )


@pytest.fixture
def play(monkeypatch):
    played = Play()
    signature = inspect.signature(gpu_examination.examine_on_gpu)
    opened = []

    def examine_on_gpu(*args, **named):
        asked = signature.bind(*args, **named).arguments
        assert opened, "nothing is warm"
        return played.examine(asked["assignment"], asked["source"], asked["record"])

    @contextlib.contextmanager
    def pool(limits, *, size, isolation):
        opened.append(size)
        yield types.SimpleNamespace(size=size)
        opened.remove(size)

    class Gpu:
        def __init__(self):
            opened.append("gpu")

        def close(self):
            opened.remove("gpu")

    class Warm:
        """In the place of WarmGpu."""

        lanes = LANES

        def __init__(self):
            opened.append("warm")

        def __call__(self, assignment, source, progress, record=None):
            assert opened == ["warm"]
            return played.examine(assignment, source, record)

        def warm_up(self, assignment):
            return MEASURED

        def close(self):
            opened.remove("warm")

    cuda = types.SimpleNamespace(Gpu=Gpu, cuda_pool=pool, baselines_pool=functools.partial(pool, None, size=2))
    monkeypatch.setitem(sys.modules, "workers.devices.cuda", cuda)
    for name, value in {"ahead_pool": pool, "interpreter_pool": pool, "examine_on_gpu": examine_on_gpu}.items():
        monkeypatch.setattr(gpu_bench, name, value)
    monkeypatch.setattr(gpu, "WarmGpu", Warm)
    monkeypatch.setattr(gpu, "measure_ceilings", lambda: MEASURED.gpu.ceilings)
    monkeypatch.setattr(gpu, "time", types.SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: None))
    yield played
    assert opened == [], "left open"


# section: what is asked of it, how many examinations that is, how many rows
ASKED = {
    "grade": ({"files": ["stored-scores", "ok-raw-strides"]}, 2, 2),
    "repeat": ({"times": 3}, 3, 4),
    "clock": ({}, len(gpu.CLOCKED), len(gpu.CLOCKED)),
    "queue": ({"times": 3, "alone": 1}, 1 + 3 + LANES, 1 + 3 + LANES + 1),
    "corpus": ({"files": ["ok-raw-strides", "tail-unmasked.py"]}, 4, 4),
    "replay": ({"files": ["copies_torch", "reference/"]}, 5, 5),
    "exploits": ({"files": ["memoised", "far_keys", "empty_cache", "late_kernel", "side_stream"]}, 8, 9),
}


@pytest.mark.parametrize("section", ASKED)
def test_a_section_that_goes_well_leaves_a_row_for_each_examination(play, tmp_path, capsys, section):
    changed, n_examined, n_rows = ASKED[section]
    rows = run(tmp_path, section, **changed)[section]
    assert len(play.asked) == n_examined
    assert len(rows) == n_rows
    assert not [row for row in rows if {"failed", "error", "not_run"} & {*row}], capsys.readouterr()
    assert gpu_examination.HEADLINE_S == 2.5


@pytest.mark.parametrize("section", ["corpus", "replay"])
def test_who_reads_the_clock_waits_for_other_lanes_no_longer_than_in_a_worker(play, tmp_path, section):
    before = sys.getswitchinterval()
    try:
        sys.setswitchinterval(0.005)
        run(tmp_path, section, **ASKED[section][0])
        assert sys.getswitchinterval() == pytest.approx(gpu_examination.SWITCH_S)
    finally:
        sys.setswitchinterval(before)


@pytest.mark.parametrize("section", ASKED)
def test_nothing_begins_after_its_time_and_what_did_not_is_told(play, tmp_path, section):
    changed, n_examined, _ = ASKED[section]
    rows = run(tmp_path, section, stop_s=0.0, **changed)[section]
    honest = 2 if section == "exploits" else 0  # what all is held against
    assert len(play.asked) == honest
    assert sum("not_run" in row for row in rows) == n_examined - honest
    assert not [row for row in rows if {"failed", "error"} & {*row}]


@pytest.mark.parametrize("section", ASKED)
@pytest.mark.parametrize("fails", [lambda number: number == 2, lambda number: True], ids=["one", "all"])
def test_an_examination_that_fails_takes_no_other_row_with_it(play, tmp_path, section, fails):
    changed, n_examined, n_rows = ASKED[section]
    play.fails = fails
    rows = run(tmp_path, section, **changed)[section]
    n_failed = sum(fails(number) for number in range(1, n_examined + 1))
    assert len(rows) == n_rows
    assert ["CUDA error" in row["error"] for row in rows if "error" in row] == [True] * n_failed
    assert not [row for row in rows if "failed" in row]


@pytest.mark.parametrize("section", ASKED)
def test_without_a_reference_that_runs_all_is_measured_all_the_same(play, tmp_path, section):
    """Its kernels were tuned after they last ran in an examination."""
    changed, n_examined, n_rows = ASKED[section]
    play.has_reference = False
    rows = run(tmp_path, section, **changed)[section]
    assert len(play.asked) == n_examined
    assert len(rows) == n_rows
    assert not [row for row in rows if {"failed", "error"} & {*row}]


def test_each_section_has_all_the_seconds_and_a_failure_is_its_own_sections(tmp_path):
    left_s = []

    def slow(arguments):
        left_s.append(arguments.stop_at - time.monotonic())
        yield {"number": 1}
        time.sleep(0.2)
        raise RuntimeError("lost")

    gpu_bench.run_sections({"first": slow, "second": slow}, options(tmp_path, stop_s=0.3))
    assert min(left_s) > 0.25
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["section"] for row in rows] == ["first", "first", "second", "second"]
    assert [("lost" in row["failed"]) if "failed" in row else row["number"] for row in rows] == [1, True] * 2


def test_a_row_is_on_disk_before_the_next_one_is_asked_for(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"section": "of an earlier run"}\n')
    seen = []

    def section(arguments):
        for number in range(3):
            yield {"number": number}
            seen.append(len(file.read_text().splitlines()))

    gpu_bench.run_sections({"any": section}, options(tmp_path))
    assert seen == [2, 3, 4]


def test_rows_come_in_the_order_in_which_they_are_done():
    slow_first = gpu_bench.each(
        [0.3, 0.0, 0.01], lambda s: time.sleep(s) or {}, name=lambda s: {"s": s}, stop_at=float("inf"), lanes=3
    )
    assert [row["s"] for row in slow_first] == [0.0, 0.01, 0.3]


def test_who_asks_for_no_more_rows_waits_for_no_more_work():
    begun = []
    rows = gpu_bench.each(range(50), lambda n: begun.append(n) or {}, name=lambda n: {"n": n}, stop_at=float("inf"))
    next(rows)
    rows.close()
    again = len(begun)
    time.sleep(0.05)
    assert len(begun) == again


# -- what is made of the rows ------------------------------------------------------------------------------------------


def graded(number, ended, *, ms=2.7, ratio=6.2, idle_s=0.0001):
    return {
        "number": number, "ended": ended, "seconds": 20.0, "lock_s": 4.0, "idle_s": idle_s,
        "student_ms": [ms], "ratio": [ratio],
    }  # fmt: skip


def test_a_full_queue_is_counted_where_each_grading_had_a_successor():
    rows = [graded(-2, 1.0, ms=2.70), graded(-1, 2.0, ms=2.72)]
    rows += [graded(number, 100.0 + 5 * number, ms=2.73, ratio=6.1) for number in range(8)]
    rows[2] |= {"idle_s": 60.0, "ended": 99.0}  # the first one found the GPU idle
    rows[-1] |= {"ended": 200.0, "ratio": [1.0]}  # the last of them ended alone
    found = gpu.queue_summary(rows, lanes=3)
    assert (found["alone"], found["steady"]) == (2, 5)
    assert found["an_hour"] == pytest.approx(3600 / 5)
    assert found["full_idle_s"]["most"] == 0.0001
    assert found["student_ms_max_over_min"] == pytest.approx(2.73 / 2.70)
    assert found["ratio_max_over_min"] == pytest.approx(6.2 / 6.1)
    assert found["busy_over_quiet"] == pytest.approx(2.73 / 2.71)


@pytest.mark.parametrize("count", range(6))
def test_a_queue_that_was_cut_short_tells_what_it_can(count):
    rows = [graded(-1, 1.0), *(graded(number, 10.0 + number) for number in range(4))][:count]
    assert gpu.queue_summary(rows, lanes=2)["alone"] == min(count, 1)


def test_failures_of_ours_are_no_expected_answers():
    rows = [
        {"file": "a/ok-1.py", "dtype": "float32", "complaints": [], "verdict": "full"},
        {"file": "a/ok-2.py", "dtype": "float32", "error": "lost"},
        {"file": "a/ok-3.py", "dtype": "float32", "not_run": True},
    ]
    said = gpu_corpus.summary(rows, 3.0)
    assert "1 of   2 as expected, of 3" in said
    assert "failures of ours: a/ok-2.py" in said


# -- our kernels beside torch's ----------------------------------------------------------------------------------------


@pytest.fixture
def kernels(monkeypatch):
    """The comparison with everything played that launches a kernel; each part may be made to fail."""
    monkeypatch.setattr(references, "load", lambda name, folder: types.SimpleNamespace())
    monkeypatch.setattr(references, "attention_inputs", lambda d, t, dtype: [])
    monkeypatch.setattr(references, "compile_ahead", lambda jobs, *, stop_s, folder: len(jobs))
    monkeypatch.setattr(references, "worst_error", lambda module, dtype, d, *, causal: 0.5)
    monkeypatch.setattr(references, "copy_rate", lambda: 4.2)
    monkeypatch.setattr(
        references, "_row_inputs", lambda name, shape, dtype, device: [torch.empty(shape, device="meta")]
    )
    monkeypatch.setattr(references, "_row_call", lambda name, module: len)
    monkeypatch.setattr(references, "by_graph", lambda call: 1.0)
    for name in ("our_attention", "torch_attention"):
        monkeypatch.setattr(references, name, lambda *args, causal, backward: 1.0)

    def fail(name):
        def lost(*args, **named):
            raise RuntimeError("CUDA error: lost")

        monkeypatch.setattr(references, name, lost)

    return types.SimpleNamespace(
        fail=fail, rows=lambda **named: list(references.compare(["bfloat16"], [2048], **named))
    )


N_ROWS = 1 + 3 + 2 * len(references.CHECKED) + 2 * 2 * 2


def test_a_comparison_has_a_row_for_everything_that_is_asked(kernels):
    rows = kernels.rows()
    assert len(rows) == N_ROWS
    assert not [row for row in rows if "failed" in row]
    assert all({"of_flash", "of_cudnn"} <= {*row} for row in rows if row["kernel"] in references.FLOPS_OF)


@pytest.mark.parametrize(
    ("part", "n_failed"),
    [
        ("compile_ahead", 1), ("copy_rate", 3), ("by_graph", 3), ("worst_error", 2 * len(references.CHECKED)),
        ("attention_inputs", 8), ("our_attention", 8), ("torch_attention", 8), ("load", N_ROWS - 1),
    ],
)  # fmt: skip
def test_what_fails_is_a_row_that_says_so_and_the_others_are_measured(kernels, part, n_failed):
    kernels.fail(part)
    rows = kernels.rows()
    told = [references.told(row) for row in rows]
    assert len(rows) == N_ROWS
    assert sum("CUDA error: lost" in line and line.endswith("SHORT") for line in told) == n_failed


def test_without_one_of_torchs_the_others_are_compared(kernels, monkeypatch):
    def only_flash(backend, *args, causal, backward):
        if backend == "cudnn":
            raise RuntimeError("no engine")
        return 2.0

    monkeypatch.setattr(references, "torch_attention", only_flash)
    rows = [row for row in kernels.rows() if row["kernel"] in references.FLOPS_OF]
    assert {(row["of_flash"], "cudnn: RuntimeError: no engine" in row["failed"]) for row in rows} == {(2.0, True)}


def test_who_compiles_when_time_is_over_is_ended(tmp_path):
    """Else the program would wait for it at its end, after all is measured."""
    (tmp_path / "softmax.py").write_text("import time\ntime.sleep(600)\n")
    jobs = [("softmax", "bfloat16")] * 4
    assert references.compile_ahead(jobs, stop_s=0.5, folder=tmp_path) == 0
    assert not multiprocessing.active_children()


def test_a_comparison_out_of_time_counts_what_is_left(kernels):
    assert [references.told(row) for row in kernels.rows(stop_s=-1.0)][1:] == [
        f"not run  {N_ROWS - 1} rows, for lack of time  SHORT"
    ]


# -- the service on a GPU ----------------------------------------------------------------------------------------------


def served(finished, *, held_s=3.7, idle_s=0.0001):
    return {
        "verdict": "full", "started": finished - 20.0, "finished": finished, "held_s": held_s, "idle_s": idle_s,
    }  # fmt: skip


def test_the_numbers_of_a_full_queue_are_those_stored_with_each_grading():
    graded = [served(4.0 * number, held_s=3.0 + number) for number in range(1, 5)]
    graded.append(served(0.0, held_s=13.0, idle_s=60.0))  # the first one: it waited for what was not warm
    found = serve_on_gpu.queue_numbers(graded)
    assert found["an_hour"] == pytest.approx(900)
    assert found["held_s"] == {"median": 5.5, "most": 7.0}
    assert found["idle_s"] == {"median": 0.0001, "most": 0.0001}
    assert found["claim_to_grade_s"] == {"median": 20.0, "most": 20.0}


@pytest.mark.parametrize("count", range(3))
def test_a_queue_that_graded_little_or_in_the_interpreter_tells_what_it_can(count):
    graded = [served(4.0 * number, held_s=None, idle_s=None) for number in range(count)]
    found = serve_on_gpu.queue_numbers(graded)
    assert found["graded"] == count
    assert not {"an_hour", "held_s", "idle_s"} & {*found}


class Served:
    """In the place of a service: nobody grades, and its only worker is what it says."""

    def __init__(self, *statuses):
        self.statuses = [*statuses, *statuses[-1:] * 10]
        self.folder, self.stopped = Path("/nowhere"), 0

    def reported(self):
        status = self.statuses.pop(0)
        return [types.SimpleNamespace(name="host:cuda:0", status=status, note="the GPU is too hot")]

    wait_for_worker = serve_on_gpu.Service.wait_for_worker

    def wait_until_it_answers(self, seconds):
        return 0.1

    def stop(self):
        self.stopped += 1
        return 0.0


@pytest.fixture
def seconds(monkeypatch):
    """Seconds pass with every look at the workers."""
    passed = iter(range(0, 1000, 20))
    clock = types.SimpleNamespace(monotonic=lambda: float(next(passed)), sleep=lambda seconds: None)
    monkeypatch.setattr(serve_on_gpu, "time", clock)


def test_one_who_has_no_time_left_is_told_that_no_worker_came(seconds):
    with pytest.raises(serve_on_gpu.NoWorkerError, match=r"no worker within 20 s: .*starting"):
        Served("starting").wait_for_worker(0.0)


@pytest.mark.parametrize(
    ("statuses", "waited_s"),
    [
        pytest.param(["starting"], 180, id="not-ready"),
        pytest.param(["starting", "quarantined", "starting"], 100, id="in-quarantine"),
    ],
)
def test_a_worker_in_quarantine_is_waited_for_until_it_looked_again(seconds, statuses, waited_s):
    with pytest.raises(serve_on_gpu.NoWorkerError, match=rf"no worker within {waited_s} s: .*the GPU is too hot"):
        Served(*statuses).wait_for_worker(180.0)


def test_one_that_comes_back_from_quarantine_grades(seconds):
    assert Served("quarantined", "starting", "idle").wait_for_worker(180.0) == 60


def test_without_a_worker_no_other_part_is_tried(seconds, monkeypatch, tmp_path, capsys):
    served, tried = Served("quarantined"), []
    monkeypatch.setattr(serve_on_gpu, "Service", lambda device, log: served)
    monkeypatch.setattr(serve_on_gpu.signal, "signal", lambda *_: None)
    arguments = argparse.Namespace(device="cuda", out=tmp_path, left_s=lambda most: most)

    def part(service, arguments):
        tried.append(len(tried))
        serve_on_gpu.await_worker(service, arguments)
        return True

    fine = {}
    serve_on_gpu.with_service({"service": part, "queue": part, "killed": part}, arguments, fine)
    assert (tried, served.stopped, fine) == ([0], 1, {"pages": True})
    assert "the GPU is too hot" in capsys.readouterr().out


# -- the plan ----------------------------------------------------------------------------------------------------------

PLAN = (PROJECT / "benchmarks" / "RESULTS.md").read_text().partition("\n## GPU examiner")[0]
PLANNED = [shlex.split(line) for line in re.findall(r"^\| `(?:timeout \d+ )?python ([^`]+)` \|", PLAN, re.M)]


@pytest.mark.parametrize("command", PLANNED, ids=" ".join)
def test_every_command_of_the_plan_is_one(monkeypatch, tmp_path, command):
    program, arguments = (command[:2], command[2:]) if command[0] == "-m" else (command[:1], command[1:])
    begun = []
    monkeypatch.setattr(sys, "argv", [*program, *arguments, "--out", str(tmp_path)])
    if program == ["benchmarks/gpu.py"]:
        monkeypatch.setattr(gpu, "run_sections", lambda sections, options: begun.extend(sections))
        assert gpu.main() == 0
        assert set(begun) < set(gpu.SECTIONS)
    elif program == ["tests/gpu/serve_on_gpu.py"]:
        monkeypatch.setattr(serve_on_gpu.signal, "signal", lambda *_: None)
        monkeypatch.setattr(serve_on_gpu, "with_service", lambda wanted, options, fine: begun.extend(wanted) or True)
        assert serve_on_gpu.main() == 1  # no part said that it went well
        assert begun
    elif program == ["-m", "workers"]:
        monkeypatch.setitem(workers_program._COMMANDS, arguments[0], lambda options: begun.append(options) or {})
        assert workers_program.main(arguments) == 0
        assert begun[0].device == "cuda"
    else:
        assert program == ["-m", "pytest"]
        assert "pytest.mark.gpu" in (PROJECT / arguments[-1]).read_text()


def test_the_plan_asks_for_every_section_and_every_part_of_files_is_one_of_some():
    asked = [command for command in PLANNED if command[0] == "benchmarks/gpu.py"]
    assert {word for command in asked for word in command} >= set(gpu.SECTIONS)
    (parts,) = [command[command.index("--files") + 1] for command in asked if "--files" in command]
    assert len(gpu_corpus.jobs([parts], ["float32"])) >= 14
