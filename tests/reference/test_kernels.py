"""Property tests: each of our kernels against its float64 oracle, over shapes, strides, dtypes, masks and recipes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import reference
from grader.assignment import Tolerance, load_assignment
from reference.kernels import attention
from reference.kernels.attention import FlashAttention, flash_attention_forward
from reference.kernels.layer_norm import fused_bias_dropout_layernorm
from reference.kernels.softmax import online_softmax
from reference.operation import Operation

ASSIGNMENTS = Path(__file__).parents[2] / "assignments"
DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
SEEDS = st.integers(0, 2**32 - 1)
LAYOUTS = st.sampled_from(["contiguous", "gaps", "swapped", "reversed-storage-order"])
prove = settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """The same values with other strides; what lies between them is NaN."""
    if layout == "gaps":
        wide = torch.full((*tensor.shape[:-1], tensor.shape[-1] * 2), float("nan"), dtype=tensor.dtype)
        view = wide[..., ::2]
    elif layout == "swapped":
        view = torch.empty_like(tensor.transpose(0, -2).contiguous()).transpose(0, -2)
    elif layout == "reversed-storage-order":
        axes = list(reversed(range(tensor.dim())))
        view = torch.empty_like(tensor.permute(axes).contiguous()).permute(axes)
    else:
        return tensor.contiguous()
    view.copy_(tensor)
    return view


def assert_within(
    got: dict[str, Tensor], operation: Operation, inputs: dict[str, Tensor], options: dict[str, Any], slug: str
) -> None:
    """Every output has its shape and dtype and is within the assignment's own limit."""
    assignment = load_assignment(ASSIGNMENTS / slug)
    want, naive = operation.oracle(inputs, options), operation.naive(inputs, options)
    dtype = inputs[operation.inputs[0]].dtype
    for output in assignment.outputs:
        name = output.name
        shape, out_dtype = operation.output_specs(inputs, options)[name]
        assert (tuple(got[name].shape), got[name].dtype) == (shape, out_dtype)
        limit = limit_of(
            assignment.tolerance, naive[name], want[name], dtype, operation, inputs, options, output.gradient
        )
        scale = scale_of(want[name], inputs, output.gradient)
        assert (got[name].double() - want[name]).abs().max().item() / scale <= limit


def scale_of(want: Tensor, inputs: dict[str, Tensor], gradient: bool) -> float:
    """What errors are relative to.

    A softmax that has chosen one key has gradients of next to nothing, made of large terms that cancel; what rounding
    leaves of those terms is not held against the little that remains.
    """
    largest = want.abs().max().item() or 1.0
    terms = max(tensor.nan_to_num().abs().max().item() for tensor in inputs.values())
    return max(largest, 0.1 * terms) if gradient else largest


def limit_of(
    tolerance: Tolerance,
    naive: Tensor,
    want: Tensor,
    dtype: torch.dtype,
    operation: Operation,
    inputs: dict[str, Tensor],
    options: dict[str, Any],
    gradient: bool,
) -> float:
    scale = scale_of(want, inputs, gradient)
    return tolerance.limit(
        baseline_rel_error=(naive.double() - want).abs().max().item() / scale,
        dtype=str(dtype).removeprefix("torch."),
        largest_score=operation.largest_score(inputs, options),
        gradient=gradient,
    )


ATTENTION = {
    "batch": st.integers(1, 3),
    "queries": st.integers(1, 150),
    "keys": st.integers(1, 150),
    "head_dim": st.sampled_from([16, 32, 64, 128]),
}


@prove
@given(
    axes=st.fixed_dictionaries(ATTENTION),
    fill=st.sampled_from(reference.load("attention.forward").fills),
    dtype=DTYPES,
    causal=st.booleans(),
    layouts=st.tuples(LAYOUTS, LAYOUTS, LAYOUTS),
    seed=SEEDS,
)
def test_attention_forward_agrees_with_its_oracle(axes, fill, dtype, causal, layouts, seed):
    operation, options = reference.load("attention.forward"), {"is_causal": causal}
    made = operation.make_inputs(axes, fill, dtype, options, torch.Generator().manual_seed(seed))
    inputs = {name: laid_out(made[name], layout) for name, layout in zip("qkv", layouts, strict=True)}
    o, lse = flash_attention_forward(inputs["q"], inputs["k"], inputs["v"], causal)
    assert_within({"o": o, "lse": lse}, operation, inputs, options, "flash-attention-forward")


@prove
@given(
    axes=st.fixed_dictionaries(ATTENTION | {"queries": st.integers(1, 100), "keys": st.integers(1, 100)}),
    fill=st.sampled_from(reference.load("attention.training").fills),
    dtype=DTYPES,
    causal=st.booleans(),
    layouts=st.tuples(LAYOUTS, LAYOUTS, LAYOUTS, LAYOUTS),
    seed=SEEDS,
)
def test_attention_gradients_agree_with_automatic_differentiation(axes, fill, dtype, causal, layouts, seed):
    operation, options = reference.load("attention.training"), {"is_causal": causal}
    if fill not in ("normal", "ones-upstream", "strided-upstream"):
        # recipes shape the scores along the keys, for which there must be some
        axes = axes | {"queries": 15 + axes["queries"], "keys": 15 + axes["keys"]}
    made = operation.make_inputs(axes, fill, dtype, options, torch.Generator().manual_seed(seed))
    inputs = {name: laid_out(made[name], layout) for name, layout in zip(made, layouts, strict=True)}
    if fill == "ones-upstream":
        inputs["do"] = torch.ones((), dtype=dtype).expand(made["do"].shape)
    leaves = [inputs[name].detach().requires_grad_() for name in "qkv"]
    o = FlashAttention.apply(*leaves, causal)
    dq, dk, dv = torch.autograd.grad(o, leaves, inputs["do"])
    got = {"o": o.detach(), "dq": dq, "dk": dk, "dv": dv}
    assert_within(got, operation, inputs, options, "flash-attention")


def use_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let attention find the entries for Hopper, descriptors and all, which on a CPU it does not look for."""

    def entry(table: Any, x: Tensor, is_causal: bool, _: Any) -> dict[str, Any]:
        names = ("BLOCK_Q", "BLOCK_K", "num_warps", "num_stages", "SPECIALIZED")
        return dict(zip(names, table[9, x.shape[2], is_causal], strict=True)) | {"DESCRIBED": True}

    monkeypatch.setattr(attention, "tuned", entry)


@pytest.mark.parametrize("causal", [pytest.param(False, id="full"), pytest.param(True, id="causal")])
@pytest.mark.parametrize("d", [64, 128])
def test_attention_is_right_with_the_tiles_of_the_tables(monkeypatch, d, causal):
    use_the_tables(monkeypatch)
    operation, options = reference.load("attention.training"), {"is_causal": causal}
    axes = {"batch": 2, "queries": 200, "keys": 170, "head_dim": d}
    inputs = operation.make_inputs(axes, "normal", torch.bfloat16, options, torch.Generator().manual_seed(d))
    leaves = [inputs[name].detach().requires_grad_() for name in "qkv"]
    o = FlashAttention.apply(*leaves, causal)
    got = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(o, leaves, inputs["do"]), strict=True))
    assert_within({"o": o.detach(), **got}, operation, inputs, options, "flash-attention")


def test_attention_reads_what_no_descriptor_can_point_at(monkeypatch):
    """Rows that start two bytes off: a tensor descriptor wants steps of 16 bytes."""
    use_the_tables(monkeypatch)
    operation, options = reference.load("attention.forward"), {"is_causal": True}
    axes = {"batch": 2, "queries": 40, "keys": 40, "head_dim": 64}
    made = operation.make_inputs(axes, "normal", torch.float16, options, torch.Generator().manual_seed(1))
    off = {name: torch.empty(value.numel() + 1, dtype=value.dtype)[1:].view_as(value) for name, value in made.items()}
    for name, value in made.items():
        off[name].copy_(value)
        assert off[name].data_ptr() % 16 == 2
    o, lse = flash_attention_forward(off["q"], off["k"], off["v"], True)
    assert_within({"o": o, "lse": lse}, operation, off, options, "flash-attention-forward")


@pytest.mark.parametrize("table", ["FORWARD", "BACKWARD_DQ", "BACKWARD_DKDV"])
def test_no_table_specialises_warps_where_a_mask_asks_for_row_numbers(table):
    """triton 3.6 moves the second half of a program's rows twice there, on a GPU alone: results would be wrong."""
    assert not [key for key, entry in getattr(attention, table).items() if entry[-1] and (key[2] or table == "FORWARD")]


def test_attention_keeps_nothing_of_the_size_of_the_scores():
    q, k, v = (torch.randn(2, 48, 16, requires_grad=True) for _ in range(3))
    saved: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(tuple(t.shape)) or t, lambda t: t):
        FlashAttention.apply(q, k, v, True)
    assert sorted(saved) == sorted([(2, 48, 16)] * 4 + [(2, 48)])


def test_attention_gradients_have_the_same_bits_every_time():
    q, k, v = (torch.randn(2, 75, 32, requires_grad=True) for _ in range(3))
    first, second = (torch.autograd.grad(FlashAttention.apply(q, k, v, True).sum(), (q, k, v)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@prove
@given(
    rows=st.integers(1, 6),
    # beyond 8192 columns there is more than one tile
    cols=st.one_of(st.integers(1, 600), st.sampled_from([8192, 8193, 17000])),
    fill=st.sampled_from(reference.load("softmax.online").fills),
    dtype=DTYPES,
    layout=LAYOUTS,
    seed=SEEDS,
)
def test_softmax_agrees_with_its_oracle(rows, cols, fill, dtype, layout, seed):
    operation = reference.load("softmax.online")
    made = operation.make_inputs({"rows": rows, "cols": cols}, fill, dtype, {}, torch.Generator().manual_seed(seed))
    inputs = {"x": laid_out(made["x"], layout)}
    y, lse = online_softmax(inputs["x"])
    assert_within({"y": y, "lse": lse}, operation, inputs, {}, "online-softmax")


@prove
@given(
    rows=st.integers(1, 12),
    dim=st.one_of(st.integers(1, 400), st.sampled_from([1024, 4095, 16384])),
    fill=st.sampled_from(reference.load("layer_norm.fused").fills),
    dtype=DTYPES,
    p=st.sampled_from([0.0, 0.1, 0.5, 0.9]),
    eps=st.sampled_from([1e-5, 0.1]),
    layout=LAYOUTS,
    seed=SEEDS,
)
def test_fused_chain_agrees_with_its_oracle(rows, dim, fill, dtype, p, eps, layout, seed):
    operation = reference.load("layer_norm.fused")
    options = {"p": p, "seed": seed % 2**31, "eps": eps}
    made = operation.make_inputs({"rows": rows, "dim": dim}, fill, dtype, options, torch.Generator().manual_seed(seed))
    inputs = made | {"x": laid_out(made["x"], layout)}
    y = fused_bias_dropout_layernorm(*(inputs[name] for name in operation.inputs), **options)
    assert_within({"y": y}, operation, inputs, options, "fused-bias-dropout-layernorm")


@pytest.mark.parametrize("name", reference.names())
def test_a_kernel_file_is_a_complete_hand_in(name):
    source = reference.load(name).kernel_file.read_text(encoding="utf-8")
    imports = [line.split()[1] for line in source.splitlines() if line.startswith(("import ", "from "))]
    assert set(imports) <= {"torch", "triton", "triton.language", "math"}
