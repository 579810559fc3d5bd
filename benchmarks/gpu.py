"""Measures the GPU examiner on the GPU at hand, prints a table and writes the same numbers as JSON.

    python benchmarks/gpu.py [--only SECTION ...] [--out FOLDER]

Without --only all sections run. Each GPU number in benchmarks/RESULTS.md comes from a run of this script.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

PROJECT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(PROJECT), str(PROJECT / "tests" / "hostile")]

import gpu_corpus  # noqa: E402
import gpu_replay  # noqa: E402
import hostile_cases  # noqa: E402
import torch  # noqa: E402

from grader.assignment import Assignment, Limits, load_assignment  # noqa: E402
from grader.judging import grade_json, judge  # noqa: E402
from grader.measurement import Ceilings, Examination, ProbeMeasured, to_json  # noqa: E402
from grader.roofline import roofline  # noqa: E402
from workers import gpu_examination  # noqa: E402
from workers.ahead import ahead_pool  # noqa: E402
from workers.ceilings import measure as measure_ceilings  # noqa: E402
from workers.devices.cpu import interpreter_pool  # noqa: E402
from workers.devices.cuda import Gpu, cuda_pool  # noqa: E402
from workers.gpu_examination import Ahead, GpuRecord, Rivals, WarmGpu, examine_on_gpu  # noqa: E402
from workers.gpu_timing import Race, Size  # noqa: E402
from workers.sandbox import SandboxPool  # noqa: E402

CORPUS = PROJECT / "tests" / "corpus"


def main() -> int:
    """Run the sections asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=list(SECTIONS), choices=list(SECTIONS))
    parser.add_argument("--out", type=Path, default=PROJECT / "artifacts" / "gpu")
    parser.add_argument(
        "--files", nargs="*", default=[], help="corpus files for grade, parts of names for corpus, hostile ones"
    )
    parser.add_argument("--times", type=int, default=10, help="gradings of the section repeat")
    parser.add_argument("--stop-s", type=float, default=1e9, help="no further file of the corpus after so many seconds")
    parser.add_argument("--brief", action="store_true", help="faulty files of the corpus where they must fail, no more")
    parser.add_argument("--dtypes", nargs="*", default=list(gpu_corpus.DTYPES), choices=gpu_corpus.DTYPES)
    parser.add_argument("--isolation", default="auto", choices=["auto", "none"])
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    seconds: dict[str, float] = {}
    for name in arguments.only:
        began = time.monotonic()
        print(f"=== {name}", flush=True)
        try:
            for row in SECTIONS[name](arguments):
                found.setdefault(name, []).append(row)
                (arguments.out / "h200.json").write_text(json.dumps(found, indent=1, default=str))
        except Exception:  # a section that fails must not take the others' numbers with it
            traceback.print_exc()
            found.setdefault(name, []).append({"failed": traceback.format_exc()[-2000:]})
        seconds[name] = round(time.monotonic() - began, 2)
    print(json.dumps(seconds))
    return 0


# -- environment and ceilings -----------------------------------------------------------------------------------------


def environment(_arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What the numbers were measured on."""
    import pynvml
    import triton

    pynvml.nvmlInit()
    found = {
        "date": time.strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name(0),
        "driver": str(pynvml.nvmlSystemGetDriverVersion()),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "bwrap": shutil.which("bwrap"),
        "cgroups": Path("/proc/self/cgroup").read_text(),
        "cgroup_mounts": [line for line in Path("/proc/mounts").read_text().splitlines() if "cgroup" in line],
    }
    from workers.sandbox import host_isolation

    with contextlib.suppress(Exception):
        found["isolation"] = dataclasses.asdict(host_isolation())
    for key, value in found.items():
        print(f"  {key}: {value}")
    yield found


def ceilings(_arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Copy bandwidth and matrix rates of this GPU, by events, on random data."""
    measured = measure_ceilings()
    found: dict[str, Any] = {"copy_tb_per_s": measured.copy_bytes_per_s / 1e12}
    found |= {f"{dtype}_tflops": rate / 1e12 for dtype, rate in measured.flops_per_s.items()}
    print("  " + ", ".join(f"{key} {value:.2f}" for key, value in found.items()))
    yield found


def references(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Our kernels beside torch's Flash and cuDNN, a copy and the eager chains: benchmarks/references.py."""
    from references import compare, told

    for row in compare(stop_s=min(arguments.stop_s, 600.0)):
        print("  " + told(row), flush=True)
        yield row


# -- grading ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Bench:
    gpu: Gpu
    warm: SandboxPool
    interpreter: SandboxPool | None
    rivals: Rivals
    ahead: Ahead | None
    ceilings: Ceilings


@contextlib.contextmanager
def _bench(limits: Limits, *, audit: bool = True, ahead: bool = True, isolation: Any = "auto") -> Iterator[_Bench]:
    """A warm worker: candidates of each kind started ahead, baselines kept from one grading to the next."""
    n_compilers = max(1, min(8, (os.cpu_count() or 2) // 2))
    with contextlib.ExitStack() as stack:
        warm = stack.enter_context(cuda_pool(limits, size=3, isolation=isolation))
        interpreter = stack.enter_context(interpreter_pool(limits, size=1, isolation=isolation)) if audit else None
        compilers = stack.enter_context(ahead_pool(limits, size=n_compilers, isolation=isolation)) if ahead else None
        gpu = Gpu()
        stack.callback(gpu.close)
        rivals = Rivals(gpu, warm)
        stack.callback(rivals.close)
        yield _Bench(
            gpu,
            warm,
            interpreter,
            rivals,
            Ahead(sandboxes=compilers, n_candidates=n_compilers) if compilers is not None else None,
            measure_ceilings(),
        )


def _examined(
    assignment: Assignment, source: bytes, bench: _Bench, record: GpuRecord
) -> tuple[Examination, dict[str, Any]]:
    examination = examine_on_gpu(
        assignment,
        source,
        gpu=bench.gpu,
        sandboxes=bench.warm,
        interpreter=bench.interpreter,
        rivals=bench.rivals,
        ahead=bench.ahead,
        ceilings=bench.ceilings,
        record=record,
    )
    return examination, grade_json(judge(assignment, examination))


def _grade(assignment: Assignment, file: Path, bench: _Bench, *, whole: Path | None = None) -> dict[str, Any]:
    record = GpuRecord()
    began = time.monotonic()
    examination, grade = _examined(assignment, file.read_bytes(), bench, record)
    seconds = time.monotonic() - began
    found: dict[str, Any] = {
        "file": str(file.relative_to(PROJECT)).removeprefix("tests/corpus/"),
        "verdict": grade["verdict"],
        "fault": grade["fault"],
        "score": grade["score"],
        "seconds": round(seconds, 3),
        "lock_s": round(record.lock_s, 3),
        "stages": {name: round(value, 3) for name, value in record.seconds.items()},
        "probes": {run.name: _said(run) for run in examination.probes},
        "memory": to_json(examination.memory),
        "axes": grade["axes"],
        "evidence": to_json(examination.evidence),
        "load_failure": to_json(examination.load_failure),
        "audit_failure": to_json(examination.audit_failure),
        "stderr": examination.stderr[-1500:],
        "gpu": to_json(examination.gpu),
    }
    if whole is not None:
        whole.write_text(json.dumps(to_json(examination)))
    found["races"] = [_race(size, race) for size, race in record.races]
    found["rooflines"] = [
        dataclasses.asdict(
            roofline(
                time_ms=median(timing.student_times_ms),
                flops=timing.flops,
                traffic_bytes=timing.least_bytes,
                dtype=timing.dtype,
                ceilings=bench.ceilings,
            )
        )
        for timing in examination.timings
    ]
    found["timings"] = to_json(examination.timings)
    return found


def queue(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A full queue on one warm worker, audits included: gradings an hour, and what one lane disturbs another."""
    file = CORPUS / "flash-attention-forward" / "ok-raw-strides.py"
    assignment = _assignment("flash-attention-forward")
    warm = WarmGpu()
    try:
        warm.warm_up(assignment)
        rows: list[dict[str, Any]] = []

        def grade_one(number: int) -> None:
            record = GpuRecord()
            began = time.monotonic()
            examination = warm(assignment, file.read_bytes(), lambda _stage, _fraction: None, record)
            student_ms = [median(timing.student_times_ms) for timing in examination.timings]
            row = {"number": number, "verdict": judge(assignment, examination).verdict.value, "ended": time.monotonic()}
            row |= {"seconds": time.monotonic() - began, "lock_s": record.lock_s, "idle_s": record.idle_s}
            row |= {"student_ms": student_ms, "ratio": [timing.ratio for timing in examination.timings]}
            print(f"  {row | {'stages': dict(record.seconds)}}", flush=True)
            rows.append(row | {"stages": dict(record.seconds), "races": [_race(*one) for one in record.races]})

        for number in range(2):  # nothing beside them
            time.sleep(4.0)
            grade_one(-1 - number)
        began = time.monotonic()
        with ThreadPoolExecutor(warm.lanes) as lanes:
            list(lanes.map(grade_one, range(arguments.times + warm.lanes)))
    finally:
        warm.close()
    alone = [row for row in rows if row["number"] < 0]
    full = [row for row in rows if row["number"] >= 0][1:]  # the first one found the GPU idle
    steady = full[: len(full) - warm.lanes + 1]  # the last ones had no successor
    an_hour = 3600 * (len(steady) - 1) / (steady[-1]["ended"] - steady[0]["ended"])
    found: dict[str, Any] = {"gradings": rows, "an_hour": an_hour, "seconds": time.monotonic() - began}
    found["idle_s"] = {"median": median(row["idle_s"] for row in steady), "most": max(row["idle_s"] for row in steady)}
    found["lock_s"] = median(row["lock_s"] for row in steady)
    quiet, busy = (median(row["student_ms"][0] for row in some) for some in (alone, steady))
    found["busy_over_quiet"] = busy / quiet
    every_ms = [row["student_ms"][0] for row in (*alone, *steady)]
    every_ratio = [row["ratio"][0] for row in (*alone, *steady)]
    found["time_max_over_min"] = max(every_ms) / min(every_ms)
    found["ratio_max_over_min"] = max(every_ratio) / min(every_ratio)
    print(f"  { {key: value for key, value in found.items() if key != 'gradings'} }", flush=True)
    yield found


def _race(size: Size, race: Race) -> dict[str, Any]:
    return {
        "axes": dict(size.axes),
        "n_calls": race.n_calls,
        "windows_ms": race.times_ms,
        "events_ms": race.events_ms,
        "empty_ms": race.empty_ms,
        "anatomy_ms": race.anatomy_ms,
        "moved": race.n_moved,
        "stages_s": {name: round(value, 4) for name, value in race.stages_s.items()},
        "pulses": race.pulses,
        "first_ms": race.first_ms,
        "fill_ms": race.fill_ms,
        "row_errors": race.row_errors,
        "rows_checked": race.n_checked_rows,
        "voids": race.voids,
        "seconds": race.seconds,
    }


def _said(run: Any) -> Any:
    if isinstance(run, ProbeMeasured):
        return [[one.name, one.rel_error, one.limit] for one in run.outputs]
    return f"{run.failure.kind.value}: {run.failure.message[:300]}"


def _print_grade(found: dict[str, Any]) -> None:
    wrong = {
        name: said
        for name, said in found["probes"].items()
        if isinstance(said, str) or any(one[1] is None or one[1] > one[2] for one in said)
    }
    print(
        f"  {found['file']}: {found['verdict']} {found['fault']} {found['score']['points']}/{found['score']['out_of']} "
        f"in {found['seconds']} s, lock {found['lock_s']} s, {len(found['probes'])} probes, wrong {list(wrong)}"
    )
    for name, said in list(wrong.items())[:4]:
        print(f"    {name}: {said}")
    print(f"    stages {found['stages']}")
    for point in found["memory"]:
        mib = {key: round(point[key] / 2**20, 1) for key in ("peak_bytes", "kept_bytes", "naive_bytes")}
        print(f"    T={point['size']} {mib} {point['failure'] and point['failure']['message'][:160]}")
    for race, timing in zip(found["races"], found["timings"], strict=False):
        k = race["n_calls"]
        outside, events = median(timing["student_times_ms"]), median(race["events_ms"]["student"])
        print(
            f"    {race['axes']} K={k} student {outside:.4f} ms (events {events:.4f}, {outside / events:.4f}) "
            f"naive {median(timing['naive_times_ms']):.3f} reference {median(timing['reference_times_ms']):.4f} "
            f"ratio {timing['ratio']:.3f} [{timing['ratio_low']:.3f}, {timing['ratio_high']:.3f}] "
            f"rounds {len(timing['student_times_ms'])} empty {median(race['empty_ms']):.3f} "
            f"first {[round(one, 3) for one in race['first_ms']]} fill {median(race['fill_ms']):.2f} ms "
            f"rows {race['rows_checked']} errors {race['row_errors']} voids {race['voids']} "
            f"moved {race['moved']} {race['seconds']:.2f} s {race['stages_s']}"
        )
        for name in ("student", "naive"):
            print(f"      {name} anatomy {[round(one, 2) for one in race['anatomy_ms'][name][-1]]}")
    for roof in found["rooflines"]:
        print(
            f"    {roof['flops_per_s'] / 1e12:.1f} TFLOP/s, {roof['bytes_per_s'] / 1e9:.0f} GB/s, "
            f"{roof['bound']}-bound, {roof['fraction']:.2f} of the ceiling"
        )
    for evidence in found["evidence"]:
        print(f"    evidence {evidence}")
    for key in ("load_failure", "audit_failure"):
        if found[key]:
            print(f"    {key} {found[key]}")


def _assignment(slug: str) -> Assignment:
    return load_assignment(PROJECT / "assignments" / slug)


def grade(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Files through everything, on one warm worker."""
    files = arguments.files or [
        "flash-attention-forward/ok-raw-strides.py",
        "flash-attention-forward/ok-raw-strides.py",
        "flash-attention-forward/ok-block-pointers.py",
        "flash-attention-forward/stored-scores.py",
    ]
    with _bench(_assignment("flash-attention-forward").limits, isolation=arguments.isolation) as bench:
        for name in files:
            time.sleep(3.0)  # a warm worker has candidates ready when the next hand-in comes
            try:
                whole = arguments.out / f"examination-{name.replace('/', '-').removesuffix('.py')}.json"
                found = _grade(_assignment(name.split("/")[0]), CORPUS / name, bench, whole=whole)
            except Exception:
                traceback.print_exc()
                continue
            _print_grade(found)
            yield found


def repeat(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One file again and again, each time by fresh processes: how far the reported times and ratios lie apart."""
    file = CORPUS / "flash-attention-forward" / "ok-raw-strides.py"
    assignment = _assignment("flash-attention-forward")
    rows = []
    with _bench(assignment.limits, audit=False, isolation=arguments.isolation) as bench:
        for _ in range(arguments.times):
            time.sleep(2.0)
            found = _grade(assignment, file, bench)
            timing, race = found["timings"][0], found["races"][0]
            rows.append(
                {
                    "student_ms": median(timing["student_times_ms"]),
                    "events_ms": median(race["events_ms"]["student"]),
                    "ratio": timing["ratio"],
                    "verdict": found["verdict"],
                    "seconds": found["seconds"],
                    "lock_s": found["lock_s"],
                    "stages": found["stages"],
                    "races": found["races"],
                }
            )
            print(f"  { {key: value for key, value in rows[-1].items() if key != 'races'} }", flush=True)
    spread = {
        key: max(row[key] for row in rows) / min(row[key] for row in rows)
        for key in ("student_ms", "events_ms", "ratio")
    }
    print(f"  max/min: {spread}, median {median(row['seconds'] for row in rows):.2f} s")
    yield {"gradings": rows, "max_over_min": spread}


def clock(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The examiner's clock beside the candidate's CUDA events, for kernels from 50 us to milliseconds."""
    attention = _assignment("flash-attention-forward")
    with _bench(attention.limits, audit=False, isolation=arguments.isolation) as bench:
        for slug, file, axes in CLOCKED:
            whole = _assignment(slug)
            assert whole.speed is not None
            few = tuple(case for case in whole.cases if case.required)
            speed = dataclasses.replace(whole.speed, sizes=(axes,))
            assignment = dataclasses.replace(whole, cases=few, memory=None, speed=speed, limits=attention.limits)
            found = _grade(assignment, PROJECT / "reference" / "kernels" / file, bench)
            for race, timing in zip(found["races"], found["timings"], strict=True):
                outside_ms = median(timing["student_times_ms"])
                row = {"operation": whole.operation, "axes": race["axes"], "n_calls": race["n_calls"]["student"]}
                row |= {"outside_ms": outside_ms, "events_ms": median(race["events_ms"]["student"])}
                row |= {"outside_over_events": outside_ms / row["events_ms"], "race": race}
                print(f"  { {key: value for key, value in row.items() if key != 'race'} }", flush=True)
                yield row
            if not found["races"]:
                _print_grade(found)


CLOCKED: tuple[tuple[str, str, dict[str, int]], ...] = (
    *(
        ("flash-attention-forward", "attention.py", {"batch": batch, "queries": t, "keys": t, "head_dim": 64})
        for batch, t in ((24, 2048), (16, 4096), (16, 8192), (8, 16384), (16, 16384))
    ),
    ("online-softmax", "softmax.py", {"rows": 8192, "cols": 4096}),
    ("online-softmax", "softmax.py", {"rows": 16384, "cols": 8192}),
    ("online-softmax", "softmax.py", {"rows": 32768, "cols": 16384}),
)


def exploits(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Hostile files of tests/hostile/cases.toml (all, or --files): what each got, and what stopped it.

    Side by side on one warm worker, each with few probes and the headline size; an honest file in between, whose time
    must be what it was with nobody beside it.
    """
    assignment = _assignment("flash-attention-forward")
    assert assignment.speed is not None
    timed = dataclasses.replace(
        assignment,
        cases=tuple(assignment.case(name) for name in EXPLOIT_PROBES),
        speed=dataclasses.replace(assignment.speed, sizes=assignment.speed.sizes[:1]),
        memory=None,
    )
    metered = dataclasses.replace(timed, memory=assignment.memory, speed=None)
    cases = {case.name: case for case in hostile_cases.hostile()}
    jobs: list[hostile_cases.Hostile | None] = []  # None: the honest file
    for number, name in enumerate(arguments.files or cases):
        jobs += [None, cases[name]] if number % 8 == 4 else [cases[name]]
    honest: list[dict[str, Any]] = []
    rows = []
    gpu_examination.HEADLINE_S = 0.8  # three rounds tell what an attack gains
    warm = WarmGpu()

    def one(case: hostile_cases.Hostile | None) -> dict[str, Any] | None:
        if time.monotonic() - STARTED > arguments.stop_s:
            print(f"  not run: {case.name if case else 'honest'}")
            return None
        task = metered if case is not None and case.name == "empty_cache" else timed
        source = case.source() if case is not None else hostile_cases.BASE.read_bytes()
        began = time.monotonic()
        try:
            found = warm(task, source, lambda _stage, _fraction: None)
        except Exception:
            print(f"  {case.name if case else 'honest'}: {traceback.format_exc()}", flush=True)
            return None
        grade = grade_json(judge(task, found))
        row = {"name": "honest", "verdict": grade["verdict"], "points": grade["score"]["points"]}
        row |= {"student_ms": round(median(found.timings[0].student_times_ms), 4) if found.timings else None}
        row |= {"speedup": round(found.timings[0].ratio, 3) if found.timings else None}
        row |= {"evidence": [f"{one.kind}: {one.message}" for one in found.evidence]}
        row |= {"seconds": round(time.monotonic() - began, 1)}
        if case is not None:
            here = case.on("cuda")
            # ratios of one file lie within 1 % of each other, so points may differ by what that is worth
            best = honest[0]["points"] if task is timed else sum(task.points.values())
            row |= {"name": case.name, "tries": case.tries, "holds": here.holds, "by": case.by}
            row |= {"undeserved": hostile_cases.undeserved(here, grade, best, slack=0.5)}
            row |= {"not_as_written": hostile_cases.complaints(here, found, grade, probes=EXPLOIT_PROBES)}
            row |= {"said": hostile_cases.said(found)[:600]}
        return row

    try:
        for _ in range(2):  # the first one starts what is started once
            first = one(None)
            assert first is not None
        honest.append(first)
        print(f"  alone: {first}", flush=True)
        with ThreadPoolExecutor(warm.lanes) as lanes:
            for row in lanes.map(one, jobs):
                if row is None:
                    continue
                print("  " + " | ".join(f"{row[key]}" for key in EXPLOIT_SHOWN if key in row), flush=True)
                (honest if row["name"] == "honest" else rows).append(row)
                yield row
    finally:
        warm.close()
    times = [row["student_ms"] for row in honest]
    print(f"  undeserved points in all: {sum(row['undeserved'] for row in rows)}, of {len(rows)} files")
    print(f"  the honest file alone {times[0]} ms, beside hostile ones {times[1:]}")


EXPLOIT_PROBES = ("random", "causal", "fresh-inputs")
EXPLOIT_SHOWN = (
    *("name", "verdict", "points", "undeserved", "student_ms", "speedup", "seconds", "evidence", "not_as_written"),
)


STARTED = time.monotonic()


def sandboxes(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """How long a candidate with a CUDA context takes to get ready, and to be frozen and thawed."""
    began = time.monotonic()
    limits = _assignment("flash-attention-forward").limits
    with cuda_pool(limits, size=1, refill=False, isolation=arguments.isolation) as pool:
        sandbox = pool.take(90.0)
        ready_s = time.monotonic() - began
        began = time.monotonic()
        for _ in range(20):
            sandbox.freeze()
            sandbox.thaw()
        frozen_ms = (time.monotonic() - began) / 20 * 1e3
        sandbox.kill()
    found = {"isolation": pool.isolation.level, "ready_s": round(ready_s, 2), "freeze_thaw_ms": round(frozen_ms, 3)}
    print(f"  {found}")
    yield found


SECTIONS: dict[str, Callable[[argparse.Namespace], Iterator[dict[str, Any]]]] = {
    "environment": environment,
    "sandboxes": sandboxes,
    "ceilings": ceilings,
    "references": references,
    "grade": grade,
    "repeat": repeat,
    "clock": clock,
    "queue": queue,
    "corpus": gpu_corpus.run,
    "replay": gpu_replay.run,
    "exploits": exploits,
}

if __name__ == "__main__":
    sys.exit(main())
