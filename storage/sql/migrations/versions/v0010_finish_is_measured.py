"""Adds a flag that a job's estimated finish follows from measured steps."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Adds the column. For existing times it is not known, so they count as estimates."""
    op.add_column("jobs", sa.Column("finish_is_measured", sa.Boolean, nullable=False, server_default=sa.false()))


def downgrade() -> None:
    """Drops the column."""
    op.drop_column("jobs", "finish_is_measured")
