"""The report of a submission, made from its stored measurements whenever somebody reads it."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path

from flask import render_template
from markupsafe import Markup
from sqlalchemy import inspect

from grader import measurement
from grader.course import Catalog
from grader.errors import AssignmentError
from grader.figures import BarChart, Chart, HeatMap, LineChart, is_empty
from grader.judging import judge
from grader.measurement import Examination
from grader.models import Result, Submission
from grader.report import report
from grader.sections import Report
from grader.submissions import decided
from grader.web.charts import Gallery
from grader.web.shelf import Shelf
from grader.web.text import source_lines
from grader.wording import one_line

# a page is answered soon even when nobody has looked at this report before; whoever can wait, waits
PAGE_WAIT_S = 0.15
SCRIPT_WAIT_S = 3.0
DOWNLOAD_WAIT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownReport:
    """What the page shows below the headline; `report` is None while there is none to show."""

    report: Report | None = None
    notices: tuple[str, ...] = ()
    drawings: Mapping[Chart, Markup] = field(default_factory=dict)  # of its charts, those that are ready
    finished: bool = False  # every chart is


def report_of(
    row: Submission, catalog: Catalog, gallery: Gallery, *, for_staff: bool, wait_s: float = PAGE_WAIT_S
) -> ShownReport:
    """The report as this reader may see it.

    Args:
        row: with `result` and its texts loaded, as `submissions.find` gives it.
        wait_s: how long to wait for charts that were never drawn before.
    """
    result = row.result
    if result is None:
        return ShownReport()
    try:
        assignment = catalog.load(row.course_assignment.slug)
    except AssignmentError as exc:
        why = f": {one_line(str(exc), 400)}" if for_staff else "; your instructor can see why"
        return ShownReport(notices=(f"The assignment cannot be loaded just now, so its report cannot be shown{why}.",))
    examination = _examination(result.examination)
    grade = decided(judge(assignment, examination), result)
    found = report(assignment, examination, grade, for_staff=for_staff)
    charts = [
        block
        for section in found.sections
        for block in section.blocks
        if isinstance(block, LineChart | BarChart | HeatMap)
    ]
    drawings = gallery.drawn(charts, wait_s=wait_s)
    finished = all(chart in drawings or is_empty(chart) for chart in charts)
    return ShownReport(report=found, notices=_notices(result, found), drawings=drawings, finished=finished)


def report_html(
    row: Submission, catalog: Catalog, gallery: Gallery, shelf: Shelf, *, for_staff: bool, late: str = ""
) -> Markup:
    """The report as the page shows it. Made once of the same measurements, judged by the same edition.

    Args:
        row: with `result`, whose measurements are read only when they are needed: keep its session open.
        late: what its points count, where being late takes something off.
    """
    edition = _edition(row, catalog, for_staff)
    key = (edition, late) if edition else None
    kept = shelf.get(key) if key else None
    if kept is None:
        shown = report_of(row, catalog, gallery, for_staff=for_staff)
        kept = Markup(render_template("_report.html", submission=row, shown=shown, late=late))  # noqa: S704  by a template
        if shown.finished:
            shelf.put(key, kept)
    return kept


def source_html(source: str, shelf: Shelf) -> Markup:
    """The lines of a file, highlighted and numbered."""
    key = ("source", hashlib.sha256(source.encode("utf-8", "surrogatepass")).digest())
    kept = shelf.get(key)
    if kept is None:
        kept = Markup(render_template("_source.html", lines=source_lines(source)))  # noqa: S704  by a template
        shelf.put(key, kept)
    return kept


def _edition(row: Submission, catalog: Catalog, for_staff: bool) -> Hashable:
    """Everything that a report depends on; None while there is none."""
    assignment = catalog.find(row.course_assignment.slug)
    if row.result is None or assignment is None:
        return None
    # measurements are written together with these, never without
    columns = [column.key for column in inspect(Result).column_attrs if not column.deferred]
    return ("report", row.id, assignment.digest, for_staff, *(getattr(row.result, name) for name in columns))


@lru_cache(maxsize=32)
def _examination(text: str) -> Examination:
    """Reading one with error maps takes longer than everything else on its page, and people come back to it."""
    return measurement.loads(text)


def _notices(result: Result, found: Report) -> tuple[str, ...]:
    notices = []
    if (result.verdict, result.points) != (found.verdict, found.points):
        notices.append(
            f"The assignment was edited after this was judged. What counts is {result.points:g} points until an "
            f"instructor judges it again; below is how it reads by the present edition."
        )
    return tuple(notices)


@cache
def style_sheet() -> str:
    """The pages' own, for a file that carries it."""
    return (Path(__file__).parent / "static" / "tilegrade.css").read_text(encoding="utf-8")
