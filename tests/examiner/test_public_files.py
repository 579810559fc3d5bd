"""Files as students of the public CS336 course write them: they are graded as they are."""

import pytest

pytestmark = pytest.mark.slow

KERNEL = """
import torch, triton, triton.language as tl

@triton.jit
def flash_fwd_kernel(
    Q_ptr, K_ptr, V_ptr, O_ptr, L_ptr,
    stride_qb, stride_qq, stride_qd, stride_kb, stride_kk, stride_kd, stride_vb, stride_vk, stride_vd,
    stride_ob, stride_oq, stride_od, stride_lb, stride_lq, N_QUERIES, N_KEYS, scale,
    D: tl.constexpr, Q_TILE: tl.constexpr, K_TILE: tl.constexpr, IS_CAUSAL: tl.constexpr,
):
    query_tile, batch = tl.program_id(0), tl.program_id(1)
    Q_block = tl.make_block_ptr(Q_ptr + batch * stride_qb, (N_QUERIES, D), (stride_qq, stride_qd),
                                (query_tile * Q_TILE, 0), (Q_TILE, D), (1, 0))
    K_block = tl.make_block_ptr(K_ptr + batch * stride_kb, (N_KEYS, D), (stride_kk, stride_kd),
                                (0, 0), (K_TILE, D), (1, 0))
    V_block = tl.make_block_ptr(V_ptr + batch * stride_vb, (N_KEYS, D), (stride_vk, stride_vd),
                                (0, 0), (K_TILE, D), (1, 0))
    O_block = tl.make_block_ptr(O_ptr + batch * stride_ob, (N_QUERIES, D), (stride_oq, stride_od),
                                (query_tile * Q_TILE, 0), (Q_TILE, D), (1, 0))
    L_block = tl.make_block_ptr(L_ptr + batch * stride_lb, (N_QUERIES,), (stride_lq,),
                                (query_tile * Q_TILE,), (Q_TILE,), (0,))
    q = tl.load(Q_block, boundary_check=(0, 1), padding_option="zero")
    m = tl.full((Q_TILE,), float("-inf"), tl.float32)
    l = tl.zeros((Q_TILE,), tl.float32)
    acc = tl.zeros((Q_TILE, D), tl.float32)
    rows = query_tile * Q_TILE + tl.arange(0, Q_TILE)
    for j in range(tl.cdiv(N_KEYS, K_TILE)):
        k = tl.load(K_block, boundary_check=(0, 1), padding_option="zero")
        v = tl.load(V_block, boundary_check=(0, 1), padding_option="zero")
        cols = j * K_TILE + tl.arange(0, K_TILE)
        s = tl.dot(q, tl.trans(k)) * scale
        s = tl.where(cols[None, :] < N_KEYS, s, float("-inf"))
        if IS_CAUSAL:
            s = tl.where(rows[:, None] >= cols[None, :], s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, axis=-1))
        p = tl.exp(s - m_new[:, None])
        alpha = tl.exp(m - m_new)
        l = alpha * l + tl.sum(p, axis=-1)
        acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v)
        m = m_new
        K_block = K_block.advance((K_TILE, 0))
        V_block = V_block.advance((K_TILE, 0))
    tl.store(O_block, (acc / l[:, None]).to(O_block.type.element_ty), boundary_check=(0, 1))
    tl.store(L_block, m + tl.log(l), boundary_check=(0,))

"""
TRITON_CLASS = """
class FlashAttentionTriton(torch.autograd.Function):
    @staticmethod
    def forward(ctx, Q, K, V, is_causal=False):
        B, N_Q, D = Q.shape
        N_K = K.shape[-2]
        O = torch.empty((B, N_Q, D), device=Q.device, dtype=Q.dtype)
        L = torch.empty((B, N_Q), device=Q.device, dtype=torch.float32)
        flash_fwd_kernel[(triton.cdiv(N_Q, 32), B)](
            Q, K, V, O, L, *Q.stride(), *K.stride(), *V.stride(), *O.stride(), *L.stride(), N_Q, N_K, D ** -0.5,
            D=D, Q_TILE=32, K_TILE=32, IS_CAUSAL=is_causal)
        ctx.save_for_backward(L, Q, K, V, O)
        ctx.is_causal = is_causal
        return O

    @staticmethod
    def backward(ctx, dO):
        raise NotImplementedError
"""
TORCH_CLASS = """
class FlashAttentionPytorch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, Q, K, V, is_causal=False):
        raise RuntimeError("not this one")

    @staticmethod
    def backward(ctx, dO):
        raise NotImplementedError
"""
SLUG = "flash-attention-forward"


@pytest.mark.parametrize(
    ("source", "entry"),
    [
        pytest.param(KERNEL + TRITON_CLASS, "FlashAttentionTriton", id="one-class"),
        pytest.param(KERNEL + TORCH_CLASS + TRITON_CLASS, "FlashAttentionTriton", id="the-one-with-triton"),
        pytest.param(
            KERNEL
            + TRITON_CLASS
            + TRITON_CLASS.replace("AttentionTriton", "TritonToo")
            + "\nENTRY = 'FlashTritonToo'\n",
            "FlashTritonToo",
            id="ENTRY",
        ),
        pytest.param(
            "import einops, einx\nfrom jaxtyping import Float\n" + KERNEL + TRITON_CLASS,
            "FlashAttentionTriton",
            id="einops",
        ),
        pytest.param(
            KERNEL + TRITON_CLASS + "\nif __name__ == '__main__':\n    raise SystemExit('not when it is imported')\n",
            "FlashAttentionTriton",
            id="main-block",
        ),
    ],
)
def test_an_autograd_class_is_graded_as_it_is(grade_source, source, entry):
    examination, grade = grade_source(source.encode(), SLUG)
    assert examination.entry == entry
    assert (grade["verdict"], grade["fault"]) == ("full", "")


def test_the_logsumexp_is_told_from_another_saved_tensor_of_its_shape_by_value(grade_source):
    decoy = TRITON_CLASS.replace("save_for_backward(L, Q", "save_for_backward(torch.zeros_like(L), L, Q")
    _, grade = grade_source((KERNEL + decoy).encode(), SLUG)
    assert grade["axes"]["numerics"]["verdict"] == "pass"


def test_two_equally_good_classes_are_an_error_that_lists_them(grade_source):
    twice = KERNEL + TRITON_CLASS + TRITON_CLASS.replace("AttentionTriton", "TritonToo")
    _, grade = grade_source(twice.encode(), SLUG)
    assert (grade["verdict"], grade["fault"]) == ("error", "entry-ambiguous")
    assert "FlashAttentionTriton and FlashTritonToo" in grade["hint"]


def test_a_hard_coded_cuda_device_is_explained_as_such_on_a_cpu(grade_source):
    source = (KERNEL + TRITON_CLASS).replace("device=Q.device", 'device="cuda"')
    _, grade = grade_source(source.encode(), SLUG)
    assert (grade["verdict"], grade["fault"]) == ("error", "raises")
    assert "device" in grade["hint"]
    assert "cuda" in grade["hint"].lower()


def test_an_import_of_ones_own_package_is_told_what_there_is(grade_source):
    _, grade = grade_source(("from cs336_systems.kernels import tiles\n" + KERNEL).encode(), SLUG)
    assert (grade["verdict"], grade["fault"]) == ("error", "import-error")
    assert "one file" in grade["hint"]
