"""The report of a submission, made from its stored measurements whenever somebody reads it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import lru_cache

from grader import measurement
from grader.course import Catalog
from grader.errors import AssignmentError
from grader.judging import judge
from grader.measurement import Examination
from grader.models import Result, State, Submission
from grader.report import Report, report
from grader.wording import one_line


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What the page shows below the headline; `report` is None while there is none to show."""

    report: Report | None = None
    notices: tuple[str, ...] = ()


def report_of(row: Submission, catalog: Catalog, *, for_staff: bool) -> Shown:
    """The report as this reader may see it.

    Args:
        row: with `result` and its texts loaded, as `submissions.find` gives it.
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
    grade = judge(assignment, examination)
    if result.released:
        grade = dataclasses.replace(grade, verdict=grade.released_verdict)
    found = report(assignment, examination, grade, for_staff=for_staff)
    return Shown(report=found, notices=_notices(result, found))


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
