"""Baselines that outlive gradings: what becomes of those that fail, and of their times. On a GPU made of CPU memory."""

import contextlib
import dataclasses
import functools
import mmap
import sys
import types

import pytest
from gpu_fakes import FakeInterview, cuda_beside
from nvml_fakes import FakeCard, FakeNvml
from test_windows import ASSIGNMENT, OPERATION, SIZE, TIMED, Track

from grader.assignment import Limits
from grader.errors import GraderFault
from grader.measurement import Failure, FailureKind
from workers import gpu_examination
from workers.gate import ARCH
from workers.gpu_examination import MOST_FAILURES, Rivals
from workers.gpu_timing import Rival, VoidError
from workers.interview import CandidateFailedError
from workers.isolation import Limits as CandidateLimits
from workers.isolation import Recipe

OTHER = dataclasses.replace(OPERATION, name="attention.backward")


class Host:
    """Where baselines come from: each is a candidate of this process, which fails at the steps it is told to."""

    isolation = None

    def __init__(self, monkeypatch):
        self.track = Track(monkeypatch)
        self.gpu = self.track.gpu
        self.fails = {}  # by name: operations that its process fails at
        self.ms = {"naive": 30.0, "reference": 3.0}
        self.started = []
        monkeypatch.setattr(gpu_examination, "Interview", lambda sandbox: sandbox)
        monkeypatch.setattr(gpu_examination, "Rival", self._rival)
        self.rivals = Rivals(self.gpu, self)

    def _rival(self, name, interview, gpu):
        interview.name = name
        return Rival(name, interview, gpu, clock=self.track.clock)

    def take(self, timeout_s):
        return Process(self)

    def of(self, operation=OPERATION, sizes=(SIZE,)):
        """As one grading asks for them, before the student's code runs."""
        watch = self.track.stopwatch()

        def prove(rival):
            for size in sizes:
                if not rival.has_record(size):
                    watch.record(rival, size, headline=True)

        return self.rivals.of(ASSIGNMENT, operation, TIMED, prove)

    def grade(self, *, beside_ms=None):
        """One grading of an honest file; the naive baseline takes so long while it is there."""
        others = self.of()
        before = self.ms["naive"]
        self.ms["naive"] = beside_ms or before
        try:
            student = self.track.rival("student", ms=6.0)
            watch = self.track.stopwatch()
            race = watch.race(SIZE, student, others, budget_s=100.0, headline=True)
            return watch.timing(SIZE, race).ratio
        finally:
            self.ms["naive"] = before

    @property
    def alive(self):
        return [one.name for one in self.started if not one.over]


class Process(FakeInterview):
    """Its name is that of the rival that is made of it."""

    def __init__(self, host):
        def paced(honest):
            def call(*arguments):
                host.track.clock.pass_ms(host.ms[self.name])
                return honest(*arguments)

            return call

        super().__init__(host.track.rival("", ms=0.0, call=paced).interview.candidate)
        self.host, self.over = host, False
        self.sandbox.arena = mmap.mmap(-1, 1 << 20)
        host.started.append(self)

    def ask(self, message, *, stage):
        self.stage = stage
        op = message["op"]
        self.failing = op in self.host.fails.get(self.name, ())
        if op == "load":
            self.log.append(op)
            self._reply = {"op": "loaded", "entry": "call"}
        else:
            super().ask(message, stage=stage)

    def answer(self, timeout_s):
        if self.failing or self.over:
            raise CandidateFailedError(Failure(kind=FailureKind.CRASHED, message="gone", stage=self.stage), dead=True)
        return super().answer(timeout_s)

    def end(self):
        self.over = True


@pytest.fixture
def host(monkeypatch):
    return Host(monkeypatch)


STEPS = ["load", "arena", "prepare", "rehearse", "window", "release"]


@pytest.mark.parametrize("step", STEPS)
def test_a_reference_that_fails_leaves_nothing_behind_and_is_not_tried_for_ever(host, step):
    host.fails = {"reference": [step]}
    for _ in range(MOST_FAILURES + 2):
        assert [one.name for one in host.of()] == ["naive"]
        assert host.alive == ["naive"]
    assert [one.name for one in host.started].count("reference") == MOST_FAILURES
    assert set(host.gpu.mapped) <= {start for rival in host.of() for start in rival._starts}


@pytest.mark.parametrize("step", STEPS)
def test_a_naive_baseline_that_fails_alone_is_ours_and_leaves_nothing_behind(host, step):
    host.fails = {"naive": [step]}
    with pytest.raises(GraderFault, match="the naive baseline"):
        host.of()
    assert host.alive == []
    assert host.gpu.mapped == []
    host.fails = {}
    assert [one.name for one in host.of()] == ["naive", "reference"]


def test_a_reference_that_fails_beside_files_is_given_up_after_some(host):
    for _ in range(MOST_FAILURES):
        _, reference = host.of()
        host.rivals.failed(reference)
    assert [one.name for one in host.of()] == ["naive"]
    assert host.alive == ["naive"]


@pytest.mark.parametrize("step", ["trim", "dead"])
def test_a_baseline_of_another_operation_that_fails_stops_nobody(host, step):
    first = host.of()
    if step == "dead":
        first[0].interview.over = True
    else:
        host.fails = {"naive": [step]}
    assert len(host.of(OTHER)) == 2
    assert first[0].interview.over
    host.fails = {}
    assert len(host.of()) == 2


def test_a_baseline_that_died_between_gradings_is_started_anew(host):
    first = host.of()
    first[0].interview.over = True
    second = host.of()
    assert second[0] is not first[0]
    assert second[1] is first[1]
    assert [one.name for one in host.started] == ["naive", "reference", "naive"]


def test_those_that_wait_have_given_their_memory_back_whatever_their_assignments_limits(host, monkeypatch):
    """One set of them serves a whole worker: two sets would hold the memory of two operations' windows."""
    first = host.of()
    assignment = dataclasses.replace(ASSIGNMENT, limits=dataclasses.replace(ASSIGNMENT.limits, call_s=1.0))
    monkeypatch.setattr("test_rivals.ASSIGNMENT", assignment)
    host.of(OTHER)
    assert [one.interview.log[-1] for one in first] == ["trim", "trim"]
    assert not any(one._mapped for one in first)


def test_baselines_are_kept_and_asked_for_no_second_record(host):
    first = host.of()
    asked = [one.interview.log.count("window") for one in first]
    assert host.of() == first
    assert [one.interview.log.count("window") for one in first] == asked


# -- their times -------------------------------------------------------------------------------------------------------


def test_a_record_is_made_before_any_file_runs(host):
    naive, reference = host.of()
    assert naive.records_ms == pytest.approx({SIZE.key: 30.0}, rel=0.02)
    assert reference.records_ms == pytest.approx({SIZE.key: 3.0}, rel=0.05)


@pytest.mark.parametrize("slow_ms", [36.0, 600.0])
def test_a_record_of_a_slow_moment_costs_no_later_file_its_grade(host, slow_ms):
    host.ms["naive"] = slow_ms
    host.of()
    host.ms["naive"] = 30.0
    assert host.grade() == pytest.approx(5.0, rel=0.02)
    assert host.of()[0].records_ms == pytest.approx({SIZE.key: 30.0}, rel=0.02)


@pytest.mark.parametrize("fast_ms", [25.0, 10.0])
def test_a_gpu_that_became_slower_costs_one_file_at_most(host, fast_ms):
    host.ms["naive"] = fast_ms
    host.of()
    host.ms["naive"] = 30.0
    with pytest.raises(VoidError, match="its record on this GPU"):
        host.grade()
    assert host.grade() == pytest.approx(5.0, rel=0.02)


def test_a_file_that_slows_the_baseline_is_void_and_changes_nothing_for_the_next(host):
    with pytest.raises(VoidError, match="its record on this GPU"):
        host.grade(beside_ms=36.0)
    assert host.grade() == pytest.approx(5.0, rel=0.02)


def test_a_race_repeated_after_a_void_one_has_the_same_record(host):
    others = host.of()
    host.ms["naive"] = 60.0
    watch = host.track.stopwatch()
    for _ in range(2):
        with pytest.raises(VoidError, match="its record on this GPU"):
            watch.race(SIZE, host.track.rival("student", ms=6.0), others, budget_s=100.0, headline=False)


def test_a_record_outlives_the_process_it_was_made_with(host):
    naive, _ = host.of()
    host.rivals.end(naive)
    host.ms["naive"] = 60.0  # while the new one is started, the GPU is slow
    assert host.of()[0].records_ms == pytest.approx({SIZE.key: 30.0}, rel=0.02)


def test_all_that_a_file_is_held_against_is_known_before_its_code_runs(host, monkeypatch):
    """As a grading begins; what does not change is learnt in a worker's first one alone."""
    for name in ("Stopwatch", "learn_show_cost"):
        timed = functools.partial(getattr(gpu_examination, name), clock=host.track.clock)
        monkeypatch.setattr(gpu_examination, name, timed)
    speed = dataclasses.replace(ASSIGNMENT.speed, sizes=(SIZE.axes,), dtype="float32", options=dict(SIZE.options))
    assignment = dataclasses.replace(ASSIGNMENT, speed=speed)
    examiner = types.SimpleNamespace(operation=OPERATION, stage=lambda name: contextlib.nullcontext())
    n_held, shows = [], []

    @contextlib.contextmanager
    def hold():
        n_held.append(1)
        yield

    for _ in range(2):
        course = gpu_examination._Course(
            assignment, examiner, host.gpu, host.rivals, gpu_examination.GpuRecord(), 3, None, hold
        )
        stopwatch, others = course._prepare_rivals()
        shows.append(host.rivals.show_cost)
        assert [(rival.name, rival.has_record(SIZE)) for rival in others] == [("naive", True), ("reference", True)]
        assert all(rival.interview.sandbox.frozen for rival in others)
        student = host.track.rival("student", ms=6.0)
        race = stopwatch.race(SIZE, student, others, budget_s=100.0, headline=True)
        assert stopwatch.timing(SIZE, race).ratio == pytest.approx(5.0, rel=0.02)
    assert len(n_held) == 3  # to learn what showing takes, and for each baseline's record
    assert shows[0] is shows[1]
    assert len(host.started) == 2


# -- what they are started with ----------------------------------------------------------------------------------------


@pytest.fixture
def cuda(monkeypatch):
    """workers.devices.cuda, without a driver."""
    pynvml = FakeNvml(FakeCard(uuid="GPU-0"), FakeCard(uuid="GPU-1"))
    return cuda_beside(types.ModuleType("cuda.bindings.runtime"), pynvml, monkeypatch)


@pytest.mark.parametrize("whose", ["baselines", "files"])
def test_only_files_have_a_limit_on_processor_time(cuda, monkeypatch, whose):
    """A baseline spins while it waits for the GPU, grading after grading."""
    made = []
    monkeypatch.setattr(cuda, "SandboxPool", lambda **kwargs: made.append(kwargs) or types.SimpleNamespace(close=int))
    pool = cuda.baselines_pool() if whose == "baselines" else cuda.cuda_pool(Limits(), size=2)
    with pool:
        pass
    (kwargs,) = made
    cgroup = types.SimpleNamespace(bounds_memory=True, bounds_processes=True)
    recipe = Recipe(isolated=False, limits=kwargs["limits"], env={}, gpu=True, program=None)
    rlimits, _ = recipe._rlimits(None, cgroup)
    assert rlimits.get("RLIMIT_CPU") == (None if whose == "baselines" else 480)
    assert rlimits["RLIMIT_NOFILE"] == kwargs["limits"].open_files
    assert CandidateLimits().cpu_s is not None


@pytest.mark.parametrize(
    ("visible", "arch"), [(None, "90"), ("GPU-1", "100"), ("1", "100"), ("GPU-7", None), ("", None)]
)
def test_candidates_are_told_what_to_compile_for_before_they_open_the_gpu(cuda, monkeypatch, visible, arch):
    sys.modules["pynvml"].cards[1].capability = (10, 0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert cuda.cuda_environment().get(ARCH) == arch


@pytest.mark.parametrize("trouble", ["no-library", "not-told"])
def test_where_that_is_not_known_they_compile_when_they_launch(cuda, trouble):
    nvml = sys.modules["pynvml"]
    if trouble == "no-library":
        nvml.broken = nvml.NVMLError(999)
    else:
        nvml.cards[0].lacks = {"capability"}
    assert ARCH not in cuda.cuda_environment()
