"""Two handed-in files line by line, for a table with both numberings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from diff_match_patch import diff_match_patch
from markupsafe import Markup

from grader.web.text import readable, source_lines

CONTEXT = 3  # unchanged lines shown around a change
MOST_LINES = 4000  # shown; two files of the largest size that share nothing would make a page of 20 MB
# two hostile files can keep any exact algorithm busy for minutes; after this the rest is shown as replaced
TIMEOUT_S = 0.5

Kind = Literal["same", "old", "new", "gap"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One row of the table. A gap stands for `n_left_out` unchanged lines."""

    kind: Kind
    old: int | None = None  # line number from 1
    new: int | None = None
    html: Markup | None = None
    n_left_out: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    lines: tuple[Line, ...]
    n_old: int  # lines that only the old file has
    n_new: int
    cut: bool  # the table would have been longer than MOST_LINES

    @property
    def equal(self) -> bool:
        return not (self.n_old or self.n_new)


def compare(old: str, new: str) -> Comparison:
    """Lines of two files, the changed ones with some around them. Safe for whatever the files hold."""
    shown_old, shown_new = source_lines(old), source_lines(new)
    rows: list[Line] = []
    i = j = 0  # lines of old and new that are behind us
    for kind, n in _runs(readable(old), readable(new)):
        for _ in range(n):
            if kind == "old":
                rows.append(Line(kind="old", old=i + 1, html=shown_old[i]))
            else:
                at_old = i + 1 if kind == "same" else None
                rows.append(Line(kind=kind, old=at_old, new=j + 1, html=shown_new[j]))
            i += kind != "new"
            j += kind != "old"
    folded = _folded(rows)
    return Comparison(
        lines=tuple(folded[:MOST_LINES]),
        n_old=sum(row.kind == "old" for row in rows),
        n_new=sum(row.kind == "new" for row in rows),
        cut=len(folded) > MOST_LINES,
    )


def _runs(old: str, new: str) -> list[tuple[Literal["same", "old", "new"], int]]:
    """Lines in runs that are in both, in the old or in the new file alone."""
    tool = diff_match_patch()
    tool.Diff_Timeout = TIMEOUT_S
    # every different line becomes one character, and the characters are compared; the last line has no end of its own
    old_as_text, new_as_text, _ = tool.diff_linesToChars(_ended(old), _ended(new))
    kinds: dict[int, Literal["same", "old", "new"]] = {0: "same", -1: "old", 1: "new"}
    return [(kinds[kind], len(run)) for kind, run in tool.diff_main(old_as_text, new_as_text, False)]


def _ended(text: str) -> str:
    return text if text.endswith("\n") or not text else text + "\n"


def _folded(rows: list[Line]) -> list[Line]:
    """Long runs of unchanged lines become one gap each."""
    near = [False] * len(rows)
    for at, row in enumerate(rows):
        if row.kind != "same":
            for neighbour in range(max(0, at - CONTEXT), min(len(rows), at + CONTEXT + 1)):
                near[neighbour] = True
    # between two shown ones a gap would take as much room as the one line
    for at in range(1, len(rows) - 1):
        near[at] = near[at] or (near[at - 1] and near[at + 1])
    found: list[Line] = []
    left_out = 0
    for at, row in enumerate(rows):
        if not near[at]:
            left_out += 1
            continue
        if left_out:
            found.append(Line(kind="gap", n_left_out=left_out))
        left_out = 0
        found.append(row)
    return [*found, Line(kind="gap", n_left_out=left_out)] if left_out else found
