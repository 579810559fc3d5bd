"""Recording a call and doing it again, with CPU memory for a GPU's and Python functions for compiled kernels."""

import ctypes
import math
import sys
import types

import numpy
import pytest
import torch

from workers import record
from workers.devices import replaying
from workers.devices.replaying import Recorder, Replayer


class FakeDriver:
    """Loads and launches "kernels": the image of each is the number of a Python function."""

    def __init__(self):
        self.functions, self.launches = [], []
        self.CUfunction_attribute = types.SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="most shared")
        self.asked = []

    def kernel(self, function, types_of_arguments, name="kernel", shared=0, scratch=0):
        """A compiled kernel as Triton holds it."""
        self.functions.append((function, types_of_arguments))
        return types.SimpleNamespace(
            name=name,
            hash=f"{name}{len(self.functions)}",
            kernel=b"\x7fELF" + bytes([len(self.functions) - 1]),
            metadata=types.SimpleNamespace(
                shared=shared, num_warps=4, num_ctas=1, global_scratch_size=scratch, global_scratch_align=16
            ),
            src=types.SimpleNamespace(signature=dict(enumerate(types_of_arguments))),
        )

    def cuModuleLoadData(self, image):  # noqa: N802
        return 0, image[4]

    def cuModuleGetFunction(self, module, name):  # noqa: N802
        return 0, module

    def cuFuncSetAttribute(self, function, attribute, value):  # noqa: N802
        self.asked.append((function, attribute, value))
        return (0,)

    def cuLaunchKernel(self, function, x, y, z, threads, _y, _z, shared, stream, table, extra):  # noqa: N802
        self.launches.append((function, (x, y, z), threads, shared))
        run, kinds = self.functions[function]
        kinds = [kind for kind in kinds if kind != "constexpr"]
        addresses = ctypes.cast(table, ctypes.POINTER(ctypes.c_void_p))
        sizes = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float, "i1": ctypes.c_uint8}
        values = [
            ctypes.cast(addresses[i], ctypes.POINTER(sizes.get(kind, ctypes.c_uint64)))[0]
            for i, kind in enumerate(kinds)
        ]
        run(*values)
        return (0,)


def floats(address, count):
    """Memory as a kernel sees it: no torch operation reaches it."""
    return numpy.frombuffer((ctypes.c_char * (4 * count)).from_address(address), dtype=numpy.float32)


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(replaying, "_DEVICE", "cpu")
    driver = FakeDriver()
    package = types.ModuleType("cuda.bindings")
    package.driver = driver
    monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", package)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)
    return driver


class Student:
    """A file whose launches go to the fake driver and to whoever listens."""

    def __init__(self, driver):
        self.driver, self.note = driver, None

    def listen(self, note):
        self.note = note

    def launch(self, kernel, grid, *arguments):
        if self.note is not None:
            self.note(kernel, grid, arguments)
        kinds = list(kernel.src.signature.values())
        passed = [
            value.data_ptr() if isinstance(value, torch.Tensor) else value
            for value, kind in zip(arguments, kinds, strict=True)
            if kind != "constexpr"
        ]
        self.driver.functions[kernel.kernel[4]][0](*passed)


def recorded(student, inputs, call, *, backward=None):
    recorder = Recorder(inputs, student.listen)
    with recorder.phase("forward"):
        outputs = call(*inputs[: len(inputs) - (backward is not None)])
    if backward is not None:
        with recorder.phase("backward"):
            outputs |= backward(inputs[-1])
    return record.parse(record.dump(recorder.record(outputs)))


def doubling(driver):
    """y = factor * x + 1 for n elements, one launch."""

    def run(x, y, n, factor):
        floats(y, n)[:] = floats(x, n) * numpy.float32(factor) + 1

    return driver.kernel(run, ["*fp32", "*fp32", "i32", "fp32", "constexpr"], name="double", shared=65536)


def test_a_launch_is_done_again_on_other_inputs(gpu):
    student, kernel = Student(gpu), doubling(gpu)

    def call(x):
        y = torch.empty_like(x)
        student.launch(kernel, (2, 1, 1), x, y, x.numel(), 2.5, 64)
        return {"y": y}

    found = recorded(student, [torch.arange(8.0)], call)
    assert found.reasons == ()
    assert found.forward == (
        record.Launch(0, (2, 1, 1), (record.Pointer(0), record.Pointer(1), b"\x08\0\0\0", b"\0\0\x20\x40")),
    )
    fresh = torch.randn(8)
    (y,) = Replayer(found).call(fresh, None)
    assert torch.equal(y, fresh * 2.5 + 1)
    assert gpu.launches == [(0, (2, 1, 1), 128, 65536)]
    assert gpu.asked == [(0, "most shared", 65536)]


def test_memory_between_two_launches_is_the_replays_own(gpu):
    student, kernel = Student(gpu), doubling(gpu)

    def call(x):
        middle, y = torch.empty_like(x), torch.empty_like(x)
        student.launch(kernel, (1, 1, 1), x, middle, 8, 2.0, 64)
        student.launch(kernel, (1, 1, 1), middle, y, 8, 3.0, 64)
        return {"y": y}

    found = recorded(student, [torch.arange(8.0)], call)
    fresh = torch.randn(8)
    replayer = Replayer(found)
    first, second = replayer.call(fresh)[0], replayer.call(fresh + 1)[0]
    assert torch.equal(first, (fresh * 2 + 1) * 3 + 1)
    assert torch.equal(second, ((fresh + 1) * 2 + 1) * 3 + 1)
    assert first.data_ptr() != second.data_ptr()


def test_views_fills_and_copies_are_done_again_too(gpu):
    student = Student(gpu)

    def add_to(y, x, n):
        floats(y, n)[:] += floats(x, n)

    kernel = gpu.kernel(add_to, ["*fp32", "*fp32", "i32"])

    def call(x):
        packed = x.t().contiguous()
        y = torch.full_like(packed, 10.0)
        y[0].zero_()
        student.launch(kernel, (1, 1, 1), y, packed, packed.numel())
        return {"y": y.to(torch.float64), "tail": y[1:, 1:]}

    found = recorded(student, [torch.randn(4, 3)], call)
    assert found.reasons == ()
    fresh = torch.randn(4, 3)
    y, tail = Replayer(found).call(fresh)
    want = fresh.t().contiguous() + torch.tensor([0.0, 10.0, 10.0])[:, None]
    assert torch.equal(y, want.double())
    assert torch.equal(tail, want[1:, 1:])
    assert tail.stride() == (4, 1)


def test_an_offset_into_an_input_and_a_slice_of_a_buffer_keep_their_place(gpu):
    student, kernel = Student(gpu), doubling(gpu)

    def call(x):
        y = torch.zeros(16)
        student.launch(kernel, (1, 1, 1), x[4:], y[8:], 4, 1.0, 64)
        return {"y": y}

    arena = torch.randn(64)  # inputs are views of one memory, as in a window
    found = recorded(student, [arena[16:24]], call)
    other = torch.randn(64)
    (y,) = Replayer(found).call(other[32:40])
    assert torch.equal(y[8:12], other[36:40] + 1)
    assert not y[:8].any()


def test_a_backward_with_the_gradient_as_its_last_input(gpu):
    student = Student(gpu)

    def scaled(x, y, n, factor):
        floats(y, n)[:] = floats(x, n) * numpy.float32(factor)

    kernel = gpu.kernel(scaled, ["*fp32", "*fp32", "i32", "fp32"])

    def call(x):
        o = torch.empty_like(x)
        student.launch(kernel, (1, 1, 1), x, o, x.numel(), 3.0)
        return {"o": o}

    def backward(do):
        dx = torch.empty_like(do)
        student.launch(kernel, (1, 1, 1), do, dx, do.numel(), 3.0)
        return {"dx": dx}

    found = recorded(student, [torch.randn(6), torch.randn(6)], call, backward=backward)
    replayer = Replayer(found)
    assert replayer.is_autograd
    x, do = torch.randn(6, requires_grad=True), torch.randn(6)
    o = replayer.call(x)
    (dx,) = torch.autograd.grad(o, [x], do)
    assert torch.equal(o.detach(), x.detach() * 3)
    assert torch.equal(dx, do * 3)


def test_an_answer_of_torchs_is_not_in_the_kernels(gpu):
    """What a decoy looks like: its kernel writes memory that nobody returns."""
    student, kernel = Student(gpu), doubling(gpu)

    def call(x):
        decoy = torch.empty_like(x)
        student.launch(kernel, (1, 1, 1), x, decoy, x.numel(), 2.0, 64)
        return {"y": torch.softmax(x, -1)}

    found = recorded(student, [torch.randn(8)], call)
    assert {one.base for one in found.operations["forward"]} == {"_softmax"}
    stripped = found.without("forward", {"_softmax"})
    fresh = torch.randn(8)
    (y,) = Replayer(stripped).call(fresh)
    assert not torch.allclose(y, torch.softmax(fresh, -1))
    (y,) = Replayer(found).call(fresh)
    assert torch.equal(y, torch.softmax(fresh, -1))


@pytest.mark.parametrize(
    ("kinds", "arguments", "reason"),
    [
        pytest.param(["tensordesc<fp16[64, 64]>"], [object()], "tensordesc", id="tensor-descriptor"),
        pytest.param([("i32", "i32")], [(1, 2)], "tuples", id="tuple"),
        pytest.param(["*fp32"], [torch.zeros(4)], "there before the call", id="memory-from-before"),
    ],
)
def test_what_cannot_be_replayed_says_why(gpu, kinds, arguments, reason):
    student = Student(gpu)
    kernel = gpu.kernel(lambda *_: None, kinds)

    def call(x):
        student.note(kernel, (1, 1, 1), arguments)
        return {"y": torch.zeros_like(x)}

    assert any(reason in one for one in recorded(student, [torch.randn(4)], call).reasons)


def test_an_output_from_before_the_call_cannot_be_replayed(gpu):
    kept = torch.zeros(4)
    found = recorded(Student(gpu), [torch.randn(4)], lambda x: {"y": kept})
    assert found.reasons
    assert "y" not in found.outputs


@pytest.mark.parametrize(
    ("kind", "value", "packed"),
    [
        pytest.param("i32", -1, b"\xff" * 4, id="negative"),
        pytest.param("i64", 1 << 40, (1 << 40).to_bytes(8, "little"), id="long"),
        pytest.param("u8", 255, b"\xff", id="byte"),
        pytest.param("i1", True, b"\x01", id="bool"),
        pytest.param("fp32", math.inf, b"\x00\x00\x80\x7f", id="infinity"),
        pytest.param("fp64", 1.0, b"\x00" * 6 + b"\xf0\x3f", id="double"),
        pytest.param("fp16", 1.0, b"\x00\x3c", id="half"),
        pytest.param("bf16", 1.0, b"\x80\x3f", id="bfloat16"),
    ],
)
def test_numbers_are_packed_as_the_launcher_packs_them(gpu, kind, value, packed):
    student = Student(gpu)
    kernel = gpu.kernel(lambda *_: None, [kind])

    def call(x):
        student.note(kernel, (1, 1, 1), [value])
        return {"y": torch.zeros_like(x)}

    found = recorded(student, [torch.randn(4)], call)
    launch = next(step for step in found.forward if isinstance(step, record.Launch))
    assert launch.arguments == (packed,)


def test_global_memory_that_a_kernel_asks_for_is_given_behind_its_arguments(gpu):
    seen = []
    kernel = gpu.kernel(lambda n, scratch, profile: seen.append((n, scratch, profile)), ["i32"], scratch=128)
    gpu.functions[-1] = (gpu.functions[-1][0], ["i32", "*u8", "*u8"])  # as the launcher passes them
    student = Student(gpu)

    def call(x):
        student.note(kernel, (3, 1, 1), [7])
        return {"y": torch.zeros_like(x)}

    found = recorded(student, [torch.randn(4)], call)
    Replayer(found).call(torch.randn(4))
    ((n, scratch, profile),) = seen
    assert n == 7
    assert scratch
    assert scratch % 16 == 0
    assert profile == 0


@pytest.mark.parametrize(
    "upload",
    [
        pytest.param(lambda y, host: torch.ops.aten.add(y, host), id="into-a-result"),
        pytest.param(lambda y, host: y.copy_(host), id="in-place"),
    ],
)
def test_numbers_of_the_hosts_are_named_as_such(gpu, monkeypatch, upload):
    """Here everything is on one device, so which tensors are the host's is played."""
    host = torch.ones(4)
    monkeypatch.setattr(replaying, "_is_elsewhere", lambda value: value is host)
    found = recorded(Student(gpu), [torch.randn(4)], lambda x: {"y": upload(torch.zeros_like(x), host)})
    assert [one.base for one in found.operations["forward"]] == ["zeros_like", "from_host"]
    assert found.reasons == ()


def test_nothing_is_noted_outside_of_a_phase(gpu):
    student = Student(gpu)
    recorder = Recorder([torch.randn(4)], student.listen)
    with recorder.phase("forward"):
        assert student.note is not None
    assert student.note is None
    torch.zeros(4)
    assert recorder.record({}).forward == ()


def test_two_allocations_that_touch_are_two_buffers(gpu):
    """A caching allocator hands out neighbours: where one ends, the next begins."""
    memory = bytearray(128)
    first, second = (torch.frombuffer(memory, dtype=torch.float32, count=16, offset=at) for at in (0, 64))
    recorder = Recorder([torch.zeros(4)], Student(gpu).listen)
    assert [recorder._own(first), recorder._own(second), recorder._own(first[4:])] == [True, True, False]
    found = record.parse(record.dump(recorder.record({"a": first[8:], "b": second})))
    assert (found.outputs["a"].buffer, found.outputs["a"].offset) == (1, 32)
    assert (found.outputs["b"].buffer, found.outputs["b"].offset) == (2, 0)


def test_launches_of_a_triton_that_we_do_not_know_are_not_noted_by_halves(monkeypatch):
    """No launch in a record would look like a file whose kernels do nothing."""
    monkeypatch.setattr(replaying, "CompiledKernel", type("CompiledKernel", (), {}))
    recorder = Recorder([torch.zeros(4)], replaying.watch_launches())
    with pytest.raises(RuntimeError, match="cannot be noted"), recorder.phase("forward"):
        pass


def test_every_launch_passes_by_whoever_listens(monkeypatch):
    """The very classes of Triton's that are watched, with a launcher that does nothing."""
    launched, noted = [], []

    class Compiled:
        def _init_handles(self):
            self.function = 77

    class Launcher:
        def __call__(self, *arguments):
            launched.append(arguments)

    monkeypatch.setattr(replaying, "CompiledKernel", Compiled)
    monkeypatch.setattr(replaying, "CudaLauncher", Launcher)
    listen = replaying.watch_launches()
    kernel = Compiled()
    kernel._init_handles()
    launch = (3, 2, 1, "stream", 77, "metadata", "launch metadata", None, None, "x", 5)
    Launcher()(*launch)
    listen(lambda *seen: noted.append(seen))
    Launcher()(*launch)
    listen(None)
    Launcher()(*launch)
    assert launched == [launch] * 3
    assert noted == [(kernel, (3, 2, 1), ("x", 5))]
