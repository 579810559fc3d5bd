"""What a GPU examination says about failures, and what it compiles ahead. No GPU needed."""

from pathlib import Path

import pytest
import torch
from gpu_fakes import Allocator, Clock, FakeGpu, make_candidate

import reference
from grader.assignment import load_assignment
from grader.measurement import Failure, FailureKind
from workers import ahead
from workers.gpu_examination import is_sticky

ASSIGNMENTS = Path(__file__).parents[2] / "assignments"
SLUGS = sorted(path.parent.name for path in ASSIGNMENTS.glob("*/assignment.toml"))


@pytest.mark.parametrize(
    ("message", "sticky"),
    [
        pytest.param("AcceleratorError: CUDA error: an illegal memory access was encountered", True, id="illegal"),
        pytest.param("AcceleratorError: CUDA error: misaligned address", True, id="misaligned"),
        pytest.param("OutOfMemoryError: CUDA out of memory. Tried to allocate 32.00 GiB", False, id="out-of-memory"),
        pytest.param("RuntimeError: CUDA error: out of memory", False, id="out-of-memory-of-the-driver"),
        pytest.param("ValueError: boom", False, id="python"),
    ],
)
def test_a_broken_cuda_context_is_told_from_an_error_that_passes(message, sticky):
    assert is_sticky(Failure(kind=FailureKind.RAISES, message=message)) is sticky


@pytest.mark.parametrize("slug", SLUGS)
def test_everything_a_gpu_examination_calls_is_compiled_ahead(slug):
    assignment = load_assignment(ASSIGNMENTS / slug)
    operation = reference.load(assignment.operation)
    requests = [call.request for call in ahead.calls(assignment, operation)]
    dtypes = {spec["dtype"] for request in requests for spec in request["inputs"]}
    assert {case.dtype for case in assignment.cases_on("cuda")} <= dtypes
    assert assignment.speed.dtype in dtypes
    assert len({repr(request) for request in requests}) == len(requests)
    strided = [request for request in requests if any("strides" in spec for spec in request["inputs"])]
    assert len(strided) >= any(case.layout == "strided" for case in assignment.cases_on("cuda"))
    assert all(len(request["options"]) == len(operation.options) for request in requests)


def test_archives_reach_the_candidate_one_after_another():
    class Heard:
        def __init__(self):
            self.sandbox = self
            self.arena = bytearray(64)
            self.said = []

        def ask(self, message, *, stage):
            self.said.append((message["op"], bytes(self.arena[: message["length"]])))

        def answer(self, timeout_s):
            return {"op": "unpacked"}

    heard = Heard()
    ahead.archives_into(heard, [b"first", b"second one"])
    assert heard.said == [("cache", b"first"), ("cache", b"second one")]


def test_results_are_in_the_arena_before_the_candidate_says_so(monkeypatch):
    """A GPU copies later than it is told; the examiner reads as soon as it is answered."""
    clock = Clock()
    gpu = FakeGpu(clock)
    made = make_candidate(gpu, clock, Allocator(4096, 4), lambda x: x + 1, monkeypatch)
    events = []
    copy = torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, *args: (events.append("copy"), copy(self, *args))[1])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: events.append("wait"))
    x = {"name": "x", "offset": 0, "count": 4, "shape": [4], "strides": [1], "dtype": "float32"}
    slot = {"name": "y", "offset": 256, "capacity": 64, "shape": [4]}
    said = made.answer({"op": "call", "inputs": [x], "options": [], "outputs": [slot]})
    assert said["op"] == "result", said
    assert events[-2:] == ["copy", "wait"]
