"""The whole corpus on a GPU: numerics, memory and structure, without timing. A section of benchmarks/gpu.py.

Correct files are examined in float32, float16 and bfloat16, files with a planted fault in float32. Several files are
compiled and audited at a time; the GPU answers one at a time, under its lock. Each answer is held against
tests/corpus/expected.toml; `complaints` says in what it differs.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import time
import tomllib
import traceback
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grader.assignment import Assignment, in_dtype, load_assignment
from grader.judging import grade_json, judge
from grader.measurement import Examination, to_json

PROJECT = Path(__file__).resolve().parents[1]
CORPUS = PROJECT / "tests" / "corpus"
DTYPES = ("float32", "float16", "bfloat16")
AXES = ("numerics", "memory", "structure")
LANES = 9  # files under way at once, each compiling on one core
CALL_S = 6.0  # of one call: what hangs holds the GPU for so long

Want = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Job:
    """One file in one dtype."""

    name: str
    dtype: str
    want: Want
    brief: bool = False  # only the probes where the fault must show, and those that are required

    @property
    def correct(self) -> bool:
        return "/ok-" in self.name

    @property
    def needs_audit(self) -> bool:
        asks = self.want["structure"] == "fail" or "race" in self.want["fault"] or self.want["fault"] == "prints-flood"
        return not self.brief or asks

    def assignment(self) -> Assignment:
        """Asked in that dtype, without a race."""
        found = in_dtype(load_assignment(PROJECT / "assignments" / self.want["assignment"]), self.dtype)
        if self.brief:
            shown = tuple(case for case in found.cases if case.required or case.name in self.want["probes"])
            memory = found.memory if self.want["memory"] == "fail" else None
            found = dataclasses.replace(found, cases=shown, memory=memory)
        return dataclasses.replace(found, speed=None, limits=dataclasses.replace(found.limits, call_s=CALL_S))


def jobs(chosen: list[str], dtypes: list[str], *, brief: bool = False) -> list[Job]:
    """What to examine, what takes longest first. `chosen` are parts of names; none chooses all but the hostile ones."""
    expected: Mapping[str, Want] = tomllib.loads((CORPUS / "expected.toml").read_text())
    found = [
        Job(name, dtype, want, brief and "/ok-" not in name)
        for name, want in expected.items()
        if not name.startswith("hostile/") and (not chosen or any(part in name for part in chosen))
        for dtype in dtypes
        if dtype == "float32" or "/ok-" in name
    ]
    return sorted(found, key=lambda job: (job.want["assignment"] != "flash-attention", not job.correct))


def complaints(job: Job, grade: Mapping[str, Any]) -> list[str]:
    """In what a grade differs from what expected.toml says about a GPU; nothing when it is right."""
    want, verdict = job.want, grade["verdict"]
    axes = {name: axis["verdict"] for name, axis in grade["axes"].items()}
    failed = {probe["name"] for probe in grade["probes"] if probe["verdict"] != "pass"}
    if job.correct:
        score = grade["score"]
        lost = [name for name, said in axes.items() if said != "pass"]
        found = [f"lost {name}" for name in lost] + [f"failed {name}" for name in sorted(failed)]
        if verdict != "full" or grade["fault"] or score["points"] < score["out_of"]:
            found.append(f"{verdict} {grade['fault']} {score['points']:g} of {score['out_of']:g}")
        return found
    words = {want.get("gpu_verdict", want["verdict"]), *(() if "gpu_verdict" in want else want.get("accept", ()))}
    if "full" in words or (want["verdict"] == "wrong" and want["numerics"] == "pass"):
        words.add("partial")
    found = [] if verdict in words else [f"{verdict}, not {' or '.join(sorted(words))}"]
    # its name takes all probes to tell
    if not job.brief and grade["fault"] != want["fault"]:
        found.append(f"named {grade['fault'] or 'nothing'}")
    probes = {probe["name"] for probe in grade["probes"]}
    found += [f"{name} passes" for name in want["probes"] if name in probes - failed]
    if not want.get("gpu_only") and verdict not in ("error", "limit", "full"):
        axes = {name: said for name, said in axes.items() if said != "not_run" or not job.brief}
        answered = {name: axes[name] for name in AXES if want[name] != "na" and name in axes}
        found += [f"{name} {said}, not {want[name]}" for name, said in answered.items() if said != want[name]]
    return found


def run(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Examine all of it. Prints a line for each answer that is not the expected one, and how many there were."""
    from workers.ahead import ahead_pool
    from workers.devices.cpu import interpreter_pool
    from workers.devices.cuda import Gpu, cuda_pool
    from workers.gpu_examination import Ahead, GpuRecord, examine_on_gpu

    began = time.monotonic()
    todo = jobs(arguments.files, arguments.dtypes, brief=arguments.brief)
    limits = todo[0].assignment().limits
    with contextlib.ExitStack() as stack:
        compilers = stack.enter_context(ahead_pool(limits, size=3, isolation=arguments.isolation))
        candidates = stack.enter_context(cuda_pool(limits, size=4, isolation=arguments.isolation))
        interpreter = stack.enter_context(interpreter_pool(limits, size=2, isolation=arguments.isolation))
        gpu = Gpu()
        stack.callback(gpu.close)

        def examine(job: Job) -> dict[str, Any] | None:
            if time.monotonic() - began > arguments.stop_s:
                return None
            started, record = time.monotonic(), GpuRecord()
            assignment = job.assignment()
            examination = examine_on_gpu(
                assignment,
                (CORPUS / job.name).read_bytes(),
                gpu=gpu,
                sandboxes=candidates,
                interpreter=interpreter if job.needs_audit else None,
                ahead=Ahead(sandboxes=compilers, n_candidates=1, budget_s=100.0),
                record=record,
            )
            grade = grade_json(judge(assignment, examination))
            seconds = {"all": time.monotonic() - started, "lock": record.lock_s, **record.seconds}
            return _row(job, examination, grade, seconds)

        lanes = stack.enter_context(ThreadPoolExecutor(max_workers=LANES, thread_name_prefix="corpus"))
        later = {lanes.submit(examine, job): job for job in todo}
        rows, not_run = [], []
        for done in as_completed(later):
            job = later[done]
            try:
                row = done.result()
            except Exception:
                traceback.print_exc()
                row = {"file": job.name, "dtype": job.dtype, "complaints": ["the grader failed"], "verdict": "-"}
            if row is None:
                not_run.append(job)
                continue
            rows.append(row)
            if row["complaints"]:
                _print(row)
            yield row
    print(summary(rows, not_run, time.monotonic() - began), flush=True)


def summary(rows: list[dict[str, Any]], not_run: list[Job], seconds: float) -> str:
    """How many answers of each kind are the expected ones."""
    lines = []
    for dtype in DTYPES:
        for kind in ("ok", "planted"):
            these = [row for row in rows if row["dtype"] == dtype and ("/ok-" in row["file"]) == (kind == "ok")]
            if these:
                right = sum(not row["complaints"] for row in these)
                lines.append(f"  {dtype:9} {kind:8} {right:3} of {len(these):3} as expected")
    if not_run:
        lines.append(f"  not run: {', '.join(f'{job.name} {job.dtype}' for job in not_run)}")
    held = [row["file"] for row in rows if row["verdict"] == "held"]
    lines.append(f"  held: {', '.join(held) or 'none'}; {len(rows)} examinations in {seconds:.0f} s")
    return "\n".join(lines)


def _row(job: Job, examination: Examination, grade: Mapping[str, Any], seconds: Mapping[str, float]) -> dict[str, Any]:
    wrong = [probe for probe in grade["probes"] if probe["verdict"] != "pass"]
    failures = [run.failure for run in examination.probes if hasattr(run, "failure")]
    return {
        "file": job.name,
        "dtype": job.dtype,
        "verdict": grade["verdict"],
        "fault": grade["fault"],
        "complaints": complaints(job, grade),
        "axes": grade["axes"],
        "wrong": wrong,
        "errors": {
            run.name: {output.name: [output.rel_error, output.limit] for output in run.outputs}
            for run in examination.probes
            if hasattr(run, "outputs")
        },
        "memory": to_json(examination.memory),
        "device_fault": to_json(examination.device_fault),
        "failures": [to_json(failure) for failure in failures[:2]],
        "load_failure": to_json(examination.load_failure),
        "audit_failure": to_json(examination.audit_failure),
        "evidence": to_json(examination.evidence),
        "hint": grade["hint"],
        "said": list(grade["diagnosis"]["evidence"]),
        "stderr": examination.stderr[-400:],
        "seconds": {name: round(value, 2) for name, value in seconds.items()},
    }


def _print(row: dict[str, Any]) -> None:
    print(f"  {row['file']} {row['dtype']}: {'; '.join(row['complaints'])}", flush=True)
    for probe in row.get("wrong", [])[:3]:
        print(f"      {probe['name']} {probe.get('faults')} {row['errors'].get(probe['name'])}")
    for key in ("load_failure", "audit_failure", "failures", "evidence", "device_fault"):
        if row.get(key):
            print(f"      {key} {str(row[key])[:300]}")
