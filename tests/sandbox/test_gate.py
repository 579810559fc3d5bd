"""Candidates that get ready keep off a device on which somebody is measured."""

import threading
import time

import pytest
from sandbox_jobs import HERE

from workers import gate


@pytest.fixture
def pool(make_pool):
    return make_pool(program=HERE / "gated_candidate.py", size=2)


def wait_for(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


def arenas(pool):
    return [one.arena for one in list(pool._started)]


def test_who_gets_ready_meanwhile_waits_at_the_gate_and_then_goes_on(pool):
    with pool.hold():
        wait_for(lambda: len(arenas(pool)) == 2 and all(arena[2] for arena in arenas(pool)))
        time.sleep(0.2)
        assert [arena[3] for arena in arenas(pool)] == [0, 0]
    wait_for(lambda: all(arena[3] for arena in arenas(pool)))
    assert pool.take(10).kill().cause == "killed"


def test_who_holds_twice_or_with_others_lets_nobody_in_before_the_last_lets_go(pool):
    with pool.hold():
        with pool.hold():
            wait_for(lambda: len(arenas(pool)) == 2 and all(arena[2] for arena in arenas(pool)))
        time.sleep(0.1)
        assert [arena[3] for arena in arenas(pool)] == [0, 0]
    wait_for(lambda: all(arena[3] for arena in arenas(pool)))


def test_nothing_begins_before_who_is_at_it_is_done(pool):
    wait_for(lambda: any(gate.is_busy(arena) for arena in arenas(pool)))
    with pool.hold():
        assert not any(gate.is_busy(arena) for arena in arenas(pool))


def test_who_is_waited_for_may_go_through(pool):
    with pool.hold():
        sandbox = pool.take(10)  # would wait for ever at a closed gate
        assert sandbox.arena[3] == 1
        sandbox.kill()


def test_the_memory_of_a_candidate_that_was_handed_out_is_left_alone(pool):
    sandbox = pool.take(10)
    sandbox.arena[:4] = b"\x07\x08\x09\x0a"
    with pool.hold():
        assert sandbox.arena[:4] == b"\x07\x08\x09\x0a"
    assert sandbox.arena[:4] == b"\x07\x08\x09\x0a"
    sandbox.kill()


def test_a_candidate_that_stays_inside_does_not_stop_the_grading(pool, monkeypatch):
    monkeypatch.setattr("workers.sandbox._GATE_LIMIT_S", 0.1)
    wait_for(lambda: any(gate.is_busy(arena) for arena in arenas(pool)))
    began = time.monotonic()
    with pool.hold():
        assert time.monotonic() - began < 0.25


def test_holding_and_taking_from_many_threads_strands_nobody(pool):
    taken = []

    def take():
        sandbox = pool.take(20)
        taken.append(sandbox.arena[3])
        sandbox.kill()

    threads = [threading.Thread(target=take) for _ in range(6)]
    for thread in threads:
        thread.start()
    for _ in range(10):
        with pool.hold():
            time.sleep(0.05)
    for thread in threads:
        thread.join(30)
    assert taken == [1] * 6


def test_one_can_wait_until_they_need_nothing_but_the_device(pool):
    with pool.hold():
        pool.await_gate(20.0)
        assert [gate.waits(arena) for arena in arenas(pool)] == [True] * 2
        assert [arena[3] for arena in arenas(pool)] == [0, 0]
        began = time.monotonic()
        pool.take(10).kill()  # another one starts in its place
        pool.await_gate(0.0)
        assert time.monotonic() - began < 10.0


def test_waiting_for_the_gate_ends_where_nobody_comes(make_pool):
    pool = make_pool(program=HERE / "gated_candidate.py", size=0, refill=False)
    with pool.hold():
        began = time.monotonic()
        pool.await_gate(0.3)
        assert 0.2 < time.monotonic() - began < 5.0


def test_what_did_not_go_well_while_one_got_ready_is_in_the_log(pool, caplog):
    pool.take(10).kill()
    assert "a candidate got ready, but: no C compiler" in caplog.text
