"""Trials: what came of the configurations that searches have tried."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "trial",
        sa.Column("run_id", sa.String(), nullable=False),
        sa.Column("trial", sa.Integer(), nullable=False),
        sa.Column("bracket", sa.Integer(), nullable=False),
        sa.Column("args", sa.JSON(), nullable=False),
        sa.Column("unit", sa.String(), nullable=False),
        sa.Column("budget", sa.Double(), nullable=False),
        sa.Column("metric", sa.String(), nullable=False),
        sa.Column("value", sa.Double(), nullable=True),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("best", sa.Boolean(), nullable=False),
        sa.Column("job", sa.String(), nullable=False),
        sa.Column("checkpoint", sa.String(), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["run.run_id"], name="fk_trial_run", ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "trial", name="pk_trial"),
    )


def downgrade() -> None:
    op.drop_table("trial")
