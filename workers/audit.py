"""The interpreter audit: what one call of a student's entry launched, touched, computed and kept.

`Watch` surrounds one call. Every tensor argument of a kernel gets a pointer whose upper 16 bits name the argument, so
an access is traced to the argument it was derived from even when it lands inside another tensor; the bits are stripped
just before memory is touched. Lanes outside their argument read NaN and store nothing. All counts are exact integers.

Runs inside the sandbox, beside the student's file: what it reports is a claim, and the examiner treats it as one.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import linecache
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from workers import interpreter
from workers.interpreter import prepare_interpreter
from workers.storages import (
    BY_KERNEL,
    INITIALISED,
    Block,
    Ledger,
    Memory,
    Operation,
    OperationCounts,
    Poison,
    Saved,
    SavedTensors,
    followed_by_threads,
    is_copy,
    is_fill,
    is_library_attention,
    line_in,
    names_of,
    view_span,
)

__all__ = ["Watch", "eager_costs", "explain_exception", "prepare_interpreter"]

Array = np.ndarray[Any, Any]
Level = Literal["bounds", "storages", "full"]

MAX_FACTS_BYTES = 28 * 1024  # of a forward, and as much of its backward: one frame holds both
MAX_TEXT = 300
MAX_FINDINGS_PER_LAUNCH = 16
MAX_FINDINGS = 48
MAX_LAUNCHES = 32
LAUNCHES_WITH_ARGUMENTS = 8
MAX_STORAGES = 6
MAX_ROWS = 24

_TAG_SHIFT = 48
_ADDRESS = np.uint64((1 << _TAG_SHIFT) - 1)
_NOBODY = -1  # no program has read or written the element in this launch
_SEVERAL = -2  # more than one program has read it
# what they return is computed with outside torch
_OUT_OF_TORCH = frozenset({"__array__", "__dlpack__", "numpy", "tolist"})


# ---- what a launch did --------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Argument:
    """One tensor argument of a launch. `low` and `high` bound the view, the block's bound what may be touched."""

    name: str
    tag: int
    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    contiguous: bool
    dtype: str
    item_bytes: int
    low: int
    high: int
    block: Block
    requested_load_bytes: int = 0
    requested_store_bytes: int = 0
    read: Array | None = None  # [elements of the block] bool
    written: Array | None = None

    def unique_bytes(self, touched: Array | None) -> int:
        return 0 if touched is None else int(np.count_nonzero(touched)) * self.block.unit


@dataclass(slots=True, eq=False)
class _Traffic:
    """Who touched which element of a block in this launch; arrays of program numbers, made on first use."""

    writer: Array | None = None
    reader: Array | None = None


@dataclass(slots=True, eq=False)
class _Launch:
    kernel: str
    line: int
    own: bool  # a kernel of the student's file
    grid: tuple[int, int, int] = (0, 0, 0)
    programs: int = 0
    requested_load_bytes: int = 0
    requested_store_bytes: int = 0
    unique_load_bytes: int = 0
    unique_store_bytes: int = 0
    dot_flops: int = 0
    largest_tile_elements: int = 0
    atomics: int = 0
    locks: bool = False
    arguments: list[_Argument] = field(default_factory=list)
    argument_facts: list[dict[str, Any]] = field(default_factory=list)

    def facts(self) -> dict[str, Any]:
        return {
            "kernel": _cut(self.kernel),
            "line": self.line or None,
            "grid": list(self.grid),
            "programs": self.programs,
            "requested_load_bytes": self.requested_load_bytes,
            "requested_store_bytes": self.requested_store_bytes,
            "unique_load_bytes": self.unique_load_bytes,
            "unique_store_bytes": self.unique_store_bytes,
            "dot_flops": self.dot_flops,
            "largest_tile_elements": self.largest_tile_elements,
            "atomics": self.atomics,
            "args": self.argument_facts,
        }


@dataclass(slots=True)
class _Finding:
    kind: str
    arg: str
    element: int | None
    line: int
    source: str
    program: list[int] | None
    other_program: list[int] | None
    lanes: int
    message: str
    launch: int

    def facts(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "arg": _cut(self.arg),
            "element": self.element,
            "line": self.line or None,
            "source": _cut(self.source),
            "program": self.program,
            "other_program": self.other_program,
            "lanes": self.lanes,
            "message": _cut(self.message),
        }


class _Meter:
    """Watches every launch: bounds always, footprints and races when `footprints` is set."""

    def __init__(
        self,
        memory: Memory,
        files: frozenset[str],
        *,
        footprints: bool,
        order: str | int | None,
        runs_programs: bool,
    ) -> None:
        self.runs_programs = runs_programs
        self.launches: list[_Launch] = []
        self.findings: list[_Finding] = []
        self.findings_cut = 0
        self.inputs_read: set[Block] = set()  # by kernels of the file, themselves or what torch made of them
        self._memory = memory
        self._files = files
        self._footprints = footprints
        self._order = order
        self._launch = _Launch("", 0, False)
        self._arguments: list[_Argument | None] = [None]  # by tag; tag 0 is no argument
        self._traffic: dict[Block, _Traffic] = {}
        self._by_place: dict[tuple[str, int, str], _Finding] = {}
        self._program = 0

    # -- called by the interpreter

    def begin(self, function: Any) -> None:
        own = function.__code__.co_filename in self._files
        self._launch = _Launch(function.__name__, line_in(self._files, 2), own)
        self._arguments = [None]
        self._traffic = {}

    def address(self, name: str, tensor: torch.Tensor) -> int:
        tag = len(self._arguments)
        if tag >= 1 << 16:
            raise ValueError("a launch takes fewer than 65536 tensors")
        block = self._memory.block_of(tensor)
        low, high = view_span(tensor)
        # a view may claim more than its memory has, by as_strided for example
        inside = max(low, block.low), min(high, block.high)
        argument = _Argument(
            name=name,
            tag=tag,
            pointer=tensor.data_ptr(),
            shape=tuple(tensor.shape),
            strides=tuple(tensor.stride()),
            contiguous=tensor.is_contiguous(),
            dtype=str(tensor.dtype).removeprefix("torch."),
            item_bytes=tensor.element_size(),
            low=inside[0],
            high=inside[1],
            block=block,
        )
        self._arguments.append(argument)
        self._launch.arguments.append(argument)
        if self._footprints:
            block.refine(tensor.element_size())
            if block.op in ("unknown", "arena") and tensor.numel():
                self._find(
                    "foreign-memory",
                    argument,
                    None,
                    1,
                    f"argument {name} {_shape(argument)} of {self._launch.kernel} lives in memory that torch did not "
                    "allocate during this call",
                    line=self._launch.line,
                )
        return (tag << _TAG_SHIFT) | argument.pointer

    def order(self, grid: tuple[int, int, int]) -> Sequence[int] | None:
        self._launch.grid = grid
        count = math.prod(grid)
        if self._order is None:
            return None
        if self._order == "reverse":
            return range(count - 1, -1, -1)
        seed = self._order if isinstance(self._order, int) else 0
        return [int(number) for number in np.random.default_rng(seed).permutation(count)]

    def program(self, number: int) -> None:
        self._program = number
        self._launch.programs += 1

    def load(self, at: Array, mask: Array | None, size: int) -> tuple[Array, Array | None, Array | None]:
        real, kept, groups = self._resolve("load", at, mask, size)
        if self._footprints:
            self._tile(at.size)
            for argument, addresses in groups:
                self._note_load(argument, addresses, size)
        if kept is mask:
            return real, mask, None
        wanted = np.ones(at.shape, bool) if mask is None else np.broadcast_to(mask, at.shape)
        return real, kept, wanted & ~_lanes(kept, at)

    def store(self, at: Array, mask: Array | None, size: int) -> tuple[Array, Array | None]:
        real, kept, groups = self._resolve("store", at, mask, size)
        if self._footprints:
            self._tile(at.size)
            for argument, addresses in groups:
                self._note_store(argument, addresses, size)
        return real, kept

    def atomic(self, at: Array, mask: Array | None, size: int, exchange: bool) -> tuple[Array, Array | None]:
        real, kept, groups = self._resolve("store", at, mask, size)
        self._launch.locks = self._launch.locks or exchange
        if self._footprints:
            for argument, addresses in groups:
                index = self._elements(argument, addresses, size)
                _touched(argument, "read")[index] = True
                _touched(argument, "written")[index] = True
                self._mark_written(argument.block, index)
                if self._launch.own:
                    self.inputs_read |= argument.block.sources
                self._launch.atomics += addresses.size
                self._request(argument, load=addresses.size * size, store=addresses.size * size)
        return real, kept

    def dot(self, batch: int, m: int, n: int, k: int) -> None:
        if self._footprints:
            self._launch.dot_flops += 2 * batch * m * n * k
            self._tile(max(m * n, m * k, k * n))

    def end(self) -> None:
        launch = self._launch
        if launch.locks:
            # programs that take turns under a lock do not race, and the turns cannot be seen from here
            self.findings = [
                item for item in self.findings if item.launch != len(self.launches) or not item.kind.startswith("race")
            ]
        if self._footprints:
            self._settle(launch)
        launch.arguments = []
        self._arguments = [None]
        self._traffic = {}
        self.launches.append(launch)

    # -- addresses

    def _resolve(
        self, op: str, at: Array, mask: Array | None, size: int
    ) -> tuple[Array, Array | None, list[tuple[_Argument, Array]]]:
        """Real addresses, the lanes that may be touched, and per argument the addresses of its lanes."""
        if at.size == 0:
            return at, mask, []
        low, high = int(at.min()), int(at.max())
        argument = self._of_tag(low >> _TAG_SHIFT)
        if argument is not None and _holds(argument, low, high, size):
            real = at - np.uint64(argument.tag << _TAG_SHIFT)
            if not self._footprints:
                return real, mask, []
            active = real.reshape(-1) if mask is None else real[_lanes(mask, at)]
            return real, mask, [(argument, active)] if active.size else []
        real = at & _ADDRESS
        lanes = _lanes(mask, at)
        wanted = at[lanes]
        if wanted.size == 0:
            return real, mask, []
        low, high = int(wanted.min()), int(wanted.max())
        argument = self._of_tag(low >> _TAG_SHIFT)
        if argument is not None and _holds(argument, low, high, size):
            return real, mask, [(argument, wanted & _ADDRESS)]
        return self._resolve_apart(op, at, mask, lanes, size)

    def _resolve_apart(
        self, op: str, at: Array, mask: Array | None, lanes: Array, size: int
    ) -> tuple[Array, Array | None, list[tuple[_Argument, Array]]]:
        """The careful way, once some lane is outside the view of its argument, or lanes have several arguments."""
        real = at & _ADDRESS
        tags = at >> np.uint64(_TAG_SHIFT)
        kept = lanes.copy()
        groups = []
        for tag in np.unique(tags[lanes]):
            mine = lanes & (tags == tag)
            argument = self._of_tag(int(tag))
            if argument is None:
                argument = self._of_addresses(real[mine], size)
            if argument is None:
                self._find_wild(op, real[mine])
                kept &= ~mine
                continue
            block = argument.block
            first, last = np.uint64(block.low), np.uint64(max(block.low, block.high - size))
            inside = mine & (real >= first) & (real <= last) & (block.high - block.low >= size)
            outside = mine & ~inside
            if outside.any():
                self._find_outside(op, argument, real[outside])
                kept &= ~outside
            view = (real >= np.uint64(argument.low)) & (real < np.uint64(argument.high))
            beyond = inside & ~view
            if beyond.any():
                self._find_beyond_view(op, argument, real[beyond])
            if inside.any():
                groups.append((argument, real[inside]))
        unchanged = bool((kept == lanes).all())
        return real, mask if unchanged else kept, groups

    def _of_tag(self, tag: int) -> _Argument | None:
        return self._arguments[tag] if tag < len(self._arguments) else None

    def _of_addresses(self, addresses: Array, size: int) -> _Argument | None:
        """The argument around addresses that a kernel read from memory or made from integers."""
        low, high = int(addresses.min()), int(addresses.max())
        for argument in self._launch.arguments:
            if argument.block.low <= low and high + size <= argument.block.high:
                return argument
        return None

    # -- footprints and races

    def _tile(self, elements: int) -> None:
        self._launch.largest_tile_elements = max(self._launch.largest_tile_elements, elements)

    def _request(self, argument: _Argument, *, load: int = 0, store: int = 0) -> None:
        argument.requested_load_bytes += load
        argument.requested_store_bytes += store
        self._launch.requested_load_bytes += load
        self._launch.requested_store_bytes += store

    def _elements(self, argument: _Argument, addresses: Array, size: int) -> Array:
        """Indices into the arrays of the argument's block, one per element touched."""
        block = argument.block
        if size < block.unit:
            self._refine(block, size)
        index = ((addresses - np.uint64(block.low)) // np.uint64(block.unit)).astype(np.int64)
        if size > block.unit:
            index = (index[:, None] + np.arange(size // block.unit)).reshape(-1)
        return index

    def _refine(self, block: Block, unit: int) -> None:
        times = block.unit // unit
        block.refine(unit)
        for argument in self._launch.arguments:
            if argument.block is block:
                argument.read = None if argument.read is None else np.repeat(argument.read, times)
                argument.written = None if argument.written is None else np.repeat(argument.written, times)
        traffic = self._traffic.get(block)
        if traffic is not None:
            traffic.writer = None if traffic.writer is None else np.repeat(traffic.writer, times)
            traffic.reader = None if traffic.reader is None else np.repeat(traffic.reader, times)

    def _note_load(self, argument: _Argument, addresses: Array, size: int) -> None:
        index = self._elements(argument, addresses, size)
        _touched(argument, "read")[index] = True
        self._request(argument, load=addresses.size * size)
        block = argument.block
        gaps = self._memory.gaps.get(block)
        if gaps is not None and gaps.size == _count(block) and gaps[index].any():
            self._find_gap(argument, index[gaps[index]])
        if block.flags is not None or not block.default & INITIALISED:
            missing = (block.element_flags()[index] & INITIALISED) == 0
            if missing.any():
                self._find_uninitialised(argument, index[missing])
        if self._launch.own:
            self.inputs_read |= block.sources
        traffic = self._traffic_of(block)
        if traffic.writer is not None:
            writers = traffic.writer[index]
            others = (writers != _NOBODY) & (writers != self._program)
            if others.any():
                self._find_race("race-read-after-write", argument, index[others], int(writers[others][0]))
        if traffic.reader is None:
            traffic.reader = np.full(_count(block), _NOBODY, dtype=np.int32)
        readers = traffic.reader[index]
        mine = readers == self._program
        if not mine.all():
            traffic.reader[index] = np.where(mine | (readers == _NOBODY), self._program, _SEVERAL)

    def _note_store(self, argument: _Argument, addresses: Array, size: int) -> None:
        index = self._elements(argument, addresses, size)
        _touched(argument, "written")[index] = True
        self._request(argument, store=addresses.size * size)
        block = argument.block
        self._mark_written(block, index)
        traffic = self._traffic_of(block)
        if traffic.writer is None:
            traffic.writer = np.full(_count(block), _NOBODY, dtype=np.int32)
        writers = traffic.writer[index]
        others = (writers != _NOBODY) & (writers != self._program)
        if others.any():
            self._find_race("race-write-write", argument, index[others], int(writers[others][0]))
        if traffic.reader is not None:
            readers = traffic.reader[index]
            # an element that another program also wrote is reported as that race already
            others = (readers != _NOBODY) & (readers != self._program) & ~others
            if others.any():
                self._find_race("race-write-after-read", argument, index[others], int(readers[others][0]))
        traffic.writer[index] = self._program

    def _traffic_of(self, block: Block) -> _Traffic:
        traffic = self._traffic.get(block)
        if traffic is None:
            traffic = self._traffic[block] = _Traffic()
        return traffic

    def _mark_written(self, block: Block, index: Array) -> None:
        block.element_flags()[index] = INITIALISED | (BY_KERNEL if self._launch.own else 0)
        block.kernel_written = block.kernel_written or self._launch.own

    def _settle(self, launch: _Launch) -> None:
        """Add up distinct bytes. Two arguments on one block count an element once."""
        loads: dict[Block, Array] = {}
        stores: dict[Block, Array] = {}
        for argument in launch.arguments:
            for total, touched in ((loads, argument.read), (stores, argument.written)):
                if touched is not None:
                    known = total.get(argument.block)
                    total[argument.block] = touched if known is None else known | touched
        launch.unique_load_bytes = sum(int(np.count_nonzero(a)) * block.unit for block, a in loads.items())
        launch.unique_store_bytes = sum(int(np.count_nonzero(a)) * block.unit for block, a in stores.items())
        if len(self.launches) < LAUNCHES_WITH_ARGUMENTS:
            launch.argument_facts = [
                {
                    "name": _cut(argument.name),
                    "shape": list(argument.shape),
                    "dtype": argument.dtype,
                    "requested_load_bytes": argument.requested_load_bytes,
                    "unique_load_bytes": argument.unique_bytes(argument.read),
                    "requested_store_bytes": argument.requested_store_bytes,
                    "unique_store_bytes": argument.unique_bytes(argument.written),
                }
                for argument in launch.arguments
            ]

    # -- findings

    def _find_outside(self, op: str, argument: _Argument, addresses: Array) -> None:
        element = (int(addresses[0]) - argument.pointer) // argument.item_bytes
        count = max(0, argument.block.high - argument.pointer) // argument.item_bytes
        reach = f"its memory ends at element {count - 1}" if element >= 0 else "its memory starts at element 0"
        verb = "reads" if op == "load" else "writes"
        self._find(
            f"out-of-bounds-{op}",
            argument,
            element,
            addresses.size,
            f"{verb} element {element} of {argument.name} {_shape(argument)}, but {reach}; "
            + ("mask these lanes off" if argument.contiguous else "its strides are to be used"),
        )

    def _find_beyond_view(self, op: str, argument: _Argument, addresses: Array) -> None:
        element = (int(addresses[0]) - argument.pointer) // argument.item_bytes
        verb = "reads" if op == "load" else "writes"
        self._find(
            f"outside-view-{op}",
            argument,
            element,
            addresses.size,
            f"{verb} element {element} of {argument.name}, outside the view {_shape(argument)} that was "
            f"passed, though inside the tensor it is a view of",
        )

    def _find_gap(self, argument: _Argument, index: Array) -> None:
        element = self._element(argument, int(index[0]))
        self._find(
            "outside-view-load",
            argument,
            element,
            index.size,
            f"reads memory between the rows of {argument.name} {_shape(argument)}, {element} elements from its start; "
            "its strides are to be used",
        )

    def _find_wild(self, op: str, addresses: Array) -> None:
        verb = "reads" if op == "load" else "writes"
        self._find(
            "wild-pointer",
            None,
            None,
            addresses.size,
            f"{verb} through a pointer that comes from no tensor argument of {self._launch.kernel}",
        )

    def _find_uninitialised(self, argument: _Argument, index: Array) -> None:
        element = self._element(argument, int(index[0]))
        self._find(
            "uninitialised-read",
            argument,
            element,
            index.size,
            f"reads element {element} of {argument.name} {_shape(argument)}, which nothing has written yet",
        )

    def _find_race(self, kind: str, argument: _Argument, index: Array, other: int) -> None:
        element = self._element(argument, int(index[0]))
        what = {
            "race-write-write": "stores to element {} of {} {}, and so does {}",
            "race-read-after-write": "loads element {} of {} {}, to which {} stores",
            "race-write-after-read": "stores to element {} of {} {}, which {} loads",
        }[kind]
        who = f"program {self._index(other)}" if other >= 0 else "another program"
        self._find(
            kind,
            argument,
            element,
            index.size,
            what.format(element, argument.name, _shape(argument), who)
            + " in the same launch; on a GPU nothing puts the two in order",
            other=other,
        )

    def _element(self, argument: _Argument, index: int) -> int:
        return (argument.block.low + index * argument.block.unit - argument.pointer) // argument.item_bytes

    def _index(self, number: int) -> list[int]:
        _, ny, nz = self._launch.grid
        x, rest = divmod(number, ny * nz)
        return [x, *divmod(rest, nz)]

    def _find(
        self,
        kind: str,
        argument: _Argument | None,
        element: int | None,
        lanes: int,
        what: str,
        *,
        line: int | None = None,
        other: int = _NOBODY,
    ) -> None:
        at_launch = line is not None
        line = line_in(self._files, 3) if line is None else line
        name = argument.name if argument is not None else ""
        known = self._by_place.get((kind, line, name))
        if known is not None:
            known.lanes += int(lanes)
            return
        here = len(self.launches)
        if len(self.findings) >= MAX_FINDINGS or (
            sum(item.launch == here for item in self.findings) >= MAX_FINDINGS_PER_LAUNCH
        ):
            self.findings_cut += 1
            return
        program = None if at_launch else self._index(self._program)
        subject = f"program {program} " if program is not None else ""
        finding = _Finding(
            kind=kind,
            arg=name,
            element=element,
            line=line,
            source=source_line(self._files, line),
            program=program,
            other_program=self._index(other) if other >= 0 else None,
            lanes=int(lanes),
            message=f"{_place(line)}{subject}{what}.",
            launch=here,
        )
        self._by_place[(kind, line, name)] = finding
        self.findings.append(finding)


def _lanes(mask: Array | None, at: Array) -> Array:
    return np.ones(at.shape, bool) if mask is None else np.broadcast_to(mask, at.shape).astype(bool, copy=False)


def _holds(argument: _Argument, low: int, high: int, size: int) -> bool:
    tag = argument.tag << _TAG_SHIFT
    return tag | argument.low <= low and high + size <= tag | argument.high


def _touched(argument: _Argument, which: Literal["read", "written"]) -> Array:
    touched: Array | None = getattr(argument, which)
    if touched is None:
        touched = np.zeros(_count(argument.block), dtype=bool)
        setattr(argument, which, touched)
    return touched


def _count(block: Block) -> int:
    return max(1, -(-block.size_bytes // block.unit))


def _shape(argument: _Argument) -> str:
    strides = "" if argument.contiguous else f" and strides {argument.strides}"
    return f"of shape {argument.shape}{strides}"


def _place(line: int) -> str:
    return f"Line {line}: " if line else ""


def source_line(files: frozenset[str], line: int) -> str:
    """The text of a line of the student's file, without its indentation."""
    texts = (linecache.getline(name, line).strip() for name in sorted(files))
    return next((text for text in texts if text), "")


# ---- the watch ----------------------------------------------------------------------------------------------------


class _CallsByName(TorchFunctionMode):
    """Sees what the dispatcher does not: library attention by its name, and values that the file takes out of torch."""

    def __init__(self, files: frozenset[str], ledger: Ledger) -> None:
        super().__init__()
        self._files = files
        self._ledger = ledger

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if is_library_attention(name):
            self._ledger.library_calls.setdefault((name, line_in(self._files, 2)))
        elif name in _OUT_OF_TORCH and args and isinstance(args[0], torch.Tensor):
            self._ledger.note_taken_out(name, args[0], line_in(self._files, 2))
        return func(*args, **(kwargs or {}))


class Watch:
    """Watches one call of a student's entry; use as a context manager, then ask for `facts`.

    Levels:
        bounds: every access of a kernel stays inside the tensors it was given, so a wrong kernel cannot hurt the
            process; launches are counted. Cheap.
        storages: bounds, and what torch allocates: peak bytes, what is still alive afterwards.
        full: everything that the audit knows.

    A backward is measured by a second watch around it. Storages that an earlier watch of level "full" saw allocated
    stay known, so a backward may read what its forward saved; its peak counts its own allocations only.

    Args:
        inputs: tensors the call is given, by name. Views into one larger storage are each bounded by their own lowest
            and highest element.
        order: the order in which programs run: natural, "reverse", or permuted by a seed.
        submission_file: path of the student's file; lines are lines of this file.
        poison_empty: fill what torch.empty and its kin return with NaN or the largest integer.
        run_programs: False counts launches and allocations without running any program; outputs are then garbage.
    """

    def __init__(
        self,
        *,
        inputs: Mapping[str, torch.Tensor],
        level: Level,
        order: str | int | None = None,
        submission_file: str,
        poison_empty: bool = False,
        run_programs: bool = True,
    ) -> None:
        if level not in ("bounds", "storages", "full"):
            raise ValueError(f"level is {level!r}; it is bounds, storages or full")
        prepare_interpreter()
        self._level = level
        self._inputs = dict(inputs)
        self._submission_file = submission_file
        self._files = names_of(submission_file)
        self._memory = Memory(self._inputs)
        if level == "full":
            self._memory.find_gaps()
        self._meter = _Meter(
            self._memory, self._files, footprints=level == "full", order=order, runs_programs=run_programs
        )
        self._poison_empty = poison_empty
        self._ledger: Ledger | None = None
        self._counts: OperationCounts | None = None
        self._saved = SavedTensors(self._files)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Watch:
        with contextlib.ExitStack() as stack:
            stack.enter_context(interpreter.probing(self._meter))
            if self._level == "bounds":
                counts = self._counts = OperationCounts(self._submission_file)
                modes: list[Any] = [Poison(counts, fill=self._poison_empty)]
            else:
                full = self._level == "full"
                self._ledger = Ledger(self._memory, self._files, operations=full, poison_empty=self._poison_empty)
                modes = [self._ledger]
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._saved.pack, self._saved.unpack))
                if full:
                    modes.append(_CallsByName(self._files, self._ledger))
            for mode in modes:
                stack.enter_context(mode)
            stack.enter_context(followed_by_threads(*modes))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def facts(self, outputs: Mapping[str, torch.Tensor] | None = None) -> dict[str, Any]:
        """What was seen, as plain values of at most 28 KiB of JSON. `outputs` names the tensors that the call returned.

            `line` is None where no line of the student's file was under way. Besides the launches it holds:
            outputs: per name `written_by_kernel`, whether a kernel of the file stored to its memory, followed through
                copies and casts; `kernel_elements`, how many elements a kernel wrote last; `unwritten_elements`.
            alive_after_bytes: what the call allocated and is still alive, outputs included.
            saved: what autograd keeps, `role` "input", "output" or "own", and every other storage that is still alive.

        A list that was cut is followed by its key with "_cut" appended: the number of rows left out.
        """
        facts = self._launch_facts()
        if self._ledger is None:
            facts = {key: facts[key] for key in ("n_launches", "findings", "findings_cut", "kernels") if key in facts}
            return _bounded(facts | (self._counts.facts() if self._counts is not None else {}))
        if self._level == "storages":
            facts = {}
        facts |= _storage_facts(self._ledger, self._saved, self._memory, outputs or {})
        if self._level == "full":
            facts |= self._operation_facts(facts)
            facts["unread_inputs"] = self._unread_inputs()
            facts["outputs"] = {
                _cut(name): self._output_facts(tensor) for name, tensor in list((outputs or {}).items())[:16]
            }
        return _bounded(facts)

    def _launch_facts(self) -> dict[str, Any]:
        launches = self._meter.launches
        kernels = Counter(launch.kernel for launch in launches)
        findings = self._meter.findings
        facts: dict[str, Any] = {
            "n_launches": len(launches),
            "kernels": [{"kernel": _cut(name), "launches": count} for name, count in kernels.most_common(MAX_ROWS)],
            "findings": [item.facts() for item in findings],
            "launches": [launch.facts() for launch in launches[:MAX_LAUNCHES]],
            "requested_bytes": sum(launch.requested_load_bytes + launch.requested_store_bytes for launch in launches),
            "unique_bytes": sum(launch.unique_load_bytes + launch.unique_store_bytes for launch in launches),
            "dot_flops": sum(launch.dot_flops for launch in launches),
            "largest_tile_elements": max((launch.largest_tile_elements for launch in launches), default=0),
        }
        if self._meter.findings_cut:
            facts["findings_cut"] = self._meter.findings_cut
        if len(launches) > MAX_LAUNCHES:
            facts["launches_cut"] = len(launches) - MAX_LAUNCHES
        return facts

    def _operation_facts(self, facts: dict[str, Any]) -> dict[str, Any]:
        ledger = self._ledger
        assert ledger is not None
        entries = _each_operation_first(ledger.operations.values())
        total = sum(entry.size_bytes for entry in entries)
        operations = []
        for entry in entries[:MAX_ROWS]:
            row: dict[str, Any] = {
                "op": _cut(entry.op),
                "count": entry.count,
                "bytes": entry.size_bytes,
                "line": entry.line or None,
                "shape": list(entry.shape),
            }
            if is_fill(entry.op):
                row["fill"] = True
            if is_copy(entry.op):
                row["copy"] = True
            operations.append(row)
        calls = [{"op": _cut(op), "line": line or None} for op, line in ledger.library_calls]
        calls += [{"op": "torch.compile", "line": line or None} for line in interpreter.compile_lines()]
        more: dict[str, Any] = {
            "torch_ops": operations,
            "n_torch_ops": sum(entry.count for entry in entries),
            "library_calls": calls[:MAX_ROWS],
            "requested_bytes": facts["requested_bytes"] + total,
            "unique_bytes": facts["unique_bytes"] + total,
            "findings": facts["findings"] + self._uninitialised_findings(ledger),
        }
        if len(entries) > MAX_ROWS:
            more["torch_ops_cut"] = len(entries) - MAX_ROWS
        return more

    def _uninitialised_findings(self, ledger: Ledger) -> list[dict[str, Any]]:
        return [
            {
                "kind": "uninitialised-read",
                "arg": _cut(op),
                "element": None,
                "line": line or None,
                "source": _cut(source_line(self._files, line)),
                "program": None,
                "other_program": None,
                "lanes": count,
                "message": _cut(
                    f"{_place(line)}the torch operation {op} reads {count} elements of a tensor of shape {shape} that "
                    "nothing has written yet."
                ),
            }
            for (op, line), (count, shape) in list(ledger.uninitialised.items())[:MAX_FINDINGS_PER_LAUNCH]
        ]

    def _output_facts(self, tensor: torch.Tensor) -> dict[str, Any]:
        block = self._memory.block_of(tensor)
        flags = block.flags_of(tensor) if tensor.device.type == "cpu" and tensor.numel() else None
        first = None
        unwritten = by_kernel = 0
        if flags is not None:
            plain = flags.reshape(-1)
            missing = (plain & INITIALISED) == 0
            unwritten = int(missing.sum())
            first = int(missing.int().argmax()) if unwritten else None
            by_kernel = int(((plain & BY_KERNEL) != 0).sum())
        return {
            "written_by_kernel": block.kernel_written,
            "kernel_elements": by_kernel,
            "unwritten_elements": unwritten,
            "first_unwritten": first,
        }

    def _unread_inputs(self) -> list[str]:
        """Inputs of which no kernel of the file loaded an element, nor of anything that torch made from them."""
        read = self._meter.inputs_read
        return [_cut(name) for name, tensor in self._inputs.items() if self._memory.block_of(tensor) not in read]


def _each_operation_first(entries: Iterable[Operation]) -> list[Operation]:
    """Largest first, but of every operation one before the second of any: what is cut is never all of one kind."""
    times: Counter[str] = Counter()
    ranked = []
    for entry in sorted(entries, key=lambda entry: -entry.size_bytes):
        ranked.append((times[entry.op], entry))
        times[entry.op] += 1
    return [entry for _, entry in sorted(ranked, key=lambda pair: pair[0])]


def _negative_size(row: dict[str, Any]) -> int:
    size: int = row["bytes"]
    return -size


def _meets(piece: Block | Saved, spans: list[tuple[int, int]]) -> bool:
    return any(piece.low < high and low < piece.high for low, high in spans)


def _role(item: Saved, memory: Memory, output_spans: list[tuple[int, int]]) -> str:
    if any(block.low <= item.low and item.high <= block.high for block in memory.input_blocks):
        return "input"
    return "output" if _meets(item, output_spans) else "own"


def _storage_facts(
    ledger: Ledger, saved: SavedTensors, memory: Memory, outputs: Mapping[str, torch.Tensor]
) -> dict[str, Any]:
    output_spans = [view_span(tensor) for tensor in outputs.values()]
    saved_spans = [(item.low, item.high) for item in saved.items]
    if any(block.alive and not _meets(block, output_spans + saved_spans) for block in ledger.blocks):
        # what only a cycle still holds is garbage, not kept; a collection takes a tenth of a second, so only now
        gc.collect()

    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for block in sorted(ledger.blocks, key=lambda item: -item.size_bytes):
        key = (block.shape, block.dtype, block.line, block.op)
        row = rows.setdefault(
            key,
            {
                "shape": list(block.shape),
                "dtype": block.dtype,
                "bytes": block.size_bytes,
                "line": block.line or None,
                "op": _cut(block.op),
                "count": 0,
                "alive_after": False,
            },
        )
        row["count"] += 1
        row["alive_after"] = row["alive_after"] or block.alive
    kept = [
        {
            "shape": list(item.shape),
            "dtype": item.dtype,
            "bytes": item.size_bytes,
            "line": item.line or None,
            "role": _role(item, memory, output_spans),
        }
        for item in saved.distinct()
    ]
    kept += [
        {
            "shape": list(block.shape),
            "dtype": block.dtype,
            "bytes": block.size_bytes,
            "line": block.line or None,
            "role": "own",
        }
        for block in ledger.blocks
        if block.alive and not _meets(block, output_spans + saved_spans)
    ]
    kept.sort(key=_negative_size)
    facts: dict[str, Any] = {
        "peak_bytes": ledger.peak_bytes,
        "alive_after_bytes": ledger.alive_bytes(),
        "largest_storages": list(rows.values())[:MAX_STORAGES],
        "saved": kept[:MAX_ROWS],
    }
    if len(kept) > MAX_ROWS:
        facts["saved_cut"] = len(kept) - MAX_ROWS
    return facts


# ---- exceptions, sizes, costs -------------------------------------------------------------------------------------


def explain_exception(error: BaseException, submission_file: str) -> dict[str, Any]:
    """Type, message and line of what the student's code raised, without the interpreter's wrappings.

    Returns:
        {"type": str, "message": str, "line": int | None, "source": str}; no line: None.
    """
    files = names_of(submission_file)
    cause = interpreter.root_cause(error)
    line = 0
    for candidate in (error, cause):
        trace = candidate.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename in files:
                line = trace.tb_lineno
            trace = trace.tb_next
    if isinstance(cause, SyntaxError) and cause.filename in files:
        line = cause.lineno or 0
    try:
        message = str(cause)
    except Exception:
        # __str__ is the student's, too
        message = ""
    return {
        "type": _cut(type(cause).__name__),
        "message": _cut(message),
        "line": line or None,
        "source": _cut(source_line(files, line)) if line else "",
    }


def _cut(text: str) -> str:
    # surrogates cannot be sent
    clean = str(text).encode("utf-8", "replace").decode("utf-8")
    return clean if len(clean) <= MAX_TEXT else clean[: MAX_TEXT - 1] + "…"


def _bounded(facts: dict[str, Any]) -> dict[str, Any]:
    """Halve the longest list until the whole fits."""
    size = functools.partial(json.dumps, ensure_ascii=False)
    while len(size(facts).encode()) > MAX_FACTS_BYTES:
        longest = max(
            (key for key, value in facts.items() if isinstance(value, list) and value),
            key=lambda key: len(size(facts[key])),
            default=None,
        )
        if longest is None:
            break
        rows = facts[longest]
        kept = len(rows) // 2
        facts[longest] = rows[:kept]
        facts[f"{longest}_cut"] = facts.get(f"{longest}_cut", 0) + len(rows) - kept
    return facts


def eager_costs(fn: Callable[..., Any], args: Sequence[Any]) -> dict[str, int]:
    """What a chain of torch operations would cost on a GPU, counted on fake CUDA tensors; none is needed.

    Args:
        fn: called once with `args`, of which tensors are replaced by fakes of the same shape, strides and dtype.

    Returns:
        {"launches", "bytes"}: operations that are kernels on a GPU, and the distinct bytes they read and write.
    """
    fake_tensor = __import__("torch._subclasses.fake_tensor", fromlist=["FakeTensorMode"])
    with fake_tensor.FakeTensorMode():
        fakes = [
            torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="cuda")
            if isinstance(value, torch.Tensor)
            else value
            for value in args
        ]
        ledger = Ledger(Memory({}), frozenset(), operations=True, values=False)
        with ledger, torch.no_grad():
            fn(*fakes)
    entries = ledger.operations.values()
    return {
        "launches": sum(entry.count for entry in entries),
        "bytes": sum(entry.size_bytes for entry in entries),
    }
