"""Repairs of Triton's interpreter, so that what it computes is right and what it touches can be watched.

The interpreter of Triton 3.6 (`TRITON_INTERPRET=1`) runs a kernel as Python over NumPy arrays. As shipped it computes
bfloat16 on raw bits, needs a GPU driver for `@triton.autotune`, reads and writes whatever address a kernel made up, and
spends most of its time in re-patching `triton.language` and in building type objects. `prepare_interpreter` mends all
four in this process. Triton's own sources stay as they are: every change is an assignment to an attribute of its
modules.

Runs inside the sandbox, beside the student's file: nothing here is secret and nothing here is trusted.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import math
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
import triton
import triton.language as tl

# Any: Triton's internals carry no types that a checker could use
_stock: Any = importlib.import_module("triton.runtime.interpreter")
_core: Any = importlib.import_module("triton.language.core")
_semantic: Any = importlib.import_module("triton.language.semantic")
_autotuner: Any = importlib.import_module("triton.runtime.autotuner")
_errors: Any = importlib.import_module("triton.runtime.errors")
_standard: Any = importlib.import_module("triton.language.standard")
_language: Any = tl

Array = np.ndarray[Any, Any]
InterpreterError: type[Exception] = _errors.InterpreterError


class Probe(Protocol):
    """What watches launches. Addresses are unsigned 64-bit; a `mask` of None means that every lane is active."""

    runs_programs: bool

    def begin(self, function: Any) -> None:
        """A launch of this kernel starts."""

    def address(self, name: str, tensor: torch.Tensor) -> int:
        """The address that the kernel gets for a tensor argument."""

    def order(self, grid: tuple[int, int, int]) -> Sequence[int] | None:
        """The order in which to run the programs, as row-major numbers; None for the natural one."""

    def program(self, number: int) -> None:
        """The program with this row-major number starts."""

    def load(self, at: Array, mask: Array | None, size: int) -> tuple[Array, Array | None, Array | None]:
        """Real addresses, the lanes that may be read, and the lanes to poison (None: none)."""

    def store(self, at: Array, mask: Array | None, size: int) -> tuple[Array, Array | None]:
        """Real addresses and the lanes that may be written."""

    def atomic(self, at: Array, mask: Array | None, size: int, exchange: bool) -> tuple[Array, Array | None]:
        """As `store`, for a read-modify-write; `exchange` for those that locks are made of."""

    def dot(self, batch: int, m: int, n: int, k: int) -> None:
        """A matrix product of [m, k] and [k, n]."""

    def end(self) -> None:
        """The launch is over, by its end or by an exception."""


class _State:
    """What is going on in this process."""

    prepared = False
    depth = 0  # of kernels and device functions under way; `triton.language` is patched while it is not 0
    compile_lines: list[int]  # lines from which torch.compile was called, 0 where unknown


class _Watched(threading.local):
    """The launches of one thread. Those that a student's own threads make are not seen, and must not be."""

    probe: Probe | None = None


_state = _State()
_state.compile_lines = []
_watched = _Watched()
# the interpreter patches `triton.language` and keeps its grid in one object: threads take turns
_one_launch_at_a_time = threading.RLock()


def prepare_interpreter() -> None:
    """Mend the interpreter in this process. Call once, before the student's file is imported; further calls do nothing.

    Raises:
        RuntimeError: Triton was imported without `TRITON_INTERPRET=1`, so its functions are not interpreted.
    """
    if _state.prepared:
        return
    if not isinstance(_language.max, _stock.InterpretedFunction):
        raise RuntimeError("Triton was imported without TRITON_INTERPRET=1 in the environment")  # noqa: TRY004
    _speed_up_types()
    _speed_up_semantics()
    _mend_launches()
    _mend_memory()
    _mend_bfloat16()
    _mend_reductions()
    _mend_autotune()
    _note_compile()
    _state.prepared = True


@contextlib.contextmanager
def probing(probe: Probe) -> Iterator[None]:
    """Let `probe` see every launch inside the block."""
    previous, _watched.probe = _watched.probe, probe
    try:
        yield
    finally:
        _watched.probe = previous


def compile_lines() -> list[int]:
    """Lines from which `torch.compile` was called since `prepare_interpreter`; 0 where no Python file called it."""
    return list(_state.compile_lines)


def root_cause(error: BaseException) -> BaseException:
    """The exception that the student's kernel raised, without the interpreter's wrappings around it."""
    while isinstance(error, InterpreterError) and error.__cause__ is not None:
        error = error.__cause__
    return error


# ---- launches -----------------------------------------------------------------------------------------------------


class _LanguagePatch:
    """`triton.language` with its builtins bound to the interpreter. The list is made once; Triton makes it per call."""

    def __init__(self) -> None:
        self.changes: list[tuple[Any, str, Any, Any]] = []  # object, attribute, value while patched, value before
        for module in (_language, _core, _language.math):
            self._bind_builtins(module, is_class=False)
        for cls in (_core.tensor, _core.tensor_descriptor_base):
            self._bind_builtins(cls, is_class=True)
        _stock._patch_lang_tensor(_core.tensor, self)
        # Triton's own converts an array of one element, which NumPy warns of
        self.set_attr(_core.tensor, "__index__", lambda tensor: int(tensor.handle.data.item()))
        for module in (_language, _core):
            _stock._patch_lang_core(module, self)

    def set_attr(self, owner: Any, name: str, value: Any) -> None:
        """Triton's own patching functions call this; it records and changes nothing."""
        self.changes.append((owner, name, value, vars(owner).get(name, _stock._MISSING)))

    def _bind_builtins(self, owner: Any, *, is_class: bool) -> None:
        for name, member in inspect.getmembers(owner):
            if _core.is_builtin(member):
                self.set_attr(owner, name, _bound_builtin(member, is_class))

    def apply(self) -> None:
        for owner, name, value, _ in self.changes:
            setattr(owner, name, value)

    def restore(self) -> None:
        # backwards: an attribute recorded twice must end at its first value
        for owner, name, _, before in reversed(self.changes):
            if before is _stock._MISSING:
                with contextlib.suppress(AttributeError):
                    delattr(owner, name)
            else:
                setattr(owner, name, before)


def _bound_builtin(member: Any, is_class: bool) -> Callable[..., Any]:
    semantic = _stock.interpreter_semantic
    # the wrapper of @builtin only checks that `_semantic` is there
    inner = getattr(member, "__wrapped__", member)

    def bound(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return inner(*args, **kwargs)

    return bound if is_class else _keep_name(bound, member)


def _keep_name(function: Any, like: Any) -> Callable[..., Any]:
    function.__name__ = getattr(like, "__name__", "builtin")
    return function  # type: ignore[no-any-return]


@contextlib.contextmanager
def _language_patched(patch: _LanguagePatch) -> Iterator[None]:
    with _one_launch_at_a_time:
        if _state.depth == 0:
            patch.apply()
        _state.depth += 1
        try:
            yield
        finally:
            _state.depth -= 1
            if _state.depth == 0:
                patch.restore()


def _mend_launches() -> None:
    # debug is off, so the overflow checks are computed and thrown away
    options = _stock.InterpreterOptions(sanitize_overflow=False)
    _stock.interpreter_builder.options = options
    patch = _LanguagePatch()

    def launch(executor: Any, *args: Any, **kwargs: Any) -> None:
        with _language_patched(patch):
            _launch(executor, args, kwargs)

    def device_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        function = self.rewrite()
        if _state.depth:
            # inside a kernel the launch wraps; once is enough
            return function(*args, **kwargs)
        with _language_patched(patch):
            try:
                return function(*args, **kwargs)
            except Exception as error:
                raise InterpreterError(repr(error)) from error

    _stock.GridExecutor.__call__ = launch
    _stock.InterpretedFunction.__call__ = device_call


def _launch(executor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Run one launch. Unlike Triton's own it copies no storage: arguments are CPU tensors already."""
    function = executor.fn
    code = function.__code__
    parameters = code.co_varnames[: code.co_argcount]
    kwargs = {name: value for name, value in kwargs.items() if name in parameters}
    for hook in executor.pre_run_hooks:
        hook(*args, **kwargs)
    arguments = inspect.getcallargs(function, *args, **kwargs)
    grid = _grid_of(executor.grid, arguments)
    probe = _watched.probe
    if probe is not None:
        probe.begin(function)
    try:
        constants = frozenset(executor.constexprs)
        converted = {
            name: value if name in constants else _to_language(value, name, probe) for name, value in arguments.items()
        }
        if probe is None or probe.runs_programs:
            _run_programs(function, converted, grid, probe)
    finally:
        if probe is not None:
            probe.end()


def _grid_of(grid: Any, arguments: dict[str, Any]) -> tuple[int, int, int]:
    # the values as passed: a compiled launch hands a callable grid plain numbers, too
    chosen = grid(arguments) if callable(grid) else grid
    if isinstance(chosen, (int, np.integer)):
        chosen = (chosen,)
    sizes = [int(getattr(size, "value", size)) for size in chosen]
    if not 1 <= len(sizes) <= 3:
        raise ValueError(f"the grid has {len(sizes)} dimensions; a launch takes one to three")
    x, y, z = sizes + [1] * (3 - len(sizes))
    return x, y, z


def _run_programs(function: Any, arguments: dict[str, Any], grid: tuple[int, int, int], probe: Probe | None) -> None:
    builder = _stock.interpreter_builder
    builder.set_grid_dim(*grid)
    order = probe.order(grid) if probe is not None else None
    _, ny, nz = grid
    count = math.prod(grid)
    # a float32 that overflows to infinity is the student's business, not a warning on stderr
    with np.errstate(all="ignore"):
        try:
            for number in range(count) if order is None else order:
                x, rest = divmod(number, ny * nz)
                y, z = divmod(rest, nz)
                builder.grid_idx = (x, y, z)
                if probe is not None:
                    probe.program(number)
                function(**arguments)
        except InterpreterError:
            raise
        except Exception as error:
            raise InterpreterError(repr(error)) from error


def _to_language(value: Any, name: str, probe: Probe | None) -> Any:
    """A kernel argument as the interpreter wants it. Tensors become pointers, numbers become scalars."""
    if hasattr(value, "data_ptr"):
        tensor = _stock._unwrap_tensor(value)
        if tensor.device.type != "cpu":
            raise ValueError(f"argument {name} is on {tensor.device}; the interpreter reads CPU tensors only")
        handle = _stock._implicit_cvt(value)
        if probe is not None:
            handle.handle.data = np.array([probe.address(name, tensor)], dtype=np.uint64)
        return handle
    if isinstance(value, tuple):
        return _stock._tuple_create(value, [_to_language(item, name, probe) for item in value])
    if isinstance(value, _stock.TensorDescriptor):
        sizes = [_stock._implicit_cvt(size) for size in value.shape]
        strides = [_stock._implicit_cvt(stride) for stride in value.strides[:-1]] + [_core.constexpr(1)]
        return _stock.interpreter_semantic.make_tensor_descriptor(
            base=_to_language(value.base, name, probe),
            shape=sizes,
            strides=strides,
            block_shape=[_core.constexpr(size) for size in value.block_shape],
            padding_option=value.padding,
        )
    return _stock._implicit_cvt(value)


# ---- memory -------------------------------------------------------------------------------------------------------


def _mend_memory() -> None:
    builder = _stock.InterpreterBuilder
    builder.create_load = lambda _, ptr, *__: _load(ptr, None, None)
    builder.create_store = lambda _, ptr, value, *__: _store(ptr, value, None)
    builder.create_masked_load = _create_masked_load
    builder.create_masked_store = _create_masked_store
    builder.create_atomic_rmw = _create_atomic_rmw
    builder.create_atomic_cas = _create_atomic_cas
    builder.create_dot = _create_dot


def _create_masked_load(_: Any, ptrs: Any, mask: Any, other: Any, *__: Any, **___: Any) -> Any:
    return _load(ptrs, _mask_array(mask), other)


def _create_masked_store(_: Any, ptrs: Any, value: Any, mask: Any, *__: Any, **___: Any) -> None:
    _store(ptrs, value, _mask_array(mask))


def _mask_array(mask: Any) -> Array:
    # block pointers and descriptors hand their masks over as bare arrays
    return mask.data if isinstance(mask, _stock.TensorHandle) else mask  # type: ignore[no-any-return]


def _element_bytes(handle: Any) -> int:
    bits: int = handle.get_element_ty().primitive_bitwidth
    return max(1, bits // 8)


def _load(ptrs: Any, mask: Array | None, other: Any) -> Any:
    element = ptrs.get_element_ty()
    dtype = _np_dtype(element)
    at, shape, poisoned = ptrs.data, ptrs.data.shape, None
    probe = _watched.probe
    if probe is not None:
        at, mask, poisoned = probe.load(at, mask, _element_bytes(ptrs))
    lanes = np.ones(shape, bool) if mask is None else mask
    default = np.zeros(shape, dtype) if other is None else other.data
    if poisoned is not None:
        default = np.array(np.broadcast_to(default, shape), dtype=dtype)
        default[poisoned] = _poison(element, dtype)
    return _stock.TensorHandle(_stock._interpreter.load(at, lanes, default, dtype), element)


def _store(ptrs: Any, value: Any, mask: Array | None) -> None:
    at = ptrs.data
    probe = _watched.probe
    if probe is not None:
        at, mask = probe.store(at, mask, _element_bytes(ptrs))
    _stock._interpreter.store(at, value.data, np.ones(at.shape, bool) if mask is None else mask)


def _create_atomic_rmw(builder: Any, op: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> Any:
    at, lanes = ptr.data, _mask_array(mask)
    probe = _watched.probe
    if probe is not None:
        at, kept = probe.atomic(at, lanes, _element_bytes(ptr), op == _stock._ir.ATOMIC_OP.XCHG)
        lanes = np.ones(at.shape, bool) if kept is None else kept
    if _is_bfloat16(val):
        return _atomic_bfloat16(op, at, val, lanes)
    handle = _stock.TensorHandle
    return _stock_rmw(builder, op, handle(at, ptr.dtype), val, handle(lanes, tl.int1), sem, scope)


def _create_atomic_cas(builder: Any, ptr: Any, cmp: Any, val: Any, sem: Any, scope: Any) -> Any:
    at = ptr.data
    probe = _watched.probe
    if probe is not None:
        at, kept = probe.atomic(at, None, _element_bytes(ptr), True)
        if kept is not None:
            raise IndexError("tl.atomic_cas outside its tensor")
    return _stock_cas(builder, _stock.TensorHandle(at, ptr.dtype), cmp, val, sem, scope)


def _create_dot(builder: Any, a: Any, b: Any, d: Any, *rest: Any, **named: Any) -> Any:
    probe = _watched.probe
    if probe is not None:
        m, k = a.data.shape[-2:]
        probe.dot(math.prod(a.data.shape[:-2]), m, b.data.shape[-1], k)
    return _stock_dot(builder, _dot_operand(a, d), _dot_operand(b, d), d, *rest, **named)


def _poison(element: Any, dtype: Any) -> Any:
    """What a load outside its tensor yields: NaN, or the largest integer."""
    if element == tl.bfloat16:
        return 0x7FC0
    if dtype.kind == "f":
        return np.nan
    return True if dtype.kind == "b" else np.iinfo(dtype).max


def _dot_operand(operand: Any, accumulator: Any) -> Any:
    if _is_bfloat16(operand):
        return _stock.TensorHandle(_widen(operand.data), tl.float32)
    if operand.data.dtype == np.float16 and accumulator.data.dtype == np.float32:
        # the same product, through BLAS
        return _stock.TensorHandle(operand.data.astype(np.float32, order="C"), tl.float32)
    return operand


# ---- bfloat16 -----------------------------------------------------------------------------------------------------


def _is_bfloat16(handle: Any) -> bool:
    # a comparison keeps its operand's type on a handle of booleans
    return bool(handle.data.dtype == np.uint16 and handle.dtype.scalar == tl.bfloat16)


def _widen(bits: Array) -> Array:
    """bfloat16 bits to float32, exactly."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _narrow(values: Any) -> Array:
    """Float32 to bfloat16 bits, to nearest, ties to even; every NaN becomes the quiet one."""
    floats = np.asarray(values, dtype=np.float32)
    bits = floats.view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = ((bits + (odd + np.uint32(0x7FFF))) >> np.uint32(16)).astype(np.uint16)
    nan = np.isnan(floats)
    return np.where(nan, np.uint16(0x7FC0), rounded) if nan.any() else rounded


def _values(operand: Any) -> Array:
    return _widen(operand.data) if _is_bfloat16(operand) else operand.data


def _from_floats(values: Any) -> Any:
    return _stock.TensorHandle(_narrow(values), tl.bfloat16)


def _mend_bfloat16() -> None:
    builder = _stock.InterpreterBuilder
    builder.binary_op = _binary_op
    builder.unary_op = _unary_op
    builder.ternary_op = _ternary_op
    builder.cast_impl = _cast_impl
    builder.create_fp_to_fp = _create_fp_to_fp
    builder.create_fma = _create_fma
    # Triton asks for it by this name and has none
    builder.get_bf16 = lambda _, value: _from_floats([value])


def _binary_op(_: Any, lhs: Any, rhs: Any, op: Any) -> Any:
    scalar = lhs.dtype.scalar
    if scalar == tl.bfloat16 and (_is_bfloat16(lhs) or _is_bfloat16(rhs)):
        result = op(_values(lhs), _values(rhs))
        return _stock.TensorHandle(result if result.dtype == np.bool_ else _narrow(result), scalar)
    result = op(lhs.data, rhs.data)
    if not _stock._validate_np_data_size(result, scalar):
        result = result.astype(_np_dtype(scalar))
    return _stock.TensorHandle(result, scalar)


def _unary_op(_: Any, arg: Any, op: Any) -> Any:
    if _is_bfloat16(arg):
        return _from_floats(op(_widen(arg.data)))
    return _stock.TensorHandle(op(arg.data), arg.dtype.scalar)


def _ternary_op(builder: Any, lhs: Any, rhs: Any, other: Any, op: Any) -> Any:
    # a selection moves bits and needs no arithmetic
    if op is not np.where and _is_bfloat16(other):
        return _from_floats(op(_values(lhs), _values(rhs), _values(other)))
    return _stock_ternary(builder, lhs, rhs, other, op)


def _cast_impl(builder: Any, src: Any, dst_type: Any) -> Any:
    source, target = src.dtype.scalar, dst_type.scalar
    if target == tl.bfloat16 and source != target:
        return _from_floats(src.data.astype(np.float32))
    if source == tl.bfloat16 and _is_bfloat16(src) and source != target:
        return _stock.TensorHandle(_widen(src.data).astype(_np_dtype(target)), target)
    return _stock_cast(builder, src, dst_type)


def _create_fp_to_fp(builder: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
    nearest = rounding_mode in (None, _stock._ir.ROUNDING_MODE.RTNE)
    types = (src.dtype.scalar, dst_type.scalar)
    if nearest and tl.bfloat16 in types and all(item.primitive_bitwidth > 8 for item in types):
        return _cast_impl(builder, src, dst_type)
    return _stock_fp_to_fp(builder, src, dst_type, rounding_mode)


def _create_fma(builder: Any, x: Any, y: Any, z: Any) -> Any:
    if _is_bfloat16(z):
        return _from_floats(_values(x) * _values(y) + _values(z))
    return _stock_fma(builder, x, y, z)


def _atomic_bfloat16(op: Any, at: Array, val: Any, lanes: Array) -> Any:
    """Triton's interpreter would add the raw bits. Lane after lane, because two lanes may name one address."""
    raw: Any = _stock._interpreter
    known: dict[str, Callable[[Array, Array], Array]]
    known = {"FADD": np.add, "MAX": np.maximum, "MIN": np.minimum, "XCHG": lambda _, new: new}
    combine = known.get(op.name)
    if combine is None:
        raise ValueError(f"atomic {op.name} has no meaning for bfloat16")
    one, zero, dtype = np.ones(1, bool), np.zeros(1, np.uint16), np.dtype(np.uint16)
    addresses = at.reshape(-1)
    news = np.broadcast_to(val.data, at.shape).reshape(-1)
    olds = np.zeros(addresses.shape, np.uint16)
    for lane in np.flatnonzero(np.broadcast_to(lanes, at.shape)):
        where = addresses[lane : lane + 1].copy()
        olds[lane : lane + 1] = raw.load(where, one, zero, dtype)
        result = _narrow(combine(_widen(olds[lane : lane + 1]), _widen(news[lane : lane + 1])))
        raw.store(where, result, one)
    return _stock.TensorHandle(olds.reshape(at.shape), tl.bfloat16)


# ---- reductions and scans -----------------------------------------------------------------------------------------


def _mend_reductions() -> None:
    """bfloat16 in float32; custom combine functions on whole slices instead of element by element."""
    _stock.ReduceScanOpInterface.apply = _apply
    _stock.ReduceOps.apply_impl = _reduce
    _stock.ReduceOps.generic_reduce = _generic_reduce
    _stock.ScanOps.generic_scan = _generic_scan


def _apply(ops: Any, inputs: Any) -> Any:
    if not isinstance(inputs, tuple):
        return ops.apply((inputs,))[0]
    if not any(_is_bfloat16(item.handle) for item in inputs):
        return _stock_apply(ops, inputs)
    results = _stock_apply(ops, tuple(_as_float32(item) for item in inputs))
    # a result that was bfloat16 before is so again; an index stays one
    return tuple(
        _as_bfloat16(result) if k < len(inputs) and _is_bfloat16(inputs[k].handle) else result
        for k, result in enumerate(results)
    )


def _reduce(ops: Any, inputs: Any) -> Any:
    # as Triton's nanmax and nanmin, without NumPy's warning where a whole row is NaN
    extreme = {_standard._elementwise_max: np.fmax, _standard._elementwise_min: np.fmin}.get(ops.combine_fn)
    if extreme is None:
        return _stock_reduce(ops, inputs)
    data = inputs[0].handle.data
    return ops.to_tensor(extreme.reduce(data, axis=ops.axis, keepdims=ops.keep_dims), inputs[0].dtype)


def _generic_reduce(ops: Any, inputs: Any) -> Any:
    types = [item.dtype for item in inputs]
    rank = inputs[0].handle.data.ndim
    axis = 0 if ops.axis is None else ops.axis
    columns = [item.handle.data.reshape(-1) if ops.axis is None else item.handle.data for item in inputs]
    # neighbours pair up, so that the order of elements is kept for a function that does not commute
    while columns[0].shape[axis] > 1:
        left = _as_tensors(ops, [_every_other(column, axis, 0) for column in columns], types)
        right = _as_tensors(ops, [_every_other(column, axis, 1) for column in columns], types)
        columns = [item.handle.data for item in _combined(ops.combine_fn, left, right)]
    if ops.keep_dims:
        return _as_tensors(ops, [c if ops.axis is not None else c.reshape((1,) * rank) for c in columns], types)
    reduced = [np.squeeze(column, axis=axis) for column in columns]
    return _as_tensors(ops, [item if item.shape else item.item() for item in reduced], types)


def _generic_scan(ops: Any, inputs: Any) -> Any:
    types = [item.dtype for item in inputs]
    columns = [np.moveaxis(item.handle.data, ops.axis, 0) for item in inputs]
    outputs = [np.empty_like(column) for column in columns]
    for step in range(columns[0].shape[0]):
        now = _as_tensors(ops, [column[step : step + 1] for column in columns], types)
        if step:
            before = _as_tensors(ops, [output[step - 1 : step] for output in outputs], types)
            now = _combined(ops.combine_fn, before, now)
        for output, item in zip(outputs, now, strict=True):
            output[step] = item.handle.data[0]
    return _as_tensors(ops, [np.moveaxis(output, 0, ops.axis) for output in outputs], types)


def _as_tensors(ops: Any, columns: Sequence[Any], types: Sequence[Any]) -> list[Any]:
    return [ops.to_tensor(column, type_) for column, type_ in zip(columns, types, strict=True)]


def _every_other(array: Array, axis: int, first: int) -> Array:
    return array[(slice(None),) * axis + (slice(first, None, 2),)]


def _combined(function: Any, left: list[Any], right: list[Any]) -> list[Any]:
    result = function.fn(*left, *right)
    items = list(result) if isinstance(result, (tuple, list)) else [result]
    return [_stock.interpreter_semantic.to_tensor(item) for item in items]


def _retyped(tensor: Any, data: Array, scalar: Any) -> Any:
    type_ = _core.block_type(scalar, tensor.type.shape) if tensor.type.is_block() else scalar
    return _core.tensor(_stock.TensorHandle(data, scalar), type_)


def _as_float32(tensor: Any) -> Any:
    return _retyped(tensor, _widen(tensor.handle.data), tl.float32) if _is_bfloat16(tensor.handle) else tensor


def _as_bfloat16(tensor: Any) -> Any:
    return _retyped(tensor, _narrow(tensor.handle.data), tl.bfloat16) if tensor.dtype == tl.float32 else tensor


# ---- autotune and the driver --------------------------------------------------------------------------------------


class _DriverUtils:
    def get_device_properties(self, _: int) -> dict[str, int]:
        return {
            "max_shared_mem": 232448,
            "max_num_regs": 65536,
            "multiprocessor_count": 132,
            "warpSize": 32,
            "sm_clock_rate": 1980000,
            "mem_clock_rate": 2619000,
            "mem_bus_width": 5120,
        }


class _InterpreterDriver:
    """Answers what kernels and autotuners ask a driver. The numbers are those of an H100 or H200 SXM."""

    def __init__(self) -> None:
        self.utils = _DriverUtils()

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> Any:
        compiler = importlib.import_module("triton.backends.compiler")
        return compiler.GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_device_capability(self, _: int = 0) -> tuple[int, int]:
        return 9, 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        return torch.cpu

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_benchmarker(self) -> Callable[..., list[float]]:
        def once(call: Callable[[], Any], quantiles: Sequence[float] | None = None, **_: Any) -> list[float]:
            call()
            return [0.0] * (len(quantiles) if quantiles else 1)

        return once

    def get_empty_cache_for_benchmark(self) -> torch.Tensor:
        return torch.empty(1)

    def clear_cache(self, cache: torch.Tensor) -> None:
        cache.zero_()


def _mend_autotune() -> None:
    """The first configuration that is left after pruning runs, without a trial: nothing here could be timed."""
    triton.runtime.driver.set_active(_InterpreterDriver())
    _autotuner.Autotuner.run = _autotuned_run


def _autotuned_run(tuner: Any, *args: Any, **kwargs: Any) -> Any:
    tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
    try:
        if len(tuner.configs) == 1:
            return _run_config(tuner, tuner.configs[0], args, kwargs)
        known = {name: value for name, value in {**tuner.nargs, **kwargs}.items() if name in tuner.arg_names}
        dtypes = [str(value.dtype) for value in known.values() if hasattr(value, "dtype")]
        key = (*(known[name] for name in tuner.keys if name in known), *dtypes)
        if key in tuner.cache:
            return _run_config(tuner, tuner.cache[key], args, kwargs)
        return _run_first_valid(tuner, key, args, kwargs)
    finally:
        tuner.nargs = None


def _run_config(tuner: Any, config: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tuner.best_config = config
    meta = config.all_kwargs()
    if config.pre_hook is not None:
        config.pre_hook({**tuner.nargs, **kwargs, **meta})
    return tuner.fn.run(*args, **kwargs, **meta)


def _run_first_valid(tuner: Any, key: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    configs = list(tuner.prune_configs(kwargs))
    for config in configs:
        both = kwargs.keys() & config.kwargs.keys()
        if both:
            raise ValueError(
                f"Conflicting meta-parameters: {', '.join(sorted(both))}."
                " Make sure that you don't re-define auto-tuned symbols."
            )
        # what reset_to_zero names is zeroed once, after the trials
        tuner.pre_hook({**tuner.nargs, **kwargs, **config.all_kwargs()}, reset_only=True)
        try:
            result = _run_config(tuner, config, args, kwargs)
        except InterpreterError as error:
            # tl.static_assert rejects a configuration at compile time; any other error is the student's
            if config is configs[-1] or not isinstance(root_cause(error), AssertionError):
                raise
        else:
            tuner.cache[key] = config
            return result
    raise _errors.AutotunerError("No valid autotuner configs after pruning.")


def _note_compile() -> None:
    stock_compile: Any = torch.compile

    def noted(*args: Any, **kwargs: Any) -> Any:
        _state.compile_lines.append(sys._getframe(1).f_lineno)
        return stock_compile(*args, **kwargs)

    torch.compile = noted


# ---- speed --------------------------------------------------------------------------------------------------------


def _np_dtype(type_: Any) -> Any:
    """NumPy's dtype for a Triton type; uint64 for pointers."""
    if isinstance(type_, _core.block_type):
        type_ = type_.element_ty
    known = _np_dtypes.get(type_.name)
    if known is None:
        known = _np_dtypes[type_.name] = _stock_np_dtype(type_)
    return known


_np_dtypes: dict[str, Any] = {}
_stock_np_dtype: Any = _stock._get_np_dtype


class _Shape:
    """What Triton derives from a block's shape, made once per shape; nothing of it is ever changed."""

    __slots__ = ("constant_count", "constants", "count", "sizes", "text")

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.count = _core.validate_block_shape(list(sizes))
        self.constant_count = _core.constexpr(self.count)
        self.sizes = _core.tuple(list(sizes))
        self.constants = _core.tuple([_core.constexpr(size) for size in sizes])
        self.text = repr(self.sizes)


_shapes: dict[tuple[int, ...], _Shape] = {}
_shapes_by_identity: dict[int, _Shape] = {}  # of their `sizes` and `constants`, which `_shapes` keeps alive


def _shape_of(shape: Any) -> _Shape:
    known = _shapes_by_identity.get(id(shape))
    if known is not None:
        return known
    items = shape.values if isinstance(shape, _core.tuple) else shape
    sizes = tuple([item.value if isinstance(item, _core.constexpr) else item for item in items])
    if not sizes:
        raise TypeError("0d block_type is forbidden")
    known = _shapes.get(sizes)
    if known is None:
        known = _shapes[sizes] = _Shape(sizes)
        _shapes_by_identity[id(known.sizes)] = known
        _shapes_by_identity[id(known.constants)] = known
    return known


def _speed_up_types() -> None:
    """Blocks of one shape share their shape objects; identity then answers most comparisons."""
    _stock._get_np_dtype = _np_dtype
    _core._unwrap_if_constexpr = _unwrap
    _core.block_type.__init__ = _block_init
    _core.tensor.__init__ = _tensor_init
    _stock.TensorHandle.__init__ = _handle_init
    stock_dtype_equal, stock_tuple_equal = _core.dtype.__eq__, _core.tuple.__eq__
    yes = _core.constexpr(True)
    _core.dtype.__eq__ = lambda one, other: True if one is other else stock_dtype_equal(one, other)
    _core.tuple.__eq__ = lambda one, other: yes if one is other else stock_tuple_equal(one, other)


def _unwrap(item: Any) -> Any:
    kind = type(item)
    if kind is _core.constexpr:
        return item.value
    if kind is list:
        return [_unwrap(x) for x in item]
    if kind is tuple:
        return tuple([_unwrap(x) for x in item])
    if kind is _core.tuple:
        return _core.tuple([_unwrap(x) for x in item.values])
    return item.value if isinstance(item, _core.constexpr) else item


def _block_init(block: Any, element_ty: Any, shape: Any) -> None:
    known = _shape_of(shape)
    block.element_ty = element_ty
    block.shape = known.sizes
    block.numel = known.count
    block.name = f"<{known.text}, {element_ty}>"


def _tensor_init(tensor: Any, handle: Any, type: Any) -> None:  # noqa: A002, callers name it
    tensor.handle = handle
    tensor.type = type
    if isinstance(type, _core.block_type):
        known = _shape_of(type.shape)
        tensor.shape = known.constants
        tensor.numel = known.constant_count
        tensor.dtype = type.element_ty
    else:
        tensor.shape = _NO_SHAPE
        tensor.numel = _ONE
        tensor.dtype = type.scalar


def _handle_init(handle: Any, data: Any, dtype: Any, attr: Any = None) -> None:
    handle.data = data
    handle.dtype = dtype
    handle.attr = {} if attr is None else attr
    if not isinstance(dtype, _core.pointer_type) and data.itemsize * 8 > max(8, dtype.primitive_bitwidth):
        raise ValueError(
            f"numpy data itemsize ({data.itemsize * 8} bits) exceeds dtype primitive_bitwidth "
            f"({dtype.primitive_bitwidth} bits) for triton type {dtype}"
        )


def _speed_up_semantics() -> None:
    """Broadcasting is most of what a kernel does; Triton's own builds and compares shape lists each time."""
    semantic, builder = _semantic.TritonSemantic, _stock.InterpreterBuilder
    semantic.binary_op_type_checking_impl = _binary_operands
    semantic.broadcast_impl_value = _broadcast
    semantic.cast = _cast
    builder.create_expand_dims = _create_expand_dims
    builder.create_broadcast = _create_broadcast


def _binary_operands(semantic: Any, lhs: Any, rhs: Any, *flags: Any, **named: Any) -> Any:
    """The cases that need no promotion: two tensors of one type, or a tensor and a number that its type holds."""
    # the fourth flag says division, which promotes half precision and minds signs
    if not flags[3:] and not named:
        left, right = _plain_type(lhs), _plain_type(rhs)
        if left is not None and left is right:
            return _broadcast(semantic, lhs, rhs)
        if left is not None and _is_held(rhs, left):
            return _broadcast(semantic, lhs, semantic.scalar_constant(rhs, left))
        if right is not None and _is_held(lhs, right):
            return _broadcast(semantic, semantic.scalar_constant(lhs, right), rhs)
    return _stock_binary_operands(semantic, lhs, rhs, *flags, **named)


def _plain_type(operand: Any) -> Any:
    dtype = operand.dtype if type(operand) is _core.tensor else None
    return dtype if dtype is tl.float32 or dtype is tl.int32 or dtype is tl.uint32 else None


def _is_held(number: Any, dtype: Any) -> bool:
    if dtype is tl.float32:
        return type(number) is float or (type(number) is int and -(2**31) <= number < 2**31)
    return dtype is tl.int32 and type(number) is int and -(2**31) <= number < 2**31


def _splat(semantic: Any, tensor: Any, shape: Any) -> Any:
    handle = tensor.handle
    data = np.empty(tuple(shape.values), _np_dtype(handle.dtype))
    data.fill(handle.data.item())
    return semantic.tensor(_stock.TensorHandle(data, handle.dtype.scalar), _core.block_type(tensor.dtype, shape))


def _broadcast(semantic: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
    left, right = lhs.type, rhs.type
    if not isinstance(left, _core.block_type):
        if not isinstance(right, _core.block_type):
            return lhs, rhs
        return _splat(semantic, lhs, right.shape), rhs
    if not isinstance(right, _core.block_type):
        return lhs, _splat(semantic, rhs, left.shape)
    if left.shape is right.shape:
        return lhs, rhs
    a, b = left.shape.values, right.shape.values
    shape = [y if x == 1 else x for x, y in zip(a, b, strict=False)]
    if len(a) != len(b) or any(y not in (1, size) for y, size in zip(b, shape, strict=True)):
        return _stock_broadcast(semantic, lhs, rhs)  # type: ignore[no-any-return]
    if a != shape:
        lhs = _broadcast_to(semantic, lhs, shape)
    if b != shape:
        rhs = _broadcast_to(semantic, rhs, shape)
    return lhs, rhs


def _broadcast_to(semantic: Any, tensor: Any, shape: list[int]) -> Any:
    handle = _create_broadcast(None, tensor.handle, shape)
    return semantic.tensor(handle, _core.block_type(tensor.dtype, shape))


def _cast(semantic: Any, input: Any, dst_ty: Any, fp_downcast_rounding: Any = None) -> Any:  # noqa: A002
    if input.dtype is dst_ty.scalar:
        return input
    return _stock_semantic_cast(semantic, input, dst_ty, fp_downcast_rounding)


def _create_expand_dims(_: Any, arg: Any, axis: int) -> Any:
    data = arg.data
    shape = (*data.shape[:axis], 1, *data.shape[axis:]) if axis >= 0 else np.expand_dims(data, axis).shape
    return _stock.TensorHandle(data.reshape(shape), arg.dtype.scalar)


def _create_broadcast(_: Any, arg: Any, shape: Any) -> Any:
    # a copy of a small block costs less than np.broadcast_to, which is written in Python
    data = np.empty(tuple(shape), arg.data.dtype)
    data[...] = arg.data
    return _stock.TensorHandle(data, arg.dtype.scalar)


# Triton's own, for what is left to it
_stock_dot: Any = _stock.InterpreterBuilder.create_dot
_stock_rmw: Any = _stock.InterpreterBuilder.create_atomic_rmw
_stock_cas: Any = _stock.InterpreterBuilder.create_atomic_cas
_stock_ternary: Any = _stock.InterpreterBuilder.ternary_op
_stock_cast: Any = _stock.InterpreterBuilder.cast_impl
_stock_fma: Any = _stock.InterpreterBuilder.create_fma
_stock_fp_to_fp: Any = _stock.InterpreterBuilder.create_fp_to_fp
_stock_apply: Any = _stock.ReduceScanOpInterface.apply
_stock_reduce: Any = _stock.ReduceOps.apply_impl
_stock_binary_operands: Any = _semantic.TritonSemantic.binary_op_type_checking_impl
_stock_broadcast: Any = _semantic.TritonSemantic.broadcast_impl_value
_stock_semantic_cast: Any = _semantic.TritonSemantic.cast
_NO_SHAPE: Any = _core.tuple([])
_ONE: Any = _core.constexpr(1)
