"""The memory that examiner and candidate share."""

import mmap

import pytest
import torch

from workers.devices.cpu import Arena, ArenaFullError


@pytest.fixture
def memory():
    return mmap.mmap(-1, 1 << 20)


def as_candidate_sees(memory, spec):
    base = torch.frombuffer(memory, dtype=getattr(torch, spec["dtype"]), count=spec["count"], offset=spec["offset"])
    return base.as_strided(spec["shape"], spec["strides"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", ["contiguous", "strided"])
@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 5, 4), (1, 1, 16)])
def test_the_candidate_sees_what_was_placed(memory, dtype, layout, shape):
    value = torch.randn(shape).to(dtype)
    placed = Arena(memory).place("q", value, layout)
    seen = as_candidate_sees(memory, placed.spec())
    assert torch.equal(seen, value)
    assert seen.is_contiguous() == (layout == "contiguous" or value.numel() == 1)
    assert seen.stride() == placed.value.stride()


def test_a_strided_input_has_nan_in_its_gaps_and_around_it(memory):
    placed = Arena(memory).place("q", torch.ones(2, 3, 4), "strided")
    spec = placed.spec()
    around = torch.frombuffer(memory, dtype=torch.float32, count=spec["count"] + 2, offset=spec["offset"] - 4)
    assert int(torch.isnan(around).sum()) == spec["count"] + 2 - 24


def test_an_expanded_gradient_is_one_element_with_stride_zero(memory):
    placed = Arena(memory).place_expanded("do", torch.ones(2, 3))
    assert (placed.spec()["count"], placed.spec()["strides"]) == (1, [0, 0])
    assert torch.equal(as_candidate_sees(memory, placed.spec()), torch.ones(2, 3))


def test_a_changed_input_is_noticed_and_told_from_a_broken_guard(memory):
    arena = Arena(memory)
    placed = arena.place("x", torch.ones(4), "contiguous")
    assert arena.intact() == (True, True)
    as_candidate_sees(memory, placed.spec())[1] = 5
    assert arena.intact() == (False, True)
    arena.rewrite(placed, torch.ones(4))
    memory[placed.start - 1] = 0
    assert arena.intact() == (True, False)


def test_new_values_go_to_the_same_addresses(memory):
    arena = Arena(memory)
    placed = arena.place("q", torch.zeros(2, 5, 4), "strided")
    value = torch.randn(2, 5, 4)
    again = arena.rewrite(placed, value)
    assert again.start == placed.start
    assert torch.equal(as_candidate_sees(memory, placed.spec()), value)
    assert torch.equal(again.value, value)
    assert arena.intact() == (True, True)


def test_what_is_not_written_reads_as_nan(memory):
    arena = Arena(memory)
    (slot,) = arena.place_slots({"o": (2, 2)}, frozenset())
    said = {"shape": (2, 2), "dtype": "float32", "copied": True, "alternative": 0}
    value = arena.read(slot, said)
    assert value is not None
    assert bool(torch.isnan(value).all())


@pytest.mark.parametrize(
    "lie",
    [
        {"shape": (10**9, 10**9)},
        {"shape": (-1, 2)},
        {"dtype": "no_such_dtype"},
        {"dtype": "load"},
        {"alternative": 3},
        {"copied": False},
    ],
)
def test_a_claim_that_does_not_fit_the_slot_reads_nothing(memory, lie):
    arena = Arena(memory)
    (slot,) = arena.place_slots({"o": (2, 2)}, frozenset())
    said = {"shape": (2, 2), "dtype": "float32", "copied": True, "alternative": 0} | lie
    assert arena.read(slot, said) is None


def test_tensors_that_do_not_fit_are_refused_with_both_sizes(memory):
    with pytest.raises(ArenaFullError, match=r"needs \d+ MiB of arena; it has 1 MiB"):
        Arena(memory).place("x", torch.zeros(1 << 20), "contiguous")
