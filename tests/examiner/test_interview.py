"""How long a candidate is waited for: each call has a limit, and all calls of a hand-in together have one."""

import types

import pytest

from grader.measurement import FailureKind
from workers import interview
from workers.interview import Allowance, CandidateFailedError, Interview
from workers.protocol import TimedOutError


class Candidate:
    """Sandbox and channel in one: it answers `takes_s` after it was asked, on a clock that only waiting moves."""

    def __init__(self, monkeypatch, takes_s):
        self.now, self.takes_s = 0.0, takes_s
        self.channel, self.killed = self, False
        monkeypatch.setattr(interview, "time", types.SimpleNamespace(monotonic=self.monotonic))

    def monotonic(self):
        self.now += 1e-6  # who spins passes the time too
        return self.now

    def send(self, message):
        self.answer, self.ready_at = {"op": "done", "request": message["request"]}, self.now + self.takes_s

    def has_input(self):
        self.now += 0.01
        return self.now >= self.ready_at

    def receive(self, timeout_s):
        self.now = min(self.ready_at, self.now + timeout_s) if self.now < self.ready_at else self.now
        if self.now < self.ready_at:
            raise TimedOutError
        return self.answer

    def over_limit(self):
        return None

    def n_started_processes(self):
        return 0

    def kill(self):
        self.killed = True
        return types.SimpleNamespace(processes_left=0)


def asked(one, *, spins=False):
    one.ask({"op": "rehearse"}, stage="timing")
    if spins:
        one.spin(1.0)
    return one.answer(60.0)


@pytest.mark.parametrize("takes_s", [0.2, 0.9, 5.0, 55.0])
@pytest.mark.parametrize("spins", [False, True], ids=["asleep", "spinning"])
def test_calls_that_each_keep_to_their_limit_end_at_that_of_all_together(monkeypatch, takes_s, spins):
    candidate = Candidate(monkeypatch, takes_s)
    one = Interview(candidate, Allowance(120.0))
    with pytest.raises(CandidateFailedError, match="took 120 s, the limit for all of them together") as found:
        [asked(one, spins=spins) for _ in range(10_000)]
    assert found.value.failure.kind is FailureKind.TIME_LIMIT
    assert candidate.killed
    assert candidate.now == pytest.approx(120.0, abs=1.0)


def test_what_we_do_between_calls_is_not_theirs(monkeypatch):
    candidate = Candidate(monkeypatch, 1.0)
    one = Interview(candidate, Allowance(10.0))
    for _ in range(9):
        asked(one)
        candidate.now += 500.0


def test_candidates_of_one_hand_in_share_what_is_left(monkeypatch):
    candidate, waits = Candidate(monkeypatch, 30.0), Allowance(100.0)
    for _ in range(3):
        asked(Interview(candidate, waits))
    with pytest.raises(CandidateFailedError, match="all of them together"):
        asked(Interview(candidate, waits))


@pytest.mark.parametrize("allowance", [None, Allowance(1000.0)], ids=["ours", "a-file"])
def test_one_call_has_its_own_limit(monkeypatch, allowance):
    candidate = Candidate(monkeypatch, 70.0)
    with pytest.raises(CandidateFailedError, match="still running after 60 s, the limit for one call"):
        asked(Interview(candidate, allowance))
    assert candidate.now == pytest.approx(60.0, abs=1.0)
