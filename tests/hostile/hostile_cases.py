"""The table of hostile files, the source of each, and what is wrong with the answer that one got."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from grader.assignment import Assignment, load_assignment
from grader.measurement import Examination, ProbeFailed

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SLUG = "flash-attention-forward"
BASE = HERE.parent / "corpus" / SLUG / "ok-raw-strides.py"
HOLDS = ("contained", "wrong", "refused", "limit", "held", "no-faster", "error")
EARNS = ("nothing", "as-honest")


@dataclass(frozen=True, kw_only=True)
class Hostile:
    """One hand-in that tries something, and what must come of it.

    `holds` says it in one word and `by` in one sentence: the mechanism. The other keys are that mechanism's traces,
    each of which must be there.
    """

    name: str
    tries: str  # the exploit or the kind of program, as the lists of such things call it
    holds: str
    by: str
    earns: str = "nothing"  # at most: nothing, or what the honest file that it is built on gets
    verdicts: tuple[str, ...]
    file: str = ""  # below tests/; the default is files/<name>.py here, behind the honest file it is built on
    behind: str = f"corpus/{SLUG}/{BASE.name}"  # that one, below tests/
    whole: bool = False  # the file stands alone
    evidence: tuple[str, ...] = ()  # kinds of evidence: one of these at least, and no other
    failure: str = ""  # kind of failure of the file or of a probe
    faults: tuple[str, ...] = ()  # "probe: fault"
    checks: tuple[str, ...] = ()  # failed checks of the structure axis, refusals too
    shows: tuple[str, ...] = ()  # in what it printed or raised
    compiles: bool = False  # together with the compile report
    call_s: float | None = None  # a shorter limit for one call
    probes: tuple[str, ...] = ()  # these alone, for a file that takes long
    on_gpu: dict[str, Any] = field(default_factory=dict)  # keys that differ there
    memory: bool = False  # what it tries is about memory on a GPU, whose verdict is the trace
    gpu_only: bool = False  # nothing to see elsewhere; all keys are of a GPU

    def on(self, device: str) -> Hostile:
        """The case as it stands on "cpu" or "cuda"."""
        return dataclasses.replace(self, **_tuples(self.on_gpu)) if device == "cuda" else self

    def source(self) -> bytes:
        """The hand-in."""
        path = HERE.parent / self.file if self.file else HERE / "files" / f"{self.name}.py"
        text = path.read_text()
        return (text if self.whole or self.file else f"{(HERE.parent / self.behind).read_text()}\n\n{text}").encode()


def hostile() -> list[Hostile]:
    """Every file of the table."""
    return [Hostile(name=name, **_tuples(row)) for name, row in _table()["files"].items()]


def in_interpreter() -> list[Hostile]:
    """Those that are graded without a GPU."""
    return [case for case in hostile() if not case.gpu_only]


def programs() -> dict[str, dict[str, Any]]:
    """Programs of the table, which tests/sandbox runs: things done to a host rather than to a grade."""
    found: dict[str, dict[str, Any]] = _table()["programs"]
    return found


@cache
def assignment_named(slug: str) -> Assignment:
    """Read once: a long run is by one edition."""
    return load_assignment(ROOT / "assignments" / slug)


def assignment_for(case: Hostile) -> Assignment:
    """The assignment that the case is handed in to, with its limits."""
    found = assignment_named(SLUG)
    if case.probes:
        found = dataclasses.replace(found, cases=tuple(found.case(name) for name in case.probes))
    if case.call_s is not None:
        found = dataclasses.replace(found, limits=dataclasses.replace(found.limits, call_s=case.call_s))
    return found


def undeserved(case: Hostile, grade: dict[str, Any], honest_points: float, slack: float = 0.0) -> float:
    """Points beyond those that an honest file with the same outputs gets. What is held is published by nobody yet."""
    if grade["verdict"] == "held" and case.earns == "nothing":
        # a person who released it must not give points away either
        return max(0.0, grade["score"]["points"])
    allowed = honest_points + slack if case.earns == "as-honest" else 0.0
    return round(max(0.0, grade["score"]["points"] - allowed), 2)


def complaints(
    case: Hostile, examination: Examination, grade: dict[str, Any], probes: Sequence[str] | None = None
) -> list[str]:
    """What is not as the table says; nothing when all is. Faults are looked for in `probes` alone where few ran."""
    found = []
    if grade["verdict"] not in case.verdicts:
        found.append(f"verdict {grade['verdict']}, not {' or '.join(case.verdicts)}")
    kinds = {one.kind for one in examination.evidence}
    if kinds - set(case.evidence) or (case.evidence and not kinds):
        found.append(f"evidence {sorted(kinds)}, not {sorted(case.evidence)}")
    failures = failures_of(examination)
    if case.failure and case.failure not in failures:
        found.append(f"failures {sorted(failures)}, without {case.failure}")
    faults = {f"{probe['name']}: {fault}" for probe in grade["probes"] for fault in probe.get("faults", ())}
    asked = [one for one in case.faults if probes is None or one.partition(":")[0] in probes]
    found += [f"no fault {one!r} among {sorted(faults)}" for one in asked if one not in faults]
    failed = set(grade["axes"]["structure"].get("failed", ()))
    found += [f"no failed check {one!r} among {sorted(failed)}" for one in case.checks if one not in failed]
    text = said(examination)
    found += [f"nowhere {one!r}" for one in case.shows if one not in text]
    found += [f"it got through: {line}" for line in text.splitlines() if line.startswith("BAD")]
    if "PLANTED_SECRET" in text:
        found.append("it saw a secret")
    return found


def failures_of(examination: Examination) -> set[str]:
    """Kinds of failure of the file and of its probes."""
    failures = [run.failure for run in examination.probes if isinstance(run, ProbeFailed)]
    return {one.kind.value for one in (*failures, examination.load_failure, examination.audit_failure) if one}


def said(examination: Examination) -> str:
    """What the file printed, raised, and had the compiler print."""
    failures = [run.failure for run in examination.probes if isinstance(run, ProbeFailed)]
    messages = [one.message for one in (*failures, examination.load_failure, examination.audit_failure) if one]
    return "\n".join([examination.stdout, examination.stderr, *messages])


def _table() -> dict[str, Any]:
    return tomllib.loads((HERE / "cases.toml").read_text())


def _tuples(row: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
