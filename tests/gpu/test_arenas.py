"""Which memory of the examiner's candidates map, with the driver played."""

import sys
import types

import pytest
import torch
from nvml_fakes import FakeCard, FakeNvml

MIB = 1 << 20


class Driver(types.ModuleType):
    """Hands out memory in order, 2 MiB apart, and knows what was given back."""

    def __init__(self):
        super().__init__("cuda.bindings.runtime")
        self.given, self.freed = {}, []

    def cudaMalloc(self, size):  # noqa: N802
        start = (1 + len(self.given)) << 40
        self.given[start] = size
        return 0, start

    def cudaIpcGetMemHandle(self, start):  # noqa: N802
        return 0, types.SimpleNamespace(reserved=start.to_bytes(64, "big"))

    def cudaFree(self, start):  # noqa: N802
        self.freed.append(start)
        return (0,)


@pytest.fixture
def driver(monkeypatch):
    made = Driver()
    for name in ("cuda", "cuda.bindings", "cuda.bindings.driver"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", made)
    sys.modules["cuda.bindings"].driver = sys.modules["cuda.bindings.driver"]
    sys.modules["cuda.bindings"].runtime = made
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(FakeCard(uuid="GPU-0")))
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    card = types.SimpleNamespace(name="NVIDIA H200", major=9, minor=0, uuid="0", total_memory=1000 * MIB + 12345)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    return made


@pytest.fixture
def gpu(driver, monkeypatch):
    monkeypatch.delitem(sys.modules, "workers.devices.cuda", raising=False)
    import workers.devices.cuda as cuda

    monkeypatch.delitem(sys.modules, "workers.devices.cuda")
    monkeypatch.setattr(cuda, "view", lambda start, size: torch.empty(size, dtype=torch.uint8, device="meta"))
    return cuda.Gpu()


def test_what_candidates_map_and_the_examiners_own_are_apart_and_of_one_size(gpu, driver):
    assert len(gpu.arena) == len(gpu.private) == 200 * MIB
    assert gpu.handle != gpu.private_handle
    assert list(driver.given.values()) == [200 * MIB] * 2
    # with what a window's outputs may take, and the two thirds of it that the baselines' take
    assert sum(driver.given.values()) + gpu.room_bytes * 5 / 3 < 0.75 * gpu.total_bytes


@pytest.mark.parametrize(("n_bytes", "size"), [(1, 2), (2 * MIB, 2), (2 * MIB + 1, 4), (134 * MIB, 134)])
def test_a_small_arena_has_room_for_what_was_asked_and_shares_pages_with_nothing(gpu, driver, n_bytes, size):
    with gpu.small_arena(n_bytes) as small:
        start = int(small.handle, 16)
        assert driver.given[start] == len(small.arena) == len(small.private) == size * MIB
        assert small.handle not in (gpu.handle, gpu.private_handle)
        assert driver.freed == []
    assert driver.freed == [start]


def test_a_small_arena_is_given_back_after_a_fault_and_all_at_the_end(gpu, driver):
    with pytest.raises(RuntimeError), gpu.small_arena(1):
        raise RuntimeError
    gpu.close()
    assert sorted(driver.freed) == sorted(driver.given)
