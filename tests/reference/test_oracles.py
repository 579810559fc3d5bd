"""Oracles against definitions written another way, random numbers against Triton's, costs against counting by hand."""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl
from torch.nn import functional

import reference
from reference.philox import uniform

NAMES = reference.names()


@triton.jit
def rand_kernel(out_ptr, index_ptr, seed, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out_ptr + at, tl.rand(seed, tl.load(index_ptr + at)))


@pytest.mark.parametrize("seed", [0, 1, 1234, 2**31 - 1, 2**40 + 7])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_our_random_numbers_are_those_of_tl_rand_bit_by_bit(seed, dtype):
    near, far = torch.arange(1024), torch.randint(2**31 - 1, (1024,), generator=torch.Generator().manual_seed(seed))
    index = torch.cat([near, far]).to(dtype)
    drawn = torch.empty(2048)
    rand_kernel[(1,)](drawn, index, seed, 2048)
    assert torch.equal(drawn, uniform(seed, index))


def test_indices_beyond_32_bits_are_counted_on():
    index = torch.tensor([5, 2**32 + 5])
    drawn = torch.empty(2)
    rand_kernel[(1,)](drawn, index, 77, 2)
    assert torch.equal(drawn, uniform(77, index))
    assert drawn[0] != drawn[1]


@pytest.mark.parametrize("causal", [False, True])
def test_attention_oracle_is_softmax_attention(causal):
    operation, options = reference.load("attention.forward"), {"is_causal": causal}
    axes = {"batch": 2, "queries": 30, "keys": 40, "head_dim": 16}
    inputs = operation.make_inputs(axes, "normal", torch.float32, options, torch.Generator().manual_seed(1))
    q, k, v = (inputs[name].double() for name in "qkv")
    want = functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    assert torch.allclose(operation.oracle(inputs, options)["o"], want, rtol=1e-12, atol=1e-12)


def test_attention_gradients_of_the_oracle_match_finite_differences():
    operation, options = reference.load("attention.training"), {"is_causal": True}
    axes = {"batch": 1, "queries": 5, "keys": 4, "head_dim": 16}
    inputs = operation.make_inputs(axes, "normal", torch.float64, options, torch.Generator().manual_seed(2))
    found = operation.oracle(inputs, options)
    step = 1e-6
    for name in "qkv":
        for at in ((0, 1, 3), (0, 3, 0)):
            ends = []
            for sign in (1.0, -1.0):
                moved = inputs[name].clone()
                moved[at] += sign * step
                o = operation.oracle({**inputs, name: moved}, options)["o"]
                ends.append((o * inputs["do"]).sum())
            slope = (ends[0] - ends[1]) / (2 * step)
            assert found[f"d{name}"][at].item() == pytest.approx(slope.item(), rel=1e-5, abs=1e-7)


def test_fused_chain_without_dropout_is_layer_norm_of_the_biased_input():
    operation, options = reference.load("layer_norm.fused"), {"p": 0.0, "seed": 3, "eps": 1e-3}
    inputs = operation.make_inputs(
        {"rows": 4, "dim": 37}, "lopsided", torch.float32, options, torch.Generator().manual_seed(3)
    )
    x, bias, gamma, beta = (inputs[name].double() for name in operation.inputs)
    want = functional.layer_norm(x + bias, (37,), gamma, beta, 1e-3)
    assert torch.allclose(operation.oracle(inputs, options)["y"], want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_keeps_the_share_it_promises(p):
    share = (uniform(11, torch.arange(100_000)) >= p).double().mean().item()
    assert share == pytest.approx(1 - p, abs=4 * math.sqrt(p * (1 - p) / 100_000))


@pytest.mark.parametrize("name", NAMES)
def test_naive_and_oracle_give_the_outputs_that_are_specified(name):
    operation = reference.load(name)
    axes = dict.fromkeys(operation.axes, 16)
    options = {"is_causal": True, "p": 0.1, "seed": 1, "eps": 1e-5}
    inputs = operation.make_inputs(axes, "normal", torch.float16, options, torch.Generator().manual_seed(4))
    specs = operation.output_specs(inputs, options)
    assert tuple(specs) == operation.outputs
    naive = operation.naive(inputs, options)
    assert {key: (tuple(value.shape), value.dtype) for key, value in naive.items()} == specs
    oracle = operation.oracle(inputs, options)
    assert {key: (tuple(value.shape), torch.float64) for key, value in oracle.items()} == {
        key: (shape, torch.float64) for key, (shape, _) in specs.items()
    }


def test_score_matrix_has_the_bytes_the_handout_says():
    operation = reference.load("attention.forward")
    axes = {"batch": 8 * 32, "queries": 16_384, "keys": 16_384, "head_dim": 64}
    costs = operation.costs(axes, torch.bfloat16, {"is_causal": False})
    scores = 8 * 32 * 16_384**2 * 2
    assert scores == pytest.approx(137e9, rel=5e-3)
    assert costs.naive_peak_bytes == pytest.approx(2 * scores, rel=0.01)
    assert costs.reference_peak_bytes < scores / 100


def test_eager_chain_moves_six_times_the_bytes_and_the_fused_one_twice():
    operation = reference.load("layer_norm.fused")
    for rows, dim in ((256, 768), (512, 1024), (64, 4096)):
        costs = operation.costs({"rows": rows, "dim": dim}, torch.float32, {"p": 0.1, "seed": 1, "eps": 1e-5})
        tensor = rows * dim * 4
        assert costs.eager_launches == 3
        assert costs.eager_bytes / tensor == pytest.approx(6.26, abs=0.05)
        assert costs.least_bytes / tensor == pytest.approx(2.0, abs=0.06)


@pytest.mark.parametrize(("n_queries", "n_keys"), [(5, 5), (5, 9), (9, 5)], ids=["square", "more-keys", "more-queries"])
def test_causal_flops_count_the_pairs_that_are_seen(n_queries, n_keys):
    operation = reference.load("attention.forward")
    axes = {"batch": 2, "queries": n_queries, "keys": n_keys, "head_dim": 16}
    pairs = 2 * int(torch.ones(n_queries, n_keys).tril().sum())
    assert operation.costs(axes, torch.float32, {"is_causal": True}).flops == 4 * 16 * pairs


def test_an_unknown_operation_is_answered_with_those_there_are():
    with pytest.raises(reference.ReferenceMissing) as caught:
        reference.load("attention.sideways")
    assert all(name in str(caught.value) for name in NAMES)


@pytest.mark.parametrize("name", ["operation.forward", "philox.uniform", "", "attention"])
def test_modules_beside_the_operations_offer_none(name):
    with pytest.raises(reference.ReferenceMissing):
        reference.load(name)
