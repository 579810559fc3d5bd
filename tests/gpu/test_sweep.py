"""The memory sweep on a GPU made of CPU memory: what a file may hold, where, and how it is counted."""

import contextlib
import dataclasses
import types
from pathlib import Path

import pytest
import torch
from gpu_fakes import Allocator, Clock, FakeGpu, FakeInterview, make_candidate

import reference
from grader.assignment import load_assignment
from grader.measurement import FailureKind
from grader.statistics import last_exponent
from reference import timed as timed_operations
from workers import gpu_examination
from workers.gpu_examination import GpuRecord, _Course
from workers.gpu_timing import Size, input_bytes

FORWARD = load_assignment(Path(__file__).parents[2] / "assignments" / "flash-attention-forward")
OPERATION = reference.load("attention.forward")
LENGTHS = (64, 128, 256)
GIB = 1 << 30
SCORES_BYTES = 8 * GIB  # of the largest size where these tests play one of an H200


class Sweep:
    """A course that measures the memory of one file; device memory is what the file says that it took."""

    def __init__(self, monkeypatch):
        self.monkeypatch = monkeypatch
        self.clock = Clock()
        self.gpu = FakeGpu(self.clock)
        self.gpu.name = "NVIDIA H200"

    def run(self, call, *, at_load=lambda: None, upstream=False):
        allocator = Allocator(2 * LENGTHS[-1] * 16 * 4, 12)

        def honest(q, k, v, is_causal):
            made = OPERATION.naive({"q": q, "k": k, "v": v}, {"is_causal": is_causal})
            o, lse = allocator.empty(q.shape, q.dtype), allocator.empty(q.shape[:2])
            self.gpu.take(GIB * q.shape[1] // 4096)
            return o.copy_(made["o"]), lse.copy_(made["lse"])

        candidate = make_candidate(self.gpu, self.clock, allocator, call(honest), self.monkeypatch)
        self.interview = FakeInterview(candidate)
        # what a call took is given back when it is told to
        trim, self.kept_bytes = candidate._half._trim, 0

        def trimmed(message):
            said = trim(message)
            self.gpu.held_bytes = (500 << 20) + self.kept_bytes
            return said

        self.monkeypatch.setattr(candidate._half, "_trim", trimmed)
        sweep = dataclasses.replace(FORWARD.memory, cuda_sizes=LENGTHS, cuda_axes={"batch": 2, "head_dim": 16})
        assignment = dataclasses.replace(FORWARD, memory=sweep, speed=None)
        examiner = types.SimpleNamespace(
            sandboxes=types.SimpleNamespace(take=lambda timeout_s: None, hold=contextlib.nullcontext),
            bench=types.SimpleNamespace(ready=gpu_examination.open_arena),
            operation=Operation(), progress=lambda _stage, _fraction: None, start_clock=lambda: None,
            load=lambda interview: at_load(), stage=lambda name: contextlib.nullcontext(),
        )  # fmt: skip
        self.monkeypatch.setattr(gpu_examination, "Interview", lambda sandbox, allowance: self.interview)
        self.monkeypatch.setattr(gpu_examination.processes, "tree", lambda pid: ())
        self.interview.ending = None
        course = _Course(assignment, examiner, self.gpu, None, GpuRecord(), 1, None, contextlib.nullcontext)
        course.numeric = types.SimpleNamespace(answers={})
        course._measure(None, [])
        return course


class Operation:
    """Attention whose costs are those of sizes 64 times as long on an H200."""

    def __getattr__(self, name):
        return getattr(OPERATION, name)

    def costs(self, axes, dtype, options):
        whole = dict(axes) | {"batch": 16, "head_dim": 64}
        whole |= {name: 64 * axes[name] for name in ("queries", "keys")}
        return OPERATION.costs(whole, torch.bfloat16, options)


@pytest.fixture
def sweep(monkeypatch):
    torch.set_num_threads(1)
    return Sweep(monkeypatch)


def exponent(course, key="peak_bytes"):
    return last_exponent(list(LENGTHS), [max(1, getattr(point, key)) for point in course.memory])


def scores_bytes(q):
    return SCORES_BYTES * q.shape[1] ** 2 // LENGTHS[-1] ** 2


def test_an_honest_file_grows_as_it_does_and_shows_no_sign(sweep):
    course = sweep.run(lambda honest: honest)
    assert exponent(course) == pytest.approx(1.0)
    assert [point.failure for point in course.memory] == [None] * 3
    assert course.evidence == []


def test_scores_that_are_allocated_do_not_fit_beside_the_ballast(sweep):
    def storing(honest):
        def call(q, k, v, is_causal):
            sweep.gpu.take(scores_bytes(q))
            return honest(q, k, v, is_causal)

        return call

    course = sweep.run(storing)
    assert course.memory[-1].failure.kind is FailureKind.MEMORY_LIMIT


def keeps(sweep, size_bytes):
    def take():
        sweep.gpu.take(size_bytes)
        sweep.kept_bytes += size_bytes

    return take


@pytest.mark.parametrize("when", ["at-import", 1, 2, 3, "in-between"])
def test_memory_held_before_the_largest_call_is_a_sign_whenever_it_was_taken(sweep, when):
    """Scratch for all scores that is there already is not above what was there, and no ballast takes it away."""
    calls = []
    take = keeps(sweep, SCORES_BYTES)

    def with_scratch(honest):
        def call(q, k, v, is_causal):
            calls.append(q.shape[1])
            if len(calls) == when:
                take()
            return honest(q, k, v, is_causal)

        return call

    if when == "in-between":
        # a thread of the file's, as soon as the ballast begins
        ballast = sweep.gpu.ballast

        @contextlib.contextmanager
        def late(leave_bytes):
            take()
            with ballast(leave_bytes):
                yield

        sweep.gpu.ballast = late
    course = sweep.run(with_scratch, at_load=take if when == "at-import" else lambda: None)
    assert [one.kind for one in course.evidence] == ["memory-held"]
    assert "8." in course.evidence[0].message
    if when in ("at-import", 1):
        assert all(point.peak_bytes > SCORES_BYTES - GIB for point in course.memory)


@pytest.mark.parametrize("mib", [0, 64, 264, 1000], ids=["nothing", "modules", "spills", "much"])
def test_modules_and_local_memory_are_no_sign_and_do_not_count(sweep, mib):
    course = sweep.run(lambda honest: honest, at_load=keeps(sweep, mib << 20))
    assert course.evidence == []
    assert exponent(course) == pytest.approx(1.0)


@pytest.mark.parametrize("slug", ["flash-attention-forward", "flash-attention"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("held_gib", "signs"), [(2.9, []), (3.1, ["memory-held"])])
def test_what_may_be_held_hangs_on_the_axes_alone(sweep, slug, dtype, held_gib, signs):
    """A byte a score of 16 heads at T = 16384 is 4 GiB, of which 1 GiB is left to every file."""
    assignment = load_assignment(Path(__file__).parents[2] / "assignments" / slug)
    memory = assignment.memory
    axes = dict(memory.axes_on("cuda")) | dict.fromkeys(memory.along, memory.cuda_sizes[-1])
    costs = reference.load(assignment.operation).costs(axes, dtype, dict(assignment.structure.options))
    assert costs.n_scores == 4 * GIB
    leave = max(gpu_examination.BALLAST_LEAST_BYTES, gpu_examination.BALLAST_FACTOR * costs.reference_peak_bytes)
    course = _Course(assignment, None, sweep.gpu, None, GpuRecord(), 1, None, contextlib.nullcontext)
    sweep.monkeypatch.setattr(gpu_examination.processes, "tree", lambda pid: ())
    course._bare_bytes = sweep.gpu.held_bytes
    sweep.gpu.held_bytes += int(held_gib * GIB)
    interview = types.SimpleNamespace(sandbox=types.SimpleNamespace(pid=0))
    course._hold_to_little(interview, memory.cuda_sizes[-1], costs.n_scores, leave)
    assert [one.kind for one in course.evidence] == signs


def test_where_the_driver_names_no_processes_nothing_is_taken_for_held(sweep):
    sweep.gpu.process_bytes = lambda pids: None
    sweep.gpu.used_bytes = lambda: 100 * GIB + sweep.gpu.held_bytes
    course = sweep.run(lambda honest: honest, at_load=keeps(sweep, SCORES_BYTES))
    assert course.evidence == []


def test_the_arena_has_no_room_for_anything_but_inputs(sweep):
    """The whole storage behind an input can be written by a file."""
    seen = {}

    def looking(honest):
        def call(q, k, v, is_causal):
            seen[q.shape[1]] = q.untyped_storage().nbytes()
            return honest(q, k, v, is_causal)

        return call

    course = sweep.run(looking)
    size = Size(axes={"batch": 2, "queries": 256, "keys": 256, "head_dim": 16},
                dtype=getattr(torch, FORWARD.memory.dtype), options={})  # fmt: skip
    assert seen == dict.fromkeys(LENGTHS, input_bytes(timed_operations.load("attention.forward"), size, 1))
    assert course.evidence == []


def test_what_is_timed_afterwards_has_the_whole_arena(sweep, monkeypatch):
    opened = []
    monkeypatch.setattr(gpu_examination, "open_arena", lambda interview, shown: opened.append(len(shown.arena)))
    monkeypatch.setattr(_Course, "_sweep", lambda self, interview: None)
    monkeypatch.setattr(_Course, "_race", lambda self, stopwatch, student, others: opened.append("race"))
    course = _Course(FORWARD, types.SimpleNamespace(
        sandboxes=types.SimpleNamespace(take=lambda timeout_s: None, hold=contextlib.nullcontext),
        bench=types.SimpleNamespace(ready=lambda interview, shown: opened.append(len(shown.arena))),
        start_clock=lambda: None, load=lambda interview: opened.append("load"),
        stage=lambda name: contextlib.nullcontext(),
    ), sweep.gpu, None, GpuRecord(), 1, None, contextlib.nullcontext)  # fmt: skip
    interview = types.SimpleNamespace(sandbox=types.SimpleNamespace(pid=0), end=lambda: None, evidence=[], ending=None)
    monkeypatch.setattr(gpu_examination, "Interview", lambda sandbox, allowance: interview)
    monkeypatch.setattr(gpu_examination, "input_bytes", lambda timed, size, n_calls: 4096)
    course.numeric = types.SimpleNamespace(
        answers={case.name: types.SimpleNamespace(passed=True) for case in FORWARD.cases_on("cuda")}
    )
    course._measure(object(), [])
    assert opened == [4096, "load", len(sweep.gpu.arena), "race"]


@pytest.mark.parametrize(("mib", "counts"), [(0, False), (700, False), (1900, False), (8192, True), (4096, True)])
def test_scores_on_the_host_count_and_compiling_does_not(sweep, mib, counts):
    def on_the_host(honest):
        def call(q, k, v, is_causal):
            used = (mib << 20) * q.shape[1] ** 2 // LENGTHS[-1] ** 2
            sandbox = sweep.interview.sandbox
            sandbox.host_peak_bytes = max(sandbox.host_peak_bytes, sandbox.host_bytes + used)
            return honest(q, k, v, is_causal)

        return call

    course = sweep.run(on_the_host)
    assert (exponent(course) > FORWARD.memory.pass_exponent) == counts


def test_a_host_that_counts_no_memory_of_its_own_says_nothing_of_it(sweep, monkeypatch):
    monkeypatch.setattr("gpu_fakes.FakeSandbox.memory_peak_bytes", lambda self: None)
    assert exponent(sweep.run(lambda honest: honest)) == pytest.approx(1.0)


def test_torch_that_computes_at_those_sizes_alone_is_among_the_measurements(sweep):
    def borrowing(honest):
        def call(q, k, v, is_causal):
            if q.shape[1] < LENGTHS[-1]:
                return honest(q, k, v, is_causal)
            found = torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=is_causal)
            return found[0], q.new_zeros(q.shape[:2])

        return call

    def small(q, k, v, is_causal):
        return q.clone(), q.new_zeros(q.shape[:2], dtype=torch.float32)

    course = sweep.run(lambda _honest: borrowing(small))
    assert [op.op for op in course.operations.library_calls()]
    assert course.operations.torch_ops()
    assert sweep.run(lambda _honest: small).operations.torch_ops() == ()
