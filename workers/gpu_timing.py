"""Windows of calls on a GPU, by the examiner's clock. workers/timing.py says what the numbers mean.

One window: fresh inputs are made where no student's file can read them. The clock starts; for a student's file the
inputs are put into the arena, and then the candidate is thawed. Baselines, which are ours, read them where they are, so
that nothing a file left on the GPU sees or disturbs their windows. The clock stops when sampled rows of every output of
every call have been gathered by the examiner's first GPU act after the candidate's `done`. The rows are compared with
float64 afterwards, computed from the examiner's own inputs, while the candidate is frozen again.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from grader.assignment import Assignment
from grader.measurement import Evidence, Timing, TorchOp
from reference.operation import Operation
from reference.timed import SHARED_COPIES, Expected, Rows, Timed
from workers import claims, timing
from workers.devices.cpu import READABLE
from workers.devices.gpu import Mapped, NotMappableError, Shown, TimedGpu
from workers.interview import CandidateFailedError, Interview

P = ParamSpec("P")
T = TypeVar("T")

ALIGN = 256
PILOT_CALLS = 4
SLOW_PILOT_MS = 10.0  # one call that takes this long tells enough
CALLS_LIMIT_S = 20.0
SPIN_S = 1.0  # a window is much shorter; what takes longer is waited for asleep
OTHER_ROUNDS = 3  # of sizes that are not the headline
MOST_ROUNDS = 12
FIRST_CALL_WINDOWS = 5  # of the headline size; of others as many as rounds
EMPTY_WINDOWS = 3
SPOT_ROUNDS = (0, 3)  # in which the reference runs
BASELINES = frozenset({"naive", "reference"})
BASELINES_SHARE = 3  # a baseline's outputs may take that part of the room for the student's
SEGMENTS_A_FRAME = 200
COMPARED_BYTES = 1 << 28  # of inputs, at once
COPIES = 9  # of each of two sizes, to learn what showing inputs takes
WARM_COPIES = 20  # before them, of all of the arena: a quarter of a second in which an idle GPU's clocks rise
LEAST_SHOWN_BYTES = 64 << 20  # the smaller of the sizes: more than an L2 cache holds, little beside the arena
SCRUBBED = 0xFF  # what lies in the arena when a file comes
MOST_RESIZES = 3  # races begun anew with more calls in a window, because the student's took less than in the pilot
MAX_MOVES = 4  # windows whose outputs lay in memory never seen before
PLAIN_CALLS = 4  # of those that were wrong in a window are made once more by a fresh process
LARGEST_SCORE = 16.0  # of the timed inputs, for the tolerance
# The error of the naive baseline counts up to so many times what the tolerance allows an exact one. In bfloat16 and
# float16, at up to 2048 keys, it is at most 2.3 times that: dv of attention in float16.
MOST_BASELINE_ERROR = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongRows:
    """Rows of one output that were wrong in timed calls. The inputs of those calls are still in place."""

    inputs: Field
    output: str
    calls: tuple[int, ...]
    rows: torch.Tensor  # [calls, rows per call]
    want: torch.Tensor  # [calls, rows per call, width], float64
    scale: float  # errors and the limit are relative to it
    limit: float


class WrongRowsError(Exception):
    """Outputs of a window are not what they must be; `evidence` says how, and `wrong` where it may be an honest bug."""

    def __init__(self, evidence: Evidence, wrong: WrongRows | None = None) -> None:
        super().__init__(evidence.message)
        self.evidence, self.wrong = evidence, wrong


class BaselineFailedError(Exception):
    """A baseline of ours gave no result; of the student's file that says nothing."""

    def __init__(self, rival: Rival, why: str) -> None:
        super().__init__(f"the {rival.name} baseline: {why}")
        self.rival = rival


class VoidError(Exception):
    """A window that says nothing, because something else went on; the text says what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Room:
    """What bounds the calls of a rival's window: memory, and how long it should be."""

    need: timing.Need
    window_ms: float


class _TooFewCallsError(Exception):
    """A window of the student's was much shorter than it should be; `n_calls` make it as long."""

    def __init__(self, n_calls: int) -> None:
        super().__init__(n_calls)
        self.n_calls = n_calls


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """One timed size of an assignment."""

    axes: Mapping[str, int]
    dtype: torch.dtype
    options: Mapping[str, Any]

    @property
    def key(self) -> str:
        return f"{dict(self.axes)} {self.dtype} {dict(self.options)}"


def window_seeds(seed: int, what: str) -> Iterator[int]:
    """Seeds for one window after another. None tells anything of the next to who does not know `seed`."""
    for number in itertools.count():
        digest = hashlib.sha256(f"{seed}/{what}/{number}".encode()).digest()
        yield int.from_bytes(digest[:8], "big") >> 1


class Operations:
    """Torch operations of calls at the sizes that are measured. Claims, as those of the probes are."""

    def __init__(self) -> None:
        self._seen: dict[str, dict[tuple[str, int | None], TorchOp]] = {"torch_ops": {}, "library_calls": {}}

    def add(self, said: Mapping[str, Any]) -> None:
        """Take in the facts of an answer, each operation of a line as it was at its largest. Raises ClaimError."""
        facts = said.get("facts", {})
        if not isinstance(facts, dict):
            raise claims.ClaimError("facts are not an object")
        for key, seen in self._seen.items():
            for op in claims.torch_ops(facts, key):
                at = (op.op, op.line)
                if len(seen) < claims.MAX_ITEMS or at in seen:
                    seen[at] = max(seen.get(at, op), op, key=lambda one: one.size_bytes)

    def torch_ops(self) -> tuple[TorchOp, ...]:
        return tuple(self._seen["torch_ops"].values())

    def library_calls(self) -> tuple[TorchOp, ...]:
        return tuple(self._seen["library_calls"].values())


@dataclass(frozen=True, slots=True, kw_only=True)
class ShowCost:
    """What it takes on an idle GPU to write inputs to the arena: so long for none, and so long for each byte."""

    none_ms: float
    ms_a_byte: float

    def ms(self, n_bytes: int) -> float:
        return self.none_ms + self.ms_a_byte * n_bytes


def show_bytes(gpu: Shown, n_bytes: int) -> None:
    """Have the first so many bytes of the examiner's own memory written to the arena."""
    gpu.arena[:n_bytes].copy_(gpu.private[:n_bytes])


def learn_show_cost(gpu: Shown, clock: Callable[[], float] = time.perf_counter) -> ShowCost:
    """Measure it as it is done in a window: medians of copies of a small part of the arena and of all of it, in turn.

    Windows of 20 ms show as much as the arena holds, which takes as long again: nothing may be extrapolated, and a
    fastest copy is none that a typical window has. Call while nothing of a student's runs. Nothing of the copies stays.
    """

    def copied_ms(n_bytes: int) -> float:
        gpu.settle()
        started = clock()
        show_bytes(gpu, n_bytes)
        gpu.settle()
        return (clock() - started) * 1e3

    most = len(gpu.arena)
    least = min(LEAST_SHOWN_BYTES, most // 2)
    for n_bytes in (least, *[most] * WARM_COPIES):
        copied_ms(n_bytes)  # the first time, memory is mapped and code is loaded too
    pairs = [(copied_ms(least), copied_ms(most)) for _ in range(COPIES)]
    least_ms, most_ms = (median(times_ms) for times_ms in zip(*pairs, strict=True))
    gpu.arena.fill_(SCRUBBED)
    gpu.settle()
    ms_a_byte = max(0.0, most_ms - least_ms) / (most - least)
    return ShowCost(none_ms=max(0.0, least_ms - ms_a_byte * least), ms_a_byte=ms_a_byte)


def _places(timed: Timed, size: Size, n_calls: int) -> tuple[dict[str, tuple[int, int, int]], int]:
    """By input: offset of the first copy, distance from one to the next, copies. And the bytes of all."""
    found, end = {}, 0
    for number, (name, (shape, dtype)) in enumerate(timed.shapes(size.axes, size.dtype).items()):
        copies = n_calls if number == 0 else min(SHARED_COPIES, n_calls)
        distance = -(-math.prod(shape) * dtype.itemsize // ALIGN) * ALIGN
        found[name] = (end, distance, copies)
        end += copies * distance
    return found, end


def input_bytes(timed: Timed, size: Size, n_calls: int) -> int:
    """What the inputs of so many calls take in an arena."""
    return _places(timed, size, n_calls)[1]


class Field:
    """The inputs of all calls of a window: made in memory of the examiner's own, and shown in the arena."""

    def __init__(
        self, gpu: Shown, operation: Operation, timed: Timed, size: Size, n_calls: int, *, seeds: Iterator[int]
    ) -> None:
        self.n_calls, self._gpu, self._operation, self._timed, self._size = n_calls, gpu, operation, timed, size
        self._device = gpu.arena.device
        self._seeds = seeds
        self._generator = torch.Generator(device=self._device)
        self._places, self.used_bytes = _places(timed, size, n_calls)
        if self.used_bytes > len(gpu.arena):
            raise ValueError(f"{n_calls} calls need more than the arena's {len(gpu.arena) >> 20} MiB")
        self.blocks: dict[str, torch.Tensor] = {}
        for name, (shape, dtype) in timed.shapes(size.axes, size.dtype).items():
            offset, distance, copies = self._places[name]
            flat = gpu.private[offset : offset + copies * distance].view(dtype)
            strides = torch.empty(shape, device="meta").stride()
            self.blocks[name] = flat.as_strided((copies, *shape), (distance // dtype.itemsize, *strides))
        _, self.own_bytes, _ = next(iter(self._places.values()))  # of the first input: what every call has to itself
        self._planted = torch.zeros(1, dtype=torch.int64, device=self._device)

    def fill(self, clock: Callable[[], float]) -> float:
        """Make fresh values, from a seed that no other window has. Returns the milliseconds it took."""
        self._generator.manual_seed(next(self._seeds))
        self._gpu.settle()
        started = clock()
        self._planted = self._timed.fill(self.blocks, self._generator)
        self._gpu.settle()
        return (clock() - started) * 1e3

    def show(self) -> None:
        """Have them written to the arena, from where candidates read them."""
        show_bytes(self._gpu, self.used_bytes)

    def n_changed(self) -> int:
        """How many inputs in the arena are no longer what was written there."""
        found = []
        for offset, distance, copies in self._places.values():
            shown, true = (
                memory[offset : offset + copies * distance].view(torch.int64).view(copies, -1)
                for memory in (self._gpu.arena, self._gpu.private)
            )
            some = max(1, COMPARED_BYTES // distance)
            parts = zip(torch.split(shown, some), torch.split(true, some), strict=True)
            found += [(here != there).any(dim=1) for here, there in parts]
        return int(torch.cat(found).sum())

    def rows(self) -> Rows:
        """Which output rows of every call will be looked at; nobody outside can know them."""
        return self._timed.rows(self.blocks, self._planted, self._generator)

    def expected(self, rows: Rows) -> Expected:
        return self._timed.expected(self.blocks, self._size.options, rows)

    def request(self, n_calls: int, *, only: int | None = None) -> dict[str, Any]:
        """What a candidate needs to know to make its argument tensors; with `only`, those of that call alone."""
        specs = {name: self._spec(name, only) for name in self.blocks}
        upstream = self._operation.upstream
        inputs = {name: block[0] for name, block in self.blocks.items() if name != upstream}
        shapes = self._operation.output_specs(
            {name: torch.empty(one.shape, dtype=one.dtype, device="meta") for name, one in inputs.items()},
            self._size.options,
        )
        return {
            "op": "prepare",
            "n_calls": n_calls,
            "inputs": [specs[name] for name in self._operation.inputs],
            "upstream": specs.get(upstream) if upstream else None,
            "options": [self._size.options.get(name) for name in self._operation.options],
            "outputs": [
                {"name": name, "shape": list(shape), "gradient": name not in _forward_outputs(self._operation)}
                for name, (shape, _) in shapes.items()
            ],
        }

    def _spec(self, name: str, only: int | None) -> dict[str, Any]:
        block = self.blocks[name]
        offset, distance, copies = self._places[name]
        if only is not None:
            offset, copies = offset + only % copies * distance, 1
        return {
            "offset": offset,
            "distance": distance,
            "copies": copies,
            "count": block[0].numel(),
            "shape": list(block.shape[1:]),
            "strides": list(block.stride()[1:]),
            "dtype": str(block.dtype).removeprefix("torch."),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowRun:
    """One window, as the examiner saw it."""

    n_calls: int
    window_ms: float  # by the examiner's clock
    events_ms: float  # by the candidate's CUDA events: a claim
    moved: bool  # outputs lay elsewhere than the last time, and learning where cost time
    anatomy_ms: tuple[float, ...]  # thawed, asked; begun, called, done (claims); answered, gathered: since the start
    rows: Mapping[str, torch.Tensor]  # by output: [calls, rows, width]


@dataclass(frozen=True, slots=True)
class _Output:
    """One output as the candidate described it, checked."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    width: int  # values in a row

    @property
    def inner(self) -> int:
        return self.strides[-1] if self.width > 1 else 1

    @property
    def span(self) -> int:
        """Elements from the first to the last."""
        return 1 + sum((size - 1) * step for size, step in zip(self.shape, self.strides, strict=True))

    def offsets(self, rows: torch.Tensor) -> torch.Tensor:
        """Where rows start, in elements from the first."""
        outer = self.shape[:-1] if self.width > 1 else self.shape
        found = torch.zeros_like(rows)
        left = rows
        for size, step in reversed(list(zip(outer, self.strides, strict=False))):
            found += left % size * step
            left = left // size
        return found


def _told_apart(act: Callable[Concatenate[Rival, P], T]) -> Callable[Concatenate[Rival, P], T]:
    """What goes wrong with a baseline must not read as the student's."""

    @functools.wraps(act)
    def told(rival: Rival, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return act(rival, *args, **kwargs)
        except (CandidateFailedError, claims.ClaimError) as exc:
            if rival.is_students:
                raise
            raise BaselineFailedError(rival, str(exc)) from exc

    return told


class Rival:
    """One candidate under the clock: the student's, the naive baseline's, the reference's. Frozen between windows."""

    def __init__(
        self, name: str, interview: Interview, gpu: TimedGpu, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.name, self.interview, self._gpu, self._clock = name, interview, gpu, clock
        self._mapped: dict[int, Mapped] = {}
        self._starts: list[int] = []
        self._outputs: list[_Output] = []
        self.operations = Operations()  # of the calls that nobody times
        self._tables: dict[int, list[torch.Tensor]] = {}  # by calls: one table of addresses for each output
        self._field: Field | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}  # what the outputs must be
        # of the baselines, by size, kept from one grading to the next: one call, roughly; what it took alone, and
        # those of these numbers that a race put in doubt
        self.pilots_ms: dict[str, float] = {}
        self.records_ms: dict[str, float] = {}
        self.doubted: set[str] = set()

    @property
    def is_students(self) -> bool:
        """Whether it runs, or may run, code of a student's."""
        return self.name not in BASELINES

    def has_record(self, size: Size) -> bool:
        """Whether this process ran at this size before, and a time of it that can be trusted is known."""
        return size.key in self.pilots_ms and size.key in self.records_ms and size.key not in self.doubted

    def doubt(self) -> None:
        """Have all its records made anew before the next file's code runs."""
        self.doubted.update(self.records_ms)

    @_told_apart
    def open(self) -> None:
        """Give it the memory that inputs are made in, or the arena if it is a student's. Once."""
        handle = self._gpu.handle if self.is_students else self._gpu.private_handle
        self._ask({"op": "arena", "handle": handle, "bytes": len(self._gpu.arena)})

    @_told_apart
    def prepare(self, field: Field, n_calls: int, *, fresh: bool = False, only: int | None = None) -> None:
        """Tell it the calls of its windows. `fresh` has it give back memory that earlier sizes took.

        With `only`, the one call of its window is that one of the field's.
        """
        self._ask({"op": "release"})
        if fresh:
            self.close()  # before they free it
        request = field.request(n_calls, only=only)
        self._shapes = {output["name"]: tuple(output["shape"]) for output in request["outputs"]}
        self._ask(request | {"fresh": fresh})
        self._field = field
        self._tables.clear()

    @_told_apart
    def rehearse(self, n_calls: int, *, most: int = MAX_MOVES) -> None:
        """Run windows that are not timed until outputs come to lie where they lay before, and map that memory.

        What torch operations a file's calls make is counted before the first of them.
        """
        self._show()
        for number in range(most):
            self._ask({"op": "release"})
            said = self._ask({"op": "rehearse", "k": n_calls, "count": self.is_students and number == 0})
            self._outputs = [self._checked(row) for row in claims.rows(said, "outputs")]
            self.operations.add(said)
            if [output.name for output in self._outputs] != list(self._shapes):
                raise claims.ClaimError("the outputs are not those that were asked for")
            n_segments = claims.count(said, "n_segments")
            for first in range(0, min(n_segments, timing.MOST_OUTPUTS), SEGMENTS_A_FRAME):
                part = self._ask({"op": "segments", "first": first, "count": SEGMENTS_A_FRAME}).get("segments")
                for row in part if isinstance(part, list) else []:
                    self._map(row)
            self._learn(n_calls, said.get("ptrs"))
            if said.get("same") is True:
                return

    @_told_apart
    def release(self) -> None:
        """Have it drop the outputs of its last window, and freeze it."""
        self._ask({"op": "release"})
        self.interview.sandbox.freeze()

    @_told_apart
    def window(self, n_calls: int, rows: Rows) -> WindowRun:
        """Time one window. It must have been released, and nothing else runs.

        Raises:
            VoidError: outputs lie in memory that was never mapped; rehearse and try again.
        """
        plans = self._plan(n_calls, rows)
        self._gpu.settle()
        started = self._clock()
        self._show()  # not before the clock runs: work that waits on the GPU for its inputs has to wait for it too
        self.interview.sandbox.thaw()
        thawed = self._clock()
        self.interview.ask({"op": "window", "k": n_calls}, stage="timing")
        asked = self._clock()
        self.interview.spin(SPIN_S)
        said = self.interview.answer(CALLS_LIMIT_S)
        answered = self._clock()
        moved = bool(n_calls and "ptrs" in said)
        if moved:
            self._learn(n_calls, said["ptrs"])  # costs a millisecond of this window, which is theirs
            plans = self._plan(n_calls, rows)
        for table, offsets, inner, out in plans.values():
            self._gpu.gather(table, offsets, inner, out)
        self._gpu.settle()
        ended = self._clock()
        self.interview.sandbox.freeze()
        marks = (thawed, asked, *_numbers(said.get("marks"), 3), answered, ended)
        return WindowRun(
            n_calls=n_calls,
            window_ms=(ended - started) * 1e3,
            events_ms=_numbers([said.get("ms")], 1)[0],
            moved=moved,
            anatomy_ms=tuple((mark - started) * 1e3 for mark in marks),
            rows={name: plan[3] for name, plan in plans.items()} if n_calls else {},
        )

    def _show(self) -> None:
        if self.is_students and self._field is not None:
            self._field.show()
            self._gpu.settle()

    def gather_again(self, n_calls: int, rows: Rows) -> dict[str, torch.Tensor]:
        """The same rows once more, some time later."""
        plans = self._plan(n_calls, rows)
        for table, offsets, inner, out in plans.values():
            self._gpu.gather(table, offsets, inner, out)
        self._gpu.settle()
        return {name: plan[3] for name, plan in plans.items()}

    @_told_apart
    def trim(self) -> None:
        """Have it give back the device memory that it does not need to go on living."""
        if self._field is None:
            return
        self.close()  # before they free it
        self._field = None
        self._ask({"op": "trim", "drop": True})
        self.interview.sandbox.freeze()

    def close(self) -> None:
        """Unmap its memory; the process is its owner's to end."""
        for mapped in self._mapped.values():
            self._gpu.unmap(mapped)
        self._mapped.clear()
        self._starts.clear()

    def _plan(self, n_calls: int, rows: Rows) -> dict[str, tuple[torch.Tensor, torch.Tensor, int, torch.Tensor]]:
        """By output: table, offsets, inner stride and room for the rows, all on the GPU before the clock starts."""
        assert self._field is not None
        if not n_calls:
            return self._plan_empty(rows)
        found = {}
        for output, table in zip(self._outputs, self._tables[n_calls], strict=True):
            if output.name in rows:
                chosen = rows[output.name][:n_calls]
                out = torch.empty(*chosen.shape, output.width, dtype=output.dtype, device=chosen.device)
                found[output.name] = (table, output.offsets(chosen), output.inner, out)
        return found

    def _plan_empty(self, rows: Rows) -> dict[str, tuple[torch.Tensor, torch.Tensor, int, torch.Tensor]]:
        """As many rows as a window's, of the inputs: an empty window costs what a full one costs beside its calls."""
        assert self._field is not None
        block = next(iter(self._field.blocks.values()))
        n_calls = max(self._tables, default=1)
        step = block.stride(0) * block.element_size()
        table = block.data_ptr() + step * torch.arange(n_calls, device=block.device)
        found = {}
        for output in self._outputs:
            if output.name in rows:
                offsets = torch.zeros_like(rows[output.name][:n_calls])
                out = torch.empty(*offsets.shape, output.width, dtype=block.dtype, device=block.device)
                found[output.name] = (table, offsets, 1, out)
        return found

    def _learn(self, n_calls: int, ptrs: Any) -> None:
        """Take in addresses of outputs: what lies in no mapped memory voids the window."""
        n_outputs = len(self._outputs)
        if not isinstance(ptrs, list) or len(ptrs) != n_calls * n_outputs or not all(type(p) is int for p in ptrs):
            raise VoidError("the addresses of the outputs do not fit their number")
        for number, output in enumerate(self._outputs):
            self._hold_apart(sorted(ptrs[number::n_outputs]), output)
        device = self._gpu.arena.device
        self._tables[n_calls] = [
            torch.tensor([self._here(ptr, output) for ptr in ptrs[number::n_outputs]], dtype=torch.int64, device=device)
            for number, output in enumerate(self._outputs)
        ]

    @staticmethod
    def _hold_apart(ptrs: list[int], output: _Output) -> None:
        """Results of different calls lie in different memory: all are kept, so only a result given twice does not."""
        least = output.span * output.dtype.itemsize
        shared = sum(after - before < least for before, after in itertools.pairwise(ptrs))
        if shared:
            message = f"{output.name} of {shared} of {len(ptrs)} calls lies in memory that another call returned"
            raise WrongRowsError(Evidence(kind="outputs-shared", message=message))

    def _here(self, ptr: int, output: _Output) -> int:
        at = bisect.bisect_right(self._starts, ptr) - 1
        if at >= 0:
            mapped = self._mapped[self._starts[at]]
            if ptr + output.span * output.dtype.itemsize <= mapped.start + mapped.size_bytes:
                return mapped.here + ptr - mapped.start
        raise VoidError("an output lies in memory that was not there at the rehearsal")

    def _map(self, row: Any) -> None:
        if not isinstance(row, list) or len(row) != 3 or not all(type(one) is int for one in row[:2]):
            raise claims.ClaimError("a segment is not start, size and handle")
        start, size, handle = row
        if start in self._mapped:
            if self._mapped[start].size_bytes == size:
                return
            self._gpu.unmap(self._mapped.pop(start))  # given back and taken anew, in another size
            self._starts.remove(start)
        try:
            self._mapped[start] = self._gpu.map(start, size, str(handle))
        except NotMappableError as exc:
            raise claims.ClaimError(f"a segment cannot be mapped: {exc}") from None
        bisect.insort(self._starts, start)

    def _checked(self, row: Mapping[str, Any]) -> _Output:
        name = claims.text(row, "name", 60)
        shape, strides = claims.shape(row), claims.shape(row, "strides")
        dtype = READABLE.get(claims.text(row, "dtype", 40))
        # the shape bounds what is read and how much room is made for it here
        if dtype is None or shape != self._shapes.get(name) or len(strides) != len(shape):
            raise claims.ClaimError(f"{name or 'an output'} is not of the shape and kind that it must be")
        return _Output(name, dtype, shape, strides, 1 if name == "lse" else shape[-1])

    def _ask(self, message: dict[str, Any]) -> Mapping[str, Any]:
        self.interview.sandbox.thaw()
        self.interview.ask(message, stage="timing")
        return self.interview.answer(60.0)


@dataclass(slots=True)
class Race:
    """Times of all rivals at one size, and what was noticed."""

    n_calls: dict[str, int] = field(default_factory=dict)  # in a window, by rival
    rooms: dict[str, _Room] = field(default_factory=dict)  # by rival
    empty_ms: list[float] = field(default_factory=list)  # of the baselines
    times_ms: dict[str, list[float]] = field(default_factory=dict)
    events_ms: dict[str, list[float]] = field(default_factory=dict)
    fill_ms: list[float] = field(default_factory=list)
    first_ms: list[float] = field(default_factory=list)
    anatomy_ms: dict[str, list[tuple[float, ...]]] = field(default_factory=dict)  # see WindowRun
    n_moved: int = 0
    stages_s: dict[str, float] = field(default_factory=dict)  # pilot and rehearsal, and what rounds are made of
    pulses: list[tuple[str, int, float]] = field(
        default_factory=list
    )  # after each window: whose, SM clock in MHz, watts
    row_errors: dict[str, float] = field(default_factory=dict)  # by output, the student's largest, relative
    n_checked_rows: int = 0
    voids: list[str] = field(default_factory=list)
    evidence: list[Evidence] = field(default_factory=list)
    seconds: float = 0.0


class Stopwatch:
    """Times one student's file against its rivals on one GPU.

    Made before the student's file is loaded anywhere: it first measures what making inputs takes on an idle GPU.

    Args:
        show_cost: subtracted from windows of the student's, see `learn_show_cost`; baselines need nothing shown.
    """

    def __init__(
        self,
        assignment: Assignment,
        operation: Operation,
        timed: Timed,
        gpu: TimedGpu,
        *,
        seed: int,
        show_cost: ShowCost,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._assignment, self._operation, self._timed, self._gpu = assignment, operation, timed, gpu
        self._seed, self._show_cost, self._clock = seed, show_cost, clock
        self._seeds = window_seeds(seed, "timing")
        self._gradients = frozenset(output.name for output in assignment.outputs if output.gradient)
        self._idle_ms_per_byte: dict[str, float] = {}

    def calibrate(self, size: Size) -> None:
        """Learn how long this GPU, idle, takes to make inputs of this size. Call while no student's code runs."""
        n_calls = PILOT_CALLS * 4
        while n_calls > 1 and input_bytes(self._timed, size, n_calls) > len(self._gpu.arena):
            n_calls //= 2
        inputs = Field(self._gpu, self._operation, self._timed, size, n_calls, seeds=self._seeds)
        inputs.fill(self._clock)
        fastest = min(inputs.fill(self._clock) for _ in range(3))
        self._idle_ms_per_byte[size.key] = fastest / inputs.used_bytes

    def record(self, rival: Rival, size: Size, *, headline: bool) -> None:
        """Time a baseline alone. Call while no student's code runs, where it has no record yet or one in doubt.

        What runs beside a student's file could be slowed by it, and nobody else's grade may rest on that.

        Raises:
            BaselineFailedError, VoidError: it does not run even alone.
        """
        key = size.key
        race = Race()
        rival.pilots_ms.pop(key, None)
        self._pilot(size, [rival], race, headline)
        n_calls = race.n_calls[rival.name]
        inputs = Field(self._gpu, self._operation, self._timed, size, n_calls, seeds=self._seeds)
        rival.prepare(inputs, n_calls)
        rival.rehearse(n_calls)
        limits: dict[str, float] = {}
        for _ in range(OTHER_ROUNDS):
            self._round(rival, inputs, self._idle_ms(inputs, size), race, limits)
            self._empty(rival, inputs, race)
        rival.release()
        took_ms = median(self.per_call(race, rival.name))
        sound_ms = rival.records_ms.get(key, took_ms) if key not in rival.doubted else took_ms
        rival.records_ms[key] = min(sound_ms, took_ms)
        rival.doubted.discard(key)

    def one_call(self, size: Size) -> Field:
        """Inputs of one call at this size."""
        inputs = Field(self._gpu, self._operation, self._timed, size, 1, seeds=self._seeds)
        inputs.fill(self._clock)
        return inputs

    def race(self, size: Size, student: Rival, others: Sequence[Rival], *, budget_s: float, headline: bool) -> Race:
        """Alternate windows until the ratio is known to 1 % or the time is over; three rounds of lesser sizes.

        Args:
            others: the naive baseline first, then the reference, which is spot-checked: its record is made elsewhere.

        Raises:
            WrongRowsError: rows of the student's outputs are wrong.
            VoidError: windows said nothing, again and again.
            CandidateFailedError: it crashed, or took too long.
        """
        began = self._clock()
        race = Race()
        rivals = [student, *others]
        with self._part(race, "pilot"):
            self._pilot(size, rivals, race, headline)
        for last in (*[False] * MOST_RESIZES, True):
            with self._part(race, "rehearsal"):
                inputs = self._ready(size, rivals, race)
            try:
                self._alternate(size, student, others, inputs, race, ends=began + budget_s, headline=headline)
                break
            except _TooFewCallsError as exc:
                if last:
                    raise VoidError(
                        "calls of the student's take less time in each window than in the one before"
                    ) from None
                n_calls = race.n_calls | {"student": exc.n_calls}
                race = Race(n_calls=n_calls, rooms=race.rooms, voids=race.voids, stages_s=race.stages_s)
        self._hold_to_events(race)
        for rival in rivals:
            rival.release()
        for rival in others:
            self._hold_to_record(rival, size, race)
        race.seconds = self._clock() - began
        return race

    def _ready(self, size: Size, rivals: Sequence[Rival], race: Race) -> Field:
        """Inputs for the windows to come, and every rival prepared for its own; they are frozen."""
        inputs = Field(self._gpu, self._operation, self._timed, size, max(race.n_calls.values()), seeds=self._seeds)
        inputs.fill(self._clock)
        for rival in rivals:
            rival.prepare(inputs, race.n_calls[rival.name])
            with self._part(race, f"rehearse-{rival.name}"):
                rival.rehearse(race.n_calls[rival.name], most=1)
            rival.release()
        return inputs

    def _alternate(
        self,
        size: Size,
        student: Rival,
        others: Sequence[Rival],
        inputs: Field,
        race: Race,
        *,
        ends: float,
        headline: bool,
    ) -> None:
        """Round after round of windows, then calls alone."""
        idle_ms = self._idle_ms(inputs, size)
        limits: dict[str, float] = {}
        rivals = [student, *others]
        regular = [one for one in rivals if one.name in ("naive", "student")]
        for number in range(MOST_ROUNDS if headline else OTHER_ROUNDS):
            spot = [one for one in rivals if one not in regular] if number in SPOT_ROUNDS else []
            # the naive baseline first of all: its own error sets the limit that the student's rows are held to
            for rival in [*reversed(timing.turn(regular, number)), *spot]:
                self._round(rival, inputs, idle_ms, race, limits)
            for rival in others if number < EMPTY_WINDOWS else []:
                self._empty(rival, inputs, race)
            naive_ms, student_ms = self.per_call(race, "naive"), self.per_call(race, "student")
            over = self._clock() > ends or timing.enough(naive_ms, student_ms, seed=self._seed)
            if number + 1 >= OTHER_ROUNDS and over:
                break
        with self._part(race, "first"):
            n_windows = FIRST_CALL_WINDOWS if headline else OTHER_ROUNDS
            self._look_at_first_call(student, size, race, limits, n_windows)

    def _idle_ms(self, inputs: Field, size: Size) -> float:
        return self._idle_ms_per_byte[size.key] * inputs.used_bytes

    def _empty(self, rival: Rival, inputs: Field, race: Race) -> None:
        """One window without calls."""
        with self._part(race, "empty"):
            rival.release()
            # as before a full window: a candidate that lay still for a while wakes up more slowly
            inputs.fill(self._clock)
            run = rival.window(0, inputs.rows())
        race.empty_ms.append(run.window_ms)
        race.anatomy_ms.setdefault(f"empty-{rival.name}", []).append(run.anatomy_ms)

    @contextlib.contextmanager
    def _part(self, race: Race, name: str) -> Iterator[None]:
        began = self._clock()
        try:
            yield
        finally:
            race.stages_s[name] = race.stages_s.get(name, 0.0) + self._clock() - began

    def per_call(self, race: Race, name: str) -> list[float]:
        """Milliseconds of one call, for each window."""
        # of the baselines: the student's own could be made to take long
        empty = median(race.empty_ms) if race.empty_ms else 0.0
        return [timing.per_call_ms(one, race.n_calls[name], empty) for one in race.times_ms.get(name, [])]

    def timing(self, size: Size, race: Race) -> Timing:
        """The measurement, as it is stored."""
        student, naive = self.per_call(race, "student"), self.per_call(race, "naive")
        interval = timing.ratio(naive, student, seed=self._seed)
        costs = self._operation.costs(size.axes, size.dtype, size.options)
        return Timing(
            axes=dict(size.axes),
            student_times_ms=tuple(student),
            naive_times_ms=tuple(naive),
            reference_times_ms=tuple(self.per_call(race, "reference")),
            ratio=interval.value,
            ratio_low=interval.low,
            ratio_high=interval.high,
            noisy=timing.is_noisy(interval),
            dtype=str(size.dtype).removeprefix("torch."),
            flops=costs.flops,
            least_bytes=costs.least_bytes,
            eager_bytes=costs.eager_bytes,
            student_events_ms=tuple(race.events_ms.get("student", ())),
        )

    def _pilot(self, size: Size, rivals: Sequence[Rival], race: Race, headline: bool) -> None:
        """A few calls each, which also compile what is not compiled; then K for each."""
        inputs = Field(self._gpu, self._operation, self._timed, size, PILOT_CALLS, seeds=self._seeds)
        inputs.fill(self._clock)
        shared_bytes = inputs.used_bytes - PILOT_CALLS * inputs.own_bytes
        for rival in rivals:
            is_student = rival.name == "student"
            need = timing.Need(
                input_bytes=inputs.own_bytes,
                input_room_bytes=len(self._gpu.arena) - shared_bytes,
                output_bytes=self._timed.output_bytes(size.axes, size.dtype),
                output_room_bytes=self._gpu.room_bytes // (1 if is_student else BASELINES_SHARE),
            )
            window_ms = timing.window_ms(rival.name, headline=headline)
            race.rooms[rival.name] = _Room(need=need, window_ms=window_ms)
            race.n_calls[rival.name] = timing.calls_in_window(
                pilot_ms=self._pilot_ms(rival, inputs, size),
                need=need,
                n_outputs=len(self._operation.outputs),
                window_ms=window_ms,
            )

    def _pilot_ms(self, rival: Rival, inputs: Field, size: Size) -> float:
        """One call, roughly. Asked of the student's file each time, of a baseline once."""
        key = size.key
        if key not in rival.pilots_ms:
            rival.prepare(inputs, PILOT_CALLS, fresh=True)
            alone_ms = self._fastest_ms(rival, inputs, 1)
            if alone_ms < SLOW_PILOT_MS:
                together_ms = self._fastest_ms(rival, inputs, PILOT_CALLS) - self._fastest_ms(rival, inputs, 0)
                alone_ms = max(together_ms, 0.02) / PILOT_CALLS
            rival.pilots_ms[key] = alone_ms
        return rival.pilots_ms[key]

    def _fastest_ms(self, rival: Rival, inputs: Field, n_calls: int) -> float:
        """The faster of two windows; the first of them may compile something of ours."""
        if n_calls:
            rival.rehearse(n_calls)
        times_ms: list[float] = []
        for _ in range(2 + MAX_MOVES):
            rival.release()
            try:
                times_ms.append(rival.window(n_calls, inputs.rows()).window_ms)
            except VoidError:
                rival.rehearse(n_calls)
            if len(times_ms) == 2:
                return min(times_ms)
        raise VoidError(f"the outputs of {n_calls} calls of {rival.name} lay elsewhere each time")

    def _hold_to_record(self, rival: Rival, size: Size, race: Race) -> None:
        """A baseline slower than it is alone says that the GPU is not what it was: nothing is known then.

        A record that is off, either way, is made anew before the next student's code runs.
        """
        took_ms = median(self.per_call(race, rival.name))
        recorded_ms = rival.records_ms.setdefault(size.key, took_ms)
        if timing.in_band(took_ms, recorded_ms):
            return
        rival.doubted.add(size.key)
        if not took_ms <= recorded_ms:
            raise VoidError(
                f"the {rival.name} baseline took {took_ms:.4f} ms; its record on this GPU is {recorded_ms:.4f}"
            )

    def _round(self, rival: Rival, inputs: Field, idle_ms: float, race: Race, limits: dict[str, float]) -> None:
        """One window of one rival, with its rows compared; a void one is tried again."""
        n_calls = race.n_calls[rival.name]
        for last in (*[False] * (MAX_MOVES - 1), True):
            found = self._window(rival, n_calls, inputs, idle_ms, race)
            if found is None:
                continue
            run, rows = found
            race.n_moved += run.moved
            if run.moved and rival.name not in race.times_ms and not last:
                continue  # its memory finds its place in the first window
            with self._part(race, "compare"):
                self._compare(rival, run, rows, inputs, race, limits)
            if rival.name == "student":
                self._hold_to_length(run, race)
            race.times_ms.setdefault(rival.name, []).append(run.window_ms)
            race.anatomy_ms.setdefault(rival.name, []).append(run.anatomy_ms)
            race.events_ms.setdefault(rival.name, []).append(run.events_ms / n_calls)
            return
        raise VoidError(f"{MAX_MOVES} windows in a row said nothing: {race.voids[-1]}")

    def _window(
        self, rival: Rival, n_calls: int, inputs: Field, idle_ms: float, race: Race
    ) -> tuple[WindowRun, Rows] | None:
        """A window on fresh inputs, and the rows looked at. None if it says nothing; the reason is among the voids."""
        with self._part(race, "release"):
            rival.release()
        with self._part(race, "fill"):
            fill_ms = inputs.fill(self._clock)
        race.fill_ms.append(fill_ms)
        if not timing.fill_was_idle(fill_ms, idle_ms=idle_ms):
            race.voids.append(f"{rival.name}: writing the inputs took {fill_ms:.2f} ms, idle {idle_ms:.2f}")
            return None
        rows = inputs.rows()
        try:
            with self._part(race, f"window-{rival.name}"):
                run = rival.window(n_calls, rows)
        except VoidError as exc:
            race.voids.append(f"{rival.name}: {exc}")
            rival.rehearse(n_calls)
            return None
        race.pulses.append((rival.name, *self._gpu.pulse()))
        if not rival.is_students:
            return run, rows
        with self._part(race, "inputs"):
            n_changed = inputs.n_changed()
        if n_changed:
            message = f"{n_changed} inputs were written over in a timed window"
            raise WrongRowsError(Evidence(kind="inputs-changed", message=message))
        # that its inputs had to be written is not the file's time; what made it take longer than on an idle GPU is
        shown_ms = self._show_cost.ms(inputs.used_bytes)
        return dataclasses.replace(run, window_ms=max(0.0, run.window_ms - shown_ms)), rows

    def _compare(
        self, rival: Rival, run: WindowRun, rows: Rows, inputs: Field, race: Race, limits: dict[str, float]
    ) -> None:
        """Hold gathered rows against float64. The naive baseline's own error sets the limit of the student's."""
        if rival.name == "reference" or (rival.name == "naive" and limits):
            return
        chosen = {name: one[: run.n_calls] for name, one in rows.items()}
        expected = inputs.expected({name: rows[name] for name in rows})
        for name, (calls, want) in expected.items():
            if name not in run.rows:
                continue
            kept = calls < run.n_calls
            if not bool(kept.any()):
                continue  # only some calls are checked, and none of them was in this shorter window
            got = run.rows[name][calls[kept]].double()
            error, n_wrong = _row_error(got, want[kept], limits.get(name, math.inf))
            if rival.name == "naive":
                comparable = name in self._timed.baseline_outputs
                dtype = next(iter(inputs.blocks.values())).dtype
                limits[name] = self._limit(name, dtype, error if comparable and math.isfinite(error) else 0.0)
                continue
            race.n_checked_rows += chosen[name].numel()
            race.row_errors[name] = max(error, race.row_errors.get(name, 0.0))
            if not error <= limits.get(name, math.inf):
                self._explain_wrong(rival, run, rows, name, want, calls, limits[name], n_wrong, inputs)

    def _hold_to_length(self, run: WindowRun, race: Race) -> None:
        room = race.rooms["student"]
        n_calls = timing.more_calls(
            took_ms=run.window_ms,
            n_calls=run.n_calls,
            need=room.need,
            n_outputs=len(self._operation.outputs),
            window_ms=room.window_ms,
        )
        if n_calls is not None:
            raise _TooFewCallsError(n_calls)

    def _limit(self, name: str, dtype: torch.dtype, baseline_error: float) -> float:
        """Largest relative error of an output that passes. What disturbs the baseline cannot make it any large."""
        limit = functools.partial(
            self._assignment.tolerance.limit, largest_score=LARGEST_SCORE, gradient=name in self._gradients
        )
        kind = str(dtype).removeprefix("torch.")
        # products of float32 are made in tf32 on a GPU, which has the mantissa of float16
        exact = limit(baseline_rel_error=0.0, dtype="float16" if kind == "float32" else kind)
        return limit(baseline_rel_error=min(baseline_error, MOST_BASELINE_ERROR * exact), dtype=kind)

    def _explain_wrong(
        self,
        rival: Rival,
        run: WindowRun,
        rows: Rows,
        name: str,
        want: torch.Tensor,
        calls: torch.Tensor,
        limit: float,
        n_wrong: int,
        inputs: Field,
    ) -> None:
        later = rival.gather_again(run.n_calls, rows)[name]
        kept = calls < run.n_calls
        error, _ = _row_error(later[calls[kept]].double(), want[kept], limit)
        late = error <= limit
        scale = float(want[kept].abs().max()) or 1.0
        off = ~((run.rows[name][calls[kept]].double() - want[kept]).abs() <= limit * scale)
        bad = off.flatten(1).any(dim=1).nonzero().flatten()[:PLAIN_CALLS]
        wrong = WrongRows(
            inputs=inputs,
            output=name,
            calls=tuple(calls[kept][bad].tolist()),
            rows=rows[name][calls[kept][bad]],
            want=want[kept][bad],
            scale=scale,
            limit=limit,
        )
        kind = "late-work" if late else "timed-outputs-wrong"
        when = "was not there when the file said that it was done, and was a moment later" if late else "is wrong"
        message = f"{name} of {n_wrong} of {run.n_calls} timed calls {when}, in {rows[name].shape[1]} rows looked at"
        raise WrongRowsError(Evidence(kind=kind, message=message), None if late else wrong)

    def _hold_to_events(self, race: Race) -> None:
        """The candidate's own events against our clock: they see less where work was hidden from them, or they lie."""
        events_ms, per_call = median(race.events_ms["student"]), median(self.per_call(race, "student"))
        if not timing.events_agree(events_ms=events_ms, per_call=per_call):
            message = f"the file's own CUDA events tell {events_ms:.4f} ms a call, the clock outside {per_call:.4f}"
            race.evidence.append(Evidence(kind="events-disagree", message=message))

    def _look_at_first_call(
        self, student: Rival, size: Size, race: Race, limits: dict[str, float], n_windows: int
    ) -> None:
        """A call alone, without company to hide in: as right as the others, and as slow.

        Its inputs are those of one call: to show those of a whole window takes a hundred times as long as such a call.
        """
        inputs = self.one_call(size)
        idle_ms = self._idle_ms(inputs, size)
        student.prepare(inputs, 1)
        student.rehearse(1, most=1)
        for _ in range(n_windows):
            found = self._window(student, 1, inputs, idle_ms, race)
            if found is not None:
                self._compare(student, *found, inputs, race, limits)
                race.first_ms.append(found[0].window_ms)
        if not race.first_ms:
            raise VoidError(f"no call alone could be timed: {race.voids[-1]}")
        per_call = median(self.per_call(race, "student"))
        empty = race.empty_ms
        if not timing.first_call_agrees(first_ms=race.first_ms, empty_ms=empty, per_call=per_call):
            alone = median(race.first_ms) - median(empty)
            race.evidence.append(
                Evidence(
                    kind="first-call-disagrees",
                    message=f"one call alone takes {alone:.3f} ms, its share of a window {per_call:.3f} ms",
                )
            )


def _numbers(said: Any, n: int) -> list[float]:
    """`n` numbers of a claim; zeros where it is something else."""
    right = isinstance(said, list) and len(said) == n and all(type(one) in (int, float) for one in said)
    return [float(one) for one in said] if right else [0.0] * n


def _forward_outputs(operation: Operation) -> tuple[str, ...]:
    gradients = {f"d{name}" for name in operation.inputs}
    return tuple(name for name in operation.outputs if name not in gradients)


def _row_error(got: torch.Tensor, want: torch.Tensor, limit: float) -> tuple[float, int]:
    """Largest relative error (inf where something is not finite), and the number of calls beyond the limit."""
    if got.shape != want.shape:
        return math.inf, len(want)
    scale = float(want.abs().max()) or 1.0
    error = (got - want).abs() / scale
    error = torch.where(torch.isfinite(error), error, torch.full_like(error, math.inf))
    wrong = ~(error <= limit)
    return float(error.max()), int(wrong.flatten(1).any(dim=1).sum())
