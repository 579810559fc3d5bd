"""Grade the whole corpus and print how the answers compare with what is written beside it.

`python benchmarks/corpus.py [--write]`: a line a file, then the confusion table of fault names; `--write` puts it into
RESULTS.md. Exits 1 when a verdict is not one of the accepted ones, a right file loses a point or gets a fault's
name, or fewer than 95 % of the planted faults get their name.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
import tomllib
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import sections  # noqa: E402

from grader.assignment import Limits, load_assignment  # noqa: E402  the folder is put on the path above
from grader.judging import grade_json, judge  # noqa: E402
from workers.devices.cpu import interpreter_pool  # noqa: E402
from workers.examination import examine, installed_versions  # noqa: E402

CORPUS = ROOT / "tests" / "corpus"
NAMED_AT_LEAST = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    name: str
    want: dict[str, Any]
    verdict: str
    fault: str
    lost: bool  # a right file lost a point
    seconds: float

    @property
    def is_hostile(self) -> bool:
        return self.name.startswith("hostile/")

    @property
    def accepted(self) -> bool:
        words = {self.want["verdict"], *self.want.get("accept", ())}
        if self.is_hostile:
            return self.verdict != "full" or "full" in words
        if self.want["verdict"] == "wrong" and self.want["numerics"] == "pass":
            words.add("partial")
        return self.verdict in words

    @property
    def planted(self) -> str:
        """The fault that this device can see; files whose fault shows on a GPU alone count as right ones here."""
        return "" if self.want["verdict"] == "full" else self.want["fault"]


def main() -> int:
    """Grade, print, judge the judge. Returns the exit status."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--write", action="store_true")
    write = arguments.parse_args().write
    expected = tomllib.loads((CORPUS / "expected.toml").read_text())
    rows = []
    with interpreter_pool(Limits(), size=2) as sandboxes:
        for name, want in sorted(expected.items()):
            rows.append(_grade(name, want, sandboxes))
            row = rows[-1]
            mark = "ok" if row.accepted and (row.is_hostile or row.fault == row.planted) else "NO"
            print(f"{mark} {name:58} {row.verdict:8} {row.fault or '-':28} {row.seconds:5.1f} s", flush=True)
    text = _table(rows)
    print(text)
    if write:
        sections.write("corpus", "Answers to the corpus", text)
    plain = [row for row in rows if not row.is_hostile]
    named = [row for row in plain if row.planted]
    share = sum(row.fault == row.planted for row in named) / len(named)
    harmed = [row.name for row in plain if not row.planted and (row.fault or row.lost)]
    return int(not all(row.accepted for row in rows) or bool(harmed) or share < NAMED_AT_LEAST)


def _grade(name: str, want: dict[str, Any], sandboxes: Any) -> Row:
    assignment = load_assignment(ROOT / "assignments" / want["assignment"])
    started = time.monotonic()
    grade = grade_json(judge(assignment, examine(assignment, (CORPUS / name).read_bytes(), sandboxes=sandboxes)))
    score = grade["score"]
    return Row(
        name=name,
        want=want,
        verdict=grade["verdict"],
        fault=grade["fault"] or "",
        lost=want["verdict"] == "full" and score["points"] < score["out_of"],
        seconds=time.monotonic() - started,
    )


def _table(rows: list[Row]) -> str:
    """The confusion table of fault names in Markdown: planted against named, and hostile files by verdict."""
    plain = [row for row in rows if not row.is_hostile]
    pairs = Counter((row.planted or "(none)", row.fault or "(none)") for row in plain)
    versions = installed_versions()
    right = sum(row.fault == row.planted for row in plain if row.planted)
    planted = sum(bool(row.planted) for row in plain)
    lines = [
        f"{datetime.now(UTC):%Y-%m-%d}, {platform.machine()}, {os.cpu_count()} cores, Python {versions['python']}, "
        f"torch {versions['torch']}, triton {versions['triton']}, Triton interpreter.",
        "",
        f"Verdicts as accepted: {sum(row.accepted for row in rows)} of {len(rows)}. "
        f"Planted faults named: {right} of {planted}. "
        f"Right files that lost a point or got a fault's name: "
        f"{sum(1 for row in plain if not row.planted and (row.fault or row.lost))} "
        f"of {sum(not row.planted for row in plain)}.",
        "",
        "| planted | named | files |",
        "|---|---|---|",
    ]
    lines += [f"| {want} | {got} | {n} |" for (want, got), n in sorted(pairs.items())]
    hostile = Counter(row.verdict for row in rows if row.is_hostile)
    said = ", ".join(f"{verdict} {n}" for verdict, n in sorted(hostile.items()))
    full = ", ".join(row.name.removeprefix("hostile/") for row in rows if row.is_hostile and row.verdict == "full")
    lines += ["", f"Hostile files: {said}. Full marks, where right answers are what they give: {full or 'none'}."]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
