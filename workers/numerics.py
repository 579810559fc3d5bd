"""Comparing a student's tensors with the float64 oracle. Runs in the examiner, on private copies only."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from grader.measurement import MistakeOnProbe, OutputRun, WrongElement

MAP_BLOCKS = 16
MAX_LISTED_ROWS = 16


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float | None:
    """max |got - want| / max |want| in float64; None when `got` is not finite where `want` is, or shapes differ.

    Where `want` itself is not finite nothing is compared.
    """
    if got.shape != want.shape:
        return None
    compared = torch.isfinite(want)
    got64, want64 = got.to(torch.float64)[compared], want.to(torch.float64)[compared]
    if not got64.numel():
        return 0.0
    if not torch.isfinite(got64).all():
        return None
    scale = want64.abs().max().item() or 1.0
    return (got64 - want64).abs().max().item() / scale


def compare(
    name: str,
    got: torch.Tensor | None,
    want: torch.Tensor,
    want_dtype: torch.dtype,
    *,
    said_shape: tuple[int, ...],
    said_dtype: str,
    baseline: torch.Tensor,
    limit_of: float,
    baseline_rel_error: float | None = None,
) -> OutputRun:
    """One output against the oracle.

    Args:
        got: the student's tensor, any float dtype, or None when it could not be read.
        want: float64, the oracle.
        baseline: the naive baseline in the student's dtype.
        limit_of: the relative error that passes now; stored as a fact beside the counts it gave.
    """
    own = relative_error(baseline, want) if baseline_rel_error is None else baseline_rel_error
    shared = {
        "name": name,
        "shape": said_shape,
        "want_shape": tuple(want.shape),
        "dtype": said_dtype,
        "want_dtype": str(want_dtype).removeprefix("torch."),
        "baseline_rel_error": own if own is not None else 0.0,
        "n_elements": want.numel(),
        "limit": limit_of,
    }
    if got is None or got.shape != want.shape:
        return OutputRun(**shared, rel_error=None, n_not_finite=0, n_wrong=want.numel())  # type: ignore[arg-type]
    got64 = got.to(torch.float64)
    scale = want[torch.isfinite(want)].abs().max().item() if torch.isfinite(want).any() else 1.0
    error = (got64 - want).abs()
    not_finite = ~torch.isfinite(got64) & torch.isfinite(want)
    # `not <=`: a NaN error is a wrong element
    wrong = ~(error <= limit_of * (scale or 1.0)) & torch.isfinite(want)
    rows = _row_view(wrong).any(dim=-1)
    wrong_rows = rows.nonzero().flatten().tolist()
    return OutputRun(
        **shared,  # type: ignore[arg-type]
        rel_error=relative_error(got, want),
        n_not_finite=int(not_finite.sum()),
        n_wrong=int(wrong.sum()),
        first_wrong=_first(got64, want, wrong),
        wrong_rows=tuple(wrong_rows[:MAX_LISTED_ROWS]),
        n_wrong_rows=len(wrong_rows),
        n_rows=rows.numel(),
        error_map=_error_map(error) if bool(wrong.any()) else (),
    )


def mistake_on_probe(
    probe: str,
    student: Mapping[str, torch.Tensor],
    mistake: Mapping[str, torch.Tensor],
    oracle: Mapping[str, torch.Tensor],
) -> MistakeOnProbe:
    """How far a known mistake's outputs are from the student's and from the oracle, the largest over outputs."""
    distances = [_distance(student[name], mistake[name]) for name in oracle if name in student and name in mistake]
    own = [_distance(mistake[name], oracle[name]) for name in oracle if name in mistake]
    return MistakeOnProbe(probe=probe, distance=_largest(distances), own_error=_largest(own))


def _distance(a: torch.Tensor, b: torch.Tensor) -> float | None:
    """Like `relative_error`, but in the format of `a`, and values that are both not finite agree."""
    if a.shape != b.shape:
        return None
    # what float64 can still hold overflows in the student's format, there and then
    a64, b64 = a.to(torch.float64), b.to(a.dtype).to(torch.float64)
    finite = torch.isfinite(a64)
    if not torch.equal(finite, torch.isfinite(b64)):
        return None
    a64, b64 = a64[finite], b64[finite]
    scale = (b64.abs().max().item() if b64.numel() else 0.0) or 1.0
    return (a64 - b64).abs().max().item() / scale if a64.numel() else 0.0


def _largest(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return None if len(known) < len(values) or not values else max(known)


def _row_view(values: torch.Tensor) -> torch.Tensor:
    """[rows, everything else]: rows are the second-last axis, or the only one."""
    if values.dim() < 2:
        return values.reshape(-1, 1)
    return values.movedim(-2, 0).reshape(values.shape[-2], -1)


def _first(got: torch.Tensor, want: torch.Tensor, wrong: torch.Tensor) -> WrongElement | None:
    """Wrong elements are those that the oracle has a finite number for."""
    at = wrong.flatten().nonzero()
    if not len(at):
        return None
    flat = int(at[0])
    found = got.flatten()[flat].item()
    return WrongElement(
        index=_index(flat, want.shape),
        got=found if math.isfinite(found) else None,
        want=want.flatten()[flat].item(),
    )


def _index(flat: int, shape: torch.Size) -> tuple[int, ...]:
    # torch.unravel_index would import sympy, which takes seconds
    found = []
    for size in reversed(shape):
        flat, position = divmod(flat, size)
        found.append(position)
    return tuple(reversed(found))


def _error_map(error: torch.Tensor) -> tuple[tuple[float | None, ...], ...]:
    """Block means over the last two axes, averaged over the others; None where a block holds a non-finite error."""
    plane = error.reshape(-1, error.shape[-1]) if error.dim() < 3 else error.flatten(0, -3).mean(dim=0)
    rows = [block.mean(dim=0) for block in torch.tensor_split(plane, min(MAP_BLOCKS, plane.shape[0]), dim=0)]
    blocks = [
        [part.mean().item() for part in torch.tensor_split(row, min(MAP_BLOCKS, row.shape[0]), dim=0)] for row in rows
    ]
    # three digits are more than a colour shows, and a report that many probes failed stays small
    return tuple(tuple(float(f"{value:.2e}") if math.isfinite(value) else None for value in row) for row in blocks)
