"""Programs that have said that they are parallel."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "parallel_program",
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("program", sa.String(), nullable=False),
        sa.Column("said_at", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("model", "program", name="pk_parallel_program"),
    )


def downgrade() -> None:
    op.drop_table("parallel_program")
