"""Known ways to get the fused bias, dropout and LayerNorm wrong, each as the numbers it gives."""

# Every mistake takes (inputs, options, tile), every step all of its values, also where some have no use for all.
# ruff: noqa: ARG001, ARG005

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from reference.operation import Inputs, Mistake, Options, as_packed
from reference.philox import uniform

_DROP_STEP = "z <- where(rand(seed, i) >= p, z / (1 - p), 0)"
_VAR_STEP = "var = mean((z - mean)^2), over the d elements of the row"
_NORM_STEP = "y = (z - mean) / sqrt(var + eps) * gamma + beta"
_TAIL_HINT = "Right where d fills its block, wrong otherwise: what do padded lanes hold once the mean is subtracted?"


def _next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Variant:
    """The chain with one step changed; as it should be by default. Everything in float64."""

    add_bias: Callable[[Tensor, Tensor], Tensor] = lambda x, bias: x + bias
    # (row [rows, 1], column [1, dim], dim, rows) -> index that the random number is drawn for
    index: Callable[[Tensor, Tensor, int, int], Tensor] = lambda row, col, dim, rows: row * dim + col
    keep: Callable[[Tensor, float], Tensor] = lambda u, p: u >= torch.tensor(p, dtype=torch.float32)
    drop: Callable[[Tensor, Tensor, float], Tensor] = lambda z, keep, p: torch.where(keep, z / (1.0 - p), 0.0)
    mean: Callable[[Tensor], Tensor] = lambda z: z.mean(dim=-1, keepdim=True)
    # (centred, z, mean, tile) -> variance [rows, 1]
    variance: Callable[[Tensor, Tensor, Tensor, int], Tensor] = lambda centred, z, mean, tile: (centred * centred).mean(
        dim=-1, keepdim=True
    )
    divisor: Callable[[Tensor, float], Tensor] = lambda variance, eps: torch.sqrt(variance + eps)
    affine: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda y, gamma, beta: y * gamma + beta
    bias_after_drop: bool = False
    drop_last: bool = False

    def mask(self, inputs: Inputs, options: Options) -> Tensor:
        n_rows, dim = inputs["x"].shape
        row, col = torch.arange(n_rows)[:, None], torch.arange(dim)[None, :]
        index = self.index(row, col, dim, n_rows).expand(n_rows, dim)
        return self.keep(uniform(int(options["seed"]), index), float(options["p"]))

    def outputs(self, inputs: Inputs, options: Options, tile: int = 0) -> dict[str, Tensor]:
        x, bias, gamma, beta = (inputs[name].double() for name in ("x", "bias", "gamma", "beta"))
        keep, p = self.mask(inputs, options), float(options["p"])
        z = x if self.bias_after_drop else self.add_bias(x, bias)
        if not self.drop_last:
            z = self.drop(z, keep, p)
        if self.bias_after_drop:
            z = self.add_bias(z, bias)
        mean = self.mean(z)
        centred = z - mean
        variance = self.variance(centred, z, mean, tile)
        y = self.affine(centred / self.divisor(variance, float(options["eps"])), gamma, beta)
        return {"y": self.drop(y, keep, p) if self.drop_last else y}


def _padded_variance(width: Callable[[int, int], int]) -> Callable[[Tensor, Tensor, Tensor, int], Tensor]:
    """Padded lanes hold 0 - mean and count; width(dim, tile) is what the tiles cover."""

    def variance(centred: Tensor, z: Tensor, mean: Tensor, tile: int) -> Tensor:
        dim = centred.shape[-1]
        padding = max(0, width(dim, tile) - dim)
        return (centred * centred).mean(dim=-1, keepdim=True) + padding * mean * mean / dim

    return variance


def _padded_mean(z: Tensor) -> Tensor:
    return z.sum(dim=-1, keepdim=True) / _next_power_of_2(z.shape[-1])


def _padded_second_moment(centred: Tensor, z: Tensor, mean: Tensor, tile: int) -> Tensor:
    return (centred * centred).sum(dim=-1, keepdim=True) / _next_power_of_2(z.shape[-1])


def _packed(inputs: Inputs, options: Options, tile: int) -> dict[str, Tensor]:
    return _Variant().outputs({name: as_packed(tensor) for name, tensor in inputs.items()}, options, tile)


def _row_as_seed(inputs: Inputs, options: Options, tile: int) -> dict[str, Tensor]:
    n_rows, dim = inputs["x"].shape
    cols = torch.arange(dim)
    seed = int(options["seed"])
    u = torch.stack([uniform(seed + row, cols) for row in range(n_rows)])
    return _Variant(keep=lambda _u, p: u >= torch.tensor(p, dtype=torch.float32)).outputs(inputs, options, tile)


def _row_in_seed_too(inputs: Inputs, options: Options, tile: int) -> dict[str, Tensor]:
    n_rows, dim = inputs["x"].shape
    cols = torch.arange(dim)
    seed = int(options["seed"])
    u = torch.stack([uniform(seed + row, row * dim + cols) for row in range(n_rows)])
    return _Variant(keep=lambda _u, p: u >= torch.tensor(p, dtype=torch.float32)).outputs(inputs, options, tile)


_MASK_INDEX: tuple[tuple[str, _Variant], ...] = (
    ("Row 0 is right and every other row drops the same columns as row 0.",
     _Variant(index=lambda row, col, dim, rows: col)),
    ("Rows are kept or dropped whole.", _Variant(index=lambda row, col, dim, rows: row + 0 * col)),
    ("Row 0 is right, later rows are not, and widths that are powers of two pass.",
     _Variant(index=lambda row, col, dim, rows: row * _next_power_of_2(dim) + col)),
    ("Only the first element is right: the elements are counted down the columns.",
     _Variant(index=lambda row, col, dim, rows: col * rows + row)),
    ("Row 0 is right and every other row repeats it, shifted.",
     _Variant(index=lambda row, col, dim, rows: row + col)),
)  # fmt: skip


def _mask_by_strides(*, columns: bool) -> Callable[[Inputs, Options, int], dict[str, Tensor]]:
    """The random number drawn for where x lies in memory, not for which element it is."""

    def outputs(inputs: Inputs, options: Options, tile: int) -> dict[str, Tensor]:
        along_row, along_column = inputs["x"].stride()
        step = along_column if columns else 1
        return _Variant(index=lambda row, col, dim, rows: row * along_row + col * step).outputs(inputs, options, tile)

    return outputs


def _over_kept(*, mean: bool) -> Callable[[Inputs, Options, int], dict[str, Tensor]]:
    """Mean, or variance, over the kept elements alone."""

    def outputs(inputs: Inputs, options: Options, tile: int) -> dict[str, Tensor]:
        keep = _Variant().mask(inputs, options)
        n_kept = keep.sum(dim=-1, keepdim=True)
        if mean:
            return _Variant(mean=lambda z: z.sum(dim=-1, keepdim=True) / n_kept).outputs(inputs, options, tile)
        return _Variant(
            variance=lambda centred, z, mean, tile: (
                (centred * centred * keep).sum(dim=-1, keepdim=True) / centred.shape[-1]
            )
        ).outputs(inputs, options, tile)

    return outputs


def _bias_not_scaled(inputs: Inputs, options: Options, tile: int) -> dict[str, Tensor]:
    p = float(options["p"])
    return _Variant(
        add_bias=lambda x, bias: x / (1.0 - p) + bias, drop=lambda z, keep, _p: torch.where(keep, z, 0.0)
    ).outputs(inputs, options, tile)


MISTAKES: tuple[Mistake, ...] = (
    Mistake(
        label="bias-missing",
        step="z = x + bias",
        hint="The result does not change when the bias does.",
        outputs=_Variant(add_bias=lambda x, bias: x).outputs,
    ),
    Mistake(
        label="bias-after-dropout",
        step="z = x + bias, before the dropout",
        hint="Correct for p = 0 only: dropped elements hold the bias where they should hold 0.",
        outputs=_Variant(bias_after_drop=True).outputs,
    ),
    Mistake(
        label="dropout-after-norm",
        step="y = LayerNorm(dropout(x + bias))",
        hint="Correct for p = 0 only, and y is 0 where an element was dropped: in which order do the three steps come?",
        outputs=_Variant(drop_last=True).outputs,
    ),
    Mistake(
        label="dropout-not-scaled",
        step=_DROP_STEP,
        hint="Off only where eps matters, that is in rows of small variance: LayerNorm hides a factor that every kept "
        "element lacks.",
        outputs=_Variant(drop=lambda z, keep, p: torch.where(keep, z, 0.0)).outputs,
    ),
    Mistake(
        label="dropout-wrong-factor",
        step=_DROP_STEP,
        hint="Off only where eps matters, that is in rows of small variance: what are kept elements multiplied by?",
        outputs=_Variant(drop=lambda z, keep, p: torch.where(keep, z * (1.0 - p), 0.0)).outputs,
    ),
    Mistake(
        label="dropout-wrong-factor",
        step=_DROP_STEP,
        hint="Not finite for p = 0, and off where eps matters: what are kept elements divided by?",
        outputs=_Variant(drop=lambda z, keep, p: torch.where(keep, z / p, 0.0)).outputs,
    ),
    Mistake(
        label="dropout-wrong-factor",
        step=_DROP_STEP,
        hint="Correct for p = 0 only: x and bias do not weigh the same. What is divided by 1 - p, x or z?",
        outputs=_bias_not_scaled,
    ),
    *(
        Mistake(
            label="statistics-of-kept",
            step="mean and variance over the d elements of the row",
            hint=f"Correct for p = 0 only: does a dropped element count in the {what}?",
            outputs=_over_kept(mean=mean),
        )
        for mean, what in ((True, "mean"), (False, "variance"))
    ),
    Mistake(
        label="dropout-missing",
        step=_DROP_STEP,
        hint="Correct for p = 0 only: nothing is dropped.",
        outputs=_Variant(drop=lambda z, keep, p: z).outputs,
    ),
    Mistake(
        label="dropout-inverted",
        step=_DROP_STEP,
        hint="Exactly the elements that should be kept are dropped: which way round is the comparison with p?",
        outputs=_Variant(keep=lambda u, p: u < torch.tensor(p, dtype=torch.float32)).outputs,
    ),
    Mistake(
        label="dropout-inverted",
        step=_DROP_STEP,
        hint="As many elements survive as should be dropped: is the number compared with p or with 1 - p?",
        outputs=_Variant(keep=lambda u, p: u >= torch.tensor(1.0 - p, dtype=torch.float32)).outputs,
    ),
    Mistake(
        label="dropout-inverted",
        step=_DROP_STEP,
        hint="As many elements survive as should, but others: which side of the comparison keeps?",
        outputs=_Variant(keep=lambda u, p: u < torch.tensor(1.0 - p, dtype=torch.float32)).outputs,
    ),
    *(
        Mistake(
            label="wrong-dropout-mask",
            step="element i, counted row by row, is kept iff rand(seed, i) >= p",
            hint=f"{hint} For which number is each element's random value drawn?",
            outputs=variant.outputs,
        )
        for hint, variant in _MASK_INDEX
    ),
    *(
        Mistake(
            label="wrong-dropout-mask",
            step="element i, counted row by row, is kept iff rand(seed, i) >= p",
            hint="Row 0 is right and no other: every row draws from a seed of its own.",
            outputs=outputs,
        )
        for outputs in (_row_as_seed, _row_in_seed_too)
    ),
    *(
        Mistake(
            label="wrong-dropout-mask",
            step="element i, counted row by row, is kept iff rand(seed, i) >= p",
            hint="Only an x that is a view fails: does an element's random number depend on where it lies in memory?",
            outputs=_mask_by_strides(columns=columns),
        )
        for columns in (False, True)
    ),
    Mistake(
        label="unbiased-variance",
        step=_VAR_STEP,
        hint="The error shrinks like 1/d: by how many is the sum of squares divided?",
        outputs=_Variant(
            variance=lambda centred, z, mean, tile: (
                (centred * centred).sum(dim=-1, keepdim=True) / (centred.shape[-1] - 1)
            )
        ).outputs,
    ),
    Mistake(
        label="variance-not-centred",
        step=_VAR_STEP,
        hint="Rows with a large mean come out too small: what is squared?",
        outputs=_Variant(variance=lambda centred, z, mean, tile: (z * z).mean(dim=-1, keepdim=True)).outputs,
    ),
    Mistake(
        label="mean-missing",
        step=_NORM_STEP,
        hint="Rows keep their mean: what is subtracted before the division?",
        outputs=_Variant(mean=lambda z: torch.zeros_like(z[..., :1])).outputs,
    ),
    Mistake(
        label="tail-unmasked",
        step=_VAR_STEP,
        hint=_TAIL_HINT,
        outputs=_Variant(variance=_padded_variance(lambda dim, tile: _next_power_of_2(dim))).outputs,
    ),
    Mistake(
        label="tail-unmasked",
        step=_VAR_STEP,
        hint=_TAIL_HINT,
        outputs=_Variant(variance=_padded_variance(lambda dim, tile: -(-dim // tile) * tile)).outputs,
        tiled=True,
    ),
    Mistake(
        label="divided-by-block",
        step="mean = sum(z) / d, var = sum((z - mean)^2) / d",
        hint="Right where d fills its block, wrong otherwise: by which of the two widths are the sums divided?",
        outputs=_Variant(mean=_padded_mean, variance=_padded_second_moment).outputs,
    ),
    Mistake(
        label="eps-outside-sqrt",
        step=_NORM_STEP,
        hint="Only rows with a variance near eps are off: is eps added to the variance or to its root?",
        outputs=_Variant(divisor=lambda variance, eps: torch.sqrt(variance) + eps).outputs,
    ),
    Mistake(
        label="eps-missing",
        step=_NORM_STEP,
        hint="Only rows with a variance near eps are off: the result does not change when eps does.",
        outputs=_Variant(divisor=lambda variance, eps: torch.sqrt(variance)).outputs,
    ),
    Mistake(
        label="eps-hard-coded",
        step=_NORM_STEP,
        hint="Only another eps than the usual one is off: does the result change when eps does?",
        outputs=_Variant(divisor=lambda variance, eps: torch.sqrt(variance + 1e-5)).outputs,
    ),
    Mistake(
        label="sqrt-missing",
        step=_NORM_STEP,
        hint="Every row is off by its own standard deviation: what is the difference divided by?",
        outputs=_Variant(divisor=lambda variance, eps: variance + eps).outputs,
    ),
    Mistake(
        label="gamma-missing",
        step=_NORM_STEP,
        hint="The result does not change when gamma does.",
        outputs=_Variant(affine=lambda y, gamma, beta: y + beta).outputs,
    ),
    Mistake(
        label="beta-missing",
        step=_NORM_STEP,
        hint="The result does not change when beta does.",
        outputs=_Variant(affine=lambda y, gamma, beta: y * gamma).outputs,
    ),
    Mistake(
        label="gamma-beta-swapped",
        step=_NORM_STEP,
        hint="Columns are stretched by what should shift them: in which order do gamma and beta arrive?",
        outputs=_Variant(affine=lambda y, gamma, beta: y * beta + gamma).outputs,
    ),
    Mistake(
        label="ignores-strides",
        step="address = base + row * row stride + column * column stride",
        hint="Only inputs that are views fail: how does the kernel get from element to element, and from row to row?",
        outputs=_packed,
    ),
)
