"""When a pool starts candidates: ahead of need for a service, no more than asked for when one file is graded."""

import time


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
