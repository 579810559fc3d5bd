"""Bias, dropout and LayerNorm in one launch: x is read once, y is written once, nothing between them leaves the chip.

Source: Ba, Kiros and Hinton 2016, arXiv:1607.06450. The mask is a function of (seed, index) alone, Philox by way of
tl.rand, so that no mask is stored and a backward could draw it again.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def bias_dropout_layernorm_fwd_kernel(
    x_ptr, bias_ptr, gamma_ptr, beta_ptr, y_ptr, x_row, x_col, bias_col, gamma_col, beta_col,
    n_rows, n_cols, p, seed, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program owns ROWS whole rows; BLOCK >= n_cols. y [rows, cols] is contiguous."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, BLOCK)
    in_row = cols < n_cols
    inside = (rows < n_rows) & in_row[None, :]
    # int64: strides of a view can pass 2**31 where its own size does not
    x = tl.load(x_ptr + rows.to(tl.int64) * x_row + cols[None, :].to(tl.int64) * x_col, mask=inside, other=0.0)
    bias = tl.load(bias_ptr + cols * bias_col, mask=in_row, other=0.0)
    z = x.to(tl.float32) + bias.to(tl.float32)[None, :]  # [ROWS, BLOCK]

    index = rows * n_cols + cols[None, :]  # row-major index of the element, whatever the strides of x
    kept = tl.rand(seed, index) >= p
    z = tl.where(kept & inside, z / (1.0 - p), 0.0)

    mean = tl.sum(z, axis=1) / n_cols  # [ROWS]
    # padding holds 0 - mean by now: set it to 0 again, or it counts in the variance
    centred = tl.where(inside, z - mean[:, None], 0.0)
    variance = tl.sum(centred * centred, axis=1) / n_cols
    normal = centred * tl.rsqrt(variance + eps)[:, None]

    gamma = tl.load(gamma_ptr + cols * gamma_col, mask=in_row, other=0.0).to(tl.float32)
    beta = tl.load(beta_ptr + cols * beta_col, mask=in_row, other=0.0).to(tl.float32)
    y = normal * gamma[None, :] + beta[None, :]
    tl.store(y_ptr + rows.to(tl.int64) * n_cols + cols[None, :], y.to(y_ptr.dtype.element_ty), mask=inside)


def fused_bias_dropout_layernorm(x, bias, gamma, beta, p, seed, eps=1e-5):
    """LayerNorm(dropout(x + bias)) * gamma + beta over the last axis.

    Args:
        x: [rows, d], float32, float16 or bfloat16, any strides, d <= 16384, fewer than 2**31 elements.
        bias, gamma, beta: [d], any stride.
        p: chance that an element is dropped, 0 <= p < 1; element i, counted row by row, is kept iff rand(seed, i) >= p.
        seed: whole number. eps: added to the variance, under the root.

    Returns:
        y [rows, d] in the dtype of x. Statistics in float32.
    """
    n_rows, n_cols = x.shape
    y = torch.empty((n_rows, n_cols), dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(n_cols)
    rows = max(1, 2048 // block)
    bias_dropout_layernorm_fwd_kernel[(triton.cdiv(n_rows, rows),)](
        x, bias, gamma, beta, y, *x.stride(), bias.stride(0), gamma.stride(0), beta.stride(0),
        n_rows, n_cols, p, seed, eps, ROWS=rows, BLOCK=block,
        num_warps=4 if block <= 2048 else 8 if block <= 8192 else 16,
    )  # fmt: skip
    return y
