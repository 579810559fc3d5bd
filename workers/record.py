"""What one call of a hand-in does on a GPU, as bytes: compiled kernels, launches, arguments, torch operations.

A candidate writes a record; the examiner reads it, decides what of it is replayed, and hands it to another candidate
that never saw the student's file. Both sides share this module. A record is a claim of a hostile process: `parse`
checks every number and every reference in it and bounds them all, and raises RecordError where something does not fit.
The compiled kernels in it are looked at by nobody but the driver of the process that replays them.

Layout: MAGIC, 4 bytes of length (little-endian), that much JSON, then the kernels one after another.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

MAGIC = b"TGREC001"
MOST_BYTES = 48 << 20
MOST_JSON_BYTES = 8 << 20
MOST_KERNELS = 128
MOST_KERNEL_BYTES = 8 << 20
MOST_BUFFERS = 4096
MOST_BUFFER_BYTES = 1 << 37
MOST_STEPS = 8192
MOST_ARGUMENTS = 256
MOST_DIMENSIONS = 8
MOST_NESTING = 3
MOST_SIZE = 1 << 40
MOST_TEXT = 400
MOST_REASONS = 8

PHASES = ("forward", "backward")
SCALAR_BYTES = (1, 2, 4, 8)
DTYPES = (
    "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64",
)  # fmt: skip
_ELF = b"\x7fELF"
_NAME = re.compile(r"[\w$.]{1,400}", re.ASCII)
_OP = re.compile(r"_?[a-z][a-z0-9_]{0,60}\.[A-Za-z][A-Za-z0-9_]{0,60}")


class RecordError(Exception):
    """The bytes are no record of ours."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One compiled kernel."""

    name: str
    image: bytes  # an ELF file; opaque
    shared_bytes: int
    num_warps: int
    scratch_bytes: int = 0  # global memory for each program, beside the arguments
    scratch_align: int = 1


@dataclass(frozen=True, slots=True)
class Pointer:
    """An address: so many bytes into a buffer. `buffer` None is a null pointer."""

    buffer: int | None
    offset: int = 0


@dataclass(frozen=True, slots=True)
class View:
    """A tensor: where it lies in its buffer, in bytes, and its shape and strides in elements."""

    buffer: int
    offset: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch. An argument is an address or the bytes of a number."""

    kernel: int
    grid: tuple[int, int, int]
    arguments: tuple[Pointer | bytes, ...]


@dataclass(frozen=True, slots=True)
class Operation:
    """One torch operation, "name.overload" of aten. Arguments are Views, plain values, dtypes and lists of these."""

    name: str
    arguments: tuple[Any, ...]
    named: Mapping[str, Any]
    results: tuple[View, ...]

    @property
    def base(self) -> str:
        return self.name.partition(".")[0]


@dataclass(frozen=True, slots=True)
class Dtype:
    """A dtype among the arguments of an operation."""

    name: str


Step = Launch | Operation


@dataclass(frozen=True, slots=True)
class Record:
    """Everything one call did. Buffers are numbered: first the inputs, then what the call allocated."""

    n_inputs: int
    buffers: tuple[int, ...]  # sizes in bytes of those that are no inputs
    kernels: tuple[Kernel, ...]
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    outputs: Mapping[str, View]
    reasons: tuple[str, ...] = field(default=())  # why it cannot be replayed, if it cannot

    @property
    def n_launches(self) -> int:
        return sum(isinstance(step, Launch) for step in (*self.forward, *self.backward))

    @property
    def operations(self) -> dict[str, list[Operation]]:
        """Torch operations by phase."""
        return {phase: [step for step in getattr(self, phase) if isinstance(step, Operation)] for phase in PHASES}

    def without(self, phase: str, names: Iterable[str]) -> Record:
        """The record with the operations of these base names left out of one phase."""
        left_out = frozenset(names)
        kept = tuple(
            step for step in getattr(self, phase) if not (isinstance(step, Operation) and step.base in left_out)
        )
        return replace(self, forward=kept) if phase == "forward" else replace(self, backward=kept)


def dump(record: Record) -> bytes:
    """A record as bytes."""
    body = {
        "n_inputs": record.n_inputs,
        "buffers": list(record.buffers),
        "kernels": [
            [one.name, len(one.image), one.shared_bytes, one.num_warps, one.scratch_bytes, one.scratch_align]
            for one in record.kernels
        ],
        "forward": [_dump_step(step) for step in record.forward],
        "backward": [_dump_step(step) for step in record.backward],
        "outputs": {name: _dump_view(view) for name, view in record.outputs.items()},
        "reasons": list(record.reasons),
    }
    text = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
    return b"".join([MAGIC, len(text).to_bytes(4, "little"), text, *(one.image for one in record.kernels)])


def parse(data: bytes) -> Record:
    """The inverse of `dump`, for bytes that may be anything. Raises RecordError."""
    if len(data) > MOST_BYTES or data[: len(MAGIC)] != MAGIC:
        raise RecordError("not a record, or too large a one")
    length = int.from_bytes(data[8:12], "little")
    if not 2 <= length <= min(MOST_JSON_BYTES, len(data) - 12):
        raise RecordError("its JSON is longer than it may be")
    try:
        body = json.loads(data[12 : 12 + length].decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise RecordError("its JSON cannot be read") from None
    try:
        return _Reader(body, data[12 + length :]).record()
    except (TypeError, KeyError, ValueError, IndexError, OverflowError, RecursionError) as exc:
        raise RecordError(f"it is not of our form: {type(exc).__name__}") from None


def _dump_step(step: Step) -> list[Any]:
    if isinstance(step, Launch):
        arguments = [
            ["p", one.buffer, one.offset] if isinstance(one, Pointer) else ["s", one.hex()] for one in step.arguments
        ]
        return ["launch", step.kernel, list(step.grid), arguments]
    named = {key: _dump_value(value) for key, value in step.named.items()}
    return ["op", step.name, [_dump_value(one) for one in step.arguments], named, [_dump_view(v) for v in step.results]]


def _dump_view(view: View) -> list[Any]:
    return ["t", view.buffer, view.offset, view.dtype, list(view.shape), list(view.strides)]


def _dump_value(value: Any) -> Any:
    if isinstance(value, View):
        return _dump_view(value)
    if isinstance(value, Dtype):
        return ["d", value.name]
    if isinstance(value, float):
        return ["f", value.hex()]  # exact, and infinities too
    if isinstance(value, list | tuple):
        return ["l", [_dump_value(one) for one in value]]
    return ["v", value]


class _Reader:
    """Builds a record from parsed JSON, refusing whatever is out of range."""

    def __init__(self, body: Any, images: bytes) -> None:
        self._body = _expect(body, dict)
        self._images = images
        self._n_inputs = _count(self._body["n_inputs"], 64)
        self._buffers = tuple(_count(one, MOST_BUFFER_BYTES) for one in _list(self._body["buffers"], MOST_BUFFERS))
        self._kernels = self._read_kernels()

    def record(self) -> Record:
        outputs = _expect(self._body["outputs"], dict)
        if len(outputs) > 64:
            raise RecordError("too many outputs")
        return Record(
            n_inputs=self._n_inputs,
            buffers=self._buffers,
            kernels=self._kernels,
            forward=self._steps("forward"),
            backward=self._steps("backward"),
            outputs={_text(name, 60): self._view(view) for name, view in outputs.items()},
            reasons=tuple(_text(one, MOST_TEXT) for one in _list(self._body["reasons"], MOST_REASONS)),
        )

    def _read_kernels(self) -> tuple[Kernel, ...]:
        found = []
        at = 0
        for row in _list(self._body["kernels"], MOST_KERNELS):
            name, size, shared, warps, scratch, align = _list(row, 6, exactly=True)
            size = _count(size, MOST_KERNEL_BYTES)
            image = self._images[at : at + size]
            at += size
            if len(image) != size or image[:4] != _ELF:
                raise RecordError("a kernel is cut off, or is no ELF file")
            if _NAME.fullmatch(_text(name, MOST_TEXT)) is None:
                raise RecordError("a kernel's name is none that Triton gives")
            if _count(warps, 32) < 1 or _count(align, 4096) < 1:
                raise RecordError("a kernel has no warps or no alignment")
            found.append(Kernel(name, image, _count(shared, 1 << 20), warps, _count(scratch, 1 << 20), align))
        if at != len(self._images):
            raise RecordError("bytes follow the last kernel")
        return tuple(found)

    def _steps(self, phase: str) -> tuple[Step, ...]:
        return tuple(self._step(row) for row in _list(self._body[phase], MOST_STEPS))

    def _step(self, row: Any) -> Step:
        kind = _expect(row, list)[0]
        if kind == "launch":
            _, kernel, grid, arguments = row
            x, y, z = (_count(size, limit) for size, limit in zip(grid, (2**31 - 1, 65535, 65535), strict=True))
            return Launch(
                kernel=_below(kernel, len(self._kernels)),
                grid=(x, y, z),
                arguments=tuple(self._argument(one) for one in _list(arguments, MOST_ARGUMENTS)),
            )
        if kind != "op":
            raise RecordError("a step is neither launch nor operation")
        _, name, arguments, named, results = row
        if _OP.fullmatch(_text(name, 130)) is None:
            raise RecordError("an operation has no name of aten's")
        return Operation(
            name=name,
            arguments=tuple(self._value(one, 0) for one in _list(arguments, MOST_ARGUMENTS)),
            named={_text(key, 60): self._value(one, 0) for key, one in _expect(named, dict).items()},
            results=tuple(self._view(one) for one in _list(results, 16)),
        )

    def _argument(self, row: Any) -> Pointer | bytes:
        if row[0] == "s":
            value = bytes.fromhex(_text(row[1], 16))
            if len(row) != 2 or len(value) not in SCALAR_BYTES:
                raise RecordError("a number is not 1, 2, 4 or 8 bytes long")
            return value
        kind, buffer, offset = row
        if kind != "p":
            raise RecordError("an argument is neither address nor number")
        if buffer is None:
            return Pointer(None)
        number = self._buffer(buffer)
        # one past the end is an address that C allows
        if number >= self._n_inputs and _count(offset, MOST_BUFFER_BYTES) > self._buffers[number - self._n_inputs]:
            raise RecordError("an address lies outside its buffer")
        return Pointer(number, _count(offset, MOST_BUFFER_BYTES))

    def _value(self, row: Any, depth: int) -> Any:
        kind = _expect(row, list)[0]
        if kind == "t":
            return self._view(row)
        _, value = row
        if kind == "d":
            return Dtype(_dtype(value))
        if kind == "f":
            return float.fromhex(_text(value, 60))
        if kind == "l" and depth < MOST_NESTING:
            return [self._value(one, depth + 1) for one in _list(value, MOST_ARGUMENTS)]
        if kind != "v" or not (value is None or isinstance(value, bool | int | str)):
            raise RecordError("an argument of an operation is none of ours")
        if isinstance(value, str):
            return _text(value, 60)
        return value if value is None or isinstance(value, bool) else _between(value, -(2**63), 2**63 - 1)

    def _view(self, row: Any) -> View:
        kind, buffer, offset, dtype, shape, strides = row
        if kind != "t" or len(shape) != len(strides):
            raise RecordError("a tensor is not of our form")
        view = View(
            buffer=self._buffer(buffer),
            offset=_count(offset, MOST_BUFFER_BYTES),
            dtype=_dtype(dtype),
            shape=tuple(_count(size, MOST_SIZE) for size in _list(shape, MOST_DIMENSIONS)),
            strides=tuple(_count(step, MOST_SIZE) for step in _list(strides, MOST_DIMENSIONS)),
        )
        own = view.buffer - self._n_inputs
        if own >= 0 and 0 not in view.shape and view.offset + _span_bytes(view) > self._buffers[own]:
            raise RecordError("a tensor lies outside its buffer")
        return view

    def _buffer(self, value: Any) -> int:
        return _below(value, self._n_inputs + len(self._buffers))


_ITEM_BYTES = {"bool": 1, "uint8": 1, "int8": 1, "int16": 2, "float16": 2, "bfloat16": 2, "int32": 4, "float32": 4}


def _span_bytes(view: View) -> int:
    elements = 1 + sum((size - 1) * step for size, step in zip(view.shape, view.strides, strict=True))
    return elements * _ITEM_BYTES.get(view.dtype, 8)


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


def _expect(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise RecordError(f"not a {kind.__name__}")
    return value


def _list(value: Any, most: int, *, exactly: bool = False) -> list[Any]:
    if type(value) is not list or len(value) > most or (exactly and len(value) != most):
        raise RecordError("not a list, or one of another length")
    return value


def _text(value: Any, most: int) -> str:
    if type(value) is not str or len(value) > most:
        raise RecordError("not text, or too long a one")
    return value


def _between(value: Any, least: int, most: int) -> int:
    if type(value) is not int or not least <= value <= most:
        raise RecordError("a number is out of range")
    return value


def _count(value: Any, most: int) -> int:
    return _between(value, 0, most)


def _below(value: Any, limit: int) -> int:
    return _between(value, 0, limit - 1)


def _dtype(value: Any) -> str:
    if value not in DTYPES or type(value) is not str:
        raise RecordError("a dtype is none of ours")
    return str(value)
