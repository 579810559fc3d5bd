"""`python -m workers COMMAND`: what the service's commands start, because the service itself has no torch.

Every command prints one JSON object on standard output. `{"error": {...}}` and exit status 2 say that nothing could be
examined; progress goes to standard error, one JSON object a line.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any, Literal

from grader.assignment import Assignment, load_assignment
from grader.errors import AssignmentError, GraderFault, UserError
from grader.measurement import Examination, to_json


def main(argv: list[str] | None = None) -> int:
    """Run one command. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m workers", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    grade = commands.add_parser("grade", help="examine one file")
    grade.add_argument("file", type=Path)
    grade.add_argument("--assignment", type=Path, required=True, help="the assignment's folder")
    grade.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    grade.add_argument("--no-sandbox", action="store_true", help="run without isolation; the examination says so")
    grade.add_argument("--seed", type=int, default=None)
    grade.add_argument("--replay", action="store_true", help="run its compiled kernels without its Python too")
    kernel = commands.add_parser("reference", help="the reference kernel of an operation, as a hand-in")
    kernel.add_argument("operation")
    mistakes = commands.add_parser("mistakes", help="the known mistakes of an operation")
    mistakes.add_argument("operation")
    commands.add_parser("gpus", help="the GPUs of this host")
    check = commands.add_parser("check", help="try whether this host may grade")
    check.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    check.add_argument("--gpu", type=int, default=0, help="number of the GPU")
    check.add_argument("--in-use", action="store_true", help="a worker of ours is on that GPU")
    check.add_argument("--allow-reduced", action="store_true", help="walls that few hosts can build may be missing")
    check.add_argument("--hidden", action="append", default=[], help="a path that no candidate may read")
    check.add_argument("--pools", type=Path, help="an assignment's folder: start one candidate of every kind for it")
    arguments = parser.parse_args(argv)
    try:
        answer = _COMMANDS[arguments.command](arguments)
    except (UserError, AssignmentError, GraderFault) as exc:
        json.dump({"error": {"kind": type(exc).__name__, "message": str(exc)}}, sys.stdout)
        return 2
    json.dump(answer, sys.stdout, allow_nan=False)
    sys.stdout.write("\n")
    return 0


def _grade(arguments: argparse.Namespace) -> dict[str, Any]:
    assignment = load_assignment(arguments.assignment)
    try:
        source = arguments.file.read_bytes()
    except OSError as exc:
        raise UserError(f"{arguments.file}: {exc.strerror}") from None
    if arguments.replay:
        assignment = _with_replay(assignment, arguments.device)
    # torch takes seconds to import; a wrong path or assignment is said at once
    from workers.compiling import compile_pool
    from workers.devices.cpu import interpreter_pool
    from workers.examination import examine
    from workers.sandbox import SandboxUnavailable

    isolation: Literal["auto", "none"] = "none" if arguments.no_sandbox else "auto"
    try:
        if arguments.device == "cuda":
            on_gpu = _grade_on_gpu(assignment, source, isolation, arguments.seed)
            return {"examination": to_json(on_gpu)}
        with (
            interpreter_pool(assignment.limits, size=2, refill=False, isolation=isolation) as sandboxes,
            compile_pool(assignment.limits, size=1, refill=False, isolation=isolation) as compilers,
        ):
            examination = examine(
                assignment,
                source,
                sandboxes=sandboxes,
                compilers=compilers,
                seed=arguments.seed,
                progress=_print_progress,
            )
    except SandboxUnavailable as exc:
        raise UserError(str(exc)) from None
    return {"examination": to_json(examination)}


def _with_replay(assignment: Assignment, device: str) -> Assignment:
    if device != "cuda" or assignment.speed is None:
        raise UserError(
            "A replay needs a GPU, and an assignment that is timed: add --device cuda, or leave --replay out."
        )
    return dataclasses.replace(assignment, speed=dataclasses.replace(assignment.speed, replay="always"))


def _grade_on_gpu(
    assignment: Assignment, source: bytes, isolation: Literal["auto", "none"], seed: int | None
) -> Examination:
    from workers import health
    from workers.devices import nvml

    try:
        card = health.choose(0, nvml.visible_devices())
    except nvml.NvmlError as exc:
        raise UserError(f"No GPU can be used: {exc}. Leave --device out to grade in Triton's interpreter.") from None
    nvml.show_only(card)
    import torch

    if not torch.cuda.is_available():
        raise UserError(f"This PyTorch ({torch.__version__}) cannot use the {card.name} here: it needs one for CUDA.")
    from workers.devices.gpu import GpuError
    from workers.gpu_examination import examine_once

    def examine() -> Examination:
        return examine_once(assignment, source, isolation=isolation, seed=seed, progress=_print_progress)

    with contextlib.closing(nvml.XidWatch(card)) as xids:
        watched = health.Watched(examine, read=lambda: nvml.read(card), xids=xids.heard, still_works=health.use_context)
        try:
            found: Examination = watched()
        except (GpuError, health.SickGpuError) as exc:
            raise GraderFault(f"{card.name}: {exc}") from None
    return found


def _reference(arguments: argparse.Namespace) -> dict[str, Any]:
    operation = _operation(arguments.operation)
    return {"source": operation.kernel_file.read_text(encoding="utf-8")}


def _mistakes(arguments: argparse.Namespace) -> dict[str, Any]:
    operation = _operation(arguments.operation)
    return {"mistakes": [{"label": one.label, "step": one.step, "hint": one.hint} for one in operation.mistakes]}


def _operation(name: str) -> Any:
    import reference

    try:
        return reference.load(name)
    except reference.ReferenceMissing as exc:
        raise UserError(str(exc)) from None


def _print_progress(stage: str, fraction: float) -> None:
    print(json.dumps({"stage": stage, "fraction": round(fraction, 3)}), file=sys.stderr, flush=True)


def _gpus(_arguments: argparse.Namespace) -> dict[str, Any]:
    from workers.devices import nvml

    try:
        found = nvml.cards(nvml.visible_devices())
    except nvml.NvmlError as exc:
        raise UserError(f"No GPU can be found: {exc}.") from None
    return {"gpus": [dataclasses.asdict(card) for card in found]}


def _check(arguments: argparse.Namespace) -> dict[str, Any]:
    from workers import selfcheck

    on_gpu = arguments.device == "cuda"
    checks = selfcheck.check_sandbox(gpu=False, allow_reduced=arguments.allow_reduced, hidden=arguments.hidden)
    if on_gpu:
        from workers import health
        from workers.devices import nvml

        checks += health.check_gpu(arguments.gpu, visible=nvml.visible_devices(), in_use=arguments.in_use)
        if not selfcheck.why_not(checks):
            checks += selfcheck.check_sandbox(gpu=True, allow_reduced=arguments.allow_reduced, hidden=arguments.hidden)
    if arguments.pools is not None and not selfcheck.why_not(checks):
        limits = load_assignment(arguments.pools).limits
        checks += selfcheck.check_pools(selfcheck.pools_of(arguments.device, limits))
    return selfcheck.to_json(checks)


_COMMANDS = {"grade": _grade, "reference": _reference, "mistakes": _mistakes, "gpus": _gpus, "check": _check}

if __name__ == "__main__":
    sys.exit(main())
