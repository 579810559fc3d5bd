"""Two programs per row, so that few rows fill the GPU too.

The first goes through three quarters of the columns and leaves its maximum
and denominator in memory; the second adds the rest and writes the row.
"""
import torch
import triton
import triton.language as tl


@triton.jit
def _running(x, first, last, stride_c, T, TILE: tl.constexpr):
    top = tl.full((), -float("inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for c in range(first, last, TILE):
        at = c + tl.arange(0, TILE)
        v = tl.load(x + at * stride_c, mask=at < T, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(v, 0))
        # a tile beyond the row is -inf throughout
        safe = tl.where(higher == -float("inf"), 0.0, higher)
        total = total * tl.exp(top - safe) + tl.sum(tl.exp(v - safe), 0)
        top = higher
    return top, total


@triton.jit
def softmax_halves(x, y, lse, tops, totals, T, split, stride_r, stride_c, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x += row * stride_r
    y += row * T
    if tl.program_id(1) == 0:
        top, total = _running(x, 0, split, stride_c, T, TILE)
        tl.store(tops + row, top)
        tl.store(totals + row, total)
    else:
        top, total = _running(x, split, T, stride_c, T, TILE)
        other_top = tl.load(tops + row)
        other_total = tl.load(totals + row)
        both = tl.maximum(top, other_top)
        safe = tl.where(top == -float("inf"), 0.0, tl.exp(top - both))
        sum_of_all = total * safe + other_total * tl.exp(other_top - both)
        tl.store(lse + row, both + tl.log(sum_of_all))
        for c in range(0, T, TILE):
            at = c + tl.arange(0, TILE)
            v = tl.load(x + at * stride_c, mask=at < T, other=-float("inf")).to(tl.float32)
            tl.store(y + at, (tl.exp(v - both) / sum_of_all).to(y.dtype.element_ty), mask=at < T)


def online_softmax(x):
    rows, T = x.shape
    y = torch.empty((rows, T), device=x.device, dtype=x.dtype)
    lse = torch.empty(rows, device=x.device, dtype=torch.float32)
    tops = torch.empty_like(lse)
    totals = torch.empty_like(lse)
    tile = 64
    split = triton.cdiv(3 * T, 4 * tile) * tile
    softmax_halves[(rows, 2)](x, y, lse, tops, totals, T, split, x.stride(0), x.stride(1), TILE=tile)
    return y, lse
