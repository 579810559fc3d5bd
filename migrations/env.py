"""Run by Alembic, in a connection that grader.db opened. There is no ini file: `tilegrade db` is the only door."""

from __future__ import annotations

from typing import Any, Literal

import sqlalchemy as sa
from alembic import context
from alembic.autogenerate.api import AutogenContext

from grader.models import Base, UtcDateTime


def render_item(kind: str, item: Any, autogen: AutogenContext) -> str | Literal[False]:  # noqa: ARG001
    """Write plain column types: a migration must not change its meaning when a class of ours does."""
    if kind == "type" and isinstance(item, UtcDateTime):
        return "sa.DateTime(timezone=True)"
    if kind == "type" and isinstance(item, sa.Enum):
        return f"sa.String(length={item.length})"
    return False


connection = context.config.attributes["connection"]
context.configure(
    connection=connection,
    target_metadata=Base.metadata,
    render_as_batch=True,  # SQLite cannot alter in place
    render_item=render_item,
    compare_server_default=True,
    transactional_ddl=True,  # both can roll a half-done migration back; SQLite once we open the transaction ourselves
)
context.run_migrations()
