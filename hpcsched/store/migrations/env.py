"""Run by Alembic: applies the revisions on the connection that `Database` hands over."""

from __future__ import annotations

from alembic import context

from hpcsched.store.models import Base

# SQLite cannot alter most of a table in place: `batch` copies it. No separate transactions: the whole
# upgrade happens inside the caller's, so that two processes cannot both do it, and none half.
context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    render_as_batch=True,
)
context.run_migrations()
