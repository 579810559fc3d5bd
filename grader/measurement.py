"""What an examination found: plain numbers, to and from JSON.

A measurement is a fact. Verdicts, points, hints and sentences are not in here; `judging`, `diagnosis` and `report`
recompute them from these facts and the assignment whenever either changes.

Numbers are finite. A value that could not be computed (a NaN output, a wrong shape) is None, and a count beside it
says why.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

FORMAT = 1


class FailureKind(enum.StrEnum):
    """How a file or a call of it failed to give a result. The value is also the fault label."""

    SYNTAX_ERROR = "syntax-error"
    IMPORT_ERROR = "import-error"
    ENTRY_MISSING = "entry-missing"
    ENTRY_AMBIGUOUS = "entry-ambiguous"
    WRONG_SIGNATURE = "wrong-signature"
    RAISES = "raises"
    COMPILE_ERROR = "compile-error"
    WRONG_RESULT_TYPE = "wrong-result-type"
    PYTHON_EXIT = "python-exit"
    CRASHED = "crashed"
    NOT_OURS = "broken-protocol"
    TIME_LIMIT = "infinite-loop"
    MEMORY_LIMIT = "memory-bomb"
    OUTPUT_LIMIT = "prints-flood"
    PROCESS_LIMIT = "process-limit"
    SCRATCH_LIMIT = "disk-limit"


LIMITS = frozenset(
    {
        FailureKind.TIME_LIMIT,
        FailureKind.MEMORY_LIMIT,
        FailureKind.OUTPUT_LIMIT,
        FailureKind.PROCESS_LIMIT,
        FailureKind.SCRATCH_LIMIT,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One failure of the student's file."""

    kind: FailureKind
    message: str  # first lines of what was said, bounded; hostile text
    line: int | None = None  # of the student's file
    traceback: str = ""  # bounded, only frames of the student's file and of triton; hostile text
    stage: str = "load"  # "load" or the name of the probe that was running


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongElement:
    """An element beyond the limit. `got` is None when it is not a finite number."""

    index: tuple[int, ...]
    got: float | None
    want: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputRun:
    """One output of one probe, held against the float64 oracle."""

    name: str
    shape: tuple[int, ...]
    want_shape: tuple[int, ...]
    dtype: str
    want_dtype: str
    rel_error: float | None  # max |got - want| / max |want|; None when not finite or the shape is wrong
    baseline_rel_error: float  # the naive baseline in the student's dtype, or what rounding alone costs if that is more
    n_elements: int
    n_not_finite: int  # in the student's output, where the oracle is finite
    n_wrong: int  # beyond the limit in force when it was measured
    limit: float  # that limit
    first_wrong: WrongElement | None = None  # the one of lowest index
    wrong_rows: tuple[int, ...] = ()  # up to 16 indices along the second-last axis with a wrong element
    n_wrong_rows: int = 0
    n_rows: int = 0
    error_map: tuple[tuple[float | None, ...], ...] = ()  # block means of |got - want|, at most 16 x 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something the instrumented interpreter saw: an out-of-bounds access, a race, a read of unwritten memory."""

    kind: str  # out-of-bounds-load | out-of-bounds-store | outside-view-load | ... | race-write-write | ...
    message: str  # one sentence; hostile text
    arg: str | None = None
    line: int | None = None
    probe: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeMeasured:
    """A probe that ran to its end."""

    name: str
    outputs: tuple[OutputRun, ...]
    largest_score: float  # largest |score| of the inputs; tolerances grow with it
    repeat_equal: bool | None = None  # two equal calls gave equal bits; None where not tried
    inputs_unchanged: bool = True
    guards_intact: bool = True  # the NaN bands around inputs
    first_result_kept: bool | None = None  # the first result after a second call on the same buffers
    findings: tuple[Finding, ...] = ()
    torch_ops: tuple[TorchOp, ...] = ()  # that compute: no views, allocations, fills and copies
    library_calls: tuple[TorchOp, ...] = ()
    tuned: bool = False  # Triton's autotuner timed configurations in this call: a claim
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeFailed:
    """A probe that gave no result."""

    name: str
    failure: Failure
    seconds: float = 0.0


ProbeRun = ProbeMeasured | ProbeFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFault:
    """What compute-sanitizer saw when a probe that broke the GPU's context ran once more under it. A claim."""

    probe: str
    what: str  # e.g. "Invalid __global__ write of size 4 bytes"; hostile text, as the next two
    where: str  # how far from which allocation
    kernel: str
    line: int | None  # of the student's file


@dataclass(frozen=True, slots=True, kw_only=True)
class MistakeOnProbe:
    """How a known mistake's outputs lie to the student's and to the oracle's, on one probe."""

    probe: str
    distance: float | None  # student to mistake, largest over outputs, relative; None: not comparable
    own_error: float | None  # mistake to oracle, the same way; None: not finite


@dataclass(frozen=True, slots=True, kw_only=True)
class MistakeMatch:
    """One known mistake held against the student's outputs, on all probes that ran."""

    label: str
    tile: int | None  # tile width tried, for mistakes that depend on it
    probes: tuple[MistakeOnProbe, ...]
    step: str = ""  # the step of the recurrence it breaks
    hint: str = ""  # what to look at, without giving the fix away


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPoint:
    """Device memory at one size, above the inputs, in bytes."""

    size: int  # along the swept axis
    peak_bytes: int
    backward_peak_bytes: int | None = None
    kept_bytes: int = 0  # alive after the forward: outputs and what was saved
    naive_bytes: int = 0  # what the naive baseline needs, same meaning as peak_bytes
    reference_bytes: int = 0  # what the reference kernel needs
    largest_tile_elements: int = 0  # on chip, in any launch of this call; 0: not counted
    failure: Failure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """A tensor's memory that the student's code allocated."""

    shape: tuple[int, ...]
    dtype: str
    size_bytes: int
    line: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelArgument:
    name: str
    shape: tuple[int, ...]
    dtype: str
    requested_load_bytes: int
    unique_load_bytes: int
    requested_store_bytes: int
    unique_store_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One launch of a Triton kernel in the instrumented interpreter."""

    kernel: str  # hostile text
    line: int | None
    grid: tuple[int, ...]
    requested_bytes: int
    unique_bytes: int
    dot_flops: int
    largest_tile_elements: int
    args: tuple[KernelArgument, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchOp:
    """A torch operation that would be a kernel on a GPU."""

    op: str
    count: int
    size_bytes: int  # read and written, over all calls
    line: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputWritten:
    name: str
    by_own_kernel: bool
    unwritten_elements: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """What the instrumented interpreter counted in one call. Exact, and the same on every machine."""

    axes: dict[str, int]
    n_launches: int
    launches: tuple[Launch, ...]
    torch_ops: tuple[TorchOp, ...]
    library_calls: tuple[TorchOp, ...]
    outputs: tuple[OutputWritten, ...]
    requested_bytes: int
    unique_bytes: int
    dot_flops: int
    largest_tile_elements: int
    least_bytes: int  # every input read once, every output written once
    eager_launches: int  # the naive chain in eager torch on a GPU
    eager_bytes: int
    findings: tuple[Finding, ...] = ()
    saved: tuple[Storage, ...] = ()  # alive after the forward, neither input nor output
    order_dependent: bool | None = None  # outputs changed when programs ran in another order
    unread_inputs: tuple[str, ...] = ()  # no kernel of the file loaded them, nor what torch made of them
    quadratic_bytes: float | None = None  # coefficient of T² in unique bytes, from two sizes
    backward_launches: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledKernel:
    """What the compiler made of one launch for the target GPU, without a GPU."""

    kernel: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    ctas_per_sm: int
    matrix_unit: str  # "wgmma", "mma" or "none"
    line: int | None = None
    shapes: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileReport:
    target: str  # e.g. "sm_90"
    kernels: tuple[CompiledKernel, ...]
    failures: tuple[Failure, ...] = ()
    finished: bool = True  # False: the budget, in time or kernels, ended first, or the file did not get so far
    unfinished: str = ""  # why, as a clause
    shared_limit_bytes: int = 232448  # most shared memory one CTA may ask for on the target; more fails at the launch


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Speed of one size on a GPU."""

    axes: dict[str, int]
    student_times_ms: tuple[float, ...]
    naive_times_ms: tuple[float, ...]
    reference_times_ms: tuple[float, ...]
    ratio: float
    ratio_low: float  # 95 % bootstrap interval
    ratio_high: float
    noisy: bool
    dtype: str = ""
    flops: int = 0  # that one call needs, by counting; 0: not counted, and so for the bytes below
    least_bytes: int = 0  # every input read once, every output written once
    eager_bytes: int = 0  # what the naive chain reads and writes
    student_events_ms: tuple[float, ...] = ()  # by CUDA events in the student's own process: a claim, to compare


@dataclass(frozen=True, slots=True, kw_only=True)
class LargeCall:
    """A plain call at a size that is timed, by a fresh process, that failed or was wrong: the probes are small."""

    axes: dict[str, int]
    dtype: str
    output: str = ""
    rel_error: float | None = None  # largest, of the rows looked at; None: not finite, or no result
    limit: float = 0.0
    n_rows: int = 0
    n_wrong_rows: int = 0
    failure: Failure | None = None


class ReplayOutcome(enum.StrEnum):
    """What came of running a hand-in's compiled kernels without its Python."""

    AGREES = "agrees"  # outputs are right on fresh inputs, in about the graded time
    DIFFERS = "differs"  # outputs are not right: something else than these kernels made them
    SLOWER = "slower"  # outputs are right, and the graded time is less than the kernels need
    NOT_REPLAYABLE = "not-replayable"  # nothing follows from it


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """The recorded kernels of one call, launched by a process that never saw the student's file."""

    outcome: ReplayOutcome
    axes: dict[str, int]
    detail: str = ""  # why; hostile text
    n_launches: int = 0
    torch_ops: tuple[str, ...] = ()  # done again beside the launches
    left_out: tuple[str, ...] = ()  # torch operations that were not: the assignment does not allow them there
    time_ms: float | None = None  # of a call, by the examiner's clock
    ratio: float | None = None  # naive to replayed, as the graded ratio is naive to the file's


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """What a GPU was measured to do at best: the highest rate of each kind."""

    copy_bytes_per_s: float  # read and written
    flops_per_s: dict[str, float]  # by dtype, of a large matrix product


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuState:
    """What NVML says at one moment."""

    sm_clock_mhz: int
    memory_clock_mhz: int
    temperature_c: int
    power_w: float
    throttle_reasons: int  # NVML's bits; 1 is idle
    processes: tuple[int, ...]  # host process numbers with a context on this GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """The GPU that was measured on, beside its name."""

    memory_bytes: int
    ceilings: Ceilings | None = None
    before: GpuState | None = None  # the candidates ran between these two
    after: GpuState | None = None
    held_s: float | None = None  # under the GPU's lock, which no two hand-ins hold at a time
    idle_s: float | None = None  # between the last one of the same worker that held it and this one


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    kind: str  # "interpreter" or "cuda"
    name: str
    arch: str = ""  # of a GPU, e.g. "sm_90"; empty where there is none


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """How well the candidate was locked in: full, reduced or none."""

    level: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    name: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """A sign that measurements may have been interfered with. For staff; never an accusation."""

    kind: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """Everything that was measured for one hand-in."""

    assignment: str
    assignment_digest: str
    source_sha256: str
    device: Device
    isolation: Isolation
    versions: dict[str, str]
    seed: int  # staff only: it makes every probe's inputs again
    entry: str | None = None  # the entry point that was used
    load_failure: Failure | None = None
    probes: tuple[ProbeRun, ...] = ()
    right_without_launches: tuple[str, ...] | None = None  # outputs that needed no launch; None: not tried
    mistakes: tuple[MistakeMatch, ...] = ()
    memory: tuple[MemoryPoint, ...] = ()
    audit: Audit | None = None
    audit_failure: Failure | None = None
    compile_report: CompileReport | None = None
    timings: tuple[Timing, ...] = ()
    gpu: GpuFacts | None = None
    device_fault: DeviceFault | None = None
    large_calls: tuple[LargeCall, ...] = ()
    large_ops: tuple[TorchOp, ...] = ()  # torch's, in calls at the sizes of memory and speed on a GPU, outside windows
    large_library_calls: tuple[TorchOp, ...] = ()
    too_slow: Failure | None = None  # the limit of time at which measuring memory and speed on a GPU ended
    replay: Replay | None = None
    evidence: tuple[Evidence, ...] = ()
    stages: tuple[Stage, ...] = ()
    stdout: str = ""  # bounded; hostile text
    stderr: str = ""
    output_bytes: int = 0
    format: int = FORMAT

    @property
    def library_calls(self) -> tuple[TorchOp, ...]:
        """Library attention that any call made: the audited one, a probe's, or one at the sizes that are measured."""
        audited = self.audit.library_calls if self.audit is not None else ()
        probes = [run for run in self.probes if isinstance(run, ProbeMeasured)]
        return (*audited, *(call for run in probes for call in run.library_calls), *self.large_library_calls)


T = TypeVar("T")


def to_json(value: Any) -> Any:
    """Plain dicts, lists, strings, numbers and None. Unions of dataclasses carry their class name under 'type'."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        found = {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
        if isinstance(value, ProbeMeasured | ProbeFailed):
            found["type"] = type(value).__name__
        return found
    if isinstance(value, tuple | list):
        return [to_json(item) for item in value]
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, enum.Enum):
        return value.value
    return value


def dumps(examination: Examination) -> str:
    """The examination as JSON text. Raises ValueError when a number in it is not finite."""
    return json.dumps(to_json(examination), allow_nan=False, separators=(",", ":"))


def loads(text: str) -> Examination:
    """The inverse of `dumps`. Unknown keys are ignored, so that an older program reads a newer file."""
    return from_json(Examination, json.loads(text))


def from_json(kind: type[T], data: Any) -> T:
    """Build `kind` from what `to_json` made of it. Raises ValueError when a value does not fit its field."""
    try:
        return typing.cast(T, _reader(typing.cast(Any, kind))(data))
    except _MisfitError as misfit:
        raise ValueError(f"{kind.__name__}{misfit.where}: {misfit}") from None


class _MisfitError(ValueError):
    """A value that does not fit. `where` is put together on the way out, so that what fits pays nothing for it."""

    where = ""


def _misfit(wanted: str, data: Any) -> _MisfitError:
    return _MisfitError(f"expected {wanted}, found {type(data).__name__}")


@functools.cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    """The function that reads one kind of value; reports with error maps have ten thousands of numbers."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return _union_reader(args)
    if origin is tuple:
        return _tuple_reader(_reader(args[0]))
    if origin is dict:
        return _dict_reader(_reader(args[1]))
    if dataclasses.is_dataclass(kind):
        return _dataclass_reader(typing.cast(type, kind))
    if issubclass(kind, enum.Enum):
        return typing.cast(Callable[[Any], Any], kind)
    return _float if kind is float else _plain_reader(kind)


def _float(data: Any) -> float:
    if type(data) is float:
        return data
    if type(data) is int:
        return float(data)
    raise _misfit("float", data)


def _plain_reader(kind: type) -> Callable[[Any], Any]:
    def read(data: Any) -> Any:
        if type(data) is not kind:  # so True is no int
            raise _misfit(kind.__name__, data)
        return data

    return read


def _tuple_reader(item: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def read(data: Any) -> Any:
        if type(data) is not list:
            raise _misfit("list", data)
        found: list[Any] = []
        try:
            for one in data:
                found.append(item(one))  # its length says where it stopped
        except _MisfitError as misfit:
            misfit.where = f"[{len(found)}]{misfit.where}"
            raise
        return tuple(found)

    return read


def _dict_reader(item: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def read(data: Any) -> Any:
        if type(data) is not dict:
            raise _misfit("dict", data)
        return {key: _field(item, key, value) for key, value in data.items()}

    return read


def _dataclass_reader(kind: type) -> Callable[[Any], Any]:
    # a dataclass may hold its own kind, so its fields' readers are looked up when one is first read
    fields: dict[str, Callable[[Any], Any]] = {}

    def read(data: Any) -> Any:
        if type(data) is not dict:
            raise _misfit("dict", data)
        if not fields:
            fields.update({name: _reader(hint) for name, hint in typing.get_type_hints(kind).items()})
        values = {name: _field(fields[name], name, value) for name, value in data.items() if name in fields}
        try:
            return kind(**values)
        except TypeError as exc:
            raise _MisfitError(str(exc)) from None

    return read


def _field(read: Callable[[Any], Any], name: str, value: Any) -> Any:
    try:
        return read(value)
    except _MisfitError as misfit:
        misfit.where = f".{name}{misfit.where}"
        raise


def _union_reader(args: tuple[Any, ...]) -> Callable[[Any], Any]:
    kinds = {kind.__name__: _reader(kind) for kind in args if kind is not types.NoneType}
    optional = types.NoneType in args
    if len(kinds) == 1:
        (only,) = kinds.values()
        return (lambda data: None if data is None else only(data)) if optional else only

    def read(data: Any) -> Any:
        if data is None and optional:
            return None
        tag = data.get("type") if type(data) is dict else None
        if tag not in kinds:
            raise _MisfitError(f"expected one of {sorted(kinds)}")
        return kinds[tag](data)

    return read
