"""The candidate's side of a replay: noting what one call does on a GPU, and doing it again from the notes alone.

`Recorder` runs beside a student's file and notes launches by way of Triton's launcher and torch operations by way of a
dispatch mode. `Replayer` runs in a process that never saw the file: it loads the compiled kernels and launches them
through the driver, on whatever inputs it is given. workers/record.py is what passes between the two.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.nvidia.driver import CudaLauncher
from triton.compiler import CompiledKernel

from workers.record import (
    DTYPES,
    MOST_ARGUMENTS,
    MOST_KERNELS,
    MOST_REASONS,
    MOST_STEPS,
    Dtype,
    Kernel,
    Launch,
    Operation,
    Pointer,
    Record,
    View,
)
from workers.storages import is_allocation, runs_nothing

_INTEGER_BYTES = {
    "i1": 1, "i8": 1, "u1": 1, "u8": 1, "i16": 2, "u16": 2, "i32": 4, "u32": 4, "i64": 8, "u64": 8,
}  # fmt: skip
_STATIC_SHARED_BYTES = 48 << 10  # more has to be asked for
_DEVICE = "cuda"

Note = Callable[[Any, Sequence[int], Sequence[Any]], None]


def watch_launches() -> Callable[[Note | None], None]:
    """Have every launch of Triton's pass by us. Returns what sets, or with None takes away, whoever is told.

    Called before the student's file is loaded, so that no kernel escapes notice by having been made earlier.
    """
    listener: list[Note | None] = [None]
    kernels: dict[int, Any] = {}
    if not hasattr(CompiledKernel, "_init_handles"):  # a Triton that we were not written for

        def refuse(_note: Note | None) -> None:
            raise RuntimeError("launches of this version of Triton cannot be noted")

        return refuse
    init_handles, launch = CompiledKernel._init_handles, CudaLauncher.__call__

    def init(self: Any) -> None:
        init_handles(self)
        kernels[self.function] = self

    def call(self: Any, x: int, y: int, z: int, stream: int, function: int, *arguments: Any) -> None:
        note = listener[0]
        if note is not None:
            # before those of the kernel come its metadata twice and two hooks
            note(kernels.get(function), (x, y, z), arguments[4:])
        launch(self, x, y, z, stream, function, *arguments)

    CompiledKernel._init_handles = init
    CudaLauncher.__call__ = call

    def listen(note: Note | None) -> None:
        listener[0] = note

    return listen


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes what happens while it is entered. One phase after another: see `phase`.

    Args:
        inputs: what the call is given, the incoming gradient last.
    """

    def __init__(self, inputs: Sequence[torch.Tensor], listen: Callable[[Note | None], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._listen = listen
        self._inputs = [(one.data_ptr(), one.data_ptr() + _span_bytes(one)) for one in inputs]
        self._starts: list[int] = []  # of buffers of the call's own, in order of their addresses
        self._numbers: list[int] = []
        self._held: list[torch.Tensor] = []  # so that no address is given out twice
        self._sizes: list[int] = []
        self._kernels: dict[str, int] = {}
        self._compiled: list[Kernel] = []
        self._steps: dict[str, list[Launch | Operation]] = {"forward": [], "backward": []}
        self._phase = "forward"
        self._reasons: list[str] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # see _FencedEmpties

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Note everything meanwhile under this phase's name."""
        self._phase = name
        self._listen(self._launched)
        try:
            with self:
                yield
        finally:
            self._listen(None)

    def record(self, outputs: Mapping[str, torch.Tensor]) -> Record:
        """What was noted, and where the outputs lie."""
        views = {}
        for name, tensor in outputs.items():
            view = self._view(tensor.detach())
            if view is not None:
                views[name] = view
        return Record(
            n_inputs=len(self._inputs),
            buffers=tuple(self._sizes),
            kernels=tuple(self._compiled),
            forward=tuple(self._steps["forward"]),
            backward=tuple(self._steps["backward"]),
            outputs=views,
            reasons=tuple(self._reasons),
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        results = [one for one in (made if isinstance(made, tuple | list) else [made]) if isinstance(one, torch.Tensor)]
        fresh = [self._own(one) for one in results]
        base, _, overload = func.__name__.partition(".")
        is_view = not any(fresh) and runs_nothing(func)
        hosts = [one.numel() for one in (*args, *kwargs.values()) if _is_elsewhere(one)]
        on_device = any(one.device.type == _DEVICE for one in results)
        if on_device and max(hosts, default=1) > 1:
            # numbers that the host made are no work of a kernel's
            views = tuple(view for view in map(self._view, results) if view is not None)
            self._note(Operation(name="from_host.default", arguments=(), named={}, results=views))
        elif on_device and not is_allocation(base) and not is_view:
            self._note(
                Operation(
                    name=f"{base}.{overload or 'default'}",
                    arguments=tuple(self._value(one) for one in args),
                    named={key: self._value(one) for key, one in kwargs.items() if key not in ("device", "pin_memory")},
                    results=tuple(view for view in map(self._view, results) if view is not None),
                )
            )
        return made

    def _launched(self, kernel: Any, grid: Sequence[int], arguments: Sequence[Any]) -> None:
        if kernel is None:
            self._cannot("a kernel was launched that Triton did not load here")
            return
        types = list(kernel.src.signature.values())
        if len(types) != len(arguments) or any(not isinstance(one, str) for one in types):
            self._cannot(f"{kernel.name} takes tuples")
            return
        packed = [self._argument(kernel, kind, one) for kind, one in zip(types, arguments, strict=True)]
        self._note(
            Launch(
                kernel=self._kernel(kernel),
                grid=(int(grid[0]), int(grid[1]), int(grid[2])),
                arguments=tuple(one for one in packed if one is not None),
            )
        )

    def _argument(self, kernel: Any, kind: str, value: Any) -> Pointer | bytes | None:
        """One argument as the launcher passes it; None where it passes nothing."""
        if kind == "constexpr":
            return None
        if kind.startswith("*"):
            return self._pointer(kernel, value)
        if kind in _INTEGER_BYTES:
            size = _INTEGER_BYTES[kind]
            return (int(value) & ((1 << 8 * size) - 1)).to_bytes(size, "little")
        if kind in ("fp16", "fp32", "f32", "fp64"):
            return struct.pack({"fp16": "<e", "fp64": "<d"}.get(kind, "<f"), float(value))
        if kind == "bf16":
            return struct.pack("<f", float(value))[2:]
        self._cannot(f"{kernel.name} takes a {kind.partition('<')[0]}, which is made anew for every address")
        return None

    def _pointer(self, kernel: Any, value: Any) -> Pointer | None:
        if value is None:
            return Pointer(None)
        if isinstance(value, torch.Tensor):
            address = value.data_ptr()
        else:
            address = value if isinstance(value, int) else int(value.data_ptr())
        found = self._place(address)
        if found is None:
            self._cannot(f"{kernel.name} is given memory that was there before the call")
            return Pointer(None)
        return Pointer(*found)

    def _kernel(self, kernel: Any) -> int:
        if kernel.hash not in self._kernels:
            meta = kernel.metadata
            if getattr(meta, "num_ctas", 1) != 1 or getattr(meta, "launch_cooperative_grid", False):
                self._cannot(f"{kernel.name} is launched in clusters or cooperatively")
            if getattr(meta, "profile_scratch_size", 0):
                self._cannot(f"{kernel.name} is instrumented")
            self._kernels[kernel.hash] = len(self._compiled)
            if len(self._compiled) < MOST_KERNELS:
                self._compiled.append(
                    Kernel(
                        name=kernel.name,
                        image=bytes(kernel.kernel),
                        shared_bytes=meta.shared,
                        num_warps=meta.num_warps,
                        scratch_bytes=meta.global_scratch_size,
                        scratch_align=max(1, meta.global_scratch_align),
                    )
                )
        return self._kernels[kernel.hash]

    def _note(self, step: Launch | Operation) -> None:
        steps = self._steps[self._phase]
        too_many = len(steps) >= MOST_STEPS or len(self._kernels) > MOST_KERNELS
        if too_many or len(step.arguments) > MOST_ARGUMENTS:
            self._cannot("it does more than is recorded")
            return
        steps.append(step)

    def _cannot(self, reason: str) -> None:
        if reason not in self._reasons and len(self._reasons) < MOST_REASONS:
            self._reasons.append(reason[:300])

    def _own(self, tensor: torch.Tensor) -> bool:
        """Take in the storage of a result. Returns whether it was new."""
        if tensor.device.type != _DEVICE or tensor.layout is not torch.strided:
            return False
        if not tensor.data_ptr() or self._place(tensor.data_ptr()) is not None:
            return False
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
        at = bisect.bisect(self._starts, start)
        self._starts.insert(at, start)
        self._numbers.insert(at, len(self._sizes))
        self._sizes.append(storage.nbytes())
        self._held.append(tensor.detach())
        return True

    def _place(self, address: int) -> tuple[int, int] | None:
        """(buffer, byte) that an address lies at."""
        for number, (start, end) in enumerate(self._inputs):
            if start <= address < max(end, start + 1):
                return number, address - start
        at = bisect.bisect_right(self._starts, address) - 1
        # not its end: there the next allocation may begin
        if at >= 0 and address < self._starts[at] + self._sizes[self._numbers[at]]:
            return len(self._inputs) + self._numbers[at], address - self._starts[at]
        return None

    def _view(self, tensor: torch.Tensor) -> View | None:
        dtype = str(tensor.dtype).removeprefix("torch.")
        found = self._place(tensor.data_ptr()) if tensor.device.type == _DEVICE and dtype in DTYPES else None
        if found is None:
            self._cannot(f"a {dtype} tensor on {tensor.device.type} has no place in a record")
            return None
        return View(found[0], found[1], dtype, tuple(tensor.shape), tuple(tensor.stride()))

    def _value(self, value: Any) -> Any:
        """An argument of an operation, as the record holds it."""
        if isinstance(value, torch.Tensor):
            if value.device.type == _DEVICE:
                return self._view(value)
            return value.item() if value.numel() == 1 else self._cannot("an operation takes a tensor of the host's")
        if isinstance(value, torch.dtype):
            return Dtype(str(value).removeprefix("torch."))
        if isinstance(value, list | tuple):
            return [self._value(one) for one in value]
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, torch.device | torch.layout | torch.memory_format):
            return None
        return self._cannot(f"an operation takes a {type(value).__name__}")


class Replayer:
    """Does what a record says, on other inputs. It holds no code but the record's kernels."""

    def __init__(self, record: Record) -> None:
        from cuda.bindings import driver

        self._record, self._driver = record, driver
        self._functions = [self._load(kernel) for kernel in record.kernels]
        self._steps = {
            phase: [self._prepared(step) for step in getattr(record, phase)] for phase in ("forward", "backward")
        }
        names = [name for name in record.outputs if not self._is_gradient(name)]
        self._forward_names = names
        self._gradient_names = [name for name in record.outputs if name not in names]

    @property
    def is_autograd(self) -> bool:
        """Whether gradients are among the outputs, so that it is called as an autograd.Function is."""
        return bool(self._gradient_names)

    def call(self, *arguments: Any) -> Any:
        """The entry point: tensors, then options, which the record has baked in."""
        n_tensors = self._record.n_inputs - self.is_autograd
        if self.is_autograd:
            return _Replayed.apply(self, *arguments[:n_tensors])  # type: ignore[no-untyped-call]
        memory = self.run("forward", list(arguments[:n_tensors]), None)
        return tuple(memory.tensor(self._record.outputs[name]) for name in self._forward_names)

    def run(self, phase: str, inputs: list[torch.Tensor], memory: _Memory | None) -> _Memory:
        """Do the steps of one phase, in fresh memory or in what the phase before left."""
        memory = memory or _Memory(self._record)
        memory.bind(inputs)
        stream = torch.cuda.current_stream().cuda_stream if _DEVICE == "cuda" else 0
        for step in self._steps[phase]:
            step(memory, stream)
        return memory

    def forward_output(self, memory: _Memory) -> torch.Tensor:
        return memory.tensor(self._record.outputs[self._forward_names[0]])

    def gradients(self, memory: _Memory) -> list[torch.Tensor]:
        return [memory.tensor(self._record.outputs[name]) for name in self._gradient_names]

    def _is_gradient(self, name: str) -> bool:
        # of an autograd.Function the first output is what apply returns, and the others are gradients
        return bool(self._record.backward) and name != next(iter(self._record.outputs))

    def _load(self, kernel: Kernel) -> int:
        module = self._checked(self._driver.cuModuleLoadData(kernel.image))
        function = self._checked(self._driver.cuModuleGetFunction(module, kernel.name.encode()))
        if kernel.shared_bytes > _STATIC_SHARED_BYTES:
            attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._checked(self._driver.cuFuncSetAttribute(function, attribute, kernel.shared_bytes))
        return int(function)

    def _prepared(self, step: Launch | Operation) -> Callable[[_Memory, int], None]:
        return self._launch(step) if isinstance(step, Launch) else _operation(step)

    def _launch(self, step: Launch) -> Callable[[_Memory, int], None]:
        """A function that launches it. Everything but the addresses is laid out once."""
        kernel, function = self._record.kernels[step.kernel], self._functions[step.kernel]
        values: list[Any] = []
        pointers: list[tuple[Any, Pointer]] = []
        for one in step.arguments:
            if isinstance(one, Pointer):
                values.append(ctypes.c_uint64(0))
                if one.buffer is not None:
                    pointers.append((values[-1], one))
            else:
                values.append((ctypes.c_ubyte * len(one)).from_buffer_copy(one))
        # after the arguments Triton passes memory for the programs, and memory for a profiler
        scratch = ctypes.c_uint64(0)
        values += [scratch, ctypes.c_uint64(0)]
        table = (ctypes.c_void_p * len(values))(*(ctypes.addressof(one) for one in values))
        x, y, z = step.grid
        scratch_bytes = kernel.scratch_bytes * x * y * z
        launch, threads, shared = self._driver.cuLaunchKernel, 32 * kernel.num_warps, kernel.shared_bytes

        # the table holds addresses alone, so the numbers live as long as this function does
        def run(memory: _Memory, stream: int, _alive: list[Any] = values) -> None:
            if not x * y * z:
                return
            for value, pointer in pointers:
                value.value = memory.address(pointer)
            if scratch_bytes:
                scratch.value = memory.scratch(scratch_bytes, kernel.scratch_align)
            (error,) = launch(function, x, y, z, threads, 1, 1, shared, stream, ctypes.addressof(table), 0)
            if int(error) != 0:
                raise RuntimeError(f"CUDA error: {error.name}")

        return run

    @staticmethod
    def _checked(result: tuple[Any, ...]) -> Any:
        if int(result[0]) != 0:
            raise RuntimeError(f"CUDA error: {result[0].name}")
        return result[1] if len(result) > 1 else None


class _Memory:
    """The buffers of one call: inputs as given, the others made when they are first needed."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._inputs: list[torch.Tensor] = []
        self._own: dict[int, torch.Tensor] = {}
        self._scratch: list[torch.Tensor] = []

    def bind(self, inputs: list[torch.Tensor]) -> None:
        """The inputs known so far; the incoming gradient comes with the backward."""
        self._inputs = inputs

    def address(self, pointer: Pointer) -> int:
        assert pointer.buffer is not None
        return self._buffer(pointer.buffer).data_ptr() + pointer.offset

    def tensor(self, view: View) -> torch.Tensor:
        """The tensor that a view describes. Raises where it does not fit its storage."""
        buffer = self._buffer(view.buffer)
        dtype: torch.dtype = getattr(torch, view.dtype)
        start = buffer.storage_offset() * buffer.element_size() + view.offset
        if start % dtype.itemsize:
            raise RuntimeError("a tensor of the record is not aligned")
        made = torch.empty(0, dtype=dtype, device=buffer.device)
        return made.set_(buffer.untyped_storage(), start // dtype.itemsize, view.shape, view.strides)

    def scratch(self, size_bytes: int, align: int) -> int:
        self._scratch.append(_bytes(size_bytes + align))
        return -(-self._scratch[-1].data_ptr() // align) * align

    def _buffer(self, number: int) -> torch.Tensor:
        if number < self._record.n_inputs:
            return self._inputs[number].detach()
        own = number - self._record.n_inputs
        if own not in self._own:
            self._own[own] = _bytes(self._record.buffers[own])
        return self._own[own]


class _Replayed(torch.autograd.Function):
    """A replay as an autograd.Function: its backward does the record's second phase."""

    @staticmethod
    def forward(ctx: Any, replayer: Replayer, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.replayer, ctx.inputs = replayer, list(inputs)
        ctx.memory = replayer.run("forward", ctx.inputs, None)
        return replayer.forward_output(ctx.memory)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        ctx.replayer.run("backward", [*ctx.inputs, upstream[0]], ctx.memory)
        return (None, *ctx.replayer.gradients(ctx.memory))


def _bytes(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device=_DEVICE)


def _operation(step: Operation) -> Callable[[_Memory, int], None]:
    """A function that does a torch operation. Its results go where the record says."""
    base, _, overload = step.name.partition(".")
    function = getattr(getattr(torch.ops.aten, base), overload)

    def run(memory: _Memory, _stream: int) -> None:
        def value(one: Any) -> Any:
            if isinstance(one, View):
                return memory.tensor(one)
            if isinstance(one, Dtype):
                return getattr(torch, one.name)
            return [value(item) for item in one] if isinstance(one, list) else one

        named = {key: value(one) for key, one in step.named.items()}
        if _takes_device(function):
            named["device"] = torch.device(_DEVICE)
        made = function(*map(value, step.arguments), **named)
        results = [one for one in (made if isinstance(made, tuple | list) else [made]) if isinstance(one, torch.Tensor)]
        for result, view in zip(results, step.results, strict=True):
            place = memory.tensor(view)
            if result.data_ptr() != place.data_ptr():
                place.copy_(result)

    return run


def _is_elsewhere(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type != _DEVICE


def _takes_device(function: Any) -> bool:
    return any(argument.name == "device" for argument in function._schema.arguments)


def _span_bytes(tensor: torch.Tensor) -> int:
    if 0 in tensor.shape:
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * step for size, step in steps)) * tensor.element_size()
