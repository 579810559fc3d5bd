"""Nothing of one hand-in is there for the next, even where it gets the same user and the same slot."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
from hostile_cases import assignment_for, complaints, hostile, said

from grader.judging import grade_json, judge
from workers.isolation import Limits, Recipe
from workers.sandbox import SandboxPool

LEFTOVERS = next(case for case in hostile() if case.name == "leftovers")


@pytest.fixture
def two_slots() -> Iterator[SandboxPool]:
    """A pool of which every candidate has one of two users, so that the third examination meets the first one's."""
    from workers.devices.cpu import ARENA_BYTES

    pool = SandboxPool(
        argv_env={"TRITON_INTERPRET": "1"}, arena_bytes=ARENA_BYTES, limits=Limits(), size=2, slots=[970, 971]
    )
    yield pool
    pool.close()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_what_one_hand_in_leaves_the_next_does_not_find(two_slots):
    from workers.examination import examine

    few = dataclasses.replace(LEFTOVERS, probes=("random",))
    for _ in range(3):
        assignment = assignment_for(few)
        found = examine(assignment, few.source(), sandboxes=two_slots)
        assert complaints(few, found, grade_json(judge(assignment, found))) == []
        assert "alone" in said(found)


@pytest.mark.parametrize("gpu", [False, True], ids=["interpreter", "gpu"])
def test_every_cache_of_a_compiler_lies_in_the_scratch_folder_of_one_process(gpu):
    recipe = Recipe(isolated=False, limits=Limits(), env={}, gpu=gpu, program=None)
    env = recipe._environment("/w")
    caches = {name: value for name, value in env.items() if "CACHE" in name or name in ("HOME", "TMPDIR")}
    assert {"TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "HOME", "TMPDIR"} <= caches.keys()
    assert all(Path(value).is_relative_to("/w") for value in caches.values())


def test_the_gpus_arena_is_scrubbed_whatever_happens(monkeypatch):
    """A fault of ours in the middle of an examination must not leave one student's values to the next."""
    import contextlib
    import types

    import torch

    from workers.gpu_examination import GpuRecord, _Course

    arena = torch.full((4096,), 7, dtype=torch.uint8)
    gpu = types.SimpleNamespace(
        arena=arena, settle=lambda: None, state=lambda: None, lock=contextlib.nullcontext, free_since=0.0
    )
    course = _Course.__new__(_Course)
    course._gpu, course._record = gpu, GpuRecord()
    course._examiner = types.SimpleNamespace(stage=lambda _name: contextlib.nullcontext())
    monkeypatch.setattr(course, "_prepare_rivals", lambda: (_ for _ in ()).throw(RuntimeError("ours")), raising=False)
    with pytest.raises(RuntimeError, match="ours"):
        course.run()
    assert arena.eq(0xFF).all()
