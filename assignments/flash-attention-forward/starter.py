"""FlashAttention, forward: your file. Hand in this one file; it may use torch, triton and the standard library.

Run it on a laptop without a GPU:

    TRITON_INTERPRET=1 python starter.py
"""

import math

import torch
import triton
import triton.language as tl


@triton.jit
def flash_fwd_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr,
    q_batch, q_row, q_dim,  # strides in elements; the inputs may be views, so use all of them
    k_batch, k_row, k_dim,
    v_batch, v_row, v_dim,
    o_batch, o_row, o_dim,
    n_queries, n_keys,  # any lengths, equal or not, multiples of a tile or not
    scale,  # 1 / sqrt(d)
    IS_CAUSAL: tl.constexpr,
    D: tl.constexpr,  # head dimension: 16, 32, 64 or 128
    Q_TILE: tl.constexpr,
    K_TILE: tl.constexpr,
):
    query_tile = tl.program_id(0)  # which Q_TILE queries this program owns
    batch = tl.program_id(1)

    # 1. Load this program's tile of q, once.
    # 2. Start the running values of every query row: maximum m, denominator l, output accumulator, all in float32.
    # 3. For each tile of keys and values:
    #      scores of this tile; which of them count? (keys that exist; causal: keys at or before the query)
    #      fold them into m, l and the accumulator with the online-softmax step
    # 4. Divide once, store o in the dtype of q, store lse = natural logsumexp of the scaled, masked scores.
    # On a GPU tl.dot rounds float32 operands to tf32 unless you pass input_precision="ieee".


def flash_attention_forward(q, k, v, is_causal=False):
    """o = softmax(q @ k^T / sqrt(d)) @ v, and the logsumexp of every row.

    q: [B, Nq, d]; k, v: [B, Nk, d]. Returns o [B, Nq, d] like q and lse [B, Nq] float32.
    """
    B, n_queries, d = q.shape
    n_keys = k.shape[1]
    o = torch.empty((B, n_queries, d), device=q.device, dtype=q.dtype)
    lse = torch.empty((B, n_queries), device=q.device, dtype=torch.float32)
    # TODO: choose tile sizes, launch one program per query tile and batch entry, return (o, lse).
    raise NotImplementedError("flash_attention_forward is yours to write")


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v = (torch.randn(2, 128, 64, device=device) for _ in range(3))
    o, lse = flash_attention_forward(q, k, v)
    scores = q @ k.mT / math.sqrt(64)
    print("o off by", (o - torch.softmax(scores, -1) @ v).abs().max().item())
    print("lse off by", (lse - torch.logsumexp(scores, -1)).abs().max().item())
