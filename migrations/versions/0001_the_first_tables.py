"""The first tables

Revision: 0001, after None. Written 2026-11-30.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "course",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("slug", sa.String(length=64), nullable=False),
        sa.Column("title", sa.String(length=200), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_course"),
        sa.UniqueConstraint("slug", name="uq_course_slug"),
    )
    op.create_table(
        "login_failure",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("address", sa.String(length=64), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_login_failure"),
    )
    op.create_index("ix_login_failure_address_at", "login_failure", ["address", "at"])
    op.create_index("ix_login_failure_name_address_at", "login_failure", ["name", "address", "at"])

    op.create_table(
        "user_account",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("password_hash", sa.String(length=255), nullable=False),
        sa.Column("is_staff", sa.Boolean(), nullable=False),
        sa.Column("active", sa.Boolean(), nullable=False),
        sa.Column("session_epoch", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_user_account"),
        sa.UniqueConstraint("name", name="uq_user_account_name"),
    )
    op.create_table(
        "course_assignment",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("course_id", sa.Integer(), nullable=False),
        sa.Column("slug", sa.String(length=64), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("device", sa.String(length=16), nullable=False),
        sa.Column("opens_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("deadline", sa.DateTime(timezone=True), nullable=True),
        sa.Column("closed_reason", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["course_id"], ["course.id"], name="fk_course_assignment_course_id_course"),
        sa.PrimaryKeyConstraint("id", name="pk_course_assignment"),
        sa.UniqueConstraint("course_id", "slug", name="uq_course_assignment_course_id_slug"),
    )
    op.create_index("ix_course_assignment_slug", "course_assignment", ["slug"])

    op.create_table(
        "enrollment",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("course_id", sa.Integer(), nullable=False),
        sa.Column("user_id", sa.Integer(), nullable=False),
        sa.Column("role", sa.String(length=16), nullable=False),
        sa.Column("nickname", sa.String(length=64), nullable=False),
        sa.ForeignKeyConstraint(["course_id"], ["course.id"], name="fk_enrollment_course_id_course"),
        sa.ForeignKeyConstraint(["user_id"], ["user_account.id"], name="fk_enrollment_user_id_user_account"),
        sa.PrimaryKeyConstraint("id", name="pk_enrollment"),
        sa.UniqueConstraint("course_id", "nickname", name="uq_enrollment_course_id_nickname"),
        sa.UniqueConstraint("course_id", "user_id", name="uq_enrollment_course_id_user_id"),
    )
    op.create_index("ix_enrollment_user_id", "enrollment", ["user_id"])

    op.create_table(
        "extension",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("course_assignment_id", sa.Integer(), nullable=False),
        sa.Column("user_id", sa.Integer(), nullable=False),
        sa.Column("until", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["course_assignment_id"],
            ["course_assignment.id"],
            name="fk_extension_course_assignment_id_course_assignment",
        ),
        sa.ForeignKeyConstraint(["user_id"], ["user_account.id"], name="fk_extension_user_id_user_account"),
        sa.PrimaryKeyConstraint("id", name="pk_extension"),
        sa.UniqueConstraint("course_assignment_id", "user_id", name="uq_extension_course_assignment_id_user_id"),
    )
    op.create_index("ix_extension_user_id", "extension", ["user_id"])

    op.create_table(
        "submission",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("user_id", sa.Integer(), nullable=False),
        sa.Column("course_assignment_id", sa.Integer(), nullable=False),
        sa.Column("filename", sa.String(length=200), nullable=True),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("source_sha256", sa.String(length=64), nullable=False),
        sa.Column("source_bytes", sa.Integer(), nullable=False),
        sa.Column("assignment_digest", sa.String(length=64), nullable=False),
        sa.Column("idempotency_key", sa.String(length=64), nullable=False),
        sa.Column("device", sa.String(length=16), nullable=False),
        sa.Column("submitted_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("queued_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("lost_attempts", sa.Integer(), nullable=False),
        sa.Column("lease_until", sa.DateTime(timezone=True), nullable=True),
        sa.Column("worker", sa.String(length=120), nullable=True),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("stage", sa.String(length=40), nullable=True),
        sa.Column("fraction", sa.Double(), nullable=True),
        sa.Column("fault_note", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(
            ["course_assignment_id"],
            ["course_assignment.id"],
            name="fk_submission_course_assignment_id_course_assignment",
        ),
        sa.ForeignKeyConstraint(["user_id"], ["user_account.id"], name="fk_submission_user_id_user_account"),
        sa.PrimaryKeyConstraint("id", name="pk_submission"),
        sa.UniqueConstraint("user_id", "idempotency_key", name="uq_submission_user_id_idempotency_key"),
    )
    op.create_index(
        "ix_submission_course_assignment_id_submitted_at", "submission", ["course_assignment_id", "submitted_at"]
    )
    op.create_index("ix_submission_state_device_queued_at", "submission", ["state", "device", "queued_at"])
    op.create_index(
        "ix_submission_user_id_course_assignment_id_submitted_at",
        "submission",
        ["user_id", "course_assignment_id", "submitted_at"],
    )
    op.create_index("ix_submission_user_id_started_at", "submission", ["user_id", "started_at"])

    op.create_table(
        "audit_event",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("actor_id", sa.Integer(), nullable=True),
        sa.Column("action", sa.String(length=40), nullable=False),
        sa.Column("submission_id", sa.Integer(), nullable=True),
        sa.Column("detail", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["actor_id"], ["user_account.id"], name="fk_audit_event_actor_id_user_account"),
        sa.ForeignKeyConstraint(["submission_id"], ["submission.id"], name="fk_audit_event_submission_id_submission"),
        sa.PrimaryKeyConstraint("id", name="pk_audit_event"),
    )
    op.create_index("ix_audit_event_at", "audit_event", ["at"])
    op.create_index("ix_audit_event_submission_id_at", "audit_event", ["submission_id", "at"])

    op.create_table(
        "result",
        sa.Column("submission_id", sa.Integer(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("examination", sa.Text(), nullable=False),
        sa.Column("measured_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("grade", sa.Text(), nullable=False),
        sa.Column("verdict", sa.String(length=16), nullable=False),
        sa.Column("points", sa.Double(), nullable=False),
        sa.Column("out_of", sa.Double(), nullable=False),
        sa.Column("withheld", sa.Double(), nullable=False),
        sa.Column("fault", sa.String(length=64), nullable=True),
        sa.Column("speedup", sa.Double(), nullable=True),
        sa.Column("speedup_low", sa.Double(), nullable=True),
        sa.Column("speedup_high", sa.Double(), nullable=True),
        sa.Column("provisional", sa.Boolean(), nullable=False),
        sa.Column("released", sa.Boolean(), nullable=False),
        sa.Column("released_verdict", sa.String(length=16), nullable=False),
        sa.Column("judged_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("assignment_digest", sa.String(length=64), nullable=False),
        sa.ForeignKeyConstraint(["submission_id"], ["submission.id"], name="fk_result_submission_id_submission"),
        sa.PrimaryKeyConstraint("submission_id", name="pk_result"),
    )
    op.create_index("ix_result_verdict", "result", ["verdict"])

    op.create_table(
        "worker",
        sa.Column("name", sa.String(length=120), nullable=False),
        sa.Column("device", sa.String(length=16), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("seen_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("submission_id", sa.Integer(), nullable=True),
        sa.Column("note", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["submission_id"], ["submission.id"], name="fk_worker_submission_id_submission"),
        sa.PrimaryKeyConstraint("name", name="pk_worker"),
    )


def downgrade() -> None:
    op.drop_table("worker")
    op.drop_table("result")
    op.drop_table("audit_event")
    op.drop_table("submission")
    op.drop_table("extension")
    op.drop_table("enrollment")
    op.drop_table("course_assignment")
    op.drop_table("user_account")
    op.drop_table("login_failure")
    op.drop_table("course")
