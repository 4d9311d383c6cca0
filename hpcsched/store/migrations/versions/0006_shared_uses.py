"""What runs have found out of models that share devices."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "shared_use",
        sa.Column("device", sa.String(), nullable=False),
        sa.Column("models", sa.String(), nullable=False),
        sa.Column("memory_mib", sa.Double(), nullable=True),
        sa.Column("busy", sa.Double(), nullable=True),
        sa.Column("together", sa.Double(), nullable=True),
        sa.Column("seen_at", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("device", "models", name="pk_shared_use"),
    )


def downgrade() -> None:
    op.drop_table("shared_use")
