"""Bias, dropout and LayerNorm in one launch: x is read once, y is written once, nothing between them leaves the chip.

Source: Ba, Kiros and Hinton 2016, arXiv:1607.06450. The mask is a function of (seed, index) alone, the numbers of
tl.rand, so that no mask is stored and a backward could draw it again.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def random_numbers(seed, index):
    """tl.rand(seed, index), bit by bit: Philox 4x32 with ten rounds, whose first word becomes a number in [0, 1).

    Source: Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3". A product of 64 bits
    gives both its halves in one instruction, where tl.rand multiplies twice; and random bits take longer here than
    moving the tensor does.
    """
    seed = tl.cast(seed, tl.uint64)
    k0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = (seed >> 32).to(tl.uint32)
    c0 = index.to(tl.uint32)
    c1 = c0 * 0
    c2 = c1
    c3 = c1
    for _ in tl.static_range(10):
        a = c0.to(tl.uint64) * 0xD2511F53
        b = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (b >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = b.to(tl.uint32)
        c2 = (a >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = a.to(tl.uint32)
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    word = c0.to(tl.int32, bitcast=True)
    return (word ^ (word >> 31)).to(tl.float32) * 4.6566127342e-10  # folded to 31 bits; the largest stays below 1


@triton.jit
def bias_dropout_layernorm_fwd_kernel(
    x_ptr, bias_ptr, gamma_ptr, beta_ptr, y_ptr, x_row, x_col, bias_col, gamma_col, beta_col,
    n_rows, n_cols, p, seed, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program takes ROWS whole rows at a time; BLOCK >= n_cols. y [rows, cols] is contiguous."""
    cols = tl.arange(0, BLOCK)
    in_row = cols < n_cols
    bias = tl.load(bias_ptr + cols * bias_col, mask=in_row, other=0.0)
    gamma = tl.load(gamma_ptr + cols * gamma_col, mask=in_row, other=0.0)
    beta = tl.load(beta_ptr + cols * beta_col, mask=in_row, other=0.0)
    for first in range(tl.program_id(0) * ROWS, n_rows, tl.num_programs(0) * ROWS):
        rows = first + tl.arange(0, ROWS)[:, None]
        inside = (rows < n_rows) & in_row[None, :]
        # int64: strides of a view can pass 2**31 where its own size does not
        x_ptrs = x_ptr + rows.to(tl.int64) * x_row + cols[None, :].to(tl.int64) * x_col
        x = tl.load(x_ptrs, mask=inside, other=0.0, eviction_policy="evict_first")
        z = x.to(tl.float32) + bias.to(tl.float32)[None, :]  # [ROWS, BLOCK]

        index = rows * n_cols + cols[None, :]  # row-major index of the element, whatever the strides of x
        kept = random_numbers(seed, index) >= p
        z = tl.where(kept & inside, z * (1.0 / (1.0 - p)), 0.0)

        mean = tl.sum(z, axis=1) / n_cols  # [ROWS]
        # padding holds 0 - mean by now: set it to 0 again, or it counts in the variance
        centred = tl.where(inside, z - mean[:, None], 0.0)
        variance = tl.sum(centred * centred, axis=1) / n_cols
        normal = centred * tl.rsqrt(variance + eps)[:, None]

        y = normal * gamma.to(tl.float32)[None, :] + beta.to(tl.float32)[None, :]
        y_ptrs = y_ptr + rows.to(tl.int64) * n_cols + cols[None, :]
        tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=inside, eviction_policy="evict_first")


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
    warps = 4 if block <= 2048 else 8 if block <= 8192 else 16
    # some 32 warps for each multiprocessor of a large GPU: every program keeps bias, gamma and beta for all its rows
    n_programs = min(4224 // warps, triton.cdiv(n_rows, rows))
    bias_dropout_layernorm_fwd_kernel[(n_programs,)](
        x, bias, gamma, beta, y, *x.stride(), bias.stride(0), gamma.stride(0), beta.stride(0),
        n_rows, n_cols, p, seed, eps, ROWS=rows, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return y
