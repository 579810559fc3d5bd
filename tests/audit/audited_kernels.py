"""Small kernels with one property each, as a student might write them. Loaded by path, like a hand-in."""

import torch
import triton
import triton.language as tl


@triton.jit
def inner_rows(ptr, row, N, WIDTH: tl.constexpr):
    cols = tl.arange(0, WIDTH)
    return tl.load(ptr + row * N + cols, mask=cols < N, other=0.0)


@triton.jit
def copy_rows(X, Y, N, WIDTH: tl.constexpr):
    row = tl.program_id(0)
    cols = tl.arange(0, WIDTH)
    tl.store(Y + row * N + cols, inner_rows(X, row, N, WIDTH), mask=cols < N)


@triton.jit
def copy_tiles(X, Y, M, N, BM: tl.constexpr, BN: tl.constexpr):
    x = tl.make_block_ptr(X, (M, N), (N, 1), (tl.program_id(0) * BM, 0), (BM, BN), (1, 0))
    y = tl.make_block_ptr(Y, (M, N), (N, 1), (tl.program_id(0) * BM, 0), (BM, BN), (1, 0))
    for _ in range(0, N, BN):
        tl.store(y, tl.load(x, boundary_check=(0, 1), padding_option="zero"), boundary_check=(0, 1))
        x = tl.advance(x, (0, BN))
        y = tl.advance(y, (0, BN))


@triton.jit
def copy_tiles_unchecked(X, Y, M, N, BM: tl.constexpr, BN: tl.constexpr):
    x = tl.make_block_ptr(X, (M, N), (N, 1), (0, 0), (BM, BN), (1, 0))
    y = tl.make_block_ptr(Y, (M, N), (N, 1), (0, 0), (BM, BN), (1, 0))
    tl.store(y, tl.load(x), boundary_check=(0, 1))


@triton.jit
def copy_described(X, Y, M, N, BM: tl.constexpr, BN: tl.constexpr):
    x = tl.make_tensor_descriptor(X, shape=[M, N], strides=[N, 1], block_shape=[BM, BN])
    y = tl.make_tensor_descriptor(Y, shape=[M, N], strides=[N, 1], block_shape=[BM, BN])
    at = tl.program_id(0) * BM
    y.store([at, 0], x.load([at, 0]))


@triton.jit
def copy_by_descriptor(x, y, BM: tl.constexpr):
    at = tl.program_id(0) * BM
    y.store([at, 0], x.load([at, 0]))


@triton.jit
def total(X, S, WIDTH: tl.constexpr):
    tl.atomic_add(S, tl.sum(tl.load(X + tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)), axis=0))


@triton.jit
def total_under_lock(X, S, Lock, WIDTH: tl.constexpr):
    part = tl.sum(tl.load(X + tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)), axis=0)
    while tl.atomic_cas(Lock, 0, 1) == 1:
        pass
    tl.store(S, tl.load(S) + part)
    tl.atomic_xchg(Lock, 0)


@triton.jit
def choose(Flags, X, Y, N, negate: tl.constexpr, WIDTH: tl.constexpr):
    cols = tl.arange(0, WIDTH)
    keep = tl.load(Flags + cols, mask=cols < N, other=False)
    x = tl.load(X + cols, mask=cols < N, other=0.0)
    tl.store(Y + cols, tl.where(keep, -x if negate else x, 0.0), mask=cols < N)


@triton.jit
def chain(X, Y):
    p = tl.program_id(0)
    tl.store(Y + p, tl.load(Y + p - 1, mask=p > 0, other=0.0) + tl.load(X + p))


@triton.jit
def shift_left(X):
    p = tl.program_id(0)
    tl.store(X + p, tl.load(X + p + 1))


@triton.jit
def read_before(X, Y, WIDTH: tl.constexpr):
    cols = tl.arange(0, WIDTH)
    tl.store(Y + cols, tl.load(X - 1 + cols))


@triton.jit
def add_to(X, Y, WIDTH: tl.constexpr):
    cols = tl.arange(0, WIDTH)
    tl.store(Y + cols, tl.load(Y + cols) + tl.load(X + cols))


@triton.jit
def through_an_integer(X, Y, address, WIDTH: tl.constexpr):
    cols = tl.arange(0, WIDTH)
    wild = address.to(tl.int64).to(tl.pointer_type(tl.float32))
    tl.store(Y + cols, tl.load(wild + cols))


@triton.jit
def deep(X, WIDTH: tl.constexpr):
    return tl.load(X + tl.arange(0, WIDTH)) + undefined_name  # noqa: F821


@triton.jit
def raises(X, Y, WIDTH: tl.constexpr):
    tl.store(Y + tl.arange(0, WIDTH), deep(X, WIDTH))


@triton.jit
def wrong_shapes(X, Y, WIDTH: tl.constexpr):
    tl.store(Y + tl.arange(0, WIDTH), tl.load(X + tl.arange(0, 2 * WIDTH)) + tl.arange(0, WIDTH))


@triton.jit
def product(A, B, C, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(A + m[:, None] * K + k[None, :])
    b = tl.load(B + k[:, None] * N + n[None, :])
    tl.store(C + m[:, None] * N + n[None, :], tl.dot(a, b).to(C.dtype.element_ty))


@triton.jit
def softmax_in_its_type(X, Y, WIDTH: tl.constexpr):
    cols = tl.arange(0, WIDTH)
    x = tl.load(X + cols)
    shifted = (x - tl.max(x, axis=0)) * 0.5
    e = tl.exp(shifted.to(tl.float32))
    tl.store(Y + cols, (e / tl.sum(e, axis=0)).to(Y.dtype.element_ty))


@triton.jit
def arithmetic(X, Y, Z, WIDTH: tl.constexpr):
    cols = tl.arange(0, WIDTH)
    x, y = tl.load(X + cols), tl.load(Y + cols)
    tl.store(Z + cols, tl.where(x > y, x * y + x - y, -tl.minimum(x, y) + 1.5))


@triton.jit
def left_or_sum(a, b):
    return 0.5 * a + b


@triton.jit
def keep_larger(value, index, other_value, other_index):
    take = other_value > value
    return tl.where(take, other_value, value), tl.where(take, other_index, index)


@triton.jit
def custom_reductions(X, Sums, Best, Where, Scan, M: tl.constexpr, N: tl.constexpr):
    m, n = tl.arange(0, M), tl.arange(0, N)
    x = tl.load(X + m[:, None] * N + n[None, :])
    tl.store(Sums + m, tl.reduce(x, 1, left_or_sum))
    best, where = tl.reduce((x, n[None, :] + tl.zeros((M, N), tl.int32)), 1, keep_larger)
    tl.store(Best + m, best)
    tl.store(Where + m, where)
    tl.store(Scan + m[:, None] * N + n[None, :], tl.associative_scan(x, 1, left_or_sum))


@triton.autotune(
    configs=[triton.Config({"WIDTH": 8}), triton.Config({"WIDTH": 32}), triton.Config({"WIDTH": 64})],
    key=["N"],
    reset_to_zero=["Y"],
)
@triton.jit
def tuned_add(X, Y, N, WIDTH: tl.constexpr):
    tl.static_assert(WIDTH >= 16, "too narrow")
    cols = tl.arange(0, WIDTH)
    tl.store(Y + cols, tl.load(Y + cols, mask=cols < N) + tl.load(X + cols, mask=cols < N), mask=cols < N)


@triton.heuristics({"WIDTH": lambda args: triton.next_power_of_2(args["N"])})
@triton.jit
def heuristic_copy(X, Y, N, WIDTH: tl.constexpr):
    cols = tl.arange(0, WIDTH)
    tl.store(Y + cols, tl.load(X + cols, mask=cols < N), mask=cols < N)


def compiled():
    return torch.compile(fullgraph=True)


def cast_of_a_copy(x):
    y = torch.empty_like(x)
    copy_rows[(x.shape[0],)](x, y, x.shape[1], WIDTH=32)
    return y.to(torch.float64).t().contiguous()


def doubled_copy(x):
    return cast_of_a_copy(x) * 2


def kept_elsewhere(x, keep):
    scores = x[:, :, None] * x[:, None, :]
    keep.append(scores)
    return x.clone()


def reads_unwritten(x):
    y = torch.empty_like(x)
    return y + x
