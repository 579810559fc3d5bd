"""What is asked of CUDA and of NVML, held against the libraries themselves where they are installed. Needs no GPU."""

import ast
import ctypes
import importlib
import importlib.util
import inspect
import types
from pathlib import Path

import pytest
from nvml_fakes import FakeNvml

from workers.devices import cuda_candidate
from workers.devices.gpu import GpuError

PROJECT = Path(__file__).parents[2]
HANDLE = bytes(range(64))


def installed(name):
    if importlib.util.find_spec(name.partition(".")[0]) is None:
        pytest.skip(f"{name} is not installed: `DEVICE=gpu make setup` installs it")
    return importlib.import_module(name)


@pytest.fixture
def runtime():
    return installed("cuda.bindings.runtime")


@pytest.fixture
def driver():
    return installed("cuda.bindings.driver")


@pytest.fixture
def nvml():
    return installed("pynvml")


@pytest.fixture
def cuda(runtime, driver, nvml):
    return importlib.import_module("workers.devices.cuda")


def test_a_handle_passes_from_one_process_to_another_as_it_is(cuda, runtime, driver, monkeypatch):
    opened = []

    def get(start):
        handle = runtime.cudaIpcMemHandle_t()
        ctypes.memmove(handle.getPtr(), HANDLE, 64)
        return runtime.cudaError_t.cudaSuccess, handle

    def open_it(handle, flags):
        opened.append(ctypes.string_at(handle.getPtr(), 64))
        return runtime.cudaError_t.cudaSuccess, 1 << 40

    monkeypatch.setattr(runtime, "cudaIpcGetMemHandle", get)
    monkeypatch.setattr(runtime, "cudaIpcOpenMemHandle", open_it)
    spans = (driver.CUresult.CUDA_SUCCESS, driver.CUdeviceptr(1 << 40), 1 << 20)
    monkeypatch.setattr(driver, "cuMemGetAddressRange", lambda ptr: spans)
    monkeypatch.setattr(cuda_candidate.torch, "as_tensor", lambda span, device: span)
    assert cuda._handle_of(1 << 40) == HANDLE.hex()
    assert cuda_candidate._segments([(1 << 40) + 512]) == [[1 << 40, 1 << 20, HANDLE.hex()]]
    assert cuda.Gpu.map(None, 5, 1 << 20, HANDLE.hex()).here == 1 << 40
    half = cuda_candidate.CudaHalf.__new__(cuda_candidate.CudaHalf)
    half._open_arena({"handle": HANDLE.hex(), "bytes": 1 << 20})
    assert opened == [HANDLE, HANDLE]


def test_what_the_driver_refuses_is_told_by_its_name(cuda, runtime):
    refused = (runtime.cudaError_t.cudaErrorMemoryAllocation, None)
    with pytest.raises(GpuError, match="cudaErrorMemoryAllocation"):
        cuda._checked(refused)
    assert cuda._checked((runtime.cudaError_t.cudaSuccess,)) == ()


@pytest.mark.parametrize("library", ["driver", "runtime", "pynvml"])
def test_every_name_that_is_asked_for_is_there(library):
    """Also those that no test without a GPU comes to."""
    real = installed("pynvml" if library == "pynvml" else f"cuda.bindings.{library}")
    called = {"pynvml": ("pynvml", "nvml"), "driver": ("driver", "_driver"), "runtime": ("runtime",)}[library]
    starts = ("nvml", "NVML") if library == "pynvml" else ("cu", "CU")
    asked = set()
    for path in (*PROJECT.glob("workers/**/*.py"), *PROJECT.glob("benchmarks/gpu*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr.startswith(starts):
                owner = getattr(node.value, "id", getattr(node.value, "attr", ""))
                if owner in called:
                    asked.add(node.attr)
    assert len(asked) >= 4
    assert {name for name in asked if not hasattr(real, name)} == set()


def test_the_played_nvml_takes_what_the_real_one_does(nvml):
    for name, played in inspect.getmembers(FakeNvml):
        if not name.startswith(("nvml", "NVML")) or name == "NVMLError":
            continue
        real = getattr(nvml, name)
        if not isinstance(played, types.FunctionType):
            assert played == real, name
            continue
        wanted, given = (list(inspect.signature(one).parameters.values()) for one in (real, played))
        needed = [one for one in wanted if one.default is inspect.Parameter.empty]
        assert len(needed) <= len(given) - 1 <= len(wanted), name  # the played one is asked of an object
    timed_out = nvml.NVMLError(nvml.NVML_ERROR_TIMEOUT)
    assert timed_out.value == nvml.NVML_ERROR_TIMEOUT
    assert isinstance(timed_out, nvml.NVMLError)
