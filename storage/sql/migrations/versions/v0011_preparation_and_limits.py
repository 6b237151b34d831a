"""Adds a job's preparation progress, its last launch and its place in the queue, and the limits of API keys."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Adds the columns. Existing keys have the limits of the settings. Queued jobs that have run keep their place."""
    op.add_column("jobs", sa.Column("preparation", sa.JSON, nullable=True))
    op.add_column("jobs", sa.Column("launched_at", sa.Double, nullable=True))
    op.add_column("jobs", sa.Column("keeps_place", sa.Boolean, nullable=False, server_default=sa.false()))
    op.execute("UPDATE jobs SET launched_at = started_at")
    op.execute("UPDATE jobs SET keeps_place = true WHERE attempt > 0 AND status = 'queued'")
    op.add_column("api_keys", sa.Column("limits", sa.JSON, nullable=True))


def downgrade() -> None:
    """Drops the columns."""
    op.drop_column("api_keys", "limits")
    op.drop_column("jobs", "keeps_place")
    op.drop_column("jobs", "launched_at")
    op.drop_column("jobs", "preparation")
