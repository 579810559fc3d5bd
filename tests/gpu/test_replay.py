"""Whose kernels are replayed, what of a record is, and what follows. No GPU needed."""

import dataclasses
import mmap
import sys
import types
from pathlib import Path

import numpy
import pytest
import torch
from test_replaying import FakeDriver, Student, floats
from test_windows import SIZE, Track

from grader.assignment import load_assignment
from grader.measurement import Audit, Replay, ReplayOutcome, Timing, TorchOp
from workers import replay
from workers.devices import cuda_candidate, replaying
from workers.record import Operation, Record

ASSIGNMENTS = Path(__file__).parents[2] / "assignments"
FORWARD = load_assignment(ASSIGNMENTS / "flash-attention-forward")
TRAINING = load_assignment(ASSIGNMENTS / "flash-attention")
AXES = dict(FORWARD.speed.sizes[0])


def timing(ratio):
    return Timing(
        axes=AXES, student_times_ms=(1.0,), naive_times_ms=(ratio,), reference_times_ms=(), ratio=ratio,
        ratio_low=ratio, ratio_high=ratio, noisy=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("asks", "ratio", "wanted"),
    [
        pytest.param("never", 100.0, False, id="never"),
        pytest.param("always", 1.1, True, id="always"),
        pytest.param("top", 100.0, True, id="top-score"),
        pytest.param("top", 1.1, False, id="not-a-top-score"),
    ],
)
def test_the_assignment_says_whose_kernels_are_replayed(asks, ratio, wanted):
    assignment = dataclasses.replace(FORWARD, speed=dataclasses.replace(FORWARD.speed, replay=asks))
    assert replay.is_wanted(assignment, timing(ratio), "NVIDIA H200") is wanted


def test_an_assignment_without_speed_replays_nothing():
    assert not replay.is_wanted(dataclasses.replace(FORWARD, speed=None), timing(9.0), "NVIDIA H200")


def op(name):
    return Operation(f"{name}.default", (), {}, ())


def recorded(forward=(), backward=()):
    return Record(3, (), (), tuple(map(op, forward)), tuple(map(op, backward)), {})


@pytest.mark.parametrize(
    ("assignment", "forward", "backward", "left_out"),
    [
        pytest.param(FORWARD, ("zeros", "copy_", "_to_copy", "clone", "fill_"), (), set(), id="copies-and-fills"),
        pytest.param(FORWARD, ("full_like", "new_zeros", "arange", "ones_like"), (), set(), id="other-fills"),
        pytest.param(FORWARD, ("zeros", "bmm", "_softmax"), (), {"bmm", "_softmax"}, id="computing"),
        pytest.param(TRAINING, (), ("mul", "sum", "bmm"), set(), id="gradients-may-be-torchs"),
        pytest.param(TRAINING, ("bmm", "exp"), ("bmm",), {"bmm", "exp"}, id="the-forward-may-not"),
        pytest.param(FORWARD, ("from_host",), (), {"from_host"}, id="numbers-of-the-hosts"),
    ],
)
def test_torch_does_again_what_the_assignment_allows_it(assignment, forward, backward, left_out):
    kept, names = replay.permitted(recorded(forward, backward), assignment)
    assert names == left_out
    assert {one.base for one in kept.operations["forward"]} == set(forward) - left_out
    assert {one.base for one in kept.operations["backward"]} == set(backward) - (left_out - {"bmm"})


def audit_of(*ops):
    return Audit(
        axes=AXES, n_launches=1, launches=(), library_calls=(), outputs=(), requested_bytes=0, unique_bytes=0,
        dot_flops=0, largest_tile_elements=0, least_bytes=1, eager_launches=1, eager_bytes=1,
        torch_ops=tuple(TorchOp(op=name, count=1, size_bytes=1 << 20) for name in ops),
    )  # fmt: skip


def found(outcome, *left_out):
    return Replay(outcome=outcome, axes=AXES, detail="o of 3 of 3 timed calls is wrong", left_out=left_out)


@pytest.mark.parametrize("outcome", [ReplayOutcome.AGREES, ReplayOutcome.NOT_REPLAYABLE])
def test_what_agrees_or_cannot_be_replayed_is_no_sign_of_anything(outcome):
    one = found(outcome, "bmm")
    assert replay.conclude(one, audit_of()) == (one, [])


@pytest.mark.parametrize("outcome", [ReplayOutcome.DIFFERS, ReplayOutcome.SLOWER])
def test_kernels_that_do_not_do_the_work_are_evidence(outcome):
    _, signs = replay.conclude(found(outcome), audit_of())
    assert [sign.kind for sign in signs] == [f"replay-{outcome.value}"]


def test_torch_that_the_audit_did_not_see_is_named():
    after, signs = replay.conclude(found(ReplayOutcome.DIFFERS, "bmm", "_softmax"), audit_of("bmm"))
    assert after.outcome is ReplayOutcome.DIFFERS
    assert "torch did _softmax there, and not in the audit" in signs[0].message


@pytest.mark.parametrize("names", [("bmm", "mul"), ("aten.bmm", "aten::mul.Tensor")])
def test_torch_that_is_there_openly_costs_nobody_a_grade(names):
    after, signs = replay.conclude(found(ReplayOutcome.DIFFERS, "bmm", "mul"), audit_of(*names))
    assert after.outcome is ReplayOutcome.NOT_REPLAYABLE
    assert signs == []


def test_without_an_audit_nothing_was_seen():
    _, signs = replay.conclude(found(ReplayOutcome.DIFFERS, "bmm"), None)
    assert signs


# -- the whole of it, with CPU memory for a GPU's and NumPy functions for compiled kernels -----------------------------


class Stage:
    """A track on which files launch "kernels", and candidates that can be asked for a record or for a replay."""

    def __init__(self, monkeypatch):
        monkeypatch.setattr(replaying, "_DEVICE", "cpu")
        self.driver = FakeDriver()
        package = types.ModuleType("cuda.bindings")
        package.driver = self.driver
        for name, module in {
            "cuda": types.ModuleType("cuda"), "cuda.bindings": package, "cuda.bindings.driver": self.driver,
        }.items():  # fmt: skip
            monkeypatch.setitem(sys.modules, name, module)
        self.track = Track(monkeypatch)
        self.student = Student(self.driver)
        self.kernel_ms = 24.0
        self.flash = self.driver.kernel(self._flash, ["*fp32"] * 5 + ["i32"], name="flash")
        self.monkeypatch = monkeypatch
        self.blocks, self.taken, self.ended = [], 0, []
        monkeypatch.setattr(replaying, "_bytes", self.bytes)

    def _flash(self, q, k, v, o, lse, n):
        """Causal attention of (2, n, 16), out of torch's sight."""
        self.track.clock.pass_ms(self.kernel_ms)
        q, k, v = (floats(at, 2 * n * 16).reshape(2, n, 16).astype("float64") for at in (q, k, v))
        scores = numpy.where(numpy.tri(n, dtype=bool), q @ k.transpose(0, 2, 1) / 4, -numpy.inf)
        top = scores.max(-1, keepdims=True)
        weights = numpy.exp(scores - top)
        total = weights.sum(-1, keepdims=True)
        floats(o, 2 * n * 16)[:] = (weights @ v / total).ravel()
        floats(lse, 2 * n)[:] = (numpy.log(total) + top).ravel()

    def rival(self, name, call):
        rival = self.track.rival(name, ms=0.0, call=lambda _honest: call)
        interview, half = rival.interview, rival.interview.candidate._half
        half._host = mmap.mmap(-1, 1 << 20)
        half._listen = self.student.listen
        interview.sandbox.arena = half._host
        interview.end = lambda: self.ended.append(name)
        release = half._release
        half._release = lambda message: (self.forget(), release(message))[1]
        own = cuda_candidate._segments
        self.monkeypatch.setattr(
            cuda_candidate, "_segments",
            lambda ptrs: own(ptrs) + [[ptr, 1 << 14, "11" * 64] for ptr in ptrs],
        )  # fmt: skip
        return rival

    def forget(self):
        self.taken = 0

    def bytes(self, size):
        """Memory for a replay: after a release the same addresses come again, as from a caching allocator."""
        if self.taken == len(self.blocks):
            self.blocks.append(torch.zeros(1 << 14, dtype=torch.uint8))
        self.taken += 1
        return self.blocks[self.taken - 1][:size]

    def begin(self):
        def nothing(*_arguments):
            raise AssertionError("this process has no file")

        return self.rival("replay", nothing).interview

    def run(self, call, *, graded_ms=24.0):
        """Replay a file, graded at so many milliseconds against a baseline of 120."""
        watch = self.track.stopwatch()
        others = [self.track.rival("naive", ms=120.0), self.track.rival("reference", ms=12.0)]
        student = self.rival("student", call)
        student.prepare(watch.one_call(SIZE), 1)
        student.rehearse(1)
        student.release()
        graded = dataclasses.replace(timing(120.0 / graded_ms), student_times_ms=(graded_ms,))
        return replay.replay(
            watch, SIZE, graded, student, others,
            begin=self.begin, gpu=self.track.gpu, assignment=FORWARD, clock=self.track.clock,
        )  # fmt: skip

    def honest(self, q, k, v, is_causal):
        o, lse = torch.empty_like(q), torch.zeros(q.shape[:2])
        self.student.launch(self.flash, (1, 2, 1), q, k, v, o, lse, q.shape[1])
        return o, lse


@pytest.fixture
def stage(monkeypatch):
    torch.set_num_threads(1)
    return Stage(monkeypatch)


def test_the_kernels_of_an_honest_file_agree(stage):
    got = stage.run(stage.honest)
    assert got.outcome is ReplayOutcome.AGREES, got.detail
    assert got.time_ms == pytest.approx(24.0, rel=0.01)
    assert got.ratio == pytest.approx(5.0, rel=0.02)
    assert (got.n_launches, got.torch_ops, got.left_out) == (1, ("zeros",), ())


def test_a_time_that_the_kernels_do_not_reach_is_seen(stage):
    got = stage.run(stage.honest, graded_ms=12.0)
    assert got.outcome is ReplayOutcome.SLOWER
    assert "take 24.0" in got.detail


def test_a_file_that_lost_time_on_the_host_is_none_the_worse(stage):
    assert stage.run(stage.honest, graded_ms=60.0).outcome is ReplayOutcome.AGREES


def test_an_answer_that_torch_computed_is_not_what_the_kernels_write(stage):
    def decoy(q, k, v, is_causal):
        stage.honest(q, k, v, is_causal)  # into memory that nobody gets
        scores = (q @ k.mT / 4).masked_fill(torch.ones(64, 64).triu(1).bool(), float("-inf"))
        return torch.softmax(scores, -1) @ v, torch.logsumexp(scores, -1)

    got = stage.run(decoy)
    assert got.outcome is ReplayOutcome.DIFFERS, got
    assert {"bmm", "_softmax"} <= set(got.left_out)
    assert "_unsafe_view" not in got.left_out


def test_an_answer_that_the_host_computed_is_not_either(stage):
    def on_the_host(q, k, v, is_causal):
        o, lse = torch.empty_like(q), torch.empty(q.shape[:2])
        stage._flash(*(one.data_ptr() for one in (q, k, v, o, lse)), q.shape[1])
        return o, lse

    assert stage.run(on_the_host).outcome is ReplayOutcome.DIFFERS


@pytest.mark.parametrize(
    ("message", "ends"), [("CUDA error: an illegal memory access was encountered", True), ("no such thing", False)]
)
def test_a_process_that_recording_broke_is_asked_nothing_more(stage, monkeypatch, message, ends):
    """A lesser size would fail in it, and the file be held for what we did to it."""

    def broken(_half, _message):
        raise RuntimeError(message)

    monkeypatch.setattr(cuda_candidate.CudaHalf, "_record", broken)
    got = stage.run(stage.honest)
    assert got.outcome is ReplayOutcome.NOT_REPLAYABLE
    assert message in got.detail
    assert stage.ended == (["student"] if ends else [])


def test_a_record_that_is_none_of_ours_says_nothing(stage, monkeypatch):
    monkeypatch.setattr(cuda_candidate.record, "dump", lambda _record: b"nonsense")
    got = stage.run(stage.honest)
    assert got.outcome is ReplayOutcome.NOT_REPLAYABLE
    assert "cannot be read" in got.detail
