"""What a GPU can do at best, measured once: the roof that times are held under."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from grader.measurement import Ceilings

COPY_BYTES = 4 << 30  # many times the second-level cache
SIDE = 8192
_REPEATS = 7


def measure() -> Ceilings:
    """Copy bandwidth and the rate of a large matrix product per dtype, on random data. Takes about a second."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    copy_s = _fastest(lambda to=target, given=source: to.copy_(given))  # type: ignore[misc]
    del source, target
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True  # as tl.dot does, unless told otherwise
    flops: dict[str, float] = {}
    try:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            a = torch.randn(SIDE, SIDE, device="cuda", dtype=dtype)
            b = torch.randn(SIDE, SIDE, device="cuda", dtype=dtype)
            product_s = _fastest(lambda a=a, b=b: a @ b)  # type: ignore[misc]
            flops[str(dtype).removeprefix("torch.")] = 2 * SIDE**3 / product_s
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
        torch.cuda.empty_cache()
    return Ceilings(copy_bytes_per_s=2 * COPY_BYTES / copy_s, flops_per_s=flops)


def _fastest(act: Callable[[], Any]) -> float:
    """Seconds of one act, the median of some by events, after two that warm up."""
    act()
    act()
    times: list[float] = []
    for _ in range(_REPEATS):
        start: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        act()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return median(times)
