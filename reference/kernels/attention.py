"""FlashAttention, forward and backward: the scores exist one tile at a time and never reach global memory.

Sources: Dao et al. 2022, arXiv:2205.14135 (tiling, recomputation); Dao 2023, arXiv:2307.08691 (one division at the end,
logsumexp in place of maximum and denominator); Shah et al. 2024, arXiv:2407.08608 (on Hopper one group of warps loads
what two others multiply); Milakov and Gimelshein 2018, arXiv:1805.02867 (online softmax).

Everything exponential is in base two: exp(x) = 2 ** (x * log2 e), and exp2 is the instruction the hardware has.

Where DESCRIBED, tiles go through tensor descriptors: the copy engine finds the addresses, reads 0 beyond the last row
and writes nothing there. Elsewhere they go through pointers and masks, whatever the strides.
"""

import math

import torch
import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LARGEST_TILE = 128  # rows

# The fastest tiles for numbers of two bytes, by (major compute capability, d, causal), through descriptors:
# BLOCK_Q, BLOCK_K, num_warps, num_stages, SPECIALIZED. Found by benchmarks/tune.py on an NVIDIA H200 with triton 3.6;
# benchmarks/RESULTS.md has the numbers. SPECIALIZED gives two groups of warps half of the program's own rows each. That
# is right only where no mask asks for the number of such a row: triton 3.6 moves those of the second half twice.
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
def tiles_of(
    ptr, batch, batch_stride, row_stride, n_rows, D: tl.constexpr, BLOCK: tl.constexpr, DESCRIBED: tl.constexpr
):  # fmt: skip
    """One batch entry of [B, n_rows, D], to be read and written in tiles [BLOCK, D]."""
    tiles = ptr + batch.to(tl.int64) * batch_stride  # int64: strides of a view can pass 2**31
    if DESCRIBED:
        tiles = tl.make_tensor_descriptor(tiles, shape=[n_rows, D], strides=[row_stride, 1], block_shape=[BLOCK, D])
    return tiles


@triton.jit
def load_tile(
    tiles, row, row_stride, dim_stride, n_rows,
    D: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """Read [BLOCK, D] from `row` on; rows from n_rows on are 0. Not MASKED where the caller knows all rows exist."""
    if DESCRIBED:
        tile = tiles.load([row, 0])
    else:
        rows = tl.arange(0, BLOCK)
        start = tiles + tl.cast(row, tl.int64) * row_stride  # row * stride passes 2**31 for long, wide sequences
        ptrs = start + rows[:, None] * row_stride + tl.arange(0, D)[None, :] * dim_stride
        tile = tl.load(ptrs, mask=rows[:, None] < n_rows - row, other=0.0) if MASKED else tl.load(ptrs)
    return tile


@triton.jit
def store_tile(tiles, row, x, n_rows, D: tl.constexpr, BLOCK: tl.constexpr, DESCRIBED: tl.constexpr):
    """Write those rows of [BLOCK, D] that exist from `row` on; they lie one after the other."""
    if DESCRIBED:
        tiles.store([row, 0], x)
    else:
        rows = row + tl.arange(0, BLOCK)
        tl.store(tiles + rows[:, None] * D + tl.arange(0, D)[None, :], x, mask=rows[:, None] < n_rows)


@triton.jit
def pieces_of(ptr, batch, n_padded, BLOCK: tl.constexpr, DESCRIBED: tl.constexpr):
    """One batch entry of [B, n_padded], to be read in pieces [BLOCK]."""
    pieces = ptr + batch.to(tl.int64) * n_padded
    if DESCRIBED:
        pieces = tl.make_tensor_descriptor(pieces, shape=[n_padded], strides=[1], block_shape=[BLOCK])
    return pieces


@triton.jit
def load_piece(pieces, row, BLOCK: tl.constexpr, DESCRIBED: tl.constexpr):
    """Read [BLOCK] from `row` on."""
    return pieces.load([row]) if DESCRIBED else tl.load(pieces + row + tl.arange(0, BLOCK))


@triton.jit
def visible(queries, keys, n_keys, CAUSAL: tl.constexpr):
    """[queries, keys]: which keys exist and, when causal, lie at or before the query."""
    return keys[None, :] <= tl.minimum(queries, n_keys - 1)[:, None] if CAUSAL else (keys < n_keys)[None, :]


@triton.jit
def fold_keys(
    acc, m, denom, q, k_tiles, v_tiles, k_row, k_dim, v_row, v_dim, queries, start, stop, n_keys, scale_log2,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, D: tl.constexpr, BLOCK_K: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """Stream the keys start ... stop - 1 past a tile of queries."""
    for first_key in range(start, stop, BLOCK_K):
        k = load_tile(k_tiles, first_key, k_row, k_dim, n_keys, D, BLOCK_K, MASKED, DESCRIBED)
        # ieee: float32 would otherwise be cut to tf32's ten bits on a GPU; other types ignore it
        s = tl.dot(q, k.T, input_precision="ieee")  # [BLOCK_Q, BLOCK_K]
        if MASKED:
            # -inf, so that a key which does not count adds 2 ** -inf = 0
            s = tl.where(visible(queries, first_key + tl.arange(0, BLOCK_K), n_keys, CAUSAL), s, -float("inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1) * scale_log2)
        p = tl.exp2(s * scale_log2 - m_new[:, None])
        correction = tl.exp2(m - m_new)  # brings what was summed so far to the new maximum
        denom = denom * correction + tl.sum(p, axis=1)
        v = load_tile(v_tiles, first_key, v_row, v_dim, n_keys, D, BLOCK_K, MASKED, DESCRIBED)
        acc = tl.dot(p.to(v.dtype), v, acc * correction[:, None], input_precision="ieee")
        m = m_new
    return acc, m, denom


@triton.jit(do_not_specialize=["n_queries", "n_keys", "n_tiles"])
def attention_fwd_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr,
    q_batch, q_row, q_dim, k_batch, k_row, k_dim, v_batch, v_row, v_dim,
    n_queries, n_keys, n_tiles, scale,
    CAUSAL: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """One program owns BLOCK_Q queries of one batch entry. o [B, Nq, D] and lse [B, Nq] are contiguous."""
    batch = tl.program_id(0) // n_tiles
    # the last queries see the most keys when causal: start them first, so that no long program is left at the end
    first_query = (n_tiles - 1 - tl.program_id(0) % n_tiles) * BLOCK_Q
    queries = first_query + tl.arange(0, BLOCK_Q)
    q_tiles = tiles_of(q_ptr, batch, q_batch, q_row, n_queries, D, BLOCK_Q, DESCRIBED)
    k_tiles = tiles_of(k_ptr, batch, k_batch, k_row, n_keys, D, BLOCK_K, DESCRIBED)
    v_tiles = tiles_of(v_ptr, batch, v_batch, v_row, n_keys, D, BLOCK_K, DESCRIBED)
    o_tiles = tiles_of(o_ptr, batch, n_queries * D, D, n_queries, D, BLOCK_Q, DESCRIBED)
    q = load_tile(q_tiles, first_query, q_row, q_dim, n_queries, D, BLOCK_Q, True, DESCRIBED)

    m = tl.full((BLOCK_Q,), -float("inf"), tl.float32)  # running maximum, base-2 units
    denom = tl.zeros((BLOCK_Q,), tl.float32)
    acc = tl.zeros((BLOCK_Q, D), tl.float32)
    stop = n_keys
    unmasked = n_keys // BLOCK_K * BLOCK_K  # keys before this one are all visible, in whole tiles
    if CAUSAL:
        stop = tl.minimum(n_keys, first_query + BLOCK_Q)
        unmasked = tl.minimum(unmasked, first_query // BLOCK_K * BLOCK_K)
    acc, m, denom = fold_keys(
        acc, m, denom, q, k_tiles, v_tiles, k_row, k_dim, v_row, v_dim, queries, 0, unmasked, n_keys, scale * LOG2_E,
        False, CAUSAL, D, BLOCK_K, DESCRIBED,
    )  # fmt: skip
    acc, m, denom = fold_keys(
        acc, m, denom, q, k_tiles, v_tiles, k_row, k_dim, v_row, v_dim, queries, unmasked, stop, n_keys, scale * LOG2_E,
        True, CAUSAL, D, BLOCK_K, DESCRIBED,
    )  # fmt: skip

    o = (acc / denom[:, None]).to(o_ptr.dtype.element_ty)
    store_tile(o_tiles, first_query, o, n_queries, D, BLOCK_Q, DESCRIBED)
    lse = (m + tl.log2(denom)) * LN_2
    tl.store(lse_ptr + batch.to(tl.int64) * n_queries + queries, lse, mask=queries < n_queries)


@triton.jit(do_not_specialize=["n_queries", "n_padded"])
def attention_bwd_rows_kernel(
    o_ptr, do_ptr, lse_ptr, lse_log2_ptr, delta_ptr, do_batch, do_row, do_dim, n_queries, n_padded,
    D: tl.constexpr, BLOCK: tl.constexpr, DESCRIBED: tl.constexpr,
):  # fmt: skip
    """What the backward needs of each query: lse in base two, and delta, the sum over d of o * dO.

    Both [B, n_padded], in whole tiles; a query that does not exist has lse +inf, so that its P is 0.
    """
    n_tiles = n_padded // BLOCK
    batch = tl.program_id(0) // n_tiles
    first_query = tl.program_id(0) % n_tiles * BLOCK
    queries = first_query + tl.arange(0, BLOCK)
    o_tiles = tiles_of(o_ptr, batch, n_queries * D, D, n_queries, D, BLOCK, DESCRIBED)
    o = load_tile(o_tiles, first_query, D, 1, n_queries, D, BLOCK, True, DESCRIBED)
    do_tiles = tiles_of(do_ptr, batch, do_batch, do_row, n_queries, D, BLOCK, DESCRIBED)
    do = load_tile(do_tiles, first_query, do_row, do_dim, n_queries, D, BLOCK, True, DESCRIBED)
    lse_ptr += batch.to(tl.int64) * n_queries
    lse = tl.load(lse_ptr + queries, mask=queries < n_queries, other=float("inf"))
    out = batch.to(tl.int64) * n_padded + queries
    tl.store(lse_log2_ptr + out, lse * LOG2_E)
    tl.store(delta_ptr + out, tl.sum(o.to(tl.float32) * do.to(tl.float32), axis=1))


@triton.jit(do_not_specialize=["n_queries", "n_padded", "n_keys", "n_tiles"])
def attention_bwd_dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_log2_ptr, delta_ptr, dq_ptr,
    q_batch, q_row, q_dim, k_batch, k_row, k_dim, v_batch, v_row, v_dim, do_batch, do_row, do_dim,
    n_queries, n_padded, n_keys, n_tiles, scale,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    DESCRIBED: tl.constexpr, SPECIALIZED: tl.constexpr,
):  # fmt: skip
    """dq = scale * dS @ K for BLOCK_Q queries, with dS = P * (dO @ V^T - delta). Not MASKED: every key counts."""
    batch = tl.program_id(0) // n_tiles
    first_query = (n_tiles - 1 - tl.program_id(0) % n_tiles) * BLOCK_Q
    queries = first_query + tl.arange(0, BLOCK_Q)
    k_tiles = tiles_of(k_ptr, batch, k_batch, k_row, n_keys, D, BLOCK_K, DESCRIBED)
    v_tiles = tiles_of(v_ptr, batch, v_batch, v_row, n_keys, D, BLOCK_K, DESCRIBED)
    q_tiles = tiles_of(q_ptr, batch, q_batch, q_row, n_queries, D, BLOCK_Q, DESCRIBED)
    do_tiles = tiles_of(do_ptr, batch, do_batch, do_row, n_queries, D, BLOCK_Q, DESCRIBED)
    dq_tiles = tiles_of(dq_ptr, batch, n_queries * D, D, n_queries, D, BLOCK_Q, DESCRIBED)
    q = load_tile(q_tiles, first_query, q_row, q_dim, n_queries, D, BLOCK_Q, True, DESCRIBED)
    do = load_tile(do_tiles, first_query, do_row, do_dim, n_queries, D, BLOCK_Q, True, DESCRIBED)
    lse_log2 = load_piece(pieces_of(lse_log2_ptr, batch, n_padded, BLOCK_Q, DESCRIBED), first_query, BLOCK_Q, DESCRIBED)
    delta = load_piece(pieces_of(delta_ptr, batch, n_padded, BLOCK_Q, DESCRIBED), first_query, BLOCK_Q, DESCRIBED)

    dq = tl.zeros((BLOCK_Q, D), tl.float32)
    stop = n_keys
    if CAUSAL:
        stop = tl.minimum(n_keys, first_query + BLOCK_Q)
    for first_key in tl.range(0, stop, BLOCK_K, warp_specialize=SPECIALIZED):
        k = load_tile(k_tiles, first_key, k_row, k_dim, n_keys, D, BLOCK_K, MASKED, DESCRIBED)
        s = tl.dot(q, k.T, input_precision="ieee")
        p = tl.exp2(s * (scale * LOG2_E) - lse_log2[:, None])  # [BLOCK_Q, BLOCK_K], the probabilities again
        if MASKED:
            p = tl.where(visible(queries, first_key + tl.arange(0, BLOCK_K), n_keys, CAUSAL), p, 0.0)
        v = load_tile(v_tiles, first_key, v_row, v_dim, n_keys, D, BLOCK_K, MASKED, DESCRIBED)
        dp = tl.dot(do, v.T, input_precision="ieee")
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    store_tile(dq_tiles, first_query, (dq * scale).to(dq_ptr.dtype.element_ty), n_queries, D, BLOCK_Q, DESCRIBED)


@triton.jit(do_not_specialize=["n_queries", "n_padded", "n_keys", "n_tiles"])
def attention_bwd_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_log2_ptr, delta_ptr, dk_ptr, dv_ptr,
    q_batch, q_row, q_dim, k_batch, k_row, k_dim, v_batch, v_row, v_dim, do_batch, do_row, do_dim,
    n_queries, n_padded, n_keys, n_tiles, scale,
    CAUSAL: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    DESCRIBED: tl.constexpr, SPECIALIZED: tl.constexpr,
):  # fmt: skip
    """dv = P^T @ dO and dk = scale * dS^T @ Q for BLOCK_K keys. Each program owns its rows: no atomics.

    Scores are made transposed, keys first, because a product takes its first factor from registers as it is.
    """
    batch = tl.program_id(0) // n_tiles
    first_key = tl.program_id(0) % n_tiles * BLOCK_K  # the first keys are seen by the most queries
    keys = first_key + tl.arange(0, BLOCK_K)
    k_tiles = tiles_of(k_ptr, batch, k_batch, k_row, n_keys, D, BLOCK_K, DESCRIBED)
    v_tiles = tiles_of(v_ptr, batch, v_batch, v_row, n_keys, D, BLOCK_K, DESCRIBED)
    q_tiles = tiles_of(q_ptr, batch, q_batch, q_row, n_queries, D, BLOCK_Q, DESCRIBED)
    do_tiles = tiles_of(do_ptr, batch, do_batch, do_row, n_queries, D, BLOCK_Q, DESCRIBED)
    dk_tiles = tiles_of(dk_ptr, batch, n_keys * D, D, n_keys, D, BLOCK_K, DESCRIBED)
    dv_tiles = tiles_of(dv_ptr, batch, n_keys * D, D, n_keys, D, BLOCK_K, DESCRIBED)
    k = load_tile(k_tiles, first_key, k_row, k_dim, n_keys, D, BLOCK_K, True, DESCRIBED)
    v = load_tile(v_tiles, first_key, v_row, v_dim, n_keys, D, BLOCK_K, True, DESCRIBED)
    lse_log2_pieces = pieces_of(lse_log2_ptr, batch, n_padded, BLOCK_Q, DESCRIBED)
    delta_pieces = pieces_of(delta_ptr, batch, n_padded, BLOCK_Q, DESCRIBED)

    dk = tl.zeros((BLOCK_K, D), tl.float32)
    dv = tl.zeros((BLOCK_K, D), tl.float32)
    start = 0
    if CAUSAL:
        start = first_key // BLOCK_Q * BLOCK_Q  # earlier queries do not see these keys
    for first_query in tl.range(start, n_queries, BLOCK_Q, warp_specialize=SPECIALIZED):
        queries = first_query + tl.arange(0, BLOCK_Q)
        q = load_tile(q_tiles, first_query, q_row, q_dim, n_queries, D, BLOCK_Q, True, DESCRIBED)
        s = tl.dot(k, q.T, input_precision="ieee")  # [BLOCK_K, BLOCK_Q]
        lse_log2 = load_piece(lse_log2_pieces, first_query, BLOCK_Q, DESCRIBED)
        p = tl.exp2(s * (scale * LOG2_E) - lse_log2[None, :])
        if CAUSAL:
            p = tl.where(keys[:, None] <= queries[None, :], p, 0.0)
        do = load_tile(do_tiles, first_query, do_row, do_dim, n_queries, D, BLOCK_Q, True, DESCRIBED)
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
        dp = tl.dot(v, do.T, input_precision="ieee")
        delta = load_piece(delta_pieces, first_query, BLOCK_Q, DESCRIBED)
        ds = p * (dp - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    store_tile(dk_tiles, first_key, (dk * scale).to(dk_ptr.dtype.element_ty), n_keys, D, BLOCK_K, DESCRIBED)
    store_tile(dv_tiles, first_key, dv.to(dv_ptr.dtype.element_ty), n_keys, D, BLOCK_K, DESCRIBED)


def tuned(table, x, is_causal, otherwise):
    """Launch options: the entry of a table above for this GPU, else `otherwise`, of the same form and by pointers."""
    found = None
    if x.dtype != torch.float32 and x.device.type != "cpu":
        major = torch.cuda.get_device_capability(x.device)[0]
        found = table.get((major, x.shape[2], bool(is_causal)))
    names = ("BLOCK_Q", "BLOCK_K", "num_warps", "num_stages", "SPECIALIZED")
    return dict(zip(names, found or otherwise, strict=True)) | {"DESCRIBED": found is not None}


def forward_tiles(q, is_causal):
    """Launch options of the forward. What is not tuned fits the memory and registers of recent data-centre GPUs."""
    d = q.shape[2]
    plain = (128, 64, 4 if d <= 64 else 8, 3, False)
    if q.dtype == torch.float32:
        plain = (64, 64 if d <= 64 else 32, 4, 2, False)
    options = tuned(FORWARD, q, is_causal, plain)
    del options["SPECIALIZED"]  # two loops cannot be
    return options


def backward_tiles(q, is_causal):
    """Launch options of the two kernels of the backward, which keep more: two accumulators and five operands."""
    d = q.shape[2]
    plain = (64, 64, 4 if d <= 64 else 8, 2, False)
    if q.dtype == torch.float32:
        block = 64 if d <= 64 else 32
        plain = (block, block, 4, 1, False)
    return tuned(BACKWARD_DQ, q, is_causal, plain), tuned(BACKWARD_DKDV, q, is_causal, plain)


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
    o = torch.empty((n_batch, n_queries, d), dtype=q.dtype, device=q.device)
    lse = torch.empty((n_batch, n_queries), dtype=torch.float32, device=q.device)
    options = forward_tiles(q, is_causal)
    if options["DESCRIBED"]:
        q, k, v = for_descriptors(q), for_descriptors(k), for_descriptors(v)
        triton.set_allocator(allocate)
    n_tiles = triton.cdiv(n_queries, options["BLOCK_Q"])
    attention_fwd_kernel[(n_tiles * n_batch,)](
        q, k, v, o, lse, *q.stride(), *k.stride(), *v.stride(),
        n_queries, n_keys, n_tiles, 1.0 / math.sqrt(d), CAUSAL=bool(is_causal), D=d, **options,
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
        dq_options, dkdv_options = backward_tiles(q, ctx.is_causal)
        described = dq_options["DESCRIBED"]
        if described:
            q, k, v, do = for_descriptors(q), for_descriptors(k), for_descriptors(v), for_descriptors(do)
            triton.set_allocator(allocate)  # again: autograd calls from a thread of its own
        n_padded = triton.cdiv(n_queries, LARGEST_TILE) * LARGEST_TILE
        lse_log2, delta = torch.empty((2, n_batch, n_padded), dtype=torch.float32, device=q.device)
        attention_bwd_rows_kernel[(n_padded // 64 * n_batch,)](
            o, do, lse, lse_log2, delta, *do.stride(), n_queries, n_padded, D=d, BLOCK=64, DESCRIBED=described
        )
        strides = (*q.stride(), *k.stride(), *v.stride(), *do.stride())
        sizes = (n_queries, n_padded, n_keys)
        same = {"scale": 1.0 / math.sqrt(d), "CAUSAL": ctx.is_causal, "D": d}
        n_tiles = triton.cdiv(n_queries, dq_options["BLOCK_Q"])
        masked = ctx.is_causal or n_keys % dq_options["BLOCK_K"] != 0
        attention_bwd_dq_kernel[(n_tiles * n_batch,)](
            q, k, v, do, lse_log2, delta, dq, *strides, *sizes, n_tiles, MASKED=masked, **same, **dq_options
        )
        n_tiles = triton.cdiv(n_keys, dkdv_options["BLOCK_K"])
        attention_bwd_dkdv_kernel[(n_tiles * n_batch,)](
            q, k, v, do, lse_log2, delta, dk, dv, *strides, *sizes, n_tiles, **same, **dkdv_options
        )
        return dq, dk, dv, None
