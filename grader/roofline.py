"""Where a measured time lies under what the GPU can do at best: the roofline model of Williams, Waterman and Patterson.

Source: Communications of the ACM 52(4), 2009, doi:10.1145/1498765.1498785. Ceilings are measured, not looked up.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Literal

from grader.measurement import Ceilings, Timing


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Where one measured time lies under the ceilings."""

    bound: Literal["memory", "compute"]
    floor_ms: float  # no call can be faster, by the larger of its two needs
    fraction: float  # of that ceiling: 1.0 is the ceiling itself
    flops_per_s: float
    bytes_per_s: float  # of the bytes given, so re-reads make it smaller
    intensity: float  # FLOP per byte
    ridge: float  # the intensity at which both ceilings meet


def roofline(*, time_ms: float, flops: int, traffic_bytes: int, dtype: str, ceilings: Ceilings) -> Roofline:
    """Place one time under this GPU's measured ceilings.

    Args:
        time_ms: of one call.
        flops: that the call needs, by counting.
        traffic_bytes: through device memory. The least possible gives the fairest floor.
        dtype: names the ceiling of arithmetic.

    Raises:
        KeyError: the ceilings hold no rate for `dtype`.
    """
    peak = ceilings.flops_per_s[dtype]
    compute_ms = flops / peak * 1e3
    memory_ms = traffic_bytes / ceilings.copy_bytes_per_s * 1e3
    floor_ms = max(compute_ms, memory_ms)
    return Roofline(
        bound="compute" if compute_ms >= memory_ms else "memory",
        floor_ms=floor_ms,
        fraction=floor_ms / time_ms,
        flops_per_s=flops / time_ms * 1e3,
        bytes_per_s=traffic_bytes / time_ms * 1e3,
        intensity=flops / traffic_bytes,
        ridge=peak / ceilings.copy_bytes_per_s,
    )


def share_of_limit(timing: Timing, ceilings: Ceilings | None) -> float | None:
    """How near one size's median time comes to the fastest possible: 1.0 is the limit. None: not known."""
    if ceilings is None or not (timing.student_times_ms and timing.least_bytes):
        return None
    if timing.dtype not in ceilings.flops_per_s:
        return None
    found = roofline(
        time_ms=median(timing.student_times_ms),
        flops=timing.flops,
        traffic_bytes=timing.least_bytes,
        dtype=timing.dtype,
        ceilings=ceilings,
    )
    return found.fraction


def is_too_fast(time_ms: float, floor_ms: float) -> bool:
    """Whether a time lies below what the hardware can do, with room for a better kernel than our ceiling's."""
    return time_ms < 0.8 * floor_ms
