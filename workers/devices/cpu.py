"""The examiner's side of the arena on a CPU: a sealed memfd that both processes map.

Inputs lie between bands of NaN, and gaps of non-contiguous ones are NaN too, so that reading past a tensor shows.
Output slots are filled with NaN before every call, so that what was not written shows as well. The examiner keeps its
own copy of all it placed: what the candidate does to the arena changes no expected value.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from grader import assignment
from workers.sandbox import Limits, SandboxPool

ARENA_BYTES = 64 << 20
GUARD_BYTES = 4096
ALIGN = 256
POISON = 0xFF  # every float format of ours reads a run of 0xFF as NaN
# what an output is read as; a format that torch cannot convert, such as a quantised one, would end the examiner
READABLE = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}


@contextlib.contextmanager
def interpreter_pool(
    limits: assignment.Limits,
    *,
    size: int,
    refill: bool = True,
    isolation: Literal["auto", "none"] = "auto",
    nice: int = 0,
) -> Iterator[SandboxPool]:
    """Warm candidates that run Triton in the interpreter. Raises SandboxUnavailable where none can be had."""
    pool = SandboxPool(
        argv_env={"TRITON_INTERPRET": "1"},
        arena_bytes=ARENA_BYTES,
        limits=Limits(
            memory_bytes=limits.memory_bytes,
            output_total_bytes=limits.output_bytes,
            cpu_s=int(limits.total_s),
            nice=nice,
        ),
        size=size,
        refill=refill,
        isolation=isolation,
    )
    try:
        yield pool
    finally:
        pool.close()


class ArenaFullError(Exception):
    """The probe's tensors do not fit the arena: the assignment's sizes are too large for this device."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor in the arena, and the examiner's private copy of it."""

    name: str
    value: torch.Tensor  # private, with the very strides the candidate sees
    start: int
    count: int  # elements from the lowest to the highest address of the view
    strides: tuple[int, ...]

    def spec(self) -> dict[str, Any]:
        """What the candidate needs to build the view."""
        return {
            "name": self.name,
            "offset": self.start,
            "count": self.count,
            "shape": list(self.value.shape),
            "strides": list(self.strides),
            "dtype": str(self.value.dtype).removeprefix("torch."),
        }


@dataclass(frozen=True, slots=True)
class Slot:
    """Room for one output of the candidate's, and for alternatives of it."""

    name: str
    shape: tuple[int, ...]
    start: int
    capacity: int  # bytes for one alternative
    gradient: bool

    def spec(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "offset": self.start,
            "capacity": self.capacity,
            "gradient": self.gradient,
            "shape": list(self.shape),
        }


class Arena:
    """Places the tensors of one call after another in the shared memory."""

    ALTERNATIVES = 3

    def __init__(self, memory: mmap.mmap | torch.Tensor) -> None:
        # a tensor: bytes on a GPU. What is placed is prepared on the CPU in either case, and copied there
        self._view = memory if isinstance(memory, torch.Tensor) else _as_tensor(memory)
        self._end = 0
        self._copy: dict[int, torch.Tensor] = {}  # by start: what was written there

    def clear(self) -> None:
        """Forget what was placed and poison the memory it took."""
        self._view[: self._end] = POISON
        self._end = 0
        self._copy.clear()
        self._settle()

    def place_bytes(self, data: bytes) -> tuple[int, int]:
        """Put plain bytes at the start; returns offset and length."""
        start = self._reserve(len(data))
        self._view[start : start + len(data)] = torch.tensor(bytearray(data), dtype=torch.uint8)
        return start, len(data)

    def place(self, name: str, value: torch.Tensor, layout: str) -> Placed:
        """Put one input between guard bands. Layout "strided" interleaves it with NaN and swaps its outer axes."""
        private = strided(value) if layout == "strided" else value.contiguous()
        return self._place_view(name, private)

    def place_expanded(self, name: str, value: torch.Tensor) -> Placed:
        """Put a constant tensor as one element with all strides 0, as the gradient of a sum arrives."""
        return self._place_view(name, value.reshape(-1)[:1].clone().expand(value.shape))

    def place_slots(self, shapes: Mapping[str, tuple[int, ...]], gradients: frozenset[str]) -> list[Slot]:
        """Room for the outputs, NaN throughout. Eight bytes an element, whatever dtype comes back."""
        slots = []
        for name, shape in shapes.items():
            capacity = _aligned(8 * torch.Size(shape).numel())
            start = self._reserve(capacity * self.ALTERNATIVES)
            slots.append(Slot(name, tuple(shape), start, capacity, name in gradients))
        self._settle()
        return slots

    def poison(self, slots: list[Slot]) -> None:
        for slot in slots:
            self._view[slot.start : slot.start + slot.capacity * self.ALTERNATIVES] = POISON
        self._settle()

    def rewrite(self, placed: Placed, value: torch.Tensor) -> Placed:
        """New values in the very same memory, for probes that call twice on the same buffers."""
        private = torch.empty_strided(placed.value.shape, placed.strides, dtype=placed.value.dtype)
        private.copy_(value)
        region = self._region(placed.start, placed.count, placed.value.dtype)
        region.as_strided(placed.value.shape, placed.strides).copy_(value)
        size = placed.count * placed.value.element_size()
        self._remember(placed.start - GUARD_BYTES, size + 2 * GUARD_BYTES)
        return Placed(placed.name, private, placed.start, placed.count, placed.strides)

    def read(self, slot: Slot, said: Mapping[str, Any]) -> torch.Tensor | None:
        """What the candidate wrote, as a private tensor; None when it said something that does not fit the slot."""
        dtype = READABLE.get(said["dtype"])
        shape = tuple(said["shape"])
        if dtype is None or not said["copied"] or min(shape, default=1) < 0:
            return None
        if not 0 <= said["alternative"] < self.ALTERNATIVES:
            return None
        # of no size counts as one here: strides are products of sizes, and a huge one beside a 0 overflows them
        if math.prod(max(1, size) for size in shape) * dtype.itemsize > slot.capacity:
            return None
        start = slot.start + said["alternative"] * slot.capacity
        return self._region(start, math.prod(shape), dtype).to("cpu", copy=True).reshape(shape)

    def intact(self) -> tuple[bool, bool]:
        """Whether inputs still hold what was placed, and whether the guard bands do."""
        inputs = guards = True
        for start, copy in self._copy.items():
            now = self._view[start : start + len(copy)]
            if torch.equal(now, copy):
                continue
            inner = slice(GUARD_BYTES, len(copy) - GUARD_BYTES)
            inputs &= torch.equal(now[inner], copy[inner])
            guards &= torch.equal(now[:GUARD_BYTES], copy[:GUARD_BYTES])
            guards &= torch.equal(now[inner.stop :], copy[inner.stop :])
        return inputs, guards

    def _place_view(self, name: str, private: torch.Tensor) -> Placed:
        span = 1 + sum((size - 1) * step for size, step in zip(private.shape, private.stride(), strict=True))
        size = span * private.element_size()
        outer = self._reserve(size + 2 * GUARD_BYTES)
        start = outer + GUARD_BYTES
        region = self._region(start, span, private.dtype)
        # along an expanded axis (stride 0) there is one element to write
        dense = private[tuple(slice(0, 1) if step == 0 else slice(None) for step in private.stride())]
        region.as_strided(dense.shape, dense.stride()).copy_(dense)
        self._remember(outer, size + 2 * GUARD_BYTES)
        return Placed(name, private, start, span, private.stride())

    def _remember(self, start: int, size: int) -> None:
        self._copy[start] = self._view[start : start + size].clone()
        self._settle()

    def _settle(self) -> None:
        """Wait until what was written is there: another process reads it, and a GPU writes later than it is told."""
        if self._view.is_cuda:
            torch.cuda.synchronize()

    def _reserve(self, size: int) -> int:
        start, end = self._end, _aligned(self._end + size)
        if end > len(self._view):
            raise ArenaFullError(f"needs {end >> 20} MiB of arena; it has {len(self._view) >> 20} MiB")
        self._view[start:end] = POISON
        self._end = end
        return start

    def _region(self, start: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        return self._view[start : start + count * dtype.itemsize].view(dtype)


def strided(value: torch.Tensor) -> torch.Tensor:
    """A non-contiguous tensor with the same values: outer axes swapped, every second element NaN."""
    wide = list(value.shape)
    wide[-1] *= 2
    order = list(range(value.dim()))
    if value.dim() > 1:
        order[0], order[-2] = order[-2], order[0]
    storage = torch.full([wide[i] for i in order], float("nan"), dtype=value.dtype)
    view = storage.permute(order)[..., ::2]
    view.copy_(value)
    return view


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def _as_tensor(memory: mmap.mmap) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(memory, dtype=torch.uint8)
