"""Adds what the network between boxes was measured to do, and the measurement that a box is to take part in."""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Adds an empty table, and two empty columns of boxes."""
    op.create_table(
        "network_rates",
        sa.Column("head", sa.String(64), primary_key=True),
        sa.Column("source", sa.String(64), primary_key=True),
        sa.Column("target", sa.String(64), primary_key=True),
        sa.Column("bytes_per_s", sa.Double, nullable=False),
        sa.Column("round_trip_s", sa.Double, nullable=False),
        sa.Column("measured_at", sa.Double, nullable=False),
    )
    op.add_column("boxes", sa.Column("probe", sa.JSON, nullable=True))
    op.add_column("boxes", sa.Column("probe_answer", sa.JSON, nullable=True))


def downgrade() -> None:
    """Drops the table and the columns."""
    op.drop_column("boxes", "probe_answer")
    op.drop_column("boxes", "probe")
    op.drop_table("network_rates")
