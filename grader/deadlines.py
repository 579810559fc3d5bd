"""When one student may hand in, and what being late costs: pure functions of the moment of a hand-in.

What the form refuses, what the page warns of and what the gradebook takes off all come from `Window.at`.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from datetime import datetime, timedelta

from grader.wording import count, points_text

DAY = timedelta(days=1)


class Phase(enum.StrEnum):
    BEFORE = "before"
    OPEN = "open"
    LATE = "late"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lateness:
    """How one moment lies to a window."""

    phase: Phase
    days_late: int = 0  # begun days after the deadline
    share: float = 1.0  # of the points that then count

    def counted(self, points: float) -> float:
        """What so many points count. Two decimals, as all points have."""
        return round(points * self.share, 2)

    def counted_text(self, points: float) -> str:
        """What so many points count, where being late takes some off ("56 after 20 % for 1 late day"); else empty."""
        if self.share == 1:
            return ""
        off = points_text(100 * (1 - self.share))
        return f"{points_text(self.counted(points))} after {off} % for {count(self.days_late, 'late day')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """When one student may hand in one assignment, and at what price after the deadline."""

    opens_at: datetime | None = None
    deadline: datetime | None = None
    extended: bool = False  # the deadline is this student's own
    late_days: int = 0  # so many days after the deadline it is still taken
    late_percent: float = 0.0  # taken off the points for each begun day

    @property
    def closes_at(self) -> datetime | None:
        """After this moment nothing is taken."""
        return self.deadline and self.deadline + self.late_days * DAY

    def at(self, moment: datetime) -> Lateness:
        """How `moment` lies to the window. The very moment of the deadline is in time."""
        if self.opens_at is not None and moment < self.opens_at:
            return Lateness(phase=Phase.BEFORE)
        if self.deadline is None or moment <= self.deadline:
            return Lateness(phase=Phase.OPEN)
        days = math.ceil((moment - self.deadline) / DAY)
        # what was taken once stays taken: a deadline moved since then changes what it counts, not whether
        share = max(0.0, 1.0 - days * self.late_percent / 100)
        return Lateness(phase=Phase.LATE if days <= self.late_days else Phase.CLOSED, days_late=days, share=share)

    def why_closed(self, now: datetime) -> str | None:
        """A sentence for the student, or None while hand-ins are taken."""
        phase = self.at(now).phase
        if phase is Phase.BEFORE:
            return f"This assignment opens on {self.opens_at:%d %B %Y at %H:%M} UTC."
        if phase is Phase.CLOSED:
            whose = "Your extended deadline" if self.extended else "The deadline"
            late = f", and {count(self.late_days, 'late day')} after it are over" if self.late_days else ""
            return f"{whose} was {self.deadline:%d %B %Y at %H:%M} UTC{late}. Ask your instructor for an extension."
        return None

    def late_note(self, moment: datetime) -> str:
        """What being late means for a hand-in at that moment; empty for one in time."""
        found = self.at(moment)
        if not found.days_late:
            return ""
        price = f"it counts {points_text(100 * found.share)} % of its points" if found.share < 1 else "at no cost"
        return f"{count(found.days_late, 'day')} late: {price}."

    def late_rule(self) -> str:
        """What the course allows after the deadline, for everybody; empty when it allows nothing."""
        if self.deadline is None or not self.late_days:
            return ""
        price = f"each begun day takes {self.late_percent:g} % off the points" if self.late_percent else "at no cost"
        return f"{count(self.late_days, 'late day')}: {price}."
