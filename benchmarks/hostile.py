"""Does the grader hold? `python benchmarks/hostile.py [--write]`.

Grades the files of tests/hostile/cases.toml: none may earn a point too much, and each must be stopped by the mechanism
that its entry names. Counts what all of these runs left on the host. Grades an honest file while a hostile one runs
beside it. Last, grades every correct file of the corpus again and again: none may be held or refused. `--write` puts
the tables into RESULTS.md, with what a GPU said where results/hostile-h200.json has it. Exits 1 when one is not so.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import platform
import sys
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "hostile")]
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hostile_cases  # noqa: E402  the folders are put on the path above
import sections  # noqa: E402
from hostile_cases import BASE, Hostile  # noqa: E402

from grader.assignment import Limits  # noqa: E402
from grader.judging import grade_json, judge  # noqa: E402
from workers import cgroups  # noqa: E402
from workers.devices.cpu import interpreter_pool  # noqa: E402
from workers.examination import examine, installed_versions  # noqa: E402
from workers.isolation import FIRST_SLOT_UID, SLOTS  # noqa: E402
from workers.sandbox import SandboxPool  # noqa: E402

CORPUS = ROOT / "tests" / "corpus"
ON_GPU = ROOT / "benchmarks" / "results" / "hostile-h200.json"
# what a neighbour would notice first
NEIGHBOURS = ("corpus-fork-bomb", "corpus-fill-disk", "outlives_its_timeout", "corpus-daemon", "poisoned_reference")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What one hostile file got."""

    case: Hostile
    verdict: str
    points: float
    undeserved: float
    complaints: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """What of sandboxes is there on this host, as far as this process may have made it."""

    processes: frozenset[str]
    mounts: frozenset[str]
    cgroups: frozenset[str]
    files: frozenset[str]  # of the users that candidates run as
    descriptors: int
    threads: int

    def more_than(self, before: Left) -> dict[str, int]:
        """How much more of each there is."""
        return {
            "processes": len(self.processes - before.processes),
            "mounts": len(self.mounts - before.mounts),
            "cgroup folders": len(self.cgroups - before.cgroups),
            "files": len(self.files - before.files),
            "descriptors": max(0, self.descriptors - before.descriptors),
            "threads": max(0, self.threads - before.threads),
        }


@dataclass(slots=True)
class Found:
    """All that one run of this program found."""

    honest: dict[str, Counter[str]] = field(default_factory=dict)  # by file: verdicts
    rows: list[Row] = field(default_factory=list)
    n_hostile: int = 0
    left: dict[str, int] = field(default_factory=dict)
    neighbours: dict[str, tuple[str, float]] = field(default_factory=dict)  # by hostile file: the honest one's

    @property
    def bad(self) -> list[str]:
        """What is not as it must be."""
        said = [f"{name}: {dict(counts)}" for name, counts in self.honest.items() if set(counts) != {"full"}]
        said += [f"{row.case.name}: {row.undeserved} points too many" for row in self.rows if row.undeserved]
        said += [f"{row.case.name}: {one}" for row in self.rows for one in row.complaints]
        said += [f"{n} {what} left behind" for what, n in self.left.items() if n]
        return said + [
            f"beside {name} an honest file got {verdict}, {points}"
            for name, (verdict, points) in self.neighbours.items()
            if verdict != "full"
        ]


def main() -> int:
    """Run all of it, print the tables. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--honest", type=int, default=20, help="runs of each correct file")
    parser.add_argument("--hostile", type=int, default=200, help="runs of hostile files, one after another")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    found = run(n_honest=arguments.honest, n_hostile=arguments.hostile, say=lambda line: print(line, flush=True))
    text = table(found)
    print(text)
    if arguments.write:
        sections.write("hostile", "Hostile files", text)
    for line in found.bad:
        print("NOT SO:", line)
    return int(bool(found.bad))


def run(
    *, n_honest: int, n_hostile: int, neighbours: Sequence[str] = NEIGHBOURS, say: Any = lambda _line: None
) -> Found:
    """Grade, count, compare. Sandboxes are made here and closed before anything is counted."""
    found = Found()
    with interpreter_pool(Limits(), size=1) as pool:
        points = _grade(BASE.read_bytes(), hostile_cases.SLUG, pool)[1]["score"]["points"]
    before = left()
    with interpreter_pool(Limits(), size=2) as pool:
        for case in itertools.islice(itertools.cycle(hostile_cases.in_interpreter()), n_hostile):
            row = hostile_row(case, pool, points)
            found.n_hostile += 1
            if found.n_hostile <= len(hostile_cases.in_interpreter()) or row.complaints or row.undeserved:
                found.rows.append(row)
            say(
                f"{found.n_hostile:4} {case.name:28} {row.verdict:8} {row.points:5} {row.undeserved:5} {row.complaints}"
            )
    found.left = left().more_than(before)
    say(f"left behind: {found.left}")
    with interpreter_pool(Limits(), size=4) as pool:
        for name in neighbours:
            found.neighbours[name] = beside(name, pool)
            say(f"beside {name}: {found.neighbours[name]}")
    with interpreter_pool(Limits(), size=2) as pool:
        for name, slug in honest_files():
            verdicts = found.honest.setdefault(name, Counter())
            for _ in range(n_honest):
                verdicts[_grade((CORPUS / name).read_bytes(), slug, pool)[1]["verdict"]] += 1
            say(f"{name}: {dict(verdicts)}")
    return found


def honest_files() -> Iterator[tuple[str, str]]:
    """Name and assignment of every correct file of the corpus."""
    expected = tomllib.loads((CORPUS / "expected.toml").read_text())
    for name, want in sorted(expected.items()):
        if "/ok-" in name:
            yield name, want["assignment"]


def hostile_row(case: Hostile, pool: SandboxPool, honest_points: float) -> Row:
    """Grade one hostile file and hold it to its entry."""
    assignment = hostile_cases.assignment_for(case)
    examination = examine(assignment, case.source(), sandboxes=pool)
    grade = grade_json(judge(assignment, examination))
    return Row(
        case=case,
        verdict=grade["verdict"],
        points=grade["score"]["points"],
        undeserved=hostile_cases.undeserved(case, grade, honest_points),
        complaints=tuple(hostile_cases.complaints(case, examination, grade)),
    )


def beside(name: str, pool: SandboxPool) -> tuple[str, float]:
    """Verdict and points of an honest file that is graded while the named hostile one runs again and again."""
    case = next(one for one in hostile_cases.hostile() if one.name == name)
    over = threading.Event()

    def attack() -> None:
        while not over.is_set():
            examine(hostile_cases.assignment_for(case), case.source(), sandboxes=pool)

    attacker = threading.Thread(target=attack)
    attacker.start()
    try:
        time.sleep(1.0)
        grade = _grade(BASE.read_bytes(), hostile_cases.SLUG, pool)[1]
    finally:
        over.set()
        attacker.join()
    return grade["verdict"], grade["score"]["points"]


def left() -> Left:
    """Count what there is now."""
    gc.collect()
    ours = f"-{os.getpid()}-"
    where = cgroups.own_hierarchies()
    roots = {*where.v1.values(), *([where.v2] if where.v2 else [])}
    return Left(
        processes=frozenset(path.parent.name for path in Path("/proc").glob("[0-9]*/cgroup") if ours in _text(path)),
        mounts=frozenset(Path("/proc/self/mountinfo").read_text().splitlines()),
        cgroups=frozenset(str(path) for root in roots for path in root.glob(f"tilegrade-*{ours}*")),
        files=frozenset(_files_of_candidates(("/tmp", "/var/tmp", "/dev/shm", "/run"))),
        descriptors=len(list(Path("/proc/self/fd").iterdir())),
        threads=threading.active_count(),
    )


def table(found: Found) -> str:
    """The findings in Markdown."""
    versions = installed_versions()
    on_gpu = {row["name"]: row for row in json.loads(ON_GPU.read_text())["exploits"]} if ON_GPU.exists() else {}
    n_honest = sum(sum(counts.values()) for counts in found.honest.values())
    full = sum(counts["full"] for counts in found.honest.values())
    held = sum(counts["held"] + counts["refused"] for counts in found.honest.values())
    lines = [
        f"{datetime.now(UTC):%Y-%m-%d}, {platform.machine()}, {os.cpu_count()} cores, Python {versions['python']}, "
        f"torch {versions['torch']}, triton {versions['triton']}, Triton interpreter.",
        "",
        f"Correct files: {len(found.honest)}, {n_honest} gradings, {full} with full marks, {held} held or refused.",
        f"Hostile files: {len({row.case.name for row in found.rows})}, {found.n_hostile} gradings, undeserved points "
        f"in all: {sum(row.undeserved for row in found.rows):g}; not stopped as written: "
        f"{sum(bool(row.complaints) for row in found.rows)}.",
        "Left behind by these: " + ", ".join(f"{what} {n}" for what, n in found.left.items()) + ".",
        "An honest file graded beside a hostile one: "
        + ", ".join(f"{name} {verdict} {points:g}" for name, (verdict, points) in found.neighbours.items())
        + ".",
        "",
        *(f"Not as written, {row.case.name}: {'; '.join(row.complaints)}.\n" for row in found.rows if row.complaints),
        "“Points” are those of the measured grade; of a held one nothing counts until a person has decided. Where an "
        "attack changes no output, an honest file would get as many.",
        "",
        "`python benchmarks/gpu.py --only exploits` runs the same files on a GPU"
        + ("." if on_gpu else ": not done yet."),
        "",
        f"| file | what it tries | outcome | points | undeserved | {'on the GPU | ' if on_gpu else ''}what stops it |",
        "|---|---|---|---|---|---|" + ("---|" if on_gpu else ""),
    ]
    seen: set[str] = set()
    for row in found.rows:
        if row.case.name in seen:
            continue
        seen.add(row.case.name)
        lines.append(
            f"| {row.case.name} | {row.case.tries} | {row.verdict} | {row.points:g} | {row.undeserved:g} | "
            f"{_gpu_cell(on_gpu.get(row.case.name)) + ' | ' if on_gpu else ''}{row.case.by} |"
        )
    lines += [
        f"| {case.name} | {case.tries} | for a GPU alone | | | "
        f"{_gpu_cell(on_gpu.get(case.name)) + ' | ' if on_gpu else ''}{case.by} |"
        for case in hostile_cases.hostile()
        if case.gpu_only
    ]
    lines += ["", "Programs in the candidate's place (`tests/sandbox/test_hostile_programs.py` runs each):", ""]
    lines += ["| program | what it tries | how it ends | what stops it |", "|---|---|---|---|"]
    lines += [
        f"| {name} | {row['tries']} | {row['ends']} | {row['by']} |" for name, row in hostile_cases.programs().items()
    ]
    return "\n".join(lines)


def _gpu_cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "not run"
    speed = f", {row['speedup']:.1f}x naive" if row["speedup"] else ""
    return f"{row['verdict']}, {row['points']:g} points{speed}, undeserved {row['undeserved']:g}"


def _grade(source: bytes, slug: str, pool: SandboxPool) -> tuple[Any, dict[str, Any]]:
    assignment = hostile_cases.assignment_named(slug)
    examination = examine(assignment, source, sandboxes=pool)
    return examination, grade_json(judge(assignment, examination))


def _files_of_candidates(folders: Iterable[str]) -> Iterator[str]:
    users = range(FIRST_SLOT_UID, FIRST_SLOT_UID + SLOTS)
    for folder in folders:
        for path, names, files in os.walk(folder):
            for name in (*names, *files):
                whole = os.path.join(path, name)  # noqa: PTH118  a file may go away between two looks at it
                if os.path.lexists(whole) and os.lstat(whole).st_uid in users:
                    yield whole


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


if __name__ == "__main__":
    sys.exit(main())
