"""Single rows of the timed outputs, held against the whole oracle."""

import pytest
import torch

import reference
from reference import timed

CASES = [
    pytest.param(
        "attention.forward", {"batch": 3, "queries": 128, "keys": 96, "head_dim": 16}, {"is_causal": True}, id="forward"
    ),
    pytest.param(
        "attention.training",
        {"batch": 2, "queries": 64, "keys": 64, "head_dim": 16},
        {"is_causal": True},
        id="training",
    ),
    pytest.param("softmax.online", {"rows": 100, "cols": 64}, {}, id="softmax"),
    pytest.param("layer_norm.fused", {"rows": 90, "dim": 64}, {"p": 0.2, "seed": 7, "eps": 1e-5}, id="layer-norm"),
]


def filled(name, axes, n_calls=9):
    how = timed.load(name)
    shapes = how.shapes(axes, torch.float32).items()
    blocks = {
        one: torch.empty((n_calls if number == 0 else 4, *shape), dtype=dtype)
        for number, (one, (shape, dtype)) in enumerate(shapes)
    }
    generator = torch.Generator().manual_seed(5)
    planted = how.fill(blocks, generator)
    return how, blocks, how.rows(blocks, planted, generator)


@pytest.mark.parametrize(("name", "axes", "options"), CASES)
def test_rows_are_those_of_the_oracle(name, axes, options):
    how, blocks, rows = filled(name, axes)
    oracle = reference.load(name).oracle
    for output, (calls, values) in how.expected(blocks, options, rows).items():
        for call, value in zip(calls.tolist(), values, strict=True):
            whole = oracle({one: block[call % len(block)] for one, block in blocks.items()}, options)[output]
            want = whole.reshape(-1, value.shape[-1])[rows[output][call]]
            assert torch.allclose(value, want, rtol=1e-12, atol=1e-12), (output, call)


@pytest.mark.parametrize(("name", "axes", "options"), CASES)
def test_no_two_calls_have_the_same_first_input(name, axes, options):
    _, blocks, _ = filled(name, axes)
    first = next(iter(blocks.values()))
    assert len({tuple(one.flatten()[:8].tolist()) for one in first}) == len(first)


@pytest.mark.parametrize(("name", "axes", "options"), CASES)
def test_every_window_checks_something_of_every_output(name, axes, options):
    how, blocks, rows = filled(name, axes)
    for calls, _ in how.expected(blocks, options, rows).values():
        assert int(calls.min()) < 2, "a window of two calls would check nothing"


@pytest.mark.parametrize(("name", "axes", "options"), CASES[:3])
def test_the_baseline_is_the_naive_chain(name, axes, options):
    how, blocks, _ = filled(name, axes, n_calls=4)
    operation = reference.load(name)
    space = {}
    exec(compile(how.baseline_file.read_text(), str(how.baseline_file), "exec"), space)
    inputs = {one: block[0] for one, block in blocks.items()}
    arguments = [inputs[one].clone().requires_grad_() for one in operation.inputs]
    given = space[how.baseline_entry](*arguments, *[options.get(one) for one in operation.options])
    given = given if isinstance(given, tuple) else (given,)
    want = operation.naive(inputs, options)
    for one, value in zip(operation.outputs, given, strict=False):
        assert torch.allclose(value.detach(), want[one], rtol=1e-5, atol=1e-5), one
