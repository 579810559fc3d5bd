"""Sections of RESULTS.md that a script writes anew, between two marks."""

from __future__ import annotations

from pathlib import Path

RESULTS = Path(__file__).with_name("RESULTS.md")


def write(script: str, title: str, text: str) -> None:
    """Put what `benchmarks/<script>.py` found in place of what it found the last time, or at the end."""
    begin, end = f"<!-- {script}: begin -->", f"<!-- {script}: end -->"
    before = RESULTS.read_text() if RESULTS.exists() else "# Results\n"
    section = f"{begin}\n## {title}\n\n`python benchmarks/{script}.py`: {text}\n{end}\n"
    if begin in before:
        head, _, rest = before.partition(begin)
        after = head + section + rest.partition(end)[2].lstrip("\n")
    else:
        after = before.rstrip("\n") + "\n\n" + section
    RESULTS.write_text(after)
