"""Bias, dropout and LayerNorm in one launch; strides of x are respected."""
import torch
import triton
import triton.language as tl


@triton.jit
def fused_ln(X, B, G, Be, Y, sx0, sx1, D, p, seed, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    col = tl.arange(0, BLOCK)
    mask = col < D
    x = tl.load(X + row * sx0 + col * sx1, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(B + col, mask=mask, other=0.0).to(tl.float32)
    z = x + b
    r = tl.rand(seed, row * sx0 + col)
    z = tl.where(r >= p, z / (1 - p), 0.0)
    mean = tl.sum(z, axis=0) / D
    zc = tl.where(mask, z - mean, 0.0)
    var = tl.sum(zc * zc, axis=0) / D
    inv = 1.0 / tl.sqrt(var + eps)
    g = tl.load(G + col, mask=mask, other=0.0).to(tl.float32)
    be = tl.load(Be + col, mask=mask, other=0.0).to(tl.float32)
    tl.store(Y + row * D + col, zc * inv * g + be, mask=mask)


def fused_bias_dropout_layernorm(x, bias, gamma, beta, p, seed, eps=1e-5):
    rows, d = x.shape
    y = torch.empty((rows, d), device=x.device, dtype=x.dtype)
    fused_ln[(rows,)](x, bias, gamma, beta, y, x.stride(0), x.stride(1), d, p, seed, eps, BLOCK=triton.next_power_of_2(d))
    return y
