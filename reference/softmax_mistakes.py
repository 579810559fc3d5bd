"""Known ways to get the online softmax wrong, each as the numbers it gives.

Names of the recurrence: m running maximum, l running denominator, c = exp(m_old - m_new).
"""

# Every mistake takes (inputs, options, tile), also where it has no use for two of them.
# ruff: noqa: ARG001, ARG005

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from reference.operation import Inputs, Mistake, Options, as_packed

_Outputs = Callable[[Inputs, Options, int], dict[str, Tensor]]
_NAN = float("nan")


def _softmax(x: Tensor) -> dict[str, Tensor]:
    return {"y": torch.softmax(x, dim=-1), "lse": torch.logsumexp(x, dim=-1)}


def _tiles(x: Tensor, tile: int) -> list[Tensor]:
    return [x[:, start : start + tile] for start in range(0, x.shape[-1], tile)]


def _no_max_subtraction(inputs: Inputs, options: Options, tile: int) -> dict[str, Tensor]:
    weights = torch.exp(inputs["x"].float())  # float32, where it overflows
    denom = weights.sum(dim=-1)
    return {"y": weights / denom[:, None], "lse": torch.log(denom)}


def _not_normalised(inputs: Inputs, options: Options, tile: int) -> dict[str, Tensor]:
    x = inputs["x"].double()
    return {"y": torch.exp(x - x.amax(dim=-1, keepdim=True)), "lse": torch.logsumexp(x, dim=-1)}


def _no_rescale(inputs: Inputs, options: Options, tile: int) -> dict[str, Tensor]:
    x = inputs["x"].double()
    m = torch.full(x.shape[:1], -math.inf, dtype=torch.float64)
    denom = torch.zeros_like(m)
    for part in _tiles(x, tile):
        m = torch.maximum(m, part.amax(dim=-1))
        denom = denom + torch.exp(part - m[:, None]).sum(dim=-1)
    return {"y": torch.exp(x - m[:, None]) / denom[:, None], "lse": m + torch.log(denom)}


def _per_tile(running_max: bool) -> _Outputs:
    """Every tile divided by its own sum. The weights are the same whichever maximum was subtracted."""

    def outputs(inputs: Inputs, options: Options, tile: int) -> dict[str, Tensor]:
        x = inputs["x"].double()
        m = torch.full(x.shape[:1], -math.inf, dtype=torch.float64)
        denom = torch.zeros_like(m)
        written = []
        for part in _tiles(x, tile):
            m_new = torch.maximum(m, part.amax(dim=-1))
            weights = torch.exp(part - m_new[:, None])
            denom = denom * torch.exp(m - m_new) + weights.sum(dim=-1)
            written.append(weights / (denom if running_max else weights.sum(dim=-1))[:, None])
            m = m_new
        return {"y": torch.cat(written, dim=-1), "lse": torch.logsumexp(x, dim=-1)}

    return outputs


def _tail_unmasked(width: Callable[[int, int], int]) -> _Outputs:
    """Padding of zeros counts; width(cols, tile) is what the tiles cover."""

    def outputs(inputs: Inputs, options: Options, tile: int) -> dict[str, Tensor]:
        x = inputs["x"].double()
        n_cols = x.shape[-1]
        found = _softmax(torch.nn.functional.pad(x, (0, max(0, width(n_cols, tile) - n_cols))))
        return {"y": found["y"][:, :n_cols], "lse": found["lse"]}

    return outputs


def _next_power_of_2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def _tail_skipped(inputs: Inputs, options: Options, tile: int) -> dict[str, Tensor]:
    x = inputs["x"].double()
    whole = x.shape[-1] // tile * tile
    y = torch.full_like(x, _NAN)  # never written
    if not whole:
        return {"y": y, "lse": torch.full(x.shape[:1], -math.inf, dtype=torch.float64)}
    found = _softmax(x[:, :whole])
    y[:, :whole] = found["y"]
    return {"y": y, "lse": found["lse"]}


def _over_rows(inputs: Inputs, options: Options, tile: int) -> dict[str, Tensor]:
    x = inputs["x"].double()
    return {"y": torch.softmax(x, dim=0), "lse": torch.logsumexp(x, dim=-1)}


def _log_probabilities(inputs: Inputs, options: Options, tile: int) -> dict[str, Tensor]:
    x = inputs["x"].double()
    return {"y": torch.log_softmax(x, dim=-1), "lse": torch.logsumexp(x, dim=-1)}


def _packed(inputs: Inputs, options: Options, tile: int) -> dict[str, Tensor]:
    return _softmax(as_packed(inputs["x"]).double())


def _base_two(inputs: Inputs, options: Options, tile: int) -> dict[str, Tensor]:
    return _softmax(inputs["x"].double() * math.log(2.0))


def _base_two_with(lse: Callable[[Tensor, Tensor], Tensor]) -> _Outputs:
    """Powers of two of natural values; lse(m, l) of what was summed then."""

    def outputs(inputs: Inputs, options: Options, tile: int) -> dict[str, Tensor]:
        x = inputs["x"].double()
        m = x.amax(dim=-1)
        weights = torch.exp2(x - m[:, None])
        denom = weights.sum(dim=-1)
        return {"y": weights / denom[:, None], "lse": lse(m, denom)}

    return outputs


def _maximum_from_zero(inputs: Inputs, options: Options, tile: int) -> dict[str, Tensor]:
    x = inputs["x"].float()  # float32, where what lies far below 0 vanishes
    m = x.amax(dim=-1).clamp_min(0.0)
    weights = torch.exp(x - m[:, None])
    denom = weights.sum(dim=-1)
    return {"y": weights / denom[:, None], "lse": m + torch.log(denom)}


def _rescaled_too_late(inputs: Inputs, options: Options, tile: int) -> dict[str, Tensor]:
    x = inputs["x"].double()
    m = torch.full(x.shape[:1], -math.inf, dtype=torch.float64)
    denom = torch.zeros_like(m)
    for part in _tiles(x, tile):
        m_new = torch.maximum(m, part.amax(dim=-1))
        denom = (denom + torch.exp(part - m_new[:, None]).sum(dim=-1)) * torch.exp(m - m_new)
        m = m_new
    return {"y": torch.exp(x - m[:, None]) / denom[:, None], "lse": m + torch.log(denom)}


def _maximum_of_tile(inputs: Inputs, options: Options, tile: int) -> dict[str, Tensor]:
    x = inputs["x"].double()
    lse = torch.logsumexp(x, dim=-1)
    denom = torch.exp(lse - x.amax(dim=-1))
    weights = [torch.exp(part - part.amax(dim=-1, keepdim=True)) for part in _tiles(x, tile)]
    return {"y": torch.cat(weights, dim=-1) / denom[:, None], "lse": lse}


def _no_maximum_in_second_walk(inputs: Inputs, options: Options, tile: int) -> dict[str, Tensor]:
    x = inputs["x"].float()  # float32, where it overflows
    lse = torch.logsumexp(inputs["x"].double(), dim=-1)
    denom = torch.exp(lse - inputs["x"].double().amax(dim=-1))
    return {"y": torch.exp(x) / denom.float()[:, None], "lse": lse}


def _lse_as(change: Callable[[Tensor, Tensor], Tensor]) -> _Outputs:
    """Right y; lse = change(m, log(l))."""

    def outputs(inputs: Inputs, options: Options, tile: int) -> dict[str, Tensor]:
        x = inputs["x"].double()
        m = x.amax(dim=-1)
        log_l = torch.logsumexp(x, dim=-1) - m
        return {"y": torch.softmax(x, dim=-1), "lse": change(m, log_l)}

    return outputs


_WRONG_LSE: tuple[tuple[str, Callable[[Tensor, Tensor], Tensor]], ...] = (
    ("It is as large as the denominator itself: something between l and lse is missing.",
     lambda m, log_l: m + torch.exp(log_l)),
    ("It knows nothing of how large the values were.", lambda m, log_l: log_l),
    ("It is the row's largest value and nothing else.", lambda m, log_l: m),
    ("It is below the row's largest value, which a logsumexp can never be: check the sign.",
     lambda m, log_l: m - log_l),
    ("It is the right one times a constant, everywhere: which base is its logarithm?",
     lambda m, log_l: (m + log_l) / math.log(2.0)),
    ("Only one of its two terms is in natural units.", lambda m, log_l: m + log_l / math.log(2.0)),
    ("Only one of its two terms is in natural units.", lambda m, log_l: m / math.log(2.0) + log_l),
    ("It is the denominator.", lambda m, log_l: torch.exp(log_l)),
)  # fmt: skip

_TAIL_STEP = "for each tile, lanes beyond T count for nothing"
_TAIL_HINT = (
    "Right when T is a multiple of your tile: what do the lanes beyond the last column hold, and what is exp of it?"
)

MISTAKES: tuple[Mistake, ...] = (
    # before those of which a wide tile leaves nothing but NaN, which these may give too
    Mistake(
        label="maximum-from-zero",
        step="m = -inf, before the first tile",
        hint="Only rows whose values all lie far below 0 are wrong: which value does the running maximum have before "
        "it has seen one?",
        outputs=_maximum_from_zero,
    ),
    Mistake(
        label="no-max-subtraction",
        step="exp(x - m_new)",
        hint="Ordinary values are right; values above 88 give infinities and values below -104 give 0 / 0: what keeps "
        "the argument of the exponential small?",
        outputs=_no_max_subtraction,
    ),
    Mistake(
        label="no-rescale-denominator",
        step="l <- l * exp(m_old - m_new) + sum(exp(x - m_new))",
        hint="Rows whose maximum grows in a later tile sum to less than 1, and falling-max passes: look at what "
        "happens to the running denominator when the maximum moves.",
        outputs=_no_rescale,
        tiled=True,
    ),
    Mistake(
        label="no-max-subtraction",
        step="y = exp(x - m) / l",
        hint="lse is right, and every row of y is off by its own factor: is the maximum subtracted in both walks?",
        outputs=_no_maximum_in_second_walk,
    ),
    Mistake(
        label="rescale-too-late",
        step="l <- l * exp(m_old - m_new) + sum(exp(x - m_new))",
        hint="What a tile adds to l is multiplied by that tile's own correction: which of the two was summed relative "
        "to the old maximum?",
        outputs=_rescaled_too_late,
        tiled=True,
    ),
    Mistake(
        label="maximum-of-tile",
        step="y = exp(x - m) / l, with m and l of the whole row",
        hint="lse is right, and so is the tile of each row that holds its maximum; the others are too large: which "
        "maximum does the second walk subtract?",
        outputs=_maximum_of_tile,
        tiled=True,
    ),
    Mistake(
        label="no-normalisation",
        step="y = exp(x - m) / l",
        hint="Every row's largest output is exactly 1 and lse is right: what is left to do with l?",
        outputs=_not_normalised,
    ),
    Mistake(
        label="normalised-per-tile",
        step="y = exp(x - m) / l, with m and l of the whole row",
        hint="Rows sum to the number of tiles, and rows of a single tile pass: which sum is each tile divided by?",
        outputs=_per_tile(running_max=False),
        tiled=True,
    ),
    Mistake(
        label="written-too-early",
        step="y = exp(x - m) / l, with m and l of the whole row",
        hint="The last tile of a row is right and earlier ones are too large: which m and l did they know?",
        outputs=_per_tile(running_max=True),
        tiled=True,
    ),
    Mistake(
        label="tail-unmasked",
        step=_TAIL_STEP,
        hint=_TAIL_HINT,
        outputs=_tail_unmasked(lambda n_cols, tile: -(-n_cols // tile) * tile),
        tiled=True,
    ),
    Mistake(
        label="tail-unmasked",
        step=_TAIL_STEP,
        hint=_TAIL_HINT,
        outputs=_tail_unmasked(lambda n_cols, tile: _next_power_of_2(n_cols)),
    ),
    Mistake(
        label="tail-unmasked",
        step=_TAIL_STEP,
        hint=_TAIL_HINT,
        outputs=_tail_unmasked(
            lambda n_cols, tile: -(-n_cols // min(tile, _next_power_of_2(n_cols))) * min(tile, _next_power_of_2(n_cols))
        ),
        tiled=True,
    ),
    Mistake(
        label="tail-skipped",
        step="for each tile, the last one too",
        hint="Columns after the last whole tile are neither counted nor written: count the turns of your loops when T "
        "is no multiple of the tile.",
        outputs=_tail_skipped,
        tiled=True,
    ),
    Mistake(
        label="softmax-over-rows",
        step="m_new = max(m, max(tile)), along the row",
        hint="Columns sum to 1, rows do not: along which axis are the maximum and the sum taken?",
        outputs=_over_rows,
    ),
    Mistake(
        label="log-probabilities",
        step="y = exp(x - m) / l",
        hint="y is negative throughout: it is the logarithm of what was asked for.",
        outputs=_log_probabilities,
    ),
    Mistake(
        label="ignores-strides",
        step="address = base + row * row stride + column * column stride",
        hint="Only an x that is a view fails: how does the kernel get from element to element, and from row to row?",
        outputs=_packed,
    ),
    Mistake(
        label="wrong-base",
        step="exp(x - m_new)",
        hint="Every row is too flat, as if x were multiplied by 0.69: which base do your exponentials have?",
        outputs=_base_two,
    ),
    *(
        Mistake(
            label="wrong-base",
            step="exp(x - m_new)",
            hint="Every row is too flat, as if x were multiplied by 0.69: which base do your exponentials have, and "
            "which the logarithm in lse?",
            outputs=_base_two_with(lse),
        )
        for lse in (lambda m, denom: m + torch.log(denom), lambda m, denom: m + torch.log2(denom))
    ),
    *(
        Mistake(
            label="wrong-logsumexp",
            step="lse = m + log(l)",
            hint=f"y is right, lse is not. {hint}",
            outputs=_lse_as(change),
        )
        for hint, change in _WRONG_LSE
    ),
)
