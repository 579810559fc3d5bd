"""Replays on a GPU: compiled kernels of correct files and of decoys, without their Python. A section of gpu.py.

Every file is examined at its headline size alone, its required probes first, and replayed whatever it earns.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from statistics import median

PROJECT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(PROJECT), str(PROJECT / "tests" / "hostile")]

import hostile_cases  # noqa: E402
from gpu_bench import CORPUS, Row, chosen, each, opened, ran  # noqa: E402

import reference  # noqa: E402
from grader.assignment import Assignment, load_assignment  # noqa: E402
from grader.measurement import ProbeFailed, to_json  # noqa: E402
from workers.gpu_examination import GpuRecord  # noqa: E402

SLUGS = ("flash-attention-forward", "flash-attention", "fused-bias-dropout-layernorm", "online-softmax")
DECOYS = ("copies_torch",)
LANES = 4


def files() -> list[tuple[str, str, bytes]]:
    """(assignment, name, source): decoys, our own kernels, and every correct file of the corpus."""
    expected = tomllib.loads((CORPUS / "expected.toml").read_text())
    decoys = [(SLUGS[0], case.name, case.source()) for case in hostile_cases.hostile() if case.name in DECOYS]
    ours = []
    for slug in SLUGS:
        path = reference.load(load_assignment(PROJECT / "assignments" / slug).operation).kernel_file
        ours.append((slug, f"reference/{path.name}", path.read_bytes()))
    correct = [
        (row["assignment"], name, (CORPUS / name).read_bytes()) for name, row in expected.items() if "/ok-" in name
    ]
    return [*decoys, *ours, *correct]


def asked(slug: str) -> Assignment:
    """The assignment with its required probes, its headline size and a replay for everybody."""
    whole = load_assignment(PROJECT / "assignments" / slug)
    assert whole.speed is not None
    return dataclasses.replace(
        whole,
        cases=tuple(case for case in whole.cases if case.required),
        memory=None,
        speed=dataclasses.replace(whole.speed, sizes=whole.speed.sizes[:1], replay="always"),
        limits=load_assignment(PROJECT / "assignments" / SLUGS[0]).limits,
    )


def run(arguments: argparse.Namespace) -> Iterator[Row]:
    """Examine and replay. Prints a line a file."""
    every = files()
    picked = chosen((name for _, name, _ in every), arguments.files)
    todo = [file for file in every if file[1] in picked]
    limits = asked(SLUGS[0]).limits
    with opened(limits, candidates=4, compilers=3, interpreters=2, isolation=arguments.isolation) as bench:

        def examine(file: tuple[str, str, bytes]) -> Row:
            slug, _, source = file
            noted = GpuRecord()
            found = bench.examine(asked(slug), source, compiling=2, record=noted)
            return {
                "replay": to_json(found.replay),
                "graded_ms": [median(one.student_times_ms) for one in found.timings],
                "graded_ratio": [one.ratio for one in found.timings],
                "evidence": to_json(found.evidence),
                "large_calls": to_json(found.large_calls),
                "failures": [str(one.failure.message)[:300] for one in found.probes if isinstance(one, ProbeFailed)],
                "load_failure": to_json(found.load_failure),
                "seconds": {name: round(value, 2) for name, value in noted.seconds.items()},
            }

        def named(file: tuple[str, str, bytes]) -> Row:
            return {"assignment": file[0], "file": file[1]}

        for row in each(todo, examine, name=named, stop_at=arguments.stop_at, lanes=LANES):
            yield row  # first, so that it is written whatever becomes of the line
            if ran([row]):
                _print(row)


def _print(row: Row) -> None:
    replay = row["replay"]
    if replay is None:
        said = f"not replayed: {row['load_failure'] or row['failures'][:1] or row['large_calls'] or 'not timed'}"
    else:
        times = f", {replay['time_ms']:.4f} ms, graded {row['graded_ms'][0]:.4f}" if replay["time_ms"] else ""
        ratios = f", ratio {replay['ratio']:.3f} / {row['graded_ratio'][0]:.3f}" if replay["ratio"] else ""
        said = f"{replay['outcome']}{times}{ratios}; {replay['n_launches']} launches, torch {replay['torch_ops']}"
        said += f", left out {replay['left_out']}" if replay["left_out"] else ""
        said += f" ({replay['detail'][:160]})" if replay["detail"] else ""
    print(f"  {row['assignment']} {row['file']}: {said} {row['seconds'].get('replay', 0):.2f} s", flush=True)
    for sign in row["evidence"]:
        print(f"      {sign['kind']}: {sign['message'][:200]}", flush=True)
