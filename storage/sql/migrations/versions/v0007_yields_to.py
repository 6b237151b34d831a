"""Adds the job of higher priority for which a running job is preempted."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Adds the column. No existing job is being preempted."""
    op.add_column("jobs", sa.Column("yields_to", sa.String(64)))


def downgrade() -> None:
    """Drops the column."""
    op.drop_column("jobs", "yields_to")
