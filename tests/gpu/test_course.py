"""What becomes of failures and wrong rows on a GPU, with everything but the deciding played."""

import contextlib
import dataclasses
import functools
import sys
import threading
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
from workers.gpu_examination import GpuRecord, WarmGpu, _Course
from workers.gpu_timing import BaselineFailedError, Race, VoidError, WrongRowsError
from workers.interview import CandidateFailedError

FORWARD = load_assignment(Path(__file__).parents[2] / "assignments" / "flash-attention-forward")
WRONG = Evidence(kind="timed-outputs-wrong", message="o of 3 of 3 timed calls is wrong")
LARGE = LargeCall(axes={"queries": 8192}, dtype="bfloat16", output="o", rel_error=0.3, limit=6e-3, n_rows=16)


def failed(kind=FailureKind.RAISES, message="OutOfResources"):
    return CandidateFailedError(Failure(kind=kind, message=message, stage="timing"), dead=False)


class Interview:
    def __init__(self):
        self.ended, self.ending, self.evidence, self.asked, self.pid = False, None, [], [], 0
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
        self.n_held, self.held = 0, False

    def progress(self, stage, fraction):
        pass

    @contextlib.contextmanager
    def hold(self):
        self.n_held += 1
        self.held = True
        yield
        self.held = False

    def take(self, timeout_s):
        return Interview()

    def ready(self, interview, shown):
        pass

    def start_clock(self):
        pass

    def load(self, interview):
        self.loaded.append(interview)

    @contextlib.contextmanager
    def stage(self, name):
        yield


class OfOurs:
    def __init__(self, name):
        self.name, self.doubted = name, False

    def doubt(self):
        self.doubted = True


class Rivals:
    def __init__(self):
        self.lost, self.held = [], False

    @contextlib.contextmanager
    def hold(self):
        self.held = True
        yield
        self.held = False

    def failed(self, rival):
        self.lost.append(rival.name)

    def of(self, assignment, operation, timed, prove):
        return [OfOurs("naive"), OfOurs("reference")]

    def freeze(self):
        pass


class Student:
    def __init__(self):
        self.interview = Interview()
        self.closed = False

    def close(self):
        assert self.interview.ended  # what it wrote last was read
        self.closed = True


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


class Gpu(FakeGpu):
    name = "NVIDIA H200"

    def __init__(self):
        super().__init__(Clock())


@dataclasses.dataclass
class WrongRows:
    inputs: str = "theirs"


@pytest.fixture
def play(monkeypatch):
    """A race with these outcomes, and what a plain call finds; returns the course, the student and the plain calls."""

    def run(*outcomes, plain=None, replay="never"):
        assignment = dataclasses.replace(FORWARD, speed=dataclasses.replace(FORWARD.speed, replay=replay))
        course = _Course(assignment, Examiner(), Gpu(), Rivals(), GpuRecord(), 1, None, contextlib.nullcontext)
        student, calls = Student(), []

        def plain_call(begin, gpu, size, wrong, inputs):
            assert student.closed  # its memory is needed, and what is mapped here is not free
            begin()
            calls.append((wrong, inputs))
            return plain

        monkeypatch.setattr(gpu_examination, "plain_call", plain_call)
        monkeypatch.setattr(gpu_examination, "Interview", lambda sandbox, allowance: sandbox)
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

    def replay(stopwatch, size, graded, student, others, *, begin, gpu, assignment):
        seen.append([dict(one) for one in assignment.speed.sizes].index(dict(size.axes)))
        return Replay(outcome=ReplayOutcome.AGREES, axes=dict(size.axes))

    monkeypatch.setattr(gpu_examination, "replay", replay)
    course, _, _ = play(*ratios[: len(FORWARD.speed.sizes)], replay=asks)
    assert seen == replayed
    assert (course.replay is not None) == bool(replayed)


@pytest.mark.parametrize(("broken", "left"), [("reference", ["naive"]), ("naive", ["naive", "reference"])])
def test_a_baseline_that_fails_in_a_replay_costs_nobody_a_finished_grading(monkeypatch, broken, left):
    others = [OfOurs("naive"), OfOurs("reference")]
    raced = []

    def replay(stopwatch, size, graded, student, others, *, begin, gpu, assignment):
        raise BaselineFailedError(next(one for one in others if one.name == broken), "CUDA error: unknown error")

    class Watched(Stopwatch):
        def race(self, size, student, others, *, budget_s, headline):
            raced.append([one.name for one in others])
            return super().race(size, student, others, budget_s=budget_s, headline=headline)

    monkeypatch.setattr(gpu_examination, "replay", replay)
    assignment = dataclasses.replace(FORWARD, speed=dataclasses.replace(FORWARD.speed, replay="always"))
    course = _Course(assignment, Examiner(), Gpu(), Rivals(), GpuRecord(), 1, None, contextlib.nullcontext)
    n_sizes = len(FORWARD.speed.sizes)
    course._race(Watched(*[2.0] * n_sizes), Student(), others)
    assert course.replay.outcome is ReplayOutcome.NOT_REPLAYABLE
    assert f"the {broken} baseline: CUDA error" in course.replay.detail
    assert len(course.timings) == n_sizes
    assert raced == [["naive", "reference"], *[left] * (n_sizes - 1)]
    assert course._rivals.lost == [broken]
    # made while the file's process was there, its records are none for the next file
    assert [one.name for one in others if one.doubted] == (["naive"] if broken == "naive" else [])
    assert course.evidence == []


@pytest.mark.parametrize("ends", [True, False], ids=["the-file's-process-ended", "it-lives"])
def test_a_process_that_ended_in_its_replay_is_raced_no_more_and_nobody_held(monkeypatch, ends):
    def replay(stopwatch, size, graded, student, others, *, begin, gpu, assignment):
        if ends:
            student.interview.end()
        return Replay(outcome=ReplayOutcome.NOT_REPLAYABLE, axes=dict(size.axes), detail="still running after 20 s")

    monkeypatch.setattr(gpu_examination, "replay", replay)
    assignment = dataclasses.replace(FORWARD, speed=dataclasses.replace(FORWARD.speed, replay="always"))
    course = _Course(assignment, Examiner(), Gpu(), Rivals(), GpuRecord(), 1, None, contextlib.nullcontext)
    course._race(Stopwatch(*[2.0] * len(FORWARD.speed.sizes)), Student(), [])
    assert len(course.timings) == (1 if ends else len(FORWARD.speed.sizes))
    assert course.evidence == []


# -- the memory sweep --------------------------------------------------------------------------------------------------


def measure(monkeypatch, point, stopwatch=None, examiner=None, rivals=None):
    """A course that measures memory, where `point` answers for each size, and speed where there is a stopwatch."""
    monkeypatch.setattr(gpu_examination, "Interview", lambda sandbox, allowance: sandbox)
    monkeypatch.setattr(gpu_examination.Rival, "close", lambda self: None)
    cases = {case.name: types.SimpleNamespace(passed=True) for case in FORWARD.cases_on("cuda")}
    assignment = dataclasses.replace(FORWARD, speed=dataclasses.replace(FORWARD.speed, replay="never"))
    pools = [examiner or Examiner(), rivals or Rivals()]
    hold = functools.partial(gpu_examination._holding, pools)
    course = _Course(assignment, pools[0], Gpu(), pools[1], GpuRecord(), 1, None, hold)
    course.numeric = types.SimpleNamespace(answers=cases)
    course._point = lambda interview, timed, size, *, idle, ballast: point(size, ballast)
    monkeypatch.setattr(gpu_examination.processes, "tree", lambda pid: ())
    course._measure(stopwatch, [])
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
    assert course.too_slow.kind is FailureKind.TIME_LIMIT  # but that it took too long


def test_a_race_that_takes_too_long_gives_no_speed_and_says_why(monkeypatch):
    def point(size, ballast):
        return MemoryPoint(size=size, peak_bytes=1)

    slow = failed(FailureKind.TIME_LIMIT, "still running after 20 s, the limit for one call")
    course = measure(monkeypatch, point, Stopwatch(slow))
    assert (course.timings, course.evidence, course.too_slow) == ([], [], slow.failure)


def test_only_the_largest_size_is_beside_a_ballast(monkeypatch):
    beside = []

    def point(size, ballast):
        beside.append((size, ballast))
        return MemoryPoint(size=size, peak_bytes=1)

    measure(monkeypatch, point)
    sizes = FORWARD.memory.cuda_sizes
    assert beside == [(sizes[0], False), *((size, size == sizes[-1]) for size in sizes)]


# -- what may take how long --------------------------------------------------------------------------------------------


def test_all_of_a_files_waits_while_it_is_measured_are_bounded_together(monkeypatch):
    """But not those of a plain call: what is wrong in a window must not be held because the windows took so long."""
    given = []
    monkeypatch.setattr(gpu_examination, "Interview", lambda sandbox, allowance: given.append(allowance) or sandbox)
    monkeypatch.setattr(gpu_examination, "open_arena", lambda interview, gpu: None)
    monkeypatch.setattr(gpu_examination, "plain_call", lambda begin, gpu, size, wrong, inputs: begin())
    monkeypatch.setattr(gpu_examination.Rival, "close", lambda self: None)
    course = _Course(FORWARD, Examiner(), Gpu(), Rivals(), GpuRecord(), 1, None, contextlib.nullcontext)
    course.numeric = types.SimpleNamespace(answers={})
    course._sweep = lambda interview: None
    course._measure(None, [])
    course._begin_empty()
    course._is_wrong_alone(Stopwatch(), course._sizes()[0], Student(), None)
    measured, replayed, plain = given
    assert measured is replayed
    assert [one.seconds for one in (measured, plain)] == [FORWARD.limits.total_s] * 2
    assert plain is not measured


def test_candidates_that_get_ready_wait_once_for_all_that_is_measured(monkeypatch):
    held, examiner, rivals = [], Examiner(), Rivals()

    def point(size, ballast):
        held.append(examiner.held and rivals.held)
        return MemoryPoint(size=size, peak_bytes=1)

    class Watched(Stopwatch):
        def race(self, size, student, others, *, budget_s, headline):
            held.append(examiner.held and rivals.held)
            return super().race(size, student, others, budget_s=budget_s, headline=headline)

    course = measure(monkeypatch, point, Watched(*[2.0] * len(FORWARD.speed.sizes)), examiner, rivals)
    assert len(course.timings) == len(FORWARD.speed.sizes)
    assert examiner.n_held == 1
    assert [examiner.held, rivals.held] == [False, False]
    assert all(held)
    assert len(held) > len(FORWARD.speed.sizes)
    assert course._record.seconds["gate"] >= 0.0


def test_candidates_that_another_lane_starts_meanwhile_keep_off_the_gpu_too(monkeypatch):
    made = []

    @contextlib.contextmanager
    def pool(*_limits, **_how):
        made.append(Examiner())
        yield made[-1]

    monkeypatch.setitem(sys.modules, "workers.devices.cuda", types.SimpleNamespace(cuda_pool=pool))
    for name in ("ahead_pool", "interpreter_pool"):
        monkeypatch.setattr(gpu_examination, name, lambda *_limits, **_how: contextlib.nullcontext())
    warm = WarmGpu.__new__(WarmGpu)
    warm._warm, warm._rivals, warm._holds, warm._starting = {}, Rivals(), [], threading.Lock()
    warm._stack, warm.lanes = contextlib.ExitStack(), 4
    with warm._quiet():
        warm.pools(FORWARD.limits)
        warm.pools(dataclasses.replace(FORWARD.limits, call_s=1.0))
        assert [one.held for one in made] == [True, True]
    assert [one.held for one in made] == [False, False]
    warm.pools(dataclasses.replace(FORWARD.limits, call_s=2.0))
    assert made[2].n_held == 0


@pytest.mark.parametrize("n_void", [0, 1, 2])
def test_a_void_record_of_a_baseline_is_made_once_more(n_void):
    """A moment in which the GPU did something else is no reason to grade nobody."""
    asked = []

    class Recording(Stopwatch):
        def record(self, rival, size, *, headline):
            asked.append(size.key)
            if len(asked) <= n_void:
                raise VoidError("writing the inputs took 9.00 ms, idle 1.00")

    class Proving(Rivals):
        def of(self, assignment, operation, timed, prove):
            prove(types.SimpleNamespace(name="naive", has_record=lambda size: False))
            return []

    course = _Course(FORWARD, Examiner(), Gpu(), Proving(), GpuRecord(), 1, None, contextlib.nullcontext)
    with pytest.raises(VoidError) if n_void == 2 else contextlib.nullcontext():
        course._others(Recording(), None)
    keys = [size.key for size in course._sizes()]
    assert asked == {0: keys, 1: [keys[0], *keys], 2: [keys[0]] * 2}[n_void]


def test_candidates_for_other_assignments_keep_off_the_gpu_too():
    made = [types.SimpleNamespace(candidates=Examiner()) for _ in range(3)]
    warm = WarmGpu.__new__(WarmGpu)
    warm._warm, warm._rivals, warm._holds, warm._starting = dict(enumerate(made)), Rivals(), [], threading.Lock()
    pools = [warm._rivals, *(one.candidates for one in made)]
    with warm._quiet():
        assert [pool.held for pool in pools] == [True] * 4
    assert [pool.held for pool in pools] == [False] * 4


# -- the lock ----------------------------------------------------------------------------------------------------------


class LockedGpu(FakeGpu):
    """Free for so long when it is taken; numerics take so long under its lock."""

    name, uuid, arch, total_bytes = "NVIDIA H200", "GPU-a", "sm_90", 1 << 30
    busy_s = 0.0  # with another lane's file, when it is asked for

    def __init__(self, idle_s):
        super().__init__(Clock())
        self.free_since = time.monotonic() - idle_s
        self.taken = 0

    @contextlib.contextmanager
    def lock(self):
        self.taken += 1
        time.sleep(self.busy_s)
        yield

    def state(self):
        return None


@pytest.mark.parametrize("idle_s", [0.0, 5.0])
def test_how_long_the_gpu_was_held_and_idle_before_is_stored_with_the_measurements(monkeypatch, idle_s):
    gpu = LockedGpu(idle_s)
    sandboxes = types.SimpleNamespace(isolation=Isolation(level="full"))
    monkeypatch.setattr(examination.Examiner, "numerics", lambda self: time.sleep(0.03) or examination.Numerics())
    assignment = dataclasses.replace(FORWARD, memory=None, speed=None)
    found = gpu_examination.examine_on_gpu(assignment, b"", gpu=gpu, sandboxes=sandboxes, interpreter=None, rivals=None)
    stored = measurement.loads(measurement.dumps(found)).gpu
    assert gpu.taken == 1
    assert idle_s <= stored.idle_s < idle_s + 1.0
    assert 0.03 <= stored.held_s < 1.0


def test_waiting_for_the_gpu_takes_nothing_from_a_files_time(monkeypatch):
    """A queue of slow files must not end as no answer at all for those behind them."""
    gpu, left_s = LockedGpu(0.0), []
    gpu.busy_s = 0.06
    limits = dataclasses.replace(FORWARD.limits, total_s=0.05)

    def numerics(self):
        left_s.append(self._left_s())
        return examination.Numerics()

    monkeypatch.setattr(examination.Examiner, "numerics", numerics)
    sandboxes = types.SimpleNamespace(isolation=Isolation(level="full"))
    assignment = dataclasses.replace(FORWARD, memory=None, speed=None, limits=limits)
    gpu_examination.examine_on_gpu(assignment, b"", gpu=gpu, sandboxes=sandboxes, interpreter=None, rivals=None)
    assert left_s[0] > 0.04


@pytest.mark.parametrize("again", ["measured", "plain-call"])
def test_a_file_is_loaded_again_in_time_of_its_own(monkeypatch, again):
    """Probes may have taken all the time that they had."""
    left_s = []
    monkeypatch.setattr(gpu_examination, "Interview", lambda sandbox, allowance: Interview())
    monkeypatch.setattr(gpu_examination, "plain_call", lambda begin, gpu, size, wrong, inputs: begin())
    monkeypatch.setattr(gpu_examination.Rival, "close", lambda self: None)
    monkeypatch.setattr(examination.Examiner, "load", lambda self, interview: left_s.append(self._left_s()))
    sandboxes = types.SimpleNamespace(take=lambda timeout_s: None, hold=contextlib.nullcontext)
    bench = types.SimpleNamespace(ready=lambda interview, shown: None)
    examiner = examination.Examiner(FORWARD, b"", sandboxes, lambda _stage, _fraction: None, 1, bench)
    course = _Course(FORWARD, examiner, LockedGpu(0.0), Rivals(), GpuRecord(), 1, None, contextlib.nullcontext)
    course.numeric = types.SimpleNamespace(answers={})
    course._sweep = lambda interview: None
    examiner._deadline = time.monotonic() - 100.0
    if again == "measured":
        course._measure(None, [])
    else:
        course._is_wrong_alone(Stopwatch(), course._sizes()[0], Student(), None)
    assert left_s[0] == pytest.approx(FORWARD.limits.total_s, abs=1.0)
