"""A GPU made of CPU memory, and candidates in this process that answer as workers/devices/cuda_candidate.py does.

The candidate's own code runs, with torch's CUDA calls replaced; time stands still except where a call, a fill or a wait
says how long it took.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import mmap
import sys
import types
import weakref
from pathlib import Path

import torch

from workers import claims
from workers.devices import cuda_candidate
from workers.devices.gpu import Mapped, NotMappableError, SmallArena
from workers.interview import CandidateFailedError


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now

    def pass_ms(self, ms):
        self.now += ms / 1e3


class FakeGpu:
    """Device memory is this process's; a handle is good when the segment was made by an `Allocator`."""

    handle, private_handle = "00" * 64, "ff" * 64

    def __init__(self, clock, *, arena_bytes=8 << 20, settle_ms=0.02):
        self.arena = torch.zeros(arena_bytes, dtype=torch.uint8)
        self.private = torch.zeros(arena_bytes, dtype=torch.uint8)
        self.room_bytes = arena_bytes
        self.clock, self.settle_ms = clock, settle_ms
        self.mapped = []
        self.allocators = []
        self.n_gathers = 0
        self.on_settle = lambda: None

        self.arenas = {self.handle: self.arena, self.private_handle: self.private}
        self.held_bytes, self.total_bytes = 500 << 20, 1 << 40  # of the only candidate, as NVML tells them

    def settle(self):
        self.clock.pass_ms(self.settle_ms)
        self.on_settle()

    @contextlib.contextmanager
    def small_arena(self, size_bytes):
        handle = f"{len(self.arenas):02x}" * 64
        self.arenas[handle] = torch.zeros(size_bytes, dtype=torch.uint8)
        yield SmallArena(self.arenas[handle], self.private[:size_bytes], handle, self.settle)
        del self.arenas[handle]

    def process_bytes(self, pids):
        return self.held_bytes

    @contextlib.contextmanager
    def ballast(self, leave_bytes):
        before, self.total_bytes = self.total_bytes, self.held_bytes + leave_bytes
        yield leave_bytes
        self.total_bytes = before

    def take(self, size_bytes):
        """What a candidate does that allocates device memory of its own."""
        if self.held_bytes + size_bytes > self.total_bytes:
            raise RuntimeError("CUDA out of memory")
        self.held_bytes += size_bytes

    def pulse(self):
        return 1980, 400.0

    def map(self, start, size_bytes, handle):
        if handle == "bad":
            raise NotMappableError("not a handle")
        self.mapped.append(start)
        return Mapped(start, size_bytes, start)

    def unmap(self, mapped):
        self.mapped.remove(mapped.start)

    def gather(self, table, offsets, inner, out):
        self.n_gathers += 1
        n_calls, _, width = out.shape
        for call in range(n_calls):
            at = offsets[call][:, None] + torch.arange(width) * inner
            size = (int(at.max()) + 1) * out.element_size()
            flat = torch.frombuffer((ctypes.c_char * size).from_address(int(table[call])), dtype=out.dtype)
            out[call] = flat[at]


class Allocator:
    """Hands out the same addresses again once they are free, lowest first, as a caching allocator does.

    The first `n_restless` times it takes memory that nobody has used yet, as one does that adds a segment.
    """

    def __init__(self, size_bytes, n_blocks, *, n_restless=0):
        self._blocks = [torch.zeros(size_bytes, dtype=torch.uint8) for _ in range(n_blocks)]
        self._free = set(range(n_blocks))
        self._used = set()
        self._n_restless = n_restless

    def empty(self, shape, dtype=torch.float32):
        at = min(self._free - self._used) if self._n_restless else min(self._free)
        self._n_restless = max(0, self._n_restless - 1)
        self._used.add(at)
        self._free.discard(at)
        count = torch.Size(shape).numel() * dtype.itemsize
        tensor = self._blocks[at][:count].view(dtype).view(shape)
        weakref.finalize(tensor, self._free.add, at)
        return tensor

    def segments(self):
        return [[self._blocks[at].data_ptr(), self._blocks[at].nbytes, "11" * 64] for at in sorted(self._used)]


class Event:
    def __init__(self, clock):
        self._clock, self.at = clock, 0.0

    def record(self):
        self.at = self._clock.now

    def elapsed_time(self, other):
        return (other.at - self.at) * 1e3


class FakeSandbox:
    """Says whether it is frozen."""

    def __init__(self):
        self.frozen = False
        self.pid = 0
        self.host_bytes = self.host_peak_bytes = 1 << 30

    def freeze(self):
        self.frozen = True

    def thaw(self):
        self.frozen = False

    def reset_memory_peak(self):
        self.host_peak_bytes = self.host_bytes

    def memory_peak_bytes(self):
        return self.host_peak_bytes


class FakeInterview:
    """Puts requests to a candidate in this process. A frozen one answers nothing."""

    def __init__(self, candidate):
        self.sandbox = FakeSandbox()
        self.candidate = candidate
        self.log = []
        self.evidence = []

    def ask(self, message, *, stage):
        assert not self.sandbox.frozen, f"asked {message['op']} while frozen"
        self.log.append(message["op"])
        self._reply = self.candidate.answer(message)

    def spin(self, timeout_s):
        pass

    def answer(self, timeout_s):
        if self._reply["op"] == "failed":
            raise CandidateFailedError(claims.failure(self._reply, "timing"), dead=False)
        return self._reply

    def end(self):
        self.ended = True


def make_candidate(gpu, clock, allocator, call, monkeypatch, *, is_autograd=False):
    """The real candidate, on CPU memory, with `call` as the student's entry."""
    from workers import candidate, entry

    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(clock))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    # collecting a test run's whole heap takes a fifth of a second; the real candidate froze its own
    nothing = types.SimpleNamespace(collect=lambda: None, disable=lambda: None, enable=lambda: None)
    monkeypatch.setattr(cuda_candidate, "gc", nothing)
    gpu.allocators.append(allocator)
    # whose memory an address is in, a real driver knows; here everybody hands out everybody's
    monkeypatch.setattr(cuda_candidate, "_segments", lambda ptrs: [s for one in gpu.allocators for s in one.segments()])
    half = cuda_candidate.CudaHalf.__new__(cuda_candidate.CudaHalf)
    half.tick = torch.zeros(1)
    half._submission_file, half._n_tuned, half._listen = "submission.py", lambda: 0, lambda note: None
    half._memory, half._plan, half._held, half._found = gpu.arena, None, None, []

    def opened(message):
        half._memory = gpu.arenas[message["handle"]]
        return {"op": "opened"}

    monkeypatch.setattr(half, "_open_arena", opened)
    made = candidate.Candidate(mmap.mmap(-1, 4096), Path("submission.py"), half)
    made.entry = entry.Entry("call", call, is_autograd)
    return made


def cuda_beside(bindings, pynvml, monkeypatch):
    """workers.devices.cuda as it is imported beside these libraries. Nobody else gets that one."""
    package = types.ModuleType("cuda.bindings")
    package.driver = package.runtime = bindings
    played = {"cuda": types.ModuleType("cuda"), "cuda.bindings": package, "pynvml": pynvml}
    for name, module in {**played, "cuda.bindings.driver": bindings, "cuda.bindings.runtime": bindings}.items():
        monkeypatch.setitem(sys.modules, name, module)
    name = "workers.devices.cuda"
    real = sys.modules.pop(name, None)
    try:
        return importlib.import_module(name)
    finally:
        sys.modules.pop(name, None)
        if real is not None:
            sys.modules[name] = real
