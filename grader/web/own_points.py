"""One's own measurements that lie on the curves of `grader.score_path`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from grader import measurement
from grader.assignment import Assignment
from grader.course import Catalog
from grader.measurement import MemoryPoint
from grader.models import CourseAssignment, Result, Submission
from grader.score_path import Mode, Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnPoint:
    """What was measured of one of somebody's own hand-ins to an assignment about attention, at one T."""

    submission_id: int
    title: str  # of the assignment
    mode: Mode
    shape: Shape
    t: int
    size_bytes: int


def own_points(db: Session, catalog: Catalog, *, user_id: int, most: int) -> list[OwnPoint]:
    """The measurements that lie on the curves of `grader.score_path`, of the latest graded hand-ins. One statement."""
    known = {slug: catalog.find(slug) for slug in catalog.slugs()}
    about_attention = {slug: one for slug, one in known.items() if one and one.operation.startswith("attention.")}
    rows = db.execute(
        select(Submission.id, CourseAssignment.slug, Result.examination)
        .join(Submission.result)
        .join(Submission.course_assignment)
        .where(
            Submission.user_id == user_id,
            CourseAssignment.slug.in_(about_attention),
        )
        .order_by(Submission.submitted_at.desc(), Submission.id.desc())
        .limit(most)
    ).all()
    return [point for row in rows for point in _points(row.id, about_attention[row.slug], json.loads(row.examination))]


def _points(submission_id: int, assignment: Assignment, examination: dict[str, Any]) -> list[OwnPoint]:
    """Only what is needed is read: the error maps beside it are ten times as long."""

    def point(mode: Mode, axes: Mapping[str, int], dtype: str, t: int, size_bytes: int) -> OwnPoint:
        return OwnPoint(
            submission_id=submission_id,
            title=assignment.title,
            mode=mode,
            shape=Shape(batch=axes["batch"], heads=1, head_dim=axes["head_dim"], dtype=dtype),
            t=t,
            size_bytes=size_bytes,
        )

    found = []
    sweep, structure = assignment.memory, assignment.structure
    if sweep is not None:
        measured = measurement.from_json(tuple[MemoryPoint, ...], examination["memory"])
        found += [
            point(Mode.CAPACITY, sweep.axes_on(examination["device"]["kind"]), sweep.dtype, one.size, one.peak_bytes)
            for one in measured
            if one.failure is None and one.peak_bytes > 0
        ]
    audit = examination["audit"]
    if audit is not None:
        axes = audit["axes"]
        found.append(point(Mode.TRAFFIC, axes, structure.dtype, axes["keys"], audit["unique_bytes"]))
    return found
