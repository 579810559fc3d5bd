import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sandbox_jobs import LIGHT_CANDIDATE, LIMITS, cgroups_of, processes_of

from workers import cgroups
from workers.sandbox import SandboxPool


@pytest.fixture
def make_pool() -> Iterator[Any]:
    """Makes pools of light candidates, closes them, and sees to it that nothing of them is left."""
    pools: list[SandboxPool] = []

    def make(**changes: Any) -> SandboxPool:
        settings: dict[str, Any] = {
            "argv_env": {}, "arena_bytes": 1 << 20, "limits": LIMITS, "size": 1, "program": LIGHT_CANDIDATE,
        }  # fmt: skip
        pools.append(SandboxPool(**{**settings, **changes}))
        return pools[-1]

    mounts_before = Path("/proc/self/mountinfo").read_text()
    yield make
    for pool in pools:
        pool.close()
        assert cgroups_of(pool) == []
        assert processes_of(pool) == []
    assert Path("/proc/self/mountinfo").read_text() == mounts_before


@pytest.fixture(params=["v2", "v1", "signals"])
def mechanism(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Leaves one way to freeze and kill: cgroup v2's, v1's freezer, or signals to every process found."""
    where = cgroups.own_hierarchies()
    if request.param == "v2":
        if where.v2 is None or not os.access(where.v2, os.W_OK):
            pytest.skip("no cgroup v2 folder that we may write to")
    elif request.param == "v1":
        if not os.access(where.v1.get("freezer", "/nowhere"), os.W_OK):
            pytest.skip("no v1 freezer on this host, or not ours to write to")
        where = dataclasses.replace(where, v2=None)
    else:
        where = cgroups.Hierarchies(v1={}, v2=None, v2_controllers=frozenset())
    monkeypatch.setattr(cgroups, "own_hierarchies", lambda: where)
    return request.param
