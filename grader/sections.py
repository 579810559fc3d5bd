"""What a report is made of: sections of sentences, tables, charts and texts. No HTML, no terminal codes.

Every `str` is printable as it is (`wording.plain`); what a student's file said stands in `Hostile`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grader.figures import Chart
from grader.verdicts import AxisGrade, SpeedGrade
from grader.wording import Hostile, points_text

Cell = str | Hostile


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    numeric: tuple[int, ...] = ()  # columns that are set flush right
    marks: tuple[str, ...] = ()  # a verdict for each row, or empty


@dataclass(frozen=True, slots=True, kw_only=True)
class TextBlock:
    """What a file said, shown as it is in a fixed-width font."""

    title: str
    text: Hostile
    line: int | None = None  # of the student's file, that it is about


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What a reader may type into a shell."""

    title: str
    text: str


Block = Table | Chart | TextBlock | Command


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    key: str
    title: str
    sentences: tuple[str, ...] = ()
    blocks: tuple[Block, ...] = ()
    verdict: str = ""  # of an axis, and so the next three
    points: str = ""  # "40 of 40"
    measured: str = ""  # in a few words
    asked: str = ""  # that it is held against
    unearned: str = ""  # why nothing is earned by what was measured, as a sentence
    staff: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    assignment: str
    title: str
    verdict: str
    provisional: bool
    headline: str
    remarks: tuple[str, ...]  # what a reader must know about the points
    points: float
    out_of: float
    withheld: float
    fault: str
    sections: tuple[Section, ...]

    def section(self, key: str) -> Section | None:
        return next((section for section in self.sections if section.key == key), None)


def axis_section(
    key: str,
    title: str,
    axis: AxisGrade,
    sentences: Sequence[str],
    blocks: Sequence[Block],
    *,
    measured: str = "",
    asked: str = "",
) -> Section:
    """The section of one axis, with its verdict and points."""
    withheld = axis.withheld if isinstance(axis, SpeedGrade) else 0.0
    points = (
        f"{points_text(withheld)} withheld" if withheld else f"{points_text(axis.points)} of {points_text(axis.out_of)}"
    )
    return Section(
        key=key,
        title=title,
        verdict=axis.verdict.value,
        points=points,
        measured=measured,
        asked=asked,
        sentences=tuple(sentences),
        blocks=tuple(blocks),
    )
