# ruff: noqa: N801, N802, N815 - the names are the library's
"""Which memory candidates map of the examiner's, and the examiner of theirs, with the driver played."""

import ctypes
import enum
import inspect
import types

import pytest
import torch
from gpu_fakes import FakeGpu, cuda_beside
from nvml_fakes import FakeCard, FakeNvml

from workers.devices import cuda_candidate
from workers.devices.gpu import NotMappableError

MIB = 1 << 20


class Result(enum.IntEnum):
    cudaSuccess = 0
    cudaErrorInvalidValue = 1


class cudaIpcMemHandle_t:
    """64 bytes that have an address, and since cuda-bindings 13.4 nothing else."""

    def __init__(self):
        self._bytes = ctypes.create_string_buffer(64)

    def getPtr(self):
        return ctypes.addressof(self._bytes)


class Driver(types.ModuleType):
    """Hands out memory in order, 1 TiB apart, and knows what was given back. A handle is the address in hex."""

    CUDA_IPC_HANDLE_SIZE, cudaIpcMemLazyEnablePeerAccess = 64, 1
    cudaIpcMemHandle_t = cudaIpcMemHandle_t

    def __init__(self):
        super().__init__("cuda.bindings.runtime")
        self.given, self.freed, self.opened = {}, [], []
        self.theirs = {1 << 50: 32 * MIB}  # of a candidate's, as the driver knows it

    def cudaMalloc(self, size):
        start = (1 + len(self.given)) << 40
        self.given[start] = size
        return Result.cudaSuccess, start

    def cudaIpcGetMemHandle(self, start):
        made = cudaIpcMemHandle_t()
        ctypes.memmove(made.getPtr(), start.to_bytes(64, "big"), 64)
        return Result.cudaSuccess, made

    def cudaIpcOpenMemHandle(self, handle, flags):
        assert flags == self.cudaIpcMemLazyEnablePeerAccess
        start = int.from_bytes(ctypes.string_at(handle.getPtr(), 64), "big")
        if start not in self.theirs:
            return Result.cudaErrorInvalidValue, None
        self.opened.append(start)
        return Result.cudaSuccess, start + MIB

    def cudaIpcCloseMemHandle(self, here):
        self.opened.remove(here - MIB)
        return (Result.cudaSuccess,)

    def cuMemGetAddressRange(self, here):
        return Result.cudaSuccess, here, self.theirs[here - MIB]

    def cudaGetLastError(self):
        return (Result.cudaSuccess,)

    def cudaFree(self, start):
        self.freed.append(start)
        return (Result.cudaSuccess,)


@pytest.fixture
def driver():
    return Driver()


@pytest.fixture
def cuda(driver, monkeypatch):
    return cuda_beside(driver, FakeNvml(FakeCard(uuid="GPU-0")), monkeypatch)


@pytest.fixture
def gpu(cuda, monkeypatch):
    card = types.SimpleNamespace(name="NVIDIA H200", major=9, minor=0, uuid="0", total_memory=1000 * MIB + 12345)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
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


def test_memory_of_a_candidates_is_mapped_by_its_handle_and_given_up(gpu, driver):
    mapped = gpu.map(7 << 20, 32 * MIB, (1 << 50).to_bytes(64, "big").hex())
    assert (mapped.start, mapped.here) == (7 << 20, (1 << 50) + MIB)
    assert driver.opened == [1 << 50]
    gpu.unmap(mapped)
    assert driver.opened == []


@pytest.mark.parametrize(
    ("handle", "size_bytes"),
    [
        pytest.param("no hex", 1, id="no-bytes"),
        pytest.param("00" * 63, 1, id="too-short"),
        pytest.param((1 << 50).to_bytes(64, "big").hex() + "00", 1, id="too-long"),
        pytest.param("00" * 64, 1, id="of-nobody"),
        pytest.param((1 << 50).to_bytes(64, "big").hex(), 32 * MIB + 1, id="spans-less-than-said"),
    ],
)
def test_what_names_no_memory_of_that_size_is_not_mapped(gpu, driver, handle, size_bytes):
    with pytest.raises(NotMappableError):
        gpu.map(7 << 20, size_bytes, handle)
    assert driver.opened == []


def test_a_candidate_opens_what_it_is_told_and_hands_out_what_its_outputs_lie_in(cuda, driver, monkeypatch):
    driver.theirs[3 << 40] = 64 * MIB  # as a candidate sees it, the examiner's
    monkeypatch.setattr(torch, "as_tensor", lambda span, device: span.__cuda_array_interface__)
    half = cuda_candidate.CudaHalf.__new__(cuda_candidate.CudaHalf)
    half._open_arena({"handle": (3 << 40).to_bytes(64, "big").hex(), "bytes": 64 * MIB})
    assert half._memory["data"] == ((3 << 40) + MIB, False)
    assert half._memory["shape"] == (64 * MIB,)
    first, second = (1 << 50) + MIB, (3 << 40) + MIB
    spans = {first: (first, 32 * MIB), first + 512: (first, 32 * MIB), second: (second, 64 * MIB)}
    monkeypatch.setattr(driver, "cuMemGetAddressRange", lambda ptr: (Result.cudaSuccess, *spans[ptr]))
    assert cuda_candidate._segments(list(spans)) == [
        [start, size, start.to_bytes(64, "big").hex()] for start, size in (spans[first], spans[second])
    ]


def test_the_gpu_that_other_tests_play_is_asked_as_this_one(cuda):
    theirs = set(vars(FakeGpu)) - {"take"}  # what a candidate does
    shared = [name for name in theirs if inspect.isfunction(getattr(FakeGpu, name)) and not name.startswith("_")]
    assert len(shared) >= 8
    for name in shared:
        played, real = (list(inspect.signature(getattr(one, name)).parameters) for one in (FakeGpu, cuda.Gpu))
        assert played == real, name
