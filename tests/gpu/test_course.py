"""What becomes of failures and wrong rows on a GPU, with everything but the deciding played."""

import contextlib
import dataclasses
import time
import types
from pathlib import Path

import pytest
from gpu_fakes import Clock, FakeGpu

from grader import measurement
from grader.assignment import load_assignment
from grader.measurement import (
    Evidence,
    Failure,
    FailureKind,
    Isolation,
    LargeCall,
    MemoryPoint,
    Replay,
    ReplayOutcome,
    Timing,
)
from workers import examination, gpu_examination
from workers.gpu_examination import GpuRecord, _Course
from workers.gpu_timing import Race, WrongRowsError
from workers.interview import CandidateFailedError

FORWARD = load_assignment(Path(__file__).parents[2] / "assignments" / "flash-attention-forward")
WRONG = Evidence(kind="timed-outputs-wrong", message="o of 3 of 3 timed calls is wrong")
LARGE = LargeCall(axes={"queries": 8192}, dtype="bfloat16", output="o", rel_error=0.3, limit=6e-3, n_rows=16)


def failed(kind=FailureKind.RAISES, message="OutOfResources"):
    return CandidateFailedError(Failure(kind=kind, message=message, stage="timing"), dead=False)


class Interview:
    def __init__(self):
        self.ended, self.ending, self.evidence, self.asked = False, None, [], []
        self.sandbox = self

    def ask(self, message, *, stage):
        self.asked.append(message["op"])

    def answer(self, timeout_s):
        return {}

    def end(self):
        self.ended, self.ending = True, "ended"


class Examiner:
    def __init__(self):
        self.sandboxes = self
        self.bench = self
        self.operation = None
        self.loaded = []

    def progress(self, stage, fraction):
        pass

    def hold(self):
        return contextlib.nullcontext()

    def take(self, timeout_s):
        return Interview()

    def begin(self):
        return Interview(), None

    def load(self, interview):
        self.loaded.append(interview)

    @contextlib.contextmanager
    def stage(self, name):
        yield


class Student:
    def __init__(self):
        self.interview = Interview()


class Stopwatch:
    """Each race is the next of these: a speed-up, or an error."""

    def __init__(self, *outcomes):
        self.outcomes = list(outcomes)

    def race(self, size, student, others, *, budget_s, headline):
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        self.ratio = outcome
        return Race()

    def timing(self, size, race):
        return Timing(
            axes=dict(size.axes), student_times_ms=(1.0,), naive_times_ms=(self.ratio,), reference_times_ms=(),
            ratio=self.ratio, ratio_low=self.ratio, ratio_high=self.ratio, noisy=False,
        )  # fmt: skip

    def one_call(self, size):
        return "inputs"


class Gpu:
    name = "NVIDIA H200"


@dataclasses.dataclass
class WrongRows:
    inputs: str = "theirs"


@pytest.fixture
def play(monkeypatch):
    """A race with these outcomes, and what a plain call finds; returns the course, the student and the plain calls."""

    def run(*outcomes, plain=None, replay="never"):
        assignment = dataclasses.replace(FORWARD, speed=dataclasses.replace(FORWARD.speed, replay=replay))
        course = _Course(assignment, Examiner(), Gpu(), None, GpuRecord(), 1, None)
        student, calls = Student(), []

        def plain_call(begin, gpu, size, wrong, inputs):
            assert student.interview.ended  # its memory is needed
            begin()
            calls.append((wrong, inputs))
            return plain

        monkeypatch.setattr(gpu_examination, "plain_call", plain_call)
        course._race(Stopwatch(*outcomes), student, [])
        return course, student, calls

    return run


def test_wrong_rows_that_a_fresh_process_gives_too_are_a_measurement(play):
    wrong = WrongRows()
    course, _, calls = play(WrongRowsError(WRONG, wrong), plain=LARGE)
    assert course.large_calls == [LARGE]
    assert course.evidence == []
    assert calls == [(wrong, "theirs")]


def test_wrong_rows_that_it_does_not_give_are_evidence(play):
    course, _, _ = play(WrongRowsError(WRONG, WrongRows()), plain=None)
    assert (course.large_calls, course.evidence) == ([], [WRONG])


def test_late_work_is_evidence_at_once(play):
    course, _, calls = play(WrongRowsError(WRONG), plain=LARGE)
    assert (course.large_calls, course.evidence, calls) == ([], [WRONG], [])


def test_a_failure_that_a_fresh_process_has_too_is_a_measurement(play):
    large = dataclasses.replace(LARGE, failure=failed().failure)
    course, _, calls = play(failed(), plain=large)
    assert (course.large_calls, course.evidence) == ([large], [])
    assert calls == [(None, "inputs")]


def test_a_failure_that_it_has_not_is_left_to_be_held(play):
    with pytest.raises(CandidateFailedError):
        play(failed(), plain=None)


def test_a_slow_file_is_asked_nothing_more(play):
    with pytest.raises(CandidateFailedError):
        play(failed(FailureKind.TIME_LIMIT), plain=LARGE)


def test_a_lesser_size_that_is_wrong_keeps_the_headline_and_is_a_measurement(play):
    course, _, _ = play(4.0, WrongRowsError(WRONG, WrongRows()), plain=LARGE)
    assert [timing.ratio for timing in course.timings] == [4.0]
    assert course.large_calls == [LARGE]


@pytest.mark.parametrize(("asks", "ratios", "replayed"), [
    pytest.param("always", [1.1, 1.1, 1.1], [0], id="always-the-headline-alone"),
    pytest.param("top", [100.0, 1.1, 1.1], [0], id="top-score"),
    pytest.param("top", [1.1, 100.0, 100.0], [], id="top-at-lesser-sizes-alone"),
    pytest.param("never", [100.0, 1.1, 1.1], [], id="never"),
])  # fmt: skip
def test_the_headline_of_those_who_are_asked_for_is_replayed(play, monkeypatch, asks, ratios, replayed):
    seen = []

    def replay(stopwatch, size, graded, student, others, *, begin, quiet, gpu, assignment):
        seen.append([dict(one) for one in assignment.speed.sizes].index(dict(size.axes)))
        return Replay(outcome=ReplayOutcome.AGREES, axes=dict(size.axes))

    monkeypatch.setattr(gpu_examination, "replay", replay)
    course, _, _ = play(*ratios[: len(FORWARD.speed.sizes)], replay=asks)
    assert seen == replayed
    assert (course.replay is not None) == bool(replayed)


# -- the memory sweep --------------------------------------------------------------------------------------------------


def measure(monkeypatch, point):
    """A course that measures memory alone, where `point` answers for each size."""
    monkeypatch.setattr(gpu_examination, "Interview", lambda sandbox: sandbox)
    monkeypatch.setattr(gpu_examination.Rival, "close", lambda self: None)
    examiner = Examiner()
    examiner.arena = lambda interview: None
    course = _Course(FORWARD, examiner, Gpu(), None, GpuRecord(), 1, None)
    course.numeric = type("Numeric", (), {"answers": {}})()
    course._point = lambda interview, timed, size, options, *, idle, ballast: point(size, ballast)
    course._bytes_of = lambda interview: 0
    course._measure(None, [])
    return course


def test_a_sweep_that_breaks_the_context_is_a_failure_of_that_size_and_no_evidence(monkeypatch):
    illegal = failed(FailureKind.CRASHED, "CUDA error: an illegal memory access was encountered")

    def point(size, ballast):
        if size > FORWARD.memory.cuda_sizes[0]:
            raise illegal
        return MemoryPoint(size=size, peak_bytes=1)

    course = measure(monkeypatch, point)
    assert [one.failure for one in course.memory] == [None, illegal.failure]
    assert course.evidence == []


def test_a_sweep_that_takes_too_long_says_nothing(monkeypatch):
    def point(size, ballast):
        raise failed(FailureKind.TIME_LIMIT)

    course = measure(monkeypatch, point)
    assert (course.memory, course.evidence) == ([], [])


def test_only_the_largest_size_is_beside_a_ballast(monkeypatch):
    beside = []

    def point(size, ballast):
        beside.append((size, ballast))
        return MemoryPoint(size=size, peak_bytes=1)

    measure(monkeypatch, point)
    sizes = FORWARD.memory.cuda_sizes
    assert beside == [(sizes[0], False), *((size, size == sizes[-1]) for size in sizes)]


# -- the lock ----------------------------------------------------------------------------------------------------------


class LockedGpu(FakeGpu):
    """Free for so long when it is taken; numerics take so long under its lock."""

    name, uuid, arch, total_bytes = "NVIDIA H200", "GPU-a", "sm_90", 1 << 30

    def __init__(self, idle_s):
        super().__init__(Clock())
        self.free_since = time.monotonic() - idle_s
        self.taken = 0

    @contextlib.contextmanager
    def lock(self):
        self.taken += 1
        yield

    def state(self):
        return None


@pytest.mark.parametrize("idle_s", [0.0, 5.0])
def test_how_long_the_gpu_was_held_and_idle_before_is_stored_with_the_measurements(monkeypatch, idle_s):
    gpu = LockedGpu(idle_s)
    sandboxes = types.SimpleNamespace(isolation=Isolation(level="full"))
    monkeypatch.setattr(examination.Examiner, "numerics", lambda self: time.sleep(0.03) or examination.Numerics())
    assignment = dataclasses.replace(FORWARD, memory=None, speed=None)
    found = gpu_examination.examine_on_gpu(assignment, b"", gpu=gpu, sandboxes=sandboxes, interpreter=None)
    stored = measurement.loads(measurement.dumps(found)).gpu
    assert gpu.taken == 1
    assert idle_s <= stored.idle_s < idle_s + 1.0
    assert 0.03 <= stored.held_s < 1.0
