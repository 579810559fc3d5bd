"""Grades that measuring again took away count again; what staff decided not to count has a verdict of its own

Revision: 0007, after 0006. Written 2026-11-30.
"""

from __future__ import annotations

from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

# a stored grade is JSON without blanks, and its verdict comes before everything that a file could have written
_IN_GRADE = 'UPDATE result SET grade = replace(grade, \'"verdict":"{}","rel\', \'"verdict":"{}","rel\') '


def upgrade() -> None:
    op.execute(
        "UPDATE submission SET state = 'done' WHERE state IN ('faulted', 'cancelled') "
        "AND id IN (SELECT submission_id FROM result)"
    )
    op.execute(_IN_GRADE.format("refused", "not_counted") + "WHERE confirmed AND verdict = 'refused'")
    op.execute("UPDATE result SET verdict = 'not_counted' WHERE confirmed AND verdict = 'refused'")


def downgrade() -> None:
    op.execute(_IN_GRADE.format("not_counted", "refused") + "WHERE verdict = 'not_counted'")
    op.execute("UPDATE result SET verdict = 'refused' WHERE verdict = 'not_counted'")
