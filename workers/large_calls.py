"""Timed calls that were wrong, made once more one at a time by a fresh process: an honest bug of that size, or not?

The probes are small. A file that passes them all may still be wrong at the sizes that are timed, because of an offset
in 32 bits or a fixed number of tiles, and its author has a right to hear so. Wrong rows in a window alone do not say
it: they are also what skipped, remembered or late work looks like. A process that never saw a window has nothing to
remember and nothing to gain, so what it gets wrong is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from grader.measurement import Failure, FailureKind, LargeCall
from workers import claims
from workers.devices.gpu import TimedGpu
from workers.gpu_timing import Field, Rival, Size, VoidError, WrongRows
from workers.interview import CandidateFailedError, Interview


def plain_call(
    begin: Callable[[], Interview], gpu: TimedGpu, size: Size, wrong: WrongRows | None, inputs: Field
) -> LargeCall | None:
    """Make plain calls at a timed size in a process of their own.

    Args:
        begin: starts a candidate that has the arena open and the file loaded.
        wrong: what was wrong in a window, its inputs untouched since; None where the file failed instead.
        inputs: to call on where it failed, or those of `wrong`.

    Returns:
        What is wrong or fails there too; None where a plain call is right.

    Raises:
        GraderFault, SandboxUnavailable: ours, not the file's.
    """
    interview: Interview | None = None
    rival: Rival | None = None
    try:
        interview = begin()
        rival = Rival("plain", interview, gpu)
        calls = wrong.calls if wrong is not None else (0,)
        for number, call in enumerate(calls):
            rival.prepare(inputs, 1, fresh=True, only=call)
            rival.rehearse(1, most=1)
            found = _compare(rival, size, wrong, number) if wrong is not None else None
            if found is not None:
                return found
    except CandidateFailedError as exc:
        # too slow at full size is no sign of anything else
        return None if exc.failure.kind is FailureKind.TIME_LIMIT else _failed(size, exc.failure)
    except (claims.ClaimError, VoidError):
        return None
    finally:
        if interview is not None:
            interview.end()
        if rival is not None:
            rival.close()
    return None


def _compare(rival: Rival, size: Size, wrong: WrongRows, number: int) -> LargeCall | None:
    """The rows that were wrong in the window, held against the same values."""
    rows, want = wrong.rows[number : number + 1], wrong.want[number]
    rival.interview.sandbox.freeze()
    got = rival.gather_again(1, {wrong.output: rows})[wrong.output][0].double()
    if got.shape != want.shape:
        return None
    error = (got - want).abs() / wrong.scale
    off = ~(error <= wrong.limit)
    if not bool(off.any()):
        return None
    finite = bool(torch.isfinite(got).all())
    return LargeCall(
        axes=dict(size.axes),
        dtype=_name(size.dtype),
        output=wrong.output,
        rel_error=float(error.max()) if finite and math.isfinite(float(error.max())) else None,
        limit=wrong.limit,
        n_rows=len(want),
        n_wrong_rows=int(off.any(dim=-1).sum()),
    )


def _failed(size: Size, failure: Failure) -> LargeCall:
    return LargeCall(axes=dict(size.axes), dtype=_name(size.dtype), failure=failure)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
