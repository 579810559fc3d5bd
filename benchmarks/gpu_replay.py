"""Replays on a GPU: compiled kernels of correct files and of decoys, without their Python. A section of gpu.py.

Every file is examined at its headline size alone, its required probes first, and replayed whatever it earns.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import time
import tomllib
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from statistics import median
from typing import Any

PROJECT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(PROJECT), str(PROJECT / "tests" / "hostile")]

import hostile_cases  # noqa: E402

import reference  # noqa: E402
from grader.assignment import Assignment, load_assignment  # noqa: E402
from grader.measurement import to_json  # noqa: E402

CORPUS = PROJECT / "tests" / "corpus"
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


def run(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Examine and replay. Prints a line a file."""
    from workers.ahead import ahead_pool
    from workers.devices.cpu import interpreter_pool
    from workers.devices.cuda import Gpu, cuda_pool
    from workers.gpu_examination import Ahead, GpuRecord, Rivals, examine_on_gpu

    began = time.monotonic()
    chosen = [row for row in files() if not arguments.files or any(part in row[1] for part in arguments.files)]
    limits = asked(SLUGS[0]).limits
    with contextlib.ExitStack() as stack:
        compilers = stack.enter_context(ahead_pool(limits, size=3, isolation=arguments.isolation))
        candidates = stack.enter_context(cuda_pool(limits, size=4, isolation=arguments.isolation))
        interpreter = stack.enter_context(interpreter_pool(limits, size=2, isolation=arguments.isolation))
        gpu = Gpu()
        stack.callback(gpu.close)
        rivals = Rivals(gpu, candidates)
        stack.callback(rivals.close)

        def examine(slug: str, name: str, source: bytes) -> dict[str, Any] | None:
            if time.monotonic() - began > arguments.stop_s:
                return None
            noted = GpuRecord()
            found = examine_on_gpu(
                asked(slug),
                source,
                gpu=gpu,
                sandboxes=candidates,
                interpreter=interpreter,
                rivals=rivals,
                ahead=Ahead(sandboxes=compilers, n_candidates=2, budget_s=60.0),
                record=noted,
            )
            return {
                "assignment": slug,
                "file": name,
                "replay": to_json(found.replay),
                "graded_ms": [median(one.student_times_ms) for one in found.timings],
                "graded_ratio": [one.ratio for one in found.timings],
                "evidence": to_json(found.evidence),
                "large_calls": to_json(found.large_calls),
                "failures": [str(one.failure.message)[:300] for one in found.probes if hasattr(one, "failure")],
                "load_failure": to_json(found.load_failure),
                "seconds": {name: round(value, 2) for name, value in noted.seconds.items()},
            }

        lanes = stack.enter_context(ThreadPoolExecutor(max_workers=LANES, thread_name_prefix="replay"))
        later = {lanes.submit(examine, *row): row[1] for row in chosen}
        for done in as_completed(later):
            try:
                row = done.result()
            except Exception:
                traceback.print_exc()
                continue
            if row is None:
                print(f"  not run: {later[done]}")
                continue
            _print(row)
            yield row


def _print(row: dict[str, Any]) -> None:
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
