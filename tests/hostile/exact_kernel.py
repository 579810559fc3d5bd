"""An honest hand-in that multiplies exactly in float32, and may leave out keys further than `first_far`."""

import math

import torch
import triton
import triton.language as tl


@triton.jit
def attend(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, q_b, q_n, q_d, k_b, k_n, k_d, v_b, v_n, v_d,
    n_queries, n_keys, scale, first_far, CAUSAL: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    start, b = tl.program_id(0) * BM, tl.program_id(1)
    rows, dims = start + tl.arange(0, BM), tl.arange(0, D)
    q = tl.load(q_ptr + b * q_b + rows[:, None] * q_n + dims[None, :] * q_d, mask=rows[:, None] < n_queries, other=0.0)
    m = tl.full((BM,), float("-inf"), tl.float32)
    denom = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    for j in range(tl.maximum(0, start - first_far) // BN * BN, n_keys, BN):
        cols = j + tl.arange(0, BN)
        inside = cols[:, None] < n_keys
        k = tl.load(k_ptr + b * k_b + cols[:, None] * k_n + dims[None, :] * k_d, mask=inside, other=0.0)
        v = tl.load(v_ptr + b * v_b + cols[:, None] * v_n + dims[None, :] * v_d, mask=inside, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        keep = cols[None, :] < n_keys
        if CAUSAL:
            keep = keep & (cols[None, :] <= rows[:, None])
        s = tl.where(keep, s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1))
        p = tl.exp(s - m_new[:, None])
        alpha = tl.exp(m - m_new)
        denom = denom * alpha + tl.sum(p, axis=1)
        acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        m = m_new
    at = b * n_queries + rows
    tl.store(o_ptr + at[:, None] * D + dims[None, :], (acc / denom[:, None]).to(o_ptr.dtype.element_ty),
             mask=rows[:, None] < n_queries)  # fmt: skip
    tl.store(lse_ptr + at, m + tl.log(denom), mask=rows < n_queries)


def honest(q, k, v, is_causal, first_far=1 << 30):
    n_batch, n_queries, d = q.shape
    o = torch.empty((n_batch, n_queries, d), device=q.device, dtype=q.dtype)
    lse = torch.empty((n_batch, n_queries), device=q.device, dtype=torch.float32)
    attend[(triton.cdiv(n_queries, 32), n_batch)](
        q, k, v, o, lse, *q.stride(), *k.stride(), *v.stride(), n_queries, k.shape[1], 1.0 / math.sqrt(d), first_far,
        CAUSAL=is_causal, D=d, BM=32, BN=32,
    )  # fmt: skip
    return o, lse
