"""How long allocations waited in their queues, one row for each life of a run in a batch job."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "allocation",
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("cluster", sa.String(), nullable=False),
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("started_at", sa.String(), nullable=False),
        sa.Column("submitted_at", sa.String(), nullable=False),
        sa.Column("eligible_at", sa.String(), nullable=False),
        sa.Column("partition", sa.String(), nullable=False),
        sa.Column("nodes", sa.Integer(), nullable=False),
        sa.Column("gpus", sa.Integer(), nullable=False),
        sa.Column("limit_s", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("kind", "cluster", "job_id", "started_at", name=op.f("pk_allocation")),
    )


def downgrade() -> None:
    op.drop_table("allocation")
