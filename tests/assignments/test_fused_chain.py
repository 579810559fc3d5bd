"""The fused chain in numbers: eager, three launches and about six times the bytes of x; fused, one and about two."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

import reference
from grader.assignment import load_assignment
from workers.audit import eager_costs
from workers.devices.cpu import interpreter_pool
from workers.examination import examine

ROOT = Path(__file__).resolve().parents[2]
ASSIGNMENT = load_assignment(ROOT / "assignments" / "fused-bias-dropout-layernorm")
OPERATION = reference.load(ASSIGNMENT.operation)
OPTIONS = ASSIGNMENT.structure.options
SIZES = [
    pytest.param({"rows": 64, "dim": 768}, id="64x768"),
    pytest.param({"rows": 128, "dim": 1024}, id="128x1024"),
    pytest.param({"rows": 100, "dim": 3000}, id="100x3000"),
]


def bytes_of_x(axes):
    return 4 * axes["rows"] * axes["dim"]


@pytest.fixture(scope="module")
def sandboxes():
    with interpreter_pool(ASSIGNMENT.limits, size=2) as pool:
        yield pool


@pytest.mark.parametrize("axes", SIZES)
def test_the_eager_chain_is_three_launches_and_six_times_the_bytes(axes):
    inputs = OPERATION.make_inputs(axes, "normal", torch.float32, OPTIONS, torch.Generator().manual_seed(0))

    def chain(*tensors):
        return OPERATION.eager(dict(zip(inputs, tensors, strict=True)), OPTIONS)

    counted = eager_costs(chain, list(inputs.values()))
    assert counted["launches"] == 3
    assert counted["bytes"] / bytes_of_x(axes) == pytest.approx(6.26, abs=0.06)
    # what is counted is what the cost model of the report says
    said = OPERATION.costs(axes, torch.float32, OPTIONS)
    assert said.eager_launches == 3
    assert said.eager_bytes == pytest.approx(counted["bytes"], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("axes", SIZES)
def test_the_fused_reference_is_one_launch_and_twice_the_bytes(sandboxes, axes):
    assert OPERATION.kernel_file.is_file()
    at_size = dataclasses.replace(
        ASSIGNMENT,
        structure=dataclasses.replace(ASSIGNMENT.structure, axes=axes),
        cases=tuple(case for case in ASSIGNMENT.cases if case.required),
    )
    audit = examine(at_size, OPERATION.kernel_file.read_bytes(), sandboxes=sandboxes).audit
    assert audit is not None
    assert audit.n_launches == 1
    assert audit.torch_ops == ()
    assert audit.findings == ()
    # x once, y once, and three vectors of one row
    assert audit.unique_bytes == 2 * bytes_of_x(axes) + 3 * 4 * axes["dim"] == audit.least_bytes
    assert audit.unique_bytes / bytes_of_x(axes) == pytest.approx(2.0, abs=0.06)
    assert (audit.eager_launches, round(audit.eager_bytes / bytes_of_x(axes))) == (3, 6)
