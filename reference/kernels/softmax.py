"""Row softmax that streams: a running maximum and a running denominator are all that survives from tile to tile.

Source: Milakov and Gimelshein 2018, arXiv:1805.02867, algorithm 3.
"""

import torch
import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_tile(x_ptr, x_col, cols, n_cols, POLICY: tl.constexpr):
    """[BLOCK] in float32 and base-2 units; -inf beyond the last column, so that a padded lane adds 2 ** -inf = 0.

    POLICY is for the cache: "evict_last" keeps what will be read again.
    """
    x = tl.load(x_ptr + cols.to(tl.int64) * x_col, mask=cols < n_cols, other=-float("inf"), eviction_policy=POLICY)
    return x.to(tl.float32) * LOG2_E


@triton.jit
def store_tile(y_ptr, y, cols, n_cols):
    """Write what lies inside the row; nobody reads it again here."""
    tl.store(y_ptr + cols, y.to(y_ptr.dtype.element_ty), mask=cols < n_cols, eviction_policy="evict_first")


@triton.jit
def fold_tile(m, denom, x):
    """The running maximum and denominator with one tile more."""
    m_new = tl.maximum(m, tl.max(x, axis=0))
    return m_new, denom * tl.exp2(m - m_new) + tl.sum(tl.exp2(x - m_new), axis=0)


@triton.jit
def online_softmax_fwd_kernel(x_ptr, y_ptr, lse_ptr, x_row, x_col, n_cols, BLOCK: tl.constexpr):
    """One program owns one row. y [rows, cols] and lse [rows] are contiguous."""
    row = tl.program_id(0).to(tl.int64)  # int64: row * stride passes 2**31 at 64k x 64k
    x_ptr += row * x_row
    y_ptr += row * n_cols
    lanes = tl.arange(0, BLOCK)
    last = (n_cols - 1) // BLOCK * BLOCK  # where the last tile starts

    m = tl.full((), -float("inf"), tl.float32)  # running maximum, base-2 units
    denom = tl.full((), 0.0, tl.float32)  # sum of 2 ** (x - m) so far
    for start in range(0, last, BLOCK):
        m, denom = fold_tile(m, denom, load_tile(x_ptr, x_col, start + lanes, n_cols, "evict_last"))
    x = load_tile(x_ptr, x_col, last + lanes, n_cols, "evict_first")
    m, denom = fold_tile(m, denom, x)
    tl.store(lse_ptr + row, (m + tl.log2(denom)) * LN_2)

    # The final maximum is known only now. The last tile is still here; the others are read a second time, those that
    # were read most recently first, because they are the likeliest to be in cache.
    scale = 1.0 / denom
    store_tile(y_ptr, tl.exp2(x - m) * scale, last + lanes, n_cols)
    for back in range(BLOCK, last + 1, BLOCK):
        cols = last - back + lanes
        x = load_tile(x_ptr, x_col, cols, n_cols, "evict_first")
        store_tile(y_ptr, tl.exp2(x - m) * scale, cols, n_cols)


def online_softmax(x):
    """Softmax over the last axis and the logsumexp of every row, in one launch.

    Args:
        x: [rows, cols], float32, float16 or bfloat16, any strides.

    Returns:
        y [rows, cols] in the dtype of x, and lse [rows] in float32, natural logarithm. Accumulates in float32.
    """
    n_rows, n_cols = x.shape
    y = torch.empty((n_rows, n_cols), dtype=x.dtype, device=x.device)
    lse = torch.empty((n_rows,), dtype=torch.float32, device=x.device)
    block = min(8192, max(16, triton.next_power_of_2(n_cols)))
    online_softmax_fwd_kernel[(n_rows,)](
        x, y, lse, x.stride(0), x.stride(1), n_cols, BLOCK=block, num_warps=4 if block <= 1024 else 8
    )
    return y, lse
