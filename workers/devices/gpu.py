"""What the examiner asks of a GPU while it times, apart from how a driver is asked. Needs no driver to be imported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch


class GpuError(Exception):
    """The driver refused something of ours. A fault of the host's, never of a student's."""


class NotMappableError(Exception):
    """A candidate's handle or address does not name memory of its own."""


@dataclass(frozen=True, slots=True)
class Mapped:
    """Memory of a candidate's, readable here."""

    start: int  # in the candidate's address space
    size_bytes: int
    here: int  # the same byte in ours


class Shown(Protocol):
    """Memory that candidates map, and the examiner's own copy of what lies there."""

    @property
    def arena(self) -> torch.Tensor:
        """Bytes on the device, which candidates map."""

    @property
    def private(self) -> torch.Tensor:
        """As many, which no student's file maps."""

    @property
    def handle(self) -> str:
        """By which they do."""

    def settle(self) -> None:
        """Wait for everything this process asked of the GPU."""


@dataclass(frozen=True, slots=True)
class SmallArena:
    """An arena that has room for the inputs of one call and for nothing else."""

    arena: torch.Tensor
    private: torch.Tensor
    handle: str
    wait: Callable[[], None]

    def settle(self) -> None:
        self.wait()


class TimedGpu(Shown, Protocol):
    """What windows of calls need; a fake of it runs in the tests."""

    private_handle: str  # by which the baselines map that one
    room_bytes: int  # device memory that the outputs of one window may take

    def pulse(self) -> tuple[int, float]:
        """SM clock in MHz and power in watts at this moment; zeros where the card does not tell."""

    def map(self, start: int, size_bytes: int, handle: str) -> Mapped:
        """Map a candidate's allocation. Raises NotMappableError when the handle is no good or spans less than said."""

    def unmap(self, mapped: Mapped) -> None:
        """Give a mapping up, before its owner frees the memory."""

    def gather(self, table: torch.Tensor, offsets: torch.Tensor, inner: int, out: torch.Tensor) -> None:
        """Copy rows of many tensors to `out` [calls, rows, width]; see workers.devices.cuda.Gpu.gather."""
