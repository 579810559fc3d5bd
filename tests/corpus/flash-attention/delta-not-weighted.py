"""Flash attention with gradients: one kernel for dq, one for dk and dv."""
import math

import torch
import triton
import triton.language as tl


@triton.jit
def _fwd(Q, K, V, O, L, NQ, NK, scale, CAUSAL: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    b = tl.program_id(1)
    m_off = tl.program_id(0) * BM + tl.arange(0, BM)
    d_off = tl.arange(0, D)
    q_base = Q + b * NQ * D
    k_base = K + b * NK * D
    v_base = V + b * NK * D
    q = tl.load(q_base + m_off[:, None] * D + d_off[None, :], mask=m_off[:, None] < NQ, other=0.0)
    m = tl.full((BM,), float("-inf"), tl.float32)
    l = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    for j in range(0, NK, BN):
        n_off = j + tl.arange(0, BN)
        k = tl.load(k_base + n_off[:, None] * D + d_off[None, :], mask=n_off[:, None] < NK, other=0.0)
        v = tl.load(v_base + n_off[:, None] * D + d_off[None, :], mask=n_off[:, None] < NK, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        s = tl.where(n_off[None, :] < NK, s, float("-inf"))
        if CAUSAL:
            s = tl.where(n_off[None, :] <= m_off[:, None], s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        a = tl.exp(m - m_new)
        p = tl.exp(s - m_new[:, None])
        l = l * a + tl.sum(p, 1)
        acc = acc * a[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        m = m_new
    tl.store(O + b * NQ * D + m_off[:, None] * D + d_off[None, :], (acc / l[:, None]).to(O.dtype.element_ty), mask=m_off[:, None] < NQ)
    tl.store(L + b * NQ + m_off, m + tl.log(l), mask=m_off < NQ)


@triton.jit
def _bwd_dq(Q, K, V, DO, L, Delta, DQ, NQ, NK, scale, CAUSAL: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    b = tl.program_id(1)
    m_off = tl.program_id(0) * BM + tl.arange(0, BM)
    d_off = tl.arange(0, D)
    qmask = m_off[:, None] < NQ
    q = tl.load(Q + b * NQ * D + m_off[:, None] * D + d_off[None, :], mask=qmask, other=0.0).to(tl.float32)
    do = tl.load(DO + b * NQ * D + m_off[:, None] * D + d_off[None, :], mask=qmask, other=0.0).to(tl.float32)
    lse = tl.load(L + b * NQ + m_off, mask=m_off < NQ, other=0.0)
    delta = tl.load(Delta + b * NQ + m_off, mask=m_off < NQ, other=0.0)
    dq = tl.zeros((BM, D), tl.float32)
    for j in range(0, NK, BN):
        n_off = j + tl.arange(0, BN)
        kmask = n_off[:, None] < NK
        k = tl.load(K + b * NK * D + n_off[:, None] * D + d_off[None, :], mask=kmask, other=0.0).to(tl.float32)
        v = tl.load(V + b * NK * D + n_off[:, None] * D + d_off[None, :], mask=kmask, other=0.0).to(tl.float32)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        s = tl.where(n_off[None, :] < NK, s, float("-inf"))
        if CAUSAL:
            s = tl.where(n_off[None, :] <= m_off[:, None], s, float("-inf"))  # dq mask
        p = tl.exp(s - lse[:, None])
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")
        ds = p * dp - delta[:, None]
        dq += tl.dot(ds, k, input_precision="ieee")
    dq = dq * scale
    tl.store(DQ + b * NQ * D + m_off[:, None] * D + d_off[None, :], dq.to(DQ.dtype.element_ty), mask=qmask)


@triton.jit
def _bwd_dkdv(Q, K, V, DO, L, Delta, DK, DV, NQ, NK, scale, CAUSAL: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    b = tl.program_id(1)
    n_off = tl.program_id(0) * BN + tl.arange(0, BN)
    d_off = tl.arange(0, D)
    kmask = n_off[:, None] < NK
    k = tl.load(K + b * NK * D + n_off[:, None] * D + d_off[None, :], mask=kmask, other=0.0).to(tl.float32)
    v = tl.load(V + b * NK * D + n_off[:, None] * D + d_off[None, :], mask=kmask, other=0.0).to(tl.float32)
    dk = tl.zeros((BN, D), tl.float32)
    dv = tl.zeros((BN, D), tl.float32)
    for i in range(0, NQ, BM):
        m_off = i + tl.arange(0, BM)
        qmask = m_off[:, None] < NQ
        q = tl.load(Q + b * NQ * D + m_off[:, None] * D + d_off[None, :], mask=qmask, other=0.0).to(tl.float32)
        do = tl.load(DO + b * NQ * D + m_off[:, None] * D + d_off[None, :], mask=qmask, other=0.0).to(tl.float32)
        lse = tl.load(L + b * NQ + m_off, mask=m_off < NQ, other=0.0)
        delta = tl.load(Delta + b * NQ + m_off, mask=m_off < NQ, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        s = tl.where(n_off[None, :] < NK, s, float("-inf"))
        if CAUSAL:
            s = tl.where(n_off[None, :] <= m_off[:, None], s, float("-inf"))  # dkdv mask
        p = tl.exp(s - lse[:, None])
        p = tl.where(m_off[:, None] < NQ, p, 0.0)
        dv += tl.dot(tl.trans(p), do, input_precision="ieee")
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")
        ds = p * dp - delta[:, None]
        dk += tl.dot(tl.trans(ds), q, input_precision="ieee")
    tl.store(DK + b * NK * D + n_off[:, None] * D + d_off[None, :], (dk * scale).to(DK.dtype.element_ty), mask=kmask)
    tl.store(DV + b * NK * D + n_off[:, None] * D + d_off[None, :], dv.to(DV.dtype.element_ty), mask=kmask)


class FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, is_causal=False):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        B, NQ, D = q.shape
        NK = k.shape[1]
        o = torch.empty_like(q)
        lse = torch.empty(B, NQ, device=q.device, dtype=torch.float32)
        scale = 1 / math.sqrt(D)
        _fwd[(triton.cdiv(NQ, 32), B)](q, k, v, o, lse, NQ, NK, scale, CAUSAL=is_causal, D=D, BM=32, BN=32)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.is_causal = is_causal
        ctx.scale = scale
        return o

    @staticmethod
    def backward(ctx, do):
        q, k, v, o, lse = ctx.saved_tensors
        B, NQ, D = q.shape
        NK = k.shape[1]
        do = do.contiguous()
        delta = (o.float() * do.float()).sum(-1)
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        opts = dict(CAUSAL=ctx.is_causal, D=D, BM=32, BN=32)
        _bwd_dq[(triton.cdiv(NQ, 32), B)](q, k, v, do, lse, delta, dq, NQ, NK, ctx.scale, **opts)
        _bwd_dkdv[(triton.cdiv(NK, 32), B)](q, k, v, do, lse, delta, dk, dv, NQ, NK, ctx.scale, **opts)
        return dq, dk, dv, None
