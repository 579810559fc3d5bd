"""Inputs do what their names promise, and no answer that ignores them comes near the limit."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hand_in import inputs_of, limits_of, relative_error
from torch import Tensor

import reference
from grader.assignment import Assignment, Case, load_assignment
from reference.operation import Operation

ASSIGNMENTS = {
    path.parent.name: load_assignment(path.parent)
    for path in sorted((Path(__file__).parents[2] / "assignments").glob("*/assignment.toml"))
}
CASES = [
    pytest.param(assignment, case, id=f"{slug}-{case.name}")
    for slug, assignment in ASSIGNMENTS.items()
    for case in assignment.cases
]
REQUIRED = [
    pytest.param(assignment, case, id=f"{slug}-{case.name}")
    for slug, assignment in ASSIGNMENTS.items()
    for case in assignment.cases
    if case.required
]


def attention_scores(fill: str, *, n_keys: int = 256, causal: bool = False) -> Tensor:
    operation = reference.load("attention.forward")
    axes = {"batch": 2, "queries": 64, "keys": n_keys, "head_dim": 32}
    made = operation.make_inputs(axes, fill, torch.float32, {"is_causal": causal}, torch.Generator().manual_seed(9))
    return made["q"].double() @ made["k"].double().mT / math.sqrt(32)


def softmax_scores(fill: str) -> Tensor:
    operation = reference.load("softmax.online")
    axes = {"rows": 32, "cols": 512}
    return operation.make_inputs(axes, fill, torch.float32, {}, torch.Generator().manual_seed(9))["x"].double()


@pytest.mark.parametrize("scores", [attention_scores, softmax_scores])
class TestScores:
    def test_rising_max_moves_in_every_tile(self, scores):
        tiles = scores("rising-max").unflatten(-1, (-1, 128)).amax(dim=-1)
        assert (tiles.diff(dim=-1) > 0).all()

    def test_falling_max_is_the_very_first(self, scores):
        assert (scores("falling-max").argmax(dim=-1) == 0).all()

    def test_early_jump_lies_in_the_first_quarter_but_not_in_the_first_keys(self, scores):
        found = scores("early-jump")
        at = found.argmax(dim=-1).double() / found.shape[-1]
        assert ((at >= 0.1) & (at < 0.25)).all()

    def test_late_jump_lies_in_the_last_quarter(self, scores):
        found = scores("late-jump")
        assert (found.argmax(dim=-1) >= 0.75 * found.shape[-1]).all()

    def test_large_scores_reach_130(self, scores):
        assert scores("large").abs().max().item() == pytest.approx(130, rel=1e-3)

    def test_negative_scores_underflow_float32_throughout(self, scores):
        assert (scores("negative") < -104).all()

    def test_a_padded_score_of_0_would_win_over_negative_tails(self, scores):
        assert (scores("negative-tail") < -2).all()


@pytest.mark.parametrize(("assignment", "case"), CASES)
def test_every_case_makes_the_inputs_it_declares_and_the_same_ones_again(assignment: Assignment, case: Case):
    operation = reference.load(assignment.operation)
    options, dtype = case.options or {}, getattr(torch, case.dtype)
    assert set(case.axes) == set(operation.axes)
    assert set(options) == set(operation.options)
    assert case.fill in operation.fills
    first, second, other = (
        operation.make_inputs(case.axes, case.fill, dtype, options, torch.Generator().manual_seed(seed))
        for seed in (1, 1, 2)
    )
    assert set(first) == {*operation.inputs, *([operation.upstream] if operation.upstream else [])}
    for name, tensor in first.items():
        assert tensor.is_contiguous()
        assert tensor.dtype == dtype
        assert torch.isfinite(tensor).all()
        assert torch.equal(tensor, second[name])
    assert any(not torch.equal(tensor, other[name]) for name, tensor in first.items())


@pytest.mark.parametrize(("assignment", "case"), CASES)
def test_the_oracle_is_finite_and_carries_information(assignment: Assignment, case: Case):
    operation = reference.load(assignment.operation)
    want = operation.oracle(inputs_of(operation, case), case.options or {})
    for output in assignment.outputs:
        assert torch.isfinite(want[output.name]).all()
        if case.name != "tiny":  # one query and one key: there is nothing for dq and dk to learn
            assert want[output.name].abs().max() > 1e-3


def careless_answers(operation: Operation, inputs: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Answers that need no kernel: what shortcuts and stubs return."""
    shapes = {name: shape for name, (shape, _) in operation.output_specs(inputs, {}).items()}
    first = inputs[operation.inputs[0]].double()

    def everywhere(make):
        return {name: make(shape) for name, shape in shapes.items()}

    answers = {
        "zeros": everywhere(torch.zeros),
        "ones": everywhere(torch.ones),
        "first-input": everywhere(lambda shape: first if first.shape == shape else torch.zeros(shape)),
    }
    if "v" in inputs:
        v = inputs["v"].double()
        answers["mean-of-v"] = everywhere(
            lambda shape: v.mean(dim=1, keepdim=True).expand(shape) if len(shape) == 3 else torch.zeros(shape)
        )
        answers["v"] = everywhere(lambda shape: v if v.shape == shape else torch.zeros(shape))
    if "y" in shapes:
        _, cols = shapes["y"]
        answers["uniform"] = everywhere(lambda shape: torch.full(shape, 1.0 / cols))
    return answers


@pytest.mark.parametrize(("assignment", "case"), REQUIRED)
def test_answers_that_need_no_kernel_are_a_hundred_limits_away(assignment: Assignment, case: Case):
    operation = reference.load(assignment.operation)
    inputs = inputs_of(operation, case)
    want, limits = operation.oracle(inputs, case.options or {}), limits_of(assignment, operation, case, inputs)
    first_output = assignment.outputs[0].name  # o or y: the others are wrong in their own ways
    for answer, outputs in careless_answers(operation, inputs).items():
        error = relative_error(outputs[first_output].double(), want[first_output])
        assert error > 100 * limits[first_output], answer


@pytest.mark.parametrize("slug", ASSIGNMENTS)
def test_a_file_that_is_right_for_whole_tiles_of_plain_float32_keeps_most_of_its_numerics(slug):
    extras = {"tail", "query-tail", "key-tail", "causal-tail", "negative-tail", "very-negative-tail", "tail-wide"}
    extras |= {"tail-short", "one-tile", "one-row", "one-column", "narrow", "tiny", "causal-more-queries", "guard"}
    extras |= {"strided", "half", "half-wide", "bfloat16"}
    points = {case.name: case.points for case in ASSIGNMENTS[slug].cases}
    kept = sum(value for name, value in points.items() if name not in extras)
    assert 0.6 <= kept / sum(points.values()) <= 0.75


@pytest.mark.parametrize("slug", ASSIGNMENTS)
def test_starters_load_and_do_nothing_yet(slug):
    assignment = ASSIGNMENTS[slug]
    space: dict[str, object] = {"__name__": "starter"}
    path = Path(__file__).parents[2] / "assignments" / slug / "starter.py"
    # triton reads the source of a kernel from its file
    exec(compile(assignment.starter, str(path), "exec"), space)
    operation = reference.load(assignment.operation)
    case = assignment.cases[0]
    inputs = inputs_of(operation, case)
    entry = space[assignment.entry]
    arguments = [inputs[name] for name in operation.inputs] + [case.options[name] for name in operation.options]
    with pytest.raises(NotImplementedError):
        (entry if assignment.entry_kind == "function" else entry.apply)(*arguments)
