"""Attention: forward alone ("attention.forward") and with gradients ("attention.training").

Shapes throughout: q [batch, queries, head_dim]; k, v [batch, keys, head_dim]; scores are q @ k^T / sqrt(head_dim);
causal keeps key index <= query index, counted from the start of both. lse is the natural logsumexp of the scaled,
masked scores, float32.
"""

# Every operation's functions take (inputs, options), also where one of them has no use for the options.
# ruff: noqa: ARG001

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from reference.attention_mistakes import FORWARD_MISTAKES, TRAINING_MISTAKES
from reference.operation import Costs, Inputs, Operation, Options, Specs

_KERNEL_FILE = Path(__file__).parent / "kernels" / "attention.py"
_SPREAD = 1.5  # of q and k: scores then spread by 2.25, so that a few keys carry each output
_CALM = 0.9  # the same, where the recipe decides which key is the largest, or that none is
# Largest first coordinate of a key where a fill shapes the scores along the keys; the queries get the other factor.
# Small, because dq = dS @ K: what a float32 lse leaves of sum(dS), which should be 0, is multiplied by it.
_STEER = 2.0
_ROUNDINGS = 8


def visible(options: Options, n_queries: int, n_keys: int, device: torch.device | None = None) -> Tensor:
    """[queries, keys], True where the query may look at the key."""
    seen = torch.ones(n_queries, n_keys, dtype=torch.bool, device=device)
    return seen.tril() if options.get("is_causal", False) else seen


def attention(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor]:
    """o and lse, written down as the definition says, in the dtype of the arguments."""
    scores = q @ k.mT * (1.0 / math.sqrt(q.shape[-1]))
    if options.get("is_causal", False):
        scores = scores.masked_fill(~visible(options, q.shape[1], k.shape[1], q.device), -math.inf)
    return torch.softmax(scores, dim=-1) @ v, torch.logsumexp(scores, dim=-1)


def oracle(inputs: Inputs, options: Options) -> dict[str, Tensor]:
    """Attention in float64. The judge compares against this, never against a kernel."""
    o, lse = attention(inputs["q"].double(), inputs["k"].double(), inputs["v"].double(), options)
    return {"o": o, "lse": lse}


def naive(inputs: Inputs, options: Options) -> dict[str, Tensor]:
    """Attention with the whole score matrix, in the dtype of the inputs, with tf32 for float32 on a GPU."""
    with _Tf32():
        o, lse = attention(inputs["q"], inputs["k"], inputs["v"], options)
    return {"o": o, "lse": lse.float()}


def training_oracle(inputs: Inputs, options: Options) -> dict[str, Tensor]:
    """Attention and the gradients of sum(o * do), in float64, by automatic differentiation of the definition."""
    return _with_gradients({name: tensor.double() for name, tensor in inputs.items()}, options)


def training_naive(inputs: Inputs, options: Options) -> dict[str, Tensor]:
    """Attention with the whole score matrix and autograd, in the dtype of the inputs; tf32 as in `naive`."""
    with _Tf32():
        return _with_gradients(inputs, options)


def training_roundings(inputs: Inputs, options: Options) -> list[dict[str, Tensor]]:
    """Outputs of the recurrences in float64, with o, P and dS rounded to the inputs' dtype at random, several times.

    The backward gets o in the dtype of the inputs, and delta = rowsum(dO * o) from it. Where one key takes nearly all
    of a row's weight, dP - delta cancels, and half a unit in the last place of o may be all that is left of dK. Nobody
    who keeps to the contract can do better, and the naive chain, which keeps P, does not show it.

    Nothing in float32, where the floor covers it.
    """
    dtype = inputs["q"].dtype
    if dtype == torch.float32:
        return []
    q, k, v, do = (inputs[name].double() for name in ("q", "k", "v", "do"))
    scale = 1.0 / math.sqrt(q.shape[-1])
    scores = q @ k.mT * scale
    if options.get("is_causal", False):
        scores = scores.masked_fill(~visible(options, q.shape[1], k.shape[1], q.device), -math.inf)
    p = torch.softmax(scores, dim=-1)
    o, dp = p @ v, do @ v.mT
    generator = torch.Generator().manual_seed(0)

    def rounded(value: Tensor) -> Tensor:
        """Each number off by up to half a unit in its last place, as any way of rounding leaves it."""
        unit = torch.finfo(dtype).eps * torch.exp2(torch.floor(torch.log2(value.abs().clamp_min(1e-30))))
        return value + (torch.rand(value.shape, generator=generator, dtype=torch.float64) - 0.5) * unit

    found = []
    for _ in range(_ROUNDINGS):
        kept, weights = rounded(o), rounded(p)
        ds = rounded(p * (dp - (kept * do).sum(dim=-1, keepdim=True)))
        made = {"o": kept, "dq": ds @ k * scale, "dk": ds.mT @ q * scale, "dv": weights.mT @ do}
        found.append({name: value.to(dtype) for name, value in made.items()})
    return found


def _with_gradients(inputs: Inputs, options: Options) -> dict[str, Tensor]:
    with torch.enable_grad():
        leaves = [inputs[name].detach().clone().requires_grad_() for name in ("q", "k", "v")]
        o, _ = attention(leaves[0], leaves[1], leaves[2], options)
        dq, dk, dv = torch.autograd.grad(o, leaves, inputs["do"].to(o.dtype))
    return {"o": o.detach(), "dq": dq, "dk": dk, "dv": dv}


class _Tf32:
    """Lets float32 products use tf32 on a GPU, as `tl.dot` does unless told otherwise, and restores what was set."""

    def __enter__(self) -> None:
        self._before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = True

    def __exit__(self, *exc: object) -> None:
        torch.backends.cuda.matmul.allow_tf32 = self._before


def largest_score(inputs: Inputs, options: Options) -> float:
    """Largest |score| that some query sees."""
    q, k = inputs["q"].float(), inputs["k"].float()
    scores = q @ k.mT * (1.0 / math.sqrt(q.shape[-1]))
    return float(scores.masked_fill(~visible(options, q.shape[1], k.shape[1], q.device), 0.0).abs().max())


FORWARD_FILLS = (
    "normal",
    "rising-max",
    "falling-max",
    "early-jump",
    "late-jump",
    "large",
    "negative",
    "negative-tail",
    "zero-mean",
)
TRAINING_FILLS = (*FORWARD_FILLS, "ones-upstream", "strided-upstream")


def make_inputs(
    axes: Mapping[str, int], fill: str, dtype: torch.dtype, options: Options, generator: torch.Generator
) -> dict[str, Tensor]:
    """q, k, v of the recipe called `fill`; scores reach about 10 unless the recipe says otherwise.

    rising-max: scores climb by 20 from the first key to the last. falling-max: the first key's score is the largest and
    the rest sink by 20. early-jump, late-jump: one key of the first, or the last, quarter outdoes the rest.
    large: scores of up to 130. negative: all about -150. negative-tail: all about -20, where a padded key of score 0
    would win. zero-mean: nearly even weights, so that the values cancel and small errors of a long sum show.
    """
    n_batch, n_queries, n_keys, d = axes["batch"], axes["queries"], axes["keys"], axes["head_dim"]

    def normal(n_rows: int, spread: float) -> Tensor:
        return torch.randn(n_batch, n_rows, d, generator=generator) * spread

    spread = _CALM if fill in ("zero-mean", "falling-max", "early-jump", "late-jump") else _SPREAD
    q, k, v = normal(n_queries, spread), normal(n_keys, spread), normal(n_keys, 1.0)
    profile = _score_profile(fill, n_keys, generator)
    if profile is not None:
        highest = float(profile.abs().max()) or 1.0  # a rise over a single key is none
        q[..., 0] = highest * math.sqrt(d) / _STEER
        k[..., 0] = profile * (_STEER / highest)
    if fill == "large":
        q *= 130.0 / largest_score({"q": q, "k": k}, options)
    return {name: tensor.to(dtype) for name, tensor in (("q", q), ("k", k), ("v", v))}


def _score_profile(fill: str, n_keys: int, generator: torch.Generator) -> Tensor | None:
    """[keys], what the recipe adds to every query's score with each key; None where it adds nothing."""
    along = torch.linspace(0.0, 1.0, n_keys)
    if fill == "rising-max":
        return 20.0 * along
    if fill == "falling-max":
        profile = 20.0 * along.flip(0)
        profile[0] += 5.0  # beyond the noise: no later key is ever the maximum, whatever the tile
        return profile
    if fill in ("early-jump", "late-jump"):
        quarter = max(1, n_keys // 4)
        # not the very first keys: a jump inside the first tile asks for no rescale
        first = min(quarter // 2, n_keys - 1) if fill == "early-jump" else n_keys - quarter
        at = first + int(torch.randint(max(1, quarter - quarter // 2), (), generator=generator))
        return 8.0 * (torch.arange(n_keys) == at).float()
    if fill in ("negative", "negative-tail"):
        return torch.full((n_keys,), -150.0 if fill == "negative" else -20.0)
    if fill in TRAINING_FILLS:
        return None
    raise KeyError(f"attention has no fill {fill!r}; there are {', '.join(TRAINING_FILLS)}")


def make_training_inputs(
    axes: Mapping[str, int], fill: str, dtype: torch.dtype, options: Options, generator: torch.Generator
) -> dict[str, Tensor]:
    """As `make_inputs`, and `do` [batch, queries, head_dim]: normal, or ones for "ones-upstream"."""
    made = make_inputs(axes, fill, dtype, options, generator)
    do = torch.randn(made["q"].shape, generator=generator)
    made["do"] = torch.ones_like(made["q"]) if fill == "ones-upstream" else do.to(dtype)
    return made


def output_specs(inputs: Inputs, options: Options) -> Specs:
    q = inputs["q"]
    return {"o": (tuple(q.shape), q.dtype), "lse": (tuple(q.shape[:2]), torch.float32)}


def training_output_specs(inputs: Inputs, options: Options) -> Specs:
    pairs = (("o", "q"), ("dq", "q"), ("dk", "k"), ("dv", "v"))
    return {name: (tuple(inputs[like].shape), inputs[like].dtype) for name, like in pairs}


def _n_visible(axes: Mapping[str, int], options: Options) -> int:
    """Pairs of query and key that count, over the batch."""
    n_queries, n_keys = axes["queries"], axes["keys"]
    if not options.get("is_causal", False):
        return axes["batch"] * n_queries * n_keys
    full = min(n_queries, n_keys)  # query i sees i + 1 keys, and never more than there are
    return axes["batch"] * (full * (full + 1) // 2 + (n_queries - full) * n_keys)


def costs(axes: Mapping[str, int], dtype: torch.dtype, options: Options) -> Costs:
    """Two products of visible pairs. Eager: scores, scale, (mask,) softmax, product; the mask is a bool matrix."""
    size = dtype.itemsize
    n_q = axes["batch"] * axes["queries"] * axes["head_dim"] * size
    n_k = axes["batch"] * axes["keys"] * axes["head_dim"] * size
    n_lse = axes["batch"] * axes["queries"] * 4
    scores = axes["batch"] * axes["queries"] * axes["keys"] * size
    mask = axes["queries"] * axes["keys"] * (2 if options.get("is_causal", False) else 0)  # tril, then its complement
    masked = 2 * scores + mask if options.get("is_causal", False) else 0
    return Costs(
        flops=4 * axes["head_dim"] * _n_visible(axes, options),
        least_bytes=n_q + 2 * n_k + n_q + n_lse,
        naive_peak_bytes=2 * scores + n_q + mask,
        reference_peak_bytes=n_q + n_lse,
        eager_launches=4 + (4 if mask else 0),
        eager_bytes=(n_q + n_k + scores) + 2 * scores + masked + 2 * scores + (scores + n_k + n_q),
        n_scores=scores // size,
    )


def training_costs(axes: Mapping[str, int], dtype: torch.dtype, options: Options) -> Costs:
    """Forward and backward: seven products of visible pairs, one of them the recomputed scores.

    least_bytes reads q, k, v, do once for each direction that needs them and writes o, lse, dq, dk, dv.
    """
    forward = costs(axes, dtype, options)
    size = dtype.itemsize
    n_q = axes["batch"] * axes["queries"] * axes["head_dim"] * size
    n_k = axes["batch"] * axes["keys"] * axes["head_dim"] * size
    n_lse = axes["batch"] * axes["queries"] * 4
    scores = axes["batch"] * axes["queries"] * axes["keys"] * size
    backward_least = (n_q + 2 * n_k + 2 * n_q + n_lse) + (n_q + 2 * n_k)
    # dP and dV from P, dO, V; softmax backward; scale (and mask); dQ and dK
    backward_eager = (2 * scores + 2 * n_q + 2 * n_k) + 3 * scores + 2 * scores + (2 * scores + 2 * n_q + 2 * n_k)
    return Costs(
        flops=14 * axes["head_dim"] * _n_visible(axes, options),
        least_bytes=forward.least_bytes + backward_least,
        naive_peak_bytes=4 * scores + 2 * n_q + 2 * n_k,
        reference_peak_bytes=2 * n_q + 2 * n_k + 2 * n_lse,
        eager_launches=forward.eager_launches + 6 + (1 if options.get("is_causal", False) else 0),
        eager_bytes=forward.eager_bytes + backward_eager,
        n_scores=forward.n_scores,
    )


OPERATIONS = {
    "forward": Operation(
        name="attention.forward",
        axes=("batch", "queries", "keys", "head_dim"),
        inputs=("q", "k", "v"),
        options=("is_causal",),
        outputs=("o", "lse"),
        fills=FORWARD_FILLS,
        kernel_file=_KERNEL_FILE,
        mistakes=FORWARD_MISTAKES,
        make_inputs=make_inputs,
        output_specs=output_specs,
        oracle=oracle,
        naive=naive,
        eager=naive,
        largest_score=largest_score,
        costs=costs,
    ),
    "training": Operation(
        name="attention.training",
        axes=("batch", "queries", "keys", "head_dim"),
        inputs=("q", "k", "v"),
        options=("is_causal",),
        outputs=("o", "dq", "dk", "dv"),
        fills=TRAINING_FILLS,
        kernel_file=_KERNEL_FILE,
        mistakes=TRAINING_MISTAKES,
        make_inputs=make_training_inputs,
        output_specs=training_output_specs,
        oracle=training_oracle,
        naive=training_naive,
        eager=training_naive,
        largest_score=largest_score,
        costs=training_costs,
        upstream="do",
        roundings=training_roundings,
        upstream_layouts={"ones-upstream": "expanded", "strided-upstream": "strided"},
    ),
}
