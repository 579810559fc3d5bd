"""The whole corpus on a GPU: numerics, memory and structure, without timing. A section of benchmarks/gpu.py.

Correct files are examined in float32, float16 and bfloat16, files with a planted fault in float32. Several files are
compiled and audited at a time; the GPU answers one at a time, under its lock. Each answer is held against
tests/corpus/expected.toml; `complaints` says in what it differs.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gpu_bench import CORPUS, PROJECT, chosen, each, held_s, opened, ran

sys.path.append(str(PROJECT / "tests"))

from in_dtype import in_dtype

from grader.assignment import Assignment, load_assignment
from grader.judging import grade_json, judge
from grader.measurement import Examination, to_json
from workers.gpu_examination import GpuRecord

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


def jobs(parts: list[str], dtypes: list[str], *, brief: bool = False) -> list[Job]:
    """What to examine, what takes longest first. `parts` are of names; none chooses all but the hostile ones."""
    expected: Mapping[str, Want] = tomllib.loads((CORPUS / "expected.toml").read_text())
    found = [
        Job(name, dtype, expected[name], brief and "/ok-" not in name)
        for name in chosen(expected, parts)
        if not name.startswith("hostile/")
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
    began = time.monotonic()
    todo = jobs(arguments.files, arguments.dtypes, brief=arguments.brief)
    if not todo:
        return
    limits = todo[0].assignment().limits
    with opened(limits, candidates=4, compilers=3, interpreters=2, isolation=arguments.isolation) as bench:

        def examine(job: Job) -> dict[str, Any]:
            started, record = time.monotonic(), GpuRecord()
            assignment = job.assignment()
            source = (CORPUS / job.name).read_bytes()
            examination = bench.examine(
                assignment, source, compiling=1, budget_s=100.0, audited=job.needs_audit, record=record
            )
            seconds = {"all": time.monotonic() - started, "lock": held_s(examination), **record.seconds}
            return _row(job, examination, grade_json(judge(assignment, examination)), seconds)

        rows = []
        for row in each(todo, examine, name=named, stop_at=arguments.stop_at, lanes=LANES):
            rows.append(row)
            yield row  # first, so that it is written whatever becomes of the line
            if row.get("complaints"):
                _print(row)
    print(summary(rows, time.monotonic() - began), flush=True)


def named(job: Job) -> dict[str, Any]:
    """What a row is about."""
    return {"file": job.name, "dtype": job.dtype}


def summary(rows: list[dict[str, Any]], seconds: float) -> str:
    """How many answers of each kind are the expected ones. What failed for a reason of ours is none of them."""
    lines = []
    for dtype in DTYPES:
        for kind in ("ok", "planted"):
            these = [row for row in rows if row["dtype"] == dtype and ("/ok-" in row["file"]) == (kind == "ok")]
            if examined := [row for row in these if "not_run" not in row]:
                right = sum(row.get("complaints") == [] for row in examined)
                lines.append(f"  {dtype:9} {kind:8} {right:3} of {len(examined):3} as expected, of {len(these)}")
    held = [row["file"] for row in rows if row.get("verdict") == "held"]
    failed = [row["file"] for row in rows if "error" in row]
    lines.append(f"  held: {', '.join(held) or 'none'}; failures of ours: {', '.join(failed) or 'none'}")
    lines.append(f"  {len(ran(rows))} examinations of {len(rows)} in {seconds:.0f} s")
    return "\n".join(lines)


def _row(job: Job, examination: Examination, grade: Mapping[str, Any], seconds: Mapping[str, float]) -> dict[str, Any]:
    wrong = [probe for probe in grade["probes"] if probe["verdict"] != "pass"]
    failures = [run.failure for run in examination.probes if hasattr(run, "failure")]
    return {
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
