"""Windows of calls by the examiner's clock, on a GPU made of CPU memory."""

import contextlib
import dataclasses
import itertools
import math
import sys
import threading
import types
import weakref
from pathlib import Path

import pytest
import torch
from gpu_fakes import Allocator, Clock, FakeGpu, FakeInterview, make_candidate

import reference
from grader.assignment import load_assignment
from grader.errors import GraderFault
from grader.judging import SCALAR_BYTES
from reference import timed as timed_operations
from workers import gpu_timing
from workers.claims import ClaimError
from workers.gpu_examination import Rivals, _Course
from workers.gpu_timing import (
    BaselineFailedError,
    Field,
    Operations,
    Rival,
    ShowCost,
    Size,
    Stopwatch,
    VoidError,
    WrongRowsError,
    input_bytes,
    learn_show_cost,
    window_seeds,
)
from workers.interview import CandidateFailedError

ASSIGNMENT = load_assignment(Path(__file__).parents[2] / "assignments" / "flash-attention-forward")
OPERATION = reference.load("attention.forward")
TIMED = timed_operations.load("attention.forward")
SIZE = Size(
    axes={"batch": 2, "queries": 64, "keys": 64, "head_dim": 16}, dtype=torch.float32, options={"is_causal": True}
)


class Track:
    """A clock, a GPU, and rivals on it that take the milliseconds they are given."""

    def __init__(self, monkeypatch):
        self.clock = Clock()
        self.gpu = FakeGpu(self.clock)
        self.monkeypatch = monkeypatch

    def rival(self, name, *, ms, call=None, n_restless=0):
        allocator = Allocator(2 * 64 * 16 * 4, 80 + n_restless, n_restless=n_restless)

        def honest(q, k, v, is_causal):
            self.clock.pass_ms(ms)
            made = OPERATION.naive({"q": q, "k": k, "v": v}, {"is_causal": is_causal})
            o, lse = allocator.empty(q.shape), allocator.empty(q.shape[:2])
            o.copy_(made["o"])
            lse.copy_(made["lse"])
            return o, lse

        candidate = make_candidate(
            self.gpu, self.clock, allocator, (call or (lambda _honest: _honest))(honest), self.monkeypatch
        )
        rival = Rival(name, FakeInterview(candidate), self.gpu, clock=self.clock)
        rival.open()
        return rival

    def stopwatch(self):
        shows = learn_show_cost(self.gpu, self.clock)
        watch = Stopwatch(ASSIGNMENT, OPERATION, TIMED, self.gpu, seed=3, show_cost=shows, clock=self.clock)
        watch.calibrate(SIZE)
        return watch

    def race(self, student, *others, headline=True):
        return self.stopwatch().race(
            SIZE, student, others or [self.rival("naive", ms=120.0), self.rival("reference", ms=12.0)],
            budget_s=100.0, headline=headline,
        )  # fmt: skip


@pytest.fixture
def track(monkeypatch):
    torch.set_num_threads(1)
    return Track(monkeypatch)


def test_an_honest_file_gets_its_time_and_its_ratio(track):
    student = track.rival("student", ms=24.0)
    watch = track.stopwatch()
    race = watch.race(
        SIZE,
        student,
        [track.rival("naive", ms=120.0), track.rival("reference", ms=12.0)],
        budget_s=100.0,
        headline=True,
    )
    found = watch.timing(SIZE, race)
    assert found.ratio == pytest.approx(5.0, rel=0.01)
    assert found.student_times_ms == pytest.approx([24.0] * 5, rel=0.01)
    assert not found.noisy
    assert not race.evidence
    # nothing lies elsewhere than in the rehearsal, whose operations are counted
    assert race.n_moved == 0
    assert not race.voids
    assert race.row_errors["o"] < 1e-6


@pytest.mark.parametrize("n_restless", [0, 2, 4, 6, 10, 14, 20, 31])
@pytest.mark.parametrize("name", ["student", "naive", "reference"])
def test_memory_that_moves_before_it_settles_costs_no_time_and_voids_nothing(track, name, n_restless):
    times_ms = {"student": 6.0, "naive": 30.0, "reference": 3.0}
    rivals = {one: track.rival(one, ms=ms, n_restless=n_restless if one == name else 0) for one, ms in times_ms.items()}
    watch = track.stopwatch()
    race = watch.race(SIZE, rivals["student"], [rivals["naive"], rivals["reference"]], budget_s=100.0, headline=True)
    for one, ms in times_ms.items():
        assert watch.per_call(race, one) == pytest.approx([ms] * len(race.times_ms[one]), rel=0.01)
    assert not race.evidence


def test_nobody_runs_while_inputs_are_written_or_others_are_timed(track, monkeypatch):
    rivals = [track.rival("student", ms=24.0), track.rival("naive", ms=120.0), track.rival("reference", ms=12.0)]
    running = []
    fill = Field.fill

    def watched_fill(self, clock):
        if self.n_calls > 4:
            running.append([one.name for one in rivals if not one.interview.sandbox.frozen])
        return fill(self, clock)

    watch = track.stopwatch()
    monkeypatch.setattr(Field, "fill", watched_fill)
    watch.race(SIZE, rivals[0], rivals[1:], budget_s=100.0, headline=False)
    assert running[1:] == [[]] * len(running[1:])


def test_every_call_of_a_window_has_inputs_of_its_own(track):
    seen = {}

    def recording(honest):
        def call(q, k, v, is_causal):
            seen[q.data_ptr()] = q.flatten()[:4].tolist()
            return honest(q, k, v, is_causal)

        return call

    track.race(track.rival("student", ms=12.0, call=recording), headline=False)
    assert len(seen) >= 3
    assert len({tuple(one) for one in seen.values()}) == len(seen)


def test_answers_from_memory_are_wrong_answers(track):
    def memoising(honest):
        kept = {}

        def call(q, k, v, is_causal):
            key = q.data_ptr()
            if key not in kept:
                kept[key] = honest(q, k, v, is_causal)
            track.clock.pass_ms(6.0)
            return kept[key]

        return call

    with pytest.raises(WrongRowsError):
        track.race(track.rival("student", ms=24.0, call=memoising))


def test_a_skipped_call_is_a_wrong_answer(track):
    def skipping(honest):
        calls = [0]

        def call(q, k, v, is_causal):
            calls[0] += 1
            o, lse = honest(q, k, v, is_causal)
            if calls[0] > 12 and calls[0] % 7 == 0:
                o.zero_()
            return o, lse

        return call

    with pytest.raises(WrongRowsError, match=r"of \d+ timed calls"):
        track.race(track.rival("student", ms=24.0, call=skipping))


def test_far_keys_skipped_show_in_the_planted_rows(track):
    def near_only(honest):
        def call(q, k, v, is_causal):
            o, lse = honest(q, k, v, is_causal)
            scores = q @ k.mT / math.sqrt(q.shape[-1])
            at = torch.arange(q.shape[1])
            near = (at[None, :] <= at[:, None]) & (at[None, :] > at[:, None] - 8)
            o.copy_(torch.softmax(scores.masked_fill(~near, -math.inf), -1) @ v)
            return o, lse

        return call

    with pytest.raises(WrongRowsError):
        track.race(track.rival("student", ms=24.0, call=near_only))


def test_work_that_comes_late_is_named(track):
    late = []

    def lazy(honest):
        calls = [0]

        def call(q, k, v, is_causal):
            calls[0] += 1
            o, lse = honest(q, k, v, is_causal)
            if calls[0] > 8:
                right = o.clone()
                o.fill_(1e3)
                late[:] = [*late[-8:], (weakref.ref(o), right)]
            return o, lse

        return call

    student = track.rival("student", ms=24.0, call=lazy)
    gather_again = student.gather_again

    def after_the_late_kernel(n_calls, rows):
        for o, right in late:
            if o() is not None:
                o().copy_(right)
        return gather_again(n_calls, rows)

    student.gather_again = after_the_late_kernel
    others = [track.rival("naive", ms=120.0), track.rival("reference", ms=12.0)]
    watch = track.stopwatch()
    with pytest.raises(WrongRowsError, match="was not there when the file said that it was done") as caught:
        watch.race(SIZE, student, others, budget_s=100.0, headline=False)
    assert caught.value.evidence.kind == "late-work"
    assert caught.value.wrong is None  # never taken for an honest bug


def test_one_call_that_does_the_work_of_all_is_noticed(track):
    def batching(honest):
        calls = [0]

        def call(q, k, v, is_causal):
            calls[0] += 1
            track.clock.pass_ms(30.0 if calls[0] == track.first else 0.0)
            return honest(q, k, v, is_causal)

        return call

    track.first = 0
    student = track.rival("student", ms=24.0, call=batching)
    window = student.window

    def first_is_slow(n_calls, rows):
        if n_calls == 1:
            track.clock.pass_ms(0.0)
        run = window(n_calls, rows)
        return run if n_calls != 1 else dataclasses.replace(run, window_ms=run.window_ms + 30.0)

    student.window = first_is_slow
    race = track.race(student)
    assert [one.kind for one in race.evidence] == ["first-call-disagrees"]


def test_a_kernel_that_runs_while_inputs_are_written_voids_the_window(track):
    student = track.rival("student", ms=24.0)
    others = [track.rival("naive", ms=120.0), track.rival("reference", ms=12.0)]
    watch = track.stopwatch()
    track.gpu.on_settle = lambda: track.clock.pass_ms(5.0)
    with pytest.raises(VoidError, match="writing the inputs took"):
        watch.race(SIZE, student, others, budget_s=100.0, headline=False)


def test_memory_that_was_never_mapped_voids_the_window(track):
    student = track.rival("student", ms=24.0)
    student.open()
    inputs = Field(track.gpu, OPERATION, TIMED, SIZE, 4, seeds=window_seeds(1, "test"))
    student.prepare(inputs, 4)
    student.rehearse(4)
    student._learn(4, [ptr for one in student._tables[4] for ptr in one.tolist()][:8])
    with pytest.raises(VoidError, match="not there at the rehearsal"):
        student._learn(4, [64 + 65536 * number for number in range(8)])


def test_no_two_windows_have_the_same_inputs(track, monkeypatch):
    """Nor do two races of one size, nor the memory sweep: what was seen once answers nothing later."""
    seen = []
    fill = Field.fill

    def noting(self, clock):
        took_ms = fill(self, clock)
        seen.append(self.blocks["q"].flatten()[:64].clone())
        return took_ms

    monkeypatch.setattr(Field, "fill", noting)
    watch = track.stopwatch()
    rivals = [track.rival("student", ms=24.0), track.rival("naive", ms=120.0), track.rival("reference", ms=12.0)]
    for _ in range(2):
        watch.race(SIZE, rivals[0], rivals[1:], budget_s=100.0, headline=False)
    Field(track.gpu, OPERATION, TIMED, SIZE, 1, seeds=window_seeds(3, "memory-128")).fill(track.clock)
    assert len(seen) > 20
    assert len({tuple(one.tolist()) for one in seen}) == len(seen)


def test_inputs_written_over_in_a_window_are_noticed_before_anything_is_computed_from_them(track):
    """A file that zeroes its inputs and answers zero would be right about the inputs it left."""

    def zeroing(honest):
        calls = [0]

        def call(q, k, v, is_causal):
            calls[0] += 1
            if calls[0] > 12:
                for tensor in (q, k, v):
                    tensor.zero_()
            return honest(q, k, v, is_causal)

        return call

    with pytest.raises(WrongRowsError, match="inputs were written over") as caught:
        track.race(track.rival("student", ms=24.0, call=zeroing))
    assert caught.value.evidence.kind == "inputs-changed"


@pytest.mark.parametrize(
    "moved", [lambda x: x.flip(1), lambda x: x.roll(1, dims=1), lambda x: -x], ids=["flipped", "rolled", "negated"]
)
def test_inputs_that_are_not_what_was_shown_are_counted(track, moved):
    inputs = Field(track.gpu, OPERATION, TIMED, SIZE, 6, seeds=window_seeds(1, "test"))
    inputs.fill(track.clock)
    inputs.show()
    assert inputs.n_changed() == 0
    own, shown = inputs.blocks["k"][1], track.gpu.arena[: inputs.used_bytes].view(torch.float32)
    at = (own.data_ptr() - track.gpu.private.data_ptr()) // 4
    shown[at : at + own.numel()] = moved(own).flatten()
    assert inputs.n_changed() == 1


def test_nothing_of_a_windows_inputs_can_be_read_before_the_clock_runs(track, monkeypatch):
    """Work that waits on the GPU for its inputs would otherwise be done when the clock starts."""
    student = track.rival("student", ms=24.0)
    others = [track.rival("naive", ms=120.0), track.rival("reference", ms=12.0)]
    watch = track.stopwatch()
    rows, show = Field.rows, Field.show
    chosen, n_hidden = [], []

    def chooses(self):
        chosen[:] = [self]
        return rows(self)

    def first_looks(clock):
        def told():
            for inputs in chosen:
                arena, own = (
                    memory[: inputs.used_bytes].view(torch.int64) for memory in (track.gpu.arena, track.gpu.private)
                )
                n_hidden.append(int((arena != own).sum()) / len(own))
            chosen.clear()
            return clock()

        return told

    def slow(self):
        show(self)
        track.clock.pass_ms(7.0)

    monkeypatch.setattr(Field, "rows", chooses)
    monkeypatch.setattr(Field, "show", slow)
    watch._show_cost = ShowCost(none_ms=7.0, ms_a_byte=0.0)
    student._clock = first_looks(student._clock)
    race = watch.race(SIZE, student, others, budget_s=100.0, headline=True)
    # those of the pilot apart, which are looked at twice
    assert len(n_hidden) > 10
    assert min(n_hidden[-10:]) > 0.9
    # that they are written counts for nobody
    assert watch.per_call(race, "student") == pytest.approx([24.0] * 5, rel=0.01)
    assert max(race.empty_ms) < 1.0


def test_what_writing_inputs_takes_is_learnt_on_the_idle_gpu(track, monkeypatch):
    """What it takes longer with somebody's kernel at work is in the window of whose kernel it is."""
    watch = track.stopwatch()
    assert watch._show_cost.none_ms == pytest.approx(track.gpu.settle_ms)
    assert watch._show_cost.ms_a_byte == 0.0
    assert bool((track.gpu.arena == 0xFF).all())  # and nothing of it is left there
    show = Field.show

    def beside_a_kernel(self):
        show(self)
        track.clock.pass_ms(11.0)

    monkeypatch.setattr(Field, "show", beside_a_kernel)
    others = [track.rival("naive", ms=120.0), track.rival("reference", ms=12.0)]
    race = watch.race(SIZE, track.rival("student", ms=24.0), others, budget_s=100.0, headline=True)
    took_ms = 24.0 + 11.0 / race.n_calls["student"]
    assert watch.per_call(race, "student") == pytest.approx([took_ms] * len(race.times_ms["student"]), rel=0.01)


class Copies:
    """What showing takes on this GPU: so long for none and for a full arena, a hair more or less each time."""

    def __init__(self, track, monkeypatch, *, none_ms, all_ms):
        self.track, self.none_ms, self.all_ms = track, none_ms, all_ms
        self.jitter = itertools.cycle([1.0, 1.002, 0.96, 0.999, 1.003, 1.06, 0.998])
        self.shown = []
        monkeypatch.setattr(gpu_timing, "show_bytes", self)

    def __call__(self, gpu, n_bytes):
        self.shown.append(n_bytes)
        gpu.arena[:n_bytes].copy_(gpu.private[:n_bytes])
        self.track.clock.pass_ms((self.none_ms + self.all_ms * n_bytes / len(gpu.arena)) * next(self.jitter))


@pytest.mark.parametrize("full", [1.0, 0.5, 0.1])
def test_what_showing_takes_is_known_to_a_hundredth_of_a_window_that_lasts_as_long(track, monkeypatch, full):
    """The fastest of three copies of a seventh, times seven, was several times as far off."""
    Copies(track, monkeypatch, none_ms=0.02, all_ms=14.0)
    cost = learn_show_cost(track.gpu, track.clock)
    n_bytes = int(full * len(track.gpu.arena))
    assert cost.ms(n_bytes) == pytest.approx(0.02 + 14.0 * full + track.gpu.settle_ms, abs=0.01 * 18.0)
    assert cost.none_ms >= 0.0


def test_a_gpu_that_lay_idle_is_learnt_at_the_clocks_of_one_that_works(track, monkeypatch):
    """An H200 at rest runs at a sixth of them; what is learnt then would be subtracted from everybody's windows."""
    copies = Copies(track, monkeypatch, none_ms=0.02, all_ms=14.0)
    copies.jitter = itertools.chain([3.0] * 12, itertools.repeat(1.0))
    cost = learn_show_cost(track.gpu, track.clock)
    assert cost.ms(len(track.gpu.arena)) == pytest.approx(14.02 + track.gpu.settle_ms, rel=1e-6)


def test_a_call_alone_is_shown_its_own_inputs_and_no_others(track, monkeypatch):
    """Those of a whole window take a hundred times as long as a short call: an error of 3 % would be the file's."""
    own = input_bytes(TIMED, SIZE, 1)
    copies = Copies(track, monkeypatch, none_ms=0.0, all_ms=0.0)
    watch = track.stopwatch()
    student = track.rival("student", ms=4.0)
    window, alone = student.window, []

    def noting(n_calls, rows):
        copies.shown.clear()
        run = window(n_calls, rows)
        if n_calls == 1:
            alone.append(list(copies.shown))
        return run

    student.window = noting
    others = [track.rival("naive", ms=120.0), track.rival("reference", ms=12.0)]
    race = watch.race(SIZE, student, others, budget_s=100.0, headline=True)
    assert alone[-5:] == [[own]] * 5
    assert race.n_calls["student"] > 20
    assert race.evidence == []


def test_the_same_size_with_another_option_is_another_size():
    keys = {dataclasses.replace(SIZE, options=options).key for options in ({}, {"is_causal": True}, {"p": 0.1})}
    assert len(keys) == 3


def counted_at(track, make, n_calls=250):
    """The torch operations of a file's calls in a window, as the examination hears of them."""
    student = track.rival("student", ms=0.1, call=make)
    inputs = Field(track.gpu, OPERATION, TIMED, SIZE, n_calls, seeds=window_seeds(1, "test"))
    student.prepare(inputs, n_calls)
    student.rehearse(n_calls, most=1)
    return student.operations.torch_ops()


def cheap(track, extra):
    """Two zeroed outputs and something of torch's in each call; shared, for nothing here looks at them."""
    kept = []

    def make(_honest):
        def call(q, k, v, is_causal):
            extra(q, k)
            kept.append((torch.zeros(q.shape), torch.zeros(q.shape[:2])))
            return kept[-1]

        return call

    return make


@pytest.fixture
def unmapped(monkeypatch):
    """Nothing is read of outputs here, so where they lie does not matter."""
    monkeypatch.setattr(Rival, "_learn", lambda self, n_calls, ptrs: None)


def test_one_number_a_call_is_no_torch_that_computes_however_many_calls_there_are(track, unmapped):
    found = counted_at(track, cheap(track, lambda q, k: torch.sqrt(torch.tensor(float(q.shape[-1])))))
    assert [(op.op, op.count, op.size_bytes) for op in found] == [("sqrt", 1, 4)]
    assert all(op.size_bytes <= SCALAR_BYTES for op in found)


def test_a_product_in_one_call_of_many_is_counted_whole(track, unmapped):
    calls = itertools.count(1)
    found = counted_at(track, cheap(track, lambda q, k: q @ k.mT if next(calls) == 200 else None))
    assert ("bmm", 2 * 64 * 64 * 4) in [(op.op, op.size_bytes) for op in found]


def test_a_rehearsal_is_run_as_windows_are(track):
    """What lies where could hang on whether torch's operations are counted."""
    modes = []

    def noting(honest):
        def call(q, k, v, is_causal):
            modes.append(bool(torch.utils._python_dispatch._get_current_dispatch_mode_stack()))
            return honest(q, k, v, is_causal)

        return call

    rivals = {name: track.rival(name, ms=1.0, call=noting) for name in ("student", "naive")}
    inputs = Field(track.gpu, OPERATION, TIMED, SIZE, 4, seeds=window_seeds(1, "test"))
    for name, counted in (("student", 4), ("naive", 0)):
        modes.clear()
        rivals[name].prepare(inputs, 4)
        rivals[name].rehearse(4, most=1)
        assert modes == [True] * counted + [False] * 4


def calls_of_window():
    """How many calls the candidate is about to make, as a file can find out."""
    frame = sys._getframe()
    while frame.f_code.co_qualname not in ("_Plan.run", "CudaHalf._counts_of"):
        frame = frame.f_back
    return frame.f_locals["k"]


def test_a_call_alone_must_be_right_too(track):
    """A file that knows that it is looked at alone could otherwise hurry with garbage."""

    def hurried(honest):
        def call(q, k, v, is_causal):
            o, lse = honest(q, k, v, is_causal)
            if calls_of_window() == 1:
                o.zero_()
            return o, lse

        return call

    with pytest.raises(WrongRowsError, match="o of 1 of 1 timed calls"):
        track.race(track.rival("student", ms=24.0, call=hurried))


def test_a_call_alone_that_cannot_be_timed_says_nothing(track, monkeypatch):
    """A kernel left to work in those windows would otherwise have them left out."""
    student = track.rival("student", ms=24.0)
    rehearse = student.rehearse

    def leaves_a_kernel(n_calls, **most):
        rehearse(n_calls, **most)
        if n_calls == 1:
            track.gpu.on_settle = lambda: track.clock.pass_ms(50.0)

    watch, others = track.stopwatch(), [track.rival("naive", ms=120.0), track.rival("reference", ms=12.0)]
    monkeypatch.setattr(student, "rehearse", leaves_a_kernel)
    monkeypatch.setattr(watch, "_pilot_ms", lambda rival, inputs, size: 24.0)
    with pytest.raises(VoidError, match="writing the inputs took"):
        watch.race(SIZE, student, others, budget_s=100.0, headline=False)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_zeroing_kernel_that_comes_after_the_look_at_the_inputs_gains_nothing(track, monkeypatch, name):
    """What is expected comes from inputs that no candidate can reach."""

    def zeros(honest):
        def call(q, k, v, is_causal):
            o, lse = honest(q, k, v, is_causal)
            if track.racing:
                o.zero_()
                lse.zero_()
            return o, lse

        return call

    n_changed = Field.n_changed

    def then_zeroed(self):
        found = n_changed(self)
        block = self.blocks[name]
        start = block.data_ptr() - track.gpu.private.data_ptr()
        track.gpu.arena[start : start + block.nbytes] = 0
        track.racing = True
        return found

    track.racing = False
    monkeypatch.setattr(Field, "n_changed", then_zeroed)
    with pytest.raises(WrongRowsError, match=r"o of \d+ of \d+ timed calls"):
        track.race(track.rival("student", ms=24.0, call=zeros), headline=False)


def test_nothing_that_a_file_left_on_the_gpu_sees_or_spoils_a_baselines_window(track):
    """It could wait there for the inputs, to work while a baseline is timed, or overwrite them, so that it is wrong."""
    before = []

    def spoiling(honest):
        def call(q, k, v, is_causal):
            assert 0 <= q.data_ptr() - track.gpu.private.data_ptr() < len(track.gpu.private)
            if before:
                assert torch.equal(before[0], track.gpu.arena)  # nothing came to wake it
            track.gpu.arena.random_()
            before[:] = [track.gpu.arena.clone()]
            return honest(q, k, v, is_causal)

        return call

    def forgetting(honest):
        def call(q, k, v, is_causal):
            before.clear()
            return honest(q, k, v, is_causal)

        return call

    times_ms = {"naive": 120.0, "reference": 12.0}
    others = [track.rival(one, ms=ms, call=spoiling) for one, ms in times_ms.items()]
    watch = track.stopwatch()
    student = track.rival("student", ms=24.0, call=forgetting)
    race = watch.race(SIZE, student, others, budget_s=100.0, headline=False)
    assert not race.voids
    assert not race.evidence
    assert watch.per_call(race, "naive") == pytest.approx([120.0] * 3, rel=0.01)


def disturbed(honest):
    def call(q, k, v, is_causal):
        o, lse = honest(q, k, v, is_causal)
        return o.mul_(50.0), lse.mul_(50.0)

    return call


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9], ids=["zeros", "halves", "nine-tenths"])
def test_no_error_of_the_baselines_makes_garbage_right(track, share):
    """Inputs that were changed and changed back again leave no trace but in the baseline's results."""

    def garbage(honest):
        def call(q, k, v, is_causal):
            o, lse = honest(q, k, v, is_causal)
            return o.mul_(share), lse

        return call

    others = [track.rival("naive", ms=120.0, call=disturbed), track.rival("reference", ms=12.0)]
    with pytest.raises(WrongRowsError):
        track.race(track.rival("student", ms=24.0, call=garbage), *others, headline=False)


def test_an_honest_file_passes_beside_a_baseline_that_is_wrong(track):
    others = [track.rival("naive", ms=120.0, call=disturbed), track.rival("reference", ms=12.0)]
    assert track.race(track.rival("student", ms=24.0), *others, headline=False).times_ms["student"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("error", "counts"), [(1e-6, 1e-6), (0.5, None), (math.inf, None)])
def test_a_baselines_error_counts_up_to_a_multiple_of_the_tolerance(track, dtype, error, counts):
    tolerance = ASSIGNMENT.tolerance
    exact = {one: tolerance.limit(baseline_rel_error=0.0, dtype=one, largest_score=16.0, gradient=False)
             for one in tolerance.floor}  # fmt: skip
    most = 4 * exact["float16" if dtype == "float32" else dtype]
    limit = track.stopwatch()._limit("o", getattr(torch, dtype), error)
    assert limit == pytest.approx(exact[dtype] + tolerance.slack * (most if counts is None else counts))


@pytest.mark.parametrize("n_slow", [6, 9, 14], ids=["pilot", "rehearsal", "first-windows"])
def test_a_file_that_dawdles_at_first_is_timed_on_as_many_calls_as_any(track, n_slow):
    calls = itertools.count()

    def dawdling(honest):
        def call(q, k, v, is_causal):
            track.clock.pass_ms(100.0 if next(calls) < n_slow else 0.0)
            return honest(q, k, v, is_causal)

        return call

    watch, others = track.stopwatch(), [track.rival("naive", ms=120.0), track.rival("reference", ms=12.0)]
    student = track.rival("student", ms=4.0, call=dawdling)
    race = watch.race(SIZE, student, others, budget_s=100.0, headline=True)
    assert race.n_calls["student"] >= 20
    assert watch.per_call(race, "student") == pytest.approx([4.0] * len(race.times_ms["student"]), rel=0.02)


def test_a_file_that_is_faster_in_every_window_is_not_timed(track):
    def hastening(honest):
        def call(q, k, v, is_causal):
            track.clock.pass_ms(48.0 / calls_of_window())
            return honest(q, k, v, is_causal)

        return call

    with pytest.raises(VoidError, match="less time in each window"):
        track.race(track.rival("student", ms=0.0, call=hastening))


def test_torch_that_computes_in_later_calls_of_a_window_alone_is_noted(track):
    """Also in a thread; and what only allocates, copies and fills is none of it."""

    def borrowing(honest):
        calls = itertools.count()

        def call(q, k, v, is_causal):
            o, lse = honest(q, k, v, is_causal)
            if next(calls) > 4:
                worker = threading.Thread(target=lambda: lse.copy_(torch.erf(lse)))
                worker.start()
                worker.join()
            return o, lse

        return call

    student = track.rival("student", ms=24.0, call=borrowing)
    with pytest.raises(WrongRowsError):
        track.race(student, headline=False)
    assert "erf" in {op.op for op in student.operations.torch_ops()}
    assert "copy_" not in {op.op for op in student.operations.torch_ops()}


@pytest.mark.parametrize("facts", [[], "no", {"torch_ops": [{"op": 3}]}, {"library_calls": {}}])
def test_what_a_file_says_of_torch_is_read_as_a_claim(track, facts):
    student = track.rival("student", ms=24.0)
    answer = student.interview.answer
    student.interview.answer = lambda timeout_s: dict(answer(timeout_s)) | {"facts": facts}
    with pytest.raises(ClaimError):
        track.race(student, headline=False)


def test_only_so_many_operations_are_kept(track):
    kept = Operations()
    for first in range(0, 1000, 20):
        rows = [{"op": f"op{number}", "count": 1, "bytes": number} for number in range(first, first + 20)]
        kept.add({"facts": {"torch_ops": rows}})
    assert len(kept.torch_ops()) == 64


def test_a_result_given_to_two_calls_is_noticed_by_its_address(track):
    kept = []

    def lending(honest):
        def call(q, k, v, is_causal):
            kept.append(honest(q, k, v, is_causal))
            return kept[-1] if len(kept) < 3 else kept[0]

        return call

    with pytest.raises(WrongRowsError, match="memory that another call returned") as caught:
        track.race(track.rival("student", ms=24.0, call=lending))
    assert caught.value.evidence.kind == "outputs-shared"


@pytest.mark.parametrize("told", [0.001, 0.0, 300.0], ids=["patched", "nothing", "too-much"])
def test_events_that_tell_another_story_than_the_clock_are_for_staff_to_see(track, told, monkeypatch):
    student = track.rival("student", ms=24.0)
    answer = student.interview.answer

    def with_own_events(timeout_s):
        said = answer(timeout_s)
        return said | {"ms": told} if "ms" in said else said

    student.interview.answer = with_own_events
    race = track.race(student)
    assert [one.kind for one in race.evidence] == ["events-disagree"]


def test_memory_is_unmapped_at_the_end(track):
    student = track.rival("student", ms=24.0)
    others = [track.rival("naive", ms=120.0), track.rival("reference", ms=12.0)]
    track.race(student, *others, headline=False)
    student.close()
    assert sorted(track.gpu.mapped) == sorted(start for other in others for start in other._starts)
    for other in others:
        other.close()
    assert track.gpu.mapped == []


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"shape": [1, 1, 1 << 50], "strides": [0, 0, 0]}, id="another-shape"),
        pytest.param({"dtype": "float8_e4m3fn"}, id="a-format-we-do-not-read"),
        pytest.param({"name": "oo"}, id="another-name"),
        pytest.param({"strides": [-4, 16, 1]}, id="negative-strides"),
    ],
)
def test_outputs_are_read_only_as_what_they_must_be(track, change):
    student = track.rival("student", ms=24.0)
    inputs = Field(track.gpu, OPERATION, TIMED, SIZE, 4, seeds=window_seeds(1, "test"))
    student.prepare(inputs, 4)
    answer = student.interview.answer

    def lie(timeout_s):
        said = answer(timeout_s)
        if said["op"] == "rehearsed":
            said["outputs"][0] |= change
        return said

    student.interview.answer = lie
    with pytest.raises(ClaimError):
        student.rehearse(4)


def test_a_baseline_that_gave_its_memory_back_maps_nothing_and_runs_again(track):
    """Baselines of several operations do not fit beside a student's windows: those that wait give their memory back."""
    student, naive, reference_ = (
        track.rival(name, ms=ms) for name, ms in (("student", 24), ("naive", 120), ("reference", 12))
    )
    watch = track.stopwatch()
    first = watch.race(SIZE, student, [naive, reference_], budget_s=100.0, headline=False)
    naive.trim()
    naive.trim()  # it has nothing more to give
    assert naive.interview.log[-3:].count("trim") == 1
    assert naive.interview.sandbox.frozen
    assert not naive._mapped
    second = watch.race(SIZE, student, [naive, reference_], budget_s=100.0, headline=False)
    assert watch.per_call(second, "naive") == pytest.approx(watch.per_call(first, "naive"), rel=0.02)


def broken_after(n_calls):
    def make(honest):
        left = [n_calls]

        def call(q, k, v, is_causal):
            left[0] -= 1
            if left[0] < 0:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            return honest(q, k, v, is_causal)

        return call

    return make


@pytest.mark.parametrize(
    ("name", "n_calls"),
    [("naive", 0), ("naive", 2), ("naive", 12), ("reference", 0), ("reference", 3), ("reference", 40)],
)
def test_a_baseline_that_fails_is_no_failure_of_the_students(track, name, n_calls):
    rivals = {
        one: track.rival(one, ms=ms, call=broken_after(n_calls) if one == name else None)
        for one, ms in {"naive": 30.0, "reference": 3.0}.items()
    }
    with pytest.raises(BaselineFailedError, match=f"the {name} baseline: .*illegal memory access") as found:
        track.race(track.rival("student", ms=6.0), *rivals.values())
    assert found.value.rival is rivals[name]


def test_a_student_that_fails_is_told_as_one(track):
    with pytest.raises(CandidateFailedError, match="illegal memory access"):
        track.race(track.rival("student", ms=6.0, call=broken_after(40)))


@pytest.fixture
def course():
    """The part of an examination that races, with its sandboxes at rest."""
    made = _Course.__new__(_Course)
    made._examiner = types.SimpleNamespace(sandboxes=types.SimpleNamespace(hold=contextlib.nullcontext))
    made._rivals = Rivals(None, None)
    return made


def test_a_file_is_graded_without_a_reference_that_fails(track, course):
    naive, reference_kernel = track.rival("naive", ms=30.0), track.rival("reference", ms=3.0, call=broken_after(40))
    others = [naive, reference_kernel]
    _, found = course._race_once_or_twice(track.stopwatch(), track.rival("student", ms=6.0), others, SIZE, True)
    assert found.ratio == pytest.approx(5.0, rel=0.01)
    assert found.reference_times_ms == ()
    assert others == [naive]
    assert reference_kernel.interview.ended


def test_without_the_naive_baseline_nothing_is_graded_and_nobody_blamed(track, course):
    others = [track.rival("naive", ms=30.0, call=broken_after(12)), track.rival("reference", ms=3.0)]
    with pytest.raises(GraderFault, match="the naive baseline"):
        course._race_once_or_twice(track.stopwatch(), track.rival("student", ms=6.0), others, SIZE, True)
