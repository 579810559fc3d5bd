"""What rounding alone may cost in half precision: careful backwards pass, and mistakes do not."""

import math
from pathlib import Path

import pytest
import torch
from in_dtype import in_dtype

import reference
from grader.assignment import load_assignment
from workers import numerics

OPERATION = reference.load("attention.training")
WHOLE = load_assignment(Path(__file__).parents[2] / "assignments" / "flash-attention")
SEEDS = range(6)


def limits(assignment, case, inputs, want):
    options = case.options or {}
    for name in want:
        answers = [OPERATION.naive(inputs, options), *OPERATION.roundings(inputs, options)]
        error = max(numerics.relative_error(one[name], want[name]) or 0.0 for one in answers)
        yield (
            name,
            assignment.tolerance.limit(
                baseline_rel_error=error,
                dtype=case.dtype,
                largest_score=OPERATION.largest_score(inputs, options),
                gradient=name != "o",
            ),
        )


def backward(inputs, options, *, delta=True, matrix_units=True):
    """A careful backward in torch: float32 but for o, and for what matrix units are fed."""
    dtype = inputs["q"].dtype
    q, k, v, do = (inputs[name].float() for name in ("q", "k", "v", "do"))
    scale = 1 / math.sqrt(q.shape[-1])
    scores = q @ k.mT * scale
    if options.get("is_causal"):
        seen = torch.ones(scores.shape[1:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    p = torch.softmax(scores, -1)
    fed = (lambda value: value.to(dtype).float()) if matrix_units else (lambda value: value)
    o = (fed(p) @ v).to(dtype)
    row = (o.float() * do).sum(-1, keepdim=True) if delta else 0.0
    ds = fed(p * (do @ v.mT - row))
    made = {"o": o, "dq": ds @ k * scale, "dk": ds.mT @ q * scale, "dv": fed(p).mT @ do}
    return {name: value.to(dtype) for name, value in made.items()}


def shares(dtype, case_name, answer):
    """Error of each output as a share of its limit, for several inputs."""
    assignment = in_dtype(WHOLE, dtype)
    case = assignment.case(case_name)
    for seed in SEEDS:
        generator = torch.Generator().manual_seed(seed)
        options = case.options or {}
        inputs = OPERATION.make_inputs(case.axes, case.fill, getattr(torch, dtype), options, generator)
        want = OPERATION.oracle(inputs, options)
        got = answer(inputs, options)
        for name, limit in limits(assignment, case, inputs, want):
            yield name, numerics.relative_error(got[name], want[name]) / limit


@pytest.mark.parametrize("matrix_units", [True, False], ids=["half-products", "float32-products"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "name", ["random", "causal", "early-jump", "late-jump", "falling-max", "large", "tail", "tiny"]
)
def test_a_careful_backward_passes(name, dtype, matrix_units):
    found = list(shares(dtype, name, lambda inputs, options: backward(inputs, options, matrix_units=matrix_units)))
    assert max(share for _, share in found) <= 1.0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["random", "causal", "tail", "early-jump"])
def test_a_backward_without_delta_does_not(name, dtype):
    found = list(shares(dtype, name, lambda inputs, options: backward(inputs, options, delta=False)))
    worst = {output: max(share for one, share in found if one == output) for output in ("o", "dq", "dk", "dv")}
    assert worst["o"] <= 1.0
    assert worst["dk"] > 3.0
    assert worst["dq"] > 3.0


def test_float32_is_judged_by_the_baseline_alone():
    case = WHOLE.case("random")
    inputs = OPERATION.make_inputs(case.axes, case.fill, torch.float32, {}, torch.Generator().manual_seed(0))
    assert OPERATION.roundings(inputs, {}) == []


def test_the_same_inputs_have_the_same_limits():
    case = WHOLE.case("half")
    inputs = OPERATION.make_inputs(case.axes, case.fill, torch.float16, {}, torch.Generator().manual_seed(0))
    first, second = (OPERATION.roundings(inputs, {}) for _ in range(2))
    assert all(torch.equal(a[name], b[name]) for a, b in zip(first, second, strict=True) for name in a)
