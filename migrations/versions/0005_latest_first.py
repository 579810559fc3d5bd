"""Lists of thousands: the latest first, and which GPUs a board may be of

Revision: 0005, after 0004. Written 2026-11-30.
"""

from __future__ import annotations

from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("ix_submission_submitted_at_id", "submission", ["submitted_at", "id"])
    op.create_index("ix_result_gpu", "result", ["gpu"])


def downgrade() -> None:
    op.drop_index("ix_result_gpu", "result")
    op.drop_index("ix_submission_submitted_at_id", "submission")
