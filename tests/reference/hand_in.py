"""PROGRAM: run hand-ins over their assignment's cases in the interpreter, without a sandbox. For trusted files only.

    python tests/reference/hand_in.py ASSIGNMENT FILE[::CASE,CASE...] ... [--save OUTPUTS.pt]

Prints a table of errors against limits for each file, or with --save leaves {file: {case: {output: tensor}}} for a test
to read. It is how limits and sizes are chosen; what a grade says is decided by the examiner in the sandbox, never here.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
import zlib
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

import reference  # noqa: E402
from grader.assignment import Assignment, Case, load_assignment  # noqa: E402
from reference.operation import Operation  # noqa: E402
from workers.devices.cpu import strided  # noqa: E402
from workers.interpreter import prepare_interpreter  # noqa: E402


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """max |got - want| / max |want|; inf for NaN, infinity or a wrong shape."""
    if got.shape != want.shape or not torch.isfinite(got.double()).all():
        return float("inf")
    scale = want.double().abs().max().item() or 1.0
    return (got.double() - want).abs().max().item() / scale


def inputs_of(operation: Operation, case: Case) -> dict[str, torch.Tensor]:
    """Inputs as the examiner lays them out, from a seed that depends on the case alone."""
    generator = torch.Generator().manual_seed(zlib.crc32(case.name.encode()))
    made = operation.make_inputs(case.axes, case.fill, getattr(torch, case.dtype), case.options or {}, generator)
    for name, value in made.items():
        layout = operation.layout(name, case_layout=case.layout, fill=case.fill)
        if layout == "strided":
            made[name] = strided(value)
        elif layout == "expanded":
            guarded = torch.full((value.numel(),), float("nan"), dtype=value.dtype)  # one element, and guards after it
            guarded[0] = value.reshape(-1)[0]
            made[name] = guarded[:1].expand(value.shape)
    return made


def limits_of(
    assignment: Assignment, operation: Operation, case: Case, inputs: dict[str, torch.Tensor]
) -> dict[str, float]:
    """Largest relative error that passes, by output."""
    options = case.options or {}
    want, base = operation.oracle(inputs, options), operation.naive(inputs, options)
    score = operation.largest_score(inputs, options)
    return {
        output.name: assignment.tolerance.limit(
            baseline_rel_error=relative_error(base[output.name], want[output.name]),
            dtype=case.dtype,
            largest_score=score,
            gradient=output.gradient,
        )
        for output in assignment.outputs
    }


def call(module: object, assignment: Assignment, operation: Operation, case: Case, inputs: dict[str, torch.Tensor]):  # type: ignore[no-untyped-def]
    """The hand-in's outputs by name."""
    entry = getattr(module, assignment.entry)
    options = [(case.options or {})[name] for name in operation.options]
    if assignment.entry_kind == "function":
        # a private copy, so that a file which changes its inputs does not change ours
        found = entry(*(torch.clone(inputs[name]) if inputs[name].is_contiguous() else inputs[name]
                        for name in operation.inputs), *options)  # fmt: skip
        found = found if isinstance(found, tuple) else (found,)
        return dict(zip(operation.outputs, found, strict=True))
    leaves = [inputs[name].detach().requires_grad_() for name in operation.inputs]
    o = entry.apply(*leaves, *options)
    return dict(
        zip(operation.outputs, (o.detach(), *torch.autograd.grad(o, leaves, inputs[operation.upstream])), strict=True)
    )


def run(path: Path, only: set[str], assignment: Assignment, operation: Operation, *, table: bool):  # type: ignore[no-untyped-def]
    """{case: {output: tensor}} of one file. A case that raises is left out."""
    spec = importlib.util.spec_from_file_location(f"hand_in_{path.stem.replace('-', '_')}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found, total_s = {}, 0.0
    for case in assignment.cases:
        if only and case.name not in only:
            continue
        inputs = inputs_of(operation, case)
        start = time.process_time()
        try:
            outputs = call(module, assignment, operation, case, inputs)
        except Exception as exc:
            print(f"{case.name:22} raises {type(exc).__name__}: {str(exc)[:90]}")
            continue
        seconds = time.process_time() - start
        total_s += seconds
        found[case.name] = outputs
        if table:
            want = operation.oracle(inputs, case.options or {})
            limits = limits_of(assignment, operation, case, inputs)
            errors = {name: relative_error(outputs[name], want[name]) for name in limits}
            worst = max(errors[name] / limits[name] for name in limits)
            marks = " ".join(f"{name} {errors[name]:.1e}/{limits[name]:.1e}" for name in limits)
            print(f"{case.name:22} {'ok  ' if worst <= 1 else 'FAIL'} {worst:9.2g}x  {seconds:.2f} s  {marks}")
    if table:
        print(f"{total_s:.2f} s in {len(found)} cases of {path.name}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("assignment")
    parser.add_argument("files", nargs="+")
    parser.add_argument("--save", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    prepare_interpreter()
    assignment = load_assignment(ROOT / "assignments" / asked.assignment)
    operation = reference.load(assignment.operation)
    saved = {}
    for argument in asked.files:
        file, _, cases = argument.partition("::")
        only = set(filter(None, cases.split(",")))
        saved[file] = run(Path(file), only, assignment, operation, table=not asked.save)
    if asked.save:
        torch.save(saved, asked.save)


if __name__ == "__main__":
    main()
