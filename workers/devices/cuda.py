"""The examiner's side of a GPU: memory that candidates map, memory of theirs mapped here, NVML, and one lock.

The arena is one `cudaMalloc` of the examiner's, opened in each candidate by its CUDA IPC handle; what a student's file
returned is mapped here the same way. A handle and an address are claims: what a mapping really spans is asked of the
driver before a byte of it is read.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import pynvml
import torch
import triton
import triton.language as tl
from cuda.bindings import driver, runtime

from grader import assignment
from grader.measurement import GpuState
from workers import gate
from workers.devices import nvml
from workers.devices.gpu import GpuError, Mapped, NotMappableError, SmallArena
from workers.isolation import BACKGROUND_NICE
from workers.sandbox import Limits, SandboxPool

# CUDA keeps a thread or two of its own, pins host memory and writes compiled kernels to the scratch folder
GPU_MEMORY_BYTES = 16 << 30
GPU_SCRATCH_BYTES = 512 << 20
GPU_PROCESSES = 160
GPU_OPEN_FILES = 1024
# a pass of Triton's that fails prints pages of MLIR, once a probe; what a student prints is bounded by the audit sooner
GPU_OUTPUT_BYTES = 32 << 20
CONTROL_BYTES = 64 << 20  # host memory shared with a candidate: its source, and kernels compiled ahead

LOCKS = Path("/run/tilegrade")

_BALLAST_BLOCK_BYTES = 4 << 30
_GRANULE_BYTES = 2 << 20  # of what the driver hands out, so that an arena shares its pages with nothing


class Gpu:
    """One GPU, as the examiner uses it. Holds the arena for as long as it lives.

    Args:
        arena_bytes: memory for the inputs of all candidates; None takes a fifth of the card. As much again is taken for
            the examiner's own copy of them.
    """

    def __init__(self, index: int = 0, *, arena_bytes: int | None = None) -> None:
        torch.cuda.set_device(index)
        properties = torch.cuda.get_device_properties(index)
        self.index = index
        self.name: str = properties.name
        self.arch = f"sm_{properties.major}{properties.minor}"
        self.uuid = str(properties.uuid)
        self.total_bytes: int = properties.total_memory
        self.free_since = time.monotonic()
        pynvml.nvmlInit()
        self._nvml = _nvml_handle(self.uuid, index)
        size = (self.total_bytes // 5 if arena_bytes is None else arena_bytes) // _GRANULE_BYTES * _GRANULE_BYTES
        # beside both fit this, a third of it for each baseline, their temporaries, and warm candidates' contexts
        self.room_bytes = self.total_bytes // 5
        self._start = int(_checked(runtime.cudaMalloc(size)))
        self.handle = _handle_of(self._start)
        self.arena = view(self._start, size)
        self._private = int(_checked(runtime.cudaMalloc(size)))
        self.private_handle = _handle_of(self._private)
        self.private = view(self._private, size)

    def close(self) -> None:
        """Give the arena back."""
        for start in (self._start, self._private):
            _checked(runtime.cudaFree(start))
        pynvml.nvmlShutdown()

    @contextlib.contextmanager
    def small_arena(self, size_bytes: int) -> Iterator[SmallArena]:
        """An arena of that size, for a candidate that must find no room in it. End the candidate before leaving."""
        size = -(-size_bytes // _GRANULE_BYTES) * _GRANULE_BYTES
        start = int(_checked(runtime.cudaMalloc(size)))
        try:
            yield SmallArena(view(start, size), self.private[:size], _handle_of(start), self.settle)
        finally:
            _checked(runtime.cudaFree(start))

    def map(self, start: int, size_bytes: int, handle: str) -> Mapped:
        """Map a candidate's allocation. Raises NotMappableError when the handle is no good or spans less than said."""
        said = b""
        with contextlib.suppress(ValueError):
            said = bytes.fromhex(handle)
        if len(said) != runtime.CUDA_IPC_HANDLE_SIZE:
            raise NotMappableError("not a handle")
        wanted = runtime.cudaIpcMemHandle_t()
        ctypes.memmove(wanted.getPtr(), said, len(said))
        error, here = runtime.cudaIpcOpenMemHandle(wanted, runtime.cudaIpcMemLazyEnablePeerAccess)
        if int(error) != 0:
            runtime.cudaGetLastError()
            raise NotMappableError(f"cudaIpcOpenMemHandle: {error.name}")
        _, spans = _checked(driver.cuMemGetAddressRange(int(here)))
        if int(spans) < size_bytes:
            runtime.cudaIpcCloseMemHandle(int(here))
            raise NotMappableError(f"spans {int(spans)} bytes, said {size_bytes}")
        return Mapped(start, size_bytes, int(here))

    def unmap(self, mapped: Mapped) -> None:
        runtime.cudaIpcCloseMemHandle(mapped.here)

    def settle(self) -> None:
        """Wait for everything this process asked of the GPU."""
        torch.cuda.synchronize()

    def gather(self, table: torch.Tensor, offsets: torch.Tensor, inner: int, out: torch.Tensor) -> None:
        """Copy rows of many tensors in one launch, and return at once.

        Args:
            table: [calls] int64, address of each tensor here.
            offsets: [calls, rows] int64, where each row starts, in elements.
            inner: elements from one column to the next.
            out: [calls, rows, width], of the tensors' dtype.
        """
        n_calls, n_rows, width = out.shape
        block = min(1024, triton.next_power_of_2(width))
        _gather_kernel[(n_calls, n_rows)](table, offsets, out, n_rows, width, inner, BLOCK=block)

    def process_bytes(self, pids: Iterable[int]) -> int | None:
        """Device memory of these host processes together; None when NVML names none of them."""
        wanted = set(pids)
        found = [
            one.usedGpuMemory
            for one in pynvml.nvmlDeviceGetComputeRunningProcesses(self._nvml)
            if one.pid in wanted and one.usedGpuMemory is not None
        ]
        return sum(found) if found else None

    def used_bytes(self) -> int:
        """Device memory in use by everybody."""
        return int(pynvml.nvmlDeviceGetMemoryInfo(self._nvml).used)

    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self.index)[0])

    @contextlib.contextmanager
    def ballast(self, leave_bytes: int) -> Iterator[int]:
        """Hold all device memory but this much, so that a larger allocation fails whenever it is tried."""
        torch.cuda.empty_cache()
        held: list[int] = []
        try:
            while (spare := self.free_bytes() - leave_bytes) > 64 << 20:
                error, block = runtime.cudaMalloc(min(_BALLAST_BLOCK_BYTES, spare))
                if int(error) != 0:
                    runtime.cudaGetLastError()
                    break
                held.append(int(block))
            yield self.free_bytes()
        finally:
            for block in held:
                _checked(runtime.cudaFree(block))

    def state(self) -> GpuState:
        """Clocks, temperature, power and who else is there."""
        h = self._nvml
        return GpuState(
            sm_clock_mhz=_ask(pynvml.nvmlDeviceGetClockInfo, h, pynvml.NVML_CLOCK_SM),
            memory_clock_mhz=_ask(pynvml.nvmlDeviceGetClockInfo, h, pynvml.NVML_CLOCK_MEM),
            temperature_c=_ask(pynvml.nvmlDeviceGetTemperature, h, pynvml.NVML_TEMPERATURE_GPU),
            power_w=_ask(pynvml.nvmlDeviceGetPowerUsage, h) / 1000,
            throttle_reasons=_ask(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, h),
            processes=tuple(sorted(one.pid for one in pynvml.nvmlDeviceGetComputeRunningProcesses(h))),
        )

    def pulse(self) -> tuple[int, float]:
        """SM clock in MHz and power in watts, in two questions to NVML."""
        clock_mhz = _ask(pynvml.nvmlDeviceGetClockInfo, self._nvml, pynvml.NVML_CLOCK_SM)
        return clock_mhz, _ask(pynvml.nvmlDeviceGetPowerUsage, self._nvml) / 1000

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """No student's code runs on this GPU outside this lock. Held against other workers of this host too."""
        with gpu_lock(self.uuid):
            try:
                yield
            finally:  # noted while it is still ours: the next lane reads it as soon as it has the lock
                self.free_since = time.monotonic()


@contextlib.contextmanager
def gpu_lock(uuid: str) -> Iterator[None]:
    """Hold a GPU against every other process of this host that takes this lock."""
    # containers of one host share that folder, where the operator mounts it
    folder = LOCKS if os.geteuid() == 0 else Path(tempfile.gettempdir())
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"tilegrade-gpu-{uuid.removeprefix('GPU-')}.lock"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def cuda_pool(
    limits: assignment.Limits,
    *,
    size: int,
    refill: bool = True,
    isolation: Literal["auto", "none"] = "auto",
    endless: bool = False,
) -> Iterator[SandboxPool]:
    """Warm candidates with a CUDA context. Raises SandboxUnavailable where none can be had.

    Args:
        endless: no limit on processor time.
    """
    pool = SandboxPool(
        argv_env=cuda_environment(),
        arena_bytes=CONTROL_BYTES,
        limits=Limits(
            memory_bytes=max(GPU_MEMORY_BYTES, limits.memory_bytes),
            processes=GPU_PROCESSES,
            scratch_bytes=GPU_SCRATCH_BYTES,
            file_bytes=GPU_SCRATCH_BYTES,
            output_total_bytes=max(GPU_OUTPUT_BYTES, limits.output_bytes),
            cpu_s=None if endless else int(4 * limits.total_s),  # waiting for a GPU spins
            open_files=GPU_OPEN_FILES,
            start_nice=BACKGROUND_NICE,
        ),
        size=size,
        refill=refill,
        isolation=isolation,
        gpu=True,
    )
    try:
        yield pool
    finally:
        pool.close()


def baselines_pool(
    *, refill: bool = True, isolation: Literal["auto", "none"] = "auto"
) -> contextlib.AbstractContextManager[SandboxPool]:
    """Warm candidates for the two baselines of the next operation that is asked for.

    They are ours, so no assignment's limits are theirs. They outlive many gradings, in each of which they spin while
    they wait for the GPU.
    """
    return cuda_pool(assignment.Limits(), size=2, refill=refill, isolation=isolation, endless=True)


def cuda_environment() -> dict[str, str]:
    """What of our environment a candidate needs to find the GPU, and what it compiles for before it opens it."""
    found = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES") if name in os.environ}
    with contextlib.suppress(nvml.NvmlError):  # said where the GPU is opened
        if (arch := nvml.capability()) is not None:
            found[gate.ARCH] = arch
    return found


def _handle_of(start: int) -> str:
    """By which other processes map an allocation of ours."""
    handle = _checked(runtime.cudaIpcGetMemHandle(start))
    # by its address: since cuda-bindings 13.4 its bytes have no name in Python
    return ctypes.string_at(handle.getPtr(), runtime.CUDA_IPC_HANDLE_SIZE).hex()


def view(start: int, size_bytes: int) -> torch.Tensor:
    """[size_bytes] of device memory as a tensor of bytes."""
    return torch.as_tensor(_Span(start, size_bytes), device="cuda")


class _Span:
    """Device memory by address, as torch takes it in."""

    def __init__(self, start: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,), "typestr": "|u1", "data": (start, False), "version": 3, "strides": None,
        }  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _gather_kernel(table_ptr, offsets_ptr, out_ptr, n_rows, width, inner, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    call = tl.program_id(0).to(tl.int64)
    row = call * n_rows + tl.program_id(1)
    source = tl.load(table_ptr + call).to(tl.pointer_type(out_ptr.dtype.element_ty))
    source += tl.load(offsets_ptr + row)
    for start in range(0, width, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        inside = cols < width
        tl.store(out_ptr + row * width + cols, tl.load(source + cols * inner, mask=inside), mask=inside)


def _nvml_handle(uuid: str, index: int) -> Any:
    name = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
    try:
        return pynvml.nvmlDeviceGetHandleByUUID(name)
    except pynvml.NVMLError:
        return pynvml.nvmlDeviceGetHandleByIndex(index)


def _ask(question: Any, *arguments: Any) -> int:
    """A number of NVML's; 0 where this card or this host does not tell it."""
    try:
        return int(question(*arguments))
    except pynvml.NVMLError:
        return 0


def _checked(result: Sequence[Any]) -> Any:
    if int(result[0]) != 0:
        raise GpuError(f"CUDA error: {result[0].name}")
    return result[1] if len(result) == 2 else result[1:]
