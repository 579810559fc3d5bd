"""Wrong in a timed window: an honest bug of that size, or work that was skipped? On a GPU made of CPU memory."""

import pytest
import torch
from gpu_fakes import FakeInterview
from test_windows import SIZE, Track

from grader.measurement import Failure, FailureKind
from workers.gpu_timing import WrongRowsError
from workers.interview import CandidateFailedError
from workers.large_calls import plain_call


@pytest.fixture
def track(monkeypatch):
    torch.set_num_threads(1)
    return Track(monkeypatch)


class Ended(FakeInterview):
    """Knows whether it was ended."""

    ended = False

    def end(self):
        self.ended = True


class Failing(Ended):
    """Fails in its first call, as an interview tells it."""

    kind = FailureKind.RAISES

    def answer(self, timeout_s):
        if self.log[-1] == "rehearse":
            raise CandidateFailedError(Failure(kind=self.kind, message="OutOfResources"), dead=False)
        return super().answer(timeout_s)


def fresh(track, call, kind=Ended):
    """What begins a candidate that has loaded the file."""
    begun = []

    def begin():
        begun.append(kind(track.rival("plain", ms=24.0, call=call).interview.candidate))
        return begun[-1]

    return begin, begun


def timed(track, call):
    """The error of a race in which rows were wrong."""
    with pytest.raises(WrongRowsError) as caught:
        track.race(track.rival("student", ms=24.0, call=call))
    return caught.value


def off_by_a_tile(honest):
    def call(q, k, v, is_causal):
        o, lse = honest(q, k, v, is_causal)
        o[:, 48:] *= 1.25
        return o, lse

    return call


def memoising(track):
    def wrap(honest):
        kept = {}

        def call(q, k, v, is_causal):
            if q.data_ptr() not in kept:
                kept[q.data_ptr()] = honest(q, k, v, is_causal)
            track.clock.pass_ms(6.0)
            return kept[q.data_ptr()]

        return call

    return wrap


def test_what_a_fresh_process_gets_wrong_too_is_wrong(track):
    error = timed(track, off_by_a_tile)
    begin, begun = fresh(track, off_by_a_tile)
    found = plain_call(begin, track.gpu, SIZE, error.wrong, error.wrong.inputs)
    assert (found.output, found.axes, found.dtype) == ("o", dict(SIZE.axes), "float32")
    assert 0 < found.n_wrong_rows <= found.n_rows
    assert found.rel_error > found.limit
    assert begun[0].ended


def test_what_a_fresh_process_gets_right_is_no_honest_bug(track):
    error = timed(track, memoising(track))
    begin, begun = fresh(track, memoising(track))
    assert plain_call(begin, track.gpu, SIZE, error.wrong, error.wrong.inputs) is None
    assert begun[0].ended


def test_the_plain_calls_are_those_that_were_wrong(track):
    def skipping(honest):
        calls = [0]

        def call(q, k, v, is_causal):
            calls[0] += 1
            o, lse = honest(q, k, v, is_causal)
            if calls[0] > 12 and calls[0] % 7 == 0:
                o.zero_()
            return o, lse

        return call

    error = timed(track, skipping)
    asked = []

    def watched(honest):
        def call(q, k, v, is_causal):
            asked.append(q.clone())
            return honest(q, k, v, is_causal)

        return call

    begin, _ = fresh(track, watched)
    assert plain_call(begin, track.gpu, SIZE, error.wrong, error.wrong.inputs) is None
    q = error.wrong.inputs.blocks["q"]
    assert [any(torch.equal(one, q[call]) for one in asked) for call in error.wrong.calls] == [True] * len(
        error.wrong.calls
    )


@pytest.mark.parametrize("kind", [FailureKind.RAISES, FailureKind.CRASHED])
def test_a_file_that_fails_when_called_plainly_failed_honestly(track, kind):
    begin, begun = fresh(track, lambda honest: honest, type("Kind", (Failing,), {"kind": kind}))
    found = plain_call(begin, track.gpu, SIZE, None, track.stopwatch().one_call(SIZE))
    assert found.failure.kind is kind
    assert begun[0].ended


def test_a_slow_call_says_nothing(track):
    begin, _ = fresh(track, lambda honest: honest, type("Slow", (Failing,), {"kind": FailureKind.TIME_LIMIT}))
    assert plain_call(begin, track.gpu, SIZE, None, track.stopwatch().one_call(SIZE)) is None
