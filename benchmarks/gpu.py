"""Measures the GPU examiner on the GPU at hand, prints tables and appends the same numbers to FOLDER/rows.jsonl.

    python benchmarks/gpu.py [--only SECTION ...] [--stop-s SECONDS] [--files PART ...] [--out FOLDER]

Without --only all sections run, in the order of the help. --stop-s counts from each section's start: nothing of it
begins later, what is under way ends, and what did not begin is a row that says so.
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
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

PROJECT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(PROJECT), str(PROJECT / "tests" / "hostile")]

import gpu_corpus  # noqa: E402
import gpu_replay  # noqa: E402
import hostile_cases  # noqa: E402
import torch  # noqa: E402
from gpu_bench import CORPUS, Bench, Row, Section, chosen, each, held_s, opened, ran, run_sections  # noqa: E402

from grader.assignment import Assignment, load_assignment  # noqa: E402
from grader.judging import grade_json, judge  # noqa: E402
from grader.measurement import Ceilings, ProbeMeasured, to_json  # noqa: E402
from grader.roofline import roofline  # noqa: E402
from workers import gpu_examination  # noqa: E402
from workers.ceilings import measure as measure_ceilings  # noqa: E402
from workers.gpu_examination import GpuRecord, WarmGpu  # noqa: E402
from workers.gpu_timing import Race, Size  # noqa: E402

FORWARD = "flash-attention-forward"
HONEST = f"{FORWARD}/ok-raw-strides.py"
GRADED = (HONEST, HONEST, f"{FORWARD}/ok-block-pointers.py", f"{FORWARD}/stored-scores.py")


def main() -> int:
    """Run the sections asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(SECTIONS), choices=list(SECTIONS))
    parser.add_argument("--out", type=Path, default=PROJECT / "artifacts" / "gpu")
    parser.add_argument("--files", nargs="*", default=[], help="parts of names: of grade, corpus, replay and exploits")
    parser.add_argument("--times", type=int, default=10, help="gradings of repeat, and of queue beside its lanes")
    parser.add_argument("--alone", type=int, default=2, help="gradings of queue with nothing beside them")
    parser.add_argument("--stop-s", type=float, default=3600.0, help="for each section, from its start")
    parser.add_argument("--brief", action="store_true", help="faulty files of the corpus where they must fail, no more")
    parser.add_argument("--dtypes", nargs="*", default=list(gpu_corpus.DTYPES), choices=gpu_corpus.DTYPES)
    parser.add_argument("--isolation", default="auto", choices=["auto", "none"])
    arguments = parser.parse_args()
    print(json.dumps(run_sections({name: SECTIONS[name] for name in arguments.only}, arguments)))
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

    for row in compare(stop_s=arguments.stop_s):
        yield row
        print("  " + told(row), flush=True)


# -- grading ----------------------------------------------------------------------------------------------------------


def _compilers() -> int:
    return max(1, min(8, (os.cpu_count() or 2) // 2))


@contextlib.contextmanager
def _warm(arguments: argparse.Namespace, *, audited: bool) -> Iterator[tuple[Bench, Ceilings]]:
    """A warm worker, and what its GPU can do."""
    limits = _assignment(FORWARD).limits
    with opened(
        limits, candidates=3, compilers=_compilers(), interpreters=int(audited), isolation=arguments.isolation
    ) as bench:
        yield bench, measure_ceilings()


def _grade(
    assignment: Assignment, file: Path, bench: Bench, ceilings: Ceilings, *, whole: Path | None = None
) -> dict[str, Any]:
    record = GpuRecord()
    began = time.monotonic()
    examination = bench.examine(assignment, file.read_bytes(), compiling=_compilers(), ceilings=ceilings, record=record)
    seconds = time.monotonic() - began
    grade = grade_json(judge(assignment, examination))
    found: dict[str, Any] = {
        "file": str(file.relative_to(PROJECT)).removeprefix("tests/corpus/"),
        "verdict": grade["verdict"],
        "fault": grade["fault"],
        "score": grade["score"],
        "seconds": round(seconds, 3),
        "lock_s": round(held_s(examination), 3),
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
                ceilings=ceilings,
            )
        )
        for timing in examination.timings
    ]
    found["timings"] = to_json(examination.timings)
    return found


def queue(arguments: argparse.Namespace) -> Iterator[Row]:
    """A full queue on one warm worker, audits included: gradings an hour, and what one lane disturbs another."""
    source = (CORPUS / HONEST).read_bytes()
    assignment = _assignment(FORWARD)
    warm = WarmGpu()
    rows: list[Row] = []

    def grade_one(number: int) -> Row:
        if number < 0:
            time.sleep(4.0)  # candidates are ready, and nothing is beside it
        record = GpuRecord()
        began = time.monotonic()
        examination = warm(assignment, source, lambda _stage, _fraction: None, record)
        assert examination.gpu is not None
        return {
            "verdict": judge(assignment, examination).verdict.value,
            "ended": time.monotonic(),
            "seconds": time.monotonic() - began,
            "lock_s": examination.gpu.held_s,
            "idle_s": examination.gpu.idle_s,
            "student_ms": [median(timing.student_times_ms) for timing in examination.timings],
            "ratio": [timing.ratio for timing in examination.timings],
            "stages": dict(record.seconds),
            "races": [_race(*one) for one in record.races],
        }

    try:
        warm.warm_up(assignment)
        for numbers, lanes in ((range(-arguments.alone, 0), 1), (range(arguments.times + warm.lanes), warm.lanes)):
            for row in each(
                numbers, grade_one, name=lambda number: {"number": number}, stop_at=arguments.stop_at, lanes=lanes
            ):
                rows.append(row)
                yield row
                print(f"  { {key: value for key, value in row.items() if key != 'races'} }", flush=True)
    finally:
        warm.close()
    found = queue_summary(ran(rows), lanes=warm.lanes)
    yield {"summary": found}
    print(f"  {found}", flush=True)


def queue_summary(rows: Sequence[Row], *, lanes: int) -> dict[str, Any]:
    """Gradings an hour and spreads of a full queue; what too few gradings cannot tell is left out.

    Args:
        rows: of `queue`; those with a negative number had nothing beside them.
        lanes: the last gradings, one less than these, had no successor and count no more.
    """
    alone = [row for row in rows if row["number"] < 0]
    full = sorted((row for row in rows if row["number"] >= 0), key=lambda row: row["ended"])[1:]  # it found none before
    steady = full[: max(0, len(full) - lanes + 1)]
    found: dict[str, Any] = {"alone": len(alone), "steady": len(steady)}
    if len(steady) >= 2:
        found["an_hour"] = 3600 * (len(steady) - 1) / (steady[-1]["ended"] - steady[0]["ended"])
    for name, some in (("alone", alone), ("full", steady)):
        for key in ("seconds", "lock_s", "idle_s") if some else ():
            values = [row[key] for row in some]
            found[f"{name}_{key}"] = {"least": min(values), "median": median(values), "most": max(values)}
    timed = [row for row in (*alone, *steady) if row["student_ms"]]
    for key in ("student_ms", "ratio") if timed else ():
        headline = [row[key][0] for row in timed]
        found[f"{key}_max_over_min"] = max(headline) / min(headline)
    quiet, busy = ([row["student_ms"][0] for row in some if row["student_ms"]] for some in (alone, steady))
    if quiet and busy:
        found["busy_over_quiet"] = median(busy) / median(quiet)
    return found


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
            f"naive {median(timing['naive_times_ms']):.3f} reference {_middle(timing['reference_times_ms'])} "
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


def _middle(times_ms: Sequence[float]) -> str:
    """The median; of a reference that does not run there is none."""
    return f"{median(times_ms):.4f}" if times_ms else "-"


def _assignment(slug: str) -> Assignment:
    return load_assignment(PROJECT / "assignments" / slug)


def grade(arguments: argparse.Namespace) -> Iterator[Row]:
    """Files through everything, on one warm worker."""
    every = (str(path.relative_to(CORPUS)) for path in sorted(CORPUS.glob("*/*.py")) if path.parent.name != "hostile")
    names = chosen(every, arguments.files) if arguments.files else list(GRADED)
    with _warm(arguments, audited=True) as (bench, ceilings):

        def one(name: str) -> Row:
            time.sleep(3.0)  # a warm worker has candidates ready when the next hand-in comes
            whole = arguments.out / f"examination-{name.replace('/', '-').removesuffix('.py')}.json"
            return _grade(_assignment(name.split("/")[0]), CORPUS / name, bench, ceilings, whole=whole)

        for row in each(names, one, name=lambda name: {"file": name}, stop_at=arguments.stop_at):
            yield row
            if ran([row]):
                _print_grade(row)


def repeat(arguments: argparse.Namespace) -> Iterator[Row]:
    """One file again and again, each time by fresh processes: how far the reported times and ratios lie apart."""
    assignment = _assignment(FORWARD)
    rows: list[Row] = []
    with _warm(arguments, audited=False) as (bench, ceilings):

        def one(_number: int) -> Row:
            time.sleep(2.0)
            found = _grade(assignment, CORPUS / HONEST, bench, ceilings)
            headline = {
                "student_ms": [median(timing["student_times_ms"]) for timing in found["timings"][:1]],
                "events_ms": [median(race["events_ms"]["student"]) for race in found["races"][:1]],
                "ratio": [timing["ratio"] for timing in found["timings"][:1]],
            }
            return headline | {key: found[key] for key in ("verdict", "seconds", "lock_s", "stages", "races")}

        numbers = range(arguments.times)
        for row in each(numbers, one, name=lambda number: {"number": number}, stop_at=arguments.stop_at):
            rows.append(row)
            yield row
            print(f"  { {key: value for key, value in row.items() if key != 'races'} }", flush=True)
    found = {}
    for key in ("student_ms", "events_ms", "ratio"):
        if values := [value for row in ran(rows) for value in row[key]]:
            found[f"{key}_max_over_min"] = max(values) / min(values)
    yield {"summary": found | {"gradings": len(ran(rows))}}
    print(f"  {found} in {len(ran(rows))} gradings", flush=True)


def clock(arguments: argparse.Namespace) -> Iterator[Row]:
    """The examiner's clock beside the candidate's CUDA events, for kernels from 50 us to milliseconds."""
    limits = _assignment(FORWARD).limits
    with _warm(arguments, audited=False) as (bench, ceilings):

        def one(asked: tuple[str, str, dict[str, int]]) -> Row:
            slug, file, axes = asked
            whole = _assignment(slug)
            assert whole.speed is not None
            few = tuple(case for case in whole.cases if case.required)
            speed = dataclasses.replace(whole.speed, sizes=(axes,))
            assignment = dataclasses.replace(whole, cases=few, memory=None, speed=speed, limits=limits)
            found = _grade(assignment, PROJECT / "reference" / "kernels" / file, bench, ceilings)
            if not found["races"]:
                return {"not_timed": found}
            (race,), (timing,) = found["races"], found["timings"]
            outside_ms, events_ms = median(timing["student_times_ms"]), median(race["events_ms"]["student"])
            return {
                "n_calls": race["n_calls"]["student"],
                "outside_ms": outside_ms,
                "events_ms": events_ms,
                "outside_over_events": outside_ms / events_ms,
                "race": race,
            }

        def named(asked: tuple[str, str, dict[str, int]]) -> Row:
            return {"slug": asked[0], "axes": asked[2]}

        for row in each(CLOCKED, one, name=named, stop_at=arguments.stop_at):
            yield row
            print(f"  { {key: value for key, value in row.items() if key != 'race'} }"[:2000], flush=True)


CLOCKED: tuple[tuple[str, str, dict[str, int]], ...] = (
    *(
        ("flash-attention-forward", "attention.py", {"batch": batch, "queries": t, "keys": t, "head_dim": 64})
        for batch, t in ((24, 2048), (16, 4096), (16, 8192), (8, 16384), (16, 16384))
    ),
    ("online-softmax", "softmax.py", {"rows": 8192, "cols": 4096}),
    ("online-softmax", "softmax.py", {"rows": 16384, "cols": 8192}),
    ("online-softmax", "softmax.py", {"rows": 32768, "cols": 16384}),
)


def exploits(arguments: argparse.Namespace) -> Iterator[Row]:
    """Hostile files of tests/hostile/cases.toml: what each got, and what stopped it.

    Side by side on one warm worker, each with few probes and the headline size; an honest file in between, whose time
    must be what it was with nobody beside it. That one is graded first, twice, however little time there is.
    """
    assignment = _assignment(FORWARD)
    assert assignment.speed is not None
    timed = dataclasses.replace(
        assignment,
        cases=tuple(assignment.case(name) for name in EXPLOIT_PROBES),
        speed=dataclasses.replace(assignment.speed, sizes=assignment.speed.sizes[:1]),
        memory=None,
        limits=dataclasses.replace(assignment.limits, call_s=gpu_corpus.CALL_S),
    )
    metered = dataclasses.replace(timed, memory=assignment.memory, speed=None)
    cases = {case.name: case for case in hostile_cases.hostile()}
    jobs: list[hostile_cases.Hostile | None] = []  # None: the honest file
    for number, name in enumerate(chosen(cases, arguments.files)):
        jobs += [None, cases[name]] if number % 8 == 4 else [cases[name]]
    best: float | None = None  # points of the honest file
    rows: list[Row] = []
    warm = WarmGpu()

    def one(case: hostile_cases.Hostile | None) -> Row:
        task = metered if case is not None and case.memory else timed
        source = case.source() if case is not None else hostile_cases.BASE.read_bytes()
        began = time.monotonic()
        found = warm(task, source, lambda _stage, _fraction: None)
        grade = grade_json(judge(task, found))
        row = {"verdict": grade["verdict"], "points": grade["score"]["points"]}
        row |= {"student_ms": round(median(found.timings[0].student_times_ms), 4) if found.timings else None}
        row |= {"speedup": round(found.timings[0].ratio, 3) if found.timings else None}
        row |= {"evidence": [f"{one.kind}: {one.message}" for one in found.evidence]}
        row |= {"seconds": round(time.monotonic() - began, 1)}
        if case is not None:
            here = case.on("cuda")
            # ratios of one file lie within 1 % of each other, so points may differ by what that is worth
            most = best if task is timed else sum(task.points.values())
            row |= {"tries": case.tries, "holds": here.holds, "by": case.by}
            row |= {"undeserved": None if most is None else hostile_cases.undeserved(here, grade, most, slack=0.5)}
            row |= {"not_as_written": hostile_cases.complaints(here, found, grade, probes=EXPLOIT_PROBES)}
            row |= {"said": hostile_cases.said(found)[:600]}
        return row

    def named(case: hostile_cases.Hostile | None) -> Row:
        return {"name": case.name if case is not None else "honest"}

    def graded(some: Sequence[hostile_cases.Hostile | None], *, lanes: int, stop_at: float) -> Iterator[Row]:
        for row in each(some, one, name=named, stop_at=stop_at, lanes=lanes):
            rows.append(row)
            yield row
            print("  " + " | ".join(f"{row[key]}" for key in EXPLOIT_SHOWN if key in row), flush=True)

    headline_s, gpu_examination.HEADLINE_S = gpu_examination.HEADLINE_S, 0.8  # three rounds tell what an attack gains
    try:
        yield from graded([None, None], lanes=1, stop_at=float("inf"))
        best = next((row["points"] for row in reversed(ran(rows))), None)  # the first one starts what is started once
        yield from graded(jobs, lanes=warm.lanes, stop_at=arguments.stop_at)
    finally:
        gpu_examination.HEADLINE_S = headline_s
        warm.close()
    hostile = [row for row in ran(rows) if row["name"] != "honest"]
    honest_ms = [row["student_ms"] for row in ran(rows) if row["name"] == "honest"]
    found = {"files": len(hostile), "of": sum(case is not None for case in jobs)}
    found |= {"undeserved": sum(row["undeserved"] or 0 for row in hostile)}
    found |= {"not_as_written": sum(bool(row["not_as_written"]) for row in hostile)}
    yield {"summary": found | {"honest_ms": honest_ms}}
    print(f"  {found}; the honest file alone {honest_ms[:2]} ms, beside hostile ones {honest_ms[2:]}", flush=True)


EXPLOIT_PROBES = ("random", "causal", "fresh-inputs")
EXPLOIT_SHOWN = (
    *("name", "verdict", "points", "undeserved", "student_ms", "speedup", "seconds", "evidence", "not_as_written"),
)


def sandboxes(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """How long a candidate with a CUDA context takes to get ready, and to be frozen and thawed."""
    from workers.devices.cuda import cuda_pool

    began = time.monotonic()
    limits = _assignment(FORWARD).limits
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


SECTIONS: dict[str, Section] = {
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
