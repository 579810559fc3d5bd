"""What the judge knows about one operation: how to make inputs, what is right, what is usual, what often goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Inputs = Mapping[str, Tensor]
Options = Mapping[str, Any]
Specs = dict[str, tuple[tuple[int, ...], torch.dtype]]

# Widths that people give their tiles. A mistake that shows only at tile borders is tried for each of them.
TILES = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


class ReferenceMissing(KeyError):  # noqa: N818 - reads as what it says: reference.ReferenceMissing
    """No operation of that name. The message lists those that exist."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What one call costs by counting, on no machine in particular. Eager is the naive chain, one kernel an op."""

    flops: int
    least_bytes: int  # every input read once, every output written once
    naive_peak_bytes: int  # memory beyond the inputs, at its peak, outputs included
    reference_peak_bytes: int
    eager_launches: int
    eager_bytes: int  # read and written, over all launches
    # values in a matrix that no good kernel stores, such as attention's scores: of one byte each at the very least,
    # whatever the dtype, with gradients or without. 0 where there is no such matrix
    n_scores: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """A known way to get it wrong, as the numbers that it gives.

    `outputs(inputs, options, tile)` are float64 where that is possible. NaN stands where such a file gives a NaN or
    leaves its result unwritten. Several mistakes may share a label: they are forms of one misunderstanding.
    """

    label: str
    step: str  # of the recurrence or the contract
    hint: str  # to a student: what is seen and where to look, not the fix
    outputs: Callable[[Inputs, Options, int], dict[str, Tensor]]
    tiled: bool = False  # depends on the tile width


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation. Everything random comes from the generator that is handed in; nothing keeps state."""

    name: str
    axes: tuple[str, ...]
    inputs: tuple[str, ...]  # tensor arguments of the entry point, in order
    options: tuple[str, ...]  # scalar arguments that follow them, in order
    outputs: tuple[str, ...]
    fills: tuple[str, ...]
    kernel_file: Path  # our own solution, as a complete hand-in
    mistakes: tuple[Mistake, ...]
    # (axes, fill, dtype, options, generator) -> contiguous CPU tensors of that dtype, the upstream gradient among them
    make_inputs: Callable[[Mapping[str, int], str, torch.dtype, Options, torch.Generator], dict[str, Tensor]]
    output_specs: Callable[[Inputs, Options], Specs]
    oracle: Callable[[Inputs, Options], dict[str, Tensor]]  # float64, by definition, never through a kernel
    naive: Callable[[Inputs, Options], dict[str, Tensor]]  # plain torch in the inputs' dtype; its error sets the limit
    # The chain whose time is the baseline. It does the work of `naive`, with torch's own random numbers where it drops.
    eager: Callable[[Inputs, Options], dict[str, Tensor]]
    largest_score: Callable[[Inputs, Options], float]  # largest |score|; rounding errors grow with it
    costs: Callable[[Mapping[str, int], torch.dtype, Options], Costs]
    upstream: str | None = None  # gradient fed to the backward
    # Right answers of the assignment's own algorithm, with what it has one keep rounded to the inputs' dtype in other
    # ways. Where cancellation magnifies that rounding beyond the naive baseline's error, it is what a limit goes by.
    roundings: Callable[[Inputs, Options], list[dict[str, Tensor]]] | None = None
    # How the upstream gradient lies in memory, by fill: "strided", or "expanded" (one element, stride 0, as after
    # .sum().backward()). Contiguous for every other fill, also where the inputs are strided.
    upstream_layouts: Mapping[str, str] = field(default_factory=dict)
    # Inputs that a case with layout "strided" hands over as views; None: all of them, save the upstream gradient.
    strided_inputs: tuple[str, ...] | None = None
    tiles: tuple[int, ...] = TILES

    def layout(self, name: str, *, case_layout: str, fill: str) -> str:
        """How input `name`, or the upstream gradient, lies in memory: "contiguous", "strided" or "expanded"."""
        if name == self.upstream:
            return self.upstream_layouts.get(fill, "contiguous")
        may_be_view = self.strided_inputs is None or name in self.strided_inputs
        return case_layout if may_be_view else "contiguous"


def as_packed(tensor: Tensor) -> Tensor:
    """What a kernel reads that takes `tensor` for contiguous: its storage from the first element on.

    NaN where the storage ends before the shape does.
    """
    shape = tensor.shape
    storage = torch.as_strided(
        tensor, (tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset(),), (1,)
    )
    flat = torch.full((shape.numel(),), float("nan"), dtype=tensor.dtype)
    n_read = min(len(flat), len(storage))
    flat[:n_read] = storage[:n_read]
    return flat.reshape(shape)
