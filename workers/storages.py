"""What torch allocates and computes during one call: storages with their lines, peak bytes, operations and their bytes.

Runs inside the sandbox, beside the student's file: nothing here is secret and nothing here is trusted.
"""

from __future__ import annotations

import bisect
import contextlib
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Array = np.ndarray[Any, Any]

# bits of Block.flags, one byte per element
INITIALISED = 1
BY_KERNEL = 2  # last written by a kernel of the student's

_MAX_COUNTED = 24

_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
# neither views by their schema nor kernels on a GPU
_NO_KERNEL = {
    "_local_scalar_dense",
    "_reshape_alias",
    "_unsafe_view",
    "alias",
    "detach",
    "detach_",
    "device",
    "is_same_size",
    "lift",
    "lift_fresh",
    "resize_",
    "set_",
}
_FILLS = {
    "arange",
    "fill_",
    "full",
    "full_like",
    "new_full",
    "new_ones",
    "new_zeros",
    "ones",
    "ones_like",
    "scalar_tensor",
    "zero_",
    "zeros",
    "zeros_like",
}
_COPIES = {"_to_copy", "clone", "copy_"}
_LIBRARY_PARTS = (
    "cudnn",
    "efficient_attention",
    "flash_attention",
    "flex_attention",
    "multi_head",
    "scaled_dot_product",
)


def is_library_attention(name: str) -> bool:
    """Whether an operation or function of this name is somebody else's attention."""
    return any(part in name for part in _LIBRARY_PARTS)


def line_in(files: frozenset[str], skip: int = 1) -> int:
    """The line of the innermost running frame whose code is in `files`; 0 when there is none."""
    frame: FrameType | None = sys._getframe(skip)
    while frame is not None:
        if frame.f_code.co_filename in files:
            return frame.f_lineno
        frame = frame.f_back
    return 0


def names_of(submission_file: str) -> frozenset[str]:
    """The names that frames may give the student's file."""
    path = Path(submission_file)
    return frozenset({submission_file, str(path.absolute()), str(path.resolve())})


def view_span(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses [low, high) from the lowest to past the highest element of a view; equal when it has none."""
    low = tensor.data_ptr()
    if tensor.numel() == 0:
        return low, low
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return low, low + (last + 1) * tensor.element_size()


def view_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the distinct elements of a view: an expanded dimension counts once."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride or not size else 1
    return count * tensor.element_size()


@dataclass(slots=True, eq=False)
class Block:
    """One contiguous piece of memory that belongs together: a storage, or an input's span inside the arena."""

    low: int
    high: int
    shape: tuple[int, ...]
    dtype: str
    op: str  # what allocated it; "input" for inputs, "unknown" for memory that was there before
    line: int
    unit: int  # bytes of an element of `flags`
    default: int = INITIALISED  # flags of every element while `flags` is None
    flags: Array | None = None
    kernel_written: bool = False
    alive: bool = True
    sources: set[Block] = field(default_factory=set)  # inputs that torch computed or copied it from

    @property
    def size_bytes(self) -> int:
        return self.high - self.low

    def element_flags(self) -> Array:
        """[elements] uint8, made on first use."""
        if self.flags is None:
            self.flags = np.full(max(1, -(-self.size_bytes // self.unit)), self.default, dtype=np.uint8)
        return self.flags

    def refine(self, unit: int) -> None:
        """Track elements of `unit` bytes; smaller ones than before split what is known of the larger."""
        if unit < self.unit:
            if self.flags is not None:
                self.flags = np.repeat(self.flags, self.unit // unit)
            self.unit = unit

    def flags_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The flags seen through a view, as a uint8 tensor that shares memory; None where the units differ."""
        low, high = view_span(tensor)
        if tensor.element_size() != self.unit or low < self.low or high > self.high or (low - self.low) % self.unit:
            return None
        flags = torch.from_numpy(self.element_flags())
        return flags.as_strided(tensor.size(), tensor.stride(), (low - self.low) // self.unit)

    def initialise(self, tensor: torch.Tensor) -> None:
        """Elements of this view now hold values that torch computed."""
        if self.flags is None and self.default == INITIALISED:
            return
        flags = self.flags_of(tensor)
        if flags is None:
            self.flags, self.default = None, INITIALISED
        else:
            flags.fill_(INITIALISED)


@dataclass(slots=True)
class Operation:
    """A torch operation that would be a GPU kernel, as often as it ran at one line with one shape."""

    op: str
    line: int
    shape: tuple[int, ...]
    count: int = 0
    size_bytes: int = 0  # read and written, distinct elements


# storages by the address of their C++ object, over all calls: a backward reads what a forward allocated
_storages: dict[int, tuple[Block, Ledger]] = {}


def _forget(key: int, block: Block) -> None:
    known = _storages.get(key)
    if known is not None and known[0] is block:
        del _storages[key]
        block.alive = False
        known[1].now_bytes -= block.size_bytes


class Memory:
    """Finds the block that a tensor lies in."""

    def __init__(self, inputs: Mapping[str, torch.Tensor]) -> None:
        self.input_blocks: list[Block] = []
        self._input_storages: set[int] = set()
        self._others: dict[int, Block] = {}
        for _, tensor in sorted(inputs.items(), key=lambda item: view_span(item[1])):
            self._input_storages.add(tensor.untyped_storage()._cdata)
            low, high = view_span(tensor)
            last = self.input_blocks[-1] if self.input_blocks else None
            if last is not None and low < last.high:
                # one tensor passed twice, or overlapping views
                last.high = max(last.high, high)
                last.unit = min(last.unit, tensor.element_size())
            else:
                self.input_blocks.append(
                    Block(low, high, tuple(tensor.shape), _dtype_name(tensor), "input", 0, tensor.element_size())
                )
                self.input_blocks[-1].sources.add(self.input_blocks[-1])
        self._lows = [block.low for block in self.input_blocks]
        self._inputs = [tensor.detach() for tensor in inputs.values()]
        self.gaps: dict[Block, Array] = {}  # [elements] bool, those of an input block that belong to no input

    def is_input(self, storage: Any) -> bool:
        return storage._cdata in self._input_storages

    def find_gaps(self) -> None:
        """Mark what lies between the elements of non-contiguous inputs. To be called while nothing is watched."""
        for block in self.input_blocks:
            free = np.ones(-(-block.size_bytes // block.unit), dtype=bool)
            marks = torch.from_numpy(free)
            for tensor in self._inputs:
                low, high = view_span(tensor)
                if not block.low <= low < high <= block.high:
                    continue
                if tensor.element_size() == block.unit:
                    marks.as_strided(tensor.size(), tensor.stride(), (low - block.low) // block.unit).fill_(False)
                else:
                    marks[(low - block.low) // block.unit : -(-(high - block.low) // block.unit)] = False
            if free.any():
                self.gaps[block] = free

    def block_of(self, tensor: torch.Tensor) -> Block:
        """The block that bounds what a kernel may touch through this tensor."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._input_storages:
            at = bisect.bisect_right(self._lows, tensor.data_ptr()) - 1
            if at >= 0 and tensor.data_ptr() < self.input_blocks[at].high:
                return self.input_blocks[at]
            # inside the arena but in no input: nothing there may be touched
            address = tensor.data_ptr()
            return Block(address, address, tuple(tensor.shape), _dtype_name(tensor), "arena", 0, 1)
        known = _storages.get(storage._cdata)
        if known is not None:
            return known[0]
        low = storage.data_ptr()
        block = self._others.get(low)
        if block is None or block.high != low + storage.nbytes():
            high = low + storage.nbytes()
            block = self._others[low] = Block(
                low, high, tuple(tensor.shape), _dtype_name(tensor), "unknown", 0, tensor.element_size()
            )
        return block


def block_of_storage(key: int) -> Block | None:
    """What is known of the storage with this C++ address, while it is alive."""
    known = _storages.get(key)
    return None if known is None else known[0]


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


class OperationCounts:
    """Which torch operations a call made, by name: little more than nothing to keep, so every probe's call does.

    Of several calls, told apart by `end_call`, each operation is told as it was in the call in which it gave most.
    """

    def __init__(self, submission_file: str) -> None:
        self._files = names_of(submission_file)
        self._seen: dict[str, Operation] = {}  # in the call that is being made
        self._largest: dict[str, Operation] = {}  # each as it was in the call in which it gave most bytes

    def note(self, func: Any, out: Any) -> None:
        """Take in one operation that was dispatched, unless it is a view, an allocation, a fill or a copy."""
        name = _name(func)
        if name in _ALLOCATIONS or name in _NO_KERNEL or name in _FILLS or name in _COPIES or _is_view(func):
            return
        entry = self._seen.get(name)
        if entry is None:
            entry = self._seen[name] = Operation(name, line_in(self._files, 3), ())
        entry.count += 1
        entry.size_bytes += sum(view_bytes(leaf) for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor))

    def end_call(self) -> None:
        """What comes from now on is another call's."""
        seen, self._seen = self._seen, {}
        for name, entry in list(seen.items()):  # threads of the file's may still be at work
            before = self._largest.get(name)
            if before is None or entry.size_bytes > before.size_bytes:
                self._largest[name] = entry

    def facts(self) -> dict[str, Any]:
        """`torch_ops` and `library_calls`, of at most 24 rows each."""
        self.end_call()
        seen = sorted(self._largest.values(), key=lambda one: -one.size_bytes)
        library = [one for one in seen if is_library_attention(one.op)]  # none of these is among those cut
        return {"torch_ops": _rows(seen), "library_calls": _rows(library)} if seen else {}


@contextlib.contextmanager
def followed_by_threads(*modes: Any) -> Iterator[None]:
    """Have threads that the file starts meanwhile work under these modes of torch's too, which by themselves do not."""
    stock: Any = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def followed(thread: threading.Thread) -> None:
        with contextlib.ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            stock(thread)

    threading.Thread._bootstrap_inner = followed  # type: ignore[attr-defined]
    try:
        yield
    finally:
        threading.Thread._bootstrap_inner = stock  # type: ignore[attr-defined]


def _rows(operations: list[Operation]) -> list[dict[str, Any]]:
    return [
        {"op": one.op[:100], "count": one.count, "bytes": one.size_bytes, "line": one.line or None}
        for one in operations[:_MAX_COUNTED]
    ]


class Poison(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fills what `torch.empty` and its kin return with NaN or the largest integer, and counts the other operations."""

    def __init__(self, counts: OperationCounts, *, fill: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counts, self._fill = counts, fill

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # skipping it costs the import of torch's compiler, a second, at the first operation
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self._fill and _name(func) in _ALLOCATIONS:
            poison(out)
        self._counts.note(func, out)
        return out


def poison(tensor: torch.Tensor) -> None:
    """Overwrite with NaN, the largest integer, or True."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        tensor.fill_(float("nan"))
    elif tensor.dtype is torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).max)


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps account of storages, and with `operations` also of what torch computes and initialises.

    Bytes are exact and the same on every machine. What exists when the ledger opens costs nothing.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in Poison

    def __init__(
        self,
        memory: Memory,
        files: frozenset[str],
        *,
        operations: bool,
        values: bool = True,
        poison_empty: bool = False,
    ) -> None:
        """`values` is False for tensors without memory, of which there is nothing to initialise."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.now_bytes = 0
        self.peak_bytes = 0
        self.blocks: list[Block] = []
        self.operations: dict[tuple[str, int, tuple[int, ...]], Operation] = {}
        self.library_calls: dict[tuple[str, int], None] = {}
        self.uninitialised: dict[tuple[str, int], tuple[int, tuple[int, ...]]] = {}
        self._memory = memory
        self._files = files
        self._with_operations = operations
        self._with_values = values
        self._poison_empty = poison_empty

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = _name(func)
        reads = self._reads(func, name, args, kwargs) if self._with_operations else []
        out = func(*args, **kwargs)
        is_allocation = name in _ALLOCATIONS
        is_kernel = not (is_allocation or name in _NO_KERNEL or _is_view(func))
        outs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        if is_allocation or is_kernel or name == "lift_fresh":
            for tensor in outs:
                self._note(tensor, name, 0 if is_allocation else INITIALISED)
        if is_allocation and self._poison_empty:
            for tensor in outs:
                poison(tensor)
        if is_kernel and self._with_operations:
            writes = _mutated(func, args, kwargs)
            if self._with_values:
                self._mark(name, reads, outs, writes)
            self._count(name, reads, outs, writes)
        return out

    def note_taken_out(self, name: str, tensor: torch.Tensor, line: int) -> None:
        """Values left torch: what is computed from them there, nobody sees."""
        key = (name, line, tuple(tensor.shape))
        entry = self.operations.setdefault(key, Operation(*key))
        entry.count += 1
        entry.size_bytes += view_bytes(tensor)

    def alive_bytes(self) -> int:
        return sum(block.size_bytes for block in self.blocks if block.alive)

    def _note(self, tensor: torch.Tensor, name: str, flags: int) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in _storages or self._memory.is_input(storage) or storage.nbytes() == 0:
            return
        low = storage.data_ptr() if self._with_values else 0
        block = Block(
            low,
            low + storage.nbytes(),
            tuple(tensor.shape),
            _dtype_name(tensor),
            name,
            line_in(self._files, 3),
            tensor.element_size(),
            default=flags,
        )
        _storages[key] = (block, self)
        weakref.finalize(storage, _forget, key, block).atexit = False
        self.blocks.append(block)
        self.now_bytes += block.size_bytes
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)

    def _reads(self, func: Any, name: str, args: Any, kwargs: Any) -> list[torch.Tensor]:
        """Tensors that the operation reads: all its inputs but those that it overwrites."""
        if name in _FILLS:
            return []
        overwrites = name == "copy_" or func._overloadname.endswith("out")
        overwritten = {id(tensor) for tensor in _mutated(func, args, kwargs)} if overwrites else set()
        leaves = {id(leaf): leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        return [leaf for key, leaf in leaves.items() if key not in overwritten]

    def _mark(self, name: str, reads: list[torch.Tensor], outs: list[torch.Tensor], writes: list[torch.Tensor]) -> None:
        sources = {source for tensor in reads for source in self._memory.block_of(tensor).sources}
        if sources:
            for tensor in (*outs, *writes):
                self._memory.block_of(tensor).sources |= sources
        if name in _COPIES and len(reads) == 1:
            target = writes[0] if writes else outs[0]
            if self._copy_flags(reads[0], target):
                return
        written = {id(tensor) for tensor in writes}
        for tensor in reads:
            if id(tensor) not in written:
                self._check_initialised(name, tensor)
        for tensor in writes:
            self._memory.block_of(tensor).initialise(tensor)

    def _copy_flags(self, source: torch.Tensor, target: torch.Tensor) -> bool:
        """What was written by a kernel still was after a copy or a cast; what was never written still was not."""
        if not source.numel():
            return False
        from_block, to_block = self._memory.block_of(source), self._memory.block_of(target)
        if from_block.flags is None and from_block.default == INITIALISED:
            return False
        seen, shown = from_block.flags_of(source), to_block.flags_of(target)
        if seen is None or shown is None:
            return False
        shown.copy_(seen.expand(shown.shape))
        to_block.kernel_written = to_block.kernel_written or bool((seen & BY_KERNEL).any())
        return True

    def _check_initialised(self, name: str, tensor: torch.Tensor) -> None:
        block = self._memory.block_of(tensor)
        if block.flags is None and block.default == INITIALISED:
            return
        flags = block.flags_of(tensor)
        if flags is None:
            return
        missing = (flags & INITIALISED) == 0
        if missing.any():
            key = (name, line_in(self._files, 4))
            self.uninitialised.setdefault(key, (int(missing.sum()), tuple(tensor.shape)))

    def _count(
        self, name: str, reads: list[torch.Tensor], outs: list[torch.Tensor], writes: list[torch.Tensor]
    ) -> None:
        line = line_in(self._files, 3)
        written = {id(tensor): tensor for tensor in [*outs, *writes]}.values()
        size_bytes = sum(map(view_bytes, reads)) + sum(map(view_bytes, written))
        shape = tuple(outs[0].shape) if outs else tuple(writes[0].shape) if writes else ()
        entry = self.operations.setdefault((name, line, shape), Operation(name, line, shape))
        entry.count += 1
        entry.size_bytes += size_bytes
        if is_library_attention(name):
            self.library_calls.setdefault((name, line))


@dataclass(slots=True)
class Saved:
    """A tensor that autograd keeps for the backward."""

    shape: tuple[int, ...]
    dtype: str
    size_bytes: int
    line: int
    low: int
    high: int


@dataclass(slots=True)
class SavedTensors:
    """Collects what is saved for the backward, through autograd's own hooks."""

    files: frozenset[str]
    items: list[Saved] = field(default_factory=list)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        low, high = view_span(tensor)
        block = block_of_storage(tensor.untyped_storage()._cdata)
        self.items.append(
            Saved(
                tuple(tensor.shape),
                _dtype_name(tensor),
                tensor.numel() * tensor.element_size(),
                # the line that made it: the hooks of an autograd.Function run after its forward has returned
                line_in(self.files, 2) if block is None else block.line,
                low,
                high,
            )
        )
        # an output kept with its own node would never be freed
        return tensor if tensor.grad_fn is None else tensor.detach()

    @staticmethod
    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def distinct(self) -> Iterable[Saved]:
        """One per place in memory."""
        return {(item.low, item.high, item.shape): item for item in self.items}.values()


def is_allocation(name: str) -> bool:
    """Whether an operation makes memory and writes nothing to it."""
    return name in _ALLOCATIONS


def runs_nothing(func: Any) -> bool:
    """Whether an operation is a view, or another that launches no kernel on a GPU."""
    return _name(func) in _NO_KERNEL or _is_view(func)


def is_fill(name: str) -> bool:
    """Whether an operation writes constants and reads nothing."""
    return name in _FILLS


def is_copy(name: str) -> bool:
    """Whether an operation moves values without computing any."""
    return name in _COPIES


def _name(func: Any) -> str:
    return str(func._schema.name).rpartition("::")[2]


_views: dict[Any, bool] = {}
_mutables: dict[Any, tuple[tuple[int, str], ...]] = {}


def _is_view(func: Any) -> bool:
    known = _views.get(func)
    if known is None:
        returns = func._schema.returns
        # aliases of an input that are not written; the schema says so
        known = bool(returns) and all(item.alias_info is not None and not item.alias_info.is_write for item in returns)
        _views[func] = known
    return known


def _mutated(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    places = _mutables.get(func)
    if places is None:
        places = tuple(
            (position, argument.name)
            for position, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        )
        _mutables[func] = places
    found = []
    for position, name in places:
        value = args[position] if position < len(args) else kwargs.get(name)
        found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return found
