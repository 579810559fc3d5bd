"""Small assignments and examinations, built by hand: every test starts from a right file and changes one thing."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from grader.assignment import (
    Assignment,
    Case,
    Limits,
    MemorySweep,
    Output,
    Speed,
    SpeedStep,
    Structure,
    Tolerance,
)
from grader.measurement import (
    Audit,
    Device,
    Examination,
    Failure,
    FailureKind,
    Isolation,
    Launch,
    MemoryPoint,
    MistakeMatch,
    MistakeOnProbe,
    OutputRun,
    OutputWritten,
    ProbeFailed,
    ProbeMeasured,
    ProbeRun,
    Timing,
    TorchOp,
    WrongElement,
)

SEED = 20270301
FLOOR = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1.5e-2}
CHECKS = {"repeat": "repeat", "input-unchanged": "input-unchanged", "guard": "guard", "fresh-inputs": "fresh-inputs"}
HALF = {"half": "float16", "half-wide": "float16", "bfloat16": "bfloat16"}
STRIDED = ("strided", "grad-strided")


def _names(text: str) -> list[str]:
    return text.split()


ATTENTION_PROBES = _names("""
    random causal rising-max falling-max early-jump late-jump large causal-large negative negative-tail tail key-tail
    query-tail causal-tail causal-more-keys causal-more-queries one-tile tiny long zero-mean head-dim-16 head-dim-64
    head-dim-128 causal-head-dim-128 odd-batch strided half bfloat16 repeat input-unchanged guard fresh-inputs
""")
BACKWARD_PROBES = [
    *(name for name in ATTENTION_PROBES if name not in ("key-tail", "query-tail", "one-tile", "long", "zero-mean")),
    "grad-ones",
    "grad-strided",
]
SOFTMAX_PROBES = _names("""
    random tail tail-short one-tile one-column one-row long rising-max falling-max early-jump late-jump large negative
    negative-tail very-negative-tail strided half bfloat16 repeat input-unchanged guard
""")
LAYER_NORM_PROBES = _names("""
    random tail tail-wide narrow one-row many-rows widest p-zero p-half p-high other-seed eps small-variance shifted
    strided half half-wide bfloat16 repeat input-unchanged guard
""")

OUTPUTS = {
    "flash-attention-forward": (Output(name="o"), Output(name="lse")),
    "flash-attention": (
        Output(name="o"),
        *(Output(name=name, own_kernel=False, gradient=True) for name in ("dq", "dk", "dv")),
    ),
    "online-softmax": (Output(name="y"), Output(name="lse")),
    "fused-bias-dropout-layernorm": (Output(name="y"),),
}
PROBES = {
    "flash-attention-forward": ATTENTION_PROBES,
    "flash-attention": BACKWARD_PROBES,
    "online-softmax": SOFTMAX_PROBES,
    "fused-bias-dropout-layernorm": LAYER_NORM_PROBES,
}


def case(name: str, **changes: Any) -> Case:
    ragged = "tail" in name or name in ("narrow", "tiny", "one-column")
    values: dict[str, Any] = {
        "axes": {"queries": 77 if ragged else 128, "keys": 77 if ragged else 128, "head_dim": 32},
        "tries": f"what {name} tries",
        "required": name in ("random", "causal"),
        "dtype": HALF.get(name, "float32"),
        "layout": "strided" if name in STRIDED else "contiguous",
        "check": CHECKS.get(name, "values"),
        "options": {"is_causal": name.startswith("causal")},
    }
    return Case(name=name, **{**values, **changes})


def assignment_of(slug: str = "flash-attention-forward", **changes: Any) -> Assignment:
    attention = slug.startswith("flash")
    values: dict[str, Any] = {
        "slug": slug,
        "title": slug.replace("-", " ").capitalize(),
        "summary": "a summary",
        "operation": "attention.forward",
        "entry": slug.replace("-", "_"),
        "entry_kind": "autograd" if slug == "flash-attention" else "function",
        "signature": "f(q, k, v, is_causal=False) -> (o, lse)",
        "target_gpu": "sm_90",
        "deadline": None,
        "outputs": OUTPUTS[slug],
        "points": {"numerics": 40.0, "memory": 20.0, "structure": 10.0, "speed": 30.0}
        if attention
        else {"numerics": 50.0, "structure": 20.0, "speed": 30.0},
        "tolerance": Tolerance(
            slack=2.0, floor=FLOOR, gradient_floor={name: 3 * floor for name, floor in FLOOR.items()}, score_slope=3e-7
        ),
        "cases": tuple(case(name) for name in PROBES[slug]),
        "memory": MemorySweep(
            axis="T",
            sizes=(96, 192, 384),
            cuda_sizes=(16384, 32768),
            axes={"head_dim": 64},
            along=("queries", "keys"),
            pass_exponent=1.3,
        )
        if attention
        else None,
        "structure": Structure(
            axes={"queries": 192, "keys": 192, "head_dim": 32},
            options={},
            max_launches=1,
            max_backward_launches=3,
            max_bytes_ratio=1.5,
            torch_ops=("bmm", "sum") if slug == "flash-attention" else (),
        ),
        "speed": Speed(
            sizes=({"queries": 8192, "keys": 8192},),
            dtype="bfloat16",
            options={},
            steps=(
                SpeedStep(speedup=1.0, fraction=0.0),
                SpeedStep(speedup=4.0, fraction=0.5),
                SpeedStep(speedup=8.0, fraction=1.0),
            ),
            gpu_steps={},
        ),
        "limits": Limits(),
        "handout": "",
        "starter": "",
        "digest": "d" * 64,
    }
    return Assignment(**{**values, **changes})


def output(name: str = "o", rel_error: float | None = 3e-7, **changes: Any) -> OutputRun:
    """One output of 64 rows and 32 columns. With an error beyond 1e-3 all of it is wrong."""
    wrong = rel_error is None or not rel_error <= 1e-3
    values: dict[str, Any] = {
        "shape": (1, 64, 32),
        "want_shape": (1, 64, 32),
        "dtype": "float32",
        "want_dtype": "float32",
        "rel_error": rel_error,
        "baseline_rel_error": 2e-7,
        "n_elements": 2048,
        "n_not_finite": 2048 if rel_error is None else 0,
        "n_wrong": 2048 if wrong else 0,
        "limit": 2e-5,
        "first_wrong": WrongElement(index=(0, 3, 5), got=0.25, want=0.125) if wrong else None,
        "wrong_rows": tuple(range(16)) if wrong else (),
        "n_wrong_rows": 64 if wrong else 0,
        "n_rows": 64,
        "error_map": ((0.25, None), (0.0, 1e-3)) if wrong else (),
    }
    return OutputRun(name=name, **{**values, **changes})


def measured(name: str, errors: Mapping[str, float | None], **changes: Any) -> ProbeMeasured:
    values: dict[str, Any] = {
        "outputs": tuple(output(which, error) for which, error in errors.items()),
        "largest_score": 4.0,
        "repeat_equal": True if name == "repeat" else None,
        "first_result_kept": True if name == "fresh-inputs" else None,
    }
    return ProbeMeasured(name=name, **{**values, **changes})


def right(name: str, assignment: Assignment) -> ProbeMeasured:
    return measured(name, {one.name: 3e-7 for one in assignment.outputs})


def wrong(name: str, assignment: Assignment, error: float | None = 0.4, only: Iterable[str] = ()) -> ProbeMeasured:
    """A probe with wrong values in the outputs named by `only`, or in the first one."""
    at_fault = tuple(only) or (assignment.outputs[0].name,)
    return measured(name, {one.name: error if one.name in at_fault else 3e-7 for one in assignment.outputs})


def failed(name: str, kind: FailureKind, message: str = "a message") -> ProbeFailed:
    return ProbeFailed(name=name, failure=Failure(kind=kind, message=message, stage=name))


def memory_points(forward: float = 1.0, backward: float | None = None, kept: float = 1.0) -> tuple[MemoryPoint, ...]:
    """A sweep whose bytes follow these exponents exactly."""
    return tuple(
        MemoryPoint(
            size=size,
            peak_bytes=round(1000 * size**forward),
            backward_peak_bytes=None if backward is None else round(2000 * size**backward),
            kept_bytes=round(500 * size**kept),
            naive_bytes=8 * size * size,
            reference_bytes=1000 * size,
        )
        for size in (96, 192, 384)
    )


def audit_of(assignment: Assignment, **changes: Any) -> Audit:
    values: dict[str, Any] = {
        "axes": dict(assignment.structure.axes),
        "n_launches": 1,
        "launches": (
            Launch(
                kernel="flash_fwd_kernel",
                line=17,
                grid=(3, 1),
                requested_bytes=400_000,
                unique_bytes=100_000,
                dot_flops=4_718_592,
                largest_tile_elements=4096,
            ),
        ),
        "torch_ops": (TorchOp(op="aten.bmm.default", count=4, size_bytes=4096),)
        if assignment.slug == "flash-attention"
        else (),
        "library_calls": (),
        "outputs": tuple(OutputWritten(name=one.name, by_own_kernel=one.own_kernel) for one in assignment.outputs),
        "requested_bytes": 400_000,
        "unique_bytes": 100_000,
        "dot_flops": 4_718_592,
        "largest_tile_elements": 4096,
        "least_bytes": 98_000,
        "eager_launches": 5,
        "eager_bytes": 900_000,
        "backward_launches": 2 if assignment.slug == "flash-attention" else 0,
    }
    return Audit(**{**values, **changes})


def examination_of(assignment: Assignment, **changes: Any) -> Examination:
    """A right file in the interpreter, with one thing changed."""
    gradients = any(one.gradient for one in assignment.outputs)
    values: dict[str, Any] = {
        "assignment": assignment.slug,
        "assignment_digest": assignment.digest,
        "source_sha256": "a" * 64,
        "device": Device(kind="interpreter", name="Triton interpreter"),
        "isolation": Isolation(level="full"),
        "versions": {"torch": "2.13.0", "triton": "3.6.0"},
        "seed": SEED,
        "entry": assignment.entry,
        "probes": tuple(right(one.name, assignment) for one in assignment.cases),
        "memory": memory_points(backward=1.0 if gradients else None) if assignment.memory else (),
        "audit": audit_of(assignment),
    }
    return Examination(**{**values, **changes})


def with_probe(examination: Examination, *runs: ProbeRun) -> Examination:
    """The examination with these probes in place of those of the same name."""
    instead = {run.name: run for run in runs}
    return dataclasses.replace(examination, probes=tuple(instead.get(run.name, run) for run in examination.probes))


def mistake(
    label: str,
    failing: Iterable[str],
    probes: Iterable[str],
    *,
    distance: float = 1e-7,
    own_error: float | None = 0.4,
    tile: int | None = None,
) -> MistakeMatch:
    """A mistake that is wrong in `failing`, right elsewhere, and as near to the student's outputs as `distance`."""
    bad = set(failing)
    return MistakeMatch(
        label=label,
        tile=tile,
        probes=tuple(
            MistakeOnProbe(probe=name, distance=distance, own_error=own_error if name in bad else 1e-7)
            for name in probes
        ),
        step=f"the step of {label}",
        hint=f"look at {label}",
    )


def timing(ratio: float, **changes: Any) -> Timing:
    values: dict[str, Any] = {
        "axes": {"queries": 8192, "keys": 8192},
        "student_times_ms": (1.0, 1.01),
        "naive_times_ms": (ratio, ratio * 1.01),
        "reference_times_ms": (0.5,),
        "ratio_low": ratio * 0.99,
        "ratio_high": ratio * 1.01,
        "noisy": False,
    }
    return Timing(ratio=ratio, **{**values, **changes})
