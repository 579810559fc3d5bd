"""FlashAttention, forward and backward: the scores exist one tile at a time and never reach global memory.

Sources: Dao et al. 2022, arXiv:2205.14135 (tiling, recomputation); Dao 2023, arXiv:2307.08691 (one division at the end,
logsumexp in place of maximum and denominator); Milakov and Gimelshein 2018, arXiv:1805.02867 (online softmax).

Everything exponential is in base two: exp(x) = 2 ** (x * log2 e), and exp2 is the instruction the hardware has.
"""

import math

import torch
import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_rows(ptr, row_stride, dim_stride, n_rows, D: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    """Read [BLOCK, D] from `ptr`; rows from n_rows on are 0. Reads unmasked where the caller knows all rows exist."""
    rows = tl.arange(0, BLOCK)
    ptrs = ptr + rows[:, None] * row_stride + tl.arange(0, D)[None, :] * dim_stride
    if MASKED:
        return tl.load(ptrs, mask=rows[:, None] < n_rows, other=0.0)
    return tl.load(ptrs)


@triton.jit
def store_rows(ptr, x, row_stride, n_rows, D: tl.constexpr, BLOCK: tl.constexpr):
    """Write the first n_rows rows of [BLOCK, D]; the last axis of the destination is contiguous."""
    rows = tl.arange(0, BLOCK)
    ptrs = ptr + rows[:, None] * row_stride + tl.arange(0, D)[None, :]
    tl.store(ptrs, x.to(ptr.dtype.element_ty), mask=rows[:, None] < n_rows)


@triton.jit
def visible(first_query, first_key, n_keys, CAUSAL: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr):
    """[BLOCK_Q, BLOCK_K]: which keys of the tile exist and, when causal, lie at or before the query."""
    keys = first_key + tl.arange(0, BLOCK_K)[None, :]
    queries = first_query + tl.arange(0, BLOCK_Q)[:, None]
    exists = (keys < n_keys) & (queries >= 0)
    if CAUSAL:
        return exists & (keys <= queries)
    return exists


@triton.jit
def fold_keys(
    acc, m, denom, q, k_ptr, v_ptr, k_row, k_dim, v_row, v_dim, first_query, start, stop, n_keys, scale_log2,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Stream the keys start ... stop - 1 past a tile of queries."""
    for first_key in range(start, stop, BLOCK_K):
        at = tl.cast(first_key, tl.int64)  # key * stride passes 2**31 for long sequences in wide strides
        k = load_rows(k_ptr + at * k_row, k_row, k_dim, n_keys - first_key, D, BLOCK_K, MASKED)
        v = load_rows(v_ptr + at * v_row, v_row, v_dim, n_keys - first_key, D, BLOCK_K, MASKED)
        # ieee: float32 would otherwise be cut to tf32's ten bits on a GPU; other types ignore it
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2  # [BLOCK_Q, BLOCK_K]
        if MASKED:
            # -inf, so that a key which does not count adds 2 ** -inf = 0
            s = tl.where(visible(first_query, first_key, n_keys, CAUSAL, BLOCK_Q, BLOCK_K), s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1))
        correction = tl.exp2(m - m_new)  # brings what was summed so far to the new maximum
        p = tl.exp2(s - m_new[:, None])
        denom = denom * correction + tl.sum(p, axis=1)
        acc = tl.dot(p.to(v.dtype), v, acc * correction[:, None], input_precision="ieee")
        m = m_new
    return acc, m, denom


@triton.jit
def attention_fwd_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr,
    q_batch, q_row, q_dim, k_batch, k_row, k_dim, v_batch, v_row, v_dim,
    n_queries, n_keys, n_tiles, scale,
    CAUSAL: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program owns BLOCK_Q queries of one batch entry. o [B, Nq, D] and lse [B, Nq] are contiguous."""
    batch = (tl.program_id(0) // n_tiles).to(tl.int64)
    # the last queries see the most keys when causal: start them first, so that no long program is left at the end
    first_query = (n_tiles - 1 - tl.program_id(0) % n_tiles) * BLOCK_Q
    row = first_query.to(tl.int64)
    q = load_rows(q_ptr + batch * q_batch + row * q_row, q_row, q_dim, n_queries - first_query, D, BLOCK_Q, True)
    k_ptr += batch * k_batch
    v_ptr += batch * v_batch

    m = tl.full((BLOCK_Q,), -float("inf"), tl.float32)  # running maximum, base-2 units
    denom = tl.zeros((BLOCK_Q,), tl.float32)
    acc = tl.zeros((BLOCK_Q, D), tl.float32)
    stop = n_keys
    unmasked = n_keys // BLOCK_K * BLOCK_K  # keys before this one are all visible, in whole tiles
    if CAUSAL:
        stop = tl.minimum(n_keys, first_query + BLOCK_Q)
        unmasked = tl.minimum(unmasked, first_query // BLOCK_K * BLOCK_K)
    acc, m, denom = fold_keys(
        acc, m, denom, q, k_ptr, v_ptr, k_row, k_dim, v_row, v_dim, first_query, 0, unmasked, n_keys, scale * LOG2_E,
        False, CAUSAL, D, BLOCK_Q, BLOCK_K,
    )  # fmt: skip
    acc, m, denom = fold_keys(
        acc, m, denom, q, k_ptr, v_ptr, k_row, k_dim, v_row, v_dim, first_query, unmasked, stop, n_keys, scale * LOG2_E,
        True, CAUSAL, D, BLOCK_Q, BLOCK_K,
    )  # fmt: skip

    n_rows = n_queries - first_query
    out_row = batch * n_queries + row
    store_rows(o_ptr + out_row * D, acc / denom[:, None], D, n_rows, D, BLOCK_Q)
    rows = tl.arange(0, BLOCK_Q)
    tl.store(lse_ptr + out_row + rows, (m + tl.log2(denom)) * LN_2, mask=rows < n_rows)


@triton.jit
def attention_bwd_dq_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr,
    q_batch, q_row, q_dim, k_batch, k_row, k_dim, v_batch, v_row, v_dim, do_batch, do_row, do_dim,
    n_queries, n_keys, n_tiles, scale,
    CAUSAL: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """dq = scale * dS @ K for BLOCK_Q queries, with dS = P * (dO @ V^T - delta). Leaves delta for the other pass."""
    batch = (tl.program_id(0) // n_tiles).to(tl.int64)
    first_query = (n_tiles - 1 - tl.program_id(0) % n_tiles) * BLOCK_Q
    n_rows = n_queries - first_query
    row = first_query.to(tl.int64)
    rows = tl.arange(0, BLOCK_Q)
    out_row = batch * n_queries + row
    q = load_rows(q_ptr + batch * q_batch + row * q_row, q_row, q_dim, n_rows, D, BLOCK_Q, True)
    do = load_rows(do_ptr + batch * do_batch + row * do_row, do_row, do_dim, n_rows, D, BLOCK_Q, True)
    o = load_rows(o_ptr + out_row * D, D, 1, n_rows, D, BLOCK_Q, True)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), axis=1)  # [BLOCK_Q]
    tl.store(delta_ptr + out_row + rows, delta, mask=rows < n_rows)
    # +inf, so that P is 0 in rows that do not exist
    lse_log2 = tl.load(lse_ptr + out_row + rows, mask=rows < n_rows, other=float("inf")) * LOG2_E

    k_ptr += batch * k_batch
    v_ptr += batch * v_batch
    dq = tl.zeros((BLOCK_Q, D), tl.float32)
    stop = n_keys
    if CAUSAL:
        stop = tl.minimum(n_keys, first_query + BLOCK_Q)
    for first_key in range(0, stop, BLOCK_K):
        at = tl.cast(first_key, tl.int64)
        k = load_rows(k_ptr + at * k_row, k_row, k_dim, n_keys - first_key, D, BLOCK_K, True)
        v = load_rows(v_ptr + at * v_row, v_row, v_dim, n_keys - first_key, D, BLOCK_K, True)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2_E)
        s = tl.where(visible(first_query, first_key, n_keys, CAUSAL, BLOCK_Q, BLOCK_K), s, -float("inf"))
        p = tl.exp2(s - lse_log2[:, None])  # [BLOCK_Q, BLOCK_K], the probabilities again
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    store_rows(dq_ptr + out_row * D, dq * scale, D, n_rows, D, BLOCK_Q)


@triton.jit
def attention_bwd_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    q_batch, q_row, q_dim, k_batch, k_row, k_dim, v_batch, v_row, v_dim, do_batch, do_row, do_dim,
    n_queries, n_keys, n_tiles, scale,
    CAUSAL: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """dv = P^T @ dO and dk = scale * dS^T @ Q for BLOCK_K keys. Each program owns its rows: no atomics."""
    batch = (tl.program_id(0) // n_tiles).to(tl.int64)
    first_key = (tl.program_id(0) % n_tiles) * BLOCK_K  # the first keys are seen by the most queries
    n_rows = n_keys - first_key
    row = first_key.to(tl.int64)
    k = load_rows(k_ptr + batch * k_batch + row * k_row, k_row, k_dim, n_rows, D, BLOCK_K, True)
    v = load_rows(v_ptr + batch * v_batch + row * v_row, v_row, v_dim, n_rows, D, BLOCK_K, True)
    q_ptr += batch * q_batch
    do_ptr += batch * do_batch
    lse_ptr += batch * n_queries
    delta_ptr += batch * n_queries

    dk = tl.zeros((BLOCK_K, D), tl.float32)
    dv = tl.zeros((BLOCK_K, D), tl.float32)
    start = 0
    if CAUSAL:
        start = first_key // BLOCK_Q * BLOCK_Q  # earlier queries do not see these keys
    for first_query in range(start, n_queries, BLOCK_Q):
        at = tl.cast(first_query, tl.int64)
        left = n_queries - first_query
        rows = tl.arange(0, BLOCK_Q)
        q = load_rows(q_ptr + at * q_row, q_row, q_dim, left, D, BLOCK_Q, True)
        do = load_rows(do_ptr + at * do_row, do_row, do_dim, left, D, BLOCK_Q, True)
        lse_log2 = tl.load(lse_ptr + at + rows, mask=rows < left, other=float("inf")) * LOG2_E
        delta = tl.load(delta_ptr + at + rows, mask=rows < left, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2_E)
        s = tl.where(visible(first_query, first_key, n_keys, CAUSAL, BLOCK_Q, BLOCK_K), s, -float("inf"))
        p = tl.exp2(s - lse_log2[:, None])  # [BLOCK_Q, BLOCK_K]
        dv = tl.dot(tl.trans(p.to(do.dtype)), do, dv, input_precision="ieee")
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")
        ds = p * (dp - delta[:, None])
        dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision="ieee")
    out_row = batch * n_keys + row
    store_rows(dk_ptr + out_row * D, dk * scale, D, n_rows, D, BLOCK_K)
    store_rows(dv_ptr + out_row * D, dv, D, n_rows, D, BLOCK_K)


def forward_tiles(dtype: torch.dtype, d: int) -> dict[str, int]:
    """Tile sizes, warps and pipeline stages that fit the shared memory and registers of a recent data-centre GPU."""
    if dtype == torch.float32:
        return {"BLOCK_Q": 64, "BLOCK_K": 64 if d <= 64 else 32, "num_warps": 4, "num_stages": 2}
    return {"BLOCK_Q": 128, "BLOCK_K": 64, "num_warps": 4 if d <= 64 else 8, "num_stages": 3}


def backward_tiles(dtype: torch.dtype, d: int) -> dict[str, int]:
    """The backward keeps two accumulators and five operands, so its tiles are smaller."""
    if dtype == torch.float32:
        block = 64 if d <= 64 else 32
        return {"BLOCK_Q": block, "BLOCK_K": block, "num_warps": 4, "num_stages": 1}
    return {"BLOCK_Q": 64, "BLOCK_K": 64, "num_warps": 4 if d <= 64 else 8, "num_stages": 2}


def flash_attention_forward(q, k, v, is_causal=False):
    """softmax(q @ k^T / sqrt(d)) @ v and the logsumexp of its rows, in one launch.

    Args:
        q: [B, Nq, d]; k, v: [B, Nk, d]; one dtype of float32, float16, bfloat16; d in 16, 32, 64, 128; any strides.
        is_causal: query i sees keys 0 ... i, counted from the start of both.

    Returns:
        o [B, Nq, d] in the dtype of q, and lse [B, Nq] in float32, natural logarithm.
    """
    n_batch, n_queries, d = q.shape
    n_keys = k.shape[1]
    o = torch.empty((n_batch, n_queries, d), dtype=q.dtype, device=q.device)
    lse = torch.empty((n_batch, n_queries), dtype=torch.float32, device=q.device)
    tiles = forward_tiles(q.dtype, d)
    n_tiles = triton.cdiv(n_queries, tiles["BLOCK_Q"])
    attention_fwd_kernel[(n_tiles * n_batch,)](
        q, k, v, o, lse, *q.stride(), *k.stride(), *v.stride(),
        n_queries, n_keys, n_tiles, 1.0 / math.sqrt(d), CAUSAL=bool(is_causal), D=d, **tiles,
    )  # fmt: skip
    return o, lse


class FlashAttention(torch.autograd.Function):
    """apply(q, k, v, is_causal) -> o. Saves q, k, v, o and lse: the backward rebuilds each tile of P from them."""

    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        o, lse = flash_attention_forward(q, k, v, is_causal)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.is_causal = bool(is_causal)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, lse = ctx.saved_tensors
        n_batch, n_queries, d = q.shape
        n_keys = k.shape[1]
        dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        dk = torch.empty(k.shape, dtype=k.dtype, device=k.device)
        dv = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        delta = torch.empty_like(lse)
        tiles = backward_tiles(q.dtype, d)
        strides = (*q.stride(), *k.stride(), *v.stride(), *do.stride())
        sizes = {"scale": 1.0 / math.sqrt(d), "CAUSAL": ctx.is_causal, "D": d, **tiles}
        n_tiles = triton.cdiv(n_queries, tiles["BLOCK_Q"])
        attention_bwd_dq_kernel[(n_tiles * n_batch,)](
            q, k, v, o, do, lse, delta, dq, *strides, n_queries, n_keys, n_tiles, **sizes
        )
        n_tiles = triton.cdiv(n_keys, tiles["BLOCK_K"])
        attention_bwd_dkdv_kernel[(n_tiles * n_batch,)](
            q, k, v, do, lse, delta, dk, dv, *strides, n_queries, n_keys, n_tiles, **sizes
        )
        return dq, dk, dv, None
