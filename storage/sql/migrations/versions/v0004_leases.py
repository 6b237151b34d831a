"""Adds dispatchers, and each job's dispatcher, home and number of lost attempts."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Adds the table and the columns. Existing jobs have no dispatcher; the one that claims them has their folders."""
    op.create_table(
        "dispatchers",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("node", sa.String(64), nullable=False),
        sa.Column("machine", sa.String(64), nullable=False),
        sa.Column("heartbeat", sa.BigInteger, nullable=False),
        sa.Column("expires_at", sa.Double),
    )
    op.add_column("jobs", sa.Column("node", sa.String(64)))
    op.add_column("jobs", sa.Column("lease_holder", sa.String(64)))
    op.add_column("jobs", sa.Column("num_lost", sa.Integer, nullable=False, server_default="0"))


def downgrade() -> None:
    """Drops the columns and the table."""
    for column in ("num_lost", "lease_holder", "node"):
        op.drop_column("jobs", column)
    op.drop_table("dispatchers")
