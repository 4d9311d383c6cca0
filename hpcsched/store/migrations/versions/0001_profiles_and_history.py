"""Profiles with their samples, runs, and the history of finished jobs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "profile",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("device", sa.String(), nullable=False),
        sa.Column("nodes", sa.Integer(), nullable=False),
        sa.Column("global_batch", sa.Integer(), nullable=False),
        sa.Column("software", sa.String(), nullable=False),
        sa.Column("source", sa.String(), nullable=False),
        sa.Column("document", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_profile"),
        sa.UniqueConstraint("model", "device", "nodes", "global_batch", "software", name="uq_profile"),
    )
    op.create_table(
        "profile_sample",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("profile_id", sa.Integer(), nullable=False),
        sa.Column("gpus", sa.Integer(), nullable=False),
        sa.Column("rate", sa.Double(), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("at", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_profile_sample"),
        sa.ForeignKeyConstraint(
            ["profile_id"], ["profile.id"], name="fk_profile_sample_profile", ondelete="CASCADE"
        ),
    )
    op.create_index("ix_profile_sample_profile_id", "profile_sample", ["profile_id"])
    op.create_table(
        "run",
        sa.Column("run_id", sa.String(), nullable=False),
        sa.Column("directory", sa.String(), nullable=False),
        sa.Column("host", sa.String(), nullable=False),
        sa.Column("policy", sa.String(), nullable=False),
        sa.Column("gpus", sa.Integer(), nullable=False),
        sa.Column("allocation", sa.String(), nullable=False),
        sa.Column("started_at", sa.String(), nullable=False),
        sa.Column("ended_at", sa.String(), nullable=True),
        sa.PrimaryKeyConstraint("run_id", name="pk_run"),
    )
    op.create_table(
        "history",
        sa.Column("run_id", sa.String(), nullable=False),
        sa.Column("job_id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("model", sa.String(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("exit", sa.Integer(), nullable=True),
        sa.Column("submit_s", sa.Double(), nullable=False),
        sa.Column("start_s", sa.Double(), nullable=True),
        sa.Column("end_s", sa.Double(), nullable=False),
        sa.Column("submit_at", sa.String(), nullable=False),
        sa.Column("start_at", sa.String(), nullable=True),
        sa.Column("end_at", sa.String(), nullable=False),
        sa.Column("gpu_hours", sa.Double(), nullable=False),
        sa.Column("steps", sa.Integer(), nullable=True),
        sa.Column("steps_repeated", sa.Integer(), nullable=True),
        sa.Column("suspensions", sa.Integer(), nullable=False),
        sa.Column("gpus_max", sa.Integer(), nullable=False),
        sa.Column("attempts", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "job_id", name="pk_history"),
        sa.ForeignKeyConstraint(["run_id"], ["run.run_id"], name="fk_history_run", ondelete="CASCADE"),
    )
    op.create_index("ix_history_end_at", "history", ["end_at"])


def downgrade() -> None:
    op.drop_table("history")
    op.drop_table("run")
    op.drop_table("profile_sample")
    op.drop_table("profile")
