"""Adds the home that has a file's bytes."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Adds the column. For existing files the home is not known."""
    op.add_column("files", sa.Column("node", sa.String(64)))


def downgrade() -> None:
    """Drops the column."""
    op.drop_column("files", "node")
