"""Known ways to get attention wrong, forward and backward, each as the numbers it gives.

Names of the recurrence: s scores, m running maximum, l running denominator, o accumulator, p = exp(s - m),
c = exp(m_old - m_new); in the backward P probabilities, dP = dO @ V^T, delta = rowsum(o * dO), dS = P * (dP - delta).
"""

# Every mistake takes (inputs, options, tile), every mask (i, j, queries, keys), also where some have no use for all.
# ruff: noqa: ARG005

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from reference.operation import Inputs, Mistake, Options, as_packed

_NAN = float("nan")
_LN_2 = math.log(2.0)
_MASK_STEP = "s <- where(key index <= query index, s, -inf)"
_SCALE_STEP = "s = q @ K^T / sqrt(d)"
_LSE_STEP = "lse = m + log(l)"


class _Streamed(NamedTuple):
    """Running values after the last tile."""

    acc: Tensor  # [batch, queries, head_dim]
    m: Tensor  # [batch, queries]
    denom: Tensor  # [batch, queries]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Variant:
    """Attention with its scale or its mask changed; as it should be by default."""

    scale: Callable[[int], float] = lambda d: 1.0 / math.sqrt(d)
    # (query indices [queries, 1], key indices [1, keys], queries, keys) -> which pairs count when causal
    causal: Callable[[Tensor, Tensor, int, int], Tensor] = lambda i, j, n_q, n_k: j <= i
    softmax_dim: int = -1

    def mask(self, options: Options, n_q: int, n_k: int) -> Tensor:
        if not options.get("is_causal", False):
            return torch.ones(n_q, n_k, dtype=torch.bool)
        return self.causal(torch.arange(n_q)[:, None], torch.arange(n_k)[None, :], n_q, n_k)

    def scores(self, inputs: Inputs, options: Options) -> Tensor:
        """[batch, queries, keys], float64, -inf where a pair does not count."""
        q, k = inputs["q"].double(), inputs["k"].double()
        scores = q @ k.mT * self.scale(q.shape[-1])
        return scores.masked_fill(~self.mask(options, q.shape[1], k.shape[1]), -math.inf)

    def forward(self, inputs: Inputs, options: Options, _tile: int = 0) -> dict[str, Tensor]:
        scores = self.scores(inputs, options)
        o = torch.softmax(scores, dim=self.softmax_dim) @ inputs["v"].double()
        return {"o": o, "lse": torch.logsumexp(scores, dim=-1)}


_RIGHT = _Variant()
_NOT_CAUSAL = _Variant(causal=lambda i, j, n_q, n_k: torch.ones(n_q, n_k, dtype=torch.bool))


def _streamed(
    scores: Tensor,
    v: Tensor,
    tile: int,
    *,
    rescale_output: bool = True,
    rescale_denominator: bool = True,
    add: bool = True,
    correction_base: float = math.e,
) -> _Streamed:
    """The recurrence over tiles of keys, with its corrections left out, or in another base, on demand."""
    n_batch, n_queries, n_keys = scores.shape
    m = torch.full((n_batch, n_queries), -math.inf, dtype=torch.float64)
    denom = torch.zeros_like(m)
    acc = torch.zeros(n_batch, n_queries, v.shape[-1], dtype=torch.float64)
    for start in range(0, n_keys, tile):
        s = scores[..., start : start + tile]
        m_new = torch.maximum(m, s.amax(dim=-1))
        correction = torch.exp((m - m_new) * math.log(correction_base))
        p = torch.exp(s - m_new[..., None])
        denom = (denom * correction if rescale_denominator else denom) + p.sum(dim=-1)
        old = acc * correction[..., None] if rescale_output else acc
        acc = p @ v[:, start : start + tile] + (old if add else 0.0)
        m = m_new
    return _Streamed(acc, m, denom)


def _without_rescale(*, output: bool, denominator: bool) -> Callable[[Inputs, Options, int], dict[str, Tensor]]:
    def outputs(inputs: Inputs, options: Options, tile: int) -> dict[str, Tensor]:
        run = _streamed(
            _RIGHT.scores(inputs, options),
            inputs["v"].double(),
            tile,
            rescale_output=not output,
            rescale_denominator=not denominator,
        )
        return {"o": run.acc / run.denom[..., None], "lse": run.m + torch.log(run.denom)}

    return outputs


def _overwritten(inputs: Inputs, options: Options, tile: int) -> dict[str, Tensor]:
    run = _streamed(
        _RIGHT.scores(inputs, options),
        inputs["v"].double(),
        tile,
        add=False,
    )
    return {"o": run.acc / run.denom[..., None], "lse": run.m + torch.log(run.denom)}


def _correction_in_base(base: float) -> Callable[[Inputs, Options, int], dict[str, Tensor]]:
    """Right weights in every tile, and a correction in another base."""

    def outputs(inputs: Inputs, options: Options, tile: int) -> dict[str, Tensor]:
        run = _streamed(_RIGHT.scores(inputs, options), inputs["v"].double(), tile, correction_base=base)
        return {"o": run.acc / run.denom[..., None], "lse": run.m + torch.log(run.denom)}

    return outputs


def _rescaled_too_late(inputs: Inputs, options: Options, tile: int) -> dict[str, Tensor]:
    """A tile's own share of o is multiplied by the correction as well; nothing is left of the first one."""
    scores, v = _RIGHT.scores(inputs, options), inputs["v"].double()
    m = torch.full(scores.shape[:2], -math.inf, dtype=torch.float64)
    acc = torch.zeros(inputs["q"].shape, dtype=torch.float64)
    for start in range(0, scores.shape[-1], tile):
        s = scores[..., start : start + tile]
        m_new = torch.maximum(m, s.amax(dim=-1))
        p = torch.exp(s - m_new[..., None])
        acc = (acc + p @ v[:, start : start + tile]) * torch.exp(m - m_new)[..., None]
        m = m_new
    lse = torch.logsumexp(scores, dim=-1)
    return {"o": acc / torch.exp(lse - m)[..., None], "lse": lse}


def _maximum_from_zero(inputs: Inputs, options: Options, _tile: int) -> dict[str, Tensor]:
    scores = _RIGHT.scores(inputs, options).float()  # float32, where what lies far below 0 vanishes
    m = scores.amax(dim=-1).clamp_min(0.0)
    weights = torch.exp(scores - m[..., None])
    denom = weights.sum(dim=-1)
    return {"o": weights @ inputs["v"].float() / denom[..., None], "lse": m + torch.log(denom)}


def _base_two_with(lse: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Inputs, Options, int], dict[str, Tensor]]:
    """Powers of two of natural scores; lse(m, l) of what was summed then."""

    def outputs(inputs: Inputs, options: Options, _tile: int) -> dict[str, Tensor]:
        scores = _RIGHT.scores(inputs, options)
        m = scores.amax(dim=-1)
        weights = torch.exp2(scores - m[..., None])
        denom = weights.sum(dim=-1)
        return {"o": weights @ inputs["v"].double() / denom[..., None], "lse": lse(m, denom)}

    return outputs


def _sum_over_queries(*, maximum: bool) -> Callable[[Inputs, Options, int], dict[str, Tensor]]:
    """In square tiles: the sum of a tile over its queries, taken for that over its keys; the maximum too, or not."""

    def outputs(inputs: Inputs, options: Options, tile: int) -> dict[str, Tensor]:
        n_batch, n_queries, d = inputs["q"].shape
        n_keys = inputs["k"].shape[1]
        more_q, more_k = -n_queries % tile, -n_keys % tile
        q = torch.nn.functional.pad(inputs["q"], (0, 0, 0, more_q))
        k = torch.nn.functional.pad(inputs["k"], (0, 0, 0, more_k))
        v = torch.nn.functional.pad(inputs["v"], (0, 0, 0, more_k)).float()
        scores = _RIGHT.scores({"q": q, "k": k}, options).float()  # float32, where it overflows
        scores[..., n_keys:] = -math.inf
        scores = scores.reshape(n_batch, -1, tile, scores.shape[-1])  # a tile of queries has an axis of its own
        m = torch.full(scores.shape[:3], -math.inf)
        denom = torch.zeros_like(m)
        acc = torch.zeros(*m.shape, d)
        for start in range(0, n_keys, tile):
            s = scores[..., start : start + tile]
            m_new = torch.maximum(m, s.amax(dim=-2 if maximum else -1))
            correction = torch.exp(m - m_new)
            p = torch.exp(s - m_new[..., None])
            denom = denom * correction + p.sum(dim=-2)
            acc = acc * correction[..., None] + p @ v[:, None, start : start + tile]
            m = m_new
        o, lse = acc / denom[..., None], m + torch.log(denom)
        return {
            "o": o.reshape(n_batch, -1, d)[:, :n_queries],
            "lse": lse.reshape(n_batch, -1)[:, :n_queries],
        }

    return outputs


def _not_advanced(*, keys: bool, values: bool) -> Callable[[Inputs, Options, int], dict[str, Tensor]]:
    """Every turn of the loop reads the first tile again."""

    def outputs(inputs: Inputs, options: Options, tile: int) -> dict[str, Tensor]:
        at = torch.arange(inputs["k"].shape[1]) % tile
        k = inputs["k"][:, at] if keys else inputs["k"]
        v = inputs["v"][:, at] if values else inputs["v"]
        return _RIGHT.forward({**inputs, "k": k, "v": v}, options)

    return outputs


def _masked_with_zero(inputs: Inputs, options: Options, _tile: int) -> dict[str, Tensor]:
    scores = _NOT_CAUSAL.scores(inputs, options)
    scores = scores.masked_fill(~_RIGHT.mask(options, *scores.shape[1:]), 0.0)
    o = torch.softmax(scores, dim=-1) @ inputs["v"].double()
    return {"o": o, "lse": torch.logsumexp(scores, dim=-1)}


def _masked_with_zero_after_the_tail(inputs: Inputs, options: Options, tile: int) -> dict[str, Tensor]:
    """The causal mask gives a score of 0 to the keys that only pad the last tile as well."""
    found = _masked_with_zero(inputs, options, tile)
    n_queries, n_keys = inputs["q"].shape[1], inputs["k"].shape[1]
    if not options.get("is_causal", False):
        return found
    padding = torch.arange(n_keys, n_keys + -n_keys % tile)
    n_padding = (padding[None, :] > torch.arange(n_queries)[:, None]).sum(dim=-1)
    lse = torch.logaddexp(found["lse"], torch.log(n_padding.double()))
    return {"o": found["o"] * torch.exp(found["lse"] - lse)[..., None], "lse": lse}


def _masked_too_late(inputs: Inputs, options: Options, _tile: int) -> dict[str, Tensor]:
    scores = _NOT_CAUSAL.scores(inputs, options)
    weights = torch.softmax(scores, dim=-1) * _RIGHT.mask(options, *scores.shape[1:])
    return {"o": weights @ inputs["v"].double(), "lse": torch.logsumexp(scores, dim=-1)}


def _scaled_by_length(axis: str) -> Callable[[Inputs, Options, int], dict[str, Tensor]]:
    def outputs(inputs: Inputs, options: Options, _tile: int) -> dict[str, Tensor]:
        length = inputs[axis].shape[1]
        return _Variant(scale=lambda d: 1.0 / math.sqrt(length)).forward(inputs, options)

    return outputs


def _per_tile(inputs: Inputs, options: Options, tile: int) -> dict[str, Tensor]:
    scores, v = _RIGHT.scores(inputs, options), inputs["v"].double()
    o = torch.zeros(inputs["q"].shape, dtype=torch.float64)
    for start in range(0, scores.shape[-1], tile):
        part = torch.softmax(scores[..., start : start + tile], dim=-1)
        o += torch.nan_to_num(part) @ v[:, start : start + tile]  # NaN: a tile that the row does not see at all
    return {"o": o, "lse": torch.logsumexp(scores, dim=-1)}


def _no_max_subtraction(inputs: Inputs, options: Options, _tile: int) -> dict[str, Tensor]:
    weights = torch.exp(_RIGHT.scores(inputs, options).float())  # float32, where it overflows
    denom = weights.sum(dim=-1)
    return {"o": weights @ inputs["v"].float() / denom[..., None], "lse": torch.log(denom)}


def _not_normalised(inputs: Inputs, options: Options, _tile: int) -> dict[str, Tensor]:
    scores = _RIGHT.scores(inputs, options)
    weights = torch.exp(scores - scores.amax(dim=-1, keepdim=True))
    return {"o": weights @ inputs["v"].double(), "lse": torch.logsumexp(scores, dim=-1)}


def _tail_unmasked(inputs: Inputs, options: Options, tile: int) -> dict[str, Tensor]:
    q, k = inputs["q"], inputs["k"]
    n_keys = k.shape[1]
    padding = -n_keys % tile
    padded = {"q": q, "k": torch.nn.functional.pad(k, (0, 0, 0, padding))}  # keys of zeros: score 0
    scores = _RIGHT.scores(padded, options)
    o = torch.softmax(scores, dim=-1)[..., :n_keys] @ inputs["v"].double()
    return {"o": o, "lse": torch.logsumexp(scores, dim=-1)}


def _tail_skipped(inputs: Inputs, options: Options, tile: int) -> dict[str, Tensor]:
    whole = inputs["k"].shape[1] // tile * tile
    if not whole:
        # nothing is ever added: 0 / 0, and -inf + log(0)
        o = torch.full(inputs["q"].shape, _NAN, dtype=torch.float64)
        return {"o": o, "lse": torch.full(inputs["q"].shape[:2], -math.inf, dtype=torch.float64)}
    return _RIGHT.forward({**inputs, "k": inputs["k"][:, :whole], "v": inputs["v"][:, :whole]}, options)


def _query_tail_unwritten(inputs: Inputs, options: Options, tile: int) -> dict[str, Tensor]:
    found = _RIGHT.forward(inputs, options)
    n_queries = inputs["q"].shape[1]
    for tensor in found.values():
        tensor[:, max(tile, n_queries // tile * tile) :] = _NAN  # one program is always launched
    return found


def _causal_in_tiles(
    seen: Callable[[Tensor, Tensor, int], Tensor],
) -> Callable[[Inputs, Options, int], dict[str, Tensor]]:
    """seen(query indices, key indices, tile): which pairs count when causal."""

    def outputs(inputs: Inputs, options: Options, tile: int) -> dict[str, Tensor]:
        return _Variant(causal=lambda i, j, n_q, n_k: seen(i, j, tile)).forward(inputs, options)

    return outputs


def _read(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """What a kernel reads of `tensor` with other strides; NaN where its memory has ended."""
    flat = torch.as_strided(
        tensor, (tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset(),), (1,)
    )
    at = sum(
        torch.arange(size).reshape([-1 if axis == one else 1 for one in range(tensor.dim())]) * stride
        for axis, (size, stride) in enumerate(zip(tensor.shape, strides, strict=True))
    )
    assert isinstance(at, Tensor)  # a tensor has axes
    inside = at < len(flat)
    return torch.where(inside, flat[torch.where(inside, at, 0)], _NAN)


def _with_strides(
    strides: Callable[[Inputs, str], tuple[int, ...]], *names: str
) -> Callable[[Inputs, Options, int], dict[str, Tensor]]:
    """Inputs `names` read with strides(inputs, name)."""

    def outputs(inputs: Inputs, options: Options, _tile: int) -> dict[str, Tensor]:
        return _RIGHT.forward(
            {**inputs, **{name: _read(inputs[name], strides(inputs, name)) for name in names}}, options
        )

    return outputs


def _swapped(inputs: Inputs, name: str) -> tuple[int, ...]:
    batch, row, col = inputs[name].stride()
    return batch, col, row


def _of_q(inputs: Inputs, _name: str) -> tuple[int, ...]:
    return inputs["q"].stride()


def _packed(inputs: Inputs, options: Options, _tile: int) -> dict[str, Tensor]:
    return _RIGHT.forward({name: as_packed(inputs[name]) for name in ("q", "k", "v")}, options)


def _mean_of_values(inputs: Inputs, options: Options, _tile: int) -> dict[str, Tensor]:
    level = _Variant(scale=lambda _d: 0.0).scores(inputs, options)
    return {
        "o": torch.softmax(level, dim=-1) @ inputs["v"].double(),
        "lse": torch.logsumexp(_RIGHT.scores(inputs, options), dim=-1),
    }


def _keys_for_values(inputs: Inputs, options: Options, _tile: int) -> dict[str, Tensor]:
    return _RIGHT.forward({**inputs, "v": inputs["k"]}, options)


def _values_for_keys(inputs: Inputs, options: Options, _tile: int) -> dict[str, Tensor]:
    return _RIGHT.forward({**inputs, "k": inputs["v"]}, options)


def _lse_as(change: Callable[[Tensor, Tensor, int], Tensor]) -> Callable[[Inputs, Options, int], dict[str, Tensor]]:
    """Right o; lse = change(m, log(l), d), with m the largest score of the row."""

    def outputs(inputs: Inputs, options: Options, _tile: int = 0) -> dict[str, Tensor]:
        scores = _RIGHT.scores(inputs, options)
        m = scores.amax(dim=-1)
        log_l = torch.logsumexp(scores, dim=-1) - m
        found = _RIGHT.forward(inputs, options)
        return {"o": found["o"], "lse": change(m, log_l, inputs["q"].shape[-1])}

    return outputs


# Wrong logsumexps: shared by forward, where lse is looked at, and training, where it spoils the gradients.
_WRONG_LSE: tuple[tuple[str, Callable[[Tensor, Tensor, int], Tensor]], ...] = (
    ("The stored value is far too large and grows with d: look at what m was the maximum of.",
     lambda m, log_l, d: m * math.sqrt(d) + log_l),
    ("The stored value is as large as the denominator itself: something between l and lse is missing.",
     lambda m, log_l, d: m + torch.exp(log_l)),
    ("The stored value knows nothing of how large the scores were.", lambda m, log_l, d: log_l),
    ("The stored value is the row's largest score and nothing else.", lambda m, log_l, d: m),
    ("The stored value is below the row's largest score, which a logsumexp can never be: check the sign.",
     lambda m, log_l, d: m - log_l),
    ("The stored value is the right one times a constant, everywhere: which base is its logarithm?",
     lambda m, log_l, d: (m + log_l) / _LN_2),
    ("Only one of the two terms of lse is in natural units.", lambda m, log_l, d: m / _LN_2 + log_l),
    ("Only one of the two terms of lse is in natural units.", lambda m, log_l, d: m + log_l / _LN_2),
    ("The stored value is the denominator.", lambda m, log_l, d: torch.exp(log_l)),
)  # fmt: skip


def _scaled_for(fixed: int) -> _Variant:
    return _Variant(scale=lambda _d: 1.0 / math.sqrt(fixed))


_SCALES: tuple[tuple[str, str, _Variant], ...] = (
    ("missing-scale",
     "Scores are too large by a factor that grows with d, so the softmax is too sharp; one factor of the score line "
     "has no effect.",
     _Variant(scale=lambda d: 1.0)),
    ("wrong-scale",
     "The probabilities are too flat, and the more so the larger d is: compare your factor with the handout at two "
     "values of d.",
     _Variant(scale=lambda d: 1.0 / d)),
    ("wrong-scale", "Scores are far too large: is the scale multiplied or divided by?", _Variant(scale=math.sqrt)),
    ("wrong-scale", "The probabilities are slightly too sharp for every d: which root is it?",
     _Variant(scale=lambda d: d**-0.25)),
    *(("wrong-scale", f"Right for d = {fixed} and for no other: what does your factor depend on?", _scaled_for(fixed))
      for fixed in (16, 32, 64, 128)),
    ("wrong-base",
     "Scores act as if multiplied by 0.69 everywhere: which base do your exponentials have, and which the scores?",
     _Variant(scale=lambda d: _LN_2 / math.sqrt(d))),
    ("wrong-base",
     "Scores act as if multiplied by 1.44 everywhere: which base do your exponentials have, and which the scores?",
     _Variant(scale=lambda d: 1.0 / _LN_2 / math.sqrt(d))),
)  # fmt: skip

_MASKS: tuple[tuple[str, str, _Variant], ...] = (
    ("causal-missing",
     "is_causal=True gives what is_causal=False gives: follow the flag from the launch to the scores.",
     _Variant(causal=lambda i, j, n_q, n_k: torch.ones(n_q, n_k, dtype=torch.bool))),
    ("causal-inverted",
     "Causal rows see the keys that come after them and not those before: the last query should see the most keys.",
     _Variant(causal=lambda i, j, n_q, n_k: j >= i)),
    ("causal-off-by-one",
     "Query 0 sees nothing and every other query misses one key: which key may a query see last?",
     _Variant(causal=lambda i, j, n_q, n_k: j < i)),
    ("causal-off-by-one",
     "Every causal query sees one key too many: which key may a query see last?",
     _Variant(causal=lambda i, j, n_q, n_k: j <= i + 1)),
    ("causal-aligned-to-end",
     "Causal is right when there are as many queries as keys and wrong otherwise: from where are the two counted?",
     _Variant(causal=lambda i, j, n_q, n_k: j - (n_k - n_q) <= i)),
)  # fmt: skip

_STREAMS: tuple[Mistake, ...] = (
    # before those of which a wide tile leaves nothing but NaN, which these may give too
    Mistake(
        label="maximum-from-zero",
        step="m = -inf, before the first tile",
        hint="Only rows whose scores all lie far below 0 are wrong: which value does the running maximum have before "
        "it has seen a score?",
        outputs=_maximum_from_zero,
    ),
    Mistake(
        label="no-max-subtraction",
        step="p = exp(s - m_new)",
        hint="Ordinary scores are right; scores above 88 give infinities and scores below -104 give 0 / 0: what keeps "
        "the argument of the exponential small?",
        outputs=_no_max_subtraction,
    ),
    Mistake(
        label="no-rescale-output",
        step="o <- o * exp(m_old - m_new) + p @ V",
        hint="Rows whose maximum grows in a later key tile come out wrong, lse and falling-max are right: look at what "
        "happens to the accumulator when the maximum moves, beside what happens to l.",
        outputs=_without_rescale(output=True, denominator=False),
        tiled=True,
    ),
    Mistake(
        label="no-rescale-denominator",
        step="l <- l * exp(m_old - m_new) + sum(p)",
        hint="o is too small and lse too large in rows whose maximum grows in a later key tile: look at what happens "
        "to the running denominator when the maximum moves.",
        outputs=_without_rescale(output=False, denominator=True),
        tiled=True,
    ),
    Mistake(
        label="no-rescale",
        step="c = exp(m_old - m_new)",
        hint="Rows whose maximum grows in a later key tile weigh the earlier tiles too much, in o and in lse: what was "
        "summed relative to the old maximum is taken for relative to the new one.",
        outputs=_without_rescale(output=True, denominator=True),
        tiled=True,
    ),
    Mistake(
        label="rescale-too-late",
        step="o <- o * exp(m_old - m_new) + p @ V",
        hint="lse is right. What a key tile adds to o is multiplied by that tile's own correction: which of the two "
        "was summed relative to the old maximum?",
        outputs=_rescaled_too_late,
        tiled=True,
    ),
    *(
        Mistake(
            label="wrong-base",
            step="c = exp(m_old - m_new)",
            hint="Right in rows whose maximum lies in the first key tile: the correction and the exponentials of a "
            "tile are powers of different bases.",
            outputs=_correction_in_base(base),
            tiled=True,
        )
        for base in (2.0, math.exp(1.0 / _LN_2))
    ),
    *(
        Mistake(
            label="wrong-base",
            step="p = exp(s - m_new)",
            hint="The probabilities are too flat, as if scores were multiplied by 0.69: which base do your "
            "exponentials have, which the scores, and which the logarithm in lse?",
            outputs=_base_two_with(lse),
        )
        for lse in (lambda m, denom: m + torch.log(denom), lambda m, denom: m + torch.log2(denom))
    ),
    *(
        Mistake(
            label="tile-not-advanced",
            step="for each K,V tile: the next one of both",
            hint=f"Right where there is a single key tile. {seen}: what does each turn of the loop read?",
            outputs=_not_advanced(keys=keys, values=values),
            tiled=True,
        )
        for keys, values, seen in (
            (True, False, "The scores of every tile are those of the first, and the values are not"),
            (False, True, "lse is right, and o is made of the first tile's values alone"),
            (True, True, "Every tile gives the scores and the values of the first"),
        )
    ),
    Mistake(
        label="accumulator-overwritten",
        step="o <- o * exp(m_old - m_new) + p @ V",
        hint="Only the last key tile is left in o; lse is right. Look at how a tile's product joins the accumulator.",
        outputs=_overwritten,
        tiled=True,
    ),
    Mistake(
        label="normalised-per-tile",
        step="o / l, once, after the last tile",
        hint="o is the sum of one softmax per key tile, and right where there is a single tile: where is the division?",
        outputs=_per_tile,
        tiled=True,
    ),
    Mistake(
        label="tail-unmasked",
        step="s <- where(key index < Nk, s, -inf)",
        hint="Right when Nk is a multiple of your key tile: which score do the keys have that only pad the last tile?",
        outputs=_tail_unmasked,
        tiled=True,
    ),
    Mistake(
        label="tail-skipped",
        step="for each K,V tile, the last one too",
        hint="Keys after the last whole tile have no influence: count the turns of your loop when Nk is no multiple of "
        "the tile.",
        outputs=_tail_skipped,
        tiled=True,
    ),
    Mistake(
        label="no-normalisation",
        step="o / l, after the last tile",
        hint="Every row of o is too large by its own factor, and lse is right: what is left to do with l at the end?",
        outputs=_not_normalised,
    ),
    Mistake(
        label="output-unwritten",
        step="one program for every query tile, the last one too",
        hint="The last rows of every batch entry were never written: how many programs does the grid start when Nq is "
        "no multiple of the query tile?",
        outputs=_query_tail_unwritten,
        tiled=True,
    ),
    Mistake(
        label="ignores-strides",
        step="address = base + row * row stride + column * column stride",
        hint="Only inputs that are views fail: how does the kernel get from one row to the next?",
        outputs=_packed,
    ),
    *(
        Mistake(
            label="wrong-strides",
            step="address = base + batch * batch stride + row * row stride + column * column stride",
            hint=f"{seen} are read with {what}: compare the strides that you hand over with those that the kernel "
            "takes.",
            outputs=_with_strides(strides, *names),
        )
        for seen, what, strides, names in (
            ("The keys", "row and column stride exchanged", _swapped, ("k",)),
            ("The values", "row and column stride exchanged", _swapped, ("v",)),
            ("The queries", "row and column stride exchanged", _swapped, ("q",)),
            ("Keys and values", "the strides of q, which differ where Nq and Nk do", _of_q, ("k", "v")),
            ("The keys", "the strides of q, which differ where Nq and Nk do", _of_q, ("k",)),
            ("The values", "the strides of q, which differ where Nq and Nk do", _of_q, ("v",)),
        )
    ),
    Mistake(
        label="mean-of-values",
        step="o <- o * c + p @ V",
        hint="Every row of o is the plain average of the values it may see: the scores have no influence on it.",
        outputs=_mean_of_values,
    ),
    Mistake(
        label="softmax-over-queries",
        step="m_new = max(m, max(s)), over the keys",
        hint="The weights of one query do not sum to 1, those of one key over the queries do: along which axis are the "
        "maximum and the sum taken?",
        outputs=_Variant(softmax_dim=-2).forward,
    ),
    *(
        Mistake(
            label="softmax-over-queries",
            step="l <- l * c + sum(p), over the keys",
            hint=f"{what} taken over the queries of a tile and not over its keys: along which axis does it run?",
            outputs=_sum_over_queries(maximum=maximum),
            tiled=True,
        )
        for maximum, what in ((False, "The sum is"), (True, "Maximum and sum are"))
    ),
    Mistake(
        label="wrong-operand",
        step="o <- o * c + p @ V",
        hint="lse is right and o is a weighted sum of the wrong tensor's rows: check what the second product reads.",
        outputs=_keys_for_values,
    ),
    Mistake(
        label="wrong-operand",
        step=_SCALE_STEP,
        hint="o and lse fit scores with the wrong tensor's rows: check what the first product reads.",
        outputs=_values_for_keys,
    ),
)

# Of scale and mask, where the numbers need more than another factor or another set of pairs.
_SCORES: tuple[Mistake, ...] = (
    *(
        Mistake(
            label="wrong-scale",
            step=_SCALE_STEP,
            hint="The probabilities are too flat, and the more so the longer the sequence is: which size is under the "
            "root?",
            outputs=_scaled_by_length(axis),
        )
        for axis in ("k", "q")
    ),
    *(
        Mistake(
            label="causal-masked-with-zero",
            step=_MASK_STEP,
            hint="Causal rows still give weight to the keys after them, as much as a score of 0 has: what does a score "
            "become that must not count?",
            outputs=outputs,
            tiled=tiled,
        )
        for outputs, tiled in ((_masked_with_zero, False), (_masked_with_zero_after_the_tail, True))
    ),
    Mistake(
        label="causal-masked-too-late",
        step=_MASK_STEP,
        hint="Causal rows are too small and lse is that of all keys: what did l sum up before the mask took effect?",
        outputs=_masked_too_late,
    ),
    *(
        Mistake(
            label="causal-in-tile-only",
            step=_MASK_STEP,
            hint=f"The first tile is right when causal and later ones are not: {what} counted from the start of the "
            "tile, not of the sequence?",
            outputs=_causal_in_tiles(seen),
            tiled=True,
        )
        for what, seen in (
            ("are queries", lambda i, j, tile: j <= i % tile),
            ("are keys", lambda i, j, tile: j % tile <= i),
            ("are queries and keys", lambda i, j, tile: j % tile <= i % tile),
        )
    ),
    *(
        Mistake(
            label="causal-tile-skipped",
            step="for each K,V tile that some query of the program sees, the last one too",
            hint="Causal rows miss keys of the last tile that they see, and the first rows see none: where does the "
            "loop over the keys stop?",
            outputs=_causal_in_tiles(seen),
            tiled=True,
        )
        for seen in (
            lambda i, j, tile: (j <= i) & (j < i // tile * tile),
            # keys in tiles twice as wide as those of the queries
            lambda i, j, tile: (j <= i) & (j < (i // tile + 1) * tile // (2 * tile) * (2 * tile)),
        )
    ),
)

FORWARD_MISTAKES: tuple[Mistake, ...] = (
    *_STREAMS,
    *(Mistake(label=label, step=_SCALE_STEP, hint=hint, outputs=v.forward) for label, hint, v in _SCALES),
    *(Mistake(label=label, step=_MASK_STEP, hint=hint, outputs=v.forward) for label, hint, v in _MASKS),
    *_SCORES,
    *(
        Mistake(
            label="wrong-logsumexp", step=_LSE_STEP, hint=f"o is right, lse is not. {hint}", outputs=_lse_as(change)
        )
        for hint, change in _WRONG_LSE
    ),
)


# ---- backward --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Backward:
    """The backward that recomputes P from lse, with one step changed; as it should be by default."""

    variant: _Variant = _RIGHT
    dq_scale: bool = True
    dk_scale: bool = True
    subtract_delta: bool = True
    weigh_ds: bool = True  # dS = P * (...)
    delta_of: Callable[[Tensor, Tensor, Tensor], Tensor] = lambda o, do, dp: (o * do).sum(dim=-1)
    read_do: Callable[[Tensor], Tensor] = lambda do: do
    read_do_for_delta: Callable[[Tensor], Tensor] = lambda do: do
    weigh_delta: bool = True  # dS = P * (dP - delta), not P * dP - delta
    same_scale: bool = True  # dQ and dK are scaled as the scores are, also where that is wrong

    def gradients(self, inputs: Inputs, options: Options, o: Tensor, lse: Tensor) -> dict[str, Tensor]:
        q, k, v = (inputs[name].double() for name in ("q", "k", "v"))
        do = self.read_do(inputs["do"]).double()
        scale = (self.variant if self.same_scale else _RIGHT).scale(q.shape[-1])
        p = torch.exp(self.variant.scores(inputs, options) - lse[..., None])
        dp = do @ v.mT
        delta = self.delta_of(o, self.read_do_for_delta(inputs["do"]).double(), dp)
        if not self.weigh_delta:
            ds = p * dp - delta[..., None]
        else:
            ds = dp - delta[..., None] if self.subtract_delta else dp
            ds = p * ds if self.weigh_ds else ds * (p > 0)
        dq, dk = ds @ k, ds.mT @ q
        return {
            "dq": dq * scale if self.dq_scale else dq,
            "dk": dk * scale if self.dk_scale else dk,
            "dv": p.mT @ do,
        }

    def outputs(self, inputs: Inputs, options: Options, _tile: int = 0) -> dict[str, Tensor]:
        """A right forward, then this backward."""
        found = _RIGHT.forward(inputs, options)
        return {"o": found["o"], **self.gradients(inputs, options, found["o"], found["lse"])}


def _after(
    forward: Callable[[Inputs, Options, int], dict[str, Tensor]], backward: _Backward
) -> Callable[[Inputs, Options, int], dict[str, Tensor]]:
    """A mistaken forward whose o and lse go into `backward`."""

    def outputs(inputs: Inputs, options: Options, tile: int) -> dict[str, Tensor]:
        found = forward(inputs, options, tile)
        lse = found["lse"].double()
        return {"o": found["o"], **backward.gradients(inputs, options, found["o"].double(), lse)}

    return outputs


def _only(names: tuple[str, ...], backward: _Backward) -> Callable[[Inputs, Options, int], dict[str, Tensor]]:
    """`backward` in one of two kernels: gradients `names` are its, the others are right."""

    def outputs(inputs: Inputs, options: Options, _tile: int) -> dict[str, Tensor]:
        found, right = backward.outputs(inputs, options), _Backward().outputs(inputs, options)
        return {name: (found if name in names else right)[name] for name in right}

    return outputs


def _late_start(inputs: Inputs, options: Options, tile: int) -> dict[str, Tensor]:
    """Programs that own keys begin with the query tile after theirs."""
    later = _Backward(variant=_Variant(causal=lambda i, j, n_q, n_k: (j <= i) & (i >= (j // tile + 1) * tile)))
    return _only(("dk", "dv"), later)(inputs, options, tile)


def _early_stop(inputs: Inputs, options: Options, tile: int) -> dict[str, Tensor]:
    """Programs that own queries end before the key tile that is theirs."""
    sooner = _Backward(variant=_Variant(causal=lambda i, j, n_q, n_k: (j <= i) & (j < i // tile * tile)))
    return _only(("dq",), sooner)(inputs, options, tile)


def _not_transposed(*names: str) -> Callable[[Inputs, Options, int], dict[str, Tensor]]:
    """In square tiles: dV += P @ dO, or dK += dS @ Q."""

    def outputs(inputs: Inputs, options: Options, tile: int) -> dict[str, Tensor]:
        found = _RIGHT.forward(inputs, options)
        q, k, v, do = (inputs[name].double() for name in ("q", "k", "v", "do"))
        scale = _RIGHT.scale(q.shape[-1])
        p = torch.exp(_RIGHT.scores(inputs, options) - found["lse"][..., None])
        delta = (found["o"] * do).sum(dim=-1)
        ds = p * (do @ v.mT - delta[..., None])
        right = {"o": found["o"], "dq": ds @ k * scale, "dk": ds.mT @ q * scale, "dv": p.mT @ do}
        wrong = {"dk": _in_tiles(ds, q, tile) * scale, "dv": _in_tiles(p, do, tile)}
        return {name: (wrong if name in names else right)[name] for name in right}

    return outputs


def _in_tiles(weights: Tensor, rows: Tensor, tile: int) -> Tensor:
    """[batch, keys, head_dim]: the sum over query tiles of weights of a square tile @ rows of that tile."""
    n_batch, n_queries, n_keys = weights.shape
    more_q, more_k = -n_queries % tile, -n_keys % tile
    tiles = torch.nn.functional.pad(weights, (0, more_k, 0, more_q)).reshape(
        n_batch, (n_queries + more_q) // tile, tile, (n_keys + more_k) // tile, tile
    )
    parts = torch.nn.functional.pad(rows, (0, 0, 0, more_q)).reshape(n_batch, -1, tile, rows.shape[-1])
    return torch.einsum("biqjk,bikd->bjqd", tiles, parts).reshape(n_batch, -1, rows.shape[-1])[:, :n_keys]


def _scaled_again(*names: str) -> Callable[[Inputs, Options, int], dict[str, Tensor]]:
    def outputs(inputs: Inputs, options: Options, _tile: int) -> dict[str, Tensor]:
        scale = _RIGHT.scale(inputs["q"].shape[-1])
        right = _Backward().outputs(inputs, options)
        return {name: value * scale if name in names else value for name, value in right.items()}

    return outputs


def _exchanged(inputs: Inputs, options: Options, _tile: int) -> dict[str, Tensor]:
    right = _Backward().outputs(inputs, options)
    return {**right, "dk": right["dv"], "dv": right["dk"]}


_DS_STEP = "dS = P * (dP - delta)"
_TILES_STEP = "for each tile of queries that sees some key of the program, the first one too"
# Mistakes that are often made in one of the two kernels and not in the other.
_IN_ONE_KERNEL: tuple[tuple[str, str, str, _Backward], ...] = (
    ("missing-delta", _DS_STEP,
     "a softmax row sums to 1, so its gradient must not see a constant added to dP. Which term takes care of that?",
     _Backward(subtract_delta=False)),
    ("delta-not-weighted", _DS_STEP, "does P weigh the whole difference, or a part of it?",
     _Backward(weigh_delta=False)),
    ("backward-not-causal", "P = exp(s - lse), masked as in the forward",
     "which pairs count when P is rebuilt, with is_causal=True?",
     _Backward(variant=_NOT_CAUSAL)),
    ("backward-missing-scale-in-scores", "P = exp(q @ K^T / sqrt(d) - lse)",
     "the scores that are rebuilt there are not those that lse belongs to.",
     _Backward(variant=_Variant(scale=lambda d: 1.0))),
    ("backward-missing-scale-in-scores", "P = exp(q @ K^T / sqrt(d) - lse)",
     "the scores that are rebuilt there are not those that lse belongs to.",
     _Backward(variant=_Variant(scale=lambda d: 1.0), same_scale=False)),
)  # fmt: skip
_KERNELS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Only dq is wrong, dk and dv are right", ("dq",)),
    ("dk and dv are wrong, dq is right", ("dk", "dv")),
    ("Only dk is wrong, dq and dv are right", ("dk",)),
)
_BACKWARD_MISTAKES: tuple[Mistake, ...] = (
    Mistake(
        label="dq-missing-scale",
        step="dq = scale * dS @ K",
        hint="dq is too large by one factor that depends on d only; o, dk and dv are right.",
        outputs=_Backward(dq_scale=False).outputs,
    ),
    Mistake(
        label="dk-missing-scale",
        step="dk = scale * dS^T @ Q",
        hint="dk is too large by one factor that depends on d only; o, dq and dv are right.",
        outputs=_Backward(dk_scale=False).outputs,
    ),
    Mistake(
        label="backward-missing-scale",
        step="dq = scale * dS @ K, dk = scale * dS^T @ Q",
        hint="dq and dk are too large by one factor that depends on d only; o and dv are right.",
        outputs=_Backward(dq_scale=False, dk_scale=False).outputs,
    ),
    Mistake(
        label="missing-delta",
        step=_DS_STEP,
        hint="o and dv are right, dq and dk are not: a softmax row sums to 1, so its gradient must not see a constant "
        "added to dP. Which term takes care of that?",
        outputs=_Backward(subtract_delta=False).outputs,
    ),
    Mistake(
        label="wrong-delta",
        step="delta = rowsum(o * dO)",
        hint="o and dv are right, dq and dk are not: delta is a plain sum of dP, not a weighted one.",
        outputs=_Backward(delta_of=lambda o, do, dp: dp.sum(dim=-1)).outputs,
    ),
    Mistake(
        label="wrong-delta",
        step="delta = rowsum(o * dO)",
        hint="o and dv are right, dq and dk are not: delta is an average of dP, with equal weights.",
        outputs=_Backward(delta_of=lambda o, do, dp: dp.mean(dim=-1)).outputs,
    ),
    Mistake(
        label="wrong-delta",
        step="delta = rowsum(o * dO)",
        hint="o and dv are right, dq and dk are not: is delta a sum or an average over the head dimension?",
        outputs=_Backward(delta_of=lambda o, do, dp: (o * do).mean(dim=-1)).outputs,
    ),
    Mistake(
        label="delta-not-weighted",
        step=_DS_STEP,
        hint="o and dv are right, dq and dk are not: does P weigh the whole difference, or a part of it?",
        outputs=_Backward(weigh_delta=False).outputs,
    ),
    *(
        Mistake(label=label, step=step, hint=f"{seen}: {hint}", outputs=_only(names, backward))
        for label, step, hint, backward in _IN_ONE_KERNEL
        for seen, names in _KERNELS
    ),
    *(
        Mistake(
            label=label,
            step=step,
            hint=f"{seen} too small by one factor that depends on d only: how often does the scale enter, and where?",
            outputs=_scaled_again(*names),
        )
        for label, step, seen, names in (
            ("dk-scaled-twice", "dk = scale * dS^T @ Q", "dk is", ("dk",)),
            ("dq-scaled-twice", "dq = scale * dS @ K", "dq is", ("dq",)),
            ("backward-scaled-twice", "dq = scale * dS @ K, dk = scale * dS^T @ Q", "dq and dk are", ("dq", "dk")),
        )
    ),
    *(
        Mistake(
            label="not-transposed",
            step="dV = P^T @ dO, dK = scale * dS^T @ Q",
            hint=f"{seen}: which axis of its first factor does the product sum over, queries or keys?",
            outputs=_not_transposed(*names),
            tiled=True,
        )
        for seen, names in (
            ("Only dv is wrong", ("dv",)),
            ("Only dk is wrong", ("dk",)),
            ("dk and dv are wrong", ("dk", "dv")),
        )
    ),
    Mistake(
        label="causal-tile-skipped",
        step=_TILES_STEP,
        hint="With is_causal=True dk and dv miss the queries of one tile and dq is right: with which query tile does a "
        "program begin that owns keys?",
        outputs=_late_start,
        tiled=True,
    ),
    Mistake(
        label="causal-tile-skipped",
        step="for each tile of keys that some query of the program sees, the last one too",
        hint="With is_causal=True dq misses the keys of one tile, dk and dv are right: with which key tile does a "
        "program end that owns queries?",
        outputs=_early_stop,
        tiled=True,
    ),
    Mistake(
        label="gradients-exchanged",
        step="backward returns one gradient for each argument of forward, in their order",
        hint="dk holds what dv should hold, and dv what dk should: in which order are they returned?",
        outputs=_exchanged,
    ),
    Mistake(
        label="missing-probabilities",
        step=_DS_STEP,
        hint="o and dv are right, dq and dk are far too large: by what is each element of dP - delta weighted?",
        outputs=_Backward(weigh_ds=False).outputs,
    ),
    Mistake(
        label="backward-not-causal",
        step="P = exp(s - lse), masked as in the forward",
        hint="With is_causal=True o is right and all three gradients are not: which pairs count when P is rebuilt?",
        outputs=_Backward(
            variant=_Variant(causal=lambda i, j, n_q, n_k: torch.ones(n_q, n_k, dtype=torch.bool))
        ).outputs,
    ),
    Mistake(
        label="backward-missing-scale-in-scores",
        step="P = exp(q @ K^T / sqrt(d) - lse)",
        hint="o is right and all gradients are far off: the scores that the backward rebuilds are not those that lse "
        "belongs to.",
        outputs=_Backward(variant=_Variant(scale=lambda d: 1.0), dq_scale=False, dk_scale=False).outputs,
    ),
    Mistake(
        label="backward-missing-scale-in-scores",
        step="P = exp(q @ K^T / sqrt(d) - lse)",
        hint="o is right and all gradients are far off: the scores that the backward rebuilds are not those that lse "
        "belongs to.",
        outputs=_Backward(variant=_Variant(scale=lambda d: 1.0), same_scale=False).outputs,
    ),
    Mistake(
        label="ignores-strides",
        step="address = base + row * row stride + column * column stride",
        hint="Gradients are wrong only when the incoming gradient is not contiguous, as after o.sum().backward(): how "
        "is dO read?",
        outputs=_Backward(read_do=as_packed).outputs,
    ),
    Mistake(
        label="ignores-strides",
        step="address = base + row * row stride + column * column stride",
        hint="Gradients are wrong only when the incoming gradient is not contiguous, as after o.sum().backward(): how "
        "is dO read, in every place where it is?",
        outputs=_Backward(read_do=as_packed, read_do_for_delta=as_packed).outputs,
    ),
    Mistake(
        label="upstream-ignored",
        step="dV = P^T @ dO, dP = dO @ V^T",
        hint="The gradients are those of o.sum(), whatever gradient comes in.",
        outputs=_Backward(read_do=torch.ones_like, read_do_for_delta=torch.ones_like).outputs,
    ),
    *(
        Mistake(
            label="wrong-logsumexp",
            step=f"{_LSE_STEP}, P = exp(s - lse)",
            hint=f"o is right and all gradients are off: the rows of the rebuilt P do not sum to 1. {hint}",
            outputs=_after(_lse_as(change), _Backward()),
        )
        for hint, change in _WRONG_LSE
    ),
)

_NOT_IN_TRAINING = ("ignores-strides", "wrong-operand", "softmax-over-queries", "mean-of-values", "wrong-strides")

TRAINING_MISTAKES: tuple[Mistake, ...] = (
    *_BACKWARD_MISTAKES,
    *(
        Mistake(
            label=one.label,
            step=one.step,
            hint=one.hint,
            outputs=_after(one.outputs, _Backward()),
            tiled=one.tiled,
        )
        for one in _STREAMS
        if one.label not in _NOT_IN_TRAINING
    ),
    *(
        Mistake(
            label=one.label,
            step=one.step,
            hint=one.hint,
            outputs=_after(one.outputs, _Backward()),
            tiled=one.tiled,
        )
        for one in _SCORES
        if one.label in ("causal-in-tile-only", "causal-tile-skipped")
    ),
    *(
        Mistake(label=label, step=step, hint=hint, outputs=_after(v.forward, _Backward(variant=v)))
        for step, table in ((_SCALE_STEP, _SCALES), (_MASK_STEP, _MASKS))
        for label, hint, v in table
    ),
)
