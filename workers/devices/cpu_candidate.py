"""The candidate's half of the CPU: a memfd that both processes map, and calls under the instrumented interpreter."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from workers import audit


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def warm_up_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def] # compiled by triton
    """A little of what every kernel does, so that the first call of a student's does not pay for first times."""
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    tile = tl.dot(x[:, None] + x[None, :], x[:, None] - x[None, :])
    tl.store(y_ptr + at, tl.exp(tl.max(tile, axis=1) - tl.sum(tile, axis=1)), mask=at < n)


class CpuHalf:
    """What the candidate does differently when kernels run in Triton's interpreter."""

    note = ""

    def __init__(self, arena: mmap.mmap, submission_file: str) -> None:
        self._arena, self._submission_file = arena, submission_file
        audit.prepare_interpreter()
        self._warm_up()

    def handlers(self, _candidate: object) -> Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]]:
        """Requests beyond those every candidate answers: none."""
        return {}

    def flat(self, dtype: torch.dtype, count: int, offset: int) -> torch.Tensor:
        """[count], a view of the arena from byte `offset` on."""
        return torch.frombuffer(self._arena, dtype=dtype, count=count, offset=offset)

    def settle(self) -> None:
        """Wait for what was copied: on a CPU it is there already."""

    def watch(self, message: Mapping[str, Any], inputs: Mapping[str, torch.Tensor]) -> audit.Watch:
        """A context around one call; its `facts` are sent along with the result."""
        return audit.Watch(
            inputs=inputs,
            level=message["watch"],
            order=message.get("order"),
            submission_file=self._submission_file,
            poison_empty=message.get("poison", False),
            run_programs=message.get("launches") != "off",
        )

    def _warm_up(self) -> None:
        for level in ("bounds", "storages", "full"):
            x = torch.zeros(16)
            with audit.Watch(inputs={"x": x}, level=level, submission_file=__file__, poison_empty=True) as watch:
                y = torch.empty(16)
                warm_up_kernel[(1,)](x, y, 9, BLOCK=16)
            watch.facts({"y": y})
