"""Candidates that get ready must not touch a GPU on which somebody is just being measured.

Creating a CUDA context takes milliseconds from whoever runs there, and memory that a ballast left to somebody else. So
a candidate asks before it does: three bytes at the beginning of the memory that it shares with the examiner, who
writes the first and reads the others. The memory is the first job's once the candidate has said that it is ready.
"""

from __future__ import annotations

import mmap
import time

# variable: compute capability of the GPU, such as 90, by which a candidate compiles before it asks
ARCH = "GPU_ARCH"
_HELD, _BUSY, _WAITS = 0, 1, 2
_LOOK_S = 0.002


def enter(arena: mmap.mmap) -> None:
    """The candidate's side: wait until the device may be touched."""
    while True:
        # said before it is asked: an examiner that closes the gate now sees it
        arena[_BUSY] = 1
        if not arena[_HELD]:
            return
        arena[_BUSY] = 0
        arena[_WAITS] = 1
        time.sleep(_LOOK_S)


def leave(arena: mmap.mmap) -> None:
    """The candidate's side: it is ready, and does no more until it is asked."""
    arena[_BUSY] = 0


def close(arena: mmap.mmap) -> None:
    """The examiner's side: not now. Who is inside already goes on; see `is_busy`."""
    arena[_HELD] = 1


def open_again(arena: mmap.mmap) -> None:
    """The examiner's side: go ahead."""
    arena[_HELD] = 0


def is_busy(arena: mmap.mmap) -> bool:
    """The examiner's side: whether it makes its context just now."""
    return arena[_BUSY] != 0


def waits(arena: mmap.mmap) -> bool:
    """The examiner's side: whether it has nothing left to do but what it needs the device for."""
    return arena[_WAITS] != 0


def await_idle(arenas: list[mmap.mmap], timeout_s: float) -> None:
    """The examiner's side: wait until none is inside, or for so long."""
    deadline = time.monotonic() + timeout_s
    while any(map(is_busy, arenas)) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
