"""Ranking a board without reading files, and without columns that nobody read

Revision: 0006, after 0005. Written 2026-11-30.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("submission") as batch:
        batch.drop_column("stage")  # `stages` says more
        batch.drop_column("fraction")
    with op.batch_alter_table("board_entry") as batch:
        batch.drop_column("withheld")
        batch.drop_column("hand_ins")
    op.drop_index("ix_result_gpu", "result")
    op.create_index("ix_result_gpu_submission_id", "result", ["gpu", "submission_id"])
    op.create_index("ix_submission_ranking", "submission", ["course_assignment_id", "user_id", "submitted_at", "id"])
    op.create_index(
        "ix_result_ranking",
        "result",
        ["submission_id", "verdict", "points", "speedup", "speedup_low", "speedup_high", "limit_share", "gpu"],
    )


def downgrade() -> None:
    op.drop_index("ix_result_ranking", "result")
    op.drop_index("ix_submission_ranking", "submission")
    op.drop_index("ix_result_gpu_submission_id", "result")
    op.create_index("ix_result_gpu", "result", ["gpu"])
    with op.batch_alter_table("board_entry") as batch:
        batch.add_column(sa.Column("hand_ins", sa.Integer(), nullable=False, server_default="1"))
        batch.add_column(sa.Column("withheld", sa.Double(), nullable=False, server_default="0"))
    with op.batch_alter_table("submission") as batch:
        batch.add_column(sa.Column("fraction", sa.Double(), nullable=True))
        batch.add_column(sa.Column("stage", sa.String(length=40), nullable=True))
