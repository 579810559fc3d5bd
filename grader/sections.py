"""What a report is made of: sections of sentences, tables, charts and texts. No HTML, no terminal codes.

Every `str` is printable as it is (`wording.plain`); what a student's file said stands in `Hostile`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from grader.figures import Chart
from grader.verdicts import AxisGrade, SpeedGrade
from grader.wording import Hostile, points_text

Cell = str | Hostile | tuple[str, ...]  # several: each on a line of its own where there is room


class Kind(enum.StrEnum):
    """What a column holds. Decides how it is shown everywhere; its name is only read."""

    WORDS = "words"
    LONG = "long"  # may be broken anywhere
    ASIDE = "aside"  # the handout says it too: left out where there is no room
    NUMBER = "number"  # set flush right
    PARTS = "parts"  # a few short ones
    LINE = "line"  # of the student's file; set flush right, and leads there
    VERDICT = "verdict"  # in the colour of the row's mark


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    kind: Kind = Kind.WORDS

    @property
    def flush_right(self) -> bool:
        return self.kind in (Kind.NUMBER, Kind.LINE)


def words(*names: str) -> tuple[Column, ...]:
    return tuple(Column(name) for name in names)


def numbers(*names: str) -> tuple[Column, ...]:
    return tuple(Column(name, Kind.NUMBER) for name in names)


LINE = Column("line", Kind.LINE)
VERDICT = Column("verdict", Kind.VERDICT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    marks: tuple[str, ...] = ()  # a verdict for each row, or empty

    @property
    def filled(self) -> tuple[int, ...]:
        """The columns that hold anything."""
        return tuple(i for i in range(len(self.columns)) if any(row[i] for row in self.rows))


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
    hint: str = ""  # what to look at, without giving the fix away
    step: str = ""  # of the recurrence, that a known mistake breaks
    explained: str = ""  # the heading of the handout that is about it
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
