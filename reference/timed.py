"""How operations are timed: which inputs differ from call to call, what fills them, what single output rows must be.

All calls of a window lie in blocks: `blocks[name]` is [copies, *shape], and call i takes copy i modulo the number of
copies. The first input has a copy for every call, so no two calls are alike; the others have a few. Rows of every
call's outputs are compared with float64, so a call that was skipped, late or answered from memory is a wrong answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from reference.operation import Options
from reference.philox import uniform

Blocks = Mapping[str, Tensor]
Rows = dict[str, Tensor]  # by output: [calls, rows per call], row numbers counted over all axes but the last
Expected = dict[str, tuple[Tensor, Tensor]]  # by output: calls [n], values [n, rows per call, width] in float64
Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]

ROWS_PER_CALL = 16
SHARED_COPIES = 4  # of an input that calls share
_PLANTED = 64  # rows a batch entry that one late key, or column, dominates
_ENTRIES = 2  # batch entries that a window looks at, for each copy of what calls share
_BASELINES = Path(__file__).parent / "baselines"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One operation under the clock. The first name in `shapes` is the input that differs in every call."""

    baseline_file: Path  # the naive chain as a hand-in
    baseline_entry: str
    shapes: Callable[[Mapping[str, int], torch.dtype], Shapes]
    output_bytes: Callable[[Mapping[str, int], torch.dtype], int]  # of one call
    fill: Callable[[Blocks, torch.Generator], Tensor]  # returns the rows it planted
    rows: Callable[[Blocks, Tensor, torch.Generator], Rows]
    expected: Callable[[Blocks, Options, Rows], Expected]
    # outputs of the baseline that mean the same; its dropout draws other elements
    baseline_outputs: tuple[str, ...] = ()


def load(operation: str) -> Timed | None:
    """How the operation of that name is timed; None when nobody has said."""
    return _TIMED.get(operation)


# -- attention --------------------------------------------------------------------------------------------------------


def _attention_shapes(axes: Mapping[str, int], dtype: torch.dtype) -> Shapes:
    query = (axes["batch"], axes["queries"], axes["head_dim"])
    key = (axes["batch"], axes["keys"], axes["head_dim"])
    return {"q": (query, dtype), "k": (key, dtype), "v": (key, dtype)}


def _training_shapes(axes: Mapping[str, int], dtype: torch.dtype) -> Shapes:
    shapes = _attention_shapes(axes, dtype)
    return shapes | {"do": shapes["q"]}


def _attention_output_bytes(axes: Mapping[str, int], dtype: torch.dtype) -> int:
    rows = axes["batch"] * axes["queries"]
    return rows * axes["head_dim"] * dtype.itemsize + rows * 4


def _training_output_bytes(axes: Mapping[str, int], dtype: torch.dtype) -> int:
    keys = axes["batch"] * axes["keys"] * axes["head_dim"] * dtype.itemsize
    return 2 * _attention_output_bytes(axes, dtype) + 2 * keys


def _fill_attention(blocks: Blocks, generator: torch.Generator) -> Tensor:
    """Normal values; in every batch entry some late queries look for one key just before them, and find little else.

    Skipping far keys, or the last ones, then leaves those rows wrong, while the others stay diffuse.
    """
    q, k = blocks["q"], blocks["k"]
    q.normal_(0.0, 1.5, generator=generator)
    for name in blocks.keys() - {"q"}:
        blocks[name].normal_(0.0, 1.5 if name == "k" else 1.0, generator=generator)
    n_queries, n_keys, d = q.shape[2], k.shape[2], q.shape[3]
    n_planted = min(_PLANTED, n_queries // 2)
    half = n_queries // 2
    planted = half + torch.randperm(n_queries - half, generator=generator, device=q.device)[:n_planted]
    back = torch.randint(max(1, n_keys // 2), (n_planted,), generator=generator, device=q.device)
    keys = (planted.clamp(max=n_keys - 1) - back).clamp(min=0)
    # of a size that gives the one key a score of 12, where the others' spread is about 1.5
    factor = 12.0 * math.sqrt(d) / (2.25 * d)
    sought = k[:, :, keys] * factor
    n_shared = k.shape[0]
    for copy in range(n_shared):
        q[copy::n_shared, :, planted] = sought[copy].to(q.dtype)
    return planted


def _attention_rows(blocks: Blocks, planted: Tensor, generator: torch.Generator) -> Rows:
    rows = _query_rows(blocks["q"].shape, planted, generator)
    return {"o": rows, "lse": rows}


def _training_rows(blocks: Blocks, planted: Tensor, generator: torch.Generator) -> Rows:
    rows = _query_rows(blocks["q"].shape, planted, generator)
    n_calls, _, _, _ = blocks["q"].shape
    _, n_batch, n_keys, _ = blocks["k"].shape
    entry = torch.randint(n_batch, (n_calls, 1), generator=generator, device=rows.device)
    keys = torch.randint(n_keys, (n_calls, ROWS_PER_CALL), generator=generator, device=rows.device)
    return {"o": rows, "dq": rows, "dk": entry * n_keys + keys, "dv": entry * n_keys + keys}


def _query_rows(shape: torch.Size, planted: Tensor, generator: torch.Generator) -> Tensor:
    """[calls, 16] rows of q: half planted, half anywhere, in one batch entry a call.

    Calls that share k and v also share their entry with half of the others, so that few products check them all.
    """
    n_calls, n_batch, n_queries, _ = shape
    device = planted.device
    n_shared = min(SHARED_COPIES, n_calls)
    entries = torch.randint(n_batch, (n_shared, _ENTRIES), generator=generator, device=device)
    calls = torch.arange(n_calls, device=device)
    entry = entries[calls % n_shared, calls // n_shared % _ENTRIES]
    half = ROWS_PER_CALL // 2
    late = planted[torch.randint(len(planted), (n_calls, half), generator=generator, device=device)]
    anywhere = torch.randint(n_queries, (n_calls, ROWS_PER_CALL - half), generator=generator, device=device)
    return entry[:, None] * n_queries + torch.cat([late, anywhere], dim=1)


def _groups(blocks: Blocks, rows: Tensor) -> list[tuple[int, int, Tensor]]:
    """(copy of k and v, batch entry, calls) for all calls that one pair of products checks."""
    n_shared = blocks["k"].shape[0]
    calls = torch.arange(len(rows), device=rows.device)
    entry = rows[:, 0] // blocks["q"].shape[2]
    found = []
    for key in sorted(set(zip((calls % n_shared).tolist(), entry.tolist(), strict=True))):
        chosen = (calls % n_shared == key[0]) & (entry == key[1])
        found.append((*key, chosen.nonzero().flatten()))
    return found


def _scores(q: Tensor, k: Tensor, at: Tensor, options: Options) -> Tensor:
    """[n, keys] scaled, masked scores of query rows `at` in float64."""
    scores = q @ k.mT * (1.0 / math.sqrt(q.shape[-1]))
    if options.get("is_causal", False):
        scores.masked_fill_(torch.arange(k.shape[0], device=k.device)[None, :] > at[:, None], -math.inf)
    return scores


def _expected_attention(blocks: Blocks, options: Options, rows: Rows) -> Expected:
    chosen = rows["o"]
    n_queries, d = blocks["q"].shape[2:]
    o = torch.empty(*chosen.shape, d, dtype=torch.float64, device=chosen.device)
    lse = torch.empty(*chosen.shape, 1, dtype=torch.float64, device=chosen.device)
    for copy, entry, calls in _groups(blocks, chosen):
        at = (chosen[calls] % n_queries).flatten()
        q = blocks["q"][calls.repeat_interleave(chosen.shape[1]), entry, at].double()
        scores = _scores(q, blocks["k"][copy, entry].double(), at, options)
        o[calls] = (torch.softmax(scores, dim=-1) @ blocks["v"][copy, entry].double()).view(len(calls), -1, d)
        lse[calls] = torch.logsumexp(scores, dim=-1).view(len(calls), -1, 1)
    every = torch.arange(len(chosen), device=chosen.device)
    return {"o": (every, o), "lse": (every, lse)}


def _expected_training(blocks: Blocks, options: Options, rows: Rows) -> Expected:
    chosen = rows["o"]
    n_queries, d = blocks["q"].shape[2:]
    n_do = blocks["do"].shape[0]
    o = torch.empty(*chosen.shape, d, dtype=torch.float64, device=chosen.device)
    dq = torch.empty_like(o)
    for copy, entry, calls in _groups(blocks, chosen):
        at = (chosen[calls] % n_queries).flatten()
        which = calls.repeat_interleave(chosen.shape[1])
        q = blocks["q"][which, entry, at].double()
        do = blocks["do"][which % n_do, entry, at].double()
        k, v = blocks["k"][copy, entry].double(), blocks["v"][copy, entry].double()
        p = torch.softmax(_scores(q, k, at, options), dim=-1)
        out = p @ v
        ds = p * (do @ v.mT - (do * out).sum(dim=-1, keepdim=True))
        o[calls] = out.view(len(calls), -1, d)
        dq[calls] = (ds @ k * (1.0 / math.sqrt(d))).view(len(calls), -1, d)
    every = torch.arange(len(chosen), device=chosen.device)
    # one of the first two, which every window makes, and one of all
    some = torch.cat([torch.randperm(min(2, len(every)))[:1], torch.randperm(len(every))[:1]]).to(every.device)
    columns = [_key_gradients(blocks, options, int(call), rows["dk"][call]) for call in some]
    dk, dv = (torch.stack([one[i] for one in columns]) for i in (0, 1))
    return {"o": (every, o), "dq": (every, dq), "dk": (some, dk), "dv": (some, dv)}


# Two calls of a window only: each of them costs a whole score matrix.
def _key_gradients(blocks: Blocks, options: Options, call: int, rows: Tensor) -> tuple[Tensor, Tensor]:
    """[rows, d] of dk and dv for one call: every query of the batch entry has its say."""
    n_keys = blocks["k"].shape[2]
    entry, keys = int(rows[0]) // n_keys, rows % n_keys
    q = blocks["q"][call, entry].double()
    k, v, do = (blocks[name][call % blocks[name].shape[0], entry].double() for name in ("k", "v", "do"))
    at = torch.arange(len(q), device=q.device)
    p = torch.softmax(_scores(q, k, at, options), dim=-1)  # [queries, keys]
    delta = (do * (p @ v)).sum(dim=-1)
    p = p[:, keys]
    ds = p * (do @ v[keys].mT - delta[:, None])
    return ds.mT @ q * (1.0 / math.sqrt(q.shape[-1])), p.mT @ do


# -- rows: softmax, layer norm ----------------------------------------------------------------------------------------


def _softmax_shapes(axes: Mapping[str, int], dtype: torch.dtype) -> Shapes:
    return {"x": ((axes["rows"], axes["cols"]), dtype)}


def _fill_softmax(blocks: Blocks, generator: torch.Generator) -> Tensor:
    """Normal values with a spread of 2.5; in some rows one of the last columns outdoes the rest."""
    x = blocks["x"]
    x.normal_(0.0, 2.5, generator=generator)
    _, n_rows, n_cols = x.shape
    planted = torch.randperm(n_rows, generator=generator, device=x.device)[:_PLANTED]
    late = n_cols - 1 - torch.randint(max(1, n_cols // 4), planted.shape, generator=generator, device=x.device)
    x[:, planted, late] += 16.0
    return planted


def _any_rows(blocks: Blocks, planted: Tensor, generator: torch.Generator) -> Tensor:
    n_calls, n_rows, _ = blocks["x"].shape
    half = ROWS_PER_CALL // 2
    at = torch.randint(len(planted), (n_calls, half), generator=generator, device=planted.device)
    others = torch.randint(n_rows, (n_calls, ROWS_PER_CALL - half), generator=generator, device=planted.device)
    return torch.cat([planted[at], others], dim=1)


def _softmax_rows(blocks: Blocks, planted: Tensor, generator: torch.Generator) -> Rows:
    rows = _any_rows(blocks, planted, generator)
    return {"y": rows, "lse": rows}


def _expected_softmax(blocks: Blocks, options: Options, rows: Rows) -> Expected:  # noqa: ARG001
    chosen = rows["y"]
    every = torch.arange(len(chosen), device=chosen.device)
    x = blocks["x"][every[:, None], chosen].double()
    return {"y": (every, torch.softmax(x, dim=-1)), "lse": (every, torch.logsumexp(x, dim=-1, keepdim=True))}


def _layer_norm_shapes(axes: Mapping[str, int], dtype: torch.dtype) -> Shapes:
    row = (axes["dim"],)
    return {"x": ((axes["rows"], *row), dtype), **dict.fromkeys(("bias", "gamma", "beta"), (row, dtype))}


def _fill_layer_norm(blocks: Blocks, generator: torch.Generator) -> Tensor:
    """Normal values; in some rows the last quarter is shifted, which moves their statistics."""
    x = blocks["x"]
    for name, block in blocks.items():
        block.normal_(1.0 if name == "gamma" else 0.0, 1.0, generator=generator)
    _, n_rows, n_cols = x.shape
    planted = torch.randperm(n_rows, generator=generator, device=x.device)[:_PLANTED]
    x[:, planted, n_cols - n_cols // 4 :] += 4.0
    return planted


def _layer_norm_rows(blocks: Blocks, planted: Tensor, generator: torch.Generator) -> Rows:
    return {"y": _any_rows(blocks, planted, generator)}


def _expected_layer_norm(blocks: Blocks, options: Options, rows: Rows) -> Expected:
    chosen = rows["y"]
    every = torch.arange(len(chosen), device=chosen.device)
    n_cols = blocks["x"].shape[-1]
    bias, gamma, beta = (blocks[name][every % len(blocks[name]), None].double() for name in ("bias", "gamma", "beta"))
    index = chosen[..., None] * n_cols + torch.arange(n_cols, device=chosen.device)
    kept = uniform(options["seed"], index) >= options["p"]
    z = (blocks["x"][every[:, None], chosen].double() + bias) * kept / (1.0 - options["p"])
    centred = z - z.mean(dim=-1, keepdim=True)
    normal = centred * torch.rsqrt(centred.square().mean(dim=-1, keepdim=True) + options.get("eps", 1e-5))
    return {"y": (every, normal * gamma + beta)}


def _row_output_bytes(axes: Mapping[str, int], dtype: torch.dtype) -> int:
    return axes["rows"] * (axes["cols" if "cols" in axes else "dim"] * dtype.itemsize + 4)


_TIMED = {
    "attention.forward": Timed(
        baseline_file=_BASELINES / "attention.py",
        baseline_entry="forward",
        shapes=_attention_shapes,
        output_bytes=_attention_output_bytes,
        fill=_fill_attention,
        rows=_attention_rows,
        expected=_expected_attention,
        baseline_outputs=("o", "lse"),
    ),
    "attention.training": Timed(
        baseline_file=_BASELINES / "attention.py",
        baseline_entry="training",
        shapes=_training_shapes,
        output_bytes=_training_output_bytes,
        fill=_fill_attention,
        rows=_training_rows,
        expected=_expected_training,
        baseline_outputs=("o", "dq", "dk", "dv"),
    ),
    "softmax.online": Timed(
        baseline_file=_BASELINES / "softmax.py",
        baseline_entry="online",
        shapes=_softmax_shapes,
        output_bytes=_row_output_bytes,
        fill=_fill_softmax,
        rows=_softmax_rows,
        expected=_expected_softmax,
        baseline_outputs=("y", "lse"),
    ),
    "layer_norm.fused": Timed(
        baseline_file=_BASELINES / "layer_norm.py",
        baseline_entry="fused",
        shapes=_layer_norm_shapes,
        output_bytes=_row_output_bytes,
        fill=_fill_layer_norm,
        rows=_layer_norm_rows,
        expected=_expected_layer_norm,
    ),
}
