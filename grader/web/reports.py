"""The report of a submission, made from its stored measurements whenever somebody reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path

from markupsafe import Markup

from grader import measurement
from grader.course import Catalog
from grader.errors import AssignmentError
from grader.figures import BarChart, Chart, HeatMap, LineChart
from grader.judging import judge
from grader.measurement import Examination
from grader.models import Result, State, Submission
from grader.report import report
from grader.sections import Report
from grader.submissions import decided
from grader.web.charts import Gallery
from grader.wording import one_line

# a page is answered soon even when nobody has looked at this report before; whoever can wait, waits
PAGE_WAIT_S = 0.15
SCRIPT_WAIT_S = 3.0
DOWNLOAD_WAIT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What the page shows below the headline; `report` is None while there is none to show."""

    report: Report | None = None
    notices: tuple[str, ...] = ()
    drawings: Mapping[Chart, Markup] = field(default_factory=dict)  # of its charts, those that are ready


def report_of(
    row: Submission, catalog: Catalog, gallery: Gallery, *, for_staff: bool, wait_s: float = PAGE_WAIT_S
) -> Shown:
    """The report as this reader may see it.

    Args:
        row: with `result` and its texts loaded, as `submissions.find` gives it.
        wait_s: how long to wait for charts that were never drawn before.
    """
    result = row.result
    if row.state is not State.DONE or result is None:
        return Shown()
    try:
        assignment = catalog.load(row.course_assignment.slug)
    except AssignmentError as exc:
        why = f": {one_line(str(exc), 400)}" if for_staff else "; your instructor can see why"
        return Shown(notices=(f"The assignment cannot be loaded just now, so its report cannot be shown{why}.",))
    examination = _examination(result.examination)
    grade = decided(judge(assignment, examination), result)
    found = report(assignment, examination, grade, for_staff=for_staff)
    charts = [
        block
        for section in found.sections
        for block in section.blocks
        if isinstance(block, LineChart | BarChart | HeatMap)
    ]
    return Shown(report=found, notices=_notices(result, found), drawings=gallery.drawn(charts, wait_s=wait_s))


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
