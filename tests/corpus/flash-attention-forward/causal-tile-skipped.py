"""Flash attention forward. Queries by batch as the grid; a causal program stops before it reaches keys nobody sees."""
import math

import torch
import triton
import triton.language as tl


@triton.jit
def _attn_kernel(
    Q, K, V, Out, Lse,
    stride_qb, stride_qm, stride_qd,
    stride_kb, stride_kn, stride_kd,
    stride_vb, stride_vn, stride_vd,
    stride_ob, stride_om, stride_od,
    seq_q, seq_k, sm_scale,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
):
    pid_m = tl.program_id(0)
    pid_b = tl.program_id(1)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, HEAD_DIM)

    q_ptrs = Q + pid_b * stride_qb + offs_m[:, None] * stride_qm + offs_d[None, :] * stride_qd
    q = tl.load(q_ptrs, mask=offs_m[:, None] < seq_q, other=0.0)

    m_i = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    l_i = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], dtype=tl.float32)

    hi = seq_k
    if CAUSAL:
        hi = tl.minimum(seq_k, pid_m * BLOCK_M)
    for start_n in range(0, hi, BLOCK_N):
        cur_n = start_n + offs_n
        k = tl.load(K + pid_b * stride_kb + cur_n[:, None] * stride_kn + offs_d[None, :] * stride_kd,
                    mask=cur_n[:, None] < seq_k, other=0.0)
        qk = tl.dot(q, tl.trans(k), input_precision="ieee") * sm_scale
        qk = tl.where(cur_n[None, :] < seq_k, qk, float("-inf"))
        if CAUSAL:
            qk = tl.where(offs_m[:, None] >= cur_n[None, :], qk, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(qk, 1))
        alpha = tl.exp(m_i - m_new)
        p = tl.exp(qk - m_new[:, None])
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        v = tl.load(V + pid_b * stride_vb + cur_n[:, None] * stride_vn + offs_d[None, :] * stride_vd,
                    mask=cur_n[:, None] < seq_k, other=0.0)
        acc += tl.dot(p.to(v.dtype), v, input_precision="ieee")
        m_i = m_new

    acc = acc / l_i[:, None]
    lse = m_i + tl.log(l_i)
    o_ptrs = Out + pid_b * stride_ob + offs_m[:, None] * stride_om + offs_d[None, :] * stride_od
    tl.store(o_ptrs, acc.to(Out.dtype.element_ty), mask=offs_m[:, None] < seq_q)
    tl.store(Lse + pid_b * seq_q + offs_m, lse, mask=offs_m < seq_q)


def flash_attention_forward(q, k, v, is_causal=False):
    B, Nq, d = q.shape
    Nk = k.shape[1]
    out = torch.empty((B, Nq, d), device=q.device, dtype=q.dtype)
    lse = torch.empty((B, Nq), device=q.device, dtype=torch.float32)
    BLOCK_M, BLOCK_N = 32, 32
    scale = 1.0 / math.sqrt(d)
    grid = (triton.cdiv(Nq, BLOCK_M), B)
    _attn_kernel[grid](
        q, k, v, out, lse,
        q.stride(0), q.stride(1), q.stride(2),
        k.stride(0), k.stride(1), k.stride(2),
        v.stride(0), v.stride(1), v.stride(2),
        out.stride(0), out.stride(1), out.stride(2),
        Nq, Nk, scale,
        HEAD_DIM=d, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, CAUSAL=is_causal,
    )
    return out, lse
