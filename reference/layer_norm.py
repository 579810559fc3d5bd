"""Bias, dropout and LayerNorm in one ("layer_norm.fused").

x [rows, dim]; bias, gamma, beta [dim]; y like x. z = x + bias; element i, counted row by row, is kept iff
rand(seed, i) >= p and then divided by 1 - p; y = LayerNorm(z) * gamma + beta over the last axis, with the biased
variance and eps under the root.
"""

# Every operation's functions take (inputs, options), also where one of them has no use for the options.
# ruff: noqa: ARG001

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from reference.layer_norm_mistakes import MISTAKES
from reference.operation import Costs, Inputs, Operation, Options, Specs
from reference.philox import uniform

FILLS = ("normal", "lopsided", "small-variance", "shifted", "wide")


def kept(inputs: Inputs, options: Options) -> Tensor:
    """[rows, dim], True where dropout keeps the element."""
    x = inputs["x"]
    index = torch.arange(x.numel(), device=x.device).reshape(x.shape)
    # the kernel compares in float32
    return uniform(int(options["seed"]), index) >= torch.tensor(float(options["p"]), dtype=torch.float32)


def _chain(inputs: Inputs, options: Options, keep: Tensor) -> Tensor:
    """The three steps in the dtype of the inputs."""
    z = inputs["x"] + inputs["bias"]
    z = torch.where(keep, z / (1.0 - float(options["p"])), torch.zeros_like(z))
    return functional.layer_norm(z, z.shape[-1:], inputs["gamma"], inputs["beta"], float(options["eps"]))


def oracle(inputs: Inputs, options: Options) -> dict[str, Tensor]:
    """The chain in float64, by its definition. The judge compares against this, never against a kernel."""
    x, bias, gamma, beta = (inputs[name].double() for name in ("x", "bias", "gamma", "beta"))
    z = torch.where(kept(inputs, options), (x + bias) / (1.0 - float(options["p"])), 0.0)
    centred = z - z.mean(dim=-1, keepdim=True)
    variance = (centred * centred).mean(dim=-1, keepdim=True)
    return {"y": centred / torch.sqrt(variance + float(options["eps"])) * gamma + beta}


def naive(inputs: Inputs, options: Options) -> dict[str, Tensor]:
    """The chain in three steps, each rounded to the dtype of x."""
    return {"y": _chain(inputs, options, kept(inputs, options))}


def eager(inputs: Inputs, options: Options) -> dict[str, Tensor]:
    """The same three steps with torch's own dropout: three launches on a GPU. For its time, not for its numbers."""
    z = functional.dropout(inputs["x"] + inputs["bias"], float(options["p"]), training=True)
    return {"y": functional.layer_norm(z, z.shape[-1:], inputs["gamma"], inputs["beta"], float(options["eps"]))}


def largest_score(inputs: Inputs, options: Options) -> float:
    """There are no scores here, and the limit does not grow with the inputs."""
    return 0.0


def make_inputs(
    axes: Mapping[str, int], fill: str, dtype: torch.dtype, options: Options, generator: torch.Generator
) -> dict[str, Tensor]:
    """x, bias, gamma, beta of the recipe called `fill`.

    lopsided: rows have a mean as large as their spread, so that padding which counts in the variance shows.
    small-variance: x and bias of about 2e-3, where eps decides. shifted: values near 50, where a variance taken as
    E[z^2] - E[z]^2 loses its digits. wide: values of about 20, whose squares overflow float16 when summed.
    """
    n_rows, dim = axes["rows"], axes["dim"]
    x = torch.randn(n_rows, dim, generator=generator)
    bias = torch.randn(dim, generator=generator) * 0.7
    gamma = 1.0 + 0.3 * torch.randn(dim, generator=generator)
    beta = 0.5 * torch.randn(dim, generator=generator)
    if fill == "lopsided":
        x += 1.0
    elif fill == "small-variance":
        x, bias = x * 2e-3, bias * 1.5e-3
    elif fill == "shifted":
        x += 50.0
    elif fill == "wide":
        x *= 20.0
    elif fill != "normal":
        raise KeyError(f"layer_norm has no fill {fill!r}; there are {', '.join(FILLS)}")
    made = {"x": x, "bias": bias, "gamma": gamma, "beta": beta}
    return {name: tensor.to(dtype) for name, tensor in made.items()}


def output_specs(inputs: Inputs, options: Options) -> Specs:
    x = inputs["x"]
    return {"y": (tuple(x.shape), x.dtype)}


def costs(axes: Mapping[str, int], dtype: torch.dtype, options: Options) -> Costs:
    """Eager: add, dropout (which also writes a mask of one byte an element), LayerNorm (mean and rstd, float32)."""
    n = axes["rows"] * axes["dim"]
    n_x, n_vector, n_stats = n * dtype.itemsize, axes["dim"] * dtype.itemsize, 2 * axes["rows"] * 4
    return Costs(
        flops=12 * n,
        least_bytes=2 * n_x + 3 * n_vector,
        naive_peak_bytes=3 * n_x + n + n_stats,
        reference_peak_bytes=n_x,
        eager_launches=3,
        eager_bytes=(2 * n_x + n_vector) + (2 * n_x + n) + (2 * n_x + 2 * n_vector + n_stats),
    )


OPERATIONS = {
    "fused": Operation(
        name="layer_norm.fused",
        axes=("rows", "dim"),
        inputs=("x", "bias", "gamma", "beta"),
        options=("p", "seed", "eps"),
        outputs=("y",),
        fills=FILLS,
        kernel_file=Path(__file__).parent / "kernels" / "layer_norm.py",
        mistakes=MISTAKES,
        make_inputs=make_inputs,
        output_specs=output_specs,
        oracle=oracle,
        naive=naive,
        eager=eager,
        largest_score=largest_score,
        costs=costs,
        strided_inputs=("x",),  # bias, gamma and beta are parameters, which are contiguous
    )
}
