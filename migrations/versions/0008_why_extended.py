"""Why an extension was granted

Revision: 0008, after 0007. Written 2026-11-30.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("extension") as batch:
        batch.add_column(sa.Column("reason", sa.String(400), nullable=False, server_default=sa.text("''")))


def downgrade() -> None:
    with op.batch_alter_table("extension") as batch:
        batch.drop_column("reason")
