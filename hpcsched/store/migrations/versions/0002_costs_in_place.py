"""Profiles may say what a change of GPU count in place costs.

They are documents, so no table changes; but an earlier hpcsched would not understand such a document, and
now says so when it opens the database.
"""

from __future__ import annotations

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """The tables stay as they are."""


def downgrade() -> None:
    """The tables stay as they are."""
