"""Finished jobs have the most memory that their processes had resident; NULL: not measured."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("history", sa.Column("max_rss_bytes", sa.Integer(), nullable=True))


def downgrade() -> None:
    with op.batch_alter_table("history") as table:  # before 3.35 SQLite cannot drop a column
        table.drop_column("max_rss_bytes")
