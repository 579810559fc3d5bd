"""Row softmax that streams: a running maximum and a running denominator are all that survives from tile to tile.

Source: Milakov and Gimelshein 2018, arXiv:1805.02867, algorithm 3.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def online_softmax_fwd_kernel(x_ptr, y_ptr, lse_ptr, x_row, x_col, n_cols, BLOCK: tl.constexpr):
    """One program owns one row. y [rows, cols] and lse [rows] are contiguous."""
    row = tl.program_id(0).to(tl.int64)  # int64: row * stride passes 2**31 at 64k x 64k
    x_ptr += row * x_row
    y_ptr += row * n_cols
    lanes = tl.arange(0, BLOCK)

    m = tl.full((), -float("inf"), tl.float32)  # running maximum
    denom = tl.full((), 0.0, tl.float32)  # sum of exp(x - m) so far
    for start in range(0, n_cols, BLOCK):
        cols = start + lanes
        # -inf, so that a padded lane adds exp(-inf) = 0 to the sum
        x = tl.load(x_ptr + cols.to(tl.int64) * x_col, mask=cols < n_cols, other=-float("inf")).to(tl.float32)
        m_new = tl.maximum(m, tl.max(x, axis=0))
        denom = denom * tl.exp(m - m_new) + tl.sum(tl.exp(x - m_new), axis=0)
        m = m_new
    tl.store(lse_ptr + row, m + tl.log(denom))

    # The final maximum is known only now, so the row is read a second time, mostly from cache.
    for start in range(0, n_cols, BLOCK):
        cols = start + lanes
        x = tl.load(x_ptr + cols.to(tl.int64) * x_col, mask=cols < n_cols, other=-float("inf")).to(tl.float32)
        y = tl.exp(x - m) / denom
        tl.store(y_ptr + cols, y.to(y_ptr.dtype.element_ty), mask=cols < n_cols)


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
    block = min(4096, max(16, triton.next_power_of_2(n_cols)))
    online_softmax_fwd_kernel[(n_rows,)](
        x, y, lse, x.stride(0), x.stride(1), n_cols, BLOCK=block, num_warps=4 if block <= 1024 else 8
    )
    return y, lse
