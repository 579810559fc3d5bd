"""FlashAttention, forward and backward: the scores exist one tile at a time and never reach global memory.

Sources: Dao et al. 2022, arXiv:2205.14135 (tiling, recomputation); Dao 2023, arXiv:2307.08691 (one division at the end,
logsumexp in place of maximum and denominator); Shah et al. 2024, arXiv:2407.08608 (on Hopper one group of warps loads
tiles while two others multiply); Milakov and Gimelshein 2018, arXiv:1805.02867 (online softmax).

Everything exponential is in base two: exp(x) = 2 ** (x * log2 e), and exp2 is the instruction the hardware has.

Tiles of q, k, v and the outputs go through tensor descriptors: the copy engine finds the addresses, reads 0 beyond the
last row and writes nothing there.
"""

import math

import torch
import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LARGEST_TILE = 128

# Tiles, warps and pipeline stages that were the fastest, by (compute capability, d, causal), for numbers of two bytes:
# BLOCK_Q, BLOCK_K, num_warps, num_stages, SPECIALIZED (one group of warps loads what two others multiply).
# Found by benchmarks/tune.py on an NVIDIA H200 with triton 3.6; benchmarks/RESULTS.md has the numbers.
FORWARD = {
    (9, 64, False): (128, 128, 4, 3, False),
    (9, 64, True): (128, 64, 4, 3, False),
    (9, 128, False): (128, 64, 4, 2, False),
    (9, 128, True): (128, 128, 8, 3, False),
}
BACKWARD_DQ = {
    (9, 64, False): (128, 64, 8, 3, False),
    (9, 64, True): (64, 64, 4, 2, False),
    (9, 128, False): (128, 128, 4, 2, True),
    (9, 128, True): (128, 64, 8, 3, False),
}
BACKWARD_DKDV = {
    (9, 64, False): (128, 128, 4, 3, True),
    (9, 64, True): (64, 64, 4, 3, False),
    (9, 128, False): (64, 128, 4, 2, True),
    (9, 128, True): (64, 64, 4, 2, False),
}


@triton.jit
def tiles_of(ptr, batch, batch_stride, row_stride, n_rows, D: tl.constexpr, BLOCK: tl.constexpr):
    """The [BLOCK, D] tiles of one batch entry: load([row, 0]) and store([row, 0], tile)."""
    start = ptr + batch.to(tl.int64) * batch_stride  # int64: strides of a view can pass 2**31
    return tl.make_tensor_descriptor(start, shape=[n_rows, D], strides=[row_stride, 1], block_shape=[BLOCK, D])


@triton.jit
def row_of(first):
    """`first`, for descriptors alone.

    Where triton 3.6 gives two groups of warps half a tile each, it adds the second half's offset to the row that a
    descriptor is asked for and to everything else made of that very value; tl.arange it has moved already.
    """
    return tl.maximum(first, 0)


@triton.jit
def fold_keys(
    acc, m, denom, q, k_tiles, v_tiles, queries, start, stop, n_keys, scale_log2,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, BLOCK_K: tl.constexpr, SPECIALIZED: tl.constexpr,
):  # fmt: skip
    """Stream the keys start ... stop - 1 past a tile of queries."""
    for first_key in tl.range(start, stop, BLOCK_K, warp_specialize=SPECIALIZED):
        k = k_tiles.load([first_key, 0])
        # ieee: float32 would otherwise be cut to tf32's ten bits on a GPU; other types ignore it
        s = tl.dot(q, k.T, input_precision="ieee")  # [BLOCK_Q, BLOCK_K]
        if MASKED:
            keys = first_key + tl.arange(0, BLOCK_K)
            # -inf, so that a key which does not count adds 2 ** -inf = 0
            if CAUSAL:
                last = tl.minimum(queries, n_keys - 1)
                s = tl.where(keys[None, :] <= last[:, None], s, -float("inf"))
            else:
                s = tl.where((keys < n_keys)[None, :], s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1) * scale_log2)
        p = tl.exp2(s * scale_log2 - m_new[:, None])
        correction = tl.exp2(m - m_new)  # brings what was summed so far to the new maximum
        denom = denom * correction + tl.sum(p, axis=1)
        v = v_tiles.load([first_key, 0])
        acc = tl.dot(p.to(v.dtype), v, acc * correction[:, None], input_precision="ieee")
        m = m_new
    return acc, m, denom


@triton.jit(
    do_not_specialize=["q_batch", "q_row", "k_batch", "k_row", "v_batch", "v_row", "n_queries", "n_keys", "n_tiles"]
)
def attention_fwd_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, q_batch, q_row, k_batch, k_row, v_batch, v_row,
    n_queries, n_keys, n_tiles, scale,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, D: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, SPECIALIZED: tl.constexpr,
):  # fmt: skip
    """One program owns BLOCK_Q queries of one batch entry. o [B, Nq, D] and lse [B, Nq] are contiguous."""
    batch = tl.program_id(0) // n_tiles
    # the last queries see the most keys when causal: start them first, so that no long program is left at the end
    first_query = (n_tiles - 1 - tl.program_id(0) % n_tiles) * BLOCK_Q
    queries = first_query + tl.arange(0, BLOCK_Q)
    row = row_of(first_query)
    q_tiles = tiles_of(q_ptr, batch, q_batch, q_row, n_queries, D, BLOCK_Q)
    k_tiles = tiles_of(k_ptr, batch, k_batch, k_row, n_keys, D, BLOCK_K)
    v_tiles = tiles_of(v_ptr, batch, v_batch, v_row, n_keys, D, BLOCK_K)
    o_tiles = tiles_of(o_ptr, batch, n_queries * D, D, n_queries, D, BLOCK_Q)
    q = q_tiles.load([row, 0])

    m = tl.full((BLOCK_Q,), -float("inf"), tl.float32)  # running maximum, base-2 units
    denom = tl.zeros((BLOCK_Q,), tl.float32)
    acc = tl.zeros((BLOCK_Q, D), tl.float32)
    stop = n_keys
    if CAUSAL:
        stop = tl.minimum(n_keys, first_query + BLOCK_Q)
    if SPECIALIZED:  # allows one loop
        acc, m, denom = fold_keys(
            acc, m, denom, q, k_tiles, v_tiles, queries, 0, stop, n_keys, scale * LOG2_E,
            CAUSAL, MASKED, BLOCK_K, SPECIALIZED,
        )  # fmt: skip
    else:
        unmasked = n_keys // BLOCK_K * BLOCK_K  # keys before this one are all visible, in whole tiles
        if CAUSAL:
            unmasked = tl.minimum(unmasked, first_query // BLOCK_K * BLOCK_K)
        acc, m, denom = fold_keys(
            acc, m, denom, q, k_tiles, v_tiles, queries, 0, unmasked, n_keys, scale * LOG2_E,
            CAUSAL, False, BLOCK_K, SPECIALIZED,
        )  # fmt: skip
        acc, m, denom = fold_keys(
            acc, m, denom, q, k_tiles, v_tiles, queries, unmasked, stop, n_keys, scale * LOG2_E,
            CAUSAL, True, BLOCK_K, SPECIALIZED,
        )  # fmt: skip

    o = acc / denom[:, None]
    o_tiles.store([row, 0], o.to(o_ptr.dtype.element_ty))
    lse = (m + tl.log2(denom)) * LN_2
    tl.store(lse_ptr + batch.to(tl.int64) * n_queries + queries, lse, mask=queries < n_queries)


@triton.jit
def rows_of(ptr, batch, n_rows, BLOCK: tl.constexpr):
    """The [BLOCK] pieces of one batch entry's numbers, one a row: load([row])."""
    return tl.make_tensor_descriptor(
        ptr + batch.to(tl.int64) * n_rows, shape=[n_rows], strides=[1], block_shape=[BLOCK]
    )


@triton.jit(do_not_specialize=["do_batch", "do_row", "n_queries", "n_padded"])
def attention_bwd_rows_kernel(
    o_ptr, do_ptr, lse_ptr, lse_log2_ptr, delta_ptr, do_batch, do_row, n_queries, n_padded,
    D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What the backward needs of each query: lse in base two, and delta, the sum over d of o * dO.

    Both [B, n_padded], in whole tiles; a query that does not exist has lse +inf, so that its P is 0.
    """
    n_tiles = n_padded // BLOCK
    batch = tl.program_id(0) // n_tiles
    first_query = tl.program_id(0) % n_tiles * BLOCK
    queries = first_query + tl.arange(0, BLOCK)
    o = tiles_of(o_ptr, batch, n_queries * D, D, n_queries, D, BLOCK).load([first_query, 0])
    do = tiles_of(do_ptr, batch, do_batch, do_row, n_queries, D, BLOCK).load([first_query, 0])
    lse_ptr += batch.to(tl.int64) * n_queries
    lse = tl.load(lse_ptr + queries, mask=queries < n_queries, other=float("inf"))
    out = batch.to(tl.int64) * n_padded + queries
    tl.store(lse_log2_ptr + out, lse * LOG2_E)
    tl.store(delta_ptr + out, tl.sum(o.to(tl.float32) * do.to(tl.float32), axis=1))


@triton.jit(
    do_not_specialize=[
        "q_batch",
        "q_row",
        "k_batch",
        "k_row",
        "v_batch",
        "v_row",
        "do_batch",
        "do_row",
        "n_queries",
        "n_padded",
        "n_keys",
        "n_tiles",
    ]
)
def attention_bwd_dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_log2_ptr, delta_ptr, dq_ptr,
    q_batch, q_row, k_batch, k_row, v_batch, v_row, do_batch, do_row, n_queries, n_padded, n_keys, n_tiles, scale,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, D: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, SPECIALIZED: tl.constexpr,
):  # fmt: skip
    """dq = scale * dS @ K for BLOCK_Q queries, with dS = P * (dO @ V^T - delta)."""
    batch = tl.program_id(0) // n_tiles
    first_query = (n_tiles - 1 - tl.program_id(0) % n_tiles) * BLOCK_Q
    queries = first_query + tl.arange(0, BLOCK_Q)
    row = row_of(first_query)
    k_tiles = tiles_of(k_ptr, batch, k_batch, k_row, n_keys, D, BLOCK_K)
    v_tiles = tiles_of(v_ptr, batch, v_batch, v_row, n_keys, D, BLOCK_K)
    q_tiles = tiles_of(q_ptr, batch, q_batch, q_row, n_queries, D, BLOCK_Q)
    do_tiles = tiles_of(do_ptr, batch, do_batch, do_row, n_queries, D, BLOCK_Q)
    dq_tiles = tiles_of(dq_ptr, batch, n_queries * D, D, n_queries, D, BLOCK_Q)
    q = q_tiles.load([row, 0])
    do = do_tiles.load([row, 0])
    lse_log2 = rows_of(lse_log2_ptr, batch, n_padded, BLOCK_Q).load([row])
    delta = rows_of(delta_ptr, batch, n_padded, BLOCK_Q).load([row])

    dq = tl.zeros((BLOCK_Q, D), tl.float32)
    stop = n_keys
    if CAUSAL:
        stop = tl.minimum(n_keys, first_query + BLOCK_Q)
    for first_key in tl.range(0, stop, BLOCK_K, warp_specialize=SPECIALIZED):
        k = k_tiles.load([first_key, 0])
        s = tl.dot(q, k.T, input_precision="ieee")
        p = tl.exp2(s * (scale * LOG2_E) - lse_log2[:, None])  # [BLOCK_Q, BLOCK_K], the probabilities again
        if MASKED:
            keys = first_key + tl.arange(0, BLOCK_K)
            if CAUSAL:
                last = tl.minimum(queries, n_keys - 1)
                p = tl.where(keys[None, :] <= last[:, None], p, 0.0)
            else:
                p = tl.where((keys < n_keys)[None, :], p, 0.0)
        v = v_tiles.load([first_key, 0])
        dp = tl.dot(do, v.T, input_precision="ieee")
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    dq_tiles.store([row, 0], (dq * scale).to(dq_ptr.dtype.element_ty))


@triton.jit(
    do_not_specialize=[
        "q_batch",
        "q_row",
        "k_batch",
        "k_row",
        "v_batch",
        "v_row",
        "do_batch",
        "do_row",
        "n_queries",
        "n_padded",
        "n_keys",
        "n_tiles",
    ]
)
def attention_bwd_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_log2_ptr, delta_ptr, dk_ptr, dv_ptr,
    q_batch, q_row, k_batch, k_row, v_batch, v_row, do_batch, do_row, n_queries, n_padded, n_keys, n_tiles, scale,
    CAUSAL: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, SPECIALIZED: tl.constexpr,
):  # fmt: skip
    """dv = P^T @ dO and dk = scale * dS^T @ Q for BLOCK_K keys. Each program owns its rows: no atomics.

    Scores are made transposed, keys first, because a product takes its first factor from registers as it is.
    """
    batch = tl.program_id(0) // n_tiles
    first_key = tl.program_id(0) % n_tiles * BLOCK_K  # the first keys are seen by the most queries
    keys = first_key + tl.arange(0, BLOCK_K)
    row = row_of(first_key)
    k_tiles = tiles_of(k_ptr, batch, k_batch, k_row, n_keys, D, BLOCK_K)
    v_tiles = tiles_of(v_ptr, batch, v_batch, v_row, n_keys, D, BLOCK_K)
    q_tiles = tiles_of(q_ptr, batch, q_batch, q_row, n_queries, D, BLOCK_Q)
    do_tiles = tiles_of(do_ptr, batch, do_batch, do_row, n_queries, D, BLOCK_Q)
    dk_tiles = tiles_of(dk_ptr, batch, n_keys * D, D, n_keys, D, BLOCK_K)
    dv_tiles = tiles_of(dv_ptr, batch, n_keys * D, D, n_keys, D, BLOCK_K)
    k = k_tiles.load([row, 0])
    v = v_tiles.load([row, 0])
    lse_rows = rows_of(lse_log2_ptr, batch, n_padded, BLOCK_Q)
    delta_rows = rows_of(delta_ptr, batch, n_padded, BLOCK_Q)

    dk = tl.zeros((BLOCK_K, D), tl.float32)
    dv = tl.zeros((BLOCK_K, D), tl.float32)
    start = 0
    if CAUSAL:
        start = first_key // BLOCK_Q * BLOCK_Q  # earlier queries do not see these keys
    for first_query in tl.range(start, n_queries, BLOCK_Q, warp_specialize=SPECIALIZED):
        queries = first_query + tl.arange(0, BLOCK_Q)
        q = q_tiles.load([first_query, 0])
        s = tl.dot(k, q.T, input_precision="ieee")  # [BLOCK_K, BLOCK_Q]
        lse_log2 = lse_rows.load([first_query])
        p = tl.exp2(s * (scale * LOG2_E) - lse_log2[None, :])
        if CAUSAL:
            p = tl.where(keys[:, None] <= queries[None, :], p, 0.0)
        do = do_tiles.load([first_query, 0])
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
        dp = tl.dot(v, do.T, input_precision="ieee")
        delta = delta_rows.load([first_query])
        ds = p * (dp - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    dk_tiles.store([row, 0], (dk * scale).to(dk_ptr.dtype.element_ty))
    dv_tiles.store([row, 0], dv.to(dv_ptr.dtype.element_ty))


def tuned(table, q, is_causal, otherwise):
    """The entry of a table above for this GPU, else `otherwise`: smaller tiles that fit any recent data-centre GPU."""
    tiles = otherwise
    if q.dtype != torch.float32 and q.device.type != "cpu":
        major = torch.cuda.get_device_capability(q.device)[0]
        tiles = table.get((major, q.shape[2], bool(is_causal)), otherwise)
    return dict(zip(("BLOCK_Q", "BLOCK_K", "num_warps", "num_stages", "SPECIALIZED"), tiles, strict=True))


def forward_tiles(q, is_causal):
    """Tiles of the forward: launch options."""
    d = q.shape[2]
    if q.dtype == torch.float32:
        return tuned(FORWARD, q, is_causal, (64, 64 if d <= 64 else 32, 4, 2, False))
    return tuned(FORWARD, q, is_causal, (128, 64, 4 if d <= 64 else 8, 3, False))


def backward_tiles(q, is_causal):
    """Tiles of the two kernels of the backward: two accumulators and five operands, so they are smaller."""
    d = q.shape[2]
    block = 64 if q.dtype != torch.float32 or d <= 64 else 32
    otherwise = (block, block, 4 if q.dtype == torch.float32 or d <= 64 else 8, 1 + (q.dtype != torch.float32), False)
    return tuned(BACKWARD_DQ, q, is_causal, otherwise), tuned(BACKWARD_DKDV, q, is_causal, otherwise)


def for_descriptors(x):
    """x, or a copy of it where a tensor descriptor cannot point at x: rows lie together and start at 16-byte steps."""
    step = 16 // x.element_size()
    fits = x.stride(2) == 1 and x.stride(1) >= x.shape[2] and x.data_ptr() % 16 == 0
    if fits and x.stride(0) % step == 0 and x.stride(1) % step == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def allocate(size, alignment, stream):  # noqa: ARG001 (as Triton calls it)
    """Where Triton keeps the descriptors of one launch, 128 bytes each."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


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
    triton.set_allocator(allocate)
    o = torch.empty((n_batch, n_queries, d), dtype=q.dtype, device=q.device)
    lse = torch.empty((n_batch, n_queries), dtype=torch.float32, device=q.device)
    tiles = forward_tiles(q, is_causal)
    n_tiles = triton.cdiv(n_queries, tiles["BLOCK_Q"])
    q, k, v = for_descriptors(q), for_descriptors(k), for_descriptors(v)
    attention_fwd_kernel[(n_tiles * n_batch,)](
        q, k, v, o, lse, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
        n_queries, n_keys, n_tiles, 1.0 / math.sqrt(d),
        CAUSAL=bool(is_causal), MASKED=bool(is_causal) or n_keys % tiles["BLOCK_K"] != 0, D=d, **tiles,
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
        triton.set_allocator(allocate)  # again: autograd calls from a thread of its own
        dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        dk = torch.empty(k.shape, dtype=k.dtype, device=k.device)
        dv = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        q, k, v, do = for_descriptors(q), for_descriptors(k), for_descriptors(v), for_descriptors(do)
        strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *do.stride()[:2])
        n_padded = triton.cdiv(n_queries, LARGEST_TILE) * LARGEST_TILE
        lse_log2, delta = torch.empty((2, n_batch, n_padded), dtype=torch.float32, device=q.device)
        attention_bwd_rows_kernel[(n_padded // 64 * n_batch,)](
            o, do, lse, lse_log2, delta, *do.stride()[:2], n_queries, n_padded, D=d, BLOCK=64
        )
        sizes = (n_queries, n_padded, n_keys)
        constants = {"scale": 1.0 / math.sqrt(d), "CAUSAL": ctx.is_causal, "D": d}
        dq_tiles, dkdv_tiles = backward_tiles(q, ctx.is_causal)
        n_tiles = triton.cdiv(n_queries, dq_tiles["BLOCK_Q"])
        attention_bwd_dq_kernel[(n_tiles * n_batch,)](
            q, k, v, do, lse_log2, delta, dq, *strides, *sizes, n_tiles, **constants,
            MASKED=ctx.is_causal or n_keys % dq_tiles["BLOCK_K"] != 0, **dq_tiles,
        )  # fmt: skip
        n_tiles = triton.cdiv(n_keys, dkdv_tiles["BLOCK_K"])
        attention_bwd_dkdv_kernel[(n_tiles * n_batch,)](
            q, k, v, do, lse_log2, delta, dk, dv, *strides, *sizes, n_tiles, **constants, **dkdv_tiles
        )
        return dq, dk, dv, None
