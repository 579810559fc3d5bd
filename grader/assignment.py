"""An assignment: data that a teacher can read aloud, loaded from a folder and validated.

A folder `assignments/<slug>/` holds `assignment.toml`, `handout.md` and `starter.py`. Nothing in it is code that the
service runs. Every complaint names file, key, value and remedy.
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from grader import devices
from grader.errors import AssignmentError

AXES = ("numerics", "memory", "structure", "speed")
CHECKS = ("values", "repeat", "input-unchanged", "guard", "fresh-inputs")
LAYOUTS = ("contiguous", "strided")
DTYPES = ("float32", "float16", "bfloat16")
ENTRY_KINDS = ("function", "autograd")
DEVICES = ("interpreter", "cuda")
REPLAYS = ("never", "top", "always")
_FILES = ("assignment.toml", "handout.md", "starter.py")
SLUG = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """An output passes when its error is at most `slack` times the naive baseline's own error plus a floor.

    Errors are relative: max |got - want| / max |want|, against float64. The floor grows with the largest |score|,
    because rounding a score of 130 in float32 alone costs 1e-5. Source: the tolerance rule of flash-attention's tests.
    """

    slack: float
    floor: Mapping[str, float]  # by dtype
    gradient_floor: Mapping[str, float]  # by dtype
    score_slope: float

    def limit(self, *, baseline_rel_error: float, dtype: str, largest_score: float, gradient: bool) -> float:
        """Largest relative error that passes."""
        floor = (self.gradient_floor if gradient else self.floor)[dtype]
        return self.slack * baseline_rel_error + floor + self.score_slope * largest_score


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """A tensor the entry point returns, or a gradient its backward gives."""

    name: str
    own_kernel: bool = True  # must be written by a Triton kernel of the student's
    gradient: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One probe of the numerics axis, named for what it tries."""

    name: str
    axes: Mapping[str, int]
    tries: str  # one clause for the report: what this probe tries
    points: float = 1.0
    required: bool = False  # nothing is earned unless every required probe passes
    hidden: bool = False  # students see one line
    fill: str = "normal"  # input recipe of the operation
    dtype: str = "float32"
    layout: str = "contiguous"
    check: str = "values"
    options: Mapping[str, Any] | None = None  # scalars of the entry point, e.g. is_causal
    devices: tuple[str, ...] = DEVICES


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySweep:
    """Sizes at which memory is measured, and the exponent that passes."""

    axis: str
    sizes: tuple[int, ...]  # interpreter; geometric
    cuda_sizes: tuple[int, ...]
    axes: Mapping[str, int]  # the other axes; the swept one may set several, see `along`
    along: tuple[str, ...]  # the axes that take the swept size, e.g. queries and keys
    pass_exponent: float  # at most this passes
    dtype: str = "float32"
    cuda_axes: Mapping[str, int] | None = None  # the other axes on a GPU; None: the same

    def axes_on(self, device: str) -> Mapping[str, int]:
        """The axes that stay as they are while one grows, on a device of that kind."""
        return self.cuda_axes if device == "cuda" and self.cuda_axes is not None else self.axes


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """What the audit is held against."""

    axes: Mapping[str, int]
    options: Mapping[str, Any]
    max_launches: int  # Triton launches of the forward
    max_backward_launches: int
    max_bytes_ratio: float  # unique bytes, times the least possible
    torch_ops: tuple[str, ...]  # operations that are allowed beside copies, fills and views
    forbidden_ops: tuple[str, ...] = ()  # torch operations that are what the kernel is asked to do
    unread_inputs: tuple[str, ...] = ()  # inputs that a right kernel need not load in the audited call
    max_tile_elements: int | None = None  # largest tile on the chip at `axes`; None: any
    dtype: str = "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedStep:
    """Speed-up over naive at which this fraction of the points is earned; linear in between."""

    speedup: float
    fraction: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    sizes: tuple[Mapping[str, int], ...]  # the first is the headline
    dtype: str
    options: Mapping[str, Any]
    steps: tuple[SpeedStep, ...]
    gpu_steps: Mapping[str, tuple[SpeedStep, ...]]  # by GPU model as `devices.model_of` names it, where they differ
    replay: str = "never"  # whose kernels are run again without their Python; "top": of who earns all speed points


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one hand-in may use."""

    load_s: float = 30.0
    call_s: float = 20.0  # one call
    total_s: float = 120.0  # the whole examination
    memory_bytes: int = 1536 << 20
    output_bytes: int = 1 << 20
    attempts: int = 0  # 0: as many as you like


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    slug: str
    title: str
    summary: str
    operation: str  # name in `reference`, e.g. "attention.forward"
    entry: str
    entry_kind: str
    signature: str
    target_gpu: str
    deadline: datetime | None
    outputs: tuple[Output, ...]
    points: Mapping[str, float]  # by axis; an axis without points is not judged
    tolerance: Tolerance
    cases: tuple[Case, ...]
    memory: MemorySweep | None
    structure: Structure
    speed: Speed | None
    limits: Limits
    handout: str
    starter: str
    digest: str  # SHA-256 over the folder's three files
    explained: Mapping[str, str] = field(default_factory=dict)  # by fault: the heading of the handout that is about it

    def case(self, name: str) -> Case | None:
        """The case of that name, or None when a later edition dropped it."""
        return next((case for case in self.cases if case.name == name), None)

    def cases_on(self, device_kind: str) -> tuple[Case, ...]:
        return tuple(case for case in self.cases if device_kind in case.devices)


def load_assignment(folder: Path) -> Assignment:
    """Read and validate `folder`. Raises AssignmentError naming file, key, value and remedy."""
    if not SLUG.fullmatch(folder.name):
        raise AssignmentError(f"{folder}: the folder's name is the slug; use lower-case words joined by hyphens")
    texts = {name: _read(folder / name) for name in _FILES}
    file = folder / "assignment.toml"
    try:
        data = tomllib.loads(texts["assignment.toml"])
    except tomllib.TOMLDecodeError as exc:
        raise AssignmentError(f"{file}: not valid TOML: {exc}") from None
    digest = hashlib.sha256("\0".join(texts[name] for name in _FILES).encode()).hexdigest()
    root = _Table(file, "", data)
    return _assignment(root, folder.name, texts["handout.md"], texts["starter.py"], digest)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise AssignmentError(f"{path}: missing; an assignment has {', '.join(_FILES)}") from None
    except UnicodeDecodeError as exc:
        raise AssignmentError(f"{path}: not UTF-8 at byte {exc.start}; save it as UTF-8") from None


class _Table:
    """A TOML table that knows where it stands, hands out checked values and complains about keys nobody asked for."""

    def __init__(self, file: Path, where: str, data: Any) -> None:
        self.file, self.where = file, where
        if not isinstance(data, dict):
            raise AssignmentError(f"{file}: {where or 'the file'} must be a table, found {data!r}")
        self._data = data
        self._known: set[str] = set()

    def fail(self, key: str, complaint: str) -> NoReturn:
        name = f"{self.where}.{key}" if self.where else key
        raise AssignmentError(f"{self.file}: {name}: {complaint}")

    def has(self, key: str) -> bool:
        self._known.add(key)
        return key in self._data

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
        self._known.add(key)
        if key not in self._data:
            if default is ...:
                self.fail(key, "missing; add it")
            return default
        value = self._data[key]
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            self.fail(key, f"{value!r} is not {' or '.join(one.__name__ for one in kinds)}")
        return value

    def text(self, key: str, default: Any = ...) -> str:
        value = self.get(key, str, default)
        if value is not default and not value.strip():
            self.fail(key, "is empty; write something")
        return str(value)

    def number(self, key: str, default: Any = ..., *, least: float = 0.0) -> float:
        value = self.get(key, (int, float), default)
        if not (math.isfinite(value) and value >= least):
            self.fail(key, f"{value!r} must be a number of at least {least:g}")
        return float(value)

    def integer(self, key: str, default: Any = ..., *, least: int = 0) -> int:
        value = self.get(key, int, default)
        if value < least:
            self.fail(key, f"{value} must be at least {least}")
        return int(value)

    def choice(self, key: str, among: tuple[str, ...], default: Any = ...) -> str:
        value = self.text(key, default)
        if value not in among:
            self.fail(key, f"{value!r} is not one of {', '.join(among)}{_hint(value, among)}")
        return value

    def table(self, key: str) -> _Table:
        return _Table(self.file, f"{self.where}.{key}" if self.where else key, self.get(key, dict))

    def tables(self, key: str) -> list[_Table]:
        rows = self.get(key, list)
        return [_Table(self.file, f"{key}[{i}]", row) for i, row in enumerate(rows)]

    def mapping(self, key: str, default: Any = ...) -> dict[str, Any]:
        return dict(self.get(key, dict, default))

    def sizes(self, key: str, default: Any = ...) -> dict[str, int]:
        found = self.mapping(key, default)
        for axis, size in found.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                self.fail(f"{key}.{axis}", f"{size!r} must be a whole number of at least 1")
        return found

    def integers(self, key: str, default: Any = ...) -> tuple[int, ...]:
        values = self.get(key, list, default)
        if any(not isinstance(one, int) or isinstance(one, bool) or one < 1 for one in values):
            self.fail(key, f"{values!r} must be whole numbers of at least 1")
        return tuple(values)

    def texts(self, key: str, default: Any = ...) -> tuple[str, ...]:
        values = self.get(key, list, default)
        if any(not isinstance(one, str) for one in values):
            self.fail(key, f"{values!r} must be texts")
        return tuple(values)

    def names(self) -> list[str]:
        self._known.update(self._data)
        return list(self._data)

    def close(self) -> None:
        for key in self._data:
            if key not in self._known:
                self.fail(key, f"unknown key{_hint(key, tuple(self._known))}")


def _hint(word: str, among: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(word, among, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(sorted(among))}"


def _assignment(root: _Table, slug: str, handout: str, starter: str, digest: str) -> Assignment:
    deadline = root.get("deadline", datetime, None)
    if deadline is not None:
        deadline = deadline.replace(tzinfo=UTC) if deadline.tzinfo is None else deadline.astimezone(UTC)
    outputs = _outputs(root.table("outputs"))
    points = _points(root.table("points"))
    cases = tuple(_case(row) for row in root.tables("cases"))
    names = [case.name for case in cases]
    for name in names:
        if names.count(name) > 1:
            root.fail("cases", f"two cases are named {name!r}; names are unique")
    if not any(case.required for case in cases):
        root.fail("cases", "no case is required; mark at least 'random' with required = true")
    for axis, table in (("memory", "memory"), ("speed", "speed")):
        if (axis in points) != root.has(table):
            root.fail(f"points.{axis}", f"an axis has points exactly when there is a table [{table}]; add or drop one")
    found = Assignment(
        slug=slug,
        title=root.text("title"),
        summary=root.text("summary"),
        operation=root.text("operation"),
        entry=root.text("entry"),
        entry_kind=root.choice("entry_kind", ENTRY_KINDS, "function"),
        signature=root.text("signature"),
        target_gpu=root.text("target_gpu", "sm_90"),
        deadline=deadline,
        outputs=outputs,
        points=points,
        tolerance=_tolerance(root.table("tolerance")),
        cases=cases,
        memory=_memory(root.table("memory")) if root.has("memory") else None,
        structure=_structure(root.table("structure")),
        speed=_speed(root.table("speed")) if root.has("speed") else None,
        limits=_limits(root.table("limits")) if root.has("limits") else Limits(),
        explained=_explained(root.table("explained"), handout) if root.has("explained") else {},
        handout=handout,
        starter=starter,
        digest=digest,
    )
    root.close()
    return found


def _outputs(table: _Table) -> tuple[Output, ...]:
    found = []
    for name in table.names():
        row = table.table(name)
        found.append(
            Output(name=name, own_kernel=row.get("own_kernel", bool, True), gradient=row.get("gradient", bool, False))
        )
        row.close()
    if not found:
        table.fail("", "names no output; add one table for each tensor the entry point returns")
    return tuple(found)


def _points(table: _Table) -> dict[str, float]:
    found = {axis: table.number(axis) for axis in AXES if table.has(axis)}
    table.close()
    if "numerics" not in found or "structure" not in found:
        table.fail("numerics", "numerics and structure always have points")
    if round(sum(found.values()), 9) != 100:
        table.fail("numerics", f"the axes add up to {sum(found.values()):g}; make it 100")
    return found


def _tolerance(table: _Table) -> Tolerance:
    def floors(key: str) -> dict[str, float]:
        row = table.table(key)
        found = {dtype: row.number(dtype) for dtype in DTYPES}
        row.close()
        return found

    floor = floors("floor")
    found = Tolerance(
        slack=table.number("slack"),
        floor=floor,
        gradient_floor=floors("gradient_floor") if table.has("gradient_floor") else floor,
        score_slope=table.number("score_slope", 0.0),
    )
    table.close()
    return found


def _case(row: _Table) -> Case:
    found = Case(
        name=row.text("name"),
        axes=row.sizes("axes"),
        tries=row.text("tries"),
        points=row.number("points", 1.0),
        required=row.get("required", bool, False),
        hidden=row.get("hidden", bool, False),
        fill=row.text("fill", "normal"),
        dtype=row.choice("dtype", DTYPES, "float32"),
        layout=row.choice("layout", LAYOUTS, "contiguous"),
        check=row.choice("check", CHECKS, "values"),
        options=row.mapping("options", {}),
        devices=row.texts("devices", list(DEVICES)),
    )
    for device in found.devices:
        if device not in DEVICES:
            row.fail("devices", f"{device!r} is not one of {', '.join(DEVICES)}")
    row.close()
    return found


def _memory(table: _Table) -> MemorySweep:
    axes = table.sizes("axes", {})
    found = MemorySweep(
        axis=table.text("axis"),
        sizes=table.integers("sizes"),
        cuda_sizes=table.integers("cuda_sizes", []),
        axes=axes,
        along=table.texts("along"),
        pass_exponent=table.number("pass_exponent"),
        dtype=table.choice("dtype", DTYPES, "float32"),
        cuda_axes=table.sizes("cuda_axes") if table.has("cuda_axes") else None,
    )
    for key in ("sizes", "cuda_sizes"):
        values = getattr(found, key)
        if list(values) != sorted(set(values)) or (key == "sizes" and len(values) < 2):
            table.fail(key, f"{list(values)} must be at least two growing sizes")
    table.close()
    return found


def _structure(table: _Table) -> Structure:
    found = Structure(
        axes=table.sizes("axes"),
        options=table.mapping("options", {}),
        max_launches=table.integer("max_launches", least=1),
        max_backward_launches=table.integer("max_backward_launches", 0),
        max_bytes_ratio=table.number("max_bytes_ratio", least=1.0),
        torch_ops=table.texts("torch_ops", []),
        forbidden_ops=table.texts("forbidden_ops", []),
        unread_inputs=table.texts("unread_inputs", []),
        max_tile_elements=table.integer("max_tile_elements", least=1) if table.has("max_tile_elements") else None,
        dtype=table.choice("dtype", DTYPES, "float32"),
    )
    table.close()
    return found


def _speed(table: _Table) -> Speed:
    def steps(key: str, rows: list[Any]) -> tuple[SpeedStep, ...]:
        found = []
        for i, row in enumerate(rows):
            inner = _Table(table.file, f"speed.{key}[{i}]", row)
            found.append(SpeedStep(speedup=inner.number("speedup"), fraction=inner.number("fraction")))
            inner.close()
        growing = all(a.speedup < b.speedup and a.fraction <= b.fraction for a, b in itertools.pairwise(found))
        if not found or not growing or found[-1].fraction != 1.0:
            table.fail(key, "steps must grow in speedup and fraction and end at fraction 1")
        return tuple(found)

    sizes = [_Table(table.file, "speed", {f"sizes[{i}]": row}) for i, row in enumerate(table.get("sizes", list))]
    gpu = table.table("gpu_steps") if table.has("gpu_steps") else None
    for model in gpu.names() if gpu else ():
        if model != devices.model_of(model):
            table.fail(f"gpu_steps.{model}", f"is no model as workers name them; write {devices.model_of(model)!r}")
    found = Speed(
        sizes=tuple(row.sizes(f"sizes[{i}]") for i, row in enumerate(sizes)),
        dtype=table.choice("dtype", DTYPES, "bfloat16"),
        options=table.mapping("options", {}),
        steps=steps("steps", table.get("steps", list)),
        gpu_steps={model: steps(f"gpu_steps.{model}", gpu.get(model, list)) for model in gpu.names()} if gpu else {},
        replay=table.choice("replay", REPLAYS, "never"),
    )
    if not found.sizes:
        table.fail("sizes", "names no size; the first is the headline")
    table.close()
    return found


def _explained(table: _Table, handout: str) -> dict[str, str]:
    headings = tuple(re.findall(r"^## +(.+?) *$", handout, re.MULTILINE))
    found: dict[str, str] = {}
    for heading in table.names():
        if heading not in headings:
            table.fail(heading, f"the handout has no such heading{_hint(heading, headings)}")
        for fault in table.texts(heading):
            if fault in found:
                table.fail(heading, f"{fault!r} stands below {found[fault]!r} already; a report leads to one place")
            found[fault] = heading
    return found


def _limits(table: _Table) -> Limits:
    default = Limits()
    found = Limits(
        load_s=table.number("load_s", default.load_s, least=1.0),
        call_s=table.number("call_s", default.call_s, least=1.0),
        total_s=table.number("total_s", default.total_s, least=1.0),
        memory_bytes=table.integer("memory_mib", default.memory_bytes >> 20, least=512) << 20,
        output_bytes=table.integer("output_kib", default.output_bytes >> 10, least=1) << 10,
        attempts=table.integer("attempts", 0),
    )
    table.close()
    return found
