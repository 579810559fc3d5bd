"""Row softmax with its logsumexp ("softmax.online").

x [rows, cols]; y like x; lse [rows], float32, natural logarithm.
"""

# Every operation's functions take (inputs, options), also where one of them has no use for the options.
# ruff: noqa: ARG001

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from reference.operation import Costs, Inputs, Operation, Options, Specs
from reference.softmax_mistakes import MISTAKES

FILLS = (
    "normal",
    "rising-max",
    "falling-max",
    "early-jump",
    "late-jump",
    "large",
    "negative",
    "negative-tail",
    "very-negative-tail",
)


def oracle(inputs: Inputs, options: Options) -> dict[str, Tensor]:
    """Softmax over the last axis and its logsumexp, in float64. The judge compares against this, never a kernel."""
    x = inputs["x"].double()
    return {"y": torch.softmax(x, dim=-1), "lse": torch.logsumexp(x, dim=-1)}


def naive(inputs: Inputs, options: Options) -> dict[str, Tensor]:
    """The same in the dtype of x."""
    x = inputs["x"]
    return {"y": torch.softmax(x, dim=-1), "lse": torch.logsumexp(x, dim=-1).float()}


def largest_score(inputs: Inputs, options: Options) -> float:
    return float(inputs["x"].abs().max())


def make_inputs(
    axes: Mapping[str, int], fill: str, dtype: torch.dtype, options: Options, generator: torch.Generator
) -> dict[str, Tensor]:
    """x of the recipe called `fill`; a spread of 2.5, so that a few columns carry most of each row.

    rising-max: rows climb by 20 from end to end. falling-max: the first value is the largest and the rest sink by 20.
    early-jump, late-jump: one column of the first, or the last, quarter is 8 above. large: values of up to 130.
    negative: all about -150. negative-tail and very-negative-tail: all about -20 and -20000, where padding with 0 would
    win.
    """
    n_rows, n_cols = axes["rows"], axes["cols"]
    # calmer where the recipe decides which column is the largest
    spread = 0.8 if fill in ("falling-max", "early-jump", "late-jump") else 2.5
    x = torch.randn(n_rows, n_cols, generator=generator) * spread
    along = torch.linspace(0.0, 1.0, n_cols)
    if fill == "rising-max":
        x += 20.0 * along
    elif fill == "falling-max":
        x += 20.0 * along.flip(0)
        x[:, 0] += 5.0  # beyond the noise: no later column is ever the maximum, whatever the tile
    elif fill in ("early-jump", "late-jump"):
        quarter = max(1, n_cols // 4)
        first = min(quarter // 2, n_cols - 1) if fill == "early-jump" else n_cols - quarter
        at = first + torch.randint(max(1, quarter - quarter // 2), (n_rows,), generator=generator)
        x[torch.arange(n_rows), at] += 8.0
    elif fill == "large":
        x *= 130.0 / float(x.abs().max())
    elif fill in ("negative", "negative-tail", "very-negative-tail"):
        x += {"negative": -150.0, "negative-tail": -20.0, "very-negative-tail": -20000.0}[fill]
    elif fill != "normal":
        raise KeyError(f"softmax has no fill {fill!r}; there are {', '.join(FILLS)}")
    return {"x": x.to(dtype)}


def output_specs(inputs: Inputs, options: Options) -> Specs:
    x = inputs["x"]
    return {"y": (tuple(x.shape), x.dtype), "lse": (tuple(x.shape[:1]), torch.float32)}


def costs(axes: Mapping[str, int], dtype: torch.dtype, options: Options) -> Costs:
    """Eager: one softmax kernel, and a logsumexp of maximum, difference, exponential, sum, logarithm and sum."""
    n_rows, n_x = axes["rows"], axes["rows"] * axes["cols"] * dtype.itemsize
    per_row = n_rows * dtype.itemsize
    return Costs(
        flops=4 * axes["rows"] * axes["cols"],
        least_bytes=2 * n_x + 4 * n_rows,
        naive_peak_bytes=2 * n_x + 4 * n_rows,
        reference_peak_bytes=n_x + 4 * n_rows,
        eager_launches=7,
        eager_bytes=2 * n_x + (n_x + 2 * n_x + 2 * n_x + n_x) + 7 * per_row,
    )


OPERATIONS = {
    "online": Operation(
        name="softmax.online",
        axes=("rows", "cols"),
        inputs=("x",),
        options=(),
        outputs=("y", "lse"),
        fills=FILLS,
        kernel_file=Path(__file__).parent / "kernels" / "softmax.py",
        mistakes=MISTAKES,
        make_inputs=make_inputs,
        output_specs=output_specs,
        oracle=oracle,
        naive=naive,
        eager=naive,
        largest_score=largest_score,
        costs=costs,
    )
}
