"""Online softmax: one program a row, tiles of 128 columns."""
import torch
import triton
import triton.language as tl


@triton.jit
def softmax_stream(X, Y, LSE, stride_xr, stride_xc, stride_yr, n, BLOCK: tl.constexpr):
    r = tl.program_id(0)
    X += r * stride_xr
    Y += r * stride_yr
    m = 0.0
    l = 0.0
    for c0 in range(0, n, BLOCK):
        c = c0 + tl.arange(0, BLOCK)
        x = tl.load(X + c * stride_xc, mask=c < n, other=-float("inf")).to(tl.float32)
        m_new = tl.maximum(m, tl.max(x, 0))
        p = tl.exp(x - m_new)
        l = l * tl.exp(m - m_new) + tl.sum(p, 0)
        m = m_new
    tl.store(LSE + r, m + tl.log(l))
    for c0 in range(0, n, BLOCK):
        c = c0 + tl.arange(0, BLOCK)
        x = tl.load(X + c * stride_xc, mask=c < n, other=-float("inf")).to(tl.float32)
        tl.store(Y + c, tl.exp(x - m) / l, mask=c < n)


def online_softmax(x):
    rows, n = x.shape
    y = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    lse = torch.empty(rows, dtype=torch.float32, device=x.device)
    softmax_stream[(rows,)](x, y, lse, x.stride(0), x.stride(1), y.stride(0), n, BLOCK=128)
    return y, lse
