"""The candidate's half of the CPU: a memfd that both processes map, and calls under the instrumented interpreter."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from typing import Any

import torch

from workers import audit


class CpuHalf:
    """What the candidate does differently when kernels run in Triton's interpreter."""

    def __init__(self, arena: mmap.mmap, submission_file: str) -> None:
        self._arena, self._submission_file = arena, submission_file
        audit.prepare_interpreter()

    def handlers(self, _candidate: object) -> Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]]:
        """Requests beyond those every candidate answers: none."""
        return {}

    def flat(self, dtype: torch.dtype, count: int, offset: int) -> torch.Tensor:
        """[count], a view of the arena from byte `offset` on."""
        return torch.frombuffer(self._arena, dtype=dtype, count=count, offset=offset)

    def watch(self, message: Mapping[str, Any], inputs: Mapping[str, torch.Tensor]) -> audit.Watch:
        """A context around one call; its `facts` are sent along with the result."""
        return audit.Watch(
            inputs=inputs,
            level=message["watch"],
            order=message.get("order"),
            submission_file=self._submission_file,
            poison_empty=message.get("poison", False),
        )
