"""Boards: late days, anonymity, the GPU of a result, frozen boards

Revision: 0002, after 0001. Written 2026-11-30.
"""

from __future__ import annotations

import json

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("course_assignment") as batch:
        batch.add_column(sa.Column("late_days", sa.Integer(), nullable=False, server_default="0"))
        batch.add_column(sa.Column("late_percent", sa.Double(), nullable=False, server_default="0"))
    with op.batch_alter_table("enrollment") as batch:
        batch.add_column(sa.Column("anonymous", sa.Boolean(), nullable=False, server_default=sa.false()))
    with op.batch_alter_table("result") as batch:
        batch.add_column(sa.Column("gpu", sa.String(length=120), nullable=True))
        batch.add_column(sa.Column("limit_share", sa.Double(), nullable=True))
    _name_gpus()

    op.create_table(
        "board",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("course_assignment_id", sa.Integer(), nullable=False),
        sa.Column("title", sa.String(length=100), nullable=False),
        sa.Column("gpu", sa.String(length=120), nullable=True),
        sa.Column("until", sa.DateTime(timezone=True), nullable=True),
        sa.Column("frozen_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("frozen_by", sa.Integer(), nullable=True),
        sa.Column("withdrawn_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("idempotency_key", sa.String(length=64), nullable=False),
        sa.ForeignKeyConstraint(
            ["course_assignment_id"], ["course_assignment.id"], name="fk_board_course_assignment_id_course_assignment"
        ),
        sa.ForeignKeyConstraint(["frozen_by"], ["user_account.id"], name="fk_board_frozen_by_user_account"),
        sa.PrimaryKeyConstraint("id", name="pk_board"),
        sa.UniqueConstraint(
            "course_assignment_id", "idempotency_key", name="uq_board_course_assignment_id_idempotency_key"
        ),
    )
    op.create_table(
        "board_entry",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("board_id", sa.Integer(), nullable=False),
        sa.Column("place", sa.Integer(), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("shared", sa.Boolean(), nullable=False),
        sa.Column("user_id", sa.Integer(), nullable=False),
        sa.Column("submission_id", sa.Integer(), nullable=False),
        sa.Column("submitted_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("days_late", sa.Integer(), nullable=False),
        sa.Column("verdict", sa.String(length=16), nullable=False),
        sa.Column("points", sa.Double(), nullable=False),
        sa.Column("out_of", sa.Double(), nullable=False),
        sa.Column("withheld", sa.Double(), nullable=False),
        sa.Column("provisional", sa.Boolean(), nullable=False),
        sa.Column("speedup", sa.Double(), nullable=True),
        sa.Column("gpu", sa.String(length=120), nullable=True),
        sa.Column("limit_share", sa.Double(), nullable=True),
        sa.Column("hand_ins", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["board_id"], ["board.id"], name="fk_board_entry_board_id_board"),
        sa.ForeignKeyConstraint(["submission_id"], ["submission.id"], name="fk_board_entry_submission_id_submission"),
        sa.ForeignKeyConstraint(["user_id"], ["user_account.id"], name="fk_board_entry_user_id_user_account"),
        sa.PrimaryKeyConstraint("id", name="pk_board_entry"),
        sa.UniqueConstraint("board_id", "place", name="uq_board_entry_board_id_place"),
    )
    op.create_index("ix_board_entry_submission_id", "board_entry", ["submission_id"])
    op.create_index("ix_board_entry_user_id", "board_entry", ["user_id"])


def _name_gpus() -> None:
    """The GPU of every result that there is, from its measurements. Results of the interpreter need nothing."""
    result = sa.table("result", sa.column("submission_id"), sa.column("examination"), sa.column("gpu"))
    connection = op.get_bind()
    ids = connection.scalars(sa.select(result.c.submission_id)).all()
    for submission_id in ids:  # one at a time: an examination with its error maps is large
        mine = result.c.submission_id == submission_id
        device = json.loads(connection.scalars(sa.select(result.c.examination).where(mine)).one()).get("device", {})
        if device.get("kind") == "cuda":
            connection.execute(sa.update(result).where(mine).values(gpu=str(device.get("name", ""))[:120]))


def downgrade() -> None:
    op.drop_table("board_entry")
    op.drop_table("board")
    with op.batch_alter_table("result") as batch:
        batch.drop_column("limit_share")
        batch.drop_column("gpu")
    with op.batch_alter_table("enrollment") as batch:
        batch.drop_column("anonymous")
    with op.batch_alter_table("course_assignment") as batch:
        batch.drop_column("late_percent")
        batch.drop_column("late_days")
