"""Who stands where: each person's best hand-in counts, and results that noise cannot tell apart share a rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from grader.statistics import Interval, tied

# points have two decimals
_POINT = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One graded hand-in that may stand on the board."""

    who: str  # an opaque key of the person; names are looked up by whoever shows the board
    submission: int
    points: float
    submitted_at: datetime
    speedup: Interval | None = None  # over the naive baseline; None where speed was not measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    rank: int  # 1, 1, 3: those who share a rank use up the next ones
    shared: bool
    entry: Entry  # the best of this person


def rank(entries: Iterable[Entry]) -> tuple[Standing, ...]:
    """Order by points, then by speed-up; within one rank the earlier hand-in is listed first.

    Two entries share a rank when their points are equal and their speed-ups' intervals do not tell them apart. Each is
    compared with the first of the rank, not with its neighbour, so that a chain of near ties does not become one.
    """
    by_person: dict[str, list[Entry]] = defaultdict(list)
    for entry in entries:
        by_person[entry.who].append(entry)
    best = sorted((min(own, key=_order) for own in by_person.values()), key=_order)
    groups: list[list[Entry]] = []
    for entry in best:
        if groups and _same(groups[-1][0], entry):
            groups[-1].append(entry)
        else:
            groups.append([entry])
    found: list[Standing] = []
    for group in groups:
        place = len(found) + 1
        found += [
            Standing(rank=place, shared=len(group) > 1, entry=entry)
            for entry in sorted(group, key=lambda one: (one.submitted_at, one.submission))
        ]
    return tuple(found)


def best(entries: Iterable[Entry]) -> Entry | None:
    """The one of a person's hand-ins that counts; None of none."""
    return min(entries, key=_order, default=None)


def _order(entry: Entry) -> tuple[float, float, datetime, int]:
    """Best first: points, speed-up, then who came first."""
    speedup = entry.speedup.value if entry.speedup is not None else 0.0
    return (-round(entry.points, 2), -speedup, entry.submitted_at, entry.submission)


def _same(a: Entry, b: Entry) -> bool:
    if abs(a.points - b.points) >= _POINT:
        return False
    if a.speedup is None or b.speedup is None:
        return a.speedup is None and b.speedup is None
    return tied(a.speedup, b.speedup)
