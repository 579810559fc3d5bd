"""When a pool starts candidates: ahead of need for a service, no more than asked for when one file is graded."""

import time

import pytest

from workers.sandbox import Sandbox, SandboxUnavailable


def test_without_refill_no_more_are_started_than_asked_for(make_pool):
    pool = make_pool(size=2, refill=False)
    taken = [pool.take(10), pool.take(10)]
    time.sleep(0.3)
    assert len(pool._sandboxes) == 2
    taken.append(pool.take(10))  # somebody waits, so one more is started
    assert len({sandbox.pid for sandbox in taken}) == 3


def test_with_refill_another_is_started_as_soon_as_one_was_taken(make_pool):
    pool = make_pool(size=1)
    pool.take(10)
    deadline = time.monotonic() + 10
    while len(pool._sandboxes) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(pool._sandboxes) == 2


def test_a_host_out_of_threads_costs_one_candidate_and_not_the_pool(make_pool, monkeypatch):
    make, failed = Sandbox.__init__, []

    def fail_once(self, **given):
        if not failed:
            failed.append(given["process"])
            raise RuntimeError("can't start new thread")
        make(self, **given)

    monkeypatch.setattr(Sandbox, "__init__", fail_once)
    pool = make_pool(size=1)
    with pytest.raises(SandboxUnavailable, match="can't start new thread"):
        pool.take(10)
    assert failed[0].returncode is not None
    assert pool.take(10).pid != failed[0].pid
