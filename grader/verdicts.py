"""The opinions that judging forms about facts: verdicts of probes, axes and the whole, and the points they earn.

Values only. `judging` makes them, `diagnosis` reads them, `report` says them.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grader.measurement import Failure


class Verdict(enum.StrEnum):
    """The headline of a grade."""

    FULL = "full"
    PARTIAL = "partial"  # right numbers, points lost elsewhere
    WRONG = "wrong"
    ERROR = "error"  # does not parse, load, compile or return the right thing
    LIMIT = "limit"  # time, memory, output, processes, scratch space
    REFUSED = "refused"  # a rule broken openly
    HELD = "held"  # a person looks at it before it counts
    NOT_COUNTED = "not_counted"  # and decided that it does not


class AxisVerdict(enum.StrEnum):
    PASS = "pass"  # noqa: S105 - no password
    PARTIAL = "partial"
    FAIL = "fail"
    NOT_MEASURED = "not_measured"  # this device cannot; the points are withheld
    NOT_RUN = "not_run"  # the examination did not get there; nothing is earned


class CaseVerdict(enum.StrEnum):
    PASS = "pass"  # noqa: S105 - no password
    FAIL = "fail"
    ERROR = "error"
    LIMIT = "limit"
    NOT_RUN = "not_run"


class Fault(enum.StrEnum):
    """Why a probe that ran did not pass, the most telling first."""

    MISSING = "output-missing"
    SHAPE = "wrong-shape"
    DTYPE = "wrong-dtype"
    NOT_FINITE = "not-finite"
    VALUES = "wrong-values"
    REPEAT = "not-repeatable"
    INPUTS = "input-changed"
    GUARD = "guard-broken"
    STALE = "result-not-kept"


VALUE_FAULTS = frozenset({Fault.NOT_FINITE, Fault.VALUES})


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputGrade:
    """One output of one probe, held against the assignment's tolerance."""

    name: str
    rel_error: float | None  # None: not finite, of the wrong shape, or not returned
    limit: float
    fault: Fault | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseGrade:
    """One probe."""

    name: str
    verdict: CaseVerdict
    points: float
    out_of: float
    required: bool
    hidden: bool
    faults: tuple[Fault, ...] = ()
    outputs: tuple[OutputGrade, ...] = ()
    failure: Failure | None = None

    @property
    def passed(self) -> bool:
        return self.verdict is CaseVerdict.PASS

    @property
    def rel_error(self) -> float | None:
        """The largest over the outputs; None when one of them has none."""
        errors = [output.rel_error for output in self.outputs]
        return max((error for error in errors if error is not None), default=None) if None not in errors else None

    @property
    def limit(self) -> float | None:
        """The largest over the outputs."""
        return max((output.limit for output in self.outputs), default=None)


def only_hidden(cases: Sequence[CaseGrade], failure: Failure) -> bool:
    """True when this failure was seen in hidden probes alone, so that its words are for staff."""
    seen = [case.hidden for case in cases if case.failure == failure]
    return bool(seen) and all(seen)


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericsGrade:
    verdict: AxisVerdict
    points: float
    out_of: float
    cases: tuple[CaseGrade, ...]
    required_passed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryGrade:
    """How memory grows with size. Exponents come from the last step of the sweep."""

    verdict: AxisVerdict
    points: float
    out_of: float
    pass_exponent: float
    exponent: float | None = None  # the larger one of forward and backward
    forward_exponent: float | None = None
    backward_exponent: float | None = None
    kept_exponent: float | None = None  # of what stays alive after the forward
    naive_exponent: float | None = None
    reference_exponent: float | None = None
    failed_at: int | None = None  # the size that did not fit
    tile_grows: bool | None = None  # whether the largest on-chip tile grows with the swept size; None: not counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One requirement of the structure axis, what was found and what is allowed."""

    name: str
    ok: bool
    found: str
    allowed: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StructureGrade:
    verdict: AxisVerdict
    points: float
    out_of: float
    checks: tuple[Check, ...] = ()
    refusals: tuple[Check, ...] = ()  # rules broken openly; no file with one earns a point
    launches: int | None = None
    unique_bytes: int | None = None
    bytes_ratio: float | None = None  # unique bytes, times the least possible

    def failed(self, name: str) -> bool:
        return any(check.name == name and not check.ok for check in (*self.checks, *self.refusals))


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedGrade:
    verdict: AxisVerdict
    points: float
    out_of: float
    withheld: float = 0.0
    speedup: float | None = None  # over the naive baseline, at the headline size
    low: float | None = None
    high: float | None = None
    fraction: float | None = None
    noisy: bool = False


AxisGrade = NumericsGrade | MemoryGrade | StructureGrade | SpeedGrade


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What is wrong, in words, and what shows it. The label is empty when no known mistake explains the facts."""

    label: str = ""
    sentence: str = ""
    hint: str = ""
    step: str = ""  # of the recurrence, for a known mistake
    evidence: tuple[str, ...] = ()
    runner_up: str = ""  # the next best label, for staff
    notes: tuple[str, ...] = ()  # advice that changes no verdict, e.g. what a GPU would do


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    points: float
    out_of: float  # what this device can measure
    withheld: float  # what it cannot


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    assignment: str
    verdict: Verdict
    released_verdict: Verdict  # what `verdict` becomes when staff release a held grade; otherwise the same
    provisional: bool  # not measured on the device that the assignment asks for
    device_kind: str
    device_name: str
    numerics: NumericsGrade
    memory: MemoryGrade | None
    structure: StructureGrade
    speed: SpeedGrade | None
    score: Score
    diagnosis: Diagnosis
    failure: Failure | None = None  # the one that the headline error or limit is about

    @property
    def axes(self) -> Mapping[str, AxisGrade]:
        found: dict[str, AxisGrade | None] = {
            "numerics": self.numerics,
            "memory": self.memory,
            "structure": self.structure,
            "speed": self.speed,
        }
        return {name: axis for name, axis in found.items() if axis is not None}
