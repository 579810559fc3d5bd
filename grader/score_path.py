"""What the score path of attention costs in global memory (HBM), naive and Flash: the arithmetic behind the lesson.

The score path is what lies between Q Kᵀ and O. A naive forward writes the score matrix S, [batch, heads, T, T], to HBM;
FlashAttention writes O, [batch, heads, T, head_dim], and one float32 logsumexp a row, and nothing else.

Source: Dao et al. 2022, arXiv:2205.14135, section 2.2 for what a naive forward reads and writes.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from grader.figures import amount

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8": 1}
_LSE_BYTES = 4  # the logsumexp of a row is kept in float32 whatever the dtype


class Mode(enum.StrEnum):
    """What is counted: bytes that must exist at once, or bytes that are moved."""

    CAPACITY = "capacity"
    TRAFFIC = "traffic"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Everything but T. Queries and keys are equally many, and nothing is masked."""

    batch: int
    heads: int
    head_dim: int
    dtype: str  # a key of ITEM_BYTES

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]


def naive_bytes(shape: Shape, t: int, mode: Mode) -> int:
    """Of a naive forward at T = `t`, in bytes.

    Capacity is one score matrix; eager PyTorch holds the probabilities beside it for a while, which is twice that.
    Traffic is S and P each written once and read once, Q, K and V read, and O written.
    """
    scores = shape.batch * shape.heads * t * t * shape.item_bytes
    return scores if mode is Mode.CAPACITY else 4 * scores + 4 * _rows_bytes(shape, t)


def flash_bytes(shape: Shape, t: int, mode: Mode) -> int:
    """Of a FlashAttention forward at T = `t`, in bytes.

    Capacity is O and the logsumexp. Traffic is Q, K and V read once, and those two written; a tile of K or V that is
    read again comes from the L2 cache and is not counted, as the audit's unique bytes do not count it.
    """
    kept = shape.batch * shape.heads * t * _LSE_BYTES
    return kept + (1 if mode is Mode.CAPACITY else 4) * _rows_bytes(shape, t)


def longest_naive(shape: Shape, memory_bytes: int) -> int:
    """The largest T whose score matrix fits."""
    return math.isqrt(memory_bytes // (shape.batch * shape.heads * shape.item_bytes))


def longest_flash(shape: Shape, memory_bytes: int) -> int:
    """The largest T whose O and logsumexp fit."""
    return memory_bytes // flash_bytes(shape, 1, Mode.CAPACITY)


@dataclass(frozen=True, slots=True, kw_only=True)
class AtT:
    """Both ways at one T, in bytes."""

    t: int
    naive: int
    flash: int

    @property
    def times(self) -> float:
        """How many times as much the naive way needs."""
        return self.naive / self.flash


def at(shape: Shape, t: int, mode: Mode) -> AtT:
    return AtT(t=t, naive=naive_bytes(shape, t, mode), flash=flash_bytes(shape, t, mode))


def said(shape: Shape, *, t: int, memory_bytes: int, mode: Mode) -> tuple[str, str]:
    """What the chart shows, in two sentences: the crossing point, and both ways at T = `t`."""
    here = at(shape, t, mode)
    if mode is Mode.TRAFFIC:
        crossing = (
            f"Above T = {shape.head_dim:,}, the head dim, most of what a naive forward moves is the score matrix, "
            f"written and read twice over; Flash never moves it."
        )
        return crossing, (
            f"At T = {t:,} naive moves {_size(here.naive)}, {_times(here.times)} "
            f"the {_size(here.flash)} that Flash moves."
        )
    crossing = (
        f"Naive crosses the {_size(memory_bytes)} line at T = {longest_naive(shape, memory_bytes):,}: "
        f"beyond it the score matrix alone does not fit. "
        f"Flash crosses it at T = {longest_flash(shape, memory_bytes):,}."
    )
    if here.times < 1:
        return crossing, (
            f"At T = {t:,} the score matrix is {_size(here.naive)}, still less than the {_size(here.flash)} "
            f"that Flash writes."
        )
    return crossing, (
        f"At T = {t:,} the score matrix is {_size(here.naive)}, {_times(here.times)} "
        f"the {_size(here.flash)} that Flash writes."
    )


def _size(size_bytes: float) -> str:
    # in decimal units, as makers of GPUs count: an 80 GB card holds 80 * 10^9 bytes
    return amount(size_bytes, "B")


def _times(ratio: float) -> str:
    return f"{ratio:,.0f} times" if ratio >= 10 else f"{ratio:.2g} times"


def _rows_bytes(shape: Shape, t: int) -> int:
    """One of Q, K, V and O."""
    return shape.batch * shape.heads * t * shape.head_dim * shape.item_bytes
